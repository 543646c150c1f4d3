"""Servers started for a measurement and ended, by their process id, with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ADDRESS = re.compile(r"http://[\d.]+:\d+")
PATIENCE = 120.0
"""Seconds until a server must report that it is ready: LiteLLM imports for a long time."""


class DidNotStart(Exception):
    """A server ended, or stayed silent, before it was ready. The message has the end of its output."""


@contextmanager
def started(
    command: Sequence[str], log: Path, *, ready: str = ADDRESS.pattern, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """While inside, the process runs; its log goes to a file. Yields the text that `ready` found there.

    Raises `DidNotStart`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield _until_ready(process, log, re.compile(ready))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def awake() -> Iterator[None]:
    """Keeps every core awake inside the context: a counter of the lowest priority runs on each, and yields to all
    other work.

    A sleeping core takes some time to wake, and longer in a virtual machine. That is the machine's cost, not the
    server's, and a busy server does not pay it. The counters end with this process.
    """
    command = [sys.executable, "-c", f"import os; os.nice(19)\nwhile os.getppid() == {os.getpid()}: pass"]
    counting = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of the bench."""
    return [sys.executable, "-m", f"bench.gatewaying.{name}", *arguments]


def _until_ready(process: subprocess.Popen[bytes], log: Path, ready: re.Pattern[str]) -> str:
    for _ in range(int(PATIENCE / 0.1)):
        said = log.read_text(errors="replace")
        if found := ready.search(said):
            return found[0]
        if process.poll() is not None:
            raise DidNotStart(f"it ended with exit code {process.returncode}: {said[-1000:]}")
        time.sleep(0.1)
    raise DidNotStart(f"it was not ready after {PATIENCE:.0f} s: {log.read_text(errors='replace')[-1000:]}")
