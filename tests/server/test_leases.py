"""A lease ends without activity of its episode, and never because the server was busy.

While an agent reads its answer the lease runs, from the last chunk that it took.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest

from agentjet.errors import Conflict
from agentjet.front.calls import CallChunk
from agentjet.protocol import BeginRequest, FinishRequest, JobBody
from agentjet.server import gateway
from agentjet.swarm import EpisodeRecord
from agentjet.swarm.journal import Slice
from tests.fakes import Running, job_body, recent_episodes, running, saying

pytestmark = pytest.mark.anyio


async def test_the_status_has_the_version_that_clients_train_to(tmp_path: Path) -> None:
    """Of the clients of the last five minutes, unless the job says it."""
    async with running(tmp_path / "d", job={"batch_size": 9}) as run:
        ends = []
        for client, version in (("a", 20), ("b", 50), ("c", 0)):
            request = BeginRequest(task_id="t", client_id=client, ends_at_version=version)
            begun = await run.gateway.begin(request, idempotency_key=client)
            again = request.model_copy(update={"ends_at_version": version + 1 if version else 0})
            assert (await run.gateway.begin(again, idempotency_key=client)).id == begun.id, "it is only shown"
            ends.append(run.gateway.status().ends_at_version)
        assert ends == [21, 51, 51]
        run.clock.advance(299)
        await run.gateway.begin(BeginRequest(task_id="t", client_id="a"))
        assert run.gateway.status().ends_at_version == 51
        run.clock.advance(2)
        assert run.gateway.status().ends_at_version == 21, "b is gone"
        body = job_body(run.gateway)
        await run.gateway.replace_job(JobBody(revision=body.revision, job={**body.job, "max_steps": 7}))
        assert run.gateway.status().ends_at_version == 7


@pytest.mark.parametrize("end", ["expired", "replaced", "a heartbeat too late"])
async def test_the_end_of_many_episodes_leaves_the_loop_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(gateway, "ENDS_A_ROUND", 3)
    async with running(tmp_path / "d", job={"lease_seconds": 10, "batch_size": 20}) as run:
        requests = [BeginRequest(task_id=f"t{number}", instance_id="a") for number in range(20)]
        episodes = [await run.gateway.begin(request) for request in requests]
        live = [20]

        async def watch() -> None:
            while live[-1] > (1 if end == "replaced" else 0):
                live.append(run.gateway.swarm.queries.journal.outcomes()["live"])
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        if end == "replaced":
            await run.gateway.begin(BeginRequest(task_id="t", instance_id="b"))
        else:
            run.clock.advance(11)
        if end == "a heartbeat too late":
            with pytest.raises(Conflict):
                await run.gateway.heartbeat(episodes[7].id)
            assert run.gateway.swarm.episode(episodes[7].id).status == "expired"
        await run.until(watching.done)
        assert max(before - after for before, after in pairwise(live)) <= 3


async def test_leases_go_on_ending_after_a_failure_of_the_look_at_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentjet.server.gateway.LEASE_CHECK_SECONDS", 0.001)
    async with running(tmp_path / "d", job={"lease_seconds": 10}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        swarm, real, looks = run.gateway.swarm, run.gateway.swarm.reap, 0

        def failing(most: int) -> list[EpisodeRecord]:
            nonlocal looks
            looks += 1
            if looks < 4:
                raise AssertionError("a bug")
            return real(most)

        swarm.reap = failing  # type: ignore[method-assign]
        run.clock.advance(11)
        await run.until(lambda: recent_episodes(swarm, 1, status="expired") != [])
        assert recent_episodes(swarm, 1)[0].id == episode.id
    assert caplog.text.count("leases could not be checked") == 1


async def test_the_journal_is_pruned_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path / "d") as run:
        store, real, tries = run.gateway.swarm, run.gateway.swarm.unneeded, 0
        await run.until(lambda: not store.is_prune_due)

        def failing() -> list[Slice]:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise AssertionError("a bug")
            return real()

        monkeypatch.setattr(store, "unneeded", failing)
        for number in (1, 2):
            store.is_prune_due = True
            run.gateway.changed.notify()
            await run.until(lambda number=number: tries == number and not store.is_prune_due)
    assert caplog.text.count("the journal could not be pruned") == 1 and "AssertionError: a bug" in caplog.text


async def test_no_lease_expires_while_nobody_is_heard(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"lease_seconds": 10, "max_episode_seconds": 60}) as run:
        first, second = [await run.gateway.begin(BeginRequest(task_id=task)) for task in "ab"]
        run.clock.advance(30)
        run.stopwatch.advance(30)  # The loop was busy with one thing: heartbeats wait in their sockets.
        assert (await run.gateway.heartbeat(first.id)).status == "live"
        assert run.gateway.status().episodes["live"] == 2, "the other one's heartbeat is yet to be read"
        run.clock.advance(9)
        await run.gateway.heartbeat(first.id)
        run.clock.advance(2)
        await run.until(lambda: run.gateway.swarm.episode(second.id).status == "expired")
        assert run.gateway.swarm.episode(first.id).status == "live"
        run.clock.advance(20)
        run.stopwatch.advance(20)
        await run.until(lambda: run.gateway.swarm.episode(first.id).status == "expired")  # Its maximum runs on.


async def test_a_held_call_keeps_its_lease(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"lease_seconds": 10}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        run.compute.may_sample.clear()
        call = asyncio.create_task(run.say(episode.id))
        await run.until(lambda: len(run.compute.asked) == 1)
        run.clock.advance(60)
        run.gateway.swarm.reap()
        run.compute.may_sample.set()
        assert (await call).response.content == "hi"


async def reading(run: Running) -> tuple[str, AsyncGenerator[CallChunk]]:
    """An episode and its answer, which is sampled and of which its agent took the first chunk."""
    episode = await run.gateway.begin(BeginRequest(task_id="t"))
    chunks = run.stream(episode.id)
    await anext(chunks)
    swarm, lease = run.gateway.swarm, run.gateway.swarm.job.lease_seconds
    await run.until(lambda: swarm.expires_at(swarm.episode(episode.id)) == run.clock.now + lease)
    return episode.id, chunks


def lost(run: Running, episode_id: str) -> list[str]:
    return list(run.gateway.swarm.queries.journal.orphans(episode_id).values())


async def test_a_slow_reader_lives_and_a_stalled_one_does_not(tmp_path: Path) -> None:
    async with running(tmp_path / "d", saying(lambda _: "one two"), job={"lease_seconds": 10}) as run:
        episode_id, chunks = await reading(run)
        async with aclosing(chunks):
            for _ in range(3):
                run.clock.advance(9)
                await anext(chunks)
            assert run.gateway.swarm.episode(episode_id).status == "live"
            run.clock.advance(11)
            await run.until(lambda: run.gateway.swarm.episode(episode_id).status == "expired")
            await run.until(lambda: run.gateway.status().calls_active == 0)  # Whether or not the agent reads on.
            assert lost(run, episode_id) == ["undelivered"]
            with pytest.raises(Conflict, match="has ended: expired"):
                await anext(chunks)


async def test_an_answer_has_arrived_once_all_of_it_was_taken(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        taken, chunks = await reading(run)
        assert [chunk async for chunk in chunks][-1].call is not None
        read_to_the_last, others = await reading(run)
        while (await anext(others)).call is None:
            pass
        for episode_id in (taken, read_to_the_last):
            await run.gateway.finish(episode_id, FinishRequest(reward=1.0))
        assert (lost(run, taken), lost(run, read_to_the_last)) == ([], ["undelivered"])
        await others.aclose()


async def test_what_is_still_read_when_the_gateway_closes_is_marked(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        episode_id, chunks = await reading(run)
    await chunks.aclose()
    async with running(tmp_path / "d") as run:
        assert lost(run, episode_id) == ["undelivered"]
