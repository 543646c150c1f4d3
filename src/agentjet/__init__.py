"""AgentJet: reinforcement learning for the language models inside agents.

Importing this package loads no other module: each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentjet.client import AsyncEpisode, AsyncSwarm, Endpoint, Episode, EvalReport, Swarm, TrainReport
    from agentjet.errors import AgentJetError
    from agentjet.types import Reward, Task

__version__ = "0.2.0.dev0"

__all__ = [
    "AgentJetError",
    "AsyncEpisode",
    "AsyncSwarm",
    "Endpoint",
    "Episode",
    "EvalReport",
    "Reward",
    "Swarm",
    "Task",
    "TrainReport",
    "__version__",
]
_MODULES = {"AgentJetError": "errors", "Reward": "types", "Task": "types"}
"""Modules of the names that are not in `client`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"agentjet.{_MODULES.get(name, 'client')}"), name)


def __dir__() -> list[str]:
    return __all__
