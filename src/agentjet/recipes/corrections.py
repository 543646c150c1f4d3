"""Corrections for tokens that other weights, or another engine, sampled.

The ratio of a token is the learner's probability at the start of the batch over the one at sampling. Shapes: M targets.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentjet.recipes.losses import MAX_LOG_RATIO

Level = Literal["token", "sequence", "geometric"]
"""The ratio by which a token is corrected: its own, or the product or the geometric mean over its sequence."""


class Correction(NamedTuple):
    """The weight [M] of each token's loss, and the tokens [M] that count in the loss's denominators."""

    weight: NDArray[np.float32]
    counts: NDArray[np.bool_]


def tis(rho: NDArray[np.float32], low: float, high: float) -> Correction:
    """Truncated importance sampling: `min(rho, high)` (IMPALA's truncation, arXiv 1802.01561, on tokens)."""
    return Correction(np.minimum(rho, np.float32(high)), np.ones(len(rho), bool))


def icepop(rho: NDArray[np.float32], low: float, high: float) -> Correction:
    """rho inside `[low, high]`, 0 outside. Every token counts (2510.18855)."""
    return Correction(mis(rho, low, high).weight, np.ones(len(rho), bool))


def mis(rho: NDArray[np.float32], low: float, high: float) -> Correction:
    """Masked importance sampling: rho inside `[low, high]`. A token outside does not count."""
    inside = (rho >= low) & (rho <= high)
    return Correction(np.where(inside, rho, np.float32(0)), inside)


CORRECTIONS = {"tis": tis, "icepop": icepop, "mis": mis}
"""By the name in `correction`."""


def importance_ratio(
    proximal: NDArray[np.float32],
    behaviour: NDArray[np.float32],
    sequence: NDArray[np.int32] | None = None,
    level: Level = "token",
) -> NDArray[np.float32]:
    """Returns `exp(proximal - behaviour)` [M], or its product or geometric mean over each token's sequence.

    Source: verl's rollout correction. `sequence` [M] is needed for levels above tokens.
    """
    log_ratio = np.clip(proximal.astype(np.float64) - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level != "token":
        assert sequence is not None
        sums: NDArray[np.float64] = np.bincount(sequence, log_ratio).astype(np.float64)
        if level == "geometric":
            sums = sums / np.maximum(1, np.bincount(sequence))
        log_ratio = np.clip(sums, -MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence]
    return np.exp(log_ratio).astype(np.float32)


def vetoed(rho: NDArray[np.float32], sequence: NDArray[np.int32], veto: float) -> NDArray[np.bool_]:
    """Returns True [M] for the tokens of sequences in which any token's ratio is below `veto` (slime)."""
    return np.isin(sequence, sequence[rho < veto])
