"""Grouped commits. Pinned here:

1. what several tasks wrote in one turn of the loop is committed once, and on disk before any of them is told;
2. one that fails undoes its own change only;
3. when the disk refuses the commit, or takes the whole group with one write, all are told `Later` and nothing of it
   happened, in memory either.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest, FinishRequest
from tests.fakes import Running, running

pytestmark = pytest.mark.anyio


def on_disk(data_dir: Path) -> int:
    """Episodes that another process would see."""
    with closing(sqlite3.connect(data_dir / "journal.sqlite")) as db:
        return int(db.execute("SELECT COUNT(*) FROM episodes").fetchone()[0])


def statements(run: Running) -> list[str]:
    seen: list[str] = []
    run.gateway._journal._db.set_trace_callback(seen.append)
    return seen


async def begin(run: Running, task: str) -> str:
    return (await run.gateway.begin(BeginRequest(task_id=task, mode="eval"))).id


async def test_many_changes_are_one_commit_and_on_disk_before_anybody_is_told(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        seen = statements(run)
        begun = await asyncio.gather(*(begin(run, f"t{i}") for i in range(20)))
        assert seen.count("COMMIT") == 1
        assert on_disk(tmp_path / "d") == len(set(begun)) == 20


async def test_what_was_not_committed_is_not_on_disk(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        run.gateway.swarm.begin(BeginRequest(task_id="t", mode="eval"))
        assert run.gateway.swarm.has_uncommitted and on_disk(tmp_path / "d") == 0
        await asyncio.sleep(0.01)
        assert not run.gateway.swarm.has_uncommitted and on_disk(tmp_path / "d") == 1


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
        assert [e.task_id for e in swarm.recent_episodes(10)] == ["c", "b", "a"]
        assert on_disk(tmp_path / "d") == 3


@pytest.mark.parametrize("write", ["commit", "insert"])
async def test_a_disk_that_refuses_undoes_the_whole_group_and_all_are_told(tmp_path: Path, write: str) -> None:
    async with running(tmp_path / "d") as run:
        kept = await begin(run, "kept")
        db, seen = run.gateway._journal._db, []
        run.gateway.swarm.on_event = lambda event: seen.append(event)
        if write == "commit":
            real = run.gateway._journal._db

            class Refusing:
                def execute(self, statement: str, *args: object) -> sqlite3.Cursor:
                    if statement == "COMMIT":
                        raise sqlite3.OperationalError("database or disk is full")
                    return real.execute(statement, *args)

                def __getattr__(self, name: str) -> object:
                    return getattr(real, name)

            run.gateway._journal._db = Refusing()  # type: ignore[assignment]
            results = await asyncio.gather(*(begin(run, f"t{i}") for i in range(3)), return_exceptions=True)
            run.gateway._journal._db = real
        else:

            async def too_large() -> None:
                db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
                run.gateway.swarm.emit("state", {"much": "x" * 1_000_000})

            results = await asyncio.gather(begin(run, "t0"), too_large(), begin(run, "t1"), return_exceptions=True)
            db.execute("PRAGMA max_page_count = 1000000")
        told = [r for r in results if isinstance(r, str)]
        assert all(isinstance(r, str | Later) for r in results) and any(isinstance(r, Later) for r in results)
        ids = [episode.id for episode in run.gateway.swarm.recent_episodes(10)]
        assert sorted(ids) == sorted([kept, *told]), "who was told is there, and nobody else"
        assert on_disk(tmp_path / "d") == len(ids) == run.gateway.swarm.status_counts()["live"]
        assert len([e for e in seen if e.kind == "episode"]) == len(told)
