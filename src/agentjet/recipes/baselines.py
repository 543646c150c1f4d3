"""Baselines: the advantage of an episode from the rewards of its group.

| subtracted from the reward | recipes |
|---|---|
| nothing | `reinforce`; `reinforce_pp`, whitened over the batch |
| the mean of the group | `grpo`, divided by the deviation; `dr_grpo`; `reinforce_pp_baseline`, whitened |
| the mean of the others | `rloo` |
| a mean in which longer episodes count more | `opo`; `hapo_tlga`, divided by the deviation |
| the second best reward, for the best episode only | `grpo_passk` |
| as in `grpo`, for each role apart | `dr_mas` |
| the mean of the group, divided by it | `max_rl` |
| the best of k - 1 others, averaged over subsets | `pkpo` |
| the mean of earlier episodes of the task set and role | `rae` |

A new one overrides `group_advantages`, or `sequence_advantages` if it reads more than the rewards. `_G` are the members
of a group, `_ER` episodes and roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import comb
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentjet.recipes.losses import CrossEntropy
from agentjet.recipes.policy_gradient import (
    EPS,
    Comparison,
    FloatArray,
    Outputs,
    OwnLoss,
    PolicyGradient,
    centred,
    facts_of,
    lengths,
)
from agentjet.section import Int64
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest

LARGEST = 5.0
"""A group with a token-level advantage of this size gets the advantages of GRPO."""
BASELINE = "policy/baseline"
"""Beginning of the metrics with the baselines of `rae`, which are its state, too."""


class Grpo(PolicyGradient):
    """GRPO: the reward minus the group's mean, divided by the group's standard deviation, with PPO's clipped loss.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the sample standard deviation

    Source: arXiv 2402.03300. Confidence: equal to verl 0.9.1 with `loss.dual_clip = 3`, which is verl's default and not
    this recipe's.
    Use: the default. Rewards of any scale; groups of two or more.
    Cost: one forward and one backward pass.
    """

    name: str = "grpo"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        centred_G = centred(rewards_G)
        if len(rewards_G) < 2:  # One reward has no sample deviation.
            return centred_G
        return np.asarray(centred_G / (np.std(rewards_G, ddof=1) + EPS))


class DrGrpo(PolicyGradient):
    """Dr. GRPO: GRPO without the division by the deviation, and with a constant divisor instead of lengths.

        A_i = r_i - mean(r),  loss = sum of token losses / (constant x sequences)

    Source: arXiv 2503.20783. Confidence: equal to verl 0.9.1 with `loss.dual_clip = 3`.
    Use: where GRPO favours very easy and very hard tasks, or long wrong answers. Set `constant` to `job.max_tokens`.
    Cost: as GRPO.
    """

    name: str = "dr_grpo"
    aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = "constant"
    """Reduction of the token losses; see `grpo`."""
    constant: float = Field(256.0, ge=0)
    """Divisor of the summed loss, besides the number of sequences: usually the maximum completion length."""


class Rloo(PolicyGradient):
    """RLOO: the reward minus the mean of the other episodes of the group.

        A_i = r_i - mean of r_j with j != i = n / (n - 1) (r_i - mean(r))

    Source: arXiv 2402.14740. Confidence: equal to verl 0.9.1 with `loss.dual_clip = 3`.
    Use: an unbiased baseline that keeps the scale of the rewards.
    Cost: as GRPO.
    """

    name: str = "rloo"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        size = len(rewards_G)
        return centred(rewards_G) * (size / (size - 1) if size > 1 else 0.0)


class Opo(PolicyGradient):
    """OPO: the reward minus a mean of the group in which longer episodes count more.

        A_i = r_i - sum(len_j r_j) / sum(len_j)

    Source: arXiv 2505.23585. Confidence: equal to verl 0.9.1 with `loss.dual_clip = 3`.
    Use: on-policy training with answers of very different lengths.
    Cost: as GRPO.
    """

    name: str = "opo"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        return by_length(self, batch, lambda rewards_G, lengths_G: rewards_G - np.average(rewards_G, weights=lengths_G))


def by_length(
    recipe: PolicyGradient, batch: TrainingBatch, advantages: Callable[[FloatArray, FloatArray], FloatArray]
) -> FloatArray:
    """Returns advantages [E, R] from rewards and numbers of tokens [G]: 0 where rewards are equal or tokens missing."""
    lengths_ER = lengths(batch)
    advantages_ER = np.zeros_like(lengths_ER)
    for episodes, role, rewards_G in recipe.comparisons(facts_of(batch)):
        lengths_G = lengths_ER[episodes, role]
        if centred(rewards_G).any() and lengths_G.any():
            advantages_ER[episodes, role] = advantages(rewards_G, lengths_G)
    return advantages_ER


class GrpoPassk(Grpo):
    """GRPO for pass@k: only the best episode of a group is trained, by its lead over the second best.

        A_best = (r_best - r_second) / (std(r) + 1e-6), all others 0

    Source: arXiv 2503.19595. Confidence: equal to verl 0.9.1 with `loss.dual_clip = 3`.
    Use: to widen the set of tasks that one of k attempts solves. With rewards of 0 and 1 it trains groups with exactly
    one success.
    Cost: less than GRPO: one episode of a group is computed.
    """

    name: str = "grpo_passk"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        advantages_G = np.zeros(len(rewards_G))
        if len(rewards_G) > 1:
            best = int(np.argmax(rewards_G))
            lead = rewards_G[best] - np.delete(rewards_G, best).max()
            advantages_G[best] = lead / (np.std(rewards_G, ddof=1) + EPS)
        return advantages_G


class MaxRl(PolicyGradient):
    """MaxRL: the reward minus the group's mean, divided by the mean: maximum likelihood of a success.

        A_i = (r_i - mean(r)) / mean(r), 0 if the mean is not positive

    Source: arXiv 2602.02710. Confidence: equal to github.com/PrimeIntellect-ai/prime-rl at 0d6738f in the advantage.
    Use: rewards of 0 and 1 and large groups. A task with pass rate p weighs about 1 / p more than in `dr_grpo`.
    Cost: as GRPO.
    """

    name: str = "max_rl"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        mean = np.mean(rewards_G)
        return centred(rewards_G) / mean if mean > 0 else np.zeros(len(rewards_G))


class Pkpo(PolicyGradient):
    """PKPO: the gradient of the expected best reward of k episodes, without bias.

        A_i = G / C(G, k) x sum over the subsets I of k members with i of (best of I - best of I without i)
            = G / C(G, k) x sum over members j with a lower rank than i of C(rank_j, k - 2) (r_i - r_j)

    Source: arXiv 2505.15201, its estimator s^(loo-1) for rewards of any scale, times G, because losses are means.
    Confidence: equal to github.com/kpahwa16/pass-k-policy-optimization at 1b0928e in the advantage.
    Use: to widen the set of tasks that one of k attempts solves. Groups larger than k have less variance.
    Cost: less than GRPO: the lower episodes of a group are not computed.
    """

    name: str = "pkpo"
    k: Int64 = Field(4, ge=2)
    """Number of attempts whose best reward counts. Groups below it are taken as k."""

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        size = len(rewards_G)
        k = min(self.k, size)
        advantages_G, order = np.zeros(size), np.argsort(rewards_G, kind="stable")
        if k < 2:
            return advantages_G
        ranked_G = np.asarray(rewards_G, np.float64)[order]
        weights_G = np.array([size * comb(rank, k - 2) / comb(size, k) for rank in range(size)])
        leads_GG = np.maximum(ranked_G[:, None] - ranked_G, 0)
        advantages_G[order] = leads_GG @ weights_G
        return advantages_G


class DrMas(Grpo):
    """Dr. MAS: GRPO for each role of a team apart, over the episodes in which the role has calls.

        A_i,role = (r_i,role - mean) / (std + 1e-6), over the group's episodes in which the role has calls

    Source: Dr. MAS. Confidence: equal to github.com/langfengQ/DrMAS at 19c632b in the advantage, if a role has one call
    in an episode. Here each episode counts once, and there each call.
    Use: teams whose roles differ in difficulty, or in how often they have calls.
    Cost: as GRPO.
    """

    name: str = "dr_mas"
    by_role: bool = True
    """Compute the advantages of each role only over the episodes in which the role has calls."""


class HapoTlga(Grpo):
    """HAPO's token-level group average: GRPO in which every token of the group counts the same.

        A_i = (r_i - mu) / (std + 1e-6), mu and population std over the tokens of the group
        A group with |A| >= 5 gets the advantages of GRPO.

    Source: HAPO. Confidence: equal to github.com/starriver030515/HAPO at 7671dde in the advantage, which sees padding
    in its test of the bound.
    Use: with the aggregation over tokens, so that the sum of advantages over tokens is 0.
    Cost: as GRPO.
    """

    name: str = "hapo_tlga"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        return by_length(self, batch, self._of_tokens)

    def _of_tokens(self, rewards_G: FloatArray, lengths_G: FloatArray) -> FloatArray:
        centred_G = rewards_G - np.average(rewards_G, weights=lengths_G)
        advantages_G = centred_G / (np.sqrt(np.average(centred_G**2, weights=lengths_G)) + EPS)
        is_far = np.abs(advantages_G[lengths_G > 0]).max() >= LARGEST
        return self.group_advantages(rewards_G) if is_far else np.asarray(advantages_G)


class Reinforce(PolicyGradient):
    """REINFORCE: the reward, without a baseline, times the log-probability.

        A_i = r_i,  L = -A log(policy)

    Source: Williams 1992, doi 10.1007/BF00992696. Confidence: after its formula.
    Use: to compare with, and for rewards of both signs; a group may have one episode. Other recipes have less variance.
    Cost: as GRPO; episodes with reward 0 are not computed.
    """

    name: str = "reinforce"
    loss: OwnLoss = CrossEntropy(name="reinforce")

    smallest_group: ClassVar[int] = 1

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        return rewards_G


class ReinforcePp(PolicyGradient):
    """REINFORCE++: the reward, whitened over all tokens of the batch.

        A_t = (R - mean) / sqrt(var + 1e-8), with mean and unbiased variance over the batch's tokens

    Source: arXiv 2501.03262. Confidence: equal to verl 0.9.1 with gamma 1, a reward at the end and `loss.dual_clip =
    3`.
    Use: many tasks with few repeats each; a group may have one episode.
    Cost: as GRPO.
    """

    name: str = "reinforce_pp"

    smallest_group: ClassVar[int] = 1

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        return rewards_G

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        compared_ER = self.compared(facts_of(batch))
        return whitened(super().sequence_advantages(batch), np.where(compared_ER, lengths(batch), 0.0))


def whitened(values_ER: FloatArray, lengths_ER: FloatArray) -> FloatArray:
    """Returns the values with mean 0 and variance 1 over tokens. Fewer than two tokens, or equal values, give 0."""
    total = lengths_ER.sum()
    spoke = lengths_ER > 0
    if total < 2 or np.ptp(values_ER[spoke]) == 0:
        return np.zeros_like(values_ER)
    mean = (values_ER * lengths_ER).sum() / total
    variance = ((values_ER - mean) ** 2 * lengths_ER).sum() / (total - 1)
    return np.where(spoke, (values_ER - mean) / np.sqrt(variance + 1e-8), 0.0)


class ReinforcePpBaseline(ReinforcePp):
    """REINFORCE++ baseline: the reward minus the group's mean, whitened over all tokens of the batch.

        A_t = whiten(R - mean of the group), see `reinforce_pp`

    Source: arXiv 2501.03262. Confidence: equal to verl 0.9.1 with `loss.dual_clip = 3`.
    Use: groups whose deviations differ by chance, because one deviation serves the whole batch.
    Cost: as GRPO.
    """

    name: str = "reinforce_pp_baseline"

    smallest_group: ClassVar[int] = 2

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        return centred(rewards_G)


class Rae(PolicyGradient):
    """RAE: the reward minus a moving mean of the role's earlier rewards in the task set.

        A_i = r_i - b,  b <- decay^n b + (1 - decay^n) mean(r) after a batch with n episodes of the task set and role
        In the first batch of a task set and role, b is the mean of the batch.

    Source: arXiv 2506.24119 (SPIRAL), whose b moves after each episode; prime-rl centres a first group in this way.
    Confidence: inspired by: one b serves a whole batch. With equal rewards in a batch, the next b is the same.
    Use: self-play of games in which the rewards of the roles add up to 0; a group may have one episode. Give rewards
    `by_role`. Baselines are state, and metrics `policy/baseline/...` show them.
    Cost: as GRPO.
    """

    name: str = "rae"
    decay: float = Field(0.95, ge=0, lt=1)
    """Weight of the baseline after one further episode."""

    by_role: bool = True
    """Compute the advantages of each role only over the episodes in which the role has calls."""

    smallest_group: ClassVar[int] = 1
    no_kl_in_reward: ClassVar[str] = "compares the reward with those of earlier episodes"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        advantages_ER = np.zeros(facts_of(batch).spoke.shape)
        for name, (episodes, role, rewards) in self._rewards(batch).items():
            advantages_ER[episodes, role] = rewards - batch.state[name] if name in batch.state else centred(rewards)
        return advantages_ER

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        forest, metrics = super().columns(batch, outputs)
        for name, (_, _, rewards) in self._rewards(batch).items() if batch.facts is not None else ():
            mean, left = float(rewards.mean()), self.decay ** len(rewards)
            metrics[name] = left * batch.state.get(name, mean) + (1 - left) * mean
        return forest, metrics

    def next_state(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {**state, **{name: value for name, value in metrics.items() if name.startswith(BASELINE)}}

    def _rewards(self, batch: TrainingBatch) -> dict[str, Comparison]:
        """Returns the episodes of each task set and role, by the name of their baseline."""
        facts, found = facts_of(batch), dict[str, Comparison]()
        for episodes, role, rewards_G in self.comparisons(facts):
            name = "/".join(filter(None, (BASELINE, facts.tasks[episodes[0]][0], facts.roles[role])))
            before = found.get(name, Comparison(episodes[:0], role, rewards_G[:0]))
            joined = np.append(before.episodes, episodes), role, np.append(before.rewards, rewards_G)
            found[name] = Comparison(*joined)
        return found
