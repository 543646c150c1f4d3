"""Environments that train unmodified: `load("gymnasium:FrozenLake-v1")` gives tasks, held-out tasks and an agent.

A kind adapts a library, which is imported in the processes of a pool. `docs/environments.md` has the five lines of each
kind, and a kind of another package. The processes of kinds import no client: `Environment`, `load` and `mixture` are
imported at their first use.
"""

from typing import TYPE_CHECKING, Any

from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Game, Kind, Observation, World
from agentjet.environments.model import ContextFull, Model, ModelRefused

if TYPE_CHECKING:
    from agentjet.environments.environment import Environment, EnvironmentMixture, Played, load, mixture

__all__ = [
    "ContextFull",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentTask",
    "Game",
    "Kind",
    "EnvironmentMixture",
    "Model",
    "ModelRefused",
    "Observation",
    "Played",
    "World",
    "load",
    "mixture",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentjet.environments import environment

    return getattr(environment, name)
