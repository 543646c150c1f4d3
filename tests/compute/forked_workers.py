"""Starts worker processes in milliseconds: they are forked from one process, which imported torch and the rest once.

They are real processes, which a test can stop and kill. Tests of the start itself take the real command.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from tests.cluster.spawn import PRELOADED


class ForkedWorker:
    """The part of `asyncio.subprocess.Process` that the backend uses."""

    def __init__(self, process: Any, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self._process = process
        self._ended = asyncio.Event()
        self.pid: int = process.pid
        self.stdin = stdin
        self.stdout = stdout
        asyncio.get_running_loop().add_reader(process.sentinel, self._end)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self.stdin.close()
        self._ended.set()


async def start(*command: str, stderr: BinaryIO, env: dict[str, str], **pipes: int) -> ForkedWorker:
    """Takes the place of `asyncio.create_subprocess_exec` in the backend."""
    assert command[1:4] == ("-P", "-m", "agentjet.compute.embedded") and set(pipes) == {"stdin", "stdout"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    (requests, to_worker), (from_worker, answers) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(requests, answers, Path(stderr.name), command[4:]), daemon=True)
    process.start()
    for ours in (requests, answers):
        ours.close()
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), _file(from_worker, "rb"))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, _file(to_worker, "wb"))
    return ForkedWorker(process, asyncio.StreamWriter(transport, protocol, None, loop), reader)


def _file(end: Connection, mode: str) -> Any:
    file = os.fdopen(os.dup(end.fileno()), mode, 0)
    end.close()
    return file


def _serve(requests: Connection, answers: Connection, log: Path, arguments: tuple[str, ...]) -> None:
    """Be a worker, as `python -m agentjet.compute.embedded` is."""
    from agentjet.compute.embedded.worker import main

    os.dup2(requests.fileno(), 0)
    os.dup2(answers.fileno(), 1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    requests.close()
    answers.close()
    sys.stdin, sys.argv = os.fdopen(0), ["worker", *arguments]
    main()
