"""Policy losses per token, on sampled tokens only. Pure functions of log-probabilities; formulas with their sources.

Shapes: M targets. `logp` is the policy's, with gradient; `old` the log-probability the token was sampled with; both
under the temperature of the sampling. How token losses become one number is `weights`.

Each loss also returns which tokens it clipped, because only the loss has the ratio and the bounds that it compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentjet.config import AlgorithmConfig
from agentjet.recipes.correction import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


class TokenLoss(NamedTuple):
    """The losses [M], and True [M] where the clip changed a token's gradient."""

    loss: Tensor
    clipped: Tensor


def policy_loss(
    logp: Tensor, old: Tensor, sequence_log_ratio: Tensor | None, advantage: Tensor, algorithm: AlgorithmConfig
) -> TokenLoss:
    """The loss that `algorithm.loss` names. GSPO needs `sequence_log_ratio`, the others ignore it."""
    if algorithm.loss == "gspo":
        assert sequence_log_ratio is not None
        return gspo_loss(logp, sequence_log_ratio, advantage, algorithm)
    return (clip_loss if algorithm.loss == "clip" else cispo_loss)(logp, old, advantage, algorithm)


def clip_loss(logp: Tensor, old: Tensor, advantage: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """PPO's clipped surrogate with separate bounds (arXiv 1707.06347; DAPO's clip-higher), dual clip optional
    (1912.09729).
    """
    import torch

    loss, clipped = _surrogate(log_ratio(logp, old).exp(), advantage, algorithm)
    if algorithm.dual_clip:
        cap = -advantage * algorithm.dual_clip
        clipped = clipped | ((advantage < 0) & (loss > cap))
        loss = torch.where(advantage < 0, torch.minimum(loss, cap), loss)
    return TokenLoss(loss, clipped)


def gspo_loss(logp: Tensor, sequence_log_ratio: Tensor, advantage: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """GSPO (2507.18071): the clipped surrogate on the sequence's geometric mean ratio.

    `sequence_log_ratio` [M] is each token's sequence mean of logp - old, without gradient; gradient flows through the
    token.
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
    """Weight [M] of each token's loss, so that the batch's loss is their weighted sum, however the batch is cut up.

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
