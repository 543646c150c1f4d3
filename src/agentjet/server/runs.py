"""What the routes know of the lines of weights that a server can serve, one at a time."""

from __future__ import annotations

from typing import Protocol

from agentjet.config import JobConfig
from agentjet.errors import Conflict
from agentjet.gateway import Gateway


class Runs(Protocol):
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


class OneRun:
    """A gateway that stays."""

    name = ""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def enter(self, name: str, job: JobConfig | None) -> None:
        if name:
            raise Conflict("This server has one run only.", code="one_run")
