"""The servers of trials: `Servers`, their options; slots on servers that are there, and slots that start them, on this
machine or on nodes of a Ray cluster.

The data dir of a started server is `server/` in the folder of its run, so another server continues where it ended, on
another node too. A server on a node is a process of `RayPlacement`: it ends with its actor, and that with this process.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Option

from agentjet.cli.serve import STOP_SECONDS, ChildServer, ServerEnded, address_when_ready
from agentjet.errors import AgentJetError, ComputeError, ConfigError, Later, install_extra
from agentjet.types import DEFAULT_RUN, JOURNAL

if TYPE_CHECKING:
    from agentjet.client import Swarm
    from agentjet.client.threads import LoopThread
    from agentjet.processes.guardian import Launch
    from agentjet.processes.supervisor import RayPlacement, RayProcess
    from agentjet.research.models import Setting, Study
    from agentjet.research.swarm_runner import RunningServer, ServerSlot

T = TypeVar("T")
Local = Annotated[int, Option("--local", min=1, help="Servers to start on this machine, side by side.")]


@dataclass(frozen=True)
class Servers:
    """The options of the servers that carry out trials."""

    local: Local = 2
    server: Annotated[
        list[str] | None,
        Option("--server", metavar="URL", help="Run trials on this server instead of starting any; can be repeated."),
    ] = None
    admin_token_file: Annotated[
        list[Path] | None,
        Option("--admin-token-file", help="`admin-token` in that server's data dir; one for each --server."),
    ] = None
    ray: Annotated[
        int, Option("--ray", min=0, help="Servers to start on the nodes of a Ray cluster instead, side by side.")
    ] = 0
    ray_address: Annotated[
        str, Option("--ray-address", metavar="HOST:PORT", envvar="RAY_ADDRESS", help="Head of the Ray cluster.")
    ] = "auto"
    ray_gpus: Annotated[int, Option("--ray-gpus", min=0, help="GPUs of each of these servers.")] = 0

    def slots(self) -> Sequence[ServerSlot]:
        """The servers of `--server` and the Ray cluster, which must answer; or those to start on this machine. Raises
        `ConfigError`.
        """
        urls, token_files = self.server or [], self.admin_token_file or []
        if len(urls) != len(token_files):
            raise ConfigError(f"{len(urls)} --server and {len(token_files)} --admin-token-file: give one for each")
        if self.ray and urls:
            raise ConfigError(f"--ray {self.ray} starts servers, and --server {urls[0]} runs already: give one of them")
        if self.ray_gpus and not self.ray:
            raise ConfigError(f"--ray-gpus {self.ray_gpus}: also give the number of servers on the cluster (--ray)")
        if self.ray:
            return ray_slots(self.ray, self.ray_address, self.ray_gpus)
        try:
            tokens = [file.read_text(encoding="utf-8").strip() for file in token_files]
        except OSError as error:
            raise ConfigError(f"--admin-token-file {error.filename}: {error.strerror}") from None
        shared = [SharedServerSlot(url, token, typer.echo) for url, token in zip(urls, tokens, strict=True)]
        for slot in shared:
            slot.check()
        return shared or local_slots(self.local)


# ---- servers that are there ------------------------------------------------------------------------------------------

POLL_SECONDS = 0.2
SERVER_SETTINGS = ("model.device", "model.dtype", "model.threads", "sampler.", "server.")
"""Settings of the server that affect speed, not training."""
WEIGHTS = "weights"
"""File beside the runs with the fingerprint of their base model."""


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
        from agentjet.client import Swarm
        from agentjet.research.swarm_runner import ServerUnavailable

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
        from agentjet.client import Swarm
        from agentjet.research.models import Address
        from agentjet.research.swarm_runner import RunningServer

        job, name = job_of(settings), server_run_name(run)
        check_not_stopping(stopping)
        with Swarm(self.url, self.token) as swarm:
            swarm.start_run(name, job=job)
            try:
                with swarm.of_run(name) as of_run:
                    self._wait_until_loaded(of_run, settings, stopping)
                    status = of_run.status()
                    check_weights(run.parent / WEIGHTS, self.url, status.model_weights)
                    yield RunningServer(Address(of_run.url, self.token), of_run.status, status.machine)
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
            raise ServerEnded(f"{self.url} could not load the model: {status.waiting_for}")

    def _end_run(self, name: str) -> None:
        """Uses a new connection, which does not wait long for a server that is gone."""
        from agentjet.client import Swarm

        try:
            with Swarm(self.url, self.token) as swarm:
                swarm.end_run(name)
        except AgentJetError as error:
            self.notify(f"run {name} of {self.url} may still be open ({error}); to end it: agentjet runs end {name}")


def check_weights(file: Path, url: str, found: str) -> None:
    """Raises `ConfigError` if the server's weights differ from those of the study's first server, recorded in `file`.
    Models with equal names can differ.
    """
    from agentjet.research.swarm_runner import first_noted

    first = first_noted(file, found)
    if found and first != found:
        raise ConfigError(
            f"{url} serves other weights under the model's name: its model_weights are {found!r}, but the study "
            f"started with {first!r}: serve the same model there, or remove that server"
        )


def server_run_name(run: Path) -> str:
    """Returns the run's name on servers. A run that restarts from the base model after a loss gets a new name."""
    from agentjet.research.journal import write_whole

    file = run / "name"
    if not file.exists():
        write_whole(file, f"{run.name}-{uuid.uuid4().hex[:6]}")
    return file.read_text(encoding="utf-8")


def check_arms(study: Study) -> None:
    """Raises `ConfigError` for an arm that sets or tunes a setting which a running server cannot change."""
    from agentjet.research.models import OF_SUBJECT

    for arm in study.arms:
        for name in (*arm.changes, *(knob.name for knob in arm.nuisance)):
            if not name.startswith("job.") and name not in OF_SUBJECT - {"model"}:
                raise ConfigError(
                    f"arm {arm.name!r}: {name} cannot be changed on a running server: omit --server, and the study "
                    "starts its servers"
                )


def job_of(settings: Setting) -> dict[str, object]:
    """Returns the complete job settings. Raises `ConfigError` for settings that need a new server."""
    from agentjet.config import parse_config

    for name in settings:
        if not name.startswith(("job.", "model.name", *SERVER_SETTINGS)):
            raise ConfigError(
                f"{name} = {settings[name]!r} cannot be set on a running server: omit --server, and the study "
                "starts its servers"
            )
    job = {name: value for name, value in settings.items() if name.startswith("job.")}
    return parse_config(job).job.model_dump(mode="json")


def check_not_stopping(stopping: Event) -> None:
    if stopping.is_set():
        raise ServerEnded("the study ended before the server was ready")


# ---- this machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalServerSlot:
    """A slot for one server on this machine."""

    number: int
    threads: int
    """Default number of threads of its worker."""

    @property
    def name(self) -> str:
        return f"local server {self.number}"

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[RunningServer]:
        from agentjet.research.models import Address
        from agentjet.research.swarm_runner import RunningServer

        data_dir = run / "server"
        wait_until_free(data_dir, stopping)
        overrides = overrides_of({"model.threads": self.threads, **settings})
        with ChildServer(None, overrides, data_dir, is_one_of_many=True) as server:
            with server.connect(lambda: check_not_stopping(stopping)) as swarm:
                machine = swarm.status().machine
            token = (data_dir / "token").read_text(encoding="utf-8").strip()
            yield RunningServer(Address(server.url, token), server.check, machine)

    def check(self) -> None:
        """Does nothing: each trial starts a new server."""

    def run_finished(self, run: Path) -> None:
        remove_checkpoints(run)


def local_slots(count: int) -> list[LocalServerSlot]:
    threads = max(1, (os.cpu_count() or 1) // count)
    return [LocalServerSlot(number, threads) for number in range(1, count + 1)]


def overrides_of(settings: Setting) -> list[str]:
    """The settings of a server that is started for a trial. Its newest checkpoint is enough."""
    return [f"{name}={json.dumps(value)}" for name, value in {"job.keep_checkpoints": 1, **settings}.items()]


def remove_checkpoints(run: Path) -> None:
    """Keeps the newest policy, for `agentjet research apply`."""
    from agentjet.research.swarm_runner import POLICY

    checkpoints = run / "server" / "runs" / DEFAULT_RUN / "checkpoints"
    for newest in sorted(checkpoints.glob(f"step_*/{POLICY}"))[-1:]:
        newest.replace(run / POLICY)
    shutil.rmtree(checkpoints, ignore_errors=True)


def wait_until_free(data_dir: Path, stopping: Event) -> None:
    """Waits until the server of a killed researcher has saved its policy and ended. Raises `ServerEnded`."""
    lock = data_dir / "runs" / DEFAULT_RUN / f"{JOURNAL}.lock"
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


# ---- a Ray cluster ---------------------------------------------------------------------------------------------------


class RayCluster:
    """The cluster at an address, for the threads of slots."""

    def __init__(self, address: str, log_folder: Path) -> None:
        """Raises `ConfigError` if the cluster cannot be joined."""
        from agentjet.client.threads import LoopThread
        from agentjet.processes.supervisor import RayPlacement

        async def place() -> RayPlacement:
            return RayPlacement("127.0.0.1", address, log_folder)

        self.address = address
        self._loop: LoopThread = LoopThread()
        self._placement: RayPlacement = self._loop.run(place())
        self.num_gpus = self._asked(self._placement.num_gpus()) or 0

    def check(self) -> None:
        """Raises `ServerUnavailable` if the cluster is away."""
        from agentjet.research.swarm_runner import ServerUnavailable

        try:
            self._asked(self._placement.num_gpus())
        except (ConfigError, ComputeError, Later) as error:
            raise ServerUnavailable(str(error)) from None

    def start(self, launch: Launch, stopping: Event) -> RayProcess:
        """Starts a process. Raises `ServerUnavailable` if no node is free, and `ConfigError` if one cannot run it."""
        from agentjet.research.swarm_runner import ServerUnavailable

        try:
            return self._asked(self._placement.start(launch), stopping)
        except (ComputeError, Later) as error:
            raise ServerUnavailable(str(error)) from None
        except ConfigError as error:
            needs = "all nodes must see this folder, and have AgentJet, at the same paths as here"
            raise ConfigError(f"--ray: {needs}: {error}") from None

    def stop(self, process: RayProcess) -> None:
        self._loop.submit(process.stop()).result()

    def close(self) -> None:
        self._loop.run(self._placement.close())
        self._loop.stop()

    def _asked(self, work: Coroutine[Any, Any, T], stopping: Event | None = None) -> T:
        """The result. An error names the option and not the setting of a server."""
        future = self._loop.submit(work)
        while stopping is not None and not future.done():
            if stopping.wait(POLL_SECONDS):
                future.cancel()
                check_not_stopping(stopping)
        try:
            return future.result()
        except ConfigError as error:
            text = str(error).replace(f"compute.address = {self.address!r}", f"--ray-address {self.address}")
            raise ConfigError(text) from None


@dataclass(frozen=True)
class RayServerSlot:
    """A slot for one server on a node of a Ray cluster. Each trial may get another node."""

    cluster: RayCluster = field(repr=False)
    number: int
    gpus: int

    @property
    def name(self) -> str:
        return f"Ray server {self.number}"

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[RunningServer]:
        from agentjet.client import Retry, Swarm
        from agentjet.processes.guardian import Launch
        from agentjet.research.models import Address
        from agentjet.research.swarm_runner import MachineLost, RunningServer

        data_dir = (run / "server").resolve()  # a node has another working directory
        wait_until_free(data_dir, stopping)
        if (model := Path(str(settings["model.name"]))).is_dir():
            settings = {**settings, "model.name": str(model.resolve())}
        data_dir.mkdir(0o700, parents=True, exist_ok=True)
        log = data_dir / "serve.log"
        log.touch(0o600)
        os.truncate(log, 0)
        command = [sys.executable, "-P", "-c", "from agentjet.cli.serve import serve_on_node; serve_on_node()"]
        command += ["--data-dir", str(data_dir), "--port", "0", *(f"--set={one}" for one in overrides_of(settings))]
        launch = Launch(self.name, command, log, gpus=self.gpus, needs_shared_files=True)
        process = self.cluster.start(launch, stopping)

        def check_process() -> None:
            check_not_stopping(stopping)
            if process.ended.done():
                end = process.ended.result()
                raise (ServerEnded if end.by_itself else MachineLost)(f"the server {end.reason}")

        try:
            url = address_when_ready(log, check_process)
            token, admin_token = (
                (data_dir / name).read_text(encoding="utf-8").strip() for name in ("token", "admin-token")
            )
            with Swarm(url, admin_token, retry=Retry(patience=UNANSWERED_SECONDS)) as swarm:
                status = swarm.status()
                check_weights(run.parent / WEIGHTS, f"{self.name} ({process.place})", status.model_weights)

                def check() -> None:
                    check_process()
                    try:
                        swarm.status()
                    except AgentJetError as error:  # Ray needs longer to find that a node is silent
                        check_process()
                        raise MachineLost(f"the server on {process.place} does not answer: {error}") from None

                yield RunningServer(Address(url, token), check, status.machine)
                with suppress(AgentJetError):
                    swarm.checkpoint()  # the end of the process is a kill
        finally:
            self.cluster.stop(process)

    def check(self) -> None:
        self.cluster.check()

    def run_finished(self, run: Path) -> None:
        remove_checkpoints(run)


UNANSWERED_SECONDS = 60.0
"""Time that a server on a node may not answer before its machine counts as lost."""


def ray_slots(count: int, address: str, gpus: int, tell: Callable[[str], None] = typer.echo) -> list[RayServerSlot]:
    """Slots on a cluster. Raises `ConfigError` if it cannot be joined."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"--ray {count} needs Ray: {install_extra('cluster')}. Or use servers here (--local)")
    cluster = RayCluster(address, Path(tempfile.mkdtemp(prefix="agentjet-ray-")))
    atexit.register(cluster.close)
    if count * gpus > cluster.num_gpus:
        tell(
            f"--ray {count} --ray-gpus {gpus}: the cluster has {cluster.num_gpus} GPUs now, so "
            f"{cluster.num_gpus // gpus} of the servers can run at the same time; the others wait for nodes"
        )
    return [RayServerSlot(cluster, number, gpus) for number in range(1, count + 1)]
