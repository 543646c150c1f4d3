"""Replicas of a policy as real processes over real TCP, and completions that are checked token by token."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentjet.compute.fleet import Changed, Fleet
from agentjet.compute.samplers import Replicas, derived_seed
from agentjet.config import SamplerConfig
from agentjet.processes.rpc import Peer
from agentjet.types import Sampled, SamplingParams
from tests.cluster.fake_replica import POLICY, ROUTES, Hooks, mistakes, publication
from tests.cluster.nursery import ForkServer, Nursery, nursery

PATIENCE = 30.0
"""Seconds for a test, also on a busy machine."""
SLOW = 0.002
"""Seconds a step, where something must happen while completions run."""


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE))


async def complete(
    sample: Callable[[Sequence[int], SamplingParams], AsyncGenerator[Sampled, None]],
    number: int,
    *,
    max_tokens: int = 60,
    prompt: Sequence[int] = (),
) -> list[Sampled]:
    """Returns the pieces of a right completion."""
    tokens = prompt or range(number, number + 70)
    params = SamplingParams(max_tokens=max_tokens, seed=number, piece_tokens=4, routes_from=number % 9)
    pieces = [piece async for piece in sample(tokens, params)]
    assert mistakes(tokens, params, pieces, derived_seed) == []
    return pieces


class Scene:
    """Replicas, and completions that are checked token by token."""

    def __init__(self, born: Nursery, count: int, *, timeout: float, limits: SamplerConfig) -> None:
        self.born = born
        self.adopting = 0
        self.most_adopting = 0
        self.changed: Callable[[], None] = lambda: None
        """Called at each change of the fleet."""

        def make_fleet(assign: Changed) -> Fleet:
            def changed() -> None:
                assign()
                self.changed()

            return Fleet(
                POLICY, self._start, count, limits, changed,
                timeout=timeout, explain=lambda name: born.explain(name), secret=born.supervisor.secret,
            )  # fmt: skip

        self.replicas = Replicas(make_fleet)
        self.fleet = self.replicas.fleet
        self.fleet.routes = ROUTES

    async def _start(self, name: str) -> Peer:
        """Starts a replica, and counts those that adopt at the same time."""
        peer = await self.born.begin(name)
        ask = peer.ask

        async def counting(op: str, *args: Any) -> Any:
            self.adopting += op == "adopt"
            self.most_adopting = max(self.most_adopting, self.adopting)
            try:
                return await ask(op, *args)
            finally:
                self.adopting -= op == "adopt"

        peer.ask = counting  # type: ignore[method-assign]
        return peer

    async def serve(self) -> None:
        """Publish version 0, and wait until all replicas serve it."""
        await self.fleet.publish(publication(0))
        await self.until(lambda: set(self.versions()) == {0})

    async def complete(self, number: int = 0, *, max_tokens: int = 60, prompt: Sequence[int] = ()) -> list[Sampled]:
        """Returns the pieces of a right completion."""
        return await complete(self.replicas.sample, number, max_tokens=max_tokens, prompt=prompt)

    def begin(self, count: int, *, max_tokens: int = 60) -> list[asyncio.Task[list[Sampled]]]:
        return [asyncio.create_task(self.complete(i, max_tokens=max_tokens)) for i in range(count)]

    def kill(self, name: str) -> None:
        self.born.signal(name, signal.SIGKILL)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a state that no event announces."""
        while not condition():
            await asyncio.sleep(0.002)

    def names(self, state: str = "") -> list[str]:
        return [one.name for one in self.fleet.status() if state in ("", one.state)]

    @property
    def resumed(self) -> int:
        return self.replicas.num_resumed

    def versions(self) -> list[int | None]:
        return [one.version for one in self.fleet.status()]


@asynccontextmanager
async def scene(
    server: ForkServer,
    count: int = 2,
    *,
    hooks: Callable[[int], Hooks] = lambda number: Hooks(),
    timeout: float = PATIENCE,
    limits: SamplerConfig | None = None,
) -> AsyncGenerator[Scene, None]:
    limits = limits or SamplerConfig(max_concurrent=8)
    async with nursery(server, limits) as born:
        born.hooks = hooks
        found = Scene(born, count, timeout=timeout, limits=limits)
        try:
            yield found
        finally:
            await found.fleet.close()
            assert born.pids == {}


def first(hooks: Hooks, others: Hooks | None = None) -> Callable[[int], Hooks]:
    """Hooks of the replica that is started first, and of those after it."""
    return lambda number: hooks if number == 1 else others or Hooks(step_seconds=hooks.step_seconds)


def all_of(tasks: Sequence[asyncio.Task[list[Sampled]]]) -> asyncio.Future[list[list[Sampled]]]:
    return asyncio.gather(*tasks)
