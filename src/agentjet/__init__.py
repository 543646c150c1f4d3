"""AgentJet: reinforcement learning for the language models inside agents.

Importing this package loads no other module: each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentjet.client import (
        AsyncEpisode,
        AsyncSwarm,
        Endpoint,
        Episode,
        EvalReport,
        Swarm,
        TrainReport,
    )
    from agentjet.errors import AgentJetError
    from agentjet.types import Reward, Task

__version__ = "0.1.0"

_MODULES = {
    "AgentJetError": "agentjet.errors",
    "AsyncEpisode": "agentjet.client",
    "AsyncSwarm": "agentjet.client",
    "Episode": "agentjet.client",
    "Endpoint": "agentjet.client",
    "EvalReport": "agentjet.client",
    "Reward": "agentjet.types",
    "Swarm": "agentjet.client",
    "Task": "agentjet.types",
    "TrainReport": "agentjet.client",
}

__all__ = [
    "AgentJetError",
    "AsyncEpisode",
    "AsyncSwarm",
    "Episode",
    "Endpoint",
    "EvalReport",
    "Reward",
    "Swarm",
    "Task",
    "TrainReport",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
