"""Pins the promise of a reward, the first half of a finish that several servers make as one:

1. a prepared episode makes no calls, has no lease, and is neither trained nor lost until it is decided;
2. what was promised is granted, also after a restart and when the group was dropped since; nothing else is;
3. it keeps its place in its group, which is not complete without it;
4. one that is never decided ends unscored, counted as in doubt, a lease after its `max_episode_seconds`;
5. every request can be repeated, and the books balance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentjet.errors import Conflict
from agentjet.protocol import FinishRequest
from agentjet.swarm import Episode
from tests.swarm.world import LEASE, MAX_SECONDS, World

Make = Callable[..., World]


def spoken(world: World, group: str = "g", **request: Any) -> Episode:
    """A live episode with one call."""
    episode = world.begin(group, **request)
    world.call(episode, 7)
    return episode


def code_of(refused: pytest.ExceptionInfo[Conflict]) -> str:
    return refused.value.code


def balanced(world: World) -> bool:
    counts = world.swarm.queries.status_counts()
    return counts["finished"] == counts["trained"] + counts["waiting"] + counts["dropped"]


def test_a_promise_is_kept_after_a_restart(make_world: Make) -> None:
    world = make_world(batch_size=1)
    promised, other = spoken(world), spoken(world)
    told = world.prepare(promised, 0.5, by_role={"critic": 0.25}, metrics={"tools": 2.0})
    assert (told.status, told.reward, told.ended) == ("prepared", 0.5, None)
    assert world.swarm.queries.status_counts()["prepared"] == 1
    world.finish(other, 0.0)
    assert not world.swarm.batches.ready()
    world.reopen()
    assert world.swarm.episode(promised.id) == told
    done = world.finish(promised, 0.5, by_role={"critic": 0.25}, metrics={"tools": 2.0})
    assert (done.status, done.reward, done.num_calls) == ("finished", 0.5, 1)
    assert world.swarm.batches.compose().episode_ids == (promised.id, other.id)
    assert world.swarm.queries.status_counts()["prepared"] == 0 and balanced(world)


def test_a_prepared_episode_makes_no_calls_and_needs_no_sign_of_life(world: World) -> None:
    episode = spoken(world)
    world.prepare(episode, 1.0)
    with pytest.raises(Conflict) as refused:
        world.call(episode, 8)
    assert code_of(refused) == "episode_prepared"
    with pytest.raises(Conflict), world.swarm.calling(episode.id):
        pass
    world.now += 5 * LEASE
    assert world.swarm.reap() == []
    assert world.swarm.heartbeat(episode.id).status == "prepared"


def test_only_what_was_promised_is_granted(world: World) -> None:
    episode = spoken(world)
    first = world.prepare(episode, 1.0, key="k")
    assert world.prepare(episode, 1.0, key="k") == first == world.prepare(episode, 1.0)
    for refuse in (world.prepare, world.finish):
        with pytest.raises(Conflict, match=r"promised reward 1\.0") as refused:
            refuse(episode, 0.0)
        assert code_of(refused) == "episode_prepared"
    with pytest.raises(Conflict):
        world.finish(episode, 1.0, metrics={"other": 1.0})
    done = world.finish(episode, 1.0)
    assert world.finish(episode, 1.0) == done == world.prepare(episode, 1.0)
    assert world.prepare(episode, 1.0, key="k") == done  # late, and sent before the finish
    with pytest.raises(Conflict) as refused:
        world.abort(episode)
    assert code_of(refused) == "episode_finished"


def test_a_promise_can_be_taken_back(world: World) -> None:
    episode, other = spoken(world), spoken(world)
    world.prepare(episode, 1.0, metrics={"tools": 2.0})
    gone = world.abort(episode, "another member failed")
    assert (gone.status, gone.reward, gone.metrics) == ("aborted", None, {})
    world.reopen()
    assert world.swarm.episode(episode.id) == gone
    for late in (world.finish, world.prepare):
        with pytest.raises(Conflict) as refused:
            late(episode, 1.0)
        assert code_of(refused) == "episode_aborted"
    assert world.swarm.queries.groups[0].members == (other.id,)
    assert spoken(world).group_id == other.group_id


def test_a_late_prepare_is_refused(world: World) -> None:
    episode = spoken(world)
    world.now += LEASE
    with pytest.raises(Conflict) as refused:
        world.prepare(episode, 1.0)
    assert code_of(refused) == "episode_expired"


@pytest.mark.parametrize("decision", ["finish", "abort"])
def test_a_group_is_not_complete_while_a_member_is_prepared(make_world: Make, decision: str) -> None:
    """With a spare member it has its rewards before that: it waits all the same, and no promise ends as surplus."""
    world = make_world(batch_size=1, spare_episodes=2)
    promised, slow = spoken(world), spoken(world)
    world.prepare(promised, 1.0)
    done = [spoken(world), spoken(world)]
    for episode, reward in zip(done, (0.0, 1.0), strict=True):
        world.finish(episode, reward)
    assert not world.swarm.batches.ready()
    assert world.swarm.episode(slow.id).status == "live"
    world.finish(promised, 1.0) if decision == "finish" else world.abort(promised)
    assert world.swarm.episode(slow.id).reason.startswith("surplus")
    kept = [promised.id] if decision == "finish" else []
    assert list(world.swarm.batches.compose().episode_ids) == kept + [episode.id for episode in done]


def test_what_is_never_decided_ends_in_doubt(make_world: Make) -> None:
    world = make_world(batch_size=1, group_size=3)
    doubtful = spoken(world)
    world.prepare(doubtful, 1.0)
    for reward in (0.0, 1.0):
        world.finish(spoken(world), reward)
    deadline = doubtful.begun + MAX_SECONDS + LEASE
    assert world.swarm.next_deadline() == deadline
    world.now = deadline - 1
    assert world.swarm.reap() == [] and not world.swarm.batches.ready()
    world.now = deadline
    [ended] = world.swarm.reap()
    assert (ended.id, ended.status, ended.reward) == (doubtful.id, "expired", None)
    assert ended.reason.startswith("in doubt: ")
    batch = world.swarm.batches.compose()
    assert doubtful.id not in batch.episode_ids
    world.forest(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["episodes/in_doubt"], metrics["episodes/expired"]) == (1.0, 0.0) and balanced(world)


def test_after_a_restart_there_is_a_lease_to_decide(world: World) -> None:
    episode = spoken(world)
    world.prepare(episode, 1.0)
    world.now += 10 * MAX_SECONDS
    world.reopen()
    assert world.swarm.reap() == []
    assert world.swarm.next_deadline() == world.now + LEASE
    assert world.finish(episode, 1.0).status == "finished"


def test_a_promise_outlives_its_group_and_is_counted_as_dropped(make_world: Make) -> None:
    world = make_world(batch_size=1, spare_groups=1)
    promised, waiting = spoken(world, "slow"), spoken(world, "slow")
    world.prepare(promised, 1.0)
    world.play("fast", 0, 1)
    world.swarm.batches.learned(world.swarm.batches.compose(), {})
    assert world.swarm.episode(waiting.id).status == "aborted"
    assert (world.swarm.episode(promised.id).status, world.swarm.queries.groups) == ("prepared", ())
    world.reopen()
    done = world.finish(promised, 1.0)
    assert (done.status, done.dropped) == ("finished", "surplus") and balanced(world)
    assert world.reopen().episode(promised.id) == done


def test_an_eval_episode_can_be_promised(world: World) -> None:
    episode = spoken(world, mode="eval")
    world.prepare(episode, 1.0)
    assert world.finish(episode, 1.0).status == "finished" and world.swarm.queries.status_counts()["waiting"] == 0


def test_a_team_is_found_by_its_name_and_by_status(world: World) -> None:
    mine = [spoken(world, group, team="t1") for group in ("a", "b")]
    spoken(world, "a", team="t2")
    world.prepare(mine[0], 1.0)

    def found(**filters: Any) -> list[str]:
        return [episode.id for episode in world.swarm.queries.recent_episodes(10, **filters)]

    assert found(team="t1") == [mine[1].id, mine[0].id] and len(found()) == 3
    assert found(team="t1", status="prepared") == [mine[0].id]
    assert found(team="t1", status="live") == [mine[1].id]
    world.finish(mine[0], 1.0)
    world.reopen()
    assert found(team="t1", status="finished") == [mine[0].id] and found(status="prepared") == found(team="t3") == []
    assert found(status="live")[1:] == [mine[1].id] and world.swarm.queries.recent_episodes(1)[0].team == "t2"


def test_the_end_is_told_in_events(world: World) -> None:
    episode = spoken(world, team="t1", code_version="v1")
    world.swarm.prepare(episode.id, FinishRequest(reward=0.5))
    world.finish(episode, 0.5)
    bodies = [event.body for event in world.swarm.queries.events() if event.kind == "episode"]
    assert [body["status"] for body in bodies] == ["live", "prepared", "finished"]
    assert {(body["team"], body["code_version"]) for body in bodies} == {("t1", "v1")}
    assert [body.get("reward") for body in bodies] == [None, 0.5, 0.5]
