"""The rollout runner: runs agents on tasks, many episodes at a time.

* An exception inside an agent aborts its episode and is reported; it is never scored.
* Every begun episode is finished or aborted, also when the runner is cancelled while agents hang in their threads.
* Each visit of a task in a training run has a new group id.
* A group that gets no further episode, because attempts were given up or the run ends, is closed at once.

Tasks from a generator, which may be endless, are read as the run goes on. These numbers bound the memory:

* `inputs.IDENTITIES_KEPT` different tasks are compared with later ones: the same id with another payload is refused.
* `TASKS_REPEATED` tasks are kept. A generator with at most so many is repeated when it ends, as a list is.
* `LOOKAHEAD` visits are read ahead while the task sets of those before have no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import itertools
import json
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentjet.client.agent_source import error_location
from agentjet.client.connection import proxy_hint
from agentjet.client.episode import (
    ABORT_SECONDS,
    COMPLETE_SECONDS,
    NOT_NEEDED,
    STOPPED,
    AsyncEpisode,
    Episode,
    Returned,
    RunCoroutine,
    abort_reason,
    abort_unless_finished,
    checked_reward,
    wait_for_end,
)
from agentjet.client.inputs import ONE_TASK_SET, TaskIdentities
from agentjet.client.report import EpisodeResult, Outcome
from agentjet.client.threads import caller_of, in_thread
from agentjet.errors import AgentJetError, Conflict, RequestError, Unreachable
from agentjet.types import Reward, Task

SURPLUS_REASONS = ("surplus:", "stale:")
"""Beginnings of the server's abort reasons that do not mean a failure."""
ATTEMPTS = 3
"""Attempts at one episode of the queue."""
BEGINNING_SECONDS = 0.02
"""Interval between checks that no episode is being begun, at the end of a run."""
FULL_SECONDS = 1.0
"""Seconds before a worker that found every task set full requests again."""
CAPACITY_SECONDS = 0.05
"""Interval between checks of a worker that found every task set at its capacity."""
FAILURES_IN_A_ROW = 16
"""Episodes of a task set that fail one after another before the set is suspended."""
SUSPENDED_SECONDS = 300.0
"""Time without episodes of a task set that only fails. The server fills its batches with the others then."""


@dataclass(slots=True, eq=False)
class Visit:
    """One visit of a task: what the specs of its group share."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an episode of the group has begun, or its task is skipped. A spare one waits for this, to join."""
    size: int | None = None
    """Number of episodes that complete the group, once the server has answered. The recipe may want few."""
    is_closed: bool = False
    """True if no further episode is begun, because the recipe skips the task or the server dropped the group. Begun
    again, such a group would lack the members it had."""
    num_left: int = 0
    """Number of its specs that have not ended for good."""
    num_finished: int = 0
    previous: Visit | None = None
    """In a reproducible run: the visit before it, whose group begins first."""

    @property
    def lacks_members(self) -> bool:
        """True if its group has begun and fewer members finished than the group wants."""
        return not self.is_closed and self.size is not None and self.num_finished < self.size

    async def wait_for_turn(self, place: int) -> None:
        """Waits until the groups before this one have begun, and the first episode of this one."""
        before = self if place else self.previous
        if before is not None:
            await before.opened.wait()
        if not place:
            self.previous = None  # else every visit of a run would be kept


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One episode to run: a task, the group it is compared in, and its place in the order."""

    task: Task
    group: str
    index: int
    spare: bool = False
    """Beyond the size of its group: not begun if the group is complete by then."""
    place: int = 0
    """Number of the episode in its group."""
    visit: Visit = field(default_factory=Visit, compare=False)
    seed: int | None = None
    """Seeds the answers of the episode; None: the server does."""

    @property
    def is_wanted(self) -> bool:
        """False for a place that the group does not have."""
        return self.spare or self.visit.size is None or self.place < self.visit.size


class Groups:
    """Makes the episodes of each visit of a training run."""

    def __init__(self, group_size: int, spare: int, base: str) -> None:
        """A visit of a task is a group of `group_size` episodes plus `spare` ones. With a `base` the episodes have
        seeds, and groups begin in order.
        """
        self.base = base
        self._are_spare = [number >= group_size for number in range(group_size + spare)]
        self._run = uuid.uuid4().hex[:8]
        self._indices, self._visits = itertools.count(), itertools.count()

    def visit(self, task: Task, epoch: int, previous: Visit | None) -> list[RolloutSpec]:
        """The episodes of the next visit. `epoch` and the task determine their seeds."""
        base = f"{self.base}/{epoch}" if self.base else ""
        group = f"{task.id[:200]}/{self._run}/{next(self._visits)}"
        visit = Visit(num_left=len(self._are_spare), previous=previous if base else None)
        return [
            RolloutSpec(
                task,
                group,
                next(self._indices),
                is_spare,
                place,
                visit,
                episode_seed(base, task, place) if base else None,
            )
            for place, is_spare in enumerate(self._are_spare)
        ]


class RolloutQueue:
    """The episodes of a run, in order. One that the server had no room for is put back, and is next of its task set."""

    def __init__(
        self, visits: Mapping[str, Iterator[list[RolloutSpec]]], order: Iterator[str], tasks: Sequence[Task] = ()
    ) -> None:
        """`visits` are by task set; `order` yields the task set of each next visit; `tasks` may be skipped."""
        self._unread = dict(visits)
        self._order = order
        self._waiting: dict[str, deque[RolloutSpec]] = {task_set: deque() for task_set in visits}
        """Episodes that were made or put back, by task set."""
        self.task_sets = frozenset(visits)
        """Those of which one may be left out for a while, because its episodes only fail."""
        self.has_sets = len(visits) > 1
        """True if a task set without room is passed over."""
        self._ids = {name: {task.id for task in tasks if task.task_set == name} for name in visits}
        self._skipped: dict[str, set[str]] = {name: set() for name in visits}
        """Tasks that the recipe skips at the present policy version, by task set."""

    @classmethod
    def training(
        cls, tasks: Sequence[Task], group_size: int, seed: int, spare: int = 0, base: str = ""
    ) -> RolloutQueue:
        """Endless epochs over the tasks, each in a new order that `seed` determines. A visit of a task is a group of
        `group_size` episodes plus `spare` ones. With a `base` for their seeds, groups begin in order.

        The order of each task set is independent, so a set that is passed over misses none of its tasks.
        """
        groups = Groups(group_size, spare, base)

        def visits(own: Sequence[Task]) -> Iterator[list[RolloutSpec]]:
            visit = None
            for epoch, task in epochs(own, seed):
                group = groups.visit(task, epoch, visit)
                visit = group[0].visit
                yield group

        task_sets = dict.fromkeys(task.task_set for task in tasks)
        by_set = {name: visits([task for task in tasks if task.task_set == name]) for name in task_sets}
        order = (task.task_set for _, task in epochs(tasks, seed))
        return cls(by_set, order, tasks)

    @classmethod
    def once(
        cls, tasks: Sequence[Task], repeats: int = 1, base: str = "", capacity: Collection[str] = ()
    ) -> RolloutQueue:
        """Each task `repeats` times, in no group, with seeds from `base` if there is one. The task sets of `capacity`
        have room for themselves; all other tasks share the room."""

        def visits(own: Sequence[tuple[int, Task]]) -> Iterator[list[RolloutSpec]]:
            for number, task in own:
                for repeat in range(repeats):
                    seed = episode_seed(base, task, repeat) if base else None
                    yield [RolloutSpec(task, "", number * repeats + repeat, seed=seed)]

        by_set: dict[str, list[tuple[int, Task]]] = {}
        for number, task in enumerate(tasks):
            by_set.setdefault(task.task_set if task.task_set in capacity else "", []).append((number, task))
        queue = cls({name: visits(own) for name, own in by_set.items()}, itertools.cycle(by_set))
        queue.task_sets = frozenset()  # A set that only fails is not left out of a score.
        return queue

    def next(self, full: Collection[str] = (), busy: Collection[str] = ()) -> RolloutSpec | None:
        """The next episode of a task set that is not in `full`. None if there is none now, or after the last: see
        `has_ended`. The members of groups that have begun come first, also those of a full set: it has room for them,
        unless it is also in `busy`. Then come the other episodes of visits that were read, so that each visit has one
        place in the order of the sets.

        Sets whose tasks are all skipped come last: they are begun nevertheless if no other set has room, so that
        training never stops.
        """
        if (begun := self._of_begun_group(busy)) is not None:
            return begun
        closed = {*full, *filter(self.is_skipped, self._unread)}
        if closed >= self._unread.keys():
            closed = {*full}
        while (waiting := self._first(closed)) is None and not closed >= self._unread.keys():
            task_set = next(name for name in self._order if name in self._unread and name not in closed)
            if (visit := next(self._unread[task_set], None)) is None:
                del self._unread[task_set]
            else:
                self._waiting[task_set].extend(visit)
        return waiting.popleft() if waiting else None

    @property
    def has_ended(self) -> bool:
        """True after the last episode, unless one is put back."""
        return not self._unread and not any(self._waiting.values())

    def _of_begun_group(self, busy: Collection[str]) -> RolloutSpec | None:
        others = (own for name, own in self._waiting.items() if name not in busy)
        return next((own.popleft() for own in others if own and own[0].visit.opened.is_set()), None)

    def _first(self, closed: Collection[str]) -> deque[RolloutSpec] | None:
        """The waiting episodes of a set that is not in `closed`: of several, the one that was read first."""
        waiting = (own for name, own in self._waiting.items() if own and name not in closed)
        return min(waiting, key=lambda own: own[0].index, default=None)

    def has_other(self, full: Collection[str]) -> bool:
        """True if an episode of a task set outside `full` may be next."""
        return full != self.task_sets

    def put_back(self, spec: RolloutSpec) -> None:
        """Return an episode that the server had no room for: its group has not begun, or not any more."""
        spec.visit.opened.clear()
        self._waiting[spec.task.task_set].appendleft(spec)

    def skip(self, task: Task) -> None:
        self._skipped[task.task_set].add(task.id)

    def is_skipped(self, task_set: str) -> bool:
        """True if the recipe skips all tasks of the set."""
        return bool(self._ids[task_set]) and self._skipped[task_set] == self._ids[task_set]

    def forget_skipped(self) -> None:
        """After a new policy version: the recipe may choose otherwise."""
        for skipped in self._skipped.values():
            skipped.clear()


def episode_seed(base: str, task: Task, number: int) -> int:
    """A seed of 63 bits for an episode of a task, from its content alone."""
    name = json.dumps([base, task.task_set, task.id, number])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def epochs(tasks: Sequence[Task], seed: int) -> Iterator[tuple[int, Task]]:
    """Endless visits of the tasks, each epoch in another order. Yields the number of the epoch, too."""
    order = random.Random(seed)
    for epoch in itertools.count():
        for task in order.sample(tasks, len(tasks)):
            yield epoch, task


Agent = Callable[[Task, Any], Returned | Awaitable[Returned]]
"""`agent(task, episode) -> reward`. A plain function runs in a thread and gets an `Episode`. An `async def` function
gets an `AsyncEpisode`."""
StartRollout = Callable[[RolloutSpec], Awaitable[tuple[AsyncEpisode, Agent]]]
"""Begins an episode, and chooses the agent that runs it."""
Report = Callable[[RolloutSpec, EpisodeResult, bool], None]
CloseGroups = Callable[[Sequence[RolloutSpec], bool], Awaitable[None]]
"""Closes the groups of these specs, which get no further episode. True: they are not needed."""


class AgentFailing(AgentJetError):
    """Every episode so far was aborted by the agent's own exception, or made no call."""


@dataclass
class _FailureCheck:
    """Raises `AgentFailing` when the first `limit` episodes all fail, or make no call although `needs_calls`: then the
    agent is wrong, not unlucky."""

    limit: int
    needs_calls: bool
    num_failed: int = 0
    num_silent: int = 0
    """Episodes scored before the first one with a call."""
    has_scored: bool = False
    has_called: bool = False
    tasks: set[tuple[str, str]] = field(default_factory=set)
    """The tasks of the episodes that failed."""
    task_sets: frozenset[str] = frozenset()
    """The task sets of the run. One that only fails does not end the run of the others."""

    def scored(self, result: EpisodeResult) -> None:
        self.has_scored = True
        self.has_called = self.has_called or result.num_calls > 0
        self.num_silent += not self.has_called
        if self.needs_calls and self.num_silent >= self.limit:
            raise AgentFailing(
                f"no episode that was scored so far ({self.num_silent}) made a call of the policy, so there is nothing "
                "to train: give the agent's client episode.base_url and episode.api_key (a program: OPENAI_BASE_URL "
                "and OPENAI_API_KEY, or ANTHROPIC_...), and read its streams to their end"
            )

    def failed(self, result: EpisodeResult) -> None:
        self.num_failed += 1
        self.tasks.add((result.task_set, result.task_id))
        untried = self.task_sets - {task_set for task_set, _ in self.tasks} if len(self.task_sets) > 1 else ()
        if self.has_scored or self.num_failed < self.limit or untried:
            return
        where = f" at {result.where}" if result.where else ""
        is_one = len(self.tasks) == 1
        attempts = f"attempt at task {result.task_id!r}" if is_one else f"episode of {len(self.tasks)} tasks"
        hint = "" if is_one else "; to try it alone, evaluate it on one task"
        raise AgentFailing(
            f"every {attempts} failed so far ({self.num_failed}), the last with {result.error}{where}: fix the agent "
            f"or its reward{hint}"
        )


@dataclass
class _Suspensions:
    """The task sets that are left out for a while, because their episodes only fail. One set at least is not."""

    notify: Callable[[str], None]
    in_a_row: Counter[str] = field(default_factory=Counter)
    """Failed episodes since the last one of the set that was scored."""
    until: dict[str, float] = field(default_factory=dict)

    def record(self, result: EpisodeResult, task_sets: Collection[str]) -> None:
        name = result.task_set
        self.in_a_row[name] = 0 if result.outcome == "finished" else self.in_a_row[name] + 1
        others = {*task_sets} - {name} - self.present()
        if name in task_sets and others and self.in_a_row[name] >= FAILURES_IN_A_ROW:
            self.in_a_row[name] = 0
            self.until[name] = time.monotonic() + SUSPENDED_SECONDS
            self.notify(
                f"task set {name!r} is left out for {SUSPENDED_SECONDS:g} s, because its last {FAILURES_IN_A_ROW} "
                f"episodes failed, the last with {result.error}"
            )

    def present(self) -> set[str]:
        now = time.monotonic()
        return {name for name, until in self.until.items() if now < until}


class Runner:
    """Runs agents.

    Calls `report(spec, result, last)` for every episode that ended; `last` is True if it is not attempted again. Set
    `goal_reached` before cancelling a run that reached its goal: live episodes are then reported as
    `not_needed`.
    """

    def __init__(
        self,
        start: StartRollout,
        report: Report,
        *,
        needs_calls: bool = False,
        is_on_trial: Callable[[str], bool] = lambda code_version: False,
        close_groups: CloseGroups | None = None,
        capacity: Mapping[str, int] | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`needs_calls`: episodes without a call cannot be trained, so an agent that never makes one is an error.
        `is_on_trial` is True for a code version that may be the one that fails. Its failures do not use up attempts.
        `close_groups` is for episodes in groups. `capacity` is the maximum number of live episodes by task set.
        `notify` gets sentences for the user.
        """
        self._start, self._report = start, report
        self._needs_calls, self._is_on_trial = needs_calls, is_on_trial
        self.goal_reached = False
        """True if the run reached its goal; False if it was interrupted, or failed."""
        self.num_begun = 0
        self.live: set[AsyncEpisode] = set()
        """Episodes that have begun and not ended."""
        self._num_beginning = 0
        self._close_groups = close_groups
        self._open: dict[str, RolloutSpec] = {}
        """The last begun spec of each group that may get further episodes."""
        self._capacity = dict(capacity or {})
        self._num_running: Counter[str] = Counter()
        """Number of episodes that workers run, by task set."""
        self._suspensions = _Suspensions(notify)

    async def run(self, queue: RolloutQueue, concurrency: int) -> None:
        """Run every episode of the queue, `concurrency` at a time, with up to `ATTEMPTS` attempts each. While a task
        set has no room (`Conflict`, `task_set_full`), episodes of other sets are begun. Tasks that the recipe skips
        (`task_skipped`) are passed over.

        Raises `AgentFailing` when the first `2 * concurrency` episodes all fail, or make no call although calls are
        needed.
        """
        check = _FailureCheck(2 * concurrency, self._needs_calls, task_sets=queue.task_sets)

        async def work() -> None:
            full: set[str] = set()
            while (spec := await self._next(queue, full)) is not None:
                try:
                    with self._counted(spec):
                        await self._run_spec(spec, check, full)
                except Conflict as refusal:
                    if refusal.code == "task_set_full":
                        queue.put_back(spec)
                        full.add(spec.task.task_set)
                        if not queue.has_other(full):
                            await asyncio.sleep(FULL_SECONDS)
                            full.clear()
                        continue
                    if refusal.code == "task_skipped":
                        queue.skip(spec.task)
                        spec.visit.is_closed = True
                        spec.visit.opened.set()
                    elif refusal.code != "group_closed":  # A spare episode, or the recipe wants fewer.
                        raise
                await self._place_ended(spec)

        workers = [asyncio.create_task(work()) for _ in range(concurrency)]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            await self._end(workers)
            raise
        ending = asyncio.create_task(self._end(workers))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # What runs beside this has ended, too: a second cancellation cuts this short.
            await ending
            raise
        for worker in done:
            worker.result()

    async def _next(self, queue: RolloutQueue, full: set[str]) -> RolloutSpec | None:
        """The next episode of a set that has room here and on the server. Waits while there is none."""
        while True:
            busy = {name for name, most in self._capacity.items() if self._num_running[name] >= most}
            spec = queue.next(full | busy | self._suspensions.present(), busy)
            if spec is not None or queue.has_ended:
                return spec
            await asyncio.sleep(FULL_SECONDS if full else CAPACITY_SECONDS)
            full.clear()

    @contextlib.contextmanager
    def _counted(self, spec: RolloutSpec) -> Iterator[None]:
        self._num_running[spec.task.task_set] += 1
        try:
            yield
        finally:
            self._num_running[spec.task.task_set] -= 1

    async def _place_ended(self, spec: RolloutSpec) -> None:
        """Record that a spec is not attempted again. Closes its group if that was the last one and members lack: the
        server would wait for them.
        """
        visit = spec.visit
        visit.num_left -= 1
        if visit.num_left == 0:
            self._open.pop(spec.group, None)
            if visit.lacks_members and self._close_groups is not None:
                await self._close_groups([spec], False)

    async def _end(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """End a run: no episode stays live, and the groups that other clients and later runs would wait for are closed.
        A cancellation ends the waits.
        """
        try:
            await _ended(workers)
        finally:
            await self._close_open_groups()

    async def _close_open_groups(self) -> None:
        left = [spec for spec in self._open.values() if spec.visit.lacks_members]
        self._open.clear()
        if left and self._close_groups is not None:
            seconds = COMPLETE_SECONDS if self.goal_reached else ABORT_SECONDS / 2
            await wait_for_end(self._close_groups(left, self.goal_reached), seconds)

    async def _run_spec(self, spec: RolloutSpec, check: _FailureCheck, full: set[str]) -> None:
        """Attempt an episode until it is scored, dropped or out of attempts; `full` is cleared once it has begun.

        The worker of a failed episode begins the next attempt at once. If attempts were queued, all workers could wait
        for room for new groups while this group lacks a member.
        """
        if spec.spare:
            await spec.visit.opened.wait()
        attempts_left = ATTEMPTS
        while attempts_left and not spec.visit.is_closed:
            result = await self.attempt(spec)
            if spec.seed is not None:  # the same answers could fail in the same way
                spec = replace(spec, seed=(spec.seed + 1) % 2**63)
            full.clear()
            attempts_left -= not self._is_on_trial(result.code_version)
            self._report(spec, result, result.outcome in ("finished", "not_needed") or not attempts_left)
            if result.outcome == "not_needed":
                spec.visit.is_closed = True
                return
            if result.outcome == "finished":
                spec.visit.num_finished += 1
                check.scored(result)
                self._suspensions.record(result, check.task_sets)
                return
            check.failed(result)
            self._suspensions.record(result, check.task_sets)

    async def attempt(self, spec: RolloutSpec) -> EpisodeResult:
        """One episode from begin to end. Raises errors of the server and the network, not those of the agent."""
        episode, agent = await self._begin(spec)
        heartbeats = asyncio.wrap_future(episode.keep_alive())
        try:
            error, where = await self._play(spec, episode, agent, heartbeats)
        except Unreachable:  # The reward may have arrived: do not abort.
            raise
        except BaseException:  # The run ends, also while this episode is being finished or aborted.
            if episode.status == "live":
                await self._abort_on_exit(spec, episode)
            raise
        finally:
            heartbeats.cancel()
            self.live.discard(episode)
        if episode.status in ("aborted", "finished") and episode.reward is None and not episode.reason:
            with contextlib.suppress(AgentJetError):  # The server ended it, or another process finished it.
                await episode.refresh()
        if episode.status == "aborted" and episode.reason.startswith(SURPLUS_REASONS):
            return not_needed(episode)
        if episode.reward is None and not error:
            error = f"{episode.status} before the agent was done"
        return _result(episode, error, where)

    async def _play(
        self, spec: RolloutSpec, episode: AsyncEpisode, agent: Agent, heartbeats: asyncio.Future[bool]
    ) -> tuple[str, str]:
        """Run the agent, and end its episode with a reward or by its exception. Returns the error and its location."""
        episode.watch_loop()
        has_returned = False
        try:
            returned = await self._call_while_live(agent, spec.task, episode, heartbeats)
            has_returned = True
            if episode.status == "live":
                await self._finish(spec, episode, checked_reward(returned, episode.policies))
            return "", ""
        except Exception as failure:  # the boundary: an agent's exception is a fact about its episode
            if has_returned and isinstance(failure, Unreachable):
                raise
            error = f"{abort_reason(failure)}{proxy_hint(failure, episode.base_url)}"
            if episode.status == "live":
                with contextlib.suppress(RequestError):  # the episode ended: there is nothing left to abort
                    await episode.abort(error)
            return error, error_location(agent, failure)

    async def _call_while_live(
        self, agent: Agent, task: Task, episode: AsyncEpisode, heartbeats: asyncio.Future[bool]
    ) -> object:
        """The agent's return value. An agent that is still running when the server ends its episode is cancelled, to
        free its worker.
        """
        working = asyncio.create_task(call_agent(agent, task, episode))
        try:
            either: list[asyncio.Future[Any]] = [working, heartbeats]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            has_ended = not working.done() and heartbeats.result()
            return None if has_ended else await working
        finally:
            if not working.done():
                working.cancel()
                await asyncio.wait([working])
            if not working.cancelled():
                working.exception()  # The run may end as the agent fails: asyncio would log the exception.

    async def _begin(self, spec: RolloutSpec) -> tuple[AsyncEpisode, Agent]:
        self._num_beginning += 1
        try:
            episode, agent = await self._start(spec)
        finally:
            self._num_beginning -= 1
        spec.visit.opened.set()
        spec.visit.size = spec.visit.size or episode.begun.group_size or None
        self.num_begun += 1
        self.live.add(episode)
        if spec.group:
            self._open[spec.group] = spec
        return episode, agent

    async def _abort_on_exit(self, spec: RolloutSpec, episode: AsyncEpisode) -> None:
        """Abort a live episode when the run ends.

        Waits until no worker waits for room: the server would give the freed place to a `begin` that is being
        cancelled. A cancelled client does not wait for a server that is gone.
        """
        seconds = COMPLETE_SECONDS if self.goal_reached else ABORT_SECONDS / 2
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._num_beginning:
                    await asyncio.sleep(BEGINNING_SECONDS)
        why = NOT_NEEDED if self.goal_reached else STOPPED
        await wait_for_end(abort_unless_finished(episode, why, seconds), seconds)
        if episode.reward is not None:
            self._report(spec, _result(episode), True)
        elif self.goal_reached:
            self._report(spec, not_needed(episode), True)

    async def _finish(self, spec: RolloutSpec, episode: AsyncEpisode, reward: Reward) -> None:
        """Send the reward. If this reward completes the last batch, the run is cancelled while it is being sent; the
        episode is reported nevertheless.
        """
        finishing = asyncio.ensure_future(episode.finish(reward))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(finishing, return_exceptions=True), ABORT_SECONDS)
            if episode.reward is not None:
                self._report(spec, _result(episode), True)
            raise


async def call_agent(agent: Agent, task: Task, episode: AsyncEpisode) -> object:
    """Returns what the agent returns. A synchronous agent runs in a thread, with an `Episode`."""
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(
        getattr(agent, "__call__", None)  # noqa: B004 - an object with an async __call__
    ):
        try:
            return await agent(task, episode)  # type: ignore[misc]
        except SystemExit as error:  # It would end the event loop, and every other episode with it.
            raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error
    loop = asyncio.get_running_loop()
    run: RunCoroutine = caller_of(loop)
    returned = await in_thread(agent, task, Episode(episode, run))
    return await returned if inspect.isawaitable(returned) else returned


async def wait_for_first(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait until one has ended; the others are cancelled and waited for. Raises the exception of the first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _ended(tasks)
    for task in done:
        task.result()


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels the tasks and returns, or raises, when all of them have ended. Another cancellation ends their waits."""
    for task in tasks:
        task.cancel()
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


def not_needed(episode: AsyncEpisode) -> EpisodeResult:
    """The result of an episode that no batch of this run needs."""
    why = episode.reason if episode.reason.startswith(SURPLUS_REASONS) else NOT_NEEDED
    return replace(_result(episode, why), outcome="not_needed")


def _result(episode: AsyncEpisode, error: str = "", where: str = "") -> EpisodeResult:
    """The episode's result, from the client's view. An episode still "live" here could not be aborted."""
    reward = episode.reward
    ended: Outcome = "expired" if episode.status == "expired" else "aborted"
    return EpisodeResult(
        episode.task_id,
        episode.task_set,
        ended if reward is None else "finished",
        episode.policy_version,
        None if reward is None else reward.value,
        {} if reward is None else reward.metrics,
        error,
        where,
        episode.code_version,
        {} if reward is None else reward.by_role,
        episode.policies,
        episode.num_calls,
        "" if reward is None else reward.text,
    )


TASKS_REPEATED = 10_000
LOOKAHEAD = 256
MOST_SKIPPED = 256
"""Visits that the recipe skips at one policy version. Further ones are begun nevertheless, so that training goes on."""


class TaskStream:
    """The tasks of a generator in its order."""

    def __init__(self, tasks: Iterable[Task], named: str) -> None:
        """`named` is the argument with the tasks. Raises `ValueError` if there are none, or for a wrong first one."""
        identities = TaskIdentities(named, are_visits=True)
        checked = (identities.checked(task) for task in tasks)
        if (first := next(checked, None)) is None:
            raise ValueError("there are no tasks: give at least one")
        self.first = first
        self._tasks = itertools.chain([first], checked)

    def visits(self, seed: int) -> Iterator[Task]:
        """The tasks. After the last one they are repeated, each epoch in another order, if they are few enough. Raises
        `ValueError` for a wrong task.
        """
        kept: list[Task] = []
        for number, task in enumerate(self._tasks):
            if number < TASKS_REPEATED:
                kept.append(task)
            elif kept:
                kept = []
            yield task
        if kept:
            yield from (task for _, task in epochs(kept, seed))


class StreamQueue(RolloutQueue):
    """The episodes of a training run on a stream. Its end is the end of the run."""

    def __init__(self, stream: TaskStream, groups: Groups, seed: int) -> None:
        super().__init__({}, iter(()))
        self.has_sets = True
        self._visits, self._groups = enumerate(stream.visits(seed)), groups
        self._has_read_all = False
        self._last: Visit | None = None
        self._num_skipped = 0

    def next(self, full: Collection[str] = (), busy: Collection[str] = ()) -> RolloutSpec | None:
        """The next episode of a task set that is not in `full`. Reads visits of full sets ahead. When they are too
        many, or the last was read, their first episode is next, if its set is not in `busy`. Members of begun groups
        come first.
        """
        if (begun := self._of_begun_group(busy)) is not None:
            return begun
        while (waiting := self._first(full)) is None and self._can_read_ahead:
            number, task = next(self._visits, (0, None))
            if task is None:
                self._has_read_all = True
                break
            if self._groups.base and {*self._waiting} - {task.task_set}:
                raise ValueError(ONE_TASK_SET)
            group = self._groups.visit(task, number, self._last)
            self._last = group[0].visit
            self._waiting.setdefault(task.task_set, deque()).extend(group)
        waiting = waiting or self._first(busy)
        return waiting.popleft() if waiting else None

    @property
    def has_ended(self) -> bool:
        return self._has_read_all and not any(self._waiting.values())

    def has_other(self, full: Collection[str]) -> bool:
        return self._first(full) is not None or self._can_read_ahead

    def skip(self, task: Task) -> None:
        self._num_skipped += 1

    def is_skipped(self, task_set: str) -> bool:
        return self._num_skipped > MOST_SKIPPED

    def forget_skipped(self) -> None:
        self._num_skipped = 0

    @property
    def _can_read_ahead(self) -> bool:
        num_waiting = len({spec.group for waiting in self._waiting.values() for spec in waiting})
        return not self._has_read_all and num_waiting < LOOKAHEAD
