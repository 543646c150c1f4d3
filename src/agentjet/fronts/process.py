"""A front: a process that answers the model calls of its episodes. Started as `python -m agentjet.fronts`.

It connects to the server, answers its requests, and ends with the connection. Agents connect to the front itself, and
the front connects to every replica. It reads episodes and job settings in the journals of the runs, and writes calls
into its own files: see `Segment`.

Its port is a socket that the server has opened, so agents that connect while a front is replaced wait for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from agentjet.compute.fleet import FrontWork, Others, RoutingFacts
from agentjet.compute.remote import RemoteSamplers
from agentjet.config import ServeConfig
from agentjet.errors import ConfigError, NotFound, run_closed
from agentjet.front import addresses, inference
from agentjet.front.http import (
    METHODS,
    HttpServer,
    RequestLimits,
    RunMiddleware,
    RunScope,
    allowed_hosts,
    key_of,
    new_app,
    refuse_foreign,
    tune_python,
    uvicorn_config,
)
from agentjet.front.keys import Keys
from agentjet.front.run import FrontPolicies, FrontRun, RunReport, RunState
from agentjet.front.segment import Segment
from agentjet.front.tracing import Tracing
from agentjet.processes.rpc import Answer, Link, ProcessRequest, answering
from agentjet.protocol import PREFIX
from agentjet.swarm.journal import Slice
from agentjet.swarm.state import CallCounts
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import DEFAULT_RUN, PolicyId

log = logging.getLogger(__name__)

SOCKET = "AGENTJET_FRONT_SOCKET"
"""Variable with the number of the open socket of the front's port."""
PART_BYTES = 2**21
"""Size of the parts of a batch. The event loops of front and server copy one part at a time."""
OPEN_SECONDS = 20.0
"""Time for the file of a front to be released by a process that is being killed."""


# ---- messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """The settings of a front, which the server sends before the first run."""

    index: int
    addresses: tuple[str, ...]
    """Base URLs of all fronts."""
    config: ServeConfig
    """The settings of the server. Those of the job are in the journals."""
    clock_offset: float
    """Unix seconds minus the monotonic clock, as the server has it."""


@dataclass(frozen=True, slots=True)
class FrontReport:
    """The work of a front since its last report."""

    runs: Mapping[str, RunReport]
    work: Mapping[PolicyId, FrontWork]
    cpu_seconds: float
    """CPU time since its start."""
    lag: float
    """Longest time in seconds that the event loop was late since the last report."""


async def ask_for_batch(
    ask: Callable[..., Awaitable[Any]], run: str, batch_id: int
) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
    """Returns forests and metrics of a batch: see `FrontRun.batch`. `ask` is `Peer.ask` of a front."""
    number, sizes = await ask("batch", None, run, batch_id)
    contents = [bytearray(size) for size in sizes]
    for content in contents:
        for start in range(0, len(content), PART_BYTES):
            content[start : start + PART_BYTES] = await ask("part", None, run, number)
    found: tuple[dict[str, TrainingBatch], dict[str, float]] = pickle.loads(contents[0], buffers=contents[1:])
    return found


# ---- the process -----------------------------------------------------------------------------------------------------


class Front:
    """The state of the process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._samplers = RemoteSamplers(link.name)
        self._runs: dict[str, FrontRun] = {}
        self._closed: dict[str, Keys] = {}
        """The keys of closed runs. Their agents get an error that SDKs retry, because the server may be stopping."""
        self._settings: FrontSettings | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._batches: dict[str, tuple[int, deque[memoryview]]] = {}
        """The newest batch of each run that was asked for: the number of the request, and the parts not sent yet."""
        self._batch_numbers = count(1)
        self._late = 0.0
        self._tracing = Tracing()
        self._opening = asyncio.Lock()

    async def run(self) -> None:
        """Answers requests until the connection ends, which ends the process."""
        async for request in self._link.requests():
            self._start(self._answer(request))  # They begin in their order.

    async def _answer(self, request: ProcessRequest) -> None:
        with answering(request, self._link.send):
            self._link.send(Answer(request.id, await getattr(self, f"_{request.op}")(*request.args)))

    @property
    def settings(self) -> FrontSettings:
        assert self._settings is not None, "the server sends the settings first"
        return self._settings

    def _clock(self) -> float:
        return self.settings.clock_offset + time.monotonic()

    async def _begin(self, settings: FrontSettings) -> None:
        self._settings = settings
        self._keys = Keys.open(settings.config.server.data_dir.resolve(), clock=self._clock)
        self._tracing.connect(settings.config.server.trace_endpoint)
        self._start(self._measure_lag())

    async def _listen(self) -> None:
        """Serves the agents. The default run is open."""
        http = HttpServer(uvicorn_config(self._app(), self.settings.config.server))
        self._start(self._serve(http))
        tune_python()

    async def _serve(self, http: HttpServer) -> None:
        await http.serve(sockets=[socket.socket(fileno=int(os.environ[SOCKET]))])
        raise RuntimeError("the HTTP server ended")

    def _app(self) -> Starlette:
        server = self.settings.config.server
        app = new_app(self._scope(DEFAULT_RUN), openapi_url=None)
        app.routes.extend([*inference.router.routes, *addresses.router.routes])
        app.add_middleware(RunMiddleware, enter=self._enter, allowed=allowed_hosts(server))
        app.add_middleware(addresses.FrontPath, front=self.settings.index, addresses=self.settings.addresses)
        for path in ("/", f"{PREFIX}/{{path:path}}", "/metrics", "/healthz", "/readyz"):
            app.add_api_route(path, self._refuse_control, methods=[*METHODS])
        return app

    async def _refuse_control(self) -> None:
        port = self.settings.config.server.port
        raise NotFound(
            f"This is front {self.settings.index}, which answers model calls only. Send this request to the server, at "
            f"{f'port {port}' if port else 'its own port'} (server.port).",
            code="not_served_by_fronts",
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Ends the process if a task failed, because it is useless then. The server replaces it."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the front ends: %s", error, exc_info=error)
            self._link.exit(1)

    async def _open(self, run: str, config: ServeConfig, state: RunState) -> None:
        """Opens the file of a run, or applies another state."""
        async with self._opening:
            if (known := self._runs.get(run)) is None:
                folder = config.server.data_dir.resolve() / "runs" / run
                is_default = run == DEFAULT_RUN
                keys = self._keys if is_default else Keys.open(folder, server=self._keys, clock=self._clock)
                policies = FrontPolicies(run, config, self._samplers)
                segment = await self._opened(folder, self.settings, "/v1" if is_default else f"/runs/{run}/v1")
                known = self._runs[run] = FrontRun(segment, policies, keys, self._tracing, self._clock)
                self._closed.pop(run, None)
        await known.change(state)

    async def _opened(self, folder: Path, settings: FrontSettings, path: str) -> Segment:
        """The front before this one may be ending: its file is locked until then."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + OPEN_SECONDS
        make = partial(Segment, folder, settings.index, len(settings.addresses), clock=self._clock)
        while True:
            try:
                return make(address=lambda front: settings.addresses[front] + path)
            except ConfigError:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _close(self, run: str) -> None:
        async with self._opening:  # A state that was sent before may wait for another run.
            known = self._runs.pop(run, None)
        self._batches.pop(run, None)
        if known is not None:
            self._closed[run] = known.keys
            await known.close()

    def _run(self, name: str) -> FrontRun:
        if name not in self._runs:
            raise run_closed()
        return self._runs[name]

    async def _drained(self, run: str) -> None:
        async with self._opening:  # A state that was sent before is applied, too, if it waits for another run.
            pass
        if run in self._runs:
            await self._runs[run].drained()

    async def _finish(self, run: str, episode_id: str) -> CallCounts | None:
        return await self._run(run).finish(episode_id)

    async def _resume(self, run: str, episode_id: str) -> None:
        if run in self._runs:
            self._runs[run].segment.resume(episode_id)

    async def _prune(self, run: str, rows: Slice) -> None:
        known = self._run(run)
        known.segment.prune(rows)
        await known.commits.durable()

    async def _batch(self, run: str, batch_id: int) -> tuple[int, tuple[int, ...]]:
        """Builds a batch. Returns the number for `_part`, and the sizes of its pickle and of the memory of its arrays,
        which are not copied.
        """
        number, front_run = next(self._batch_numbers), self._run(run)
        self._batches[run] = number, deque()

        def pickled() -> list[memoryview]:
            arrays: list[pickle.PickleBuffer] = []
            head = pickle.dumps(front_run.batch(batch_id), protocol=5, buffer_callback=arrays.append)
            return [memoryview(head), *(array.raw() for array in arrays)]

        contents = await asyncio.to_thread(pickled)
        if number == self._batches.get(run, (0,))[0]:  # Else the server gave it up, and asked again.
            self._batches[run][1].extend(
                content[start : start + PART_BYTES]
                for content in contents
                for start in range(0, len(content), PART_BYTES)
            )
        return number, tuple(map(len, contents))

    async def _part(self, run: str, number: int) -> bytes:
        """Returns the next part of a batch."""
        newest, parts = self._batches[run]
        assert number == newest, "a run builds one batch at a time"
        part = bytes(parts.popleft())
        if not parts:
            del self._batches[run]
        return part

    async def _replicas(self, facts: RoutingFacts) -> None:
        self._samplers.update(facts)

    async def _report(self, others: Mapping[PolicyId, Mapping[str, Others]]) -> FrontReport:
        for policy, work in others.items():
            self._samplers.others(policy, work)
        late, self._late = self._late, 0.0
        runs = {name: run.report() for name, run in self._runs.items()}
        return FrontReport(runs, self._samplers.report(), time.process_time(), late)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.05
            await asyncio.sleep(0.05)
            self._late = max(self._late, loop.time() - due)

    def _scope(self, name: str) -> RunScope:
        run = self._runs[name]
        limits = RequestLimits.of(self.settings.config.server)
        return RunScope(
            name,
            run.keys,
            limits,
            run.calls,
            check_front=lambda episode_id, _: run.segment.check_front(episode_id),
            refuse_foreign=self._refuse_foreign,
        )

    def _enter(self, name: str, request: HTTPConnection) -> RunScope:
        """See `RunMiddleware`. The answer to a stranger does not depend on the run."""
        key = key_of(request)
        if name in self._runs and self._runs[name].keys.knows(key):
            return self._scope(name)
        if name in self._closed and self._closed[name].knows(key):
            raise run_closed()
        self._refuse_foreign(key)
        self._keys.episode(key, 0.0)
        raise AssertionError("no run has this key")

    def _refuse_foreign(self, key: str) -> None:
        refuse_foreign(key, [run.keys for run in self._runs.values()])


async def serve() -> None:
    """Serves the server until its connection ends."""
    await Front(Link.of_program()).run()
