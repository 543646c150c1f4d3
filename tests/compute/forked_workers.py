"""Starts worker processes in milliseconds: they are forked from one process, which imported torch and the rest once.

They are real processes, which a test can stop and kill. Tests of the start itself take the real command.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentjet.processes.guardian import Launch, ProcessEnd, end_of
from agentjet.processes.supervisor import LocalPlacement
from tests.cluster.spawn import PRELOADED


class ForkedWorker:
    """A worker, as a `Process`."""

    def __init__(self, process: Any, log_path: Path) -> None:
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self.pid: int = process.pid
        self.place = f"this machine, process {process.pid}"
        self.log_path = log_path
        self._process = process
        asyncio.get_running_loop().add_reader(process.sentinel, self._end)

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        await asyncio.wait([self.ended])

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self.ended.set_result(end_of(self._process.exitcode, self.log_path))


async def start(placement: LocalPlacement, launch: Launch) -> ForkedWorker:
    """Takes the place of `LocalPlacement.start`."""
    assert launch.command[1:4] == ("-P", "-m", "agentjet.compute")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    launch.log_path.parent.mkdir(parents=True, exist_ok=True)
    arguments = (dict(launch.environment), launch.log_path, launch.command[4:])
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    return ForkedWorker(process, launch.log_path)


def _serve(environment: Mapping[str, str], log: Path, arguments: tuple[str, ...]) -> None:
    """Be a worker, as `python -m agentjet.compute` is."""
    from agentjet.compute.rank import main

    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = ["worker", *arguments]
    main()
