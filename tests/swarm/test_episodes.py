"""Pins the life of one episode:

1. begin, finish and abort have one effect however often they are retried, with or without an idempotency key;
2. a lease ends an episode that shows no life, `max_episode_seconds` one that shows too much;
3. what ended unscored can never be scored;
4. an id belongs to one episode only, in any run.

The same over HTTP, and a key that was used for another request: `tests/server/test_control.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from agentjet.errors import Conflict
from tests.swarm.world import LEASE, MAX_SECONDS, World


def test_a_retried_begin_may_wait_for_less_time(world: World) -> None:
    assert world.begin(key="k", wait=30.0).id == world.begin(key="k", wait=1.0).id


def test_a_retried_begin_after_a_restart_gives_the_same_episode(world: World) -> None:
    first = world.begin(key="k")
    world.reopen()
    assert world.begin(key="k").id == first.id


def test_two_clients_may_use_the_same_key(world: World) -> None:
    assert world.begin(key="1", client_id="a").id != world.begin(key="1", client_id="b").id


def test_finishing_twice_gives_the_same_answer(world: World) -> None:
    episode = world.begin()
    first = world.finish(episode, 0.5, key="k", metrics={"steps": 3.0})
    assert first.status == "finished" and first.reward == 0.5
    assert world.finish(episode, 0.5, key="k", metrics={"steps": 3.0}) == first
    assert world.finish(episode, 0.5, metrics={"steps": 3.0}) == first
    assert world.journal.outcomes()["finished"] == 1


def test_a_second_reward_or_text_is_refused_not_ignored(world: World) -> None:
    episode = world.begin()
    world.finish(episode, 0.5, key="k", text="two of four")
    for key in ("k", "other", None):
        for reward, text in ((1.0, "two of four"), (0.5, "three of six"), (0.5, "")):
            with pytest.raises(Conflict):
                world.finish(episode, reward, key=key, text=text)
    ended = world.swarm.episode(episode.id)
    assert (ended.reward, ended.reward_text) == (0.5, "two of four")


def test_aborting_twice_gives_the_same_answer(world: World) -> None:
    episode = world.begin()
    first = world.abort(episode, "tool broke", key="k")
    assert (first.status, first.reason, first.reward) == ("aborted", "tool broke", None)
    assert world.abort(episode, "tool broke", key="k") == first == world.abort(episode, "again")


def test_aborting_what_has_expired_is_no_error(world: World) -> None:
    episode = world.begin()
    world.now += LEASE
    assert world.abort(episode).status == "expired"


def test_an_aborted_episode_is_never_scored(world: World) -> None:
    episode = world.begin()
    world.abort(episode)
    with pytest.raises(Conflict) as refused:
        world.finish(episode, 0.0)
    assert refused.value.code == "episode_aborted"


def test_a_failed_evaluation_is_no_failure_of_the_batch(world: World) -> None:
    world.abort(world.begin(mode="eval", group=""))
    assert world.swarm.queries.num_lost == 0
    world.abort(world.begin())
    assert world.swarm.queries.num_lost == 1


def test_silence_expires_an_episode(world: World) -> None:
    episode = world.begin()
    world.now += LEASE - 1
    assert world.swarm.reap() == []
    world.now += 1
    assert [expired.id for expired in world.swarm.reap()] == [episode.id]
    assert "job.lease_seconds = 100" in world.swarm.episode(episode.id).reason


@pytest.mark.parametrize("sign", ["heartbeat", "call"])
def test_a_sign_of_life_renews_the_lease(world: World, sign: str) -> None:
    episode = world.begin()
    world.now += LEASE - 1
    world.swarm.heartbeat(episode.id) if sign == "heartbeat" else world.call(episode, 5)
    assert world.swarm.expires_at(episode) == world.now + LEASE
    world.now += LEASE - 1
    assert world.swarm.reap() == []


def test_only_calls_end_the_silence_of_an_episode(world: World) -> None:
    episode, queries = world.begin(task_id="stuck", client_id="me"), world.swarm.queries
    world.begin("other")
    world.now += 5
    world.call(episode, 5)
    for _ in range(3):
        world.now += LEASE / 2
        for live in queries.store.live():
            world.swarm.heartbeat(live.id)
    assert queries.silence(episode) == (150.0, LEASE, MAX_SECONDS - 155, 0.0)
    other = queries.most_silent()
    assert other is not None and other.group == "other" and queries.silence(other).seconds == 155.0
    with world.swarm.calling(other.id):
        assert queries.silence(other) == (0.0, MAX_SECONDS - 155, MAX_SECONDS - 155, 0.0)
        assert queries.most_silent() == world.swarm.episode(episode.id)
        assert (
            f"; {episode.id} of task stuck, client me, is silent for 2 min 30 s (does a tool hang?): its lease has "
            "1 min 40 s left, the episode at most 14 min 5 s"
        ) in queries.waiting_for()
    world.reopen()
    world.now += 7
    assert {world.swarm.queries.silence(live).seconds for live in world.swarm.live()} == {7.0}


def test_running_evaluations_are_named_while_no_training_episode_is_begun(world: World) -> None:
    wanted = "clients, to begin training episodes"
    assert world.swarm.queries.waiting_for() == wanted
    world.begin("", mode="eval")
    assert world.swarm.queries.waiting_for() == f"{wanted}; 1 evaluation episode at work"


def test_heartbeats_do_not_prolong_an_episode_beyond_its_maximum(world: World) -> None:
    episode = world.begin()
    deadline = world.now + MAX_SECONDS
    while world.now < deadline - 50:
        world.now += 50
        world.swarm.heartbeat(episode.id)
    world.now = deadline
    with pytest.raises(Conflict) as refused:
        world.swarm.heartbeat(episode.id)
    assert refused.value.code == "episode_expired"
    assert "job.max_episode_seconds = 1000" in world.swarm.episode(episode.id).reason


def test_a_late_finish_is_refused_even_when_nobody_reaped(make_world: Callable[..., World]) -> None:
    world = make_world(batch_size=1)
    late, other = world.begin(), world.begin()
    for episode in (late, other):
        world.call(episode, 5)
    world.now += LEASE - 1
    world.swarm.heartbeat(other.id)
    world.now += 1
    with pytest.raises(Conflict) as refused:
        world.finish(late, 1.0, key="k")
    assert refused.value.code == "episode_expired"
    world.finish(other, 0.0)
    substitute = world.begin()
    world.call(substitute, 5)
    world.finish(substitute, 1.0)
    assert world.swarm.batches.compose().episode_ids == (other.id, substitute.id)


def test_the_lease_stands_still_while_the_server_samples(world: World) -> None:
    episode = world.begin()
    with world.swarm.calling(episode.id), world.swarm.calling(episode.id):
        world.now += 5 * LEASE
        assert world.swarm.reap() == []
    assert world.swarm.expires_at(episode) == world.now + LEASE
    with pytest.raises(Conflict), world.swarm.calling(episode.id):
        world.now = episode.begun + MAX_SECONDS
        world.call(episode, 5)


def test_a_call_of_an_ended_episode_is_not_recorded(world: World) -> None:
    episode = world.begin()
    world.finish(episode, 1.0)
    with pytest.raises(Conflict):
        world.call(episode, 5)
    assert world.journal.calls(episode.id) == []


def test_a_restart_begins_leases_anew(world: World) -> None:
    episode = world.begin()
    world.now += 3 * LEASE
    world.reopen()
    assert world.swarm.reap() == []
    assert world.swarm.expires_at(world.swarm.episode(episode.id)) == world.now + LEASE
    world.now = episode.begun + MAX_SECONDS
    assert [e.id for e in world.swarm.reap()] == [episode.id]


def test_ids_are_unique_over_runs_and_sort_by_time(make_world: Callable[..., World]) -> None:
    runs = [make_world(), make_world()]
    ids = [run.begin(mode="eval").id for _ in range(3) for run in runs]
    runs[0].now += 1
    last = runs[0].begin(mode="eval").id
    assert len(set(ids)) == 6 and all(episode_id < last for episode_id in ids)
    assert all(re.fullmatch(r"ep_[0-9a-f]{27}", episode_id) for episode_id in ids), "it stands in URLs as it is"


def test_clients_are_shown_with_when_they_were_last_seen(world: World) -> None:
    a = world.begin(client_id="a")
    world.now += 5
    world.begin(client_id="b")
    assert world.swarm.queries.leases.clients == {"a": 1000.0, "b": 1005.0}
    world.now += 5
    world.swarm.heartbeat(a.id)
    assert list(world.swarm.queries.leases.clients.items()) == [("b", 1005.0), ("a", 1010.0)]
