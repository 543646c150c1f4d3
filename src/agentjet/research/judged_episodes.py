"""`JudgedEpisodes`: the evaluator of a judged subject scores the conversations that the server recorded.

The arm's agent plays the held-out tasks as it would be deployed, and what it returns does not count. At the end the
judge also scores the newest training episodes, for comparison with the reward that was paid.

Facts of such an outcome, beside those of `agentjet.research.diagnosis`:

* `swapped`: mean score of held-out conversations under the next task. A sound judge gives chance.
* `training_reward`, `judged_reward`: means of the newest training episodes.
* `rejected`, `overpaid`: share of these episodes that the judge scored higher, or lower, than training paid.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agentjet.client import AsyncSwarm
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.arm_process import ArmClient, ArmFailed, conversation
from agentjet.research.models import Outcome, Transcript
from agentjet.research.run_record import HeldOutScore, scoring
from agentjet.research.subject import Message, Subject, one_line_at
from agentjet.types import Task

MAX_JUDGED = 32
"""Maximum training episodes that the judge scores, for comparison with the training reward."""
MAX_COUNTED = 4000
"""Maximum training episodes that are counted by task."""


class NotScorable(AgentJetError):
    """The run cannot be scored."""


class JudgedEpisodes:
    def __init__(self, subject: Subject, held_out: Sequence[Task], swarm: AsyncSwarm, arm: ArmClient) -> None:
        """Raises `ConfigError` for an evaluator that cannot be loaded."""
        self._subject, self._held_out, self._swarm, self._arm = subject, held_out, swarm, arm
        self._judge = subject.load_judge()
        self._swapped: list[float] = []

    async def score(self, version: int, seed: int) -> HeldOutScore:
        """Has the arm's agent play the held-out tasks. The first `repeats` episodes of a task count.

        Raises `NotScorable`, and `ArmFailed` for an agent that does not call the model.
        """
        subject = self._subject
        ended = await self._arm.play(
            subject.as_deployed(self._held_out, self._arm.tasks), subject.repeats, version, seed
        )
        found: dict[tuple[str, str], list[str]] = {}
        async for episode in self._swarm.all_episodes(
            status="finished", mode="eval", sort="oldest", min_version=version, max_version=version
        ):
            found.setdefault((episode.task_set, episode.task_id), []).append(episode.episode_id)
        rewards, conversations = [], []
        for task in self._held_out:
            of_task = found.get((task.task_set, task.id), [])[: subject.repeats]
            if len(of_task) < subject.repeats:
                raise NotScorable(f"held-out task {task.id!r} was not played: {ended['reason'] or 'no episode ended'}")
            heard = [await self._conversation(episode) for episode in of_task]
            if not all(heard):
                raise ArmFailed(f"held-out task {task.id!r}: the agent made no call of the model")
            rewards.append([await self._judgement(task, messages) for messages in heard])
            conversations.append(heard[0])
        if any(isinstance(task.payload, dict) and {*subject.hidden} & {*task.payload} for task in self._held_out):
            await self._swap(conversations)
        return scoring(rewards, ended["plays"])

    async def _swap(self, conversations: list[list[Message]]) -> None:
        """Scores each conversation under the next held-out task. Only tasks with hidden answers can tell them apart."""
        self._swapped = []
        for task, messages in zip(self._held_out, conversations[1:] + conversations[:1], strict=True):
            with suppress(ConfigError):
                self._swapped.append(await self._judgement(task, messages))

    async def with_training(self, outcome: Outcome) -> Outcome:
        """The outcome with rewards by task, transcripts, and facts about the training episodes."""
        by_task: dict[str, tuple[float, float, int]] = {}
        newest: list[dict[str, Any]] = []
        tasks = {(task.task_set, task.id): task for task in self._arm.tasks}
        counted = 0
        async for episode in self._swarm.all_episodes(status="finished", mode="train"):
            assert episode.reward is not None, "a finished episode has a reward"
            reward, task = episode.reward, tasks.get((episode.task_set, episode.task_id))
            least, most, number = by_task.get(episode.task_id, (reward, reward, 0))
            by_task[episode.task_id] = min(least, reward), max(most, reward), number + 1
            if len(newest) < MAX_JUDGED and task and (messages := await self._conversation(episode.episode_id)):
                judged = None
                with suppress(ConfigError):  # a judge may need what training tasks lack
                    judged = await self._judgement(task, messages)
                shown = self._shown(task)
                newest.append({"task": shown, "messages": tuple(messages), "reward": reward, "judged": judged})
            if (counted := counted + 1) >= MAX_COUNTED:
                break
        paid = [(one["reward"], one["judged"]) for one in newest if one["judged"] is not None]
        facts = {"swapped": statistics.fmean(self._swapped)} if self._swapped else {}
        if paid:
            facts |= {
                "training_reward": statistics.fmean(reward for reward, _ in paid),
                "judged_reward": statistics.fmean(judged for _, judged in paid),
                "rejected": statistics.fmean(judged > reward for reward, judged in paid),
                "overpaid": statistics.fmean(reward > judged for reward, judged in paid),
            }
        return replace(outcome, facts={**outcome.facts, **facts}, transcripts=chosen(newest), by_task=by_task)

    async def _judgement(self, task: Task, messages: list[Message]) -> float:
        """Raises `ConfigError` for a judge that fails."""
        named = f"subject.evaluator = {self._subject.evaluator!r}"
        try:
            score = float(await asyncio.to_thread(self._judge, task, messages))
        except Exception as error:  # the boundary: the user's judge may raise anything
            text = f"{named} failed at task {task.id!r}: {one_line_at(error)}"
            raise ConfigError(f"{text}. The judge is fixed: correct it and start with another --out") from error
        if not math.isfinite(score):
            raise ConfigError(f"{named}: score = {score} of task {task.id!r}")
        return score

    async def _conversation(self, episode_id: str) -> list[Message]:
        return conversation(await self._swarm.episode_tree(episode_id))

    def _shown(self, task: Task) -> Any:
        """A training task's payload without hidden keys."""
        if not isinstance(task.payload, dict):
            return task.payload
        return {key: value for key, value in task.payload.items() if key not in self._subject.hidden}


def chosen(episodes: Sequence[Mapping[str, Any]]) -> tuple[Transcript, ...]:
    """The episodes with the highest, the median and the lowest reward; none twice."""
    ranked = sorted(episodes, key=lambda one: -one["reward"])
    places = {"best": ranked[:1], "median": ranked[len(ranked) // 2 :][:1] if len(ranked) > 2 else []}
    places["worst"] = ranked[1:][-1:]
    return tuple(Transcript(place, **one) for place, found in places.items() for one in found)  # type: ignore[arg-type]
