"""Isolated places for code that nobody vouches for: bubblewrap with Landlock beneath."""

from agentjet.sandbox.check import missing
from agentjet.sandbox.process import AsyncProcess, Process
from agentjet.sandbox.sandbox import Limits, Sandbox, origin_of, programs

__all__ = ["AsyncProcess", "Limits", "Process", "Sandbox", "missing", "origin_of", "programs"]
