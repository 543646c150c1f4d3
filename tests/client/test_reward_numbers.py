"""All that Python takes for a number is one in a reward, and is sent as a float. The rest is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentjet.client.episode import checked_reward, finish_body
from agentjet.errors import InvalidRequest
from agentjet.protocol import FinishRequest, status_of
from agentjet.types import Reward


class Scalar:
    """A number with a shape but without axes, as a 0-dimensional tensor."""

    shape = ()

    def __float__(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    "one",
    [True, 1, 1.0, np.bool_(True), np.float32(1), np.float64(1), np.int64(1), np.array(1.0), Decimal(1), Scalar()],
)
@pytest.mark.parametrize(
    "place", ["returned", "value", "by_role", "metrics", "by_turn", "by_turn of a role", "by_call"]
)
def test_numbers_are_numbers(one: Any, place: str) -> None:
    rewards: Mapping[str, tuple[Any, dict[str, Any]]] = {
        "returned": (one, {"reward": 1.0}),
        "value": (Reward(one), {"reward": 1.0}),
        "by_role": (Reward(0.5, by_role={"critic": one}), {"by_role": {"critic": 1.0}}),
        "metrics": (Reward(0.5, metrics={"solved": one}), {"metrics": {"solved": 1.0}}),
        "by_turn": (Reward(0.5, by_turn=[one, 0]), {"by_turn": {"": [1.0, 0.0]}}),
        "by_turn of a role": (Reward(0.5, by_turn={"critic": [one]}), {"by_turn": {"critic": [1.0]}}),
        "by_call": (Reward(0.5, by_call={"c": one}), {"by_call": {"c": 1.0}}),
    }
    returned, sent = rewards[place]
    body = finish_body(checked_reward(returned)).model_dump()
    for name, value in sent.items():
        assert body[name] == value and "True" not in repr(body[name])


def test_rewards_of_turns_may_be_an_array() -> None:
    assert finish_body(checked_reward(Reward(1.0, by_turn=np.array([0.5, 1.0])))).by_turn == {"": [0.5, 1.0]}


@pytest.mark.parametrize("wrong", ["1", None, float("nan"), float("inf"), [1.0], np.array([1.0]), b"1", 10**400])
def test_anything_else_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^reward is "):
        checked_reward(wrong)
    with pytest.raises(InvalidRequest, match=r"^reward\['coder'\] is "):
        checked_reward({"coder": wrong}, ("coder",))


PLACES: Mapping[str, Callable[[Any], Reward]] = {
    "reward": Reward,
    "by_role['critic']": lambda wrong: Reward(1.0, by_role={"critic": wrong}),
    "metrics['solved']": lambda wrong: Reward(1.0, metrics={"solved": wrong}),
    "by_turn[1]": lambda wrong: Reward(1.0, by_turn=[0.0, wrong]),
    "by_turn['critic'][0]": lambda wrong: Reward(1.0, by_turn={"critic": [wrong]}),
    "by_call['c']": lambda wrong: Reward(1.0, by_call={"c": wrong}),
}


@pytest.mark.parametrize("wrong", ["1", None, float("nan"), float("-inf"), 1e13, [1.0], np.array([1.0]), b"1", 10**400])
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_number_is_refused_where_the_reward_is_made(place: str, wrong: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"^{re.escape(place)} is .*: (it must be a finite|an agent returns)"
    ) as no:
        PLACES[place](wrong)
    assert (no.value.code, no.value.param, status_of(no.value)) == ("invalid_reward", place, 422)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics": [1]}, r"^metrics is \[1\]: give numbers by name"),
        ({"by_role": 1}, r"^by_role is 1: give numbers by name"),
        ({"by_turn": 0.5}, r"^by_turn is 0\.5: give a list of numbers"),
        ({"by_turn": {"critic": 0.5}}, r"^by_turn\['critic'\] is 0\.5: give a list of numbers"),
        ({"metrics": {"": 1}}, r"^metrics has an empty name"),
    ],
)
def test_the_fields_of_a_reward_have_their_form(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Reward(1.0, **fields)


def test_a_reward_that_was_changed_is_checked_again() -> None:
    reward = Reward(1.0, metrics={"solved": 1})
    dict.update(reward.metrics, solved=float("nan"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^metrics\['solved'\] is nan"):
        checked_reward(reward)


def test_booleans_are_numbers_over_http_and_text_is_not() -> None:
    body = FinishRequest.model_validate_json(
        '{"reward": true, "metrics": {"solved": false}, "by_turn": {"": [true]}, "by_call": {"c": true}}'
    )
    assert (body.reward, body.metrics, body.by_turn, body.by_call) == (1.0, {"solved": 0.0}, {"": [1.0]}, {"c": 1.0})
    for wrong in ('"1"', "null", "[1]", "NaN"):
        with pytest.raises(ValidationError):
            FinishRequest.model_validate_json(f'{{"reward": {wrong}}}')
