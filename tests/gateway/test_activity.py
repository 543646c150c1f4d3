"""Slow work: how far it is, how long it takes, and that the status shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentjet.gateway.observability import Activity, work_text
from agentjet.types import SlowWork
from tests.fakes import Clock, running


def test_the_time_left_comes_from_the_last_time(tmp_path: Path) -> None:
    clock = Clock()
    first = Activity(tmp_path / "durations.json", monotonic=clock)
    with first.work("export", "exporting version 3"):
        assert first.text == "exporting version 3"
        clock.advance(20)
        assert first.text == "exporting version 3: 20 s so far"
    assert first.text == ""
    again = Activity(tmp_path / "durations.json", monotonic=clock)
    with again.work("export", "exporting version 4"):
        clock.advance(5)
        assert again.text == "exporting version 4: 5 s so far, about 15 s left"
        with again.work("checkpoint", "saving"):
            assert again.text == "saving"
        clock.advance(25)
        assert again.text == "exporting version 4: 30 s so far, last time it took 20 s"


def test_parts_that_are_done(tmp_path: Path) -> None:
    clock = Clock()
    activity = Activity(tmp_path / "durations.json", monotonic=clock)
    with activity.work("replay", "learning again", 4) as work:
        assert activity.text == "learning again: 0 of 4"
        clock.advance(30)
        work.done = 1
        assert activity.text == "learning again: 1 of 4, 30 s so far, about 1 min 30 s left"
    assert not (tmp_path / "durations.json").exists(), "its pace is that of this time"


def test_a_failure_is_not_a_duration(tmp_path: Path) -> None:
    clock = Clock()
    activity = Activity(tmp_path / "durations.json", monotonic=clock)
    with pytest.raises(OSError), activity.work("export", "exporting"):
        clock.advance(20)
        raise OSError
    assert activity.text == "" and not (tmp_path / "durations.json").exists()


def test_a_damaged_file_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "durations.json").write_text("[1")
    Activity(tmp_path / "durations.json")
    unwritable = Activity(tmp_path / "missing" / "durations.json", monotonic=(clock := Clock()))
    with unwritable.work("export", "exporting"):
        clock.advance(20)


def test_a_download() -> None:
    assert work_text(SlowWork("downloading", 300.0, 1200.0, "MB", 10.0)) == (
        "downloading: 300 of 1,200 MB, about 30 s left"
    )
    assert work_text(SlowWork("downloading", 300.0, 0.0, "MB", 10.0)) == "downloading: 300 MB"


@pytest.mark.anyio
async def test_the_status_shows_the_load_of_the_model(tmp_path: Path) -> None:
    async with running(tmp_path / "d", wait_ready=False, prepare=lambda compute: compute.may_start.clear()) as run:
        await run.until(lambda: run.gateway.telemetry.activity.text != "")
        run.stopwatch.advance(12)
        name = run.gateway.config.model.name
        assert run.gateway.status().waiting_for == f"loading the model {name}: 12 s so far"
        run.compute.may_start.set()
        await run.gateway.engine.wait_until_up()
        assert run.gateway.telemetry.activity.text == ""


@pytest.mark.anyio
async def test_the_status_shows_a_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 1}) as run:
        await run.batch()
        texts: list[str] = []

        async def look() -> None:
            texts.append(run.gateway.status().waiting_for)

        with run.gateway.telemetry.activity.work("checkpoint", "saving the checkpoint of version 1"):
            await look()
        await asyncio.gather(run.gateway.versions.save(), look())
    assert texts[0] == "the engine, saving the checkpoint of version 1"
