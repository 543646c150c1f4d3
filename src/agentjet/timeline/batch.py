"""A batch as the learner of a policy gets it: the forest, and the facts about its episodes and calls. NumPy only.

Facts are rewards, groups, roles and turns. The recipe of the run turns them into columns of the forest next to the
weights. Shapes: E episodes, R roles, C calls, M targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentjet.timeline.forest import Forest, IntArray


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the E episodes and C calls of a batch. The column `call` of the forest numbers the calls."""

    groups: IntArray
    """The group [E] of each episode. Episodes of a group are compared with each other."""
    rewards: NDArray[np.float64]
    """The reward [E] of the policy in each episode."""
    roles: tuple[str, ...]
    """The names of the policy's R roles."""
    role_rewards: NDArray[np.float64]
    """The reward [E, R] that an episode names for a role; NaN if it names none."""
    spoke: NDArray[np.bool_]
    """True [E, R] if the role has trained calls in the episode."""
    call_episode: IntArray
    """The episode [C] of each call."""
    call_role: IntArray
    """The role [C] of each call."""
    call_turn: IntArray
    """The number [C] of each call among the calls of its role in its episode, from 0."""
    call_rewards: NDArray[np.float64]
    """The reward [C] of each call; NaN if the episode names none."""
    call_truncated: NDArray[np.bool_]
    """True [C] if the call ended at its token limit."""
    tasks: tuple[tuple[str, str], ...]
    """Task set and task id [E] of each episode."""
    seconds: NDArray[np.float64]
    """Seconds [E] from begin to finish."""
    metrics: Mapping[str, NDArray[np.float64]]
    """The metrics that clients sent with the rewards: one value [E] by name; NaN if an episode has none."""
    code_versions: tuple[str, ...]
    """Version [E] of the agent's code."""
    task_means: NDArray[np.float64] | None = None
    """Mean reward [E] of earlier episodes of the task when its group began; NaN before the first group of a task."""

    def of_tokens(self, values_ER: NDArray[np.float64], forest: Forest) -> NDArray[np.float64]:
        """Returns for each target [M] the value of its episode and role."""
        values_C: NDArray[np.float64] = values_ER[self.call_episode, self.call_role]
        return values_C[forest["call"]]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The forest of a batch for one policy, with the facts from which a recipe computes its columns.

    `id` is the policy version before the batch. Without `facts` the forest already has all columns.
    """

    id: int
    forest: Forest
    facts: Facts | None = None
    state: Mapping[str, float] = field(default_factory=dict)
    """State of the recipe before the batch. The learner adds it."""
    taught: Forest | None = None
    """The targets in the context that the teacher sees, if it sees another one: the column `target` is the index of
    each among those of `forest`. Others are not graded."""
