"""Advantages: how much better an episode did than the others of its group. NumPy only; G episodes of one group.

All three subtract the group's mean from the reward. So a constant added to every reward changes nothing, and equal
rewards give advantage 0. A group of one also gets 0; some implementations return the raw reward instead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from agentjet.config import AlgorithmConfig
from agentjet.timeline.batch import Facts

FloatArray = NDArray[np.float64]
EPS = 1e-6
"""Limits advantages at tiny standard deviations. verl uses the same value."""


def grpo(rewards_G: FloatArray) -> FloatArray:
    """`(r - mean) / (std + eps)` with the sample standard deviation (GRPO, arXiv 2402.03300, as verl computes it)."""
    centred_G = dr_grpo(rewards_G)
    if len(rewards_G) < 2:
        return centred_G
    return np.asarray(centred_G / (np.std(rewards_G, ddof=1) + EPS))


def dr_grpo(rewards_G: FloatArray) -> FloatArray:
    """`r - mean`: GRPO without the division, which favours very easy and very hard tasks (Dr. GRPO, 2503.20783)."""
    rewards_G = np.asarray(rewards_G, np.float64)
    if np.all(rewards_G == rewards_G[0]):
        return np.zeros_like(rewards_G)  # exactly 0: rounding errors of mean and std would give other values
    centred_G: FloatArray = rewards_G - rewards_G.mean()
    return centred_G


def rloo(rewards_G: FloatArray) -> FloatArray:
    """`r` minus the mean of the others, which is `n / (n - 1) * (r - mean)` (RLOO, arXiv 2402.14740)."""
    size = len(rewards_G)
    return dr_grpo(rewards_G) * (size / (size - 1) if size > 1 else 0.0)


ADVANTAGES: dict[str, Callable[[FloatArray], FloatArray]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""By the name in `job.algorithm.advantage`."""


def sequence_advantages(facts: Facts, algorithm: AlgorithmConfig) -> FloatArray:
    """The advantage [E, R] of each episode and role, compared within the groups."""
    advantages_ER = np.zeros(facts.spoke.shape)
    for group in np.unique(facts.groups):
        members = np.flatnonzero(facts.groups == group)
        for role in np.flatnonzero(facts.spoke[members].any(0)):
            advantages_ER[members, role] = role_advantages(
                facts.rewards[members], facts.role_rewards[members, role], facts.spoke[members, role], algorithm
            )
    return advantages_ER


def role_advantages(
    rewards_G: FloatArray, named_G: FloatArray, spoke_G: NDArray[np.bool_], algorithm: AlgorithmConfig
) -> FloatArray:
    """The advantages [G] of a group's members for one role.

    `named_G` is the reward that a member names for the role, or NaN. If any member names one, those members are
    compared by it. Otherwise all are compared by the episode's reward. A member that is not compared has advantage 0.

    With `algorithm.by_role` only members in which the role spoke are compared (Dr. MAS, github.com/langfengQ/DrMAS).
    Each member counts once, while Dr. MAS counts calls.
    """
    compared_G = spoke_G.copy() if algorithm.by_role else np.ones(len(rewards_G), bool)
    is_named_G = ~np.isnan(named_G)
    if is_named_G.any():
        compared_G &= is_named_G
    advantages_G = np.zeros(len(rewards_G))
    if compared_G.any():
        values_G = np.where(is_named_G, named_G, rewards_G)[compared_G]
        advantages_G[compared_G] = ADVANTAGES[algorithm.advantage](values_G)
    return advantages_G
