"""Where trials run: a `Place` has room for one run at a time, and serves it from where that run stands."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

from agentjet.research.records import Record, Setting


@dataclass(frozen=True)
class Address(Record):
    """A server, as a client reaches it. `token` is the client's or the admin's, `lease` the epoch it works under."""

    url: str
    token: str
    lease: int | None = None


class Served(Protocol):
    """A server that serves a run."""

    @property
    def address(self) -> Address: ...

    def check(self) -> None:
        """Asked again and again meanwhile. Raises `AgentJetError` when the run is served no more."""
        ...


class Place(Protocol):
    """Room for one run of a policy. Used by one thread."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def serving(self, run: Path, settings: Setting, stopping: Event) -> AbstractContextManager[Served]:
        """A server of the run that has the folder `run`: it stands at the base model, or where the run was when it was
        last served. Nobody else trains there meanwhile.

        Raises `AgentJetError` when there is none to be had, or the study is `stopping` before there is.
        """
        ...

    def over(self, run: Path) -> None:
        """Nobody will take the run further: what it takes to do so may go."""
        ...

    def close(self) -> None:
        """The study needs the place no more."""
        ...
