"""Rewards of single calls: by turn or by the id of an answer, into the facts of a batch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from agentjet.errors import Conflict, InvalidRequest
from agentjet.protocol import FinishRequest
from agentjet.recipes.baselines import Grpo
from agentjet.swarm import Journal
from tests.swarm.world import World

Make = Callable[..., World]


def two_turns(world: World) -> tuple[Any, list[str]]:
    """An episode with two calls, and a side call between them; returns the ids of the two."""
    episode = world.begin()
    first = world.call(episode, 5, 6)
    world.call(episode, 9, role="title", untrained="titles")
    second = world.call(episode, 7, parent=first, kept=4)
    return episode, [first.id, second.id]


def test_turns_and_ids_become_facts(make_world: Make) -> None:
    world = make_world(batch_size=1, recipe="mars")
    episode, (first, second) = two_turns(world)
    done = world.finish(episode, 1.0, by_turn={"": [0.25, 0.75]})
    assert done.call_rewards == {first: 0.25, second: 0.75}
    assert world.finish(episode, 1.0, by_turn={"": [0.25, 0.75]}) == done, "the same reward again"
    with pytest.raises(Conflict):
        world.finish(episode, 1.0, by_turn={"": [0.25, 0.5]})
    other, (_, last) = two_turns(world)
    world.finish(other, 0.5, by_call={f"chatcmpl-{last}": -1.0}, metrics={"env_seconds": 2.0})
    world.reopen()
    batch = world.swarm.batches.compose()
    facts = world.training(batch).facts
    assert facts is not None
    assert facts.call_rewards.tolist()[:3] == [0.25, 0.75, pytest.approx(np.nan, nan_ok=True)]
    assert facts.call_rewards[3] == -1.0 and facts.tasks == (("", "t"), ("", "t"))
    assert facts.metrics["env_seconds"].tolist() == [pytest.approx(np.nan, nan_ok=True), 2.0]
    forest = world.forest(batch)
    own = [float(forest["advantage"][forest["call"] == call][0]) for call in range(4)]
    assert own == [1.0, 0.75, -1.0, -1.0]  # the mean of 0.25, 0.75, 0 and -1 is 0


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"by_turn": {"": [1.0, 2.0, 3.0]}}, r"by_turn\[''\] has 3 rewards, and the role has 2 calls that train"),
        ({"by_turn": {"planer": [1.0]}}, r"by_turn\['planer'\]: the episode has no role 'planer'"),
        ({"by_call": {"chatcmpl-x": 1.0}}, r"by_call\['x'\]: the episode has no such call"),
        ({}, "The recipe mars needs rewards of calls: finish the episode with by_turn or by_call"),
    ],
)
def test_wrong_or_missing_rewards_of_calls_are_refused(
    make_world: Make, request_: dict[str, Any], sentence: str
) -> None:
    world = make_world(recipe="mars")
    episode, _ = two_turns(world)
    with pytest.raises(InvalidRequest, match=sentence):
        world.finish(episode, 1.0, **request_)
    assert world.swarm.episode(episode.id).status == "live"
    world.swarm.finish(episode.id, FinishRequest(reward=1.0, by_turn={"": [0.0]}))


def test_a_repeated_finish_does_not_resolve_turns_again(make_world: Make) -> None:
    world = make_world(batch_size=1, recipe="mars")
    episode, (first, second) = two_turns(world)
    world.swarm.undelivered_calls = lambda _: [second]  # The answer is in flight at the end.
    done = world.finish(episode, 1.0, by_turn={"": [0.25, 0.75]})
    assert done.call_rewards == {first: 0.25, second: 0.75}
    assert world.finish(episode, 1.0, by_turn={"": [0.25, 0.75]}) == done
    for other in ({"": [0.25]}, {"": [0.25, 0.75, 1.0]}, {"nobody": [1.0]}, {}):
        with pytest.raises(Conflict, match="has ended"):
            world.finish(episode, 1.0, by_turn=other)


class ComparesTurns(Grpo):
    needs_call_rewards: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("recipe", "first", "second", "equal"),
    [
        ("grpo", [0.0], [1.0], True),  # It does not read them.
        (f"{__name__}:ComparesTurns", [0.0, 1.0], [0.0, 1.0], True),
        (f"{__name__}:ComparesTurns", [1.0], [1.0, 1.0], False),
        (f"{__name__}:ComparesTurns", [1.0, 0.0], [0.0, 1.0], False),
    ],
)
def test_rewards_of_turns_are_variance_for_recipes_that_read_them(
    make_world: Make, recipe: str, first: list[float], second: list[float], equal: bool
) -> None:
    world = make_world(batch_size=1, recipe={"name": recipe, "drop_zero_variance": True})
    for rewards in (first, second):
        episode, _ = two_turns(world)
        world.finish(episode, 1.0, by_turn={"": rewards})
    assert world.swarm.batches.ready() is not equal


def test_the_same_reward_of_another_turn_is_variance(make_world: Make) -> None:
    world = make_world(batch_size=1, recipe={"name": f"{__name__}:ComparesTurns", "drop_zero_variance": True})
    for turn in (0, 1):
        episode, calls = two_turns(world)
        world.finish(episode, 1.0, by_call={calls[turn]: 1.0})
    batch = world.swarm.batches.compose()
    assert world.swarm.batches.learned(batch, {})["groups/zero_variance"] == 0.0


def test_no_call_is_parsed_for_rewards_of_turns(make_world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by `finish`, nor by the close of the group, nor by `learned`: an episode may have megabytes of calls."""
    recipe = {"name": f"{__name__}:ComparesTurns", "drop_zero_variance": True}
    world = make_world(batch_size=1, recipe=recipe)
    begun = [two_turns(world)[0] for _ in range(2)]

    def parsed(*_: object) -> Any:
        raise AssertionError("a call was parsed")

    with monkeypatch.context() as counting:
        counting.setattr(Journal, "calls", parsed)
        for last, episode in enumerate(begun):
            world.finish(episode, 1.0, by_turn={"": [0.5, float(last)]})
        batch = world.swarm.batches.compose()
        assert world.swarm.batches.learned(batch, {})["groups/zero_variance"] == 0.0
