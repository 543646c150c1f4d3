"""Bodies of `agentjet look`: the lists of its runs and studies, and comparisons."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agentjet.protocol.base import Response
from agentjet.protocol.control import EvaluationView


class LookedRunView(Response):
    """A run, as a line of a list."""

    name: str
    title: str
    """The path or the URL that it was opened with."""
    is_served: bool
    """True if another server answers for it; false if its files are read."""
    error: str = ""
    """Why it cannot be read. Then the following fields are missing."""
    model: str = ""
    waiting_for: str = ""
    policy_version: int | None = None
    episodes: dict[str, int] = Field(default_factory=dict)
    steps: int | None = None
    newest_step: float | None = None
    """Unix seconds."""
    reward: float | None = None
    """`reward/mean` of the newest step."""


class LookedStudyView(Response):
    """A study, as a line of a list."""

    name: str
    title: str
    error: str = ""
    """Why it cannot be read. Then `summary` is null."""
    summary: dict[str, Any] | None = None


class LookView(Response):
    """The runs and the studies of `agentjet look`."""

    runs: list[LookedRunView]
    studies: list[LookedStudyView]


class ComparedRunView(Response):
    """A run in a comparison."""

    name: str
    title: str
    figures: dict[str, float | None]
    """As `agentjet compare` prints them."""
    evaluations: list[EvaluationView]


class ComparisonView(Response):
    """Runs side by side."""

    runs: list[ComparedRunView]
    settings: dict[str, list[Any]]
    """The settings that differ, with the value in each run; null where a run has none."""
