"""The rollout runner: agents on tasks, many at a time.

Invariants: an exception inside an agent aborts its episode and is reported, never scored; an episode that was begun is
finished or aborted, also when the runner is cancelled; each task of a training run is visited under a group id of its
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.client.episode import (
    GOODBYE_SECONDS,
    STOPPED,
    AsyncEpisode,
    Drive,
    Episode,
    abort_reason,
    checked_reward,
)
from agentjet.client.report import EpisodeResult, Outcome
from agentjet.client.threads import in_thread
from agentjet.errors import AgentJetError, RequestError, Unreachable
from agentjet.types import Reward, Task

Agent = Callable[[Task, Any], float | Reward | Awaitable[float | Reward]]
"""`agent(task, episode) -> reward`. A plain function runs in a thread and holds an `Episode`, an `async def` one an
`AsyncEpisode`."""
Begin = Callable[["Slot"], Awaitable[AsyncEpisode]]
Report = Callable[["Slot", EpisodeResult, bool], None]

ATTEMPTS = 3
"""Times a failed episode is begun anew in its group."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One episode to be had: a task, the group it is compared in, and its place in the order."""

    task: Task
    group: str
    index: int


def training_slots(tasks: Sequence[Task], group_size: int, seed: int) -> Iterator[Slot]:
    """Tasks for ever, in an order that `seed` determines, anew each epoch; `group_size` slots a visit."""
    order, run, index = random.Random(seed), uuid.uuid4().hex[:8], itertools.count()
    for epoch in itertools.count():
        for task in order.sample(tasks, len(tasks)):
            for _ in range(group_size):
                yield Slot(task, f"{task.id[:200]}/{run}/{epoch}", next(index))


class AgentFailing(AgentJetError):
    """Every episode so far was aborted by the agent's own exception."""


class Runner:
    """Runs one agent.

    `report(slot, result, last)` hears of every episode that ended; `last`: its slot is not tried again.
    """

    def __init__(self, agent: Agent, begin: Begin, report: Report) -> None:
        self._agent = agent
        self._begin = begin
        self._report = report
        self._is_async = inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(
            getattr(agent, "__call__", None)  # noqa: B004 - an object with an async __call__
        )

    async def run(self, slots: Iterator[Slot], concurrency: int) -> None:
        """Attempt every slot, `concurrency` at a time; one that fails is tried again, `ATTEMPTS` times in all.

        Raises `AgentFailing` when the first `2 * concurrency` episodes all fail: then the agent is wrong, not unlucky.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency = {concurrency}: it must be at least 1")
        failures = 0
        succeeded = False

        async def work() -> None:
            # A worker whose episode failed takes the freed place in the same group at once. Were the slot queued, all
            # workers could be waiting for room for new groups while this one lacks a member.
            nonlocal failures, succeeded
            for slot in slots:
                for attempts_left in reversed(range(ATTEMPTS)):
                    result = await self.attempt(slot)
                    self._report(slot, result, result.outcome == "finished" or not attempts_left)
                    if result.outcome == "finished":
                        succeeded = True
                        break
                    failures += 1
                    if not succeeded and failures >= 2 * concurrency:
                        raise AgentFailing(
                            f"the first {failures} episodes all failed, the last with {result.error}; none was scored"
                        )

        await all_to_end([work() for _ in range(concurrency)])

    async def attempt(self, slot: Slot) -> EpisodeResult:
        """One episode from begin to end. Raises what the server's refusals and silence raise, not what the agent does
        itself.
        """
        episode = await self._begin(slot)
        heart = asyncio.create_task(_keep_alive(episode))
        try:
            returned = await self._call(slot.task, episode)
            if episode.status == "live":
                await self._finish(slot, episode, checked_reward(returned))
            error = "" if episode.reward is not None else f"{episode.status} before the agent was done"
        except asyncio.CancelledError:
            await _say_goodbye(episode)
            raise
        except Unreachable:
            raise
        except Exception as failure:  # the boundary: whatever an agent raises is a fact about its episode
            error = abort_reason(failure)
            if episode.status == "live":
                with contextlib.suppress(RequestError):  # it ended meanwhile: there is nothing left to abort
                    await episode.abort(error)
        finally:
            heart.cancel()
        return _result(slot.task, episode, error)

    async def _finish(self, slot: Slot, episode: AsyncEpisode, reward: Reward) -> None:
        """Hand in the reward. A run may be over, and this cancelled, because this very reward completed its last batch:
        what was handed in is reported all the same.
        """
        finishing = asyncio.ensure_future(episode.finish(reward))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait([finishing], timeout=GOODBYE_SECONDS)
            if episode.reward is not None:
                self._report(slot, _result(slot.task, episode, ""), True)
            elif not finishing.done():
                finishing.cancel()
            raise

    async def _call(self, task: Task, episode: AsyncEpisode) -> object:
        if self._is_async:
            return await self._agent(task, episode)  # type: ignore[misc]
        loop = asyncio.get_running_loop()
        drive: Drive = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()  # noqa: E731
        returned = await in_thread(self._agent, task, Episode(episode, drive))
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


async def _keep_alive(episode: AsyncEpisode) -> None:
    """Heartbeat for an agent that thinks longer than its lease between two calls; ends with the episode."""
    while episode.status == "live":
        await asyncio.sleep(episode.lease_seconds / 3)
        with contextlib.suppress(AgentJetError):
            await episode.heartbeat()


async def _say_goodbye(episode: AsyncEpisode) -> None:
    """Abort on the way out; a cancelled client does not wait for a server that is gone."""
    if episode.status == "live":
        with contextlib.suppress(AgentJetError, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await episode.abort(STOPPED, patience=0.0)


def _result(task: Task, episode: AsyncEpisode, error: str) -> EpisodeResult:
    """`episode`'s end as the client knows it. An episode still "live" here could not even be aborted."""
    reward = episode.reward
    if reward is not None:
        return EpisodeResult(task.id, task.task_set, "finished", episode.policy_version, reward.value, reward.metrics)
    outcome: Outcome = "expired" if episode.status == "expired" else "aborted"
    return EpisodeResult(task.id, task.task_set, outcome, episode.policy_version, error=error)
