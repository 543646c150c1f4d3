"""Isolated places for code that nobody vouches for: bubblewrap with Landlock beneath."""

from agentjet.sandbox.check import missing
from agentjet.sandbox.process import Process
from agentjet.sandbox.sandbox import Limits, Sandbox, programs

__all__ = ["Limits", "Process", "Sandbox", "missing", "programs"]
