"""`LocalPlace`: a run served by a server of its own on this machine, started and ended with each trial."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from agentjet.cli.child import STOP_SECONDS, ChildServer, ServerEnded
from agentjet.cli.data_dir import JOURNAL
from agentjet.research.records import Setting
from agentjet.research.servers import Address

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalServed:
    """A child process, and how it is reached."""

    server: ChildServer
    address: Address

    def check(self) -> None:
        self.server.check()


@dataclass(frozen=True)
class LocalPlace:
    """Room for one server on this machine. The data dir of a run is `server/` in its folder."""

    number: int
    threads: int
    """Of its worker, where the settings say nothing."""

    @property
    def name(self) -> str:
        return f"local server {self.number}"

    @contextmanager
    def serving(self, run: Path, settings: Setting, stopping: Event) -> Iterator[LocalServed]:
        data_dir = run / "server"
        wait_until_free(data_dir, stopping)
        chosen = {"model.threads": self.threads, "job.keep_checkpoints": 1, **settings}
        overrides = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
        with ChildServer(None, overrides, data_dir) as server:
            server.connect().close()
            yield LocalServed(server, Address(server.url, (data_dir / "token").read_text(encoding="utf-8").strip()))

    def check(self) -> None:
        """Every trial starts a server of its own."""

    def over(self, run: Path) -> None:
        shutil.rmtree(run / "server" / "checkpoints", ignore_errors=True)

    def close(self) -> None:
        """Every server ended with its trial."""


def local_places(count: int) -> list[LocalPlace]:
    """Places that share the machine's cores."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return [LocalPlace(number, threads) for number in range(1, count + 1)]


def wait_until_free(data_dir: Path, stopping: Event) -> None:
    """Until the server of a researcher that was killed has saved its policy and ended. Raises `ServerEnded`."""
    lock = data_dir / f"{JOURNAL}.lock"
    if not lock.exists():
        return
    deadline = time.monotonic() + STOP_SECONDS
    with lock.open("r+") as file:
        while time.monotonic() < deadline and not stopping.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                stopping.wait(POLL_SECONDS)
            else:
                return
    raise ServerEnded(f"{data_dir} is still in use, after {STOP_SECONDS:.0f} s at most: end the server that has it")
