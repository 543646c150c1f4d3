"""`Lease`: the server for one holder alone, for a time. Who begins episodes or configures meanwhile shows its epoch.

Epochs only rise, also across restarts of the server: a holder whose lease ran out, and was taken by another, is refused
whatever it still believes.

What the routes know of the lines of weights that a server can serve, one at a time.
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


class Lease:
    """Kept in a file of the data dir."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Raises `ConfigError` for a damaged file: starting at epoch 0 would let an old holder in again."""
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
        """0 when nobody has it."""
        return max(0.0, self._until - self._clock())

    def take(self, request: LeaseRequest) -> None:
        """Take it, or renew it with its epoch. Raises `Conflict`."""
        if request.epoch is None:
            if self.seconds_left:
                raise self._leased("")
            self.epoch += 1
        else:
            self.check(request.epoch)
        self.holder, self._until = request.holder, self._clock() + request.seconds
        self._write()

    def check(self, epoch: int | None) -> None:
        """Raises `Conflict` for whoever is not the holder while there is one, and for one that is no longer."""
        if self.seconds_left and epoch != self.epoch:
            raise self._leased("" if epoch is None else f"; epoch {epoch} is not its epoch")
        if not self.seconds_left and epoch is not None:
            raise Conflict(f"The lease of epoch {epoch} is over: take it anew.", code="lease_over")

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
    """Each run has a data dir of its own: journal, checkpoints, metrics. The server's own run is called ""."""

    @property
    def gateway(self) -> Gateway:
        """Of the run that is served."""
        ...

    @property
    def name(self) -> str: ...

    async def enter(self, name: str, job: JobConfig | None) -> None:
        """Serve another run, from the base model or from where it was left, under these job settings (None: the
        server's own). The worker is coming up when this returns; episodes of the run that was left are unknown here.
        """
        ...


class SingleRun:
    """A gateway that stays."""

    name = ""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def enter(self, name: str, job: JobConfig | None) -> None:
        if name:
            raise Conflict("This server has one run only.", code="one_run")
