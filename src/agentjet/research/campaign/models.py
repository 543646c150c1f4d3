"""The parts of a campaign: interventions, the budget, and what a proposer may read.

    Campaign ── Trial, Outcome   a run of one commit: curve, signals, transcripts
       │        └── Intervention   a change of the subject, with its reason and its prediction
       │             └── Study       the judge's comparison of two commits
       └── base commit: the subject with every change that was confirmed

An intervention changes the subject's files only. Model, held-out tasks, evaluator and lengths of a run are the judge's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from pydantic import Field

from agentjet.errors import ConfigError
from agentjet.research.journal import JournalEntry
from agentjet.research.models import Outcome, Refused
from agentjet.research.records import Record, Setting, Value, refuse

Kind = Literal["settings", "recipe", "agent", "prompt", "reward", "curriculum", "tasks"]
LONGEST_NAME = 160
MAX_BUDGET = 1_000_000
"""Maximum full runs or hours."""
LONGEST_PATCH = 200_000
Reason = Annotated[str, Field(max_length=2_000)]
FIXED = ("job.seed", "job.max_steps", "job.keep_best")
"""Settings of the campaign itself."""
LENGTH = ("job.batch_size", "job.group_size")
NUMBER = re.compile(r"(?<![\w.])([-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)\s*(%?)")
CLOSE = 0.02
"""Relative difference within which a cited number counts as that of the evidence."""
TRIVIAL = 3
"""Whole numbers up to this are words, such as "one of two"."""


@dataclass(frozen=True)
class Intervention(Record):
    """A change of the subject and why it is worth a try. Its arm is a commit."""

    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    kind: Kind
    changes: Setting = field(default_factory=dict)
    """Settings of `[settings]` in subject.toml, by dotted name."""
    patch: Annotated[str, Field(max_length=LONGEST_PATCH)] = ""
    """A unified diff of the subject's folder; empty if only settings change."""
    why: Reason = ""
    predicts: Reason = ""
    refutes: Reason = ""
    """Result that would refute the hypothesis."""
    evidence: tuple[int, ...] = ()
    """Numbers of the notebook's entries that the reason refers to."""

    def __post_init__(self) -> None:
        refuse(not self.changes and not self.patch, f"{self.name}: it changes nothing; give settings or a patch")


def check_settings(made: Intervention, settings: Mapping[str, Value]) -> None:
    """`settings` are those in effect on the base."""
    for name, value in made.changes.items():
        if not name.startswith("job.") or name in FIXED:
            raise Refused(f"{name} = {value!r}: it is not the proposer's to change; give settings of the job")
    before, after = ({**settings, **changes} for changes in ({}, made.changes))
    if any(name in made.changes for name in LENGTH):
        has, wanted = (episodes(each) for each in (before, after))
        if wanted is None or wanted != has:
            raise Refused(
                f"job.batch_size x job.group_size: the base has {has} episodes a step, and arms are compared at equal "
                "episodes; change both settings"
            )


def episodes(settings: Mapping[str, Value]) -> int | None:
    """Training episodes of a batch; None without both sizes."""
    batch, group = (settings.get(name) for name in LENGTH)
    return batch * group if isinstance(batch, int) and isinstance(group, int) else None


def check_evidence(made: Intervention, entries: Sequence[JournalEntry]) -> None:
    """Every number in `why` must be one of the cited entries."""
    by_number = {entry.number: entry for entry in entries}
    if missing := [number for number in made.evidence if number not in by_number]:
        raise Refused(f"evidence = {missing}: the notebook has no such entries; cite numbers of entries")
    cited = numbers_in(" ".join(json.dumps(by_number[number].content) for number in made.evidence))
    for number in numbers_in(made.why):
        whole = number.is_integer() and abs(number) <= TRIVIAL
        if not whole and not any(close(number, known) for known in cited):
            raise Refused(f"why: {number:g} stands in none of the cited entries; cite the entry that has it")


def numbers_in(text: str) -> list[float]:
    return [float(digits.replace(",", "")) / (100 if percent else 1) for digits, percent in NUMBER.findall(text)]


def close(number: float, known: float) -> bool:
    return abs(number - known) <= CLOSE * max(abs(known), abs(number)) + 1e-12


@dataclass(frozen=True)
class Sign(Record):
    """A cause that a run shows: see `remedies.toml`."""

    cause: str
    seen: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget(Record):
    """The most that a campaign may spend: full runs, or hours of work. Enforced by the campaign."""

    runs: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.runs, self.hours) if value is not None]
        wrong = len(given) != 1 or not 0 < given[0] <= MAX_BUDGET
        shown = f"budget: runs = {self.runs}, hours = {self.hours}"
        refuse(wrong, f"{shown}: give one of them, more than 0, at most {MAX_BUDGET:,}")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Reads `48h` or `500runs`. Raises `ConfigError`."""
        given = re.fullmatch(r"([\d.]+)(runs|h)", text)
        try:
            amount = float(given[1] if given else "")
        except ValueError:
            raise ConfigError(f"budget = {text!r}: give hours or full runs, such as 48h or 500runs") from None
        return cls(runs=amount) if text.endswith("runs") else cls(hours=amount)


@dataclass(frozen=True)
class View:
    """The part of a campaign that a proposer may read. Nothing in it comes from held-out tasks."""

    topic: str
    observation: Outcome
    """The newest full run of the commit that the next intervention changes."""
    observed: int
    """Number of that run's entry."""
    tried: Set[str]
    """Names of the interventions that were tried on this commit."""
    notebook: Sequence[JournalEntry]
    files: Mapping[str, str]
    """The commit's text files by path, without the judge's held-out tasks."""
    judge_source: str
    """Source of the evaluator, which an arm may copy as its training reward."""


class Proposer(Protocol):
    """The strategist, a language model or a coding agent."""

    name: str

    def propose(self, view: View, most: int) -> Sequence[Intervention | str]:
        """Returns at most `most` proposals, the most promising first. The campaign checks each.

        An unusable answer is returned as text with the reason; the campaign records it as refused. Raises
        `ProposerAway`.
        """
        ...


class ProposerAway(Exception):
    """The proposer does not answer. The next one is asked."""
