"""The gateway's own work per call against the length of the conversation, in milliseconds: match, render, append.

Only the new suffix is tokenised; the rest looks at every byte of the history once. The journal's write is not in it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from agentjet.server.http import tune_python
from agentjet.types import ModelInfo
from bench.merging.replay import Played, Replay, made_up

TURNS = (1, 5, 10, 20, 50, 100, 150, 200)
AROUND = 3
"""A point is the median over this many turns before and after it, and over all repeats."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call at one length of the history."""

    turns: int
    tokens: int
    kilobytes: float
    ms: float


def curve(card: ModelInfo, repeats: int = 3, num_turns: int = TURNS[-1]) -> list[Point]:
    """The cost of a call after so many turns of one growing conversation."""
    replay = Replay(card)
    replay.play(*made_up(3))
    tune_python()  # As the server has it.
    runs = [replay.play(*made_up(num_turns))[1] for _ in range(repeats)]
    return [_point(turns, runs) for turns in TURNS if turns <= num_turns]


def microseconds_per_kilobyte(points: list[Point]) -> float:
    """The slope of the curve's longer half: what another kilobyte of history costs each call."""
    last = points[-1]
    middle = min(points[:-1], key=lambda point: abs(point.turns - last.turns / 2))
    return 1e3 * (last.ms - middle.ms) / (last.kilobytes - middle.kilobytes)


def _point(turns: int, runs: list[list[Played]]) -> Point:
    near = [played for run in runs for played in run[max(0, turns - 1 - AROUND) : turns + AROUND]]
    at = runs[0][turns - 1]
    return Point(turns, at.prompt_tokens, at.prompt_bytes / 1e3, 1e3 * statistics.median(p.seconds for p in near))
