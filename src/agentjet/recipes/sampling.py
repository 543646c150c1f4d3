"""Sampling: how the next group of a task is sampled. The hook `rollout` reads the statistics of the task.

| choice | recipes |
|---|---|
| skip the task | `pass_rate`, too easy or too hard; `rapo_pruning`, if it is solved; `staged`, by its task set |
| number of episodes, maximum of turns | `dart`, by its successes; `scaling_inter`, by the step |
| temperature | `task_temperature` |

p is the share of a task's recent episodes that passed. Advantages and losses are those of the base classes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from agentjet.errors import InvalidRequest
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.rewards import Rapo
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.recipes.turns import StepwiseGrpo
from agentjet.section import Int64
from agentjet.types import MAX_TEMPERATURE


class Dart(StepwiseGrpo):
    """DART: step-wise GRPO, fewer episodes of easy tasks, and a turn limit from a task's own successes.

        episodes = N if p <= easy_rate, else max(min_episodes, round(N (1 - p) / (1 - easy_rate)))
        turns    = min(max_turns, ceil(slack x most calls of a recent success)); max_turns before the first success
        N = job.group_size, p = share of the task's recent episodes with reward >= pass_reward
        advantages as in `stepwise_grpo`

    Source: github.com/Computer-use-agents/dart-gui at e0e606d, and notes about it. Confidence: inspired by; both rules
    are ours. `keep = 0.8`, `correction = "tis"` and `correction_high = 1` add its other two parts.
    Use: tasks of very different difficulty and length, such as computer use. Agents end at `episode.max_turns`.
    Cost: less than GRPO: fewer and shorter episodes.
    """

    name: str = "dart"
    keep: float = Field(1.0, gt=0, le=1)
    """Share of the batch's turns that is trained, the most uncertain ones. 1: all, without entropies."""
    pass_reward: float = 0.5
    """Smallest reward of an episode that succeeded."""
    easy_rate: float = Field(0.6, ge=0, lt=1)
    """Success rate above which a task gets fewer episodes."""
    min_episodes: Int64 = Field(2, ge=2)
    """Fewest episodes of a group."""
    max_turns: Int64 = Field(30, ge=1)
    """Turn limit of tasks without a success, and of all tasks."""
    slack: float = Field(1.2, ge=1)
    """Turn limit as a multiple of the longest recent success."""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        num, rate = default.episodes, task.pass_rate(self.pass_reward) or 0.0
        if rate > self.easy_rate:
            fewer = round(num * (1 - rate) / (1 - self.easy_rate))
            num = max(min(self.min_episodes, num), min(num, fewer))
        return replace(default, episodes=num, max_turns=self.turn_limit(task))

    def turn_limit(self, task: TaskStats) -> int:
        """Returns the turn limit of the task. Calls of all roles count as the length, so it is never too short."""
        recent = zip(task.recent_rewards, task.recent_turns, strict=True)
        longest = max((turns for reward, turns in recent if reward >= self.pass_reward), default=0)
        return min(self.max_turns, max(longest, math.ceil(self.slack * longest))) if longest else self.max_turns


class PassRate(Grpo):
    """Pass-rate filter: GRPO without tasks that were always or never solved lately.

        skip the task if p <= low or p >= high, until `retest` versions after its last group
        p = share of the task's recent episodes with reward >= pass_reward

    Source: KARL, arXiv 2603.05218, keeps prompts with an intermediate pass rate; read in notes. Confidence:
    inspired by; the test after a while is ours.
    Use: large task sets with many tasks that are too easy or too hard. It saves their episodes, while dynamic sampling
    (`drop_zero_variance`) drops them afterwards.
    Cost: as GRPO.
    """

    name: str = "pass_rate"
    pass_reward: float = 0.5
    """Smallest reward of an episode that passed."""
    low: float = Field(0.0, ge=-1, le=1)
    """Pass rate up to which a task is skipped. -1: hard tasks are not skipped."""
    high: float = Field(1.0, ge=0, le=2)
    """Pass rate from which a task is skipped. 2: easy tasks are not skipped."""
    min_episodes: Int64 = Field(8, ge=1)
    """A task with fewer episodes so far is not skipped."""
    retest: Int64 = Field(20, ge=1)
    """Policy versions after which a skipped task is sampled again."""

    @model_validator(mode="after")
    def _some_rate_is_kept(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} is not below high = {self.high}: every task would be skipped")
        return self

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        rate = task.pass_rate(self.pass_reward)
        if rate is None or task.num_episodes < self.min_episodes or version - task.last_version >= self.retest:
            return default
        if self.low < rate < self.high:
            return default
        return replace(default, skip=f"{rate:.0%} of its recent episodes passed")


class RapoPruning(Rapo):
    """RAPO with pruning: `rapo` that no longer samples solved tasks.

        skip the task if p >= solved_rate, p = share of its recent episodes with reward > 0.5

    Source: arXiv 2509.24107 (Fathom-DeepResearch), read in notes. Confidence: inspired by; `solved_rate` and
    `retest` are ours, and tasks are pruned after each group instead of each epoch. Without RAPO's replay of an
    earlier success.
    Use: several epochs over one task set.
    Cost: less than GRPO: solved tasks are not sampled.
    """

    name: str = "rapo_pruning"
    solved_rate: float = Field(0.9, gt=0, le=1)
    """Pass rate from which a task is solved."""
    min_episodes: Int64 = Field(8, ge=1)
    """A task with fewer episodes so far is not pruned."""
    retest: Int64 = Field(0, ge=0)
    """Policy versions after which a solved task is sampled again. 0: never."""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        passed = [reward > 0.5 for reward in task.recent_rewards]
        if task.num_episodes < self.min_episodes or sum(passed) < self.solved_rate * len(passed):
            return default
        if self.retest and version - task.last_version >= self.retest:
            return default
        return replace(default, skip="it is solved")


class ScalingInter(Grpo):
    """ScalingInter-RL: GRPO with a turn limit that grows in stages.

        max_turns = turns[min((step - 1) // every, stages - 1)], for the steps 1, 2, ...

    Source: AgentGym-RL. Confidence: equal to github.com/WooooDyy/AgentGym-RL at 82402a9 in the limit, with one formula
    also after a restart.
    Use: long multi-turn tasks, in which early policies waste turns. Agents end at `episode.max_turns`; an episode that
    was cut has the reward that its agent gives it.
    Cost: twice GRPO's (two epochs), and the reference.
    """

    name: str = "scaling_inter"
    epochs: Int64 = Field(2, ge=1)
    """Passes over each batch."""
    kl_coef: float = Field(0.001, ge=0)
    """Weight of the KL penalty (k3 estimator) against the reference, the weights of version 0. 0: no penalty."""
    turns: tuple[Annotated[int, Field(ge=1)], ...] = Field((10, 20, 30), min_length=1)
    """Maximum number of turns in each stage."""
    every: Int64 = Field(100, ge=1)
    """Steps of a stage."""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        return replace(default, max_turns=self.turns[min(version // self.every, len(self.turns) - 1)])


class Staged(Grpo):
    """Task sets in stages: GRPO on easy tasks first, then on harder ones, with a share of the earlier ones.

        stage = number of `ends` below the step, for the steps 1, 2, ...
        begin tasks of stages[stage]; of earlier sets, begin the part `replay` of the tasks, others at each version

    Source: arXiv 2508.11360 (CRAFT-GUI), its abstract. Confidence: inspired by; all numbers are ours.
    Use: tasks whose difficulty is known. Give every task a task set, and name the sets in `stages`.
    Cost: as GRPO.
    """

    name: str = "staged"
    stages: tuple[str, ...] = Field(("easy", "medium", "hard"), min_length=2)
    """Task sets, the easiest first."""
    ends: tuple[Int64, ...] = (100, 250)
    """Last step of each stage except the last one."""
    replay: float = Field(0.2, ge=0, le=1)
    """Part of the tasks of earlier stages that are begun."""

    chooses_task_sets: ClassVar[bool] = True

    @model_validator(mode="after")
    def _stages_end(self) -> Self:
        if len(self.ends) != len(self.stages) - 1 or list(self.ends) != sorted({*self.ends}) or self.ends[0] < 1:
            raise ValueError(
                f"ends = {list(self.ends)}: give rising steps from 1, one for each of the {len(self.stages)} stages "
                "except the last one"
            )
        return self

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        if task.task_set not in self.stages:
            raise InvalidRequest(
                f"task_set = {task.task_set!r} is not one of the stages {', '.join(self.stages)} of the recipe "
                f"{self.name!r}: begin task {task.task_id!r} in one of them, or name the set in job.recipe.stages",
                param="task_set",
            )
        stage, own = sum(version >= end for end in self.ends), self.stages.index(task.task_set)
        if own == stage or (own < stage and _share(task, version) < self.replay):
            return default
        return replace(default, skip=f"stage {self.stages[stage]!r}")


def _share(task: TaskStats, version: int) -> float:
    """Returns a number in [0, 1) that depends on the task and on the version only."""
    digest = hashlib.blake2b(f"{version}/{task.task_set}/{task.task_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class TaskTemperature(Grpo):
    """Temperature by task: GRPO that samples a task hotter, the more its episodes agree.

        T = job.temperature x (1 + spread |2p - 1|), p = share of the task's recent episodes with reward >= pass_reward

    Source: HAPO's adaptive temperature (github.com/starriver030515/HAPO at 7671dde) acts on each token, and this
    recipe on each group. Confidence: inspired by; the rule is ours.
    Use: rewards of 0 and 1, if many groups have equal rewards (metric `groups/zero_variance`).
    Cost: as GRPO.
    """

    name: str = "task_temperature"
    pass_reward: float = 0.5
    """Smallest reward of an episode that passed."""
    spread: float = Field(0.3, gt=0)
    """Largest increase of the temperature, as a part of it."""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        rate = task.pass_rate(self.pass_reward)
        if rate is None:
            return default
        temperature = default.temperature * (1 + self.spread * abs(2 * rate - 1))
        return replace(default, temperature=min(MAX_TEMPERATURE, temperature))
