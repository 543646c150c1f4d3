"""Many faults of a fleet in seconds, on fake replicas: real processes over real TCP, without server and model.

Calls run all the time, and faults come one after the other, drawn from a seed: a replica is killed while it samples, at
each point of a publish, or while it starts; several are killed at once; one is stopped (SIGSTOP); one claims weights
that it did not load; the fleet grows and shrinks; all are suspended, and some are killed then. Every token of every
call is checked: context, seed and version.

`python -m bench.scaling.fleet` prints the figures as JSON. `bench.scale` has them in its table. `bench.scaling.faults`
has fewer faults, of a whole server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from agentjet.compute.cluster.fleet import Fleet
from agentjet.compute.cluster.replicas import Replicas, derived_seed
from agentjet.config import SamplerConfig
from agentjet.errors import ComputeError
from agentjet.types import Sampled, SamplingParams
from bench.gatewaying.report import percentile
from tests.cluster.fake_replica import POLICY, Hooks, mistakes, publication
from tests.cluster.nursery import Nursery, fork_server, nursery

NUM_FAULTS = 120
NUM_REPLICAS = 4
NUM_CALLS = 24
"""Calls at a time."""
CALL_TOKENS = (20, 200)
STEP_SECONDS = 0.004
HUNG_SECONDS = 1.0
"""`server.worker_timeout` of this run."""
PATIENCE = 120.0
"""Seconds after the last fault in which every call must end."""
CUTS = ("adopt", "paused", "adopted", "resumed")
KINDS = ("kill", "kill", "kill", "cut", "cut", "kill two", "kill all", "newcomer", "stop", "lie", "scale", "suspend")


class Calls:
    """Runs calls and checks their tokens."""

    def __init__(self, replicas: Replicas, chance: random.Random) -> None:
        self.replicas = replicas
        self.begun = self.ended = self.failed = self.wrong = self.tokens = 0
        self.failovers: list[float] = []
        """Seconds from the death of a replica to the next token of a call that it had."""
        self.killed_at: dict[int, float] = {}
        """Calls whose replica was killed, and when, until their next token."""
        self._chance = chance

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Make one call after the other."""
        while not is_over():
            self.begun += 1
            await self._call(self.begun)

    async def _call(self, number: int) -> None:
        params = SamplingParams(self._chance.randint(*CALL_TOKENS), seed=number, piece_tokens=8)
        prompt = [number, *range(self._chance.randint(1, 300))]
        pieces: list[Sampled] = []
        try:
            async for piece in self.replicas.sample(prompt, params):
                pieces.append(piece)
                self.tokens += len(piece.tokens)
                if (killed_at := self.killed_at.pop(number, None)) is not None:
                    self.failovers.append(time.monotonic() - killed_at)
        except ComputeError as error:
            self.failed += 1
            logging.error("call %d failed: %s", number, error)
        else:
            self.ended += 1
            self.wrong += bool(mistakes(prompt, params, pieces, derived_seed))


class Faults:
    """Does the faults."""

    def __init__(self, born: Nursery, replicas: Replicas, calls: Calls, chance: random.Random) -> None:
        self.tried: Counter[str] = Counter()
        self._born = born
        self._replicas = replicas
        self._calls = calls
        self._chance = chance
        self._version = 0
        self._next_hooks: list[Hooks] = []
        born.hooks = self._hooks

    def _hooks(self, number: int) -> Hooks:
        return self._next_hooks.pop() if self._next_hooks else Hooks(step_seconds=STEP_SECONDS)

    async def one(self) -> None:
        """Do a fault, and wait until tokens come again."""
        kind = self._chance.choice(KINDS)
        self.tried[kind] += 1
        serving = [one.name for one in self._replicas.status() if one.version is not None]
        if kind == "kill":
            self._kill(self._chance.sample(serving, min(1, len(serving))))
        elif kind == "kill two":
            self._kill(self._chance.sample(serving, min(2, len(serving))))
        elif kind == "kill all":
            self._kill(serving)
        elif kind == "newcomer":
            self._next_hooks.append(Hooks(die=self._chance.choice(["load", *CUTS]), step_seconds=STEP_SECONDS))
            self._kill(serving[:1])
        elif kind == "stop":
            for name in serving[:1]:
                self._born.signal(name, signal.SIGSTOP)
        elif kind == "scale":
            self._replicas.fleet.scale(self._chance.randint(1, NUM_REPLICAS + 1))
            await self._publish()
            self._replicas.fleet.scale(NUM_REPLICAS)
        elif kind == "suspend":  # As `compute.colocated` does for each batch.
            await self._replicas.fleet.suspend()
            self._kill(self._chance.sample(serving, self._chance.randint(0, len(serving))))
            await self._publish()
        else:
            await self._cut(kind)
        await self._tokens_again()

    async def _cut(self, kind: str) -> None:
        """Replace a replica by one that dies in the middle of the next publish, or that lies; then publish."""
        if kind == "lie":
            hooks = Hooks(lies=(self._version + 1,), step_seconds=STEP_SECONDS)
        else:
            hooks = Hooks(die=f"{self._chance.choice(CUTS)}:2", step_seconds=STEP_SECONDS, adopt_seconds=0.02)
        self._next_hooks.append(hooks)
        names = [one.name for one in self._replicas.status()]
        self._kill(names[:1])
        while len(serving := [one for one in self._replicas.status() if one.version is not None]) < NUM_REPLICAS or (
            {one.name for one in serving} == set(names)
        ):
            await asyncio.sleep(0.01)
        await self._publish()

    async def _publish(self) -> None:
        self._version += 1
        await self._replicas.fleet.publish(publication(self._version), in_turns=self._chance.random() < 0.5)

    def _kill(self, names: list[str]) -> None:
        now = time.monotonic()
        for replica in self._replicas.fleet.replicas:
            if replica.name in names:
                for work in replica.load.running:
                    self._calls.killed_at.setdefault(int(work.prompt[0]), now)
        for name in names:
            self._born.signal(name, signal.SIGKILL)

    async def _tokens_again(self) -> None:
        tokens, pause = self._calls.tokens, self._chance.uniform(0.02, 0.2)
        await asyncio.sleep(pause)
        while self._calls.tokens < tokens + NUM_CALLS:
            await asyncio.sleep(0.01)


async def _figures(num_faults: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    settings = SamplerConfig(max_concurrent=16)
    with fork_server() as server:
        async with nursery(server, settings) as born:
            replicas = Replicas(partial(Fleet, POLICY, born.begin, NUM_REPLICAS, settings, timeout=HUNG_SECONDS))
            calls = Calls(replicas, chance)
            faults = Faults(born, replicas, calls, chance)
            await replicas.fleet.publish(publication(0))
            is_over = False
            running = [asyncio.create_task(calls.run(lambda: is_over)) for _ in range(NUM_CALLS)]
            began = time.monotonic()
            while faults.tried.total() < num_faults:
                await faults.one()
            is_over = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*running), PATIENCE)
            found = {
                "fleet_faults": faults.tried.total(),
                "fleet_by_kind": dict(sorted(faults.tried.items())),
                "fleet_calls": calls.begun,
                "fleet_calls_failed": calls.failed,
                "fleet_lost": calls.begun - calls.ended - calls.failed,
                "fleet_wrong_versions": calls.wrong,
                "fleet_resumed": int(replicas.metrics()["sampler/resumed"]),
                "fleet_failover_s": round(percentile(calls.failovers, 95), 3),
                "fleet_seconds": round(time.monotonic() - began, 1),
            }
            await replicas.fleet.close()
            return found


def figures(num_faults: int = NUM_FAULTS, seed: int = 0) -> dict[str, Any]:
    """Returns the faults tried and what they did.

    `fleet_lost` are calls that neither ended nor failed, `fleet_wrong_versions` calls with a token that its version
    cannot sample in its context. `fleet_failover_s` is the 95th percentile of the seconds from a kill to the next token
    of its calls.
    """
    return asyncio.run(_figures(num_faults, seed))


if __name__ == "__main__":
    print(json.dumps(figures()))
