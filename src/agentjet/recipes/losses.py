"""Policy losses per token, estimates of the KL divergence, corrections of stale samples, and aggregations.

Shapes: M targets. `logp` is the policy's log-probability, with gradient. The column `logprob` is that of sampling, or
of the batch's start. Both are at the sampling temperature. The ratio of a loss is policy / sampling policy. That of a
correction, rho, is the policy at the batch's start / sampling policy. `token_weights` makes token losses one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from agentjet.recipes import registry
from agentjet.recipes.recipe import Component

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this bound, so that their exponentials stay finite."""
CLIP_FRACTION = "policy/clip_fraction"


class PolicyLoss(Component):
    """The loss of a token from its log-probability and its advantage. A recipe with another loss is a subclass.

    With a correction, the advantage is scaled by an importance weight, so the loss must be linear in the advantage.
    """

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage")
    """Columns of the targets that the loss reads. Those that the learner does not have come from
    `PolicyGradient.loss_columns` of the loss's recipe."""
    reports: ClassVar[tuple[str, ...]] = (CLIP_FRACTION,)
    """Metrics that are 0 for tokens without advantage."""
    aggregation: ClassVar[str] = "token_mean"
    """The aggregation of its publication: see `token_weights`."""
    is_linear: ClassVar[bool] = False
    """True if the loss is linear in the advantage: advantage 0 has no gradient, and a correction can scale it. A
    subclass that overrides `token_loss` must say it again."""

    @property
    def takes_batch(self) -> bool:
        """True if the loss is `batch_loss`."""
        return type(self).batch_loss is not PolicyLoss.batch_loss

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if vars(cls).keys() & {"token_loss", "batch_loss"} and "is_linear" not in vars(cls):
            cls.is_linear = False

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses [M], and metrics [M]."""
        raise NotImplementedError

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The same for all tokens of a mini-batch together; a loss has one of the two. See `Recipe.batch_loss`. A loss
        that is linear in the advantage gets every token of a sequence with an advantage, another one every token."""
        raise NotImplementedError


class Clip(PolicyLoss):
    """PPO's clipped surrogate with separate bounds, optionally with dual clip.

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),  r = policy / sampling policy

    Source: PPO arXiv 1707.06347, bounds of DAPO 2503.14476, dual clip 1912.09729. Confidence: equal to verl 0.9.1.
    """

    name: str = "clip"
    clip_low: float = Field(0.2, ge=0)
    """With a negative advantage, ratios below 1 - clip_low have no gradient."""
    clip_high: float = Field(0.2, ge=0)
    """With a positive advantage, ratios above 1 + clip_high have no gradient."""
    dual_clip: float = Field(0.0, ge=0)
    """Maximum ratio for negative advantages, above 1. 0: no maximum."""

    is_linear: ClassVar[bool] = True

    @field_validator("dual_clip")
    @classmethod
    def _negative_advantages_teach(cls, dual_clip: float) -> float:
        if 0 < dual_clip <= 1:
            raise ValueError(
                f"dual_clip = {dual_clip} takes the gradient from negative advantages at ratio 1; set it above 1, or "
                "to 0 for no maximum"
            )
        return dual_clip

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage = columns["advantage"]
        loss, metrics = surrogate(ratio_of(logp, columns), advantage, 1 - self.clip_low, 1 + self.clip_high)
        if self.dual_clip:
            cap = -advantage * self.dual_clip
            metrics[CLIP_FRACTION] = metrics[CLIP_FRACTION] | ((advantage < 0) & (loss > cap))
            loss = loss.minimum(cap).where(advantage < 0, loss)
        return loss, metrics


class CrossEntropy(PolicyLoss):
    """Cross-entropy on the sampled tokens, times the advantage: REINFORCE, and imitation of chosen episodes."""

    name: str = "rft"

    reads: ClassVar[tuple[str, ...]] = ("advantage",)
    reports: ClassVar[tuple[str, ...]] = ()
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -columns["advantage"] * logp, {}


def find_loss(name: str) -> tuple[type[PolicyLoss], dict[str, Any]]:
    """Returns a loss by name, with the parameters that its recipe changes: `clip`, the loss of a recipe, or an import
    path. Raises `ValueError`.
    """
    if name == Clip.model_fields["name"].default:
        return Clip, {}
    if ":" in name:
        return registry.load(name, PolicyLoss), {}
    field = registry.find(name).model_fields.get("loss")
    if field is None or not isinstance(field.default, PolicyLoss):
        raise ValueError(f"the recipe {name!r} has no policy loss: choose another, such as 'clip' or 'gspo'")
    return type(field.default), field.default.model_dump()


def log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    """log(policy / old), bounded so that its exponential is finite."""
    return (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Returns the mean [M] of a value per token [M] over the token's sequence, with gradient. For `batch_loss`."""
    sums, counts = values.new_zeros(2, int(columns["sequence"].max()) + 1).unbind()
    sums = sums.index_add(0, columns["sequence"], values)
    counts = counts.index_add(0, columns["sequence"], values.new_ones(()).expand_as(values))
    return (sums / counts.clamp(min=1))[columns["sequence"]]


def ratio_of(logp: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """policy / sampling policy [M]."""
    return log_ratio(logp, columns["logprob"]).exp()


Bound = TypeVar("Bound", float, "Tensor")


def surrogate(ratio: Tensor, advantage: Tensor, lowest: Bound, highest: Bound) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's pessimistic surrogate [M] with bounds of the ratio, and the metric of where the clip changed the gradient.

    The clip acts only where it removes an incentive to move further.
    """
    unclipped, clipped = -advantage * ratio, -advantage * ratio.clamp(lowest, highest)
    return unclipped.maximum(clipped), {CLIP_FRACTION: clipped > unclipped}


def kl_k1(logp: Tensor, reference: Tensor) -> Tensor:
    """Log-ratio: an unbiased estimate of KL(policy || reference). As a loss, its gradient is 0 on average."""
    return log_ratio(logp, reference)


def kl_k2(logp: Tensor, reference: Tensor) -> Tensor:
    """Half the squared log-ratio. Its gradient is an unbiased estimate of the gradient of KL(policy || reference)."""
    return log_ratio(logp, reference) ** 2 / 2


def kl_k3(logp: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per sampled token: never negative, low variance."""
    ratio = log_ratio(reference, logp)
    return ratio.exp() - ratio - 1


KL_ESTIMATES = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Estimates per sampled token, by the name in `kl_estimator` (joschu.net/blog/kl-approx.html)."""


Level = Literal["token", "sequence", "geometric"]
"""The ratio by which a token is corrected: its own, or the product or the geometric mean over its sequence."""


def corrected(
    kind: str, rho: NDArray[np.float32], low: float, high: float
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Returns the weight [M] of each token's loss, and True [M] for tokens that count in the loss's denominators.

    `tis`, truncated importance sampling: `min(rho, high)` (IMPALA's truncation, arXiv 1802.01561, on tokens). `icepop`
    (2510.18855): rho inside `[low, high]`, 0 outside. `mis`, masked importance sampling: the same, and a token outside
    does not count.
    """
    every = np.ones(len(rho), bool)
    if kind == "tis":
        return np.minimum(rho, np.float32(high)), every
    inside = (rho >= low) & (rho <= high)
    return np.where(inside, rho, np.float32(0)), inside if kind == "mis" else every


def importance_ratio(
    proximal: NDArray[np.float32],
    behaviour: NDArray[np.float32],
    sequence: NDArray[np.int32] | None = None,
    level: Level = "token",
) -> NDArray[np.float32]:
    """Returns `exp(proximal - behaviour)` [M], or its product or geometric mean over each token's sequence.

    Source: verl's rollout correction. `sequence` [M] is needed for levels above tokens.
    """
    logs = np.clip(proximal.astype(np.float64) - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level != "token":
        assert sequence is not None
        sums: NDArray[np.float64] = np.bincount(sequence, logs).astype(np.float64)
        if level == "geometric":
            sums = sums / np.maximum(1, np.bincount(sequence))
        logs = np.clip(sums, -MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence]
    return np.exp(logs).astype(np.float32)


def vetoed(rho: NDArray[np.float32], sequence: NDArray[np.int32], veto: float) -> NDArray[np.bool_]:
    """Returns True [M] for the tokens of sequences in which any token's ratio is below `veto` (slime)."""
    return np.isin(sequence, sequence[rho < veto])


def token_weights(
    aggregation: str, sequence: NDArray[np.int32], num_sequences: int, constant: float = 0.0
) -> NDArray[np.float32]:
    """Returns the weight [M] of each token's loss. The batch's loss is the weighted sum, for any micro-batches.

    `sequence` [M] numbers the (episode, role) of each token. `constant` is Dr. GRPO's divisor (2503.20783).
    """
    if aggregation == "sequence_mean":
        _, inverse, counts = np.unique(sequence, return_inverse=True, return_counts=True)
        return (1 / (counts[inverse] * num_sequences)).astype(np.float32)
    divisors = {"token_mean": len(sequence), "sequence_sum": num_sequences, "constant": constant * num_sequences}
    return np.full(len(sequence), 1 / divisors[aggregation], np.float32)
