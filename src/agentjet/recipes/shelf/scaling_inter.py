"""ScalingInter-RL."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.section import Int64


class ScalingInter(Grpo):
    """ScalingInter-RL: GRPO with a turn limit that grows in stages.

        max_turns = turns[min((step - 1) // every, stages - 1)], for the steps 1, 2, ...

    Source: github.com/WooooDyy/AgentGym-RL at 82402a9. Confidence: reproduced, with one formula also after a restart.
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
