"""The client: `Swarm`, `AsyncSwarm`, their episodes, and the rollout runner behind `train` and `evaluate`. httpx and
pydantic only."""

from agentjet.client.asynchronous import AsyncSwarm
from agentjet.client.code import Code, Version
from agentjet.client.command import Command, CommandFailed, Result
from agentjet.client.connection import Retry
from agentjet.client.episode import AsyncEpisode, Episode
from agentjet.client.report import CodeChange, EpisodeResult, EvalReport, Step, TrainReport, wilson_interval
from agentjet.client.rollout import Agent, AgentFailing
from agentjet.client.synchronous import Swarm

__all__ = [
    "Agent",
    "AgentFailing",
    "AsyncEpisode",
    "AsyncSwarm",
    "Code",
    "CodeChange",
    "Command",
    "CommandFailed",
    "Episode",
    "EpisodeResult",
    "EvalReport",
    "Result",
    "Retry",
    "Step",
    "Swarm",
    "TrainReport",
    "Version",
    "wilson_interval",
]
