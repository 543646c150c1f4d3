"""Policy losses per token, corrections for stale or mismatched samples, and aggregations. Pure functions.

Shapes: M targets. `logp` is the policy's log-probability, with gradient. `old` is that of sampling, or of the batch's
start. Both are at the sampling temperature. `AGGREGATIONS` turn token losses into one number.

Each loss also returns the tokens that it clipped, because only the loss has the ratio and its bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentjet.config import AlgorithmConfig

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this bound, so that their exponentials stay finite."""


class TokenLoss(NamedTuple):
    """The losses [M], and True [M] where the clip changed a token's gradient."""

    loss: Tensor
    clipped: Tensor


def clip_loss(logp: Tensor, old: Tensor, advantage: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347) with separate bounds (DAPO), optionally dual clip (1912.09729)."""
    loss, clipped = _surrogate(log_ratio(logp, old).exp(), advantage, algorithm)
    if algorithm.dual_clip:
        cap = -advantage * algorithm.dual_clip
        clipped = clipped | ((advantage < 0) & (loss > cap))
        loss = loss.minimum(cap).where(advantage < 0, loss)
    return TokenLoss(loss, clipped)


def gspo_loss(logp: Tensor, sequence_log_ratio: Tensor, advantage: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """GSPO (2507.18071): the clipped surrogate on the sequence's geometric mean ratio.

    `sequence_log_ratio` [M] is the mean of logp - old over each token's sequence, without gradient. The gradient flows
    through the token.
    """
    return _surrogate((sequence_log_ratio + logp - logp.detach()).clamp(max=10.0).exp(), advantage, algorithm)


def cispo_loss(logp: Tensor, old: Tensor, advantage: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """CISPO (2506.13585): REINFORCE with a clipped, detached ratio as weight; every token keeps a gradient."""
    low, high = algorithm.clip_bounds
    ratio = log_ratio(logp, old).exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return TokenLoss(-weight.detach() * advantage * logp, (weight != ratio) & (advantage != 0))


def _surrogate(ratio: Tensor, advantage: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """PPO's pessimistic surrogate: the clip acts only where it removes an incentive to move further."""
    low, high = algorithm.clip_bounds
    unclipped, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
    return TokenLoss(unclipped.maximum(clipped), clipped > unclipped)


def kl_k3(logp: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per sampled token: never negative, low variance."""
    ratio = log_ratio(reference, logp)
    return ratio.exp() - ratio - 1


def log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    """log(policy / old), bounded so that its exponential is finite."""
    return (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class Loss(NamedTuple):
    """A loss per token: `function(logp, *columns, algorithm)`, with the columns of the targets that it reads.

    A loss that reads `sequence_log_ratio` needs every token of a sequence.
    """

    function: Callable[..., TokenLoss]
    reads: tuple[str, ...] = ("logprob", "advantage")


LOSSES: dict[str, Loss] = {
    "clip": Loss(clip_loss),
    "gspo": Loss(gspo_loss, reads=("sequence_log_ratio", "advantage")),
    "cispo": Loss(cispo_loss),
}
"""By the name in `job.algorithm.loss`."""


def token_mean(sequence: NDArray[np.int32], num_sequences: int, algorithm: AlgorithmConfig) -> NDArray[np.float32]:
    """1 / M for each token."""
    return np.full(len(sequence), 1 / len(sequence), np.float32)


def sequence_mean(sequence: NDArray[np.int32], num_sequences: int, algorithm: AlgorithmConfig) -> NDArray[np.float32]:
    """1 / (tokens of the token's sequence x sequences)."""
    _, inverse, counts = np.unique(sequence, return_inverse=True, return_counts=True)
    return (1 / (counts[inverse] * num_sequences)).astype(np.float32)


def constant(sequence: NDArray[np.int32], num_sequences: int, algorithm: AlgorithmConfig) -> NDArray[np.float32]:
    """1 / (`algorithm.constant` x sequences), Dr. GRPO (2503.20783)."""
    return np.full(len(sequence), 1 / (algorithm.constant * num_sequences), np.float32)


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "constant": constant}
"""By the name in `job.algorithm.aggregation`: the weight [M] of each token's loss. The batch's loss is the weighted
sum, for any micro-batches. `sequence` [M] numbers the (episode, role) of each token.
"""


class Correction(NamedTuple):
    """The weight [M] of each token's loss, and the tokens [M] that count in the loss's denominators."""

    weight: NDArray[np.float32]
    counts: NDArray[np.bool_]


def tis(rho: NDArray[np.float32], algorithm: AlgorithmConfig) -> Correction:
    """Truncated importance sampling: `min(rho, high)` (IMPALA's truncation, arXiv 1802.01561, on tokens)."""
    return Correction(np.minimum(rho, np.float32(algorithm.correction_high)), np.ones(len(rho), bool))


def icepop(rho: NDArray[np.float32], algorithm: AlgorithmConfig) -> Correction:
    """rho inside `[low, high]`, 0 outside. Every token counts (2510.18855)."""
    return Correction(mis(rho, algorithm).weight, np.ones(len(rho), bool))


def mis(rho: NDArray[np.float32], algorithm: AlgorithmConfig) -> Correction:
    """Masked importance sampling: rho inside `[low, high]`. A token outside does not count."""
    inside = (rho >= algorithm.correction_low) & (rho <= algorithm.correction_high)
    return Correction(np.where(inside, rho, np.float32(0)), inside)


CORRECTIONS = {"tis": tis, "icepop": icepop, "mis": mis}
"""By the name in `job.algorithm.correction`."""


def importance_ratio(proximal: NDArray[np.float32], behaviour: NDArray[np.float32]) -> NDArray[np.float32]:
    """`exp(proximal - behaviour)` [M]: the learner's probability at the start of the batch over the one at sampling.

    They differ for older weights and for another engine.
    """
    log_ratio = np.clip(proximal.astype(np.float64) - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.exp(log_ratio).astype(np.float32)
