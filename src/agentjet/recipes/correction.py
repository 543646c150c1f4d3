"""Weights that correct for tokens sampled by other weights than those that learn: older ones, or another engine's.

`rho = exp(proximal - behaviour)`: the learner's log-probability at the beginning of the batch against the one recorded
at sampling. Pure functions; shapes: M targets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentjet.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Beyond it a ratio of probabilities is taken for this one."""


def correction_weights(
    proximal: NDArray[np.float32], behaviour: NDArray[np.float32], algorithm: AlgorithmConfig
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The weight [M] of each token's loss, and which tokens [M] count in the loss's denominators.

    * `tis` truncated importance sampling: `min(rho, high)` (IMPALA's truncation, arXiv 1802.01561, on tokens).
    * `icepop`: rho inside `[low, high]`, 0 outside; every token still counts (2510.18855).
    * `mis` masked importance sampling: rho inside `[low, high]`; a token outside does not count at all.
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
