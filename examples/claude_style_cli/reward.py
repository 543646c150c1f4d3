"""The reward of an attempt, for the agent in `train.py` and for `cli.py` run as a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentjet import Reward
from agentjet.client import Result

PARTLY = 0.1
"""Reward of an attempt that rewrote the file but fails the tests."""


def worth(solved: bool, used: Sequence[tuple[str, str]]) -> Reward:
    """1 when the tests pass in the end; `used` are the tools, and what went wrong."""
    wrote = ("write_file", "") in used
    return Reward(1.0 if solved else PARTLY * wrote, metrics={"solved": float(solved), "wrote": float(wrote)})


def score(task: Mapping[str, Any], result: Result) -> Reward:
    """The same from the output of the program."""
    *tools, verdict = result.stdout.splitlines()
    used = [(name, "" if said == "ok" else said) for name, _, said in (line.partition(": ") for line in tools)]
    return worth(verdict == "the tests pass", used)
