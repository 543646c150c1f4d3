"""Isolated places for untrusted code: bubblewrap with Landlock beneath."""

from agentjet.sandbox.check import attempts, holds, missing
from agentjet.sandbox.process import AsyncProcess, ProgramFolder, SandboxProcess
from agentjet.sandbox.sandbox import Limits, Sandbox, origin_of, programs

__all__ = [
    "AsyncProcess",
    "Limits",
    "ProgramFolder",
    "SandboxProcess",
    "Sandbox",
    "attempts",
    "holds",
    "missing",
    "origin_of",
    "programs",
]
