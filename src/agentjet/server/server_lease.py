"""The lease of a whole server, and the switch between its runs. (The lease of an episode is another thing.)

While a server is leased, starting episodes and changing settings needs the epoch of the lease. Epochs only rise, also
across restarts: a holder whose lease expired and was taken by another is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agentjet.config import JobConfig
from agentjet.errors import ConfigError, Conflict
from agentjet.gateway import Gateway
from agentjet.protocol import LeaseRequest

LEASE_FILE = "lease.json"


class ServerLease:
    """The lease of the server, stored in a file of the data dir."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Raises `ConfigError` if the file is damaged: starting at epoch 0 would admit an old holder again."""
        self._path = path
        self._clock = clock
        self.holder, self.epoch, self._until = "", 0, 0.0
        if path.exists():
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
                self.holder, self.epoch, self._until = str(known["holder"]), int(known["epoch"]), float(known["until"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"{path} is damaged ({type(error).__name__}: {error}): remove it, which ends the lease it records"
                ) from None

    @property
    def seconds_left(self) -> float:
        """Seconds until the lease expires; 0 without a lease."""
        return max(0.0, self._until - self._clock())

    def take(self, request: LeaseRequest) -> None:
        """Takes the lease, or renews it if the request has its epoch. Raises `Conflict`."""
        if request.epoch is None:
            if self.seconds_left:
                raise self._leased("")
            self.epoch += 1
        else:
            self.check(request.epoch)
        self.holder, self._until = request.holder, self._clock() + request.seconds
        self._write()

    def check(self, epoch: int | None) -> None:
        """Raises `Conflict` if the server is leased under another epoch, or if the lease of `epoch` has ended."""
        if self.seconds_left and epoch != self.epoch:
            raise self._leased("" if epoch is None else f"; epoch {epoch} is not its epoch")
        if not self.seconds_left and epoch is not None:
            raise Conflict(f"The lease of epoch {epoch} has ended: take a new one.", code="lease_over")

    def end(self) -> None:
        self._until = 0.0
        self._write()

    def _leased(self, more: str) -> Conflict:
        return Conflict(
            f"The server is leased to {self.holder!r} for another {self.seconds_left:.0f} s{more}. Wait, or end the "
            "lease with the admin token (DELETE /swarm/v1/lease).",
            code="leased",
        )

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        part.touch(0o600)
        with part.open("w", encoding="utf-8") as file:
            json.dump({"holder": self.holder, "epoch": self.epoch, "until": self._until}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)


class RunSwitcher(Protocol):
    """Switches between runs, one at a time. Each run has its own data dir; the default run has the name ""."""

    @property
    def gateway(self) -> Gateway:
        """The gateway of the present run."""
        ...

    @property
    def name(self) -> str: ...

    async def enter(self, name: str, job: JobConfig | None) -> None:
        """Switches to a new or existing run with the settings `job` (None: those of the server).

        Does not wait for the worker. Episodes of the previous run are unknown afterwards.
        """
        ...


class SingleRun:
    """A server without other runs."""

    name = ""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def enter(self, name: str, job: JobConfig | None) -> None:
        if name:
            raise Conflict("This server has one run only.", code="one_run")
