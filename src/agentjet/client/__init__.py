"""The client: `Swarm`, `AsyncSwarm`, their episodes, and the rollout runner behind `train` and `evaluate`.

Needs httpx and pydantic only.
"""

from agentjet.client.agent_source import AgentSource, AgentVersion
from agentjet.client.command import Command, CommandFailed, Result
from agentjet.client.connection import Retry
from agentjet.client.episode import AsyncEpisode, Endpoint, Episode
from agentjet.client.report import (
    CodeChange,
    EpisodeResult,
    Estimate,
    EvalReport,
    Evaluation,
    Step,
    TrainReport,
    pass_at_k,
    wilson_interval,
)
from agentjet.client.rollout import Agent, AgentFailing
from agentjet.client.swarm_client import AsyncSwarm, Swarm
from agentjet.client.teacher import Collected, TeacherFailed
from agentjet.client.training import SftReport

__all__ = [
    "Agent",
    "AgentFailing",
    "AgentSource",
    "AgentVersion",
    "AsyncEpisode",
    "AsyncSwarm",
    "CodeChange",
    "Collected",
    "Command",
    "CommandFailed",
    "Endpoint",
    "Episode",
    "EpisodeResult",
    "Estimate",
    "EvalReport",
    "Evaluation",
    "Result",
    "Retry",
    "SftReport",
    "Step",
    "Swarm",
    "TeacherFailed",
    "TrainReport",
    "pass_at_k",
    "wilson_interval",
]
