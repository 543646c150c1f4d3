"""Held-out plays that failed: each is played again, so that a score is of plays that did not fail. An outcome has their
number among its signals, at the steps that were scored; those of before they were counted have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from agentjet.research.models import Outcome

PLAYS = "held_out/plays"
FAILED = "held_out/failed"
MANY = 0.1
"""A larger share of failed plays is said beside the verdict: what is scored may be a choice among plays."""


class Plays(NamedTuple):
    """So many, of which so many failed."""

    num: int = 0
    failed: int = 0

    @property
    def share(self) -> float:
        return self.failed / self.num if self.num else 0.0


def plays_of(outcomes: Iterable[Outcome]) -> Plays:
    """Of the scorings at the last steps, which the scores are."""
    ended = list(outcomes)
    num, failed = (
        sum(int((outcome.signals.get(name) or (0,))[-1] or 0) for outcome in ended) for name in (PLAYS, FAILED)
    )
    return Plays(num, failed)
