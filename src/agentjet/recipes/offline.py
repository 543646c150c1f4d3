"""Offline: losses on log-ratios instead of clipped ratios, for samples of any age, and preferences.

| the loss of a token, turn or sequence | recipes |
|---|---|
| cross-entropy, weighted by the exponential of the advantage | `awr` |
| the advantage, and a squared log-ratio | `dro` |
| the squared distance between log-ratio and advantage | `oapl`, of sequences; `direct_advantage`, of turns |
| the logistic loss of two sequences' log-ratios | `dpo` |
| the logistic function of one sequence's log-ratio | `kto`, of given answers |

The log-ratio is log(policy / sampling policy); in `direct_advantage`, `dpo` and `kto` it is that to the reference.
Letters of shapes: G members of a group, E episodes, R roles, S sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from agentjet.recipes.baselines import Grpo
from agentjet.recipes.losses import PolicyLoss, sequence_mean
from agentjet.recipes.policy_gradient import (
    Comparison,
    FloatArray,
    Outputs,
    OwnLoss,
    PolicyGradient,
    compared_rewards,
    facts_of,
)
from agentjet.recipes.recipe import Given, Need, Recipe
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, select

if TYPE_CHECKING:
    from torch import Tensor

ROLES = PolicyGradient(by_role=True)
"""Its comparisons: of each role, the members of a group that spoke, by their rewards."""


class AwrLoss(PolicyLoss):
    """Cross-entropy on the sampled tokens, weighted by the exponential of the advantage."""

    name: str = "awr"
    beta: float = Field(1.0, gt=0)
    """Temperature of the weights; smaller is closer to the best episodes only."""
    max_weight: float = Field(20.0, gt=0)
    """Largest weight."""

    reports: ClassVar[tuple[str, ...]] = ()

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        weight = (columns["advantage"] / self.beta).exp().clamp(max=self.max_weight)
        return -weight * logp, {}


class Awr(Grpo):
    """AWR: imitation of sampled episodes, weighted by the exponential of their advantage.

        L = -min(exp(A / beta), max_weight) log(policy), A as in GRPO

    Source: arXiv 1910.00177. Confidence: after its formula, with the group's mean as the value.
    Use: stale samples of any age: it needs no probability of the sampling policy.
    Cost: as GRPO; every token is computed.
    """

    name: str = "awr"
    loss: OwnLoss = AwrLoss()

    def comparisons(self, facts: Facts) -> Iterator[Comparison]:
        """Comparisons of two or more episodes. The advantage 0 of a single one would be a weight of 1."""
        return (found for found in super().comparisons(facts) if len(found.episodes) > 1)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without sequences that are not compared: their advantage 0 would be a weight of 1."""
        return self.compared_tokens(batch)


class DroLoss(PolicyLoss):
    """REINFORCE with a quadratic pull towards the policy that sampled."""

    name: str = "dro"
    beta: float = Field(0.05, ge=0)
    """Weight of the squared log-ratio."""

    reports: ClassVar[tuple[str, ...]] = ()

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        gap = logp - columns["logprob"]
        return -columns["advantage"] * logp + self.beta / 2 * gap**2, {}


class Dro(PolicyGradient):
    """DRO: the reward minus the group's mean, and a squared log-ratio instead of a clip.

        A_i = r_i - mean(r),  L = -A log(policy) + beta / 2 (log(policy) - log(sampling policy))^2

    Source: arXiv 2405.19107. Confidence: equal to verl 0.9.1, which has the loss per token, with the group's mean as
    the value.
    Use: stale samples, and many steps on one batch.
    Cost: as GRPO; every token is computed, also those without advantage.
    """

    name: str = "dro"
    loss: OwnLoss = DroLoss()


class OaplLoss(PolicyLoss):
    """The squared distance between a sequence's log-ratio and its advantage, as a share of each token."""

    name: str = "oapl"
    beta: float = Field(1e-3, gt=0)
    """Factor of the log-ratio: smaller moves the policy further from the sampling policy."""

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "sequence", "sequence_tokens")
    reports: ClassVar[tuple[str, ...]] = ()
    aggregation: ClassVar[str] = "sequence_sum"

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = columns["sequence_tokens"]
        gap = self.beta * tokens * sequence_mean(logp - columns["logprob"], columns) - columns["advantage"]
        return gap**2 / tokens, {}


class Oapl(PolicyGradient):
    """OAPL: regression of each sequence's log-ratio on the advantage of the best policy near the one that sampled.

        A_i = r_i - temperature log(mean of exp(r / temperature))
        L_i = (beta (log(policy) - log(sampling policy)) - A_i)^2, with the sums of the episode's tokens

    Source: arXiv 2602.19362; the loss of KARL, 2603.05218. Confidence: after its formula in NeMo-RL's description.
    Use: samples that are many versions old, large batches with several passes: no ratio, no clip. Groups with equal
    rewards pull towards the sampling policy.
    Cost: as GSPO; every token is computed.
    """

    name: str = "oapl"
    loss: OwnLoss = OaplLoss()
    temperature: float = Field(1.0, gt=0)
    """Softness of the best policy: large values compare with the mean of the rewards, small ones with the best."""

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        below_best_G = rewards_G - rewards_G.max()
        value = self.temperature * np.log(np.mean(np.exp(below_best_G / self.temperature)))
        return np.asarray(below_best_G - value)

    def loss_columns(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        sequence = batch.forest["sequence"]
        return {"sequence_tokens": np.bincount(sequence)[sequence].astype(np.float32)}

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without sequences that are not compared."""
        return self.compared_tokens(batch)


class DirectAdvantageLoss(PolicyLoss):
    """The squared distance between a turn's log-ratio and its advantage, as a share of each token."""

    name: str = "direct_advantage"
    beta: float = Field(0.1, gt=0)
    """Divisor of the advantage: smaller moves the policy further from the reference."""
    max_log_ratio: float = Field(10.0, gt=0)
    """Largest log-ratio of a turn, in both directions, to which the policy is moved."""

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "sequence", "turn_tokens")
    reports: ClassVar[tuple[str, ...]] = ()
    aggregation: ClassVar[str] = "sequence_sum"

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = columns["turn_tokens"]
        wanted = (columns["advantage"] / self.beta).clamp(-self.max_log_ratio, self.max_log_ratio)
        gap = tokens * sequence_mean(logp - columns["logprob"], columns) - wanted
        return gap**2 / (2 * tokens), {}


class DirectAdvantage(PolicyGradient):
    """Direct advantage: regression of each turn's log-ratio to the reference on the turn's advantage.

        L_k = (A_k / beta - log(policy / reference))^2 / 2, with the sum of the turn's tokens

    Source: arXiv 2412.18279, from general knowledge of it; `min_advantage` and the bound are ours. Confidence:
    inspired by.
    Use: turns with a known advantage: the agent finishes with `by_turn`, the change of the estimated probability of
    success by each turn, for instance from several completions of each state. Samples may be of any age. The metric
    `policy/mismatch_kl` compares with the reference.
    Cost: as GSPO, and one forward pass of the reference.
    """

    name: str = "direct_advantage"
    loss: OwnLoss = DirectAdvantageLoss()
    min_advantage: float = Field(0.05, ge=0)
    """Turns with a smaller advantage are left out. 0: none."""

    needs_call_rewards: ClassVar[bool] = True
    smallest_group: ClassVar[int] = 1
    compares_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"reference"}

    @model_validator(mode="after")
    def _loss_is_own(self) -> Self:
        if not isinstance(self.loss, DirectAdvantageLoss):
            raise ValueError(f"loss = {self.loss.name!r}: the recipe {self.name!r} is its loss; leave loss out")
        return self

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        return np.nan_to_num(facts_of(batch).call_rewards)[batch.forest["call"]].astype(np.float32)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        return np.asarray(np.abs(advantage) >= self.min_advantage)

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        """Each turn is a sequence, and the reference has the place of the sampling policy."""
        call = batch.forest["call"]
        tokens = np.bincount(call)[call] if len(call) else call
        forest = batch.forest.with_columns(sequence=call, logprob=outputs["reference"], turn_tokens=tokens)
        _, metrics = super().columns(batch, outputs)
        advantage = self.token_advantages(batch)
        return select(forest.with_columns(advantage=advantage), self._counting(batch, advantage)), metrics


class Preference(Recipe):
    """The base of losses of each sequence's log-ratio u, the sum over its tokens of log(policy / reference).

    `columns` computes the derivative of the loss by each u from the weights before the batch, so a batch is one step.
    """

    beta: float = Field(0.1, gt=0)
    """Strength of the reference. Large values keep the policy near it."""

    @model_validator(mode="after")
    def _one_step(self) -> Self:
        for key in ("epochs", "mini_batches"):
            if (value := getattr(self, key)) != 1:
                why = f"{self.name} does one optimiser step a batch, because a step changes every log-ratio"
                raise ValueError(f"{key} = {value}: {why}; set it to 1")
        return self

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"proximal", "reference"})

    @property
    def reads(self) -> tuple[str, ...]:
        return ("advantage",)

    def ratios(self, forest: Forest, outputs: Outputs) -> FloatArray:
        """Returns the log-ratio [S] of each sequence."""
        return np.asarray(
            np.bincount(forest["sequence"], outputs["proximal"].astype(np.float64) - outputs["reference"])
        )

    def pulled(self, forest: Forest, pull_S: FloatArray) -> Forest:
        """Returns the targets with a gradient. Their advantage is the derivative of the loss by u, negated."""
        pull = pull_S[forest["sequence"]]
        return select(forest.with_columns(advantage=pull), pull != 0)

    def weights(self, forest: Forest) -> NDArray[np.float32]:
        return np.ones(forest.num_targets, np.float32)

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -columns["advantage"] * logp, {}


class Dpo(Preference):
    """DPO: preferences between the episodes of a group, from their rewards, or between given answers.

        L = -log sigmoid(beta * (u_w - u_l)),  u = sum over the answers' tokens of log(policy / reference)

    It is the mean over pairs (w, l) of one group and role with r_w - r_l >= margin, or of best against worst.
    A pair needs a shared prefix: the same tokens before the first answer. The reference is version 0.

    Source: arXiv 2305.18290. Confidence: after its formula.
    Use: rewards that only rank, such as a judge's, and files of preferences: `agentjet sft FILE --recipe dpo`. One
    optimiser step a batch, because a step changes every margin.
    Cost: two more forward passes, of the present weights and of the reference; no backward for episodes without a pair.
    """

    name: str = "dpo"
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of a group: its best episode against its worst, or every two with the margin between their rewards."""
    margin: float = Field(0.0, ge=0)
    """Smallest difference between the rewards of a pair. Equal rewards are never a pair."""

    smallest_group: ClassVar[int] = 2
    takes_given: ClassVar[Given] = "compared"

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        """Adds the derivative of the loss by each token's log-probability, negated, as the advantage."""
        forest, facts = batch.forest, facts_of(batch)
        if not forest.num_targets:
            return forest, {}
        call, sequence = forest["call"], forest["sequence"]
        ratio_S = self.ratios(forest, outputs)
        start_S = forest.parent[forest.node[np.unique(sequence, return_index=True)[1]]]
        sequence_ER = np.full(facts.spoke.shape, -1)
        sequence_ER[facts.call_episode[call], facts.call_role[call]] = sequence
        pairs = [
            (sequence_ER[episodes[better], role], sequence_ER[episodes[worse], role])
            for episodes, role, rewards_G in ROLES.comparisons(facts)
            for better, worse in self.pairs_of(rewards_G)
        ]
        better_P, worse_P = np.array([one for one in pairs if start_S[one[0]] == start_S[one[1]]], int).reshape(-1, 2).T
        margin_P = self.beta * (ratio_S[better_P] - ratio_S[worse_P])
        pull_P = self.beta * np.exp(-np.logaddexp(0.0, margin_P)) / max(1, len(margin_P))
        pull_S = np.bincount(better_P, pull_P, len(ratio_S)) - np.bincount(worse_P, pull_P, len(ratio_S))
        metrics = {"dpo/pairs": float(len(margin_P)), "dpo/pairs_unshared": float(len(pairs) - len(margin_P))}
        if len(margin_P):
            loss, right = np.logaddexp(0.0, -margin_P), margin_P > 0
            metrics |= {"dpo/loss": float(loss.mean()), "dpo/accuracy": float(right.mean())}
            metrics["dpo/margin"] = float(margin_P.mean())
        return self.pulled(forest, np.asarray(pull_S)), metrics

    def pairs_of(self, rewards_G: FloatArray) -> Iterator[tuple[int, int]]:
        """Yields the pairs (better, worse) of members of a group."""
        best_worst = [(int(np.argmax(rewards_G)), int(np.argmin(rewards_G)))]
        for better, worse in best_worst if self.pairs == "best_worst" else permutations(range(len(rewards_G)), 2):
            if (gap := rewards_G[better] - rewards_G[worse]) > 0 and gap >= self.margin:
                yield better, worse


class Kto(Preference):
    """KTO: given answers that are good or bad, each by itself; no pairs.

        good: L = good_weight * (1 - sigmoid(beta * (u - z))),  bad: L = bad_weight * (1 - sigmoid(beta * (z - u)))
        z = max(0, mean of u over mismatched answers), without gradient

    It is the mean over the answers with a reward: good above 0. Answers without a reward are the mismatched ones, each
    to the prompt of another: they estimate the divergence from the reference, and are not learned.

    Source: arXiv 2402.01306, in the form of github.com/huggingface/trl at 000d5d8. Confidence: after its formula.
    Use: files of answers with a label each: `agentjet sft FILE --recipe kto`, which adds the mismatched answers. With
    unequal numbers of good and bad answers, weights that make their products with the numbers about equal.
    Cost: as DPO: two more forward passes; none backward for mismatched answers.
    """

    name: str = "kto"
    good_weight: float = Field(1.0, ge=0)
    """Weight of good answers, `desirable_weight` in TRL."""
    bad_weight: float = Field(1.0, ge=0)
    """Weight of bad answers, `undesirable_weight` in TRL."""

    only_given: ClassVar[bool] = True
    takes_given: ClassVar[Given] = "scored"

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        """Adds the derivative of the loss by each token's log-probability, negated, as the advantage."""
        forest, facts = batch.forest, facts_of(batch)
        if not forest.num_targets:
            return forest, {}
        call = forest["call"][np.unique(forest["sequence"], return_index=True)[1]]
        reward_S = compared_rewards(facts)[facts.call_episode[call], facts.call_role[call]]
        ratio_S, is_scored_S, is_good_S = self.ratios(forest, outputs), ~np.isnan(reward_S), reward_S > 0
        mismatched = ratio_S[~is_scored_S]
        kl = max(0.0, float(mismatched.mean())) if len(mismatched) else 0.0
        margin_S = self.beta * np.where(is_good_S, ratio_S - kl, kl - ratio_S)
        right_S, wrong_S = np.exp(-np.logaddexp(0.0, -margin_S)), np.exp(-np.logaddexp(0.0, margin_S))
        weight_S = np.where(is_good_S, self.good_weight, self.bad_weight) * is_scored_S / max(1, is_scored_S.sum())
        pull_S = self.beta * weight_S * np.where(is_good_S, 1.0, -1.0) * right_S * wrong_S
        metrics = {"kto/kl": kl, "kto/answers": float(is_scored_S.sum())}
        if is_scored_S.any():
            metrics |= {"kto/loss": float((weight_S * wrong_S).sum())}
            metrics |= {"kto/accuracy": float((margin_S > 0)[is_scored_S].mean())}
        good, bad = (self.beta * ratio_S[is_scored_S & of] for of in (is_good_S, ~is_good_S))
        if len(good) and len(bad):
            metrics["kto/margin"] = float(good.mean() - bad.mean())
        return self.pulled(forest, pull_S), metrics
