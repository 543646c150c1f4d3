"""A Ray cluster of this machine whose node can be killed and replaced, from a bench that has an event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Raylets:
    """A Ray cluster of this machine: a head, and a node that is killed and replaced.

    Ray installs signal handlers, so a process of its own starts the nodes.
    """

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.address = ""
        self.victim = 0
        """Process id of the raylet of the node."""

    async def start(self) -> None:
        self.address = await self._call(_start_head)
        self.victim = await self._call(_join)

    async def join(self) -> None:
        """Replace the node whose raylet was killed."""
        self.victim = await self._call(_join)

    async def close(self) -> None:
        await self._call(_shutdown)
        self._pool.shutdown()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


_nodes: dict[str, Any] = {}
"""The cluster and its node, in the process that starts them."""


def _start_head() -> str:
    from tests.processes.raylets import LocalCluster

    _nodes["cluster"] = LocalCluster(gpus=0)
    return str(_nodes["cluster"].address)


def _join() -> int:
    """Returns the process id of the new raylet."""
    if (dead := _nodes.pop("node", None)) is not None:
        _nodes["cluster"].cluster.remove_node(dead, allow_graceful=False)
    _nodes["node"] = _nodes["cluster"].join(gpus=0)
    return int(_nodes["node"].all_processes["raylet"][0].process.pid)


def _shutdown() -> None:
    _nodes["cluster"].shutdown()


@asynccontextmanager
async def raylets() -> AsyncGenerator[Raylets]:
    found = Raylets()
    try:
        await found.start()
        yield found
    finally:
        await found.close()
