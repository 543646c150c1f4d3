"""The client: `Swarm`, `AsyncSwarm`, their episodes, and the rollout runner behind `train` and `evaluate`. httpx and
pydantic only."""

from agentjet.client.asynchronous import AsyncSwarm
from agentjet.client.code import Code, Version
from agentjet.client.command import Command, CommandFailed, Result
from agentjet.client.connection import Retry
from agentjet.client.endpoint import Endpoint
from agentjet.client.episode import AsyncEpisode, Episode
from agentjet.client.estimates import Estimate, pass_at_k, wilson_interval
from agentjet.client.report import CodeChange, EpisodeResult, EvalReport, Evaluation, Step, TeamReport, TrainReport
from agentjet.client.rollout import Agent, AgentFailing
from agentjet.client.synchronous import Swarm
from agentjet.client.team import AsyncTeam
from agentjet.client.team_episode import AsyncTeamEpisode, TeamEpisode
from agentjet.client.team_synchronous import Team

__all__ = [
    "Agent",
    "AgentFailing",
    "AsyncEpisode",
    "AsyncSwarm",
    "AsyncTeam",
    "AsyncTeamEpisode",
    "Code",
    "CodeChange",
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
    "Step",
    "Swarm",
    "Team",
    "TeamEpisode",
    "TeamReport",
    "TrainReport",
    "Version",
    "pass_at_k",
    "wilson_interval",
]
