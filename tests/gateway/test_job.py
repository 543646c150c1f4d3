"""The job settings: accepted settings stay in force over a restart, and refused ones never apply."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.errors import Later
from tests.fakes import job_body, running

pytestmark = pytest.mark.anyio


async def test_a_replaced_job_survives_a_restart_with_the_same_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path / "d") as run:
        body = job_body(run.gateway)
        body.job["task_weights"] = {"math": 2.0, "*": 1.0}
        replaced = await run.gateway.replace_job(body)
        assert replaced.revision == body.revision + 1
    async with running(tmp_path / "d") as run:
        assert job_body(run.gateway) == replaced
        assert "the job settings are those of revision 2" in caplog.text
        assert "job.task_weights.math was not set and is 2.0" in caplog.text
    caplog.clear()
    async with running(tmp_path / "d", job={"batch_size": 3}) as run:
        job = job_body(run.gateway)
        assert (job.revision, job.job["batch_size"], job.job["task_weights"]) == (3, 3, {})
        assert "those in force were of revision 2" in caplog.text
        assert "job.batch_size was 2 and is 3, job.task_weights.math was 2.0 and is not set" in caplog.text
        assert "group_size" not in caplog.text
    caplog.clear()
    async with running(tmp_path / "d", job={"batch_size": 3}) as run:
        assert job_body(run.gateway) == job and "the job settings" not in caplog.text


async def test_a_job_that_the_disk_refuses_is_not_in_force(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        before, db = job_body(run.gateway), run.gateway._journal.file.db
        await run.gateway.commits.durable()
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
        body = before.model_copy(
            update={"job": before.job | {"task_weights": {f"task set {i}": 1.0 for i in range(1000)}}}
        )
        with pytest.raises(Later):
            await run.gateway.replace_job(body)
        assert job_body(run.gateway) == before
        db.execute("PRAGMA max_page_count = 1073741823")
        assert (await run.gateway.replace_job(body)).revision == before.revision + 1
