"""Servers on which trials run. A `ServerSlot` serves one run at a time and continues it where it stands.

`LeasedServerSlot` uses a server that someone else started, leased for the study.
"""

from __future__ import annotations

import fcntl
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from agentjet.client import Swarm
from agentjet.config import parse_config
from agentjet.errors import AgentJetError, ConfigError, Conflict
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
    """URL and token of a server. `token` is the client token or the admin token; `lease` is the epoch of the lease."""

    url: str
    token: str
    lease: int | None = None


def check_model(settings: Setting) -> None:
    """Raises `ConfigError` if the settings name a model."""
    for name in MODEL:
        if name in settings:
            raise ConfigError(
                f"{name} = {settings[name]!r}: all arms run the study's --model; plan another study for another "
                "model, in another folder"
            )


def check_changes(changes: Setting) -> None:
    """Raises `ConfigError` for settings in which arms cannot differ, because training would be the same."""
    check_model(changes)
    for name, value in changes.items():
        if name.startswith(OPERATION):
            raise ConfigError(
                f"{name} = {value!r} belongs to the server and does not affect training: set it for all "
                "arms (--set), or omit it"
            )


class RunningServer(Protocol):
    """A server that serves a run."""

    @property
    def address(self) -> Address: ...

    def check(self) -> None:
        """Called repeatedly during the trial. Raises `AgentJetError` if the run is not served any more."""
        ...


class ServerSlot(Protocol):
    """A slot for one run of a policy. Used by one thread."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    def serve(self, run: Path, settings: Setting, stopping: Event) -> AbstractContextManager[RunningServer]:
        """Serves the run with the folder `run`, from the base model or from where the run stopped. Nothing else trains
        there.

        Raises `AgentJetError` if no server is available, or if the study is `stopping`.
        """
        ...

    def check(self) -> None:
        """Contacts the server once. Raises `ServerUnavailable` if no trial could run there. A lease of another holder
        is not an error.
        """
        ...

    def run_finished(self, run: Path) -> None:
        """Called when no trial continues this run; files that only a continuation needs may be deleted."""
        ...

    def close(self) -> None:
        """Called when the study needs the slot no more."""
        ...


LEASE_SECONDS = 60.0
"""Duration of a lease without renewal."""
POLL_SECONDS = 0.5
SERVER_SETTINGS = ("model.device", "model.dtype", "model.threads", "sampler.", "server.")
"""Settings of the server that affect speed, not training."""


WEIGHTS = "weights"
"""File beside the runs with the fingerprint of their base model."""


class ServerLost(AgentJetError):
    """The server does not serve the run any more."""


@dataclass
class LeasedServer:
    """A run on a leased server. `check` renews the lease."""

    swarm: Swarm
    holder: str
    run: str
    address: Address
    monotonic: Callable[[], float] = time.monotonic
    _renewed: float = field(init=False)

    def __post_init__(self) -> None:
        self._renewed = self.monotonic()

    def check(self) -> None:
        """Raises `AgentJetError` if another holder has the lease, or if the server serves another run."""
        if self.monotonic() - self._renewed < LEASE_SECONDS / 4:
            return
        lease = self.swarm.take_lease(self.holder, LEASE_SECONDS, epoch=self.address.lease)
        if lease.run != self.run:
            raise ServerLost(f"{self.address.url} serves run {lease.run!r} and not {self.run!r}: it was restarted")
        self._renewed = self.monotonic()


@dataclass
class LeasedServerSlot:
    """A server at `url` with its admin token. It is kept between trials. It is returned when the study ends or is idle
    for the duration of a lease, so several studies may name it.
    """

    url: str
    token: str
    holder: str
    notify: Callable[[str], None]
    """Called with a message while the study waits for another holder."""
    _epoch: int | None = None

    @property
    def name(self) -> str:
        return self.url

    def check(self) -> None:
        """Takes the lease, or renews it if it is held."""
        try:
            with Swarm(self.url, self.token) as swarm:
                self._epoch = swarm.take_lease(self.holder, LEASE_SECONDS, epoch=self._epoch).epoch
        except Conflict:
            return
        except AgentJetError as error:
            raise ServerUnavailable(
                f"--server {self.url}: {error}; give the address of a server that runs, and the `admin-token` of its "
                "data dir"
            ) from None

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[LeasedServer]:
        """Waits while another holder has the server."""
        job = job_of(settings)
        with Swarm(self.url, self.token) as swarm:
            self._epoch = self._taken(swarm, stopping)
        with Swarm(self.url, self.token, lease=self._epoch) as holder:
            self._check_model(holder, settings)
            name = server_run_name(run)
            holder.enter_run(name, job)
            server = LeasedServer(holder, self.holder, name, Address(self.url, self.token, self._epoch))
            while (status := holder.status()).state in ("loading", "offline"):
                server.check()
                stopping.wait(POLL_SECONDS)
                check_not_stopping(stopping)
            if status.state == "failed":
                raise ServerLost(f"{self.url} could not load the model: {status.waiting_for}")
            check_weights(run.parent / WEIGHTS, self.url, status.model_weights)
            yield server

    def run_finished(self, run: Path) -> None:
        """Does nothing: the server keeps its files."""

    def close(self) -> None:
        """Ends the lease if it is still held."""
        if self._epoch is not None:
            with Swarm(self.url, self.token) as swarm, suppress(AgentJetError):
                swarm.take_lease(self.holder, LEASE_SECONDS, epoch=self._epoch)
                swarm.end_lease()
            self._epoch = None

    def _taken(self, swarm: Swarm, stopping: Event) -> int:
        """Waits for the lease and returns its epoch."""
        notified = False
        while True:
            check_not_stopping(stopping)
            try:
                return swarm.take_lease(self.holder, LEASE_SECONDS, epoch=self._epoch).epoch
            except Conflict as conflict:
                if conflict.code not in ("leased", "lease_over"):
                    raise
                if self._epoch is None:
                    if not notified:
                        self.notify(f"waiting for {self.url}: {conflict}")
                    notified = True
                    stopping.wait(POLL_SECONDS)
                self._epoch = None

    def _check_model(self, swarm: Swarm, settings: Setting) -> None:
        """Raises `ConfigError` if the server serves another model than the study's."""
        wanted, found = Path(str(settings["model.name"])).name, swarm.status().model
        if Path(found).name != wanted:
            raise ConfigError(f"{self.url} serves {found!r}, and the study trains {wanted!r}: name another server")


def check_not_stopping(stopping: Event) -> None:
    if stopping.is_set():
        raise ServerLost("the study ended while waiting for the server")


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
    """Returns the run's name on servers. A run that restarts after a loss gets a new name."""
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
