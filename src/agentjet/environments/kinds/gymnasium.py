"""Gymnasium: `gymnasium:FrozenLake-v1`. A task is a seed.

Discrete actions are an enumeration. Other action spaces become a JSON schema. The observation is the text of
`render_mode="ansi"` where the environment has it, else the state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Game, Observation
from agentjet.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import gymnasium

ENDLESS = 100
UNBOUNDED = 1e6
"""Bound of numbers that have none: digits without end would be cut."""
ACTION_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "wait", "right"),
}
"""Names of the actions of Gymnasium's own environments, by the beginning of their IDs."""


class Gymnasium(Game):
    """A Gymnasium environment, shown as text."""

    requires: ClassVar[str] = "gymnasium>=1,<2"
    about: ClassVar[str] = "ID of a Gymnasium environment, such as FrozenLake-v1"

    make: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    action_names: tuple[str, ...] = ()
    """Names of the discrete actions, in their order; default: those of Gymnasium's documentation, or numbers."""
    decimals: int = Field(2, ge=0, le=6)
    """Decimal places of numbers in actions."""
    seed: int = Field(0, ge=0)
    """Seed of the first task; the others follow."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        self.world(EnvironmentTask("", {"seed": self.seed})).close()  # An unknown ID is an error before the run.
        for seed in itertools.islice(itertools.count(self.seed), self.num_tasks or ENDLESS):
            yield EnvironmentTask(f"seed-{seed}", {"seed": seed})

    def world(self, task: EnvironmentTask) -> GymnasiumWorld:
        return GymnasiumWorld(self, self._made(), task.payload["seed"])

    def _made(self) -> gymnasium.Env[Any, Any]:
        import gymnasium

        try:
            world = gymnasium.make(self.target, **self.make)
            if "ansi" in world.metadata.get("render_modes", ()) and "render_mode" not in self.make:
                world.close()
                world = gymnasium.make(self.target, render_mode="ansi", **self.make)
        except (gymnasium.error.UnregisteredEnv, gymnasium.error.DependencyNotInstalled) as error:
            known = [name for name in gymnasium.registry if not name.startswith("GymV2")]
            way_out = did_you_mean(self.target, known, f"there are {', '.join(known[:5])} and {len(known) - 5} more")
            is_known = self.target in known
            raise ConfigError(f"gymnasium:{self.target}: {error if is_known else f'unknown ID; {way_out}'}") from None
        return world


class GymnasiumWorld:
    def __init__(self, kind: Gymnasium, world: gymnasium.Env[Any, Any], seed: int) -> None:
        self._world, self._seed = world, seed
        self._names = action_names(world.action_space, kind)
        self._schema = None if self._names else schema_of(world.action_space, kind.decimals)
        self._range: Sequence[float] = getattr(world.unwrapped, "reward_range", (-math.inf, math.inf))

    def reset(self) -> Observation:
        state, _ = self._world.reset(seed=self._seed)
        seen = self._observed(state)
        valid = f"Actions: {', '.join(self._names)}" if self._names else f"An action matches {self._schema}"
        return Observation(f"{seen.text}\n{valid}", actions=seen.actions, schema=seen.schema)

    def step(self, action: Any) -> Observation:
        space: Any = self._world.action_space
        chosen = int(space.start) + self._names.index(action) if self._names else value_of(space, action)
        state, reward, terminated, truncated, _ = self._world.step(chosen)
        if not self._range[0] <= float(reward) <= self._range[1]:
            raise EnvironmentFailed(f"the reward {reward!r} is outside of {self._range}, the environment's own range")
        return self._observed(state, float(reward), terminated or truncated, {"truncated": float(truncated)})

    def close(self) -> None:
        self._world.close()

    def _observed(
        self, state: Any, reward: float = 0.0, done: bool = False, metrics: Mapping[str, float] | None = None
    ) -> Observation:
        shown = self._world.render() if self._world.render_mode == "ansi" else str(state)
        return Observation(str(shown), reward, done, self._names, self._schema, metrics or {})


# ---- action spaces ---------------------------------------------------------------------------------------------------


def action_names(space: Any, kind: Gymnasium) -> list[str]:
    """The names of discrete actions; empty for another space. Raises `ConfigError` for a wrong number of names."""
    if type(space).__name__ != "Discrete":
        if kind.action_names:
            raise ConfigError(f"action_names = {kind.action_names}: {kind.target} has no discrete actions")
        return []
    name = kind.target.rpartition("/")[2].rpartition("-")[0]
    documented = next((names for known, names in ACTION_NAMES.items() if name.startswith(known)), ())
    names = kind.action_names or (documented if len(documented) == space.n else ())
    if names and len({*names}) != space.n:
        raise ConfigError(f"action_names = {list(names)}: {kind.target} has {space.n} actions: give {space.n} names")
    return [*(names or map(str, range(space.start, space.start + space.n)))]


def schema_of(space: Any, decimals: int) -> dict[str, Any]:
    """The JSON schema of an action space. Raises `ConfigError` for a space without one."""
    match type(space).__name__:
        case "Discrete":
            return _integer(space.start, space.start + space.n - 1)
        case "MultiBinary":
            return _array_of(space.shape, lambda _: _integer(0, 1))
        case "MultiDiscrete":
            return _array_of(space.shape, lambda at: _integer(space.start[at], space.start[at] + space.nvec[at] - 1))
        case "Box":
            return _array_of(space.shape, lambda at: _number(space, at, decimals))
        case "Tuple":
            return _array([schema_of(inner, decimals) for inner in space.spaces])
        case "Dict":
            inner = {name: schema_of(value, decimals) for name, value in space.spaces.items()}
            return {"type": "object", "properties": inner, "required": [*inner], "additionalProperties": False}
        case name:
            raise ConfigError(
                f"the action space {name} has no JSON schema: wrap the environment so that its actions are Discrete, "
                "MultiDiscrete, MultiBinary, Box, Tuple or Dict"
            )


def _integer(low: Any, high: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": int(low), "maximum": int(high)}


def _number(space: Any, at: tuple[int, ...], decimals: int) -> dict[str, Any]:
    low, high = max(-UNBOUNDED, float(space.low[at])), min(UNBOUNDED, float(space.high[at]))
    if space.dtype.kind in "iu":
        return _integer(low, high)
    scale = 10**decimals
    bounds = {"minimum": math.ceil(low * scale - 1e-4) / scale, "maximum": math.floor(high * scale + 1e-4) / scale}
    return {"type": "number", **bounds, "multipleOf": 1 / scale}


def _array(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}


def _array_of(shape: tuple[int, ...], item: Any, at: tuple[int, ...] = ()) -> dict[str, Any]:
    """Nested arrays of this shape. `item` returns the schema at a place."""
    if not shape:
        return dict(item(at))
    return _array([_array_of(shape[1:], item, (*at, index)) for index in range(shape[0])])


def value_of(space: Any, action: Any) -> Any:
    """The action of a space from a JSON value that matches its schema."""
    import numpy

    match type(space).__name__:
        case "Tuple":
            return tuple(value_of(inner, value) for inner, value in zip(space.spaces, action, strict=True))
        case "Dict":
            return {name: value_of(inner, action[name]) for name, inner in space.spaces.items()}
        case "Discrete":
            return int(action)
        case "Box":
            return numpy.clip(numpy.asarray(action, space.dtype), space.low, space.high)
        case _:
            return numpy.asarray(action, space.dtype)
