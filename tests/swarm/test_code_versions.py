"""Pins live edits of an agent's code:

1. a group holds one version, unless `job.mix_code_versions`; a change of code ends the short groups of the old one;
2. what became of each version is counted, of the newest 20, the same after a restart;
3. each version's rewards in a batch are a metric; its first use is an event.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentjet.errors import Later
from agentjet.swarm.journal import CODE_VERSIONS_KEPT
from tests.swarm.world import LEASE, World

Make = Callable[..., World]


def test_a_group_holds_one_version(make_world: Make) -> None:
    world = make_world(batch_size=3)
    old, new, other = (world.begin("g", code_version=version) for version in ("v1", "v2", "v1"))
    assert old.group_id == other.group_id != new.group_id
    assert [group.code_version for group in world.reopen().queries.groups] == ["v1", "v2"]
    assert world.begin("g", code_version="v2").group_id == new.group_id
    assert world.begin("g").group_id not in (old.group_id, new.group_id)


def test_versions_mix_when_told_to(make_world: Make) -> None:
    world = make_world(mix_code_versions=True)
    assert world.begin("g", code_version="v1").group_id == world.begin("g", code_version="v2").group_id


def test_a_group_holds_one_task_set(world: World) -> None:
    assert world.begin("g", task_set="x").group_id != world.begin("g", task_set="y").group_id


def test_a_change_of_code_ends_the_short_groups_of_the_old(make_world: Make) -> None:
    """No batch waits for an episode that no client will begin; what is at work is left to end."""
    world = make_world(group_size=3, batch_size=9)
    enough = world.play("a", 0, 1, code_version="v1")
    [alone] = world.play("b", 1, code_version="v1")
    running = world.begin("c", code_version="v1")
    others = world.play("a", 1, client_id="other", code_version="v1")
    world.begin("a", code_version="v2")
    assert world.swarm.queries.num_groups("complete") == 0  # v1 is still at work
    world.call(running, 7)
    world.finish(running, 1.0)
    world.begin("a", code_version="v2")
    assert [world.swarm.episode(e.id).dropped for e in (alone, running)] == ["too_few", "too_few"]
    assert {(g.state, g.reason) for g in world.swarm.queries.groups if enough[0].id in g.members} == {
        ("complete", "short")
    }
    assert {g.state for g in world.swarm.queries.groups if others[0].id in g.members} == {"open"}
    assert world.now == 1000.0, "nobody waited"


def test_a_change_of_code_makes_room_in_a_full_batch(make_world: Make) -> None:
    world = make_world(group_size=3, min_group_size=3, batch_size=1)
    world.play("a", 0, 1, code_version="v1")
    with pytest.raises(Later):
        world.begin("b", code_version="v1")
    assert world.begin("a", code_version="v2").status == "live"
    assert world.journal.outcomes()["dropped"] == 2


def test_two_versions_side_by_side_leave_each_other_alone(make_world: Make) -> None:
    world = make_world(group_size=3, batch_size=2)
    world.play("a", 0, 1, code_version="v1")
    world.begin("a", code_version="v1")
    world.begin("b", code_version="v2")
    assert [(group.state, len(group.members)) for group in world.swarm.queries.groups] == [("open", 3), ("open", 1)]


def test_what_became_of_each_version_is_counted(make_world: Make) -> None:
    world = make_world(batch_size=3, group_size=2)
    world.play("a", 0, 1, code_version="v1")
    world.abort(world.begin("b", code_version="v1"))
    world.play("b", 0.25, code_version="v2")
    world.begin("c", code_version="v1")
    world.finish(world.begin("d", mode="eval", code_version="v1"), 1.0)
    world.begin("e")
    for _ in range(2):
        tallies = world.journal.code_versions()
        assert list(tallies) == ["v2", "v1"]
        assert (tallies["v1"].episodes, tallies["v1"].finished, tallies["v1"].aborted) == (4, 2, 1)
        assert (tallies["v1"].reward_mean, tallies["v2"].reward_mean) == (0.5, 0.25)
        world.reopen()
    world.now += LEASE
    world.swarm.reap()
    assert world.journal.code_versions()["v1"].aborted == 2


def test_the_newest_versions_are_kept(make_world: Make) -> None:
    world = make_world(batch_size=100)
    for number in range(CODE_VERSIONS_KEPT + 2):
        world.play(f"g{number}", 1, code_version=f"v{number}")
    kept = world.journal.code_versions()
    assert list(kept) == [f"v{number}" for number in range(2, CODE_VERSIONS_KEPT + 2)]
    world.begin("again", code_version="v0")
    tally = world.journal.code_versions()["v0"]
    assert (tally.episodes, tally.finished, tally.reward_mean) == (1, 0, None)
    assert len(world.journal.code_versions()) == CODE_VERSIONS_KEPT
    before = list(world.journal.code_versions().items())
    assert list(world.reopen().queries.journal.code_versions().items()) == before


def test_a_versions_rewards_are_metrics_and_its_first_use_an_event(make_world: Make) -> None:
    world = make_world(batch_size=2)
    world.play("a", 0, 1, code_version="v1")
    world.play("a", 1, 1, code_version="v2")
    batch = world.swarm.batches.compose()
    world.forest(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["code/v1/reward_mean"], metrics["code/v2/reward_mean"]) == (0.5, 1.0)
    told = [event.body for event in world.journal.events() if event.kind == "code_version"]
    assert told == [{"code_version": version, "client_id": "anonymous"} for version in ("v1", "v2")]
