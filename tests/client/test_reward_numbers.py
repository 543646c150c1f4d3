"""All that Python takes for a number is one in a reward, and is sent as a float. The rest is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentjet.client.episode import checked_reward, finish_body
from agentjet.errors import InvalidRequest
from agentjet.protocol import FinishRequest
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
    with pytest.raises(InvalidRequest, match=r"^metrics\['solved'\] is "):
        checked_reward(Reward(1.0, metrics={"solved": wrong}))
    with pytest.raises(InvalidRequest, match=r"^by_turn\[''\]\[0\] is "):
        checked_reward(Reward(1.0, by_turn=[wrong]))


def test_a_map_of_numbers_is_a_map() -> None:
    with pytest.raises(InvalidRequest, match=r"^metrics is \[1\]: give numbers by name"):
        checked_reward(Reward(1.0, metrics=[1]))  # type: ignore[arg-type]


def test_booleans_are_numbers_over_http_and_text_is_not() -> None:
    body = FinishRequest.model_validate_json(
        '{"reward": true, "metrics": {"solved": false}, "by_turn": {"": [true]}, "by_call": {"c": true}}'
    )
    assert (body.reward, body.metrics, body.by_turn, body.by_call) == (1.0, {"solved": 0.0}, {"": [1.0]}, {"c": 1.0})
    for wrong in ('"1"', "null", "[1]", "NaN"):
        with pytest.raises(ValidationError):
            FinishRequest.model_validate_json(f'{{"reward": {wrong}}}')
