"""A batch as the learner of a policy gets it: the forest, and the facts about its episodes and calls. NumPy only.

Facts are rewards, groups, roles and turns. The recipe of the run turns them into columns of the forest next to the
weights. Shapes: E episodes, R roles, C calls, M targets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentjet.timeline.forest import Forest, IntArray

TYPES: dict[str, type[np.generic]] = {"rewards": np.float64, "role_rewards": np.float64, "spoke": np.bool_}
"""Types of the arrays of `Facts`. All others are int32."""


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

    def to_wire(self) -> dict[str, Any]:
        """A dict of byte strings, for the worker's pipe."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "roles"}
        return {"roles": list(self.roles), **{name: array.tobytes() for name, array in arrays.items()}}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Facts:
        roles = tuple(wire["roles"])
        arrays: dict[str, Any] = {
            name: np.frombuffer(values, TYPES.get(name, np.int32)) for name, values in wire.items() if name != "roles"
        }
        for name in ("role_rewards", "spoke"):
            arrays[name] = arrays[name].reshape(len(arrays["rewards"]), len(roles))  # perhaps [E, 0]
        return cls(roles=roles, **arrays)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The forest of a batch for one policy, with the facts from which a recipe computes its columns.

    `id` is the policy version before the batch. Without `facts` the forest already has all columns.
    """

    id: int
    forest: Forest
    facts: Facts | None = None

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain numbers and byte strings, for the worker's pipe."""
        facts = None if self.facts is None else self.facts.to_wire()
        return {"id": self.id, "forest": self.forest.to_wire(), "facts": facts}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> TrainingBatch:
        facts = None if wire["facts"] is None else Facts.from_wire(wire["facts"])
        return cls(wire["id"], Forest.from_wire(wire["forest"]), facts)
