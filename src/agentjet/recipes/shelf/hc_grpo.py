"""HC-GRPO: costs of actions in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray, penalised
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import Facts, TrainingBatch


class HcGrpo(Grpo):
    """HC-GRPO: GRPO on the reward minus the costs of what the agent did.

        r_i -= min(max_cost, sum over metrics of cost x number),  then GRPO

    Source: arXiv 2512.18571 (ESearch-R1). The costs have its order: navigation, then questions, then memory, which is
    far cheaper. Their numbers and the formula are ours. Confidence: inspired by.
    Use: agents that may ask people, search or move. Agents send the numbers as metrics with the reward; a missing one
    is 0. With costs below 1, every success is better than every failure.
    Cost: as GRPO.
    """

    name: str = "hc_grpo"
    costs: dict[str, Annotated[float, Field(gt=0)]] = Field({"navigate": 0.1, "ask": 0.05, "get_memory": 0.002})
    """Cost of one action, by the metric that counts the actions. A given table replaces this one."""
    max_cost: float = Field(0.99, ge=0)
    """Largest cost of an episode."""
    only_success: bool = False
    """Subtract costs from positive rewards only."""

    equal_rewards_teach: ClassVar[bool] = True

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = batch.facts
        assert facts is not None
        costs_ER = np.repeat(episode_costs(facts, self.costs, self.max_cost)[:, None], len(facts.roles), axis=1)
        if self.only_success:
            costs_ER[facts.rewards <= 0] = 0
        return super().sequence_advantages(replace(batch, facts=penalised(facts, costs_ER)))


def episode_costs(facts: Facts, costs: Mapping[str, float], max_cost: float) -> FloatArray:
    """Returns the cost [E] of each episode."""
    costs_E = np.zeros(len(facts.rewards))
    for metric, cost in costs.items():
        if metric in facts.metrics:
            costs_E += cost * np.nan_to_num(facts.metrics[metric])
    return np.minimum(costs_E, max_cost)
