"""CRAFT-GUI's mixed reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import Facts, TrainingBatch


class CraftGui(Grpo):
    """CRAFT-GUI reward mix: GRPO on a weighted mean of metrics: format, rules, and the judgement of a model.

        r_i = sum of weight x metric / sum of weights, over the metrics that the episode has

    Source: the abstract of CRAFT-GUI; the weights are ours. Confidence: inspired by.
    Use: several graders, of which some give no answer. Agents send their values as metrics with the reward. An episode
    without any of them keeps its reward, and a role for which the episode names a reward keeps that one.
    Cost: as GRPO.
    """

    name: str = "craft_gui"
    mix: dict[str, Annotated[float, Field(gt=0)]] = Field({"format": 0.2, "action": 0.5, "judge": 0.3})
    """Weight of each metric in the reward. A given table replaces this one."""

    equal_rewards_teach: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = "learns from metrics instead of the reward"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = batch.facts
        assert facts is not None
        mixed = replace(facts, rewards=mixed_rewards(facts, self.mix))
        return super().sequence_advantages(replace(batch, facts=mixed))


def mixed_rewards(facts: Facts, weights: Mapping[str, float]) -> FloatArray:
    """Returns the weighted mean [E] of the metrics that each episode has, or its reward."""
    sums_E, totals_E = np.zeros((2, len(facts.rewards)))
    for metric, weight in weights.items():
        if metric in facts.metrics:
            values_E = facts.metrics[metric]
            sums_E += weight * np.nan_to_num(values_E)
            totals_E += weight * ~np.isnan(values_E)
    return np.where(totals_E > 0, sums_E / np.where(totals_E > 0, totals_E, 1), facts.rewards)
