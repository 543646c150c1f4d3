"""Gymnasium: `gymnasium:FrozenLake-v1`. A task is a seed.

Discrete actions are an enumeration, whose names are those of the environment's `action_names` setting. Other action
spaces become a JSON schema.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from agentjet.environments.kind import EnvironmentTask, Game, Observation

ENDLESS = 100


class Gymnasium(Game):
    """A Gymnasium environment, shown as text."""

    requires: ClassVar[str] = "gymnasium>=1,<2"
    about: ClassVar[str] = "ID of a Gymnasium environment, such as FrozenLake-v1"

    make: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    action_names: tuple[str, ...] = ()
    """Names of the discrete actions, in their order; default: their numbers."""
    seed: int = 0
    """Seed of the first task; the others follow."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        self.world(EnvironmentTask("", {"seed": self.seed})).close()  # An unknown ID is an error before the run.
        for seed in itertools.islice(itertools.count(self.seed), self.num_tasks or ENDLESS):
            yield EnvironmentTask(f"seed-{seed}", {"seed": seed})

    def world(self, task: EnvironmentTask) -> GymnasiumWorld:
        return GymnasiumWorld(self, task.payload)


class GymnasiumWorld:
    def __init__(self, kind: Gymnasium, payload: Mapping[str, Any]) -> None:
        import gymnasium

        self._kind, self._seed = kind, payload["seed"]
        self._world = gymnasium.make(kind.target, **({"render_mode": "ansi"} | dict(kind.make)))

    def reset(self) -> Observation:
        state, _ = self._world.reset(seed=self._seed)
        return self._observed(state)

    def step(self, action: Any) -> Observation:
        names = self._names()
        state, reward, terminated, truncated, _ = self._world.step(names.index(action) if names else action)
        return self._observed(state, float(reward), terminated or truncated)

    def close(self) -> None:
        self._world.close()

    def _names(self) -> list[str]:
        space = self._world.action_space
        return [*(self._kind.action_names or map(str, range(space.n)))]

    def _observed(self, state: Any, reward: float = 0.0, done: bool = False) -> Observation:
        shown = self._world.render()
        return Observation(shown if isinstance(shown, str) else str(state), reward, done, actions=self._names())
