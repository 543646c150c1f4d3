"""Where trials run: a `ServerSlot` has room for one run at a time, and serves it from where that run stands.

`LeasedServerSlot`: a server that somebody else started, had for the study alone.
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
"""What nobody sets: it is named with the study."""
OPERATION = ("server.", "model.threads")
"""Settings that nothing trained depends on."""


class ServerUnavailable(ConfigError):
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


class RunningServer(Protocol):
    """A server that serves a run."""

    @property
    def address(self) -> Address: ...

    def check(self) -> None:
        """Asked again and again meanwhile. Raises `AgentJetError` when the run is served no more."""
        ...


class ServerSlot(Protocol):
    """Room for one run of a policy. Used by one thread."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def serving(self, run: Path, settings: Setting, stopping: Event) -> AbstractContextManager[RunningServer]:
        """A server of the run that has the folder `run`: it stands at the base model, or where the run was when it was
        last served. Nobody else trains there meanwhile.

        Raises `AgentJetError` when there is none to be had, or the study is `stopping` before there is.
        """
        ...

    def check(self) -> None:
        """Ask for the place once. Raises `ServerUnavailable` where no trial could be had from it; that somebody
        else has it is no reason.
        """
        ...

    def over(self, run: Path) -> None:
        """Nobody will take the run further: what it takes to do so may go."""
        ...

    def close(self) -> None:
        """The study needs the place no more."""
        ...


LEASE_SECONDS = 60.0
"""Of a lease: how long a researcher may be silent before others may have the server."""
POLL_SECONDS = 0.5
SERVER_SETTINGS = ("model.device", "model.dtype", "model.threads", "sampler.", "server.")
"""Settings that are the server's own affair: how fast it is, not what is trained."""


WEIGHTS = "weights"
"""Beside the runs: the fingerprint of the model they begin with."""


class ServerLost(AgentJetError):
    """The server does not serve the run any more."""


@dataclass
class LeasedServer:
    """A run on a leased server. The lease is renewed as long as somebody asks."""

    swarm: Swarm
    holder: str
    run: str
    address: Address
    monotonic: Callable[[], float] = time.monotonic
    _renewed: float = field(init=False)

    def __post_init__(self) -> None:
        self._renewed = self.monotonic()

    def check(self) -> None:
        """Raises `AgentJetError` when the lease is another's, or the server serves something else."""
        if self.monotonic() - self._renewed < LEASE_SECONDS / 4:
            return
        lease = self.swarm.take_lease(self.holder, LEASE_SECONDS, epoch=self.address.lease)
        if lease.run != self.run:
            raise ServerLost(f"{self.address.url} serves run {lease.run!r} and not {self.run!r}: it was restarted")
        self._renewed = self.monotonic()


@dataclass
class LeasedServerSlot:
    """A server at `url`, with its admin token. It is kept from one trial to the next, and given back when the study
    ends or is idle for the time of a lease: several studies may name it.
    """

    url: str
    token: str
    holder: str
    tell: Callable[[str], None]
    """Hears for whom the study waits."""
    _epoch: int | None = None

    @property
    def name(self) -> str:
        return self.url

    def check(self) -> None:
        """Once a server is had, this renews its lease."""
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
    def serving(self, run: Path, settings: Setting, stopping: Event) -> Iterator[LeasedServer]:
        """Waits while somebody else has the server."""
        job = job_of(settings)
        with Swarm(self.url, self.token) as swarm:
            self._epoch = self._taken(swarm, stopping)
        with Swarm(self.url, self.token, lease=self._epoch) as holder:
            self._check_model(holder, settings)
            name = name_there(run)
            holder.enter_run(name, job)
            served = LeasedServer(holder, self.holder, name, Address(self.url, self.token, self._epoch))
            while (status := holder.status()).state in ("loading", "offline"):
                served.check()
                stopping.wait(POLL_SECONDS)
                give_up(stopping)
            if status.state == "failed":
                raise ServerLost(f"{self.url} could not load the model: {status.waiting_for}")
            check_weights(run.parent / WEIGHTS, self.url, status.model_weights)
            yield served

    def over(self, run: Path) -> None:
        """The server keeps what it has."""

    def close(self) -> None:
        """Give the server back, where it is still held."""
        if self._epoch is not None:
            with Swarm(self.url, self.token) as swarm, suppress(AgentJetError):
                swarm.take_lease(self.holder, LEASE_SECONDS, epoch=self._epoch)
                swarm.end_lease()
            self._epoch = None

    def _taken(self, swarm: Swarm, stopping: Event) -> int:
        """The epoch of the lease that is held from now on."""
        told = False
        while True:
            give_up(stopping)
            try:
                return swarm.take_lease(self.holder, LEASE_SECONDS, epoch=self._epoch).epoch
            except Conflict as conflict:
                if conflict.code not in ("leased", "lease_over"):
                    raise
                if self._epoch is None:
                    if not told:
                        self.tell(f"waiting for {self.url}: {conflict}")
                    told = True
                    stopping.wait(POLL_SECONDS)
                self._epoch = None

    def _check_model(self, swarm: Swarm, settings: Setting) -> None:
        """Raises `ConfigError` when the server serves another model than the study's."""
        wanted, found = Path(str(settings["model.name"])).name, swarm.status().model
        if Path(found).name != wanted:
            raise ConfigError(f"{self.url} serves {found!r}, and the study trains {wanted!r}: name another server")


def give_up(stopping: Event) -> None:
    if stopping.is_set():
        raise ServerLost("the study ended while it waited for the server")


def check_weights(file: Path, url: str, found: str) -> None:
    """Raises `ConfigError` when a server's model has other weights than that of the study's first server, which `file`
    notes. What is called alike need not be alike.
    """
    with file.open("a+", encoding="utf-8") as noted:
        fcntl.flock(noted, fcntl.LOCK_EX)  # against the other places of the study
        noted.seek(0)
        first = noted.read()
        if not first:
            noted.write(found)
    if first and found and first != found:
        raise ConfigError(
            f"{url} serves other weights by the model's name: its model_weights are {found!r}, and the study began "
            f"with {first!r}: serve the same model there, or leave that server out"
        )


def name_there(run: Path) -> str:
    """What a run is called on servers: one that begins anew, after it was lost, is another there."""
    file = run / "name"
    if not file.exists():
        write_whole(file, f"{run.name}-{uuid.uuid4().hex[:6]}")
    return file.read_text(encoding="utf-8")


def check_arms(study: Study) -> None:
    """Raises `ConfigError` for an arm that sets or tunes what such a server keeps: nothing would come of it."""
    for arm in study.arms:
        for name in (*arm.changes, *(knob.name for knob in arm.nuisance)):
            if not name.startswith("job."):
                raise ConfigError(
                    f"arm {arm.name!r}: {name} is kept by a server that is running: leave --server out, and the study "
                    "starts its own"
                )


def job_of(settings: Setting) -> dict[str, object]:
    """The whole of the job settings. Raises `ConfigError` for settings that only whoever starts a server can make."""
    for name in settings:
        if not name.startswith(("job.", "model.name", *SERVER_SETTINGS)):
            raise ConfigError(
                f"{name} = {settings[name]!r} cannot be set on a server that is running: leave --server out, and the "
                "study starts its own"
            )
    job = {name: value for name, value in settings.items() if name.startswith("job.")}
    return parse_config(job).job.model_dump(mode="json")
