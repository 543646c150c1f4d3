"""A front in the process of a test, in place of `FrontProcesses`: its messages are pickled as between processes."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from agentjet.compute.protocol import Sampler
from agentjet.config import ServeConfig
from agentjet.front.calls import Calls
from agentjet.fronts.process import Front, FrontSettings, ask_for_batch
from agentjet.processes.rpc import Link
from agentjet.protocol import FrontView
from agentjet.server.fronts import FrontedCalls
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import DEFAULT_RUN

ADDRESS = "http://front0.test"


class FrontInProcess:
    """See `server.fronts.Fronts`. The front samples with `compute` itself, as if that were its `RemoteSamplers`."""

    def __init__(self, config: ServeConfig, compute: Sampler, clock: Callable[[], float]) -> None:
        self.runs: dict[str, FrontedCalls] = {}
        self.addresses = (ADDRESS,)
        self._config = config
        self._front: Any = Front(cast(Link, SimpleNamespace(name="front-0")))
        self._front._samplers, self._front._clock = compute, clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self._begun: asyncio.Task[None] | None = None
        self._started = asyncio.Event()

    def __len__(self) -> int:
        return 1

    def start(self) -> None:
        self._begun = asyncio.create_task(self._begin())
        self._started.set()

    async def close(self) -> None:
        for task in (*self._tasks, *self._front._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._front._tasks, return_exceptions=True)

    def address(self, front: int, url: str) -> str:
        return ADDRESS

    def views(self) -> list[FrontView]:
        return []

    async def ask(self, front: int, op: str, *args: Any) -> Any:
        await self._started.wait()
        assert self._begun is not None
        await self._begun
        return await self._answer(op, *args)

    async def ask_all(self, op: str, *args: Any) -> None:
        await self.ask(0, op, *args)

    def tell(self, op: str, *args: Any) -> None:
        if self._begun is not None:  # Else it gets the present state when it starts.
            self.later(self.ask(0, op, *args))

    def later(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def batch(self, run: str, batch_id: int) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        return await ask_for_batch(lambda op, _, *args: self.ask(0, op, *args), run, batch_id)

    def calls(self, run: str = DEFAULT_RUN) -> Calls:
        """Returns the calls of a run, as the routes of the front have them."""
        found: Calls = self._front._runs[run].calls
        return found

    async def _begin(self) -> None:
        await self._answer("begin", FrontSettings(0, self.addresses, self._config, time.time() - time.monotonic()))
        for run in list(self.runs.values()):
            await self._answer("open", *run.opening())

    async def _answer(self, op: str, *args: Any) -> Any:
        return await getattr(self._front, f"_{op}")(*pickle.loads(pickle.dumps(args)))
