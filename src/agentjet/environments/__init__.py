"""Environments that train unmodified: `load("gymnasium:FrozenLake-v1")` gives tasks, held-out tasks and an agent.

A kind adapts a library, which is imported in the processes of a pool. `docs/environments.md` has the five lines of each
kind, and a kind of another package.
"""

from agentjet.environments.environment import Environment, load, mixture
from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Game, Kind, Observation, World
from agentjet.environments.model import ContextFull, Model, ModelRefused

__all__ = [
    "ContextFull",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentTask",
    "Game",
    "Kind",
    "Model",
    "ModelRefused",
    "Observation",
    "World",
    "load",
    "mixture",
]
