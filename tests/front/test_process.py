"""`Front`: what the server's messages do, in their order."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentjet.config import ServeConfig
from agentjet.front.process import Front, FrontSettings, RunState
from agentjet.processes.rpc import Link
from agentjet.swarm import Journal
from agentjet.swarm.journal_file import JournalFile, segment_of
from agentjet.types import DEFAULT_RUN, JOURNAL

pytestmark = pytest.mark.anyio

OTHER = "other"


def state(*, is_open: bool) -> RunState:
    return RunState((), "", is_open, None, {}, -1)


async def test_a_run_is_drained_after_its_gate_was_shut(tmp_path: Path) -> None:
    """Also if the file of another run is opened meanwhile, which takes long while a killed front still has it."""
    config = ServeConfig.model_validate({"server": {"data_dir": str(tmp_path)}})
    for run in (DEFAULT_RUN, OTHER):
        Journal.open(tmp_path / "runs" / run / JOURNAL).close()
    front: Any = Front(cast(Link, SimpleNamespace(name="front-0")))
    await front._begin(FrontSettings(0, ("http://front0",), config, time.time() - time.monotonic()))
    await front._open(DEFAULT_RUN, config, state(is_open=True))
    held = JournalFile.open(segment_of(tmp_path / "runs" / OTHER / JOURNAL, 0))
    opening = asyncio.create_task(front._open(OTHER, config, state(is_open=True)))
    await asyncio.sleep(0)
    shut = asyncio.create_task(front._open(DEFAULT_RUN, config, state(is_open=False)))
    drained = asyncio.create_task(front._drained(DEFAULT_RUN))
    await asyncio.sleep(0.1)
    assert not drained.done()
    held.close()
    await asyncio.gather(opening, shut, drained)
    assert not front._runs[DEFAULT_RUN].gate.is_open
    for run in (DEFAULT_RUN, OTHER):
        await front._close(run)
