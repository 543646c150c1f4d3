"""Group commit.

1. The changes of several tasks in one turn of the loop are committed once, and are on disk before any task continues.
2. A change that fails undoes itself only.
3. No task continues, and no event is sent, before the changes are on disk. The loop goes on. Changes made during the
   wait form the next group, and repeated requests wait, too.
4. If the disk refuses the commit, or one write fails the group, all waiters get `Later` and nothing happened, in
   memory either.
5. An answer whose agent leaves before the changes are on disk was not delivered. If the disk refuses that fact, or an
   end that has it, the next end records it. An answer that is taken after a refused end is delivered.
6. If the disk fails a sync, no waiter succeeds and nothing more is recorded. A new server continues.
7. The same holds if a commit fails with any other error: no waiter hangs or succeeds.
8. The members of a large batch are recorded in slices, with other requests between them, by one commit. If one slice
   fails, nothing of the batch was recorded. A task that is cancelled records the rest.
9. Slices share a turn of the loop until their time is over.
10. If a slice fails, the other changes of the commit are refused as well. All of them can be repeated.
11. After an undone commit, training and the clients that wait look at the state again.
12. Another thread reads the calls of an episode only after they are committed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from agentjet.errors import Conflict, Later, Unavailable
from agentjet.front.calls import CallRequest
from agentjet.front.concurrency import GroupCommit
from agentjet.protocol import BeginRequest, CloseGroupsRequest, FinishRequest, GroupName, status_of
from agentjet.server.fronts import FrontedCalls
from agentjet.swarm import EpisodeRecord, Group, Journal
from agentjet.timeline.tree import ConversationTree
from agentjet.types import Conversation, Message
from tests.fakes import RUN, Running, recent_episodes, running
from tests.fronts_in_process import FrontInProcess
from tests.swarm.world import World, refused_commits

pytestmark = pytest.mark.anyio


def on_disk(data_dir: Path) -> int:
    """Episodes that another process would see."""
    with closing(Journal.open_read_only(data_dir / RUN / "journal.sqlite")) as journal:
        return journal.num_episodes


def statements(run: Running) -> list[str]:
    seen: list[str] = []
    run.gateway.swarm.journal.file.db.set_trace_callback(seen.append)
    return seen


async def begin(run: Running, task: str) -> str:
    return (await run.gateway.begin(BeginRequest(task_id=task, mode="eval"))).id


async def test_many_changes_are_one_commit_and_on_disk_before_anybody_is_told(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await run.gateway.commits.durable()  # what was said while it came up
        seen = statements(run)
        begun = await asyncio.gather(*(begin(run, f"t{i}") for i in range(20)))
        assert seen.count("COMMIT") == 1
        assert on_disk(tmp_path / "d") == len(set(begun)) == 20


async def test_one_that_fails_undoes_its_own_change_only(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        swarm = run.gateway.swarm
        first = await begin(run, "a")
        await run.gateway.finish(first, FinishRequest(reward=1))

        async def fails() -> None:
            with swarm.transaction():
                swarm.begin(BeginRequest(task_id="undone", mode="eval"))
                swarm.finish(first, FinishRequest(reward=2))

        results = await asyncio.gather(begin(run, "b"), fails(), begin(run, "c"), return_exceptions=True)
        assert isinstance(results[1], Conflict)
        assert [e.task_id for e in recent_episodes(swarm, 10)] == ["c", "b", "a"]
        assert on_disk(tmp_path / "d") == 3


@pytest.mark.parametrize("where", ["the database", "the code", "the thread"])
async def test_whatever_fails_a_commit_refuses_all_who_wait(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit itself, the code around it, or the thread that waits for the disk."""

    def fails(*_: object) -> None:
        raise KeyError("bug")

    async with running(tmp_path / "d") as run, AsyncExitStack() as broken:
        kept = await begin(run, "kept")
        await run.gateway.commits.durable()
        if where == "the database":
            malformed = sqlite3.DatabaseError("database disk image is malformed")
            broken.enter_context(refused_commits(run.gateway.swarm.journal, malformed))
        elif where == "the code":
            monkeypatch.setattr(run.gateway.swarm, "commit", fails)
        else:
            monkeypatch.setattr(run.gateway.swarm.journal.file, "sync", fails)
        async with asyncio.timeout(5):
            results = await asyncio.gather(*(begin(run, f"t{i}") for i in range(3)), return_exceptions=True)
            results += await asyncio.gather(
                begin(run, "u"), run.gateway.finish(kept, FinishRequest(reward=1)), return_exceptions=True
            )
        for result in results:
            assert isinstance(result, Later) and (status_of(result), result.code) == (503, "journal_unavailable")
            assert "then restart the server" in result.message
        later = await asyncio.gather(*(run.gateway.commits.durable() for _ in range(2)), return_exceptions=True)
        assert later == [None, None] or later[0] is not later[1], "the traceback of one error would grow for ever"
        assert run.gateway.swarm.file.refusal and not run.gateway.swarm.file.has_uncommitted
    async with running(tmp_path / "d") as run:
        await run.gateway.finish(kept, FinishRequest(reward=1))


class SlowDisk:
    """A journal's wait for the disk, which ends when it is let."""

    def __init__(self, run: Running) -> None:
        self._sync = run.gateway.swarm.journal.file.sync
        self.asked = 0
        self.lets = threading.Semaphore(0)
        run.gateway.swarm.journal.file.sync = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        self.asked += 1
        assert self.lets.acquire(timeout=5)
        self._sync()


async def turns(number: int = 20) -> None:
    """Let everything that is ready run. The thread of the disk is blocked, so more time would change nothing."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_nobody_is_told_before_the_disk_has_it(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        seen: list[str] = []
        run.gateway.swarm.on_event = lambda event: event.kind == "episode" and seen.append(event.body["episode_id"])
        await run.gateway.commits.durable()
        disk, request = SlowDisk(run), BeginRequest(task_id="a", mode="eval")
        first = asyncio.create_task(run.gateway.begin(request, idempotency_key="k"))
        await run.until(lambda: disk.asked == 1)
        again = asyncio.create_task(run.gateway.begin(request, idempotency_key="k"))
        later = [asyncio.create_task(begin(run, task)) for task in "bc"]
        await turns()
        assert not any(task.done() for task in (first, again, *later)), "the loop goes on, and nobody is told"
        assert (disk.asked, seen, on_disk(tmp_path / "d")) == (1, [], 1)
        disk.lets.release()
        held = (await first).id
        await run.until(lambda: disk.asked == 2)
        await turns()
        assert not any(task.done() for task in later) and seen == [held]
        disk.lets.release()
        assert (await again).id == held
        begun = await asyncio.gather(*later)
        assert (disk.asked, seen, on_disk(tmp_path / "d")) == (2, [held, *begun], 3)
        disk.lets.release(100)


async def test_an_agent_that_leaves_while_the_disk_is_waited_for_heard_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        episode = await run.gateway.begin(BeginRequest(task_id="a"))
        await run.gateway.commits.durable()
        disk = SlowDisk(run)
        asking = asyncio.create_task(run.say(episode.id))
        await run.until(lambda: run.gateway.swarm.episode(episode.id).num_calls == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        disk.lets.release(100)
        [call] = run.gateway.swarm.tree(episode.id, "").calls
        assert run.gateway.swarm.queries.journal.orphans(episode.id) == {call.id: "undelivered"}


@pytest.mark.parametrize("make_fronts", [None, FrontInProcess])
@pytest.mark.parametrize("agent", ["leaves before", "leaves meanwhile", "leaves afterwards", "stays"])
async def test_an_end_that_the_disk_refuses_forgets_no_lost_answer(
    tmp_path: Path, agent: str, make_fronts: type[FrontInProcess] | None
) -> None:
    async with running(tmp_path / "d", make_fronts=make_fronts) as run:
        calls = run.gateway.calls
        if isinstance(calls, FrontedCalls):
            calls = cast(FrontInProcess, calls.fronts).calls()
        begun = await run.gateway.begin(BeginRequest(task_id="t"))
        chunks = calls.answer(begun.id, "", CallRequest(Conversation((Message("user", "hello"),))))
        call = (await anext(chunks)).call
        assert call is not None
        with refused_commits(calls.swarm.journal):
            with calls.commits._held():
                if agent == "leaves before":
                    await chunks.aclose()
                ending = asyncio.create_task(run.gateway.finish(begun.id, FinishRequest(reward=1.0)))
                await run.until(lambda: calls.swarm.file.has_uncommitted)
                if agent == "leaves meanwhile":
                    await chunks.aclose()
            with pytest.raises(Later, match="free some space"):
                await ending
        if agent == "leaves afterwards":
            await chunks.aclose()
        if agent == "stays":
            assert await anext(chunks, None) is None
        await run.gateway.finish(begun.id, FinishRequest(reward=1.0))
        orphaned = {} if agent == "stays" else {call.id: "undelivered"}
        assert run.gateway.queries.journal.orphans(begun.id) == orphaned


async def test_a_disk_that_fails_a_sync_is_not_trusted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "d") as run:
        swarm, seen = run.gateway.swarm, []
        kept = await begin(run, "kept")
        swarm.on_event = lambda event: seen.append(event)

        def fails(file: int) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr("os.fdatasync", fails)
            results = await asyncio.gather(*(begin(run, f"t{i}") for i in range(3)), return_exceptions=True)
        # The disk works again, but what it has of the log nobody knows.
        results += await asyncio.gather(
            begin(run, "u"),
            run.gateway.finish(kept, FinishRequest(reward=1)),
            run.gateway.heartbeat(kept),
            return_exceptions=True,
        )
        for result in results:
            assert isinstance(result, Later) and (status_of(result), result.code) == (503, "journal_unavailable")
        assert not swarm.file.has_uncommitted and not seen
    async with running(tmp_path / "d") as run:
        assert run.gateway.swarm.episode(kept).status == "live"
        await run.gateway.finish(kept, FinishRequest(reward=1))


@pytest.mark.parametrize("write", ["commit", "insert"])
async def test_a_disk_that_refuses_undoes_the_whole_group_and_all_are_told(tmp_path: Path, write: str) -> None:
    async with running(tmp_path / "d") as run:
        kept = await begin(run, "kept")
        db, seen = run.gateway.swarm.journal.file.db, []
        run.gateway.swarm.on_event = lambda event: seen.append(event)
        if write == "commit":
            with refused_commits(run.gateway.swarm.journal):
                results = await asyncio.gather(*(begin(run, f"t{i}") for i in range(3)), return_exceptions=True)
        else:

            async def too_large() -> None:
                db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
                run.gateway.swarm.emit("state", {"much": "x" * 1_000_000})

            results = await asyncio.gather(begin(run, "t0"), too_large(), begin(run, "t1"), return_exceptions=True)
            db.execute("PRAGMA max_page_count = 1000000")
        told = [r for r in results if isinstance(r, str)]
        assert all(isinstance(r, str | Later) for r in results) and any(isinstance(r, Later) for r in results)
        ids = [episode.id for episode in recent_episodes(run.gateway.swarm, 10)]
        assert sorted(ids) == sorted([kept, *told]), "who was told is there, and nobody else"
        assert on_disk(tmp_path / "d") == len(ids) == run.gateway.swarm.queries.journal.outcomes()["live"]
        assert len([e for e in seen if e.kind == "episode"]) == len(told)


def trained(data_dir: Path) -> tuple[int, int]:
    """The policy version and the trained episodes that another process would see."""
    with closing(Journal.open_read_only(data_dir / RUN / "journal.sqlite")) as journal:
        (marked,) = journal.file.db.execute("SELECT COUNT(*) FROM episodes WHERE trained_in IS NOT NULL").fetchone()
        assert journal.outcomes()["trained"] == marked
        return journal.read_state().policy_version, marked


async def test_a_refusal_before_the_first_slice_undoes_nothing(tmp_path: Path) -> None:
    def refused() -> Iterator[None]:
        yield from ()
        raise Later("not now", retry_after=0.0)

    async with running(tmp_path / "d") as run:
        begun = run.gateway.swarm.begin(BeginRequest(task_id="t"))
        with pytest.raises(Later, match="not now"):
            await run.gateway.commits.in_slices(refused())
        await run.gateway.commits.durable()
        assert run.gateway.swarm.episode(begun.id).status == "live"


@pytest.mark.parametrize("failure", ["", "a slice", "cancelled"])
async def test_a_batch_is_recorded_in_slices_by_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    monkeypatch.setattr("agentjet.front.concurrency.SLICE_SECONDS", 0.0)
    monkeypatch.setattr("agentjet.swarm.batches.MEMBERS_A_SLICE", 2)
    async with running(tmp_path / "d", job={"batch_size": 2, "group_size": 4, "checkpoint_every": 0}) as run:
        swarm, other = run.gateway.swarm, await begin(run, "other")
        put, found = swarm.put, list[tuple[int, int]]()

        def watched(episode: EpisodeRecord) -> None:
            if episode.trained_in is not None:
                found.append(trained(tmp_path / "d"))
                if len(found) == 2:
                    asyncio.get_running_loop().call_soon(partial(swarm.note, other, noted=["between"]))
                if len(found) == 4 and failure == "cancelled":
                    task = asyncio.current_task()
                    assert task is not None and task.cancel()
                if len(found) == 6 and failure == "a slice":
                    raise Later("the disk is full", retry_after=0.0)
                if len(found) > 6:
                    assert failure == "a slice" or "between" in swarm.episode(other).noted
            put(episode)

        monkeypatch.setattr(swarm, "put", watched)
        await run.fill_batch()
        await run.until(lambda: trained(tmp_path / "d") == (1, 8))
        assert set(found) == {(0, 0)} and len(found) == (6 + 8 if failure == "a slice" else 8)
        assert swarm.policy_version == 1 and swarm.queries.journal.outcomes()["trained"] == 8


@pytest.mark.parametrize(("seconds", "num_turns"), [(0.004, 13), (0.0001, 0), (0.03, 39)])
async def test_slices_share_a_turn_until_their_time_is_over(tmp_path: Path, seconds: float, num_turns: int) -> None:
    now, turns, world = 0.0, 0, World(tmp_path)
    commits, loop = GroupCommit(world.swarm, monotonic=lambda: now), asyncio.get_running_loop()

    def slices() -> Iterator[int]:
        nonlocal now
        for number in range(40):
            now += seconds
            yield number

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    loop.call_soon(count)
    assert await commits.in_slices(slices()) == 39
    assert turns == num_turns
    await commits.close()
    world.close()


@pytest.mark.parametrize("num_done", [0, 1])
async def test_a_slice_that_fails_refuses_the_other_changes_and_all_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    async with running(tmp_path / "d", job={"recipe": "rft", "batch_size": 3}) as run:
        swarm, names = run.gateway.swarm, [GroupName(group=group) for group in "ab"]
        monkeypatch.setattr("agentjet.front.concurrency.SLICE_SECONDS", 0.0)
        for group in "ab":
            begun = await run.gateway.begin(BeginRequest(task_id="t", group=group))
            await run.say(begun.id)
            await run.gateway.finish(begun.id, FinishRequest(reward=1.0))
        other = await run.gateway.begin(BeginRequest(task_id="t", group="o", client_id="other"))
        for _ in range(4):
            run.clock.now += 0.6 * swarm.job.lease_seconds
            await run.gateway.heartbeat(other.id)
        real, left = swarm.group_rules.leave, list[Group]()

        def leave(group: Group, now: float) -> None:
            left.append(group)
            if len(left) == num_done + 1:
                raise MemoryError("bug")
            real(group, now)

        monkeypatch.setattr(swarm.group_rules, "leave", leave)

        async def close() -> int:
            return await run.gateway.close_groups(CloseGroupsRequest(groups=names), idempotency_key="c")

        async def finish() -> str:
            return (await run.gateway.finish(other.id, FinishRequest(reward=1.0), idempotency_key="f")).status

        failed, refused = await asyncio.gather(close(), finish(), return_exceptions=True)
        assert isinstance(failed, MemoryError) and isinstance(refused, Later)
        assert "Another change in the same commit failed (MemoryError('bug'))" in refused.message
        assert not swarm.file.refusal, "the disk works"
        run.clock.now += refused.retry_after
        assert await asyncio.gather(close(), finish()) == [0, "finished"]
        assert len(left) == num_done + 3, "both groups are closed by the repetition"


async def test_a_client_that_waits_gets_the_place_of_a_begin_that_was_undone(tmp_path: Path) -> None:
    # The first check of the leases, after half a second, wakes the second client. Where the disk does not take writes
    # again by then, this client asks again, as every client does.
    async with running(
        tmp_path / "d", job={"recipe": "rft", "batch_size": 1, "group_size": 1, "min_group_size": 1}
    ) as run:

        async def second() -> str:
            while True:
                with suppress(Later):
                    return (await run.gateway.begin(BeginRequest(task_id="t", client_id="second", wait=60))).client_id
                await asyncio.sleep(0.01)

        with refused_commits(run.gateway.swarm.journal):
            first = asyncio.create_task(run.gateway.begin(BeginRequest(task_id="t", client_id="first")))
            waiting = asyncio.create_task(second())
            await turns(1)
            run.gateway.swarm.places.refresh()
            with pytest.raises(Later, match="free some space"):
                await first
        async with asyncio.timeout(20):
            assert await waiting == "second"


async def test_training_goes_on_after_an_undone_begin_held_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.server.gateway.LEASE_CHECK_SECONDS", 0.001)
    async with running(
        tmp_path / "d", job={"recipe": "rft", "batch_size": 1, "group_size": 1, "min_group_size": 1}
    ) as run:
        swarm = run.gateway.swarm
        begun = await run.gateway.begin(BeginRequest(task_id="t"))
        await run.say(begun.id)
        await run.gateway.commits.durable()
        disk = SlowDisk(run)
        finishing = asyncio.create_task(run.gateway.finish(begun.id, FinishRequest(reward=1.0)))
        await run.until(lambda: disk.asked == 1)

        def slices() -> Iterator[None]:
            yield None
            while not finishing.done():
                yield None
            yield from [None] * 20  # The training loop finds that it has to wait.
            raise KeyError("bug")

        monkeypatch.setattr("agentjet.front.concurrency.SLICE_SECONDS", 0.0)
        failing = asyncio.create_task(run.gateway.commits.in_slices(slices()))
        pinned = asyncio.create_task(run.gateway.begin(BeginRequest(task_id="e", mode="eval", at_version=0)))
        await run.until(lambda: swarm.num_pinned() == 1)
        disk.lets.release(100)
        results = await asyncio.gather(failing, pinned, return_exceptions=True)
        assert [type(result) for result in results] == [KeyError, Unavailable]
        await run.until(lambda: swarm.policy_version == 1)


async def test_calls_are_read_in_a_thread_only_after_they_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d") as run:
        swarm, seen = run.gateway.swarm, list[bool]()
        episode, read_trees = await run.gateway.begin(BeginRequest(task_id="t")), swarm.read_trees

        def watched(episode_id: str) -> dict[str, ConversationTree]:
            seen.append(swarm.file.has_uncommitted)
            return read_trees(episode_id)

        monkeypatch.setattr(swarm, "read_trees", watched)
        with run.gateway.commits._held():
            asking = asyncio.create_task(run.say(episode.id))
            await run.until(lambda: swarm.episode(episode.id).num_calls == 1)
            swarm.trees.clear()  # As after another change of this episode was undone.
            reading = asyncio.create_task(run.gateway.calls.read(episode.id))
            await asyncio.wait([reading], timeout=0.2)  # Time for a thread that does not wait.
        call, _ = await asyncio.gather(asking, reading)
        assert seen == [False] and [known.id for known in swarm.tree(episode.id, "").calls] == [call.id]
