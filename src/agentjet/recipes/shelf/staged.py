"""Task sets in stages."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, model_validator

from agentjet.errors import InvalidRequest
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.section import Int64


class Staged(Grpo):
    """Task sets in stages: GRPO on easy tasks first, then on harder ones, with a share of the earlier ones.

        stage = number of `ends` below the step, for the steps 1, 2, ...
        begin tasks of stages[stage]; of earlier sets, begin the part `replay` of the tasks, others at each version

    Source: CRAFT-GUI's curriculum, from its abstract. Confidence: inspired by; all numbers are ours.
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
