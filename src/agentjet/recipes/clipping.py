"""Clipping: bounds on how far an update moves the policy from the one that sampled.

| bound | recipes |
|---|---|
| of the ratio of a token | `dapo`, wider above; `loop`, equal for r and 1 / r; `cispo`, as a weight; `sapo`, smooth |
| of the ratio of a sequence | `gspo`; `gspo_token`, with advantages of tokens |
| of the ratios in the mean of a sequence | `gmpo` |
| of the change of a token's probability | `dppo` |
| by the covariance of log-probability and advantage | `clip_cov`; `kl_cov`, a penalty |
| no gradient of certain tokens | `top_entropy` |
| by the advantage of the token and the variance of the group | `etr` |
| by the entropy of the token | `hapo`; `aepo` keeps the gradient above the upper bound |
| a penalty that follows a target | `adaptive_kl` |
| a bonus for entropy | `entropy_bonus`; `adaptive_entropy`, below a target |

A loss is a subclass of `PolicyLoss`, and its recipe has it as the default of `loss`. r is policy / sampling policy, A
the advantage, H the entropy. Shapes: M targets; `_ER` are episodes and roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from agentjet.recipes.baselines import Grpo, HapoTlga, Rloo
from agentjet.recipes.losses import CLIP_FRACTION, Clip, PolicyLoss, log_ratio, ratio_of, sequence_mean, surrogate
from agentjet.recipes.policy_gradient import FloatArray, Outputs, OwnLoss, lengths, penalised
from agentjet.recipes.recipe import Need
from agentjet.section import Int64
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest

if TYPE_CHECKING:
    from torch import Tensor

LOWEST_ENTROPY = -5.0
"""Bound of standardised entropies, so that no advantage changes its sign."""
FLOOR = 1e-6
"""Smallest entropy whose logarithm is taken."""
COEFFICIENT, SEQUENCES = "policy/kl_coef", "policy/kl_sequences"
ENTROPY_COEFFICIENT, ACTS = "policy/entropy_coef", "policy/entropy_bonus_acts"


class Dapo(Grpo):
    """DAPO: GRPO with a higher upper clip, dynamic sampling, a mean over tokens, and a penalty for overlong episodes.

        r_i += clip(-(len_i - (max_length - buffer)) / buffer x factor, -factor, 0)

    Source: arXiv 2503.14476. Confidence: equal to verl 0.9.1 for episodes up to `max_length`.
    Use: long reasoning with rewards of 0 and 1. Set `max_length` for the penalty.
    Cost: as GRPO, and the episodes of dropped groups.
    """

    name: str = "dapo"
    loss: OwnLoss = Clip(clip_high=0.28, dual_clip=10.0)
    drop_zero_variance: bool = True
    """Dynamic sampling: drop groups whose rewards are all equal, and sample others instead."""
    max_length: Int64 = Field(0, ge=0)
    """Length of an episode's answers, in tokens, from which the penalty is `factor`. 0: without a penalty."""
    buffer: Int64 = Field(4096, ge=1)
    """Tokens before `max_length` over which the penalty grows."""
    factor: float = Field(1.0, ge=0)
    """Penalty at `max_length`, the largest."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if 0 < self.max_length < self.buffer:
            raise ValueError(
                f"buffer = {self.buffer} is above max_length = {self.max_length}, so the shortest episodes would have "
                "a penalty; set it to max_length or less"
            )
        return self

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        if self.max_length:
            beyond_ER = lengths(batch) - (self.max_length - self.buffer)
            batch = penalised(batch, np.clip(beyond_ER / self.buffer * self.factor, 0.0, self.factor))
        return super().sequence_advantages(batch)


class GspoLoss(PolicyLoss):
    """PPO's surrogate on the sequence's geometric mean ratio. The gradient flows through each token."""

    name: str = "gspo"
    clip_low: float = Field(3e-4, ge=0)
    """With a negative advantage, sequence ratios below 1 - clip_low have no gradient."""
    clip_high: float = Field(4e-4, ge=0)
    """With a positive advantage, sequence ratios above 1 + clip_high have no gradient."""

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "sequence")
    aggregation: ClassVar[str] = "sequence_mean"
    is_linear: ClassVar[bool] = True

    def mean_log_ratio(self, logp: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the mean log-ratio [M] of each token's sequence."""
        return sequence_mean(logp - columns["logprob"], columns)

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = self.mean_log_ratio(logp, columns).clamp(max=10.0).exp()
        return surrogate(ratio, columns["advantage"], 1 - self.clip_low, 1 + self.clip_high)


class Gspo(Grpo):
    """GSPO: GRPO's advantage with a clipped ratio of sequences instead of tokens.

        s_i = exp(mean over tokens of log(policy / sampling policy)),  L = max(-A s_i, -A clip(s_i, 1 - low, 1 + high))

    Source: arXiv 2507.18071, bounds of its section 5.1. Confidence: equal to verl 0.9.1.
    Use: long answers and mixtures of experts, where ratios of single tokens are noisy.
    Cost: as GRPO, and one more forward pass if a mini-batch is several micro-batches.
    """

    name: str = "gspo"
    loss: OwnLoss = GspoLoss()
    mini_batches: Int64 = Field(4, ge=1)
    """Optimiser steps in each pass."""


class GspoTokenLoss(GspoLoss):
    """The same values, but a token's gradient has its own advantage instead of the mean over its sequence."""

    name: str = "gspo_token"

    def mean_log_ratio(self, logp: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        # `logp - logp.detach()` is 0. It gives the ratio of the sequence the gradient of each of its tokens.
        return super().mean_log_ratio(logp.detach(), columns) + logp - logp.detach()


class GspoToken(Gspo):
    """GSPO-token: the ratio and the clip of GSPO, with an advantage for each token.

        s_t = stop_gradient(s_i) policy_t / stop_gradient(policy_t),  L = max(-A_t s_t, -A_t clip(s_t))

    Source: arXiv 2507.18071, section 4.3. Confidence: equal to verl 0.9.1, whose `gspo` it is. With equal advantages in
    a sequence it is GSPO.
    Use: GSPO with advantages of tokens or turns, or with a correction of stale samples.
    Cost: as GSPO.
    """

    name: str = "gspo_token"
    loss: OwnLoss = GspoTokenLoss()


class GmpoLoss(PolicyLoss):
    """The geometric mean over a sequence of its clipped ratios."""

    name: str = "gmpo"
    clip: float = Field(0.4, ge=0)
    """Bound of the log-ratio of a token, in the direction of its advantage."""

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "sequence")
    aggregation: ClassVar[str] = "sequence_mean"
    is_linear: ClassVar[bool] = True

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage, ratio = columns["advantage"], log_ratio(logp, columns["logprob"])
        clipped = ratio.clamp(max=self.clip).where(advantage > 0, ratio.clamp(min=-self.clip))
        metrics = {CLIP_FRACTION: (clipped != ratio) & (advantage != 0)}
        return -advantage * sequence_mean(clipped, columns).exp(), metrics


class Gmpo(Grpo):
    """GMPO: GRPO's advantage with the geometric mean of clipped ratios, which outliers of single tokens move less.

        L_i = -A exp(mean over tokens of x),  x = min(log r, clip) if A > 0, else max(log r, -clip)

    Source: arXiv 2507.20673. Confidence: equal to verl 0.9.1, whose name for it is `geo_mean`.
    Use: several steps on one batch, with wider bounds than GRPO's.
    Cost: as GSPO.
    """

    name: str = "gmpo"
    loss: OwnLoss = GmpoLoss()


class CispoLoss(PolicyLoss):
    """REINFORCE with a clipped, detached ratio as weight. Every token keeps a gradient."""

    name: str = "cispo"
    clip_low: float = Field(10.0, ge=0)
    """Weights are at least 1 - clip_low. 1 or more: no lower bound."""
    clip_high: float = Field(0.2, ge=0)
    """Weights are at most 1 + clip_high."""

    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage, ratio = columns["advantage"], ratio_of(logp, columns)
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight.detach() * advantage * logp, {CLIP_FRACTION: (weight != ratio) & (advantage != 0)}


class Cispo(Grpo):
    """CISPO: GRPO's advantage with a clipped ratio as a weight, so that no token loses its gradient.

        L = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log(policy)

    Source: arXiv 2506.13585. Confidence: equal to verl 0.9.1. `clip_high` is verl's; ScaleRL has 5.
    Use: rare, decisive tokens (reasoning words) that PPO's clip silences.
    Cost: as GRPO.
    """

    name: str = "cispo"
    loss: OwnLoss = CispoLoss()


class DppoLoss(PolicyLoss):
    """REINFORCE with a truncated ratio as weight, 0 where the token's probability left the trust region."""

    name: str = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Distance of the policies, of which each has two outcomes: the sampled token or another. `tv`: total variation,
    |p - q|. `kl`: the KL divergence; its usual bounds are 0.05."""
    clip_low: float = Field(0.15, ge=0)
    """With a negative advantage, a token whose probability fell by more than this distance has no gradient."""
    clip_high: float = Field(0.15, ge=0)
    """With a positive advantage, a token whose probability rose by more than this distance has no gradient."""
    max_ratio: float = Field(20.0, gt=0)
    """Largest weight."""

    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage, old, new = columns["advantage"], columns["logprob"], logp.detach()
        change = distance = new.exp() - old.exp()
        if self.divergence == "kl":
            # Some float32 probabilities round to 1, so a small number is in both logarithms.
            others = (1e-8 - old.expm1()).log() - (1e-8 - new.expm1()).log()
            distance = old.exp() * (old - new) - old.expm1() * others
        is_far = ((advantage > 0) & (change > 0) & (distance.abs() > self.clip_high)) | (
            (advantage < 0) & (change < 0) & (distance.abs() > self.clip_low)
        )
        weight = ratio_of(new, columns).clamp(max=self.max_ratio).masked_fill(is_far, 0.0)
        return -weight * advantage * logp, {CLIP_FRACTION: is_far}


class Dppo(Grpo):
    """DPPO: GRPO's advantage with a trust region of probabilities instead of ratios.

        L = -stop_gradient(min(r, max_ratio)) A log(policy), 0 if the update would move p further than the bound
        far = |p - q| > bound, or KL((q, 1 - q) || (p, 1 - p)) > bound;  p, q = probability by policy, sampling policy

    Source: arXiv 2602.04879, its binary approximations. Confidence: equal to verl 0.9.1, whose names are `dppo_tv` and
    `dppo_kl`.
    Use: large vocabularies, where PPO's clip silences rare tokens and lets frequent ones move far.
    Cost: as GRPO.
    """

    name: str = "dppo"
    loss: OwnLoss = DppoLoss()


def covariances(logp: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Returns (A - mean) (log-probability - mean) [M], without gradient, over the tokens of the mini-batch."""
    advantage, new = columns["advantage"], logp.detach()
    return (advantage - advantage.mean()) * (new - new.mean())


class ClipCovLoss(Clip):
    """PPO's surrogate without some of the tokens whose covariance is high."""

    name: str = "clip_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Share of the mini-batch's tokens that have no gradient; one token at least."""
    lowest: float = 1.0
    """Covariance above which a token may be chosen."""
    highest: float = 5.0
    """Covariance below which a token may be chosen."""

    is_linear: ClassVar[bool] = False

    @model_validator(mode="after")
    def _some_are_chosen(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest = {self.lowest} is not below highest = {self.highest}: no token would be chosen")
        return self

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.token_loss(logp, columns)
        covariance, clipped = covariances(logp, columns), metrics[CLIP_FRACTION]
        candidates = ((covariance > self.lowest) & (covariance < self.highest) & ~clipped).nonzero().flatten()
        number = min(max(1, int(self.share * len(logp))), len(candidates))
        # A replay must choose the same tokens, so chance has no part.
        places = candidates.new_tensor(range(number)) * len(candidates) // max(1, number)
        chosen = clipped.new_zeros(len(logp)).index_fill(0, candidates[places], True)
        return loss.masked_fill(chosen, 0.0), {CLIP_FRACTION: clipped | (chosen & (columns["advantage"] != 0))}


class ClipCov(Grpo):
    """Clip-Cov: GRPO without the gradient of a few tokens that lower the entropy most.

        cov_t = (A_t - mean(A)) (log policy_t - mean(log policy)), over the mini-batch
        Of the tokens with lowest < cov_t < highest that are not clipped, share x tokens have no gradient.

    Source: arXiv 2505.22617. Confidence: equal to verl 0.9.1, except that the chosen tokens lie at equal distances in
    the batch, instead of at random.
    Use: runs whose `policy/entropy` falls towards 0 while the reward still rises.
    Cost: as GSPO; every token is computed.
    """

    name: str = "clip_cov"
    loss: OwnLoss = ClipCovLoss()


class KlCovLoss(PolicyLoss):
    """The plain surrogate, with a penalty on the tokens whose covariance is highest."""

    name: str = "kl_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Share of the mini-batch's tokens that have the penalty, those of the highest covariance; one token at least."""
    coef: float = Field(1.0, gt=0)
    """Weight of the penalty."""

    reports: ClassVar[tuple[str, ...]] = ()

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(logp, columns["logprob"])
        chosen = covariances(logp, columns).topk(max(1, int(self.share * len(logp)))).indices
        penalty = logp.new_zeros(len(logp)).index_fill(0, chosen, self.coef) * ratio.abs()
        return penalty - columns["advantage"] * ratio.exp(), {}


class KlCov(Grpo):
    """KL-Cov: GRPO without a clip, with a penalty on the tokens that lower the entropy most.

        L = -A r + coef |log r| for the share of tokens with the highest cov_t, see `clip_cov`;  L = -A r for others

    Source: arXiv 2505.22617. Confidence: equal to verl 0.9.1.
    Use: the same as `clip_cov`. Without several steps on a batch, r is 1 and the penalty has no gradient.
    Cost: as GSPO; every token is computed.
    """

    name: str = "kl_cov"
    loss: OwnLoss = KlCovLoss()
    mini_batches: Int64 = Field(4, ge=1)
    """Optimiser steps in each pass."""


class TopEntropy(Grpo):
    """Top-entropy tokens: GRPO whose gradient comes from the most uncertain tokens only.

        A_t = A if H_t >= the (1 - keep)-quantile of H over the batch's tokens, else 0

    Source: arXiv 2506.01939. Confidence: equal to TRL 1.16 with `top_entropy_quantile` in the choice of tokens, with
    entropies of the weights before the batch. `loss = "dapo"` adds the bounds of its runs. Means are over all tokens.
    Use: long reasoning, where few tokens decide how an answer goes on.
    Cost: one more forward pass for the entropies; other tokens are not computed.
    """

    name: str = "top_entropy"
    keep: float = Field(0.2, gt=0, le=1)
    """Share of the batch's tokens that is trained, those with the highest entropy."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"entropy"}

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        entropies = batch.forest["entropy"].astype(np.float64)
        is_top = entropies >= np.quantile(entropies, 1 - self.keep) if len(entropies) else np.zeros(0, bool)
        return np.where(is_top, super().token_advantages(batch), np.float32(0))


class SapoLoss(PolicyLoss):
    """A smooth gate of the ratio instead of a clip."""

    name: str = "sapo"
    positive: float = Field(1.0, gt=0)
    """Steepness of the gate for positive advantages."""
    negative: float = Field(1.05, gt=0)
    """Steepness of the gate for negative advantages."""

    reports: ClassVar[tuple[str, ...]] = ()
    aggregation: ClassVar[str] = "sequence_mean"
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage = columns["advantage"]
        steepness = (advantage > 0).to(logp.dtype) * (self.positive - self.negative) + self.negative
        return -advantage * (steepness * (ratio_of(logp, columns) - 1)).sigmoid() * 4 / steepness, {}


class Sapo(Grpo):
    """SAPO: GRPO's advantage with a smooth gate of the ratio, whose gradient fades instead of ending at a bound.

        L = -A 4 / s sigmoid(s (r - 1)),  s = positive if A > 0, else negative

    Source: arXiv 2511.20347. Confidence: equal to verl 0.9.1.
    Use: several steps on one batch, and mixtures of experts, where a hard clip loses many tokens.
    Cost: as GRPO.
    """

    name: str = "sapo"
    loss: OwnLoss = SapoLoss()


class LoopLoss(PolicyLoss):
    """PPO's surrogate with a clip that is symmetric in the log-ratio."""

    name: str = "loop"
    clip: float = Field(0.1, gt=0)
    """Ratios outside [1 / (1 + clip), 1 + clip] have no gradient."""

    aggregation: ClassVar[str] = "sequence_mean"
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return surrogate(ratio_of(logp, columns), columns["advantage"], 1 / (1 + self.clip), 1 + self.clip)


class Loop(Rloo):
    """LOOP: leave-one-out PPO, without episodes whose advantage is small.

        A_i = r_i - mean of the others, left out if |A_i| < min_advantage
        L = max(-A r, -A clip(r, 1 / (1 + clip), 1 + clip)), mean over each episode's tokens

    Source: LOOP. Confidence: equal to github.com/apple/ml-loop at 6ade7b9, without the rounding to workers and without
    the stop at a large mean log-ratio.
    Use: long interactive tasks; with several `mini_batches`.
    Cost: twice GRPO's: two epochs.
    """

    name: str = "loop"
    loss: OwnLoss = LoopLoss()
    epochs: Int64 = Field(2, ge=1)
    """Passes over each batch."""
    min_advantage: float = Field(0.01, ge=0)
    """Episodes with a smaller advantage are left out. 0: none."""

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        advantages_G = super().group_advantages(rewards_G)
        return np.where(np.abs(advantages_G) < self.min_advantage, 0.0, advantages_G)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without rejected episodes."""
        return np.asarray(advantage != 0) if self.min_advantage else super().counting(batch, advantage)


class EtrLoss(PolicyLoss):
    """PPO's surrogate with a bound per token."""

    name: str = "etr"

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "bound")
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        bound = columns["bound"]
        return surrogate(ratio_of(logp, columns), columns["advantage"], 1 - bound, 1 + bound)


class Etr(Grpo):
    """ETR: GRPO with wider clip bounds for large advantages, and for tasks that are neither easy nor hard.

        bound_i = bound [1 + micro (tanh|A_i| - tanh 1)] [1 + macro (min(var(r) / full_variance, 1) - 0.5)]

    Source: arXiv 2601.03723 (ETR), its abstract; the formula is ours. Confidence: inspired by.
    Use: several steps on one batch, tasks of different difficulty. With micro = macro = 0 it is GRPO.
    Cost: as GRPO.
    """

    name: str = "etr"
    loss: OwnLoss = EtrLoss()
    bound: float = Field(0.2, gt=0)
    """Distance of the ratio from 1 beyond which there is no gradient, for an advantage of 1."""
    micro: float = Field(0.5, ge=0)
    """Influence of the advantage."""
    macro: float = Field(0.5, ge=0)
    """Influence of the group's variance."""
    full_variance: float = Field(0.25, gt=0)
    """Population variance of a group's rewards with the widest bound: 0.25 for rewards of 0 and 1."""
    smallest: float = Field(0.05, gt=0)
    """Lower limit of the bounds."""
    largest: float = Field(0.4, gt=0)
    """Upper limit of the bounds."""

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        if not self.smallest <= self.bound <= self.largest:
            raise ValueError(
                f"bound = {self.bound} must lie between smallest = {self.smallest} and largest = {self.largest}"
            )
        return self

    def loss_columns(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        if batch.facts is None:
            variance: FloatArray = np.full(len(advantage), self.full_variance)
        else:
            variance_ER = np.zeros(batch.facts.spoke.shape)
            for episodes, role, rewards_G in self.comparisons(batch.facts):
                variance_ER[episodes, role] = np.var(rewards_G)
            variance = batch.facts.of_tokens(variance_ER, batch.forest)
        micro = 1 + self.micro * (np.tanh(np.abs(advantage)) - np.tanh(1))
        macro = 1 + self.macro * (np.minimum(variance / self.full_variance, 1) - 0.5)
        return {"bound": np.clip(self.bound * micro * macro, self.smallest, self.largest).astype(np.float32)}


class AepoLoss(Clip):
    """PPO's surrogate that keeps the gradient of the bound above the upper clip."""

    name: str = "aepo"
    dual_clip: float = Field(3.0, ge=0)
    """Maximum ratio for negative advantages, above 1. 0: no maximum."""

    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().token_loss(logp, columns)
        advantage, ratio = columns["advantage"], ratio_of(logp, columns)
        above = (advantage > 0) & (ratio > 1 + self.clip_high)
        return (-(1 + self.clip_high) * advantage * (1 + logp - logp.detach())).where(above, loss), metrics


class Aepo(Grpo):
    """AEPO: GRPO that weighs uncertain tokens more and keeps their gradient above the upper clip.

        A_t = A (1 + entropy_weight z_t),  z = (H - mean(H)) / std(H) over the batch's tokens, at least -5
        r > 1 + clip_high and A > 0:  the gradient is (1 + clip_high) A instead of 0

    Source: Agentic Entropy-Balanced Policy Optimization, arXiv 2510.14545. Confidence: equal to
    github.com/multi-agent-deep-research/ARPO at b7a33bd, a copy of the authors' code, with entropies of the weights
    before the batch and without the branching of its sampling. Arbitrary Entropy Policy Optimization has the same
    abbreviation and is another method.
    Use: tool agents whose entropy collapses.
    Cost: one more forward pass for the entropies.
    """

    name: str = "aepo"
    loss: OwnLoss = AepoLoss()
    entropy_weight: float = Field(0.2, ge=0, le=0.2)
    """Weight of the standardised entropy in the advantage."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"entropy"}

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        entropies = batch.forest["entropy"].astype(np.float64)
        weights = 1 + self.entropy_weight * standardised(entropies)
        return (super().token_advantages(batch) * weights).astype(np.float32)


def standardised(entropies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the entropies [M] with mean 0 and sample standard deviation 1; 0 if all are equal."""
    if len(entropies) < 2 or np.ptp(entropies) == 0:
        return np.zeros_like(entropies)
    return np.asarray(np.maximum((entropies - entropies.mean()) / np.std(entropies, ddof=1), LOWEST_ENTROPY))


class HapoLoss(PolicyLoss):
    """PPO's surrogate with bounds and advantages that follow the relative entropy h of the token, in [-1, 1]."""

    name: str = "hapo"
    clip: float = Field(0.2, gt=0, lt=0.5)
    """Bound of the ratio at h = 0, in both directions."""
    clip_alpha: float = Field(1.0, ge=0, le=1)
    """Widening of the lower bound for certain tokens (h < 0) and of the upper one for uncertain tokens (h > 0)."""
    adv_beta: float = Field(1.0, ge=0, le=1)
    """Change of the advantage by h: certain tokens near ratio 1 get less, uncertain ones far from it get more."""
    dual_clip: float = Field(10.0, gt=1)
    """Maximum ratio for negative advantages."""

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "relative_entropy")
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        h, ratio = columns["relative_entropy"], ratio_of(logp, columns)
        low = self.clip * (1 - self.clip_alpha * h.clamp(max=0))
        high = self.clip * (1 + self.clip_alpha * h.clamp(min=0))
        near = ((ratio > 1 - low / 2) & (ratio < 1 + high / 2)).detach()
        advantage = columns["advantage"] * (1 + self.adv_beta * h).where((h > 0) ^ near, h.new_ones(()))
        loss, metrics = surrogate(ratio, advantage, 1 - low, 1 + high)
        cap = -advantage * self.dual_clip
        is_capped = (advantage < 0) & (loss > cap)
        return cap.where(is_capped, loss), {CLIP_FRACTION: metrics[CLIP_FRACTION] | is_capped}


class Hapo(HapoTlga):
    """HAPO: token-level group average, with clip bounds and advantages that follow the entropy of each token.

        h = (log H - q) / s, scaled to [-1, 1]; q = 0.8-quantile of log H, s = root mean square about q
        lower bound 0.2 (1 - min(h, 0)), upper bound 0.2 (1 + max(h, 0))
        A = A (1 + h) for h > 0 outside half the bounds, and for h <= 0 inside them

    Source: github.com/starriver030515/HAPO at 7671dde. Confidence: after its formulas: h has its sign, which the
    released code loses, and entropies are those of the weights before the batch. Without its temperature.
    Use: long reasoning, with a mean over tokens.
    Cost: one more forward pass for the entropies.
    """

    name: str = "hapo"
    loss: OwnLoss = HapoLoss()
    drop_zero_variance: bool = True
    """Dynamic sampling: drop groups whose rewards are all equal, and sample others instead."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"entropy"}

    def loss_columns(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        return {"relative_entropy": relative(batch.forest["entropy"].astype(np.float64)).astype(np.float32)}


def relative(entropies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns h [M]: -1 for the smallest entropy, 0 at the 0.8-quantile, 1 for the largest."""
    logs = np.log(np.maximum(entropies, FLOOR))
    gaps = logs - np.sort(logs)[round(0.8 * (len(logs) - 1))] if len(logs) else logs
    scales = np.where(gaps > 0, gaps.max(initial=0), -gaps.min(initial=0))
    return np.asarray(gaps / np.where(scales > 0, scales, 1))


class AdaptiveKl(Grpo):
    """Adaptive KL: GRPO with a KL penalty whose weight follows a target.

        L = clip + beta KL,  beta <- beta (1 + clamp(KL / target - 1, -0.2, 0.2) min(1, n / horizon)) after n sequences

    Source: arXiv 1909.08593, section 2.2, as verl computes it. Confidence: inspired by: the source's controller acts on
    the KL in the reward, this one on the KL in the loss.
    Use: long runs that must stay near the first model, if the weight of the penalty is not known. `beta` is state:
    it is saved with the checkpoints and begins at `kl_coef`.
    Cost: one more forward pass, by the weights of version 0; every token is computed.
    """

    name: str = "adaptive_kl"
    kl_coef: float = Field(0.001, gt=0)
    """Weight of the KL penalty in the first batch."""
    target: float = Field(0.1, gt=0)
    """KL per token that the weight aims at."""
    horizon: float = Field(10_000.0, gt=0)
    """Sequences after which a constant error of 20 % has changed the weight by about 20 %."""

    no_kl_in_reward: ClassVar[str] = "adapts the weight of the penalty in the loss"

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "kl_coef")

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        forest, metrics = super().columns(batch, outputs)
        beta = batch.state.get("kl_coef", self.kl_coef)
        forest = forest.with_columns(kl_coef=np.full(forest.num_targets, beta))
        return forest, {**metrics, COEFFICIENT: beta, SEQUENCES: float(forest.num_sequences)}

    def next_state(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        beta = metrics[COEFFICIENT]
        if "policy/kl" not in metrics:  # The batch has no token.
            return {"kl_coef": beta}
        error = min(max(metrics["policy/kl"] / self.target - 1, -0.2), 0.2)
        return {"kl_coef": beta * (1 + error * min(metrics[SEQUENCES] / self.horizon, 1.0))}


class EntropyBonus(Grpo):
    """Entropy bonus: GRPO that keeps the policy from becoming certain too early.

        L = L_grpo - entropy_coef H,  H: the entropy of each present distribution, with gradient

    Source: arXiv 1602.01783, section 4, on tokens. Confidence: equal to verl 0.9.1 with `entropy_coeff` and
    `loss.dual_clip = 3`.
    Use: runs whose `policy/entropy` falls towards 0 while the reward still rises. Other recipes have it, too.
    Cost: every token is computed, and the head's distributions have a gradient.
    """

    name: str = "entropy_bonus"
    entropy_coef: float = Field(0.003, gt=0)
    """Weight of the entropy bonus."""


class AdaptiveEntropy(Grpo):
    """Adaptive entropy: GRPO with an entropy bonus that acts below a target only, and whose weight adapts.

        batch with entropy below target: the bonus acts, and its weight grows by `step`; else it falls by `step`

    Source: arXiv 2505.22312 (Skywork-OR1), section on adaptive entropy control. Confidence: inspired by: `step` and the
    bounds are ours.
    Use: the same as `entropy_bonus`, if the weight is not known. The weight is state, which begins at `entropy_coef`.
    Cost: as `entropy_bonus`.
    """

    name: str = "adaptive_entropy"
    entropy_coef: float = Field(0.001, gt=0)
    """Weight of the bonus in the first batch."""
    target: float = Field(0.2, gt=0)
    """Entropy per token, in nats, below which the bonus acts: that of `policy/entropy`."""
    step: float = Field(0.001, gt=0)
    """Change of the weight after a batch."""
    max_coef: float = Field(0.05, gt=0)
    """Largest weight."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "entropy_coef")

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        forest, metrics = super().columns(batch, outputs)
        coef = batch.state.get("entropy_coef", self.entropy_coef)
        acts = metrics.get("policy/entropy", np.inf) < self.target
        forest = forest.with_columns(entropy_coef=np.full(forest.num_targets, coef if acts else 0.0))
        return forest, {**metrics, ENTROPY_COEFFICIENT: coef, ACTS: float(acts)}

    def next_state(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        change = self.step if metrics[ACTS] else -self.step
        return {"entropy_coef": min(max(metrics[ENTROPY_COEFFICIENT] + change, 0.0), self.max_coef)}
