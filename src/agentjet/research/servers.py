"""Where trials run: a `Place` has room for one run at a time, and serves it from where that run stands."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

from agentjet.errors import ConfigError
from agentjet.research.records import Record, Setting

MODEL = ("model", "model.name", "model.path")
"""What nobody sets: it is named with the study."""
OPERATION = ("server.", "model.threads")
"""Settings that nothing trained depends on."""


class Unserved(ConfigError):
    """A place that no trial can be had from."""


@dataclass(frozen=True)
class Address(Record):
    """A server, as a client reaches it. `token` is the client's or the admin's, `lease` the epoch it works under."""

    url: str
    token: str
    lease: int | None = None


def check_model(settings: Setting) -> None:
    """Raises `ConfigError` for a model among the settings: the study has one."""
    for name in MODEL:
        if name in settings:
            raise ConfigError(
                f"{name} = {settings[name]!r}: --model is what all arms run; another model is another study, in "
                "another folder"
            )


def check_changes(changes: Setting) -> None:
    """Raises `ConfigError` for what arms cannot differ in: they would be trained alike."""
    check_model(changes)
    for name, value in changes.items():
        if name.startswith(OPERATION):
            raise ConfigError(
                f"{name} = {value!r} belongs to the server, and nothing that is trained depends on it: set it for all "
                "arms (--set), or leave it out"
            )


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

    def check(self) -> None:
        """Ask for the place once. Raises `Unserved` where no trial could be had from it; that somebody else has it is
        no reason.
        """
        ...

    def over(self, run: Path) -> None:
        """Nobody will take the run further: what it takes to do so may go."""
        ...

    def close(self) -> None:
        """The study needs the place no more."""
        ...
