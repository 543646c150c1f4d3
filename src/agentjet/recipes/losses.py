"""Policy losses per token, the correction for stale or mismatched samples, and the weights of tokens. Pure functions.

Shapes: M targets. `logp` is the policy's log-probability, with gradient. `old` is that of sampling, or of the batch's
start. Both are at the sampling temperature. `weights` turns token losses into one number.

Each loss also returns the tokens that it clipped, because only the loss has the ratio and its bounds.
"""

from __future__ import annotations

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


def policy_loss(
    logp: Tensor, old: Tensor, sequence_log_ratio: Tensor | None, advantage: Tensor, algorithm: AlgorithmConfig
) -> TokenLoss:
    """Returns the loss that `algorithm.loss` names. Only GSPO needs `sequence_log_ratio`."""
    if algorithm.loss == "gspo":
        assert sequence_log_ratio is not None
        return gspo_loss(logp, sequence_log_ratio, advantage, algorithm)
    return (clip_loss if algorithm.loss == "clip" else cispo_loss)(logp, old, advantage, algorithm)


def clip_loss(logp: Tensor, old: Tensor, advantage: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347) with separate bounds (DAPO), optionally dual clip (1912.09729)."""
    import torch

    loss, clipped = _surrogate(log_ratio(logp, old).exp(), advantage, algorithm)
    if algorithm.dual_clip:
        cap = -advantage * algorithm.dual_clip
        clipped = clipped | ((advantage < 0) & (loss > cap))
        loss = torch.where(advantage < 0, torch.minimum(loss, cap), loss)
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
    import torch

    low, high = algorithm.clip_bounds
    unclipped, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
    return TokenLoss(torch.maximum(unclipped, clipped), clipped > unclipped)


def kl_k3(logp: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per sampled token: never negative, low variance."""
    log_ratio_to_reference = (reference - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_to_reference.exp() - log_ratio_to_reference - 1


def log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    """log(policy / old), bounded so that its exponential is finite."""
    return (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weights(sequence: NDArray[np.int32], num_sequences: int, algorithm: AlgorithmConfig) -> NDArray[np.float32]:
    """Returns the weight [M] of each token's loss. The batch's loss is the weighted sum, for any micro-batches.

    `sequence` [M] numbers the (episode, role) of each token. token_mean: 1 / M. sequence_mean: 1 / (tokens of the
    sequence x sequences). constant: 1 / (constant x sequences), Dr. GRPO (2503.20783).
    """
    aggregation = algorithm.loss_aggregation
    if aggregation == "token_mean":
        return np.full(len(sequence), 1 / len(sequence), np.float32)
    if aggregation == "constant":
        return np.full(len(sequence), 1 / (algorithm.constant * num_sequences), np.float32)
    _, inverse, counts = np.unique(sequence, return_inverse=True, return_counts=True)
    return (1 / (counts[inverse] * num_sequences)).astype(np.float32)


def correction_weights(
    proximal: NDArray[np.float32], behaviour: NDArray[np.float32], algorithm: AlgorithmConfig
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Returns the weight [M] of each token's loss, and the tokens [M] that count in the loss's denominators.

    `rho = exp(proximal - behaviour)` compares the learner's log-probability at the start of the batch with the one at
    sampling. They differ for older weights and for another engine.

    * `tis` truncated importance sampling: `min(rho, high)` (IMPALA's truncation, arXiv 1802.01561, on tokens).
    * `icepop`: rho inside `[low, high]`, 0 outside; every token still counts (2510.18855).
    * `mis` masked importance sampling: rho inside `[low, high]`; a token outside does not count.
    * `none`: 1.
    """
    every = np.ones(len(proximal), bool)
    if algorithm.correction == "none":
        return np.ones(len(proximal), np.float32), every
    rho = np.exp(np.clip(proximal.astype(np.float64) - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)).astype(np.float32)
    if algorithm.correction == "tis":
        return np.minimum(rho, np.float32(algorithm.correction_high)), every
    inside = (rho >= algorithm.correction_low) & (rho <= algorithm.correction_high)
    return np.where(inside, rho, np.float32(0)), every if algorithm.correction == "icepop" else inside
