"""Pinned here:

1. spare episodes and groups: training closes early, the slowest end as surplus, counted, and never scored;
2. with `max_staleness` as many batches wait as may grow old;
3. what grew too old is dropped and counted, live episodes included, also after a restart;
4. a batch never has a token older than `max_staleness`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentjet.errors import Conflict, Later
from agentjet.swarm import Batch
from tests.swarm.world import World

Make = Callable[..., World]


def learn(world: World) -> Batch:
    batch = world.swarm.batches.compose()
    world.forest(batch)
    world.swarm.batches.learned(batch, {})
    return batch


def test_a_spare_episode_ends_as_surplus_when_its_group_has_enough(make_world: Make) -> None:
    world = make_world(batch_size=1, spare_episodes=1)
    a, b, slow = (world.begin() for _ in range(3))
    with pytest.raises(Later, match="has its 2 episodes"):
        world.begin()
    for episode, reward in ((a, 0.0), (b, 1.0)):
        world.call(episode, 7)
        world.finish(episode, reward)
    assert world.swarm.episode(slow.id).status == "aborted"
    assert world.swarm.episode(slow.id).reason.startswith("surplus")
    with pytest.raises(Conflict, match="surplus"):
        world.finish(slow, 1.0)
    batch = learn(world)
    assert batch.episode_ids == (a.id, b.id)
    assert world.swarm.last_step["episodes/surplus"] == 1 and world.swarm.last_step["episodes/aborted"] == 0


def test_a_spare_episode_never_opens_a_group(make_world: Make) -> None:
    world = make_world(batch_size=2, spare_episodes=1)
    with pytest.raises(Conflict) as refused:
        world.begin("a", join_only=True)
    assert refused.value.code == "group_closed"
    world.play("a", 0, 1)
    with pytest.raises(Conflict):
        world.begin("a", join_only=True)
    world.begin("b")
    assert world.begin("b", join_only=True).group == "b"


def test_a_spare_group_ends_with_the_batch_on_policy(make_world: Make) -> None:
    world = make_world(batch_size=1, spare_groups=1)
    slow = [world.begin("slow"), world.begin("slow")]
    world.call(slow[0], 7)
    world.finish(slow[0], 1.0)
    world.play("fast", 0, 1)
    learn(world)
    assert world.swarm.episode(slow[0].id).dropped == "surplus"
    assert world.swarm.episode(slow[1].id).status == "aborted"
    assert world.swarm.queries.groups == () and world.journal.outcomes()["dropped"] == 1


def test_as_many_batches_wait_as_may_grow_old(make_world: Make) -> None:
    world = make_world(batch_size=1, max_staleness=2)
    for name in ("a", "b", "c"):
        world.play(name, 0, 1)
    with pytest.raises(Later, match="batch has its"):
        world.begin("d")
    batch = world.swarm.batches.compose()
    with pytest.raises(Later, match="batch has its"):  # b and c wait for two batches, d would wait for a third
        world.begin("d")
    world.forest(batch)
    world.swarm.batches.learned(batch, {})
    world.begin("d")
    staleness = []
    for _ in range(2):
        learn(world)
        staleness.append(world.swarm.last_step["batch/staleness_max"])
    assert staleness == [1, 2]


def test_what_grew_too_old_is_dropped_and_counted(make_world: Make) -> None:
    world = make_world(batch_size=1, max_staleness=1, spare_groups=2)
    old = [world.begin("old"), world.begin("old")]
    world.call(old[0], 7)
    world.call(old[1], 7)
    world.finish(old[0], 1.0)
    fresh = [world.begin("fresh"), world.begin("fresh")]  # has no token yet, so it is not old
    world.play("x", 0, 1)
    learn(world)
    assert world.swarm.episode(old[1].id).status == "live"
    world.reopen()
    world.play("y", 0, 1)
    learn(world)
    assert world.swarm.episode(old[0].id).dropped == "stale"
    assert world.swarm.episode(old[1].id).reason.startswith("stale")
    assert {world.swarm.episode(e.id).status for e in fresh} == {"live"}
    for episode, reward in zip(fresh, (0.0, 1.0), strict=True):
        world.call(episode, 7)
        world.finish(episode, reward)
    learn(world)
    assert world.swarm.last_step["batch/staleness_max"] == 0
    assert world.journal.counts("dropped") == {"stale": 1}
    assert world.swarm.last_step["groups/dropped_stale"] == 1 and world.swarm.last_step["episodes/stale"] == 1


def test_the_oldest_version_of_an_episode_is_that_of_any_token(make_world: Make) -> None:
    world = make_world(batch_size=1, max_staleness=2)
    episode = world.begin("a")
    world.call(episode, 7, 8, versions=(2, 1))  # It continued on a replica that has not adopted yet.
    assert world.swarm.episode(episode.id).oldest_version == 1
    world.call(episode, 7, versions=(3,))
    assert world.swarm.episode(episode.id).oldest_version == 1
