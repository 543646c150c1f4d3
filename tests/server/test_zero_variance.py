"""Batches without reward variance are reported: in the status, in its lines for people, and once in the log.

1. Three batches in a row without variance are reported, with one prompt, its answers and their rewards.
2. The log has the report once. The status has it until a batch has variance again.
3. A restarted server reports the same from its journal. Answers that a checkpoint has released are left out.
4. Rewards by role count: a group in which only these differ has variance.
5. A report that cannot be read is logged once. It stops neither a start nor training.
6. Training does not wait for the thread of the pages, which reads the report.
7. The event loop reads no rows of batches, episodes or calls for the status: one may have megabytes.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.runs import status_lines
from agentjet.errors import NotFound, ServerFailed
from agentjet.protocol import BeginRequest, FinishRequest, RunSettings, ScoredAnswer, StatusResponse
from agentjet.swarm import Journal
from agentjet.types import Call
from tests.fakes import Running, recent_episodes, running, saying

pytestmark = pytest.mark.anyio


async def equal_batch(run: Running, reward: float = 0.0) -> None:
    """One batch of two groups, in which every episode earns the same."""
    version = run.gateway.swarm.policy_version
    for group in range(2):
        for _ in range(2):
            await run.episode(reward, task=f"t{group}", text="What is 1 + 1?")
    await run.until(lambda: run.gateway.swarm.policy_version == version + 1 and run.gateway.phase.state == "sampling")


def warnings(status: StatusResponse) -> list[str]:
    lines = status_lines(status)
    names = [name for name, _ in lines]
    start = names.index("warning") if "warning" in names else len(lines)
    return [line for name, line in lines[start:] if name in ("warning", "")]


async def test_three_batches_that_could_teach_nothing_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        return [r.getMessage() for r in caplog.records if "could teach nothing" in r.getMessage()]

    answers = iter(["Two is eight.", "Two."])
    script = saying(lambda prompt: next(answers, "Two."))
    async with running(tmp_path / "d", script) as run:
        with caplog.at_level(logging.WARNING):
            await equal_batch(run)
            await equal_batch(run)
            assert (await run.gateway.current_status()).zero_variance is None and not logged()
            answers = iter(["Two is eight.", "Two."])
            await equal_batch(run)
            found = (await run.gateway.current_status()).zero_variance
            assert found is not None and (found.batches, found.task_id) == (3, "t0")
            assert found.prompt == "What is 1 + 1?"
            assert found.answers == [
                ScoredAnswer(answer="Two is eight.", reward=0, count=1),
                ScoredAnswer(answer="Two.", reward=0, count=1),
            ]
            shown = warnings(run.gateway.status())
            assert shown[0].startswith("3 batches in a row could teach nothing")
            assert shown[1:4] == [
                "  task 't0', prompt 'What is 1 + 1?'",
                "  reward 0 x 1: 'Two is eight.'",
                "  reward 0 x 1: 'Two.'",
            ]
            assert any("the reward: the answers differ" in line for line in shown)
            assert logged() == ["\n".join(shown)]
            await equal_batch(run)
            assert "all answers are the same" in "\n".join(warnings(await run.gateway.current_status()))
            assert len(logged()) == 1, "it is logged once"
            await run.batch()
            status = await run.gateway.current_status()
            assert status.zero_variance is None and not warnings(status)
            for _ in range(3):
                await equal_batch(run, reward=0.0)
            await run.until(lambda: len(logged()) == 2)  # and again the next time
            for _ in range(3):
                await equal_batch(run, reward=1.0)
            assert (await run.gateway.current_status()).zero_variance is None, "the run is solved"


async def test_a_restart_reports_the_same_without_what_a_checkpoint_released(tmp_path: Path) -> None:
    kept_nothing: dict[str, Any] = {"job": {"keep_checkpoints": 1}, "server": {"keep_transcripts": 0}}
    async with running(tmp_path / "d", **kept_nothing) as run:
        for _ in range(3):
            await equal_batch(run)
        before = (await run.gateway.current_status()).zero_variance
    async with running(tmp_path / "d", **kept_nothing) as run:
        assert run.gateway.status().zero_variance is not None, "at the start"
        queries = run.gateway.swarm.queries
        members = [one.id for one in recent_episodes(run.gateway.swarm, 4)]
        await run.until(lambda: not any(map(queries.journal.call_facts, members)))  # The start deletes them.
    async with running(tmp_path / "d", **kept_nothing) as run:
        after = run.gateway.status().zero_variance
    assert before is not None and before.prompt and after is not None
    assert after == before.model_copy(
        update={"prompt": "", "answers": [ScoredAnswer(answer="", reward=0.0, count=2)]}
    ), "the stop saved a checkpoint, which covers the calls"


async def test_the_status_reads_no_rows_of_episodes_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding: list[threading.Thread] = []
    decode = Journal._call

    def _call(journal: Journal, order: str, episode_id: str) -> Call | None:
        decoding.append(threading.current_thread())
        return decode(journal, order, episode_id)

    monkeypatch.setattr(Journal, "_call", _call)
    async with running(tmp_path / "d") as run:
        for _ in range(3):
            await equal_batch(run)
        await run.gateway.current_status()
        statements: list[str] = []
        run.gateway.swarm.file.db.set_trace_callback(statements.append)
        found = [run.gateway.status().zero_variance for _ in range(2)]
        run.gateway.swarm.file.db.set_trace_callback(None)
        assert threading.main_thread() not in decoding and len(decoding) == 3, "once for each batch"
        is_small = [
            any(f"FROM {name}" in statement for name in ("meta", "counts", "code_versions")) for statement in statements
        ]
        assert all(is_small), "rows of facts about the run"
        assert found[0] == found[1] == (await run.gateway.reader.status()).zero_variance is not None
        assert len(decoding) == 3


@pytest.mark.parametrize(
    "error",
    [
        ServerFailed("The journal cannot be read.", code="journal_unreadable"),
        NotFound("There is no such episode."),
        sqlite3.DatabaseError("database disk image is malformed"),
        ValueError("1 validation error for Call"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_report_that_cannot_be_read_stops_neither_a_start_nor_training(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(journal: Journal, order: str, episode_id: str) -> Call | None:
        raise error

    def is_failing(status: StatusResponse) -> bool:
        return status.zero_variance is None and status.workers_started == 1

    monkeypatch.setattr(Journal, "_call", fail)
    async with running(tmp_path / "d") as run:
        await run.runs.put("other", RunSettings())
        await run.of_run("other").gateway.engine.wait_until_up()
        for _ in range(3):
            await equal_batch(run.of_run("other"))
        assert is_failing(await run.of_run("other").gateway.current_status())
    async with running(tmp_path / "d") as run:
        other = run.of_run("other").gateway
        await other.engine.wait_until_up()
        assert [is_failing(await other.current_status()) for _ in range(3)] == [True] * 3
    logged = [record for record in caplog.records if "could not be reported" in record.getMessage()]
    assert [record.exc_info and record.exc_info[1] for record in logged] == [error] * 2, (
        "once after the batch and start"
    )


async def test_training_does_not_wait_for_the_pages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    may_end = threading.Event()
    async with running(tmp_path / "d") as run:
        page = asyncio.create_task(run.gateway.reader.read(lambda journal: may_end.wait(60)))
        try:
            for _ in range(4):
                await equal_batch(run)
            assert run.gateway.status().zero_variance is None
        finally:
            may_end.set()
        await page
        assert (await run.gateway.current_status()).zero_variance is not None
        await run.until(lambda: caplog.text.count("batches in a row could teach nothing") == 1)


async def test_rewards_by_role_are_variance(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 1}) as run:
        for _ in range(3):
            version = run.gateway.swarm.policy_version
            for by_role in ({"planner": 1.0}, {"planner": 0.0}):
                begun = await run.gateway.begin(BeginRequest(task_id="t", wait=5))
                await run.say(begun.id)
                await run.gateway.finish(begun.id, FinishRequest(reward=0.5, by_role=by_role))
            await run.until(lambda: run.gateway.swarm.policy_version > version)  # noqa: B023
        status = run.gateway.status()
    assert status.zero_variance is None and status.last_step["groups/zero_variance"] == 0
