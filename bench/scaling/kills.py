"""Kills the processes of a cluster by order, from within the gateway, which has the state of each.

An order waits for its moment: a request that the ranks work on, replicas that adopt a version, replicas that sample, a
message that a front works on, or a front that starts. After the kill of a replica, each of its completions is watched
until its next token; those of fronts are not. After the kill of a front, the time until it answers again is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

from agentjet.compute.backend import Hosted, ProcessCompute
from agentjet.compute.fleet import ReplicaHandle, RoutedCompletion
from agentjet.fronts import supervision
from agentjet.fronts.supervision import FrontHandle, FrontProcesses

POLL_SECONDS = 0.002
PROCESS = re.compile(r"process (\d+)")
STARTING = ("rendezvous", "join", "add")  # Requests to ranks that start
ASKED = ("finish", "drained", "batch")  # Messages to fronts


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

    def __init__(self, compute: ProcessCompute, fronts: FrontProcesses | None, say: Callable[..., None]) -> None:
        """`say` sends a fact to the bench."""
        self._cluster = compute
        self._fronts = fronts
        self._say = say
        self._present: asyncio.Task[None] | None = None
        self._front: int | None = None
        self._asked: Counter[tuple[str, int]] = Counter()
        """Messages that fronts work on, by kind and front."""
        self._returning: set[asyncio.Task[None]] = set()
        if fronts is not None:
            self._ask, self._ask_for_batch = fronts.ask, supervision.ask_for_batch
            fronts.ask = self._asking  # type: ignore[method-assign]
            supervision.ask_for_batch = self._asking_for_batch

    async def _asking(self, front: int, op: str, *args: Any) -> Any:
        with self._working(op, front):
            return await self._ask(front, op, *args)

    async def _asking_for_batch(self, ask: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        front = next(one.index for one in self._handles() if one.peer is not None and one.peer.ask == ask)
        with self._working("batch", front):
            return await self._ask_for_batch(ask, *args)

    @contextlib.contextmanager
    def _working(self, op: str, front: int) -> Iterator[None]:
        self._asked[op, front] += 1
        try:
            yield
        finally:
            self._asked[op, front] -= 1

    def order(
        self,
        kind: str = "",
        at: str = "",
        delay: float = 0.0,
        count: int = 1,
        stops: bool = False,
        front: int | None = None,
    ) -> None:
        """Kill `count` processes of a kind `delay` seconds after the moment `at`. Replaces the order before.

        `at` is a request to the ranks, `start`, `adopt`, a message to a front, or `starting` (a front); empty for now.
        `stops`: SIGSTOP instead of SIGKILL. `front` is the only one that may be killed.
        """
        if self._present is not None:
            self._present.cancel()
        if kind:
            self._front = front
            self._present = asyncio.create_task(self._carry_out(kind, at, delay, count, stops))
            self._present.add_done_callback(_report)

    async def _carry_out(self, kind: str, at: str, delay: float, count: int, stops: bool) -> None:
        while not (self._is_moment(at) and self._victims(kind, at, count)):
            await asyncio.sleep(POLL_SECONDS)
        if delay:  # Without, the message that it waited for is still under way.
            await asyncio.sleep(delay)
        while not (victims := self._victims(kind, at, count)):
            await asyncio.sleep(POLL_SECONDS)
        cut = self._adopting() > 0
        dead = self._replicas(victims)
        survives = any(one.version is not None and one not in dead for one in self._fleet())
        watched = [] if stops else [(one, work) for one in dead for work in one.load.running]
        self._say(killed=kind, at=at, pids=[*victims], cut=cut, completions=len(watched))
        now = time.monotonic()
        for one in self._handles():
            if kind == "front" and self._pid_of_front(one) in victims:
                task = asyncio.create_task(self._watch_front(one, one.starts, now))
                self._returning.add(task)
                task.add_done_callback(self._returning.discard)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        for replica, work in watched:
            if not (isinstance(work.sampled, Resumed) and work.sampled.is_waiting):
                work.sampled = Resumed(work, replica, partial(self._resumed, now, survives))

    def _resumed(self, killed_at: float, survives: bool) -> None:
        """A completion got its first token after a kill. `survives`: another replica served at the kill."""
        self._say(failover=time.monotonic() - killed_at, survives=survives)

    async def _watch_front(self, front: FrontHandle, starts: int, killed_at: float) -> None:
        while not (front.starts > starts and front.ready.is_set()):
            await asyncio.sleep(POLL_SECONDS)
        self._say(front=front.index, after=time.monotonic() - killed_at)

    def _handles(self) -> list[FrontHandle]:
        return [] if self._fronts is None else self._fronts._handles

    def _pid_of_front(self, front: FrontHandle) -> int:
        """0 if it is unknown."""
        if self._fronts is None or self._fronts._supervisor is None:
            return 0
        match = PROCESS.search(self._fronts._supervisor.place(f"front-{front.index}"))
        return int(match[1]) if match else 0

    def _fronts_at(self, at: str) -> list[FrontHandle]:
        """Returns the fronts that may be killed at a moment, the busiest first."""
        if at == "starting":
            found = [one for one in self._handles() if one.starts > 1 and not one.ready.is_set()]
        else:
            found = [one for one in self._handles() if one.ready.is_set()]
        if at in ASKED and any(self._asked[at, one.index] for one in found):
            found = [one for one in found if self._asked[at, one.index]]
        if self._front is not None:
            found = [one for one in found if one.index == self._front]
        return sorted(found, key=lambda one: -one.calls)

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
        if at in ASKED:
            return any(num for (op, _), num in self._asked.items() if op == at)
        if at == "starting":
            return bool(self._fronts_at(at))
        request = hosted.ranks.request
        return not at or request == at or (at == "start" and request in STARTING)

    def _victims(self, kind: str, at: str, count: int) -> list[int]:
        """Returns the process ids of those that an order ends now."""
        if kind == "gateway":
            return [os.getpid()]
        if self._hosted() is None:
            return []
        if kind == "front":
            return [pid for one in self._fronts_at(at)[:count] if (pid := self._pid_of_front(one))]
        if kind == "rank":
            pids = [pid for pid in self._pids("rank").values() if pid]
            # Rank 0 has the weights; the other ranks have a part of the gradient and of the checkpoint.
            return pids[-count:] if at in ("optim_step", "save") else pids[:count]
        fleet = [one for one in self._fleet() if one.version is not None]
        if at == "adopt":
            fleet.sort(key=lambda one: not one.is_adopting)
        elif not at:
            fleet = [one for one in fleet if one.load.count]
            fleet.sort(key=lambda one: -one.load.count)
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
