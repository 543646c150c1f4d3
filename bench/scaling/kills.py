"""Kills the processes of a cluster by order, from within the gateway, which has the state of each.

An order waits for its moment: a request that the ranks work on, replicas that adopt a version, or replicas that sample.
After the kill of a replica, each of its completions is watched until its next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

from agentjet.compute.backend import Hosted, ProcessCompute
from agentjet.compute.fleet import ReplicaHandle, RoutedCompletion

POLL_SECONDS = 0.002
PROCESS = re.compile(r"process (\d+)")
STARTING = ("rendezvous", "join", "add")  # Requests to ranks that start


class Resumed(list[int]):
    """The tokens of a completion whose replica was killed. Calls `report` at the first ones of another replica."""

    def __init__(self, work: RoutedCompletion, dead: ReplicaHandle, report: Callable[[], None]) -> None:
        super().__init__(work.sampled)
        self.is_waiting = True
        self._work = work
        self._dead = dead
        self._report = report

    def __iadd__(self, tokens: Iterable[int]) -> Self:
        if self.is_waiting and self._work not in self._dead.load.running:  # Else they were sent before the kill.
            self.is_waiting = False
            self._report()
        return super().__iadd__(tokens)


def _report(order: asyncio.Task[None]) -> None:
    """Ends the gateway at an error of an order: the bench would wait for it."""
    if not order.cancelled() and (error := order.exception()):
        traceback.print_exception(error)
        os._exit(1)


class Kills:
    """Carries out the order `kill`, one at a time."""

    def __init__(self, compute: ProcessCompute, say: Callable[..., None]) -> None:
        """`say` sends a fact to the bench."""
        self._cluster = compute
        self._say = say
        self._present: asyncio.Task[None] | None = None

    def order(self, kind: str = "", at: str = "", delay: float = 0.0, count: int = 1, stops: bool = False) -> None:
        """Kill `count` processes of a kind `delay` seconds after the moment `at`. Replaces the order before.

        `at` is a request to the ranks, `start` or `adopt`; empty for now. `stops`: SIGSTOP instead of SIGKILL.
        """
        if self._present is not None:
            self._present.cancel()
        if kind:
            self._present = asyncio.create_task(self._carry_out(kind, at, delay, count, stops))
            self._present.add_done_callback(_report)

    async def _carry_out(self, kind: str, at: str, delay: float, count: int, stops: bool) -> None:
        while not (self._is_moment(at) and self._victims(kind, at, count)):
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(delay)
        while not (victims := self._victims(kind, at, count)):
            await asyncio.sleep(POLL_SECONDS)
        cut = self._adopting() > 0
        dead = self._replicas(victims)
        survives = any(one.version is not None and one not in dead for one in self._fleet())
        watched = [] if stops else [(one, work) for one in dead for work in one.load.running]
        self._say(killed=kind, at=at, pids=[*victims], cut=cut, completions=len(watched))
        now = time.monotonic()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        for replica, work in watched:
            if not (isinstance(work.sampled, Resumed) and work.sampled.is_waiting):
                work.sampled = Resumed(work, replica, partial(self._resumed, now, survives))

    def _resumed(self, killed_at: float, survives: bool) -> None:
        """A completion got its first token after a kill. `survives`: another replica served at the kill."""
        self._say(failover=time.monotonic() - killed_at, survives=survives)

    def _hosted(self) -> Hosted | None:
        return next(iter(self._cluster.policies.values()), None)

    def _fleet(self) -> list[ReplicaHandle]:
        hosted = self._hosted()
        return [] if hosted is None or hosted.samplers is None else hosted.samplers.replicas.fleet.replicas

    def _adopting(self) -> int:
        return sum(one.is_adopting for one in self._fleet())

    def _is_moment(self, at: str) -> bool:
        hosted = self._hosted()
        if hosted is None:
            return False
        if at == "adopt":
            return any(one.is_adopting and one.version is not None for one in self._fleet())
        request = hosted.ranks.request
        return not at or request == at or (at == "start" and request in STARTING)

    def _victims(self, kind: str, at: str, count: int) -> list[int]:
        """Returns the process ids of those that an order ends now."""
        if kind == "gateway":
            return [os.getpid()]
        if self._hosted() is None:
            return []
        if kind == "rank":
            pids = [pid for pid in self._pids("rank").values() if pid]
            # Rank 0 has the weights; the other ranks have a part of the gradient and of the checkpoint.
            return pids[-count:] if at in ("optim_step", "save") else pids[:count]
        fleet = [one for one in self._fleet() if one.version is not None]
        if at == "adopt":
            fleet.sort(key=lambda one: not one.is_adopting)
        elif not at:
            fleet = [one for one in fleet if one.load.running]
            fleet.sort(key=lambda one: -len(one.load.running))
        known = self._pids("replica")
        return [pid for one in fleet[:count] if (pid := known.get(one.name, 0))]

    def _replicas(self, pids: Sequence[int]) -> list[ReplicaHandle]:
        known = self._pids("replica")
        return [one for one in self._fleet() if known.get(one.name) in pids]

    def _pids(self, kind: str) -> dict[str, int]:
        """Process ids of a kind by name; 0 if unknown."""
        processes = [one for policy in self._cluster.policies for one in self._cluster.processes(policy)]
        found = {one.name: PROCESS.search(one.place) for one in processes if one.kind == kind}
        return {name: int(match[1]) if match else 0 for name, match in found.items()}
