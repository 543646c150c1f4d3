"""The parts of a campaign: interventions, observations, and what a proposer may read.

    Campaign ── Observation      a run of one commit: curve, signals, transcripts
       │        └── Intervention   a change of the subject, with its reason and its prediction
       │             └── Study       the judge's comparison of two commits
       └── base commit: the subject with every change that was confirmed

An intervention changes the subject's files only. Model, held-out tasks, evaluator and lengths of a run are the judge's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from agentjet.research.records import Record, Setting, refuse

Kind = Literal["settings", "recipe", "agent", "prompt", "reward", "curriculum", "tasks"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LONGEST_NAME = 160
LONGEST_REASON = 2_000
LONGEST_PATCH = 200_000


@dataclass(frozen=True)
class Intervention(Record):
    """A change of the subject and why it is worth a try. Its arm is a commit."""

    name: str
    kind: Kind
    changes: Setting = field(default_factory=dict)
    """Settings of `[settings]` in subject.toml, by dotted name."""
    patch: str = ""
    """A unified diff of the subject's folder; empty if only settings change."""
    why: str = ""
    predicts: str = ""
    refutes: str = ""
    """Result that would refute the hypothesis."""
    evidence: tuple[int, ...] = ()
    """Numbers of the notebook's entries that the reason refers to."""

    def __post_init__(self) -> None:
        refuse(
            not 1 <= len(self.name) <= LONGEST_NAME, f"name = {self.name[:80]!r}: give 1 to {LONGEST_NAME} characters"
        )
        refuse(not self.changes and not self.patch, f"{self.name}: it changes nothing; give settings or a patch")
        refuse(len(self.patch) > LONGEST_PATCH, f"{self.name}: the patch has more than {LONGEST_PATCH} characters")
        reason = max(map(len, (self.why, self.predicts, self.refutes)))
        refuse(reason > LONGEST_REASON, f"{self.name}: a reason has more than {LONGEST_REASON} characters")


@dataclass(frozen=True)
class Finish(Record):
    """A proposer has nothing left to try."""

    reason: str


Proposal = Intervention | Finish


@dataclass(frozen=True)
class Order(Record):
    """A run that the laboratory makes: a commit of the subject, a seed, and a share of the full length."""

    commit: str
    seed: int
    share: float = 1.0


@dataclass(frozen=True)
class Sign(Record):
    """A cause that a run shows: see `remedies.toml`."""

    cause: str
    seen: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Transcript(Record):
    """A training episode at the end of the run."""

    place: Literal["best", "median", "worst"]
    task: Any
    """The task's payload, without the keys that only the judge sees."""
    messages: tuple[Mapping[str, Any], ...]
    """The conversation of the last call, with the answer."""
    reward: float
    """As training paid."""
    judged: float | None = None
    """Score of the judge for the same messages."""


@dataclass(frozen=True)
class Observation(Record):
    """The end of a run. A run that the infrastructure lost has an `error` and no score."""

    commit: str
    seed: int
    share: float = 1.0
    score: float | None = None
    """The judge's mean over the held-out tasks at the last step, played by the commit's own agent."""
    curve: tuple[float, ...] = ()
    """Such scores along the run. The first is from before the first step."""
    signals: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Training metrics by name, one value a step, with the names of a server's metrics."""
    settings: Setting = field(default_factory=dict)
    """The settings in effect on the server."""
    transcripts: tuple[Transcript, ...] = ()
    overrides: Mapping[str, float] = field(default_factory=dict)
    """By job setting, the share of calls that set another value."""
    training_reward: float | None = None
    """Mean training reward of the last steps' episodes."""
    judged_reward: float | None = None
    """The judge's mean score of the same episodes."""
    rejected: float | None = None
    """Share of the run's first and last episodes that the judge scored higher than training paid."""
    overpaid: float | None = None
    """Share of the same that training paid more than the judge's score."""
    swapped: float | None = None
    """The judge's mean score of held-out answers that were swapped between tasks, or of all answers in one if that is
    higher. A sound judge gives chance."""
    by_task: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    """By training task: least and highest reward, and number of episodes."""
    shared_tasks: int = 0
    """Held-out tasks that are also trained on."""
    error: str = ""
    """Why the infrastructure lost the run, or the subject's first error with its line."""
    subject_fails: bool = False
    """True if the error is the subject's own: a repeat would end the same way."""

    def __post_init__(self) -> None:
        refuse((self.score is None) != bool(self.error), f"observation of {self.commit}: give a score or an error")
        refuse(self.score is not None and not math.isfinite(self.score), f"observation: score = {self.score}")


@dataclass(frozen=True)
class Budget(Record):
    """The most that a campaign may spend: full runs, or hours of work. Enforced by the campaign."""

    runs: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.runs, self.hours) if value is not None]
        wrong = len(given) != 1 or not 0 < given[0] < math.inf
        refuse(wrong, f"budget: runs = {self.runs}, hours = {self.hours}: give one of them, above 0")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Reads `48h` or `500runs`. Raises `ConfigError`."""
        for unit, name in (("runs", "runs"), ("h", "hours")):
            if text.endswith(unit):
                try:
                    return cls(**{name: float(text.removesuffix(unit))})
                except ValueError:
                    break
        refuse(True, f"budget = {text!r}: give hours or full runs, such as 48h or 500runs")
        raise AssertionError


class View(Protocol):
    """The part of a campaign that a proposer may read. Nothing in it comes from held-out tasks."""

    @property
    def topic(self) -> str: ...
    @property
    def base(self) -> str:
        """The commit that the next intervention changes."""
        ...

    @property
    def observation(self) -> Observation:
        """The newest full run of the base."""
        ...

    @property
    def observed(self) -> int:
        """Number of that run's entry."""
        ...

    @property
    def tried(self) -> Set[str]:
        """Names of the interventions that were tried on this base."""
        ...

    @property
    def notebook(self) -> Sequence[Any]:
        """Entries so far: see `agentjet.research.campaign.notebook.Entry`."""
        ...

    def files(self) -> Mapping[str, str]:
        """The base's text files by path, without the judge's held-out tasks."""
        ...

    def judge_source(self) -> str:
        """Source of the evaluator, which an arm may copy as its training reward. Empty if it cannot be copied."""
        ...


class Proposer(Protocol):
    """The strategist, a language model or a coding agent."""

    name: str

    def propose(self, view: View, most: int) -> Sequence[Proposal | Any]:
        """Returns at most `most` proposals, the most promising first. The campaign checks each.

        An unusable answer is returned as text; the campaign records it as refused. Raises `ProposerAway`.
        """
        ...


class ProposerAway(Exception):
    """The proposer does not answer. The next one is asked."""
