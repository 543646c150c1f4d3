"""The processes of a run: the server, started again on the same data dir whenever it died, and the clients.

Only processes started here are ended, by their id.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from agentjet.protocol import StatusResponse
from agentjet.types import DEFAULT_RUN
from bench.breaking.client import ClientSettings
from bench.breaking.plan import RUNS, TEAM
from bench.machine import free_port

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.02
PATIENCE = 300.0  # Seconds any one thing may take before the run is given up
LOG_LINES = 15
WORKER_TIMEOUT = 4.0  # Seconds without a sign of work after which the server kills a worker
MOST_LIVE = 8  # Live episodes that a client may have: more than the bench's own clients need


Statuses = dict[str, StatusResponse]  # By run


def path_of(run: str) -> str:
    """Start of the paths of a run."""
    return "" if run == DEFAULT_RUN else f"/runs/{run}"


class GivenUp(Exception):
    """The run cannot continue. The message has the reason and the end of the server's log."""


def environment() -> dict[str, str]:
    """One thread each, nothing of the caller's own server, and no network beyond loopback."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENTJET_")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    return {**kept, **threads, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Server:
    """`bench.breaking.server` on a fixed port and data dir, with its output."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], runs: Mapping[str, Sequence[str]] = RUNS, *, port: int = 0
    ) -> None:
        """`runs` are its runs with their policies. `settings` may have a section `server` for further settings. `port`:
        0 for a free one.
        """
        self.folder = folder
        self.runs = runs
        self.port = port or free_port()
        self.data_dir = folder / "data"
        self.log = folder / "server.log"
        self.said: list[dict[str, Any]] = []  # Every fact that the server reported, over all its processes
        server = {
            "data_dir": str(self.data_dir),
            "port": self.port,
            "call_timeout": 60.0,
            "worker_timeout": WORKER_TIMEOUT,
            "max_episodes_per_client": MOST_LIVE,
            **settings.get("server", {}),
        }
        self.settings = {**settings, "server": server}
        (folder / "settings.json").write_text(json.dumps(self.settings))
        self._numbers = itertools.count(1)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=30)

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "the server was not started"
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.breaking.server", str(self.folder / "settings.json"), str(self.folder)),
            cwd=ROOT,
            env=environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reader = asyncio.create_task(self._listen(self._process))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with self.log.open("ab") as log:
            async for line in process.stdout:
                if line.startswith(b'{"chaos"'):
                    self.said.append({"time": time.monotonic(), **json.loads(line)["chaos"]})
                log.write(line)
                log.flush()

    async def order(self, verb: str, /, **how: Any) -> bool:
        """Sends an order. Returns False if the server died before it received the order."""
        number, heard = next(self._numbers), len(self.said)
        with contextlib.suppress(ConnectionError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"verb": verb, "how": how, "number": number}).encode() + b"\n")
            await self.process.stdin.drain()
        await self.until(lambda: not self.is_running or any(fact.get("heard") == number for fact in self.said[heard:]))
        return self.is_running

    async def dead(self, within: float) -> bool:
        """Waits until the process is gone and its whole output was read. Returns False after `within` seconds."""
        try:
            await asyncio.wait_for(self.process.wait(), within)
        except TimeoutError:
            return False
        if self._reader is not None:
            await self._reader
        return True

    async def kill(self) -> None:
        """As a power cut would."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.dead(PATIENCE)

    async def stop(self) -> int:
        """Ctrl-C: a checkpoint, then the end; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        if not await self.dead(PATIENCE):
            raise GivenUp(f"the server does not end\n{self.log_tail()}")
        return self.process.returncode or 0

    async def close(self) -> None:
        """Ends the process in any state."""
        if self.is_running:
            await self.kill()
        await self._http.aclose()

    def folder_of(self, run: str) -> Path:
        """Folder of the files of a run."""
        return self.data_dir / "runs" / run

    def token(self, run: str = DEFAULT_RUN) -> str:
        folder = self.data_dir if run == DEFAULT_RUN else self.folder_of(run)
        return (folder / "token").read_text().strip()

    async def start_team(self) -> None:
        """Has the server start the run with several policies. It opens that run again whenever it starts."""
        job = {**self.settings["job"], "optimizers": {RUNS[TEAM][-1]: {"lr": 2e-3}}}
        body = {"policies": {policy: {} for policy in RUNS[TEAM]}, "job": job}
        (await self.request("PUT", f"/swarm/v1/runs/{TEAM}", json=body)).raise_for_status()

    async def statuses(self) -> Statuses | None:
        """By run. None while the server does not answer."""
        try:
            answers = {run: await self.request("GET", f"{path_of(run)}/swarm/v1/status") for run in self.runs}
        except (httpx.TransportError, OSError):
            return None
        if not all(answer.is_success for answer in answers.values()):
            return None
        return {run: StatusResponse.model_validate_json(answer.content) for run, answer in answers.items()}

    async def exports(self) -> dict[str, dict[str, Path]]:
        """The present policies as folders, by run and policy."""
        return {run: {policy: await self._export(run, policy) for policy in own} for run, own in self.runs.items()}

    async def _export(self, run: str, policy: str) -> Path:
        body = {"policy": policy if run == TEAM else ""}
        answer = await self.request("POST", f"{path_of(run)}/swarm/v1/exports", json=body, timeout=PATIENCE)
        return Path(answer.raise_for_status().json()["path"])

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request of an admin."""
        admin = (self.data_dir / "admin-token").read_text().strip()
        return await self._http.request(method, path, headers={"Authorization": f"Bearer {admin}"}, **options)

    async def up(self) -> Statuses:
        """Wait until it answers."""
        return await self.wait(lambda statuses: True)

    async def sampling(self, since: int = 0) -> Statuses:
        """Waits until all runs sample, with a worker that the server reported after the first `since` facts."""
        await self.until(lambda: not self.is_running or any("worker" in fact for fact in self._life(since)))
        return await self.wait(
            lambda statuses: all(status.state in ("sampling", "learning") for status in statuses.values())
        )

    async def learned(self, since: Statuses, batches: int = 1) -> Statuses:
        """Waits until every run has learned so many batches more."""
        return await self.wait(
            lambda statuses: all(
                status.policy_version >= since[run].policy_version + batches for run, status in statuses.items()
            )
        )

    async def wait(self, enough: Callable[[Statuses], bool]) -> Statuses:
        """Waits for statuses. Raises `ServerEnded`, and `GivenUp` if it takes too long."""
        deadline = time.monotonic() + PATIENCE
        while True:
            statuses = await self.statuses()
            if statuses is not None and enough(statuses):
                return statuses
            if not self.is_running:
                raise ServerEnded(self.process.returncode)
            has_failed = statuses is not None and any(status.state == "failed" for status in statuses.values())
            if time.monotonic() > deadline or has_failed:
                raise GivenUp(f"the server is stuck: {statuses}\n{self.log_tail()}")
            await asyncio.sleep(POLL_SECONDS)

    async def until(self, predicate: Callable[[], bool], within: float = PATIENCE) -> bool:
        """Wait for a fact; whether it came."""
        deadline = time.monotonic() + within
        while not predicate():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    def _life(self, since: int) -> list[dict[str, Any]]:
        """The facts of the present process, after the first `since` facts."""
        born = max((i for i, fact in enumerate(self.said) if "gateway" in fact), default=0)
        return self.said[max(born, since) :]

    @property
    def worker_pid(self) -> int | None:
        """The worker of the present process that came up last."""
        workers = [int(fact["worker"]) for fact in self._life(0) if "worker" in fact]
        return workers[-1] if workers else None

    def log_tail(self) -> str:
        return "\n".join("    " + line for line in self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


class ServerEnded(Exception):
    """The server ended while the bench waited for it, and the bench had not killed it."""


class Client:
    """A client process; a new one takes its place when it is killed."""

    def __init__(self, folder: Path, settings: ClientSettings) -> None:
        self._folder = folder
        self.settings = settings
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self._folder / "clients.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.breaking.client", self.settings.to_json()),
                cwd=ROOT,
                env=environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def tell(self, line: str) -> None:
        """An order: `hang silent`, `hang busy`, `stop`."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()

    def num_hung(self) -> int:
        """Signs of life of agents that hang."""
        book = Path(self.settings.book)
        return book.read_text().count('"hung"') if book.exists() else 0

    async def stop(self, within: float) -> None:
        """Let it end what it is at; killed when that takes long."""
        await self.tell("stop")
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), within)
        await self.kill()
