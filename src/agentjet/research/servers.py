"""Servers on which trials run. A `ServerSlot` serves one run at a time and continues it where it stands.

`SharedServerSlot` starts its runs on a server that someone else started. Other runs train there at the same time.
"""

from __future__ import annotations

import fcntl
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

from agentjet.client import Swarm
from agentjet.config import parse_config
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.journal import write_whole
from agentjet.research.models import Study
from agentjet.research.records import Record, Setting

MODEL = ("model", "model.name", "model.path")
"""Settings that arms cannot set: the model belongs to the study."""
OPERATION = ("server.", "model.threads")
"""Settings that do not affect training."""


class ServerUnavailable(ConfigError):
    """No trial can run on this server."""


@dataclass(frozen=True)
class Address(Record):
    """URL of a run, and the client token or the admin token."""

    url: str
    token: str


def check_changes(changes: Setting, *, of_all: bool = False) -> None:
    """Raises `ConfigError` for settings in which arms cannot differ, because training would be the same. With `of_all`
    the settings are those of all arms, which may not name a model.
    """
    for name, value in changes.items():
        if name in MODEL:
            raise ConfigError(
                f"{name} = {value!r}: all arms run the study's --model; plan another study for another model, in "
                "another folder"
            )
        if name.startswith(OPERATION) and not of_all:
            raise ConfigError(
                f"{name} = {value!r} belongs to the server and does not affect training: set it for all "
                "arms (--set), or omit it"
            )


@dataclass(frozen=True)
class RunningServer:
    """A server that serves a run."""

    address: Address
    check: Callable[[], object]
    """Called repeatedly during the trial. Raises `AgentJetError` if the run is not served any more."""


class ServerSlot(Protocol):
    """A slot for one run of a policy. Used by one thread."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    def serve(self, run: Path, settings: Setting, stopping: Event) -> AbstractContextManager[RunningServer]:
        """Serves the run with the folder `run`, from the base model or from where the run stopped.

        Raises `AgentJetError` if no server is available, or if the study is `stopping`.
        """
        ...

    def check(self) -> None:
        """Contacts the server once. Raises `ServerUnavailable` if no trial could run there."""
        ...

    def run_finished(self, run: Path) -> None:
        """Called when no trial continues this run; files that only a continuation needs may be deleted."""
        ...


POLL_SECONDS = 0.5
SERVER_SETTINGS = ("model.device", "model.dtype", "model.threads", "sampler.", "server.")
"""Settings of the server that affect speed, not training."""
WEIGHTS = "weights"
"""File beside the runs with the fingerprint of their base model."""


class ServerLost(AgentJetError):
    """The server does not serve the run any more."""


@dataclass
class SharedServerSlot:
    """A server at `url` with its admin token. Each trial has a run there, which is open while the trial runs. Several
    slots and several studies may name the same server.
    """

    url: str
    token: str
    notify: Callable[[str], None]
    """Called with a message if a run could not be ended."""

    @property
    def name(self) -> str:
        return self.url

    def check(self) -> None:
        try:
            with Swarm(self.url, self.token) as swarm:
                swarm.runs()
        except AgentJetError as error:
            raise ServerUnavailable(
                f"--server {self.url}: {error}; give the address of a server that runs, and the `admin-token` of its "
                "data dir"
            ) from None

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[RunningServer]:
        """Starts the run, or opens it again. The end of the trial ends the run; its files stay on the server."""
        job, name = job_of(settings), server_run_name(run)
        check_not_stopping(stopping)
        with Swarm(self.url, self.token) as swarm:
            swarm.start_run(name, job=job)
            try:
                with swarm.of_run(name) as of_run:
                    self._wait_until_loaded(of_run, settings, stopping)
                    check_weights(run.parent / WEIGHTS, self.url, of_run.status().model_weights)
                    yield RunningServer(Address(of_run.url, self.token), of_run.status)
            finally:
                self._end_run(name)

    def run_finished(self, run: Path) -> None:
        """Does nothing: the run ended with its trial."""

    def _wait_until_loaded(self, swarm: Swarm, settings: Setting, stopping: Event) -> None:
        """Raises `ConfigError` if the server serves another model than the study's."""
        wanted, found = Path(str(settings["model.name"])).name, swarm.status().model
        if Path(found).name != wanted:
            raise ConfigError(f"{self.url} serves {found!r}, and the study trains {wanted!r}: name another server")
        while (status := swarm.status()).state in ("loading", "offline"):
            stopping.wait(POLL_SECONDS)
            check_not_stopping(stopping)
        if status.state == "failed":
            raise ServerLost(f"{self.url} could not load the model: {status.waiting_for}")

    def _end_run(self, name: str) -> None:
        """Uses a new connection, which does not wait long for a server that is gone."""
        try:
            with Swarm(self.url, self.token) as swarm:
                swarm.end_run(name)
        except AgentJetError as error:
            self.notify(f"run {name} of {self.url} may still be open ({error}); to end it: agentjet runs end {name}")


def check_not_stopping(stopping: Event) -> None:
    if stopping.is_set():
        raise ServerLost("the study ended before the server was ready")


def check_weights(file: Path, url: str, found: str) -> None:
    """Raises `ConfigError` if the server's weights differ from those of the study's first server, recorded in `file`.
    Models with equal names can differ.
    """
    with file.open("a+", encoding="utf-8") as noted:
        fcntl.flock(noted, fcntl.LOCK_EX)  # other slots of the study write it too
        noted.seek(0)
        first = noted.read()
        if not first:
            noted.write(found)
    if first and found and first != found:
        raise ConfigError(
            f"{url} serves other weights under the model's name: its model_weights are {found!r}, but the study "
            f"started with {first!r}: serve the same model there, or remove that server"
        )


def server_run_name(run: Path) -> str:
    """Returns the run's name on servers. A run that restarts from the base model after a loss gets a new name."""
    file = run / "name"
    if not file.exists():
        write_whole(file, f"{run.name}-{uuid.uuid4().hex[:6]}")
    return file.read_text(encoding="utf-8")


def check_arms(study: Study) -> None:
    """Raises `ConfigError` for an arm that sets or tunes a setting which a running server cannot change."""
    for arm in study.arms:
        for name in (*arm.changes, *(knob.name for knob in arm.nuisance)):
            if not name.startswith("job."):
                raise ConfigError(
                    f"arm {arm.name!r}: {name} cannot be changed on a running server: omit --server, and the study "
                    "starts its servers"
                )


def job_of(settings: Setting) -> dict[str, object]:
    """Returns the complete job settings. Raises `ConfigError` for settings that need a new server."""
    for name in settings:
        if not name.startswith(("job.", "model.name", *SERVER_SETTINGS)):
            raise ConfigError(
                f"{name} = {settings[name]!r} cannot be set on a running server: omit --server, and the study "
                "starts its servers"
            )
    job = {name: value for name, value in settings.items() if name.startswith("job.")}
    return parse_config(job).job.model_dump(mode="json")
