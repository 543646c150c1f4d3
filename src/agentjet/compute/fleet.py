"""The fleet: the sampler replicas of one policy, each from its start to its end, and the choice among them.

The fleet has as many replicas as it should, and each serves the present publication. A replica that dies, hangs, fails
a probe or cannot fetch weights that others can is ended and replaced. A newcomer adopts the present publication before
it gets work.

The probe: after each adoption a replica scores fixed tokens with its new weights, and the learner scored them, too. An
engine may report success and keep old weights. No token of a version counts before its replica passed the probe.

`choose` gives a completion to the replica that holds the longest known prefix of the prompt in its cache, unless that
one has much more to do than another; among equals to the one with the least to do. Without the second rule, a system
prompt that all tasks share would send everything to one replica.

Fronts route completions to the same replicas (`compute.remote`). They need the `RoutingFacts` of a fleet. The fleet
needs their `FrontWork`: the watchdog of a replica counts the completions and the messages of fronts, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import re
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from agentjet.compute.weights import WAY_OUT, Publication, probe_error, probe_failure
from agentjet.config import SamplerConfig, SamplerLimits
from agentjet.errors import AgentJetError, ComputeError, ConfigError, PolicyRemoved, WorkerDied, WorkerHung
from agentjet.processes.rpc import Peer
from agentjet.processes.supervisor import NotStarted, Watchdog, time_limit
from agentjet.types import LOADS_WEIGHTS, PolicyId, ProcessStatus, RouteShape

BLOCK_TOKENS = 64
"""Prefixes are compared in blocks of this many tokens."""
MORE_FACTOR, MORE = 1.25, 4
"""A replica may have this factor and this number of completions more than the least busy one."""
SHARES = 8
"""A process may have one in so many places of a replica, also if others have all: else it might wait for ever."""

Cause = Literal["work", "replica", "unwanted"]
"""Why a replica ended: perhaps its work crashed it, or it is at fault itself, or it is not needed."""

Key = TypeVar("Key")


@dataclass(eq=False)
class RoutedCompletion:
    """A completion or a scoring on its way through the replicas. `prompt` [T] are int32 token ids."""

    prompt: np.ndarray
    uses_cache: bool = True
    """True if a cached prefix saves work."""
    sampled: list[int] = field(default_factory=list)
    """Tokens of the completion that were received."""
    num_routed: int | None = None
    """Tokens whose routes were received, or are not asked for; None for no routes."""
    losses: int = 0
    """Replicas in a row that it lost before they sent a token of it."""
    blame: int = 0
    """Those of them that it may have crashed."""
    keys: list[int] = field(default_factory=list)
    """Keys of the blocks of prompt and sampled tokens, as far as `update_keys` counted."""

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and sampled tokens."""
        return np.concatenate([self.prompt, np.asarray(self.sampled, np.int32)]) if self.sampled else self.prompt

    def update_keys(self) -> None:
        """Compute the keys of new blocks. A key stands for a block and all blocks before it."""
        if not self.uses_cache:
            return
        tokens, key = self.tokens, self.keys[-1] if self.keys else 0
        for start in range(len(self.keys) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = hash((key, tokens[start : start + BLOCK_TOKENS].tobytes()))
            self.keys.append(key)


class Load:
    """The work that a replica has, and the prefixes that its cache probably holds."""

    def __init__(self, num_places: int, cache_tokens: int) -> None:
        self.running: set[RoutedCompletion] = set()
        self.others = 0
        """Completions that other processes have at the replica: fronts, or the server."""
        self._known: OrderedDict[int, None] = OrderedDict()
        self.resize(num_places, cache_tokens)

    def resize(self, num_places: int, cache_tokens: int) -> None:
        self.num_places, self.cache_tokens = num_places, cache_tokens
        self._max_keys = max(1, cache_tokens // BLOCK_TOKENS)

    def has_place(self, work: RoutedCompletion) -> bool:
        """True if the replica may get this work.

        A replica gets one work at a time that lost its last replica. So work that crashes every replica is found, and
        the work beside it is not blamed.
        """
        if work.losses and any(other.losses for other in self.running):
            return False
        return self.count < self.num_places or len(self.running) < max(1, self.num_places // SHARES)

    @property
    def count(self) -> int:
        """Completions that the replica has, those of other processes included."""
        return len(self.running) + self.others

    @property
    def num_suspects(self) -> int:
        """Completions of this process that lost their last replica and got no token since."""
        return sum(work.losses > 0 for work in self.running)

    def add(self, work: RoutedCompletion) -> None:
        self.running.add(work)
        self._remember(work)

    def remove(self, work: RoutedCompletion) -> None:
        """The work ended, or left the replica. Its tokens stay in the cache for the next turn."""
        self.running.discard(work)
        work.update_keys()
        self._remember(work)

    def forget(self) -> None:
        """The weights changed, so the cache is empty, except for the running completions."""
        self._known.clear()
        for work in self.running:
            self._remember(work)

    def known_blocks(self, keys: Sequence[int]) -> int:
        """Returns the number of leading blocks in the cache of the replica."""
        return next((i for i, key in enumerate(keys) if key not in self._known), len(keys))

    def _remember(self, work: RoutedCompletion) -> None:
        for key in reversed(work.keys):  # The beginning of a prefix is forgotten last.
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._max_keys:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class End:
    """The end of a replica. Its requests fail with `reason`, which is its name and `why`."""

    name: str
    reason: WorkerDied
    why: str
    cause: Cause
    time: float
    """By the event loop."""


class RoutedReplica:
    """A replica as its completions see it. From its end on it gets no more work."""

    def __init__(self, name: str, load: Load) -> None:
        self.name = name
        self.load = load
        self.peer: Peer | None = None
        """Its connection, when it is loaded."""
        self.is_adopting = False
        """True if tokens of a version may be here before its probe is known."""
        self.verified: set[int] = set()
        """Versions whose probe it passed. Its received tokens may be of any of them."""
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.busy_since = 0.0
        """Time from which it has work. Times are those of the event loop."""

    @property
    def is_connected(self) -> bool:
        return self.peer is not None and not self.peer.died.done() and not self.end.done()

    @property
    def is_ready(self) -> bool:
        """True if it may get work."""
        raise NotImplementedError

    def silence(self, now: float) -> float:
        """Returns the seconds for which it has had work and sent nothing."""
        if self.peer is None or not self.load.running:
            return 0.0
        return now - max(self.peer.heard_at, self.busy_since)


class ReplicaHandle(RoutedReplica):
    """A replica that the server keeps."""

    def __init__(self, name: str, load: Load, timeout: float) -> None:
        super().__init__(name, load)
        self.watchdog = Watchdog(timeout)
        self.publication: Publication | None = None
        """The weights that it serves."""
        self.is_suspended = True
        """True while it uses no memory of its GPUs: before its start, and from `Fleet.suspend` to its next adoption."""
        self.serial = 0
        """Number of the publish that it fulfils."""
        self.attempts = 0
        """Failed attempts to adopt the present publication."""
        self.problem = ""
        """The error of the last attempt, if it failed."""
        self.fronts: dict[int, tuple[ReplicaWork, float]] = {}
        """The work that fronts have there, and the times at which they reported it."""
        self.suspecting: dict[int, None] = {}
        """The fronts with suspects there, in the order of their reports: the first one may have them sampled."""

    @property
    def version(self) -> int | None:
        return None if self.publication is None else self.publication.version

    @property
    def is_ready(self) -> bool:
        return self.is_connected and self.publication is not None and not (self.is_adopting or self.is_suspended)

    @property
    def num_messages(self) -> int:
        """Messages that it sent to the server and to fronts."""
        of_server = 0 if self.peer is None else self.peer.num_messages
        return of_server + sum(work.num_messages for work, _ in self.fronts.values())

    @property
    def has_work(self) -> bool:
        """True if it has a request of the server, or of a front that reported it lately.

        The work of a front that is silent counts for nothing: not the replica may hang, but the front.
        """
        since = asyncio.get_running_loop().time() - REPORT_CHECKS * self.watchdog.interval
        of_fronts = any(work.running and time > since for work, time in self.fronts.values())
        return (self.peer is not None and bool(self.peer.pending)) or of_fronts

    def status(self) -> ProcessStatus:
        """Returns its state, without its place."""
        running, is_ready = self.load.count, self.version is not None
        if self.peer is None:
            state = "starts"
        elif self.is_adopting:
            state = LOADS_WEIGHTS
        elif not is_ready:
            state = self.problem or "waits for weights"
        elif self.is_suspended:
            state = self.problem or "is suspended until the next publish"
        else:
            state = self.problem or ("samples" if running else "idle")
        return ProcessStatus(self.name, "replica", state, version=self.version, completions=running, is_ready=is_ready)


def choose(loads: Mapping[Key, Load], work: RoutedCompletion) -> Key | None:
    """Returns the replica that should get the work; None if none has a place for it."""
    free = {key: load for key, load in loads.items() if load.has_place(work)}
    if not free:
        return None
    limit = MORE + MORE_FACTOR * min(load.count for load in free.values())
    near = [key for key, load in free.items() if load.count <= limit]
    return max(near, key=lambda key: (free[key].known_blocks(work.keys), -free[key].count))


log = logging.getLogger(__name__)

# ---- messages between server and fronts ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """A loaded replica, for fronts."""

    name: str
    address: str
    """At which it admits fronts, as `HOST:PORT`."""
    secret: bytes = field(repr=False)
    version: int | None
    """The version that it serves."""
    verified: frozenset[int]
    """The `RoutingFacts.recent` versions whose probe it passed. No token of others of these may be used."""
    is_ready: bool
    """True if it may get work."""
    num_places: int
    """Completions that it may have."""
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingFacts:
    """The replicas of a policy, for fronts."""

    policy: PolicyId
    routes: RouteShape | None = None
    replicas: tuple[ReplicaFacts, ...] = ()
    recent: frozenset[int] = frozenset()
    """Versions of the last publishes, which go back when an older checkpoint is loaded, and all that are served."""
    crashed: frozenset[str] = frozenset()
    """Names of replicas that ended lately and that their work may have crashed."""
    failure: WorkerDied | None = None
    """The reason if no replica can be had."""


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """The work that a front has at a replica."""

    running: int
    """Completions and scorings."""
    suspects: int
    """Those of them that lost their last replica and got no token since. They may wait for `Others.may_risk`."""
    num_messages: int
    """Messages that the front received from it."""


@dataclass(frozen=True, slots=True)
class Others:
    """The work that other processes have at a replica, for a front."""

    running: int = 0
    """Completions and scorings."""
    may_risk: bool = False
    """True if the front may have its suspects sampled: no other process has some that were there before."""


@dataclass(frozen=True, slots=True)
class FrontWork:
    """The work that a front has for a policy."""

    waiting: int = 0
    """Completions and scorings that wait for a place at a replica."""
    tokens: int = 0
    """Tokens received since the last report."""
    resumed: int = 0
    """Completions that continued on another replica since the last report."""
    replicas: Mapping[str, ReplicaWork] = field(default_factory=dict)
    """By name, of those that the front is connected to."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Names of replicas that must be ended, and why."""


# ---- the fleet -------------------------------------------------------------------------------------------------------

Start = Callable[[str], Awaitable[Peer]]
"""Starts the replica of that name: launches, connects and loads it. Raises `ConfigError` if no retry can help.

No process is left of a start that failed or was cancelled.
"""
Changed = Callable[[], None]
"""Called when a replica was loaded, adopts, became ready or ended, or the policy failed."""
Explain = Callable[[str], str]
"""Returns the error that the ended process of that name reported as the cause of its end, or ""."""

MAX_FIRST_DEATHS = 3
"""Replicas that may end before any replica ever served. Then the policy fails.

It fails for good if each reported the same error: the settings cannot work. Else the engine tries again: something from
outside may have ended them.
"""
MAX_LATER_DEATHS = 12
"""The same if some served before, but none is left: several minutes of attempts."""
MAX_FAILED_PROBES = 2
MAX_ENDS = 64
"""Ends that are compared with each other. No failure of a larger part of the cluster needs more."""
REPORT_CHECKS = 5
"""Checks of a watchdog for which the report of a front counts: half of its timeout."""
MAX_RECENT = 16
"""Publishes that fronts get facts about. A token waits at a front for a few milliseconds."""
MAX_ATTEMPTS = 7
"""Failed attempts to adopt a publication, in 16 s, after which `publish` waits for the replica no longer.

A learner whose machine vanished is noticed before that, and then the learner is replaced instead.
"""
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.25, 30.0
"""Wait before a second attempt to start or to adopt, doubled with each further one."""
SLOWEST_BYTES_PER_SECOND = 20e6
"""A replica that adopts may be silent for the time of this rate, beyond the timeout."""
TURNS = 4
"""In turns, one in so many replicas adopts at a time. The learner waits for all of them."""
PLACES = 1.25
"""Completions that a replica has, per completion that it samples at a time: the next ones wait at the replica."""


class RoutedFleet:
    """Replicas among which completions are routed: those of a server, or of a front."""

    def __init__(self, policy: PolicyId, changed: Changed) -> None:
        self.policy = policy
        self.routes: RouteShape | None = None
        """Those that replicas report, when the model is known."""
        self._changed = changed
        self._ends: deque[End] = deque(maxlen=MAX_ENDS)
        """The last ends of replicas that were wanted."""
        self._failure: AgentJetError | None = None
        self._pulse = asyncio.Event()
        """Wakes those who wait for a change."""

    @property
    def replicas(self) -> Sequence[RoutedReplica]:
        """The replicas that have not ended, oldest first."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises the failure of the policy, or `PolicyRemoved` after `close`."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    async def confirm(self, replica: RoutedReplica, version: int) -> None:
        """Wait until the replica passed the probe of a version. Raises `WorkerDied` if it ends before."""
        while version not in replica.verified:
            if replica.end.done():
                raise copy.copy(replica.end.result().reason)
            if not replica.is_adopting:
                self.end(replica, f"reported tokens of version {version}, which it does not have", cause="replica")
                continue
            await self._pulse.wait()

    async def claim(self, replica: RoutedReplica) -> None:
        """Wait until the replica has no suspects of other processes, or ended. Work with losses has a place there."""

    def ended_alone(self, end: End, seconds: float) -> bool:
        """True if no other replica ended within so many seconds, before or after."""
        return all(abs(other.time - end.time) > seconds for other in self._ends if other is not end)

    def end(self, replica: RoutedReplica, why: str, *, cause: Cause, hung: bool = False) -> None:
        """End a replica: its requests fail at once. A server kills and replaces it. Idempotent."""
        if replica.end.done():
            return
        reason = (WorkerHung if hung else WorkerDied)(f"{replica.name} {why}")
        end = End(replica.name, reason, why, cause, asyncio.get_running_loop().time())
        replica.end.set_result(end)
        if cause != "unwanted":
            self._ends.append(end)
        if replica.peer is not None:
            replica.peer.close()
        self._change()

    def _change(self) -> None:
        self._pulse.set()
        self._pulse.clear()
        self._changed()


class Fleet(RoutedFleet):
    """Keeps `count` replicas alive and current."""

    def __init__(
        self,
        policy: PolicyId,
        start: Start,
        count: int,
        settings: SamplerConfig,
        changed: Changed,
        *,
        timeout: float,
        explain: Explain = lambda name: "",
        has_served: bool = False,
        secret: bytes = b"",
    ) -> None:
        """Starts `count` replicas; must be called in an event loop.

        A replica that has work and is silent for `timeout` seconds is ended. Fronts prove the `secret` to replicas.
        """
        super().__init__(policy, changed)
        self.failed: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        """Done if no replica can be had."""
        self.publish_seconds = 0.0
        self.pause_seconds = 0.0
        """Longest time for which a replica sampled nothing during the last publish."""
        self.probe_error = 0.0
        """Largest error of a probe of the present publication."""
        self._start = start
        self._explain = explain
        self.count = count
        """Replicas that there should be."""
        self._timeout = timeout
        self._lives: dict[ReplicaHandle, asyncio.Task[None]] = {}
        self._num_started = 0
        self._settings = settings
        self._secret = secret
        self.has_served = has_served
        """True if a replica of the policy ever served, also one of an earlier fleet."""
        self._early_ends: list[str] = []
        """The causes of the ends of replicas before they served, since the last adoption, without their numbers."""
        self._failed_probes = 0
        """Probes of the present publication that failed."""
        self._publication: Publication | None = None
        self._recent: deque[int] = deque(maxlen=MAX_RECENT)
        """Versions of the last publishes."""
        self._serial = 0
        """Number of `publish` calls. Versions go back when an older checkpoint is loaded; this number does not."""
        self._in_turns = False
        """True if most serving replicas must sample while others adopt."""
        self._is_suspended = False
        """True from `suspend` to the next `publish`."""
        self._fill()

    @property
    def replicas(self) -> list[ReplicaHandle]:
        return [replica for replica in self._lives if not replica.end.done()]

    def status(self) -> list[ProcessStatus]:
        """Returns the replicas, oldest first, without their places."""
        return [replica.status() for replica in self.replicas]

    def metrics(self) -> dict[str, float]:
        return {
            "sampler/replicas": float(sum(replica.version is not None for replica in self.replicas)),
            "sampler/replicas_wanted": float(self.count),
            "sampler/publish_seconds": self.publish_seconds,
            "sampler/pause_seconds": self.pause_seconds,
            "sampler/probe_error": self.probe_error,
        }

    def facts(self) -> RoutingFacts:
        recent = frozenset(self._recent).union(one.version for one in self.replicas if one.version is not None)
        replicas = tuple(
            ReplicaFacts(
                one.name,
                one.peer.address,
                self._secret,
                one.version,
                recent & one.verified,
                one.is_ready,
                one.load.num_places,
                one.load.cache_tokens,
            )
            for one in self.replicas
            if one.peer is not None and one.peer.address
        )
        crashed = frozenset(end.name for end in self._ends if end.cause == "work")
        failure = self.failed.result() if self.failed.done() else self._failure
        assert failure is None or isinstance(failure, WorkerDied)
        return RoutingFacts(self.policy, self.routes, replicas, recent, crashed, failure)

    def heard(self, front: int, work: FrontWork) -> None:
        """Take the report of a front. One that is gone has no work. Ends replicas at which it found a fault."""
        now = asyncio.get_running_loop().time()
        for replica in self.replicas:
            if (reported := work.replicas.get(replica.name)) is None:
                replica.fronts.pop(front, None)
                replica.suspecting.pop(front, None)
            else:
                replica.fronts[front] = reported, now
                if reported.suspects:
                    replica.suspecting.setdefault(front)
                else:
                    replica.suspecting.pop(front, None)
            replica.load.others = sum(one.running for one, _ in replica.fronts.values())
            if (why := work.faults.get(replica.name)) is not None:
                self.end(replica, why, cause="replica")

    def others(self, front: int) -> dict[str, Others]:
        """Returns the work that other processes than a front have at each replica, by its name."""
        found = {}
        for replica in self.replicas:
            own = replica.fronts[front][0].running if front in replica.fronts else 0
            may_risk = next(iter(replica.suspecting), None) == front and not replica.load.num_suspects
            found[replica.name] = Others(replica.load.count - own, may_risk)
        return found

    async def publish(self, publication: Publication, *, in_turns: bool = False) -> None:
        """Let the replicas adopt a publication; returns when no replica serves an older one and one serves this one.

        `in_turns`: at most one in `TURNS` adopts at a time, so the others sample.
        Raises `ComputeError` if no replica can fetch it, or if two failed its probe, and the `ConfigError` of a start.
        A cancelled call changes nothing: the replicas go on to adopt it.
        """
        self.check()
        began = time.monotonic()
        self._publication, self._serial, self._is_suspended = publication, self._serial + 1, False
        self._in_turns = in_turns
        self._recent.append(publication.version)
        self._failed_probes, self.pause_seconds, self.probe_error = 0, 0.0, 0.0
        serial = self._serial
        for replica in self.replicas:
            replica.attempts = 0
        self._change()
        while not self._is_adopted(serial):
            await self._pulse.wait()
        self.publish_seconds = time.monotonic() - began

    async def suspend(self) -> None:
        """Let the replicas free the memory of their GPUs; returns when all have. Their completions go on at `publish`.

        Replicas that are starting are waited for; those that take longer than the timeout are ended. Others start at
        `publish`, which ends this call, too. Idempotent. Raises the failure of the policy.
        """
        self.check()
        self._is_suspended = True
        self._change()
        try:
            async with time_limit(self._timeout):
                await self._suspended()
        except TimeoutError:
            for replica in [one for one in self.replicas if one.peer is None and not one.is_suspended]:
                why = f"was still starting {self._timeout:g} s after the ranks needed its GPUs"
                self.end(replica, f"{why} (server.worker_timeout)", cause="replica")
            await self._suspended()

    async def _suspended(self) -> None:
        while self._is_suspended and any(not one.is_suspended or one.is_adopting for one in self._lives):
            await self._pulse.wait()
            self.check()

    def _is_adopted(self, serial: int) -> bool:
        """Returns whether a publish is done. Ends replicas that cannot do what others can."""
        self.check()
        behind = [replica for replica in self.replicas if replica.version is not None and replica.serial < serial]
        if any(replica.serial >= serial for replica in self.replicas):
            stuck = [replica for replica in behind if replica.attempts >= MAX_ATTEMPTS]
            for replica in stuck:
                self.end(replica, f"cannot adopt version {self._version}: {replica.problem}", cause="replica")
            return len(stuck) == len(behind)
        trying = behind or [replica for replica in self.replicas if replica.peer is not None]
        if trying and all(replica.attempts >= MAX_ATTEMPTS for replica in trying):
            raise ComputeError(f"no replica could adopt version {self._version}: {trying[0].problem}")
        return False

    @property
    def _version(self) -> int:
        assert self._publication is not None
        return self._publication.version

    def resize(self, name: str, limits: SamplerLimits) -> None:
        """Set the numbers that a replica reported when it was loaded."""
        for replica in self.replicas:
            if replica.name == name:
                replica.load.resize(*_room(limits))

    def scale(self, count: int) -> None:
        """Change the number of replicas. Ends those that do not serve yet, then those with the least work.

        The completions of those that end continue on others.
        """
        assert count >= 1
        self.count = count
        by_use = sorted(self.replicas, key=lambda one: (one.version is not None, one.load.count))
        for replica in by_use[: max(0, len(by_use) - count)]:
            self.end(replica, "was ended: fewer samplers are wanted", cause="unwanted")
        self._fill()
        self._change()

    async def close(self) -> None:
        """End all replicas; completions fail with `PolicyRemoved`. Waits for the end of their processes. Idempotent."""
        if not isinstance(self._failure, PolicyRemoved):
            self._failure = PolicyRemoved(f"the replicas of policy {self.policy} were ended")
        for replica in self.replicas:
            self.end(replica, "was ended", cause="unwanted")
        self._change()
        if self._lives:
            await asyncio.wait(list(self._lives.values()))

    # ---- one replica ------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start replicas until there are enough. An ended one counts until its process is gone: it may have a GPU."""
        while self._failure is None and len(self._lives) < self.count:
            self._num_started += 1
            name = f"{self.policy}/replica-{self._num_started}"
            replica = ReplicaHandle(name, Load(*_room(self._settings.limits)), self._timeout)
            self._lives[replica] = asyncio.create_task(self._live(replica))

    async def _live(self, replica: ReplicaHandle) -> None:
        """Boundary: a failure ends this replica only. Its `reason` records the failure."""
        work = asyncio.create_task(self._serve(replica, delay=backoff(len(self._early_ends))))
        end = await asyncio.shield(replica.end)
        work.cancel()
        await asyncio.wait([work])
        how = ""
        try:
            if replica.peer is not None:
                how = await replica.peer.stop()
        except Exception:
            log.exception("%s could not be stopped", replica.name)
        if end.cause != "unwanted" and self._failure is None:
            known, cause = str(end.reason), self._explain(replica.name)
            log.warning("%s", ": ".join([known, *(text for text in (cause, how) if text and text not in known)]))
            if replica.version is None:
                self._count_early_end(end.why, cause)
        del self._lives[replica]
        self._fill()
        self._change()

    def _count_early_end(self, why: str, cause: str) -> None:
        """Count a replica that ended before it served. Too many fail the policy."""
        self._early_ends.append(re.sub(r"\d+", "", cause))
        count, most = len(self._early_ends), MAX_LATER_DEATHS if self.has_served else MAX_FIRST_DEATHS
        if count < most or any(one.version is not None for one in self.replicas):
            return
        text = f"{count} replicas ended before one could serve"
        if self.has_served or not cause or len(set(self._early_ends)) > 1:
            self._fail(ComputeError(f"{text}: {cause or why}"))
        else:
            self._fail(
                ConfigError(
                    f"{text}, each for the same reason: {cause}. If vLLM cannot compute this model, set "
                    "compute.backend = 'embedded', which holds every model of transformers, or another model.name; "
                    "the logs of the replicas have the whole reason"
                )
            )

    async def _serve(self, replica: ReplicaHandle, delay: float) -> None:
        """Start a replica and keep it current, until it is cancelled or `end` was called."""
        watch: asyncio.Task[None] | None = None
        try:
            await asyncio.sleep(delay)
            while self._is_suspended:
                await self._pulse.wait()
            replica.is_suspended = False
            peer = await self._start(replica.name)
            replica.peer = peer
            if replica.end.done():
                return
            peer.died.add_done_callback(lambda died: self.end(replica, "lost its connection", cause="work"))
            watch = asyncio.create_task(self._watch(replica))
            self._change()
            while True:
                await self._keep_current(replica, peer)
        except WorkerDied as error:
            self.end(replica, error.end.reason if isinstance(error, NotStarted) else str(error), cause="work")
        except ConfigError as error:
            if not any(other.version is not None for other in self.replicas):
                self._fail(error)
            self.end(replica, f"could not be started: {error}", cause="replica")
        except Exception as error:
            if not isinstance(error, AgentJetError | OSError):
                log.exception("%s", replica.name)
            self.end(replica, f"ended: {error or type(error).__name__}", cause="replica")
        finally:
            if watch is not None:
                watch.cancel()

    async def _keep_current(self, replica: ReplicaHandle, peer: Peer) -> None:
        """Adopt the present publication, or suspend, or wait for the next change. Raises `WorkerDied`."""
        if self._is_suspended and not replica.is_suspended:
            await self._suspend(replica, peer)
            return
        publication, serial, known = self._publication, self._serial, replica.publication
        if publication is None or replica.serial == serial or self._is_suspended:
            await self._pulse.wait()
            return
        is_same = known is not None and (known.version, known.digest) == (publication.version, publication.digest)
        if is_same and not replica.is_suspended:
            replica.serial = serial
            self._change()
            return
        if not self._may_adopt(replica):
            await self._pulse.wait()
            return
        await self._adopt(replica, peer, publication)
        if replica.attempts:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff(replica.attempts)):
                    while serial == self._serial and not self._is_suspended:
                        await self._pulse.wait()

    def _may_adopt(self, replica: ReplicaHandle) -> bool:
        if not self._in_turns or replica.version is None or replica.is_suspended:
            return True
        adopting = sum(one.is_adopting and one.version is not None for one in self.replicas)
        return adopting < max(1, self.count // TURNS)

    async def _suspend(self, replica: ReplicaHandle, peer: Peer) -> None:
        """Request that a replica frees its memory. One that fails is ended."""
        try:
            await peer.ask("suspend", self.policy)
        except WorkerDied:
            raise
        except AgentJetError as error:
            self.end(replica, f"could not be suspended: {error}", cause="replica")
        else:
            replica.is_suspended = True
            self._change()

    async def _adopt(self, replica: ReplicaHandle, peer: Peer, publication: Publication) -> None:
        """Request one adoption and verify it. An error of the replica leaves it with its old version."""
        replica.is_adopting, serial, began = True, self._serial, time.monotonic()
        replica.verified.discard(publication.version)
        replica.watchdog.timeout = self._timeout + publication.num_bytes / SLOWEST_BYTES_PER_SECOND
        self._change()
        try:
            logprobs = await peer.ask("adopt", self.policy, publication)
        except WorkerDied:
            raise
        except AgentJetError as error:
            if not replica.attempts:
                log.warning(
                    "%s did not adopt version %d, and tries it again: %s", replica.name, publication.version, error
                )
            replica.attempts, replica.problem = replica.attempts + 1, str(error)
            if replica.version is not None:
                replica.verified.add(replica.version)
        else:
            if reason := probe_failure(publication, logprobs, replica.publication):
                self._fail_probe(replica, f"failed the probe of version {publication.version}: {reason}")
                return
            replica.publication, replica.serial, replica.is_suspended = publication, serial, False
            replica.verified.add(publication.version)
            replica.load.forget()
            replica.attempts, replica.problem = 0, ""
            self._early_ends, self.has_served = [], True
            self.probe_error = max(self.probe_error, probe_error(publication, logprobs))
            self.pause_seconds = max(self.pause_seconds, time.monotonic() - began)
        finally:
            replica.is_adopting = False
            replica.watchdog.timeout = self._timeout
            self._change()

    def _fail_probe(self, replica: ReplicaHandle, why: str) -> None:
        """End a replica. If no other one has these weights either, the policy fails, not its replicas."""
        self._failed_probes += 1
        self.end(replica, why, cause="replica")
        others = [other for other in self.replicas if other.peer is not None]
        if self._failed_probes < MAX_FAILED_PROBES or any(other.serial == self._serial for other in others):
            return
        if not others or self._failed_probes > self.count:
            text = f"{self._failed_probes} replicas in a row failed; the last: {replica.name} {why}"
            self._fail(ComputeError(text) if self.has_served else ConfigError(f"{text}. {WAY_OUT}"))

    async def _watch(self, replica: ReplicaHandle) -> None:
        assert replica.peer is not None
        await replica.watchdog.hang(
            lambda: replica.num_messages,
            lambda: replica.has_work and (replica.is_adopting or not replica.is_suspended),
            [replica.peer.process],
        )
        silent = f"sent nothing for {self._timeout:g} s (server.worker_timeout)"
        self.end(replica, silent, cause="replica", hung=True)

    def _fail(self, error: AgentJetError) -> None:
        if self._failure is None:
            log.error("policy %s: %s", self.policy, error)
            self._failure = error
            self.failed.set_result(error if isinstance(error, WorkerDied) else WorkerDied(str(error)))
            self._change()


def _room(limits: SamplerLimits) -> tuple[int, int]:
    """Returns the places and the cache of a replica that samples so many completions at a time."""
    return max(2, int(limits.max_concurrent * PLACES)), limits.cache_tokens


def backoff(failures: int) -> float:
    """Returns the seconds to wait after so many failures in a row."""
    return min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2 ** min(failures - 1, 16)) if failures else 0.0
