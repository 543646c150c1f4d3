"""Rewards: advantages from more facts than the rewards of one group.

| fact | recipes |
|---|---|
| metrics that agents send with the reward | `craft_gui`, `hc_grpo`; `gdpo`, one by one; `duration_aware`, a time |
| lengths of episodes | `alp`, by the pass rate of the group; `rlsp`, and a metric for exploration |
| other groups of the batch | `rapo` |
| earlier episodes of the task | `single_stream`, and `digirl_curriculum` in `imitation` |

`_E` are the episodes of a batch, `_R` roles, `_G` the members of a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from agentjet.recipes.baselines import Grpo, whitened
from agentjet.recipes.policy_gradient import (
    EPS,
    Comparison,
    FloatArray,
    PolicyGradient,
    compared_rewards,
    facts_of,
    lengths,
    penalised,
)
from agentjet.timeline.batch import Facts, TrainingBatch


def values_of(facts: Facts, metric: str) -> FloatArray:
    """Returns the values [E] of a metric; NaN for an episode that has none."""
    return facts.metrics.get(metric, np.full(len(facts.rewards), np.nan))


class Rapo(Grpo):
    """RAPO scaling: GRPO, scaled up by the share of groups that teach nothing.

        A_i = A_i(GRPO) x min(max_factor, groups / groups with different rewards)

    Source: arXiv 2509.24107 (Fathom-DeepResearch), read in notes. Confidence: inspired by; the cap is ours.
    Use: instead of `drop_zero_variance`, where sampling again is expensive.
    Cost: as GRPO.
    """

    name: str = "rapo"
    max_factor: float = Field(10.0, ge=1)
    """Largest factor."""

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        group_E, advantages_ER = facts_of(batch).groups, super().sequence_advantages(batch)
        groups = np.unique(group_E)
        good = sum(bool(advantages_ER[group_E == group].any()) for group in groups)
        return advantages_ER * min(self.max_factor, len(groups) / max(1, good))


class CraftGui(Grpo):
    """CRAFT-GUI reward mix: GRPO on a weighted mean of metrics: format, rules, and the judgement of a model.

        r_i = sum of weight x metric / sum of weights, over the metrics that the episode has

    Source: arXiv 2508.11360 (CRAFT-GUI), its abstract; the weights are ours. Confidence: inspired by.
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
        facts = facts_of(batch)
        sums_E, totals_E = np.zeros((2, len(facts.rewards)))
        for metric, weight in self.mix.items():
            values_E = values_of(facts, metric)
            sums_E += weight * np.nan_to_num(values_E)
            totals_E += weight * ~np.isnan(values_E)
        rewards_E = np.where(totals_E > 0, sums_E / np.where(totals_E > 0, totals_E, 1), facts.rewards)
        return super().sequence_advantages(replace(batch, facts=replace(facts, rewards=rewards_E)))


class Gdpo(Grpo):
    """GDPO: GRPO on each metric apart, whose advantages are added and whitened, so that none drowns the others.

        A_i = whiten(sum over metrics of weight x (m_i - mean(m)) / (std(m) + 1e-6)), see `reinforce_pp`

    Source: arXiv 2601.05242. Confidence: equal to verl 0.9.1 with `loss.dual_clip = 3`. An episode without a metric is
    not compared by it.
    Use: several goals of different scales, such as a right answer, its format and its length. Agents send them as
    metrics with the reward; `reward` is the reward itself.
    Cost: as GRPO.
    """

    name: str = "gdpo"
    mix: dict[str, Annotated[float, Field(gt=0)]] = Field({"reward": 1.0, "format": 1.0}, min_length=1)
    """Weight of the advantage of each metric. A given table replaces this one."""

    equal_rewards_teach: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = "compares metrics besides the reward"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = facts_of(batch)
        sums_ER, compared_ER = np.zeros(facts.spoke.shape), np.zeros(facts.spoke.shape, bool)
        for episodes, role, rewards_G in self.comparisons(facts):
            compared_ER[episodes, role] = True
            for metric, weight in self.mix.items():
                values_G = rewards_G if metric == "reward" else values_of(facts, metric)[episodes]
                has_G = ~np.isnan(values_G)
                if has_G.any():
                    sums_ER[episodes[has_G], role] += weight * self.group_advantages(values_G[has_G])
        return whitened(sums_ER, np.where(compared_ER, lengths(batch), 0.0))


class Alp(Grpo):
    """ALP, adaptive length penalty: GRPO with a cost of each token that grows with the pass rate of the group.

        r_i -= beta x tokens_i x max(p, 1 / G),  p = share of the group's episodes with reward >= pass_reward

    Source: arXiv 2506.05256, whose beta is 1e-7. Confidence: after its formula, as notes about it state it.
    Use: long reasoning. Easy tasks get shorter answers, and hard tasks keep theirs. Equal rewards are divided by the
    deviation of the penalties, so even a small `beta` shortens the answers of solved tasks.
    Cost: as GRPO.
    """

    name: str = "alp"
    beta: float = Field(1e-7, gt=0)
    """Cost of a token of an episode's answers, if all episodes of the group pass."""
    pass_reward: float = 0.5
    """Smallest reward of an episode that passed."""

    equal_rewards_teach: ClassVar[bool] = True

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        penalties_ER = self.beta * lengths(batch)
        for episodes, role, rewards_G in self.comparisons(facts_of(batch)):
            penalties_ER[episodes, role] *= max((rewards_G >= self.pass_reward).mean(), 1 / len(rewards_G))
        return super().sequence_advantages(penalised(batch, penalties_ER))


class Rlsp(Grpo):
    """RLSP: GRPO on the reward, a bonus for long thoughts, and a judge's grade of how the answer was searched.

        r_i = (1 - weight) (r_i - cost / tokens_i) + weight m_i,  m = `metric` of the episode, 0.5 without one

    Source: arXiv 2502.06773, Reinforcement Learning via Self-Play. Confidence: equal to
    github.com/GuanghaoYe/Emergence-of-Thinking at a36ba6c in the reward, without its penalty for a missing box; the
    advantage is GRPO's, where the source has PPO's, and all answers of the episode are the thought.
    Use: models that answer without thinking. The agent sends a judge's grade in [0, 1] as a metric with the reward.
    With `cost = 1000`, an answer of 500 tokens costs 2, and one of 2,000 tokens 0.5: lower it for short answers.
    Cost: as GRPO.
    """

    name: str = "rlsp"
    cost: float = Field(1000.0, ge=0)
    """Tokens whose number is a cost of 1: short answers cost more. 0: no bonus for long answers."""
    weight: float = Field(0.2, ge=0, le=1)
    """Weight of the metric in the reward."""
    metric: str = Field("exploration", min_length=1)
    """Metric that the agent sends with its reward."""

    equal_rewards_teach: ClassVar[bool] = True

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = facts_of(batch)
        grades_E = np.nan_to_num(values_of(facts, self.metric), nan=0.5)
        rewards_ER = compared_rewards(facts)
        searched_ER = rewards_ER - self.cost / np.maximum(1, lengths(batch))
        mixed_ER = (1 - self.weight) * searched_ER + self.weight * grades_E[:, None]
        return super().sequence_advantages(penalised(batch, rewards_ER - mixed_ER))


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
        facts = facts_of(batch)
        costs_E = np.zeros(len(facts.rewards))
        for metric, cost in self.costs.items():
            costs_E += cost * np.nan_to_num(values_of(facts, metric))
        costs_E = np.where(self.only_success & (facts.rewards <= 0), 0.0, np.minimum(costs_E, self.max_cost))
        return super().sequence_advantages(penalised(batch, costs_E[:, None]))


class DurationAware(Grpo):
    """Duration-aware GRPO: advantages times the time that the environment of the episode took.

        A_i = A_i(GRPO) x min(max_weight, max(1 / max_weight, d_i / mean(d)))

    Source: arXiv 2509.01684, read in notes about it. Confidence: inspired by; the cap is
    ours.
    Use: with `max_staleness` above 0, where slow actions are sampled less often than fast ones.
    Cost: as GRPO.
    """

    name: str = "duration_aware"
    metric: str = Field("env_seconds", min_length=1)
    """Metric that the agent sends with its reward: seconds in the environment, without waiting for tokens."""
    max_weight: float = Field(10.0, ge=1)
    """Bound of the weight; its inverse is the lower bound."""

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        advantages_ER = super().sequence_advantages(batch)
        seconds_E = values_of(facts_of(batch), self.metric)
        has_time_E = np.nan_to_num(seconds_E) > 0
        if not has_time_E.any():
            return advantages_ER
        weight_E = np.where(has_time_E, seconds_E / seconds_E[has_time_E].mean(), 1.0)
        return np.asarray(advantages_ER * np.clip(weight_E, 1 / self.max_weight, self.max_weight)[:, None])


class SingleStream(PolicyGradient):
    """Single stream: the reward minus the mean of the task's earlier episodes, normalised over the batch.

        B_i = r_i - v_i,  A_i = (B_i - mean(B)) / (std(B) + 1e-6)
        v_i = mean reward of the task's newest 32 episodes before the group; before the first group the batch's mean,
        and for a role with named rewards the batch's mean of these

    Source: arXiv 2509.13232, of which a moving mean replaces the value tracker. Confidence: inspired by.
    Use: one episode of each task at a time (`group_size = 1`), in several epochs over the tasks.
    Cost: as GRPO, and no group waits for its slowest episode.
    """

    name: str = "single_stream"

    smallest_group: ClassVar[int] = 1
    reads_task_means: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = "compares the reward with those of earlier episodes"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = facts_of(batch)
        surprises_ER = surprises(facts, self.comparisons(facts))
        found = surprises_ER[~np.isnan(surprises_ER)]
        if len(found) < 2 or np.ptp(found) == 0:
            return np.zeros_like(surprises_ER)
        advantages_ER: FloatArray = np.nan_to_num((surprises_ER - found.mean()) / (found.std(ddof=1) + EPS))
        return advantages_ER


def surprises(facts: Facts, comparisons: Iterable[Comparison]) -> FloatArray:
    """Returns r - v [E, R] of the episodes and roles that are compared; NaN for others.

    v is the mean of the task, which is of rewards of episodes. A named reward has the mean of the batch for its role.
    """
    means_E = np.full(len(facts.rewards), np.nan) if facts.task_means is None else facts.task_means
    values_E = np.where(np.isnan(means_E), facts.rewards.mean(), means_E)
    is_named_ER = ~np.isnan(facts.role_rewards)
    means_R = np.nan_to_num(facts.role_rewards).sum(0) / np.maximum(1, is_named_ER.sum(0))
    values_ER = np.where(is_named_ER, means_R, values_E[:, None])
    surprises_ER = np.full(facts.spoke.shape, np.nan)
    for episodes, role, rewards_G in comparisons:
        surprises_ER[episodes, role] = rewards_G - values_ER[episodes, role]
    return surprises_ER
