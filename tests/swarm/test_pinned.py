"""Pins evaluation at one policy version:

1. it begins at the present version only, and the refusal names that;
2. learning waits while pinned episodes are live, reports it, and no longer than they may live;
3. one evaluation after the other does not hold learning up for ever; nothing of it is trained.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest
from tests.swarm.world import LEASE, MAX_SECONDS, World

Make = Callable[..., World]


def full(make_world: Make) -> World:
    """A world whose batch lacks one group."""
    world = make_world(batch_size=2)
    world.play("a", 0, 1)
    return world


def test_only_the_present_version_is_to_be_had(make_world: Make) -> None:
    world = full(make_world)
    for version in (1, 7):
        with pytest.raises(Conflict, match=rf"at policy version 0, not at {version}") as refused:
            world.begin(mode="eval", at_version=version)
        assert refused.value.code == "version_gone"
    assert world.begin(mode="eval", at_version=0).at_version == 0
    with pytest.raises(ValidationError, match="at_version is for mode 'eval'"):
        BeginRequest(task_id="t", at_version=0)


@pytest.mark.parametrize("end", ["finish", "abort", "expire"])
def test_learning_waits_for_pinned_episodes(make_world: Make, end: str) -> None:
    world = full(make_world)
    pinned = world.begin("a", mode="eval", at_version=0)
    world.begin("a", mode="eval")
    world.play("b", 0, 1)
    assert not world.swarm.batches.ready()
    assert world.swarm.queries.waiting_for() == "1 evaluation episode pinned to policy version 0"
    assert not world.reopen().batches.ready()  # it is in the journal
    if end == "expire":
        world.now += LEASE
        world.swarm.reap()
    elif end == "abort":
        world.abort(pinned)
    else:
        world.finish(pinned, 1.0)
    assert pinned.id not in world.swarm.batches.compose().episode_ids


def test_no_pinned_episode_begins_while_the_policy_learns(make_world: Make) -> None:
    world = full(make_world)
    world.play("b", 0, 1)
    batch = world.swarm.batches.compose()
    with pytest.raises(Later) as refused:
        world.begin(mode="eval", at_version=0)
    assert refused.value.code == "not_sampling"
    world.swarm.batches.learned(batch, {})
    with pytest.raises(Conflict, match="at policy version 1, not at 0"):
        world.begin(mode="eval", at_version=0)
    assert world.begin(mode="eval", at_version=1).policy_version == 1


def test_evaluation_without_end_does_not_stop_learning(make_world: Make) -> None:
    world = full(make_world)
    world.play("b", 0, 1)
    complete = world.now
    with pytest.raises(Later) as refused:
        while True:
            world.begin(mode="eval", at_version=0)
            world.now += LEASE - 1
            world.swarm.reap()
            assert not world.swarm.batches.ready()
    assert refused.value.code == "not_sampling" and world.now < complete + MAX_SECONDS + LEASE
    world.now += LEASE
    world.swarm.reap()
    assert world.swarm.batches.ready()
