"""`RolloutQueue`: which episode of a run is next, and which instead while the server has no room for a task set.

The rollout runner: agents on tasks, many at a time.

Invariants: an exception inside an agent aborts its episode and is reported, never scored; an episode that was begun is
finished or aborted, also when the runner is cancelled while agents hang in their threads; each task of a training run
is visited under a group id of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentjet.client.agent_source import error_location
from agentjet.client.episode import (
    ABORT_SECONDS,
    NOT_NEEDED,
    STOPPED,
    RunCleanup,
    RunCoroutine,
    abort_reason,
)
from agentjet.client.report import EpisodeResult, Outcome
from agentjet.client.threads import in_thread
from agentjet.errors import AgentJetError, Conflict, NotFound, RequestError, Unreachable
from agentjet.types import EpisodeStatus, Reward, Task


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One episode to be had: a task, the group it is compared in, and its place in the order."""

    task: Task
    group: str
    index: int
    spare: bool = False
    """Beyond what its group needs: not begun when the group has all it needs by then."""
    opened: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Common to a group's slots, set when one of them has begun. A spare one joins a group, and so waits for it."""


class RolloutQueue:
    """The slots of a run, in order. One that found no room is put back, and is the next of its task set."""

    def __init__(self, slots: Mapping[str, Iterator[RolloutSpec]], order: Iterator[str]) -> None:
        """`slots` are by task set, `order` says which set is next."""
        self._slots = slots
        self._order = order
        self._put_back: dict[str, deque[RolloutSpec]] = {task_set: deque() for task_set in slots}
        self.task_sets = frozenset(slots)

    @classmethod
    def training(cls, tasks: Sequence[Task], group_size: int, seed: int, spare: int = 0) -> RolloutQueue:
        """Tasks for ever, in an order that `seed` determines, anew each epoch; `group_size` slots a visit, and `spare`.

        Every task set has an order of its own, so that one that is passed over misses none of its tasks.
        """
        members = [number >= group_size for number in range(group_size + spare)]
        run, index = uuid.uuid4().hex[:8], itertools.count()

        def slots(own: Sequence[Task]) -> Iterator[RolloutSpec]:
            for epoch, task in _epochs(own, seed):
                group, opened = f"{task.id[:200]}/{run}/{epoch}", asyncio.Event()
                for is_spare in members:
                    yield RolloutSpec(task, group, next(index), is_spare, opened)

        task_sets = dict.fromkeys(task.task_set for task in tasks)
        by_set = {name: slots([task for task in tasks if task.task_set == name]) for name in task_sets}
        return cls(by_set, (task.task_set for _, task in _epochs(tasks, seed) for _ in members))

    @classmethod
    def once(cls, tasks: Sequence[Task]) -> RolloutQueue:
        """Each task once, in no group; room does not depend on the task set."""
        slots = (RolloutSpec(task, "", index) for index, task in enumerate(tasks))
        return cls({"": slots}, itertools.repeat(""))

    def next(self, full: Collection[str] = ()) -> RolloutSpec | None:
        """The next slot of a task set that is not in `full`; None after the last. Some set is not in `full`."""
        task_set = next(name for name in self._order if name not in full)
        waiting = self._put_back[task_set]
        return waiting.popleft() if waiting else next(self._slots[task_set], None)

    def put_back(self, slot: RolloutSpec) -> None:
        """There was no room for it."""
        self._put_back[slot.task.task_set].append(slot)


def _epochs(tasks: Sequence[Task], seed: int) -> Iterator[tuple[int, Task]]:
    order = random.Random(seed)
    for epoch in itertools.count():
        for task in order.sample(tasks, len(tasks)):
            yield epoch, task


Returned = float | Reward | Mapping[str, float]
Agent = Callable[[Task, Any], Returned | Awaitable[Returned]]
"""`agent(task, episode) -> reward`. A plain function runs in a thread and holds an `Episode` (of a team, a
`TeamEpisode`), an `async def` one an `AsyncEpisode`. Rewards by member are a team's."""
Begin = Callable[[RolloutSpec], Awaitable["StartedRollout"]]
Report = Callable[[RolloutSpec, EpisodeResult, bool], None]

SPARE = ("surplus:", "stale:")
"""How the server's reasons begin for episodes that failed in nothing."""
_CALL = "give the agent's client episode.base_url and episode.api_key, and read its streams to their end"
_MEND = "mend the agent; swarm.evaluate(agent, {tasks}[:1]) tries it once"
ATTEMPTS = 3
"""How often a slot is tried, when its episodes fail."""
FULL_SECONDS = 1.0
"""Before a worker asks again that has found no task set with room."""


class Attempt(Protocol):
    """What the runner needs of an episode: `AsyncEpisode` and `AsyncTeamEpisode` have it."""

    @property
    def status(self) -> EpisodeStatus: ...
    @property
    def reward(self) -> Reward | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def code_version(self) -> str: ...
    @property
    def lease_seconds(self) -> float: ...
    @property
    def num_calls(self) -> int: ...
    def checked(self, returned: object) -> Reward: ...
    def driven(self, drive: RunCoroutine) -> object: ...
    async def finish(self, reward: Reward) -> object: ...
    async def abort(self, reason: str = "", *, patience: float | None = None) -> object: ...
    async def heartbeat(self) -> object: ...
    async def look(self) -> object: ...


@dataclass(frozen=True, slots=True)
class StartedRollout:
    """An episode, and the agent that is to run it."""

    episode: Attempt
    agent: Agent


class AgentFailing(AgentJetError):
    """Every episode so far was aborted by the agent's own exception, or made no call (`is_silent`)."""

    def __init__(self, fact: str, *, is_silent: bool = False, tasks: str = "tasks") -> None:
        """`tasks`: the argument that its tasks were given as."""
        super().__init__(f"{fact}: {_CALL if is_silent else _MEND.format(tasks=tasks)}")
        self.fact = fact
        self.is_silent = is_silent


class Runner:
    """Runs agents.

    `report(slot, result, last)` hears of every episode that ended; `last`: its slot is not tried again. Set
    `ending.has_enough` before cancelling a run that reached its goal: what is still live is reported as `not_needed`
    then.
    """

    def __init__(
        self,
        begin: Begin,
        report: Report,
        *,
        needs_calls: bool = False,
        is_on_trial: Callable[[str], bool] = lambda code_version: False,
    ) -> None:
        """`needs_calls`: what makes no call cannot be trained, and agents that never make one are wrong.
        `is_on_trial`: whether a code version may yet turn out to be the one that fails, so that no slot is given up for
        its failures.
        """
        self._begin = begin
        self._report = report
        self._needs_calls = needs_calls
        self._is_on_trial = is_on_trial
        self.ending = RunCleanup()
        self.num_begun = 0
        self.live: set[Attempt] = set()
        """Episodes begun and not ended yet."""
        self._num_beginning = 0
        self._none_beginning = asyncio.Event()

    async def run(self, slots: RolloutQueue, concurrency: int) -> None:
        """Attempt every slot, `concurrency` at a time; one that fails is tried again, `ATTEMPTS` times in all. While a
        task set has no room (`Conflict`, `task_set_full`) others have their turn.

        Raises `AgentFailing` when the first `2 * concurrency` episodes all fail, or make no call where that matters:
        then the agent is wrong, not unlucky.
        """
        failures = silent = 0
        succeeded = called = False
        unwanted: set[str] = set()
        """Groups the server has no use for: begun again, one would be short of the members it had."""

        async def work() -> None:
            # A worker whose episode failed takes the freed place in the same group at once. Were the slot queued, all
            # workers could be waiting for room for new groups while this one lacks a member.
            nonlocal failures, succeeded, silent, called
            full: set[str] = set()
            while (slot := slots.next(full)) is not None:
                if slot.group and slot.group in unwanted:
                    continue
                attempts_left = ATTEMPTS
                while attempts_left:
                    try:
                        result = await self.attempt(slot)
                    except Conflict as refusal:
                        if refusal.code == "task_set_full":
                            slots.put_back(slot)
                            full.add(slot.task.task_set)
                            if full == slots.task_sets:
                                await asyncio.sleep(FULL_SECONDS)
                                full.clear()
                        elif not (slot.spare and refusal.code == "group_closed"):
                            raise
                        break
                    full.clear()
                    attempts_left -= not self._is_on_trial(result.code_version)
                    self._report(slot, result, result.outcome in ("finished", "not_needed") or not attempts_left)
                    if result.outcome == "not_needed":
                        unwanted.add(slot.group)
                        break
                    if result.outcome == "finished":
                        succeeded = True
                        called = called or result.num_calls > 0
                        silent += not called
                        if self._needs_calls and silent >= 2 * concurrency:
                            raise AgentFailing(
                                f"the first {silent} episodes were scored but made no call of the policy, so there is "
                                "nothing to train",
                                is_silent=True,
                            )
                        break
                    failures += 1
                    if not succeeded and failures >= 2 * concurrency:
                        where = f" at {result.where}" if result.where else ""
                        raise AgentFailing(
                            f"the first {failures} episodes all failed and none was scored, the last with "
                            f"{result.error}{where}"
                        )

        await all_to_end([work() for _ in range(concurrency)])

    async def attempt(self, slot: RolloutSpec) -> EpisodeResult:
        """One episode from begin to end. Raises what the server's refusals and silence raise, not what the agent does
        itself.
        """
        begun = await self._begun(slot)
        episode = begun.episode
        heart = asyncio.create_task(keep_alive(episode))
        error = where = ""
        has_played = False
        try:
            returned = await self._while_wanted(slot.task, begun, heart)
            has_played = True
            if episode.status == "live":
                await self._finish(slot, episode, episode.checked(returned))
            error = "" if episode.reward is not None else f"{episode.status} before the agent was done"
        except asyncio.CancelledError:
            if episode.status == "live":
                await self._abort_on_exit(slot, episode)
            raise
        except Exception as failure:  # the boundary: whatever an agent raises is a fact about its episode
            if has_played and isinstance(failure, Unreachable):  # The reward may have arrived: an abort is no answer.
                raise
            error, where = abort_reason(failure), error_location(begun.agent, failure)
            if episode.status == "live":
                with contextlib.suppress(RequestError):  # it ended meanwhile: there is nothing left to abort
                    await episode.abort(error)
        finally:
            heart.cancel()
            self.live.discard(episode)
        if await _was_spare(episode):
            return not_needed(slot.task, episode)
        return _result(slot.task, episode, error, where)

    async def _while_wanted(self, task: Task, begun: StartedRollout, heart: asyncio.Task[bool]) -> object:
        """What the agent returns. One that works on although the server ended its episode is given up: its place is
        needed.
        """
        working = asyncio.create_task(_call(begun.agent, task, begun.episode))
        try:
            await asyncio.wait({working, heart}, return_when=asyncio.FIRST_COMPLETED)
            given_up = not working.done() and heart.result()
            return None if given_up else await working
        finally:
            if not working.done():
                working.cancel()
                await asyncio.wait([working])

    async def _begun(self, slot: RolloutSpec) -> StartedRollout:
        if slot.spare:
            await slot.opened.wait()
        self._num_beginning += 1
        self._none_beginning.clear()
        try:
            begun = await self._begin(slot)
        finally:
            self._num_beginning -= 1
            if not self._num_beginning:
                self._none_beginning.set()
        slot.opened.set()
        self.num_begun += 1
        self.live.add(begun.episode)
        return begun

    async def _abort_on_exit(self, slot: RolloutSpec, episode: Attempt) -> None:
        """Abort on the way out, once nothing of ours waits for room any more: the server would give the freed place to
        a `begin` that nobody listens for. A cancelled client does not wait for a server that is gone.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.ending.seconds):
                await self._none_beginning.wait()
        why = NOT_NEEDED if self.ending.has_enough else STOPPED
        await self.ending.trim_malloc(episode.abort(why, patience=self.ending.seconds))
        if self.ending.has_enough:
            self._report(slot, not_needed(slot.task, episode), True)

    async def _finish(self, slot: RolloutSpec, episode: Attempt, reward: Reward) -> None:
        """Hand in the reward. A run may be over, and this cancelled, because this very reward completed its last batch:
        what was handed in is reported all the same.
        """
        finishing = asyncio.ensure_future(episode.finish(reward))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait([finishing], timeout=ABORT_SECONDS)
            if episode.reward is not None:
                self._report(slot, _result(slot.task, episode), True)
            elif not finishing.done():
                finishing.cancel()
            elif not finishing.cancelled():
                finishing.exception()  # Seen: the server ended the episode first, which is no news now.
            raise


async def _call(agent: Agent, task: Task, episode: Attempt) -> object:
    """What the agent returns."""
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(
        getattr(agent, "__call__", None)  # noqa: B004 - an object with an async __call__
    ):
        try:
            return await agent(task, episode)  # type: ignore[misc]
        except SystemExit as ended:  # It would end the event loop, and every other episode with it.
            raise RuntimeError(f"the agent called sys.exit({ended.code!r})") from ended
    loop = asyncio.get_running_loop()
    drive: RunCoroutine = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()  # noqa: E731
    returned = await in_thread(agent, task, episode.driven(drive))
    return await returned if inspect.isawaitable(returned) else returned


async def all_to_end(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all. When one raises, or this is cancelled, the others are cancelled and waited for."""
    await _until(asyncio.FIRST_EXCEPTION, coroutines)


async def first_to_end(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for the first; the others are cancelled and waited for. Raises what it raised."""
    await _until(asyncio.FIRST_COMPLETED, coroutines)


async def _until(when: str, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=when)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in ended:
        task.result()


async def keep_alive(episode: Attempt) -> bool:
    """Heartbeat for an agent that thinks longer than its lease between two calls; ends with the episode, and tells
    whether it was the server that ended it.
    """
    while True:
        await asyncio.sleep(episode.lease_seconds / 3)
        if episode.status != "live":
            return False
        try:
            await episode.heartbeat()
        except (Conflict, NotFound):  # It ended, or its run is not served any more.
            return True
        except AgentJetError:  # The server may be away for a while: the agent finds out when it asks.
            pass


async def _was_spare(episode: Attempt) -> bool:
    """Whether the server ended it because the batch had enough without it, or no longer wants what is so old."""
    if episode.status == "aborted" and not episode.reason:
        with contextlib.suppress(AgentJetError):
            await episode.look()
    return episode.status == "aborted" and episode.reason.startswith(SPARE)


def not_needed(task: Task, episode: Attempt) -> EpisodeResult:
    """The end of an episode that no batch this run waits for has a use for."""
    why = episode.reason if episode.reason.startswith(SPARE) else NOT_NEEDED
    code = episode.code_version
    return EpisodeResult(task.id, task.task_set, "not_needed", episode.policy_version, error=why, code_version=code)


def _result(task: Task, episode: Attempt, error: str = "", where: str = "") -> EpisodeResult:
    """`episode`'s end as the client knows it. An episode still "live" here could not even be aborted."""
    reward, version, code = episode.reward, episode.policy_version, episode.code_version
    if reward is not None:
        return EpisodeResult(
            task.id,
            task.task_set,
            "finished",
            version,
            reward.value,
            reward.metrics,
            by_role=reward.by_role,
            num_calls=episode.num_calls,
            code_version=code,
        )
    outcome: Outcome = "expired" if episode.status == "expired" else "aborted"
    return EpisodeResult(task.id, task.task_set, outcome, version, error=error, where=where, code_version=code)
