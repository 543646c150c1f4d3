"""The parts of a study as frozen dataclasses.

    Study ── Arm ── Knob          fixed before the first trial: what is compared, and how it will be judged
      │       └── Trial ── Outcome    one run of an arm with one seed, and how it ended
      └── Hypothesis ── Finding       a claim, and what the outcomes show about it

The id of a record is the hash of its content, so it is equal in every process. Records are stored as JSON, never
pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from agentjet.errors import AgentJetError
from agentjet.research.records import Record, Setting, hash_of, refuse
from agentjet.research.subject import Subject

Phase = Literal["explore", "confirm"]
End = Literal["completed", "diverged", "infra_failed", "arm_failed"]
Verdict = Literal["supported", "refuted", "practically_equivalent", "inconclusive"]
Origin = Literal["prior", "llm", "human"]
Sign = Literal["+", "-", "0", "?"]
EXPECTED: Mapping[Sign, str] = {
    "+": "higher",
    "-": "lower",
    "0": "no difference that matters",
    "?": "nothing is known",
}


MOST_COMBINATIONS = 16
"""Maximum combinations of an arm's knobs. All are tried."""


@dataclass(frozen=True)
class Knob(Record):
    """A nuisance setting that each arm tunes for itself, over the same values."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Arm(Record):
    """One side of a comparison: changes to the base settings, the code it runs, and knobs to tune first."""

    name: str
    changes: Setting = field(default_factory=dict)
    nuisance: tuple[Knob, ...] = ()
    code: str = ""
    """Hash of the agent's code; empty if arms do not differ in code."""

    @property
    def num_settings(self) -> int:
        """Number of combinations of its knobs."""
        return math.prod(len(knob.values) for knob in self.nuisance)


@dataclass(frozen=True)
class Hypothesis(Record):
    """`arm` scores higher than `against`, by more than the study's smallest effect of interest."""

    claim: str
    arm: str
    against: str
    confirmatory: bool = True
    origin: Origin = "prior"
    sign: Sign | None = None
    """Expected sign of the difference, if one is declared. `sign` and `why` decide nothing."""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Omits an empty expectation: the id does not depend on it."""
        content = super().to_json()
        return {key: value for key, value in content.items() if key not in ("sign", "why") or value}


@dataclass(frozen=True)
class Study(Record):
    """A question with everything that decides its answer, fixed before the data.

    Costs are in full runs: a trial of a third of the length costs 1/3. `sesoi` is in units of the metric.
    """

    topic: str
    metric: str
    sesoi: float
    """The smallest effect of interest. A smaller difference does not matter."""
    arms: tuple[Arm, ...]
    hypotheses: tuple[Hypothesis, ...]
    budget: float
    reserve: float = 0.4
    """The share of the budget that tuning may not spend."""
    alpha: float = 0.05
    """Approximate chance of any wrong confirmatory verdict, over all looks. The chance is higher if `sesoi` is less
    than a fifth of the spread between seeds, or if the arms spread unequally (`bench.error_rates`).
    """
    looks: tuple[int, ...] = (4, 8, 12)
    """Seeds per arm at which the scores are tested."""
    rungs: tuple[float, ...] = (1 / 9, 1 / 3, 1.0)
    """Fractions of a full run at which tuning drops the worse candidates."""
    evaluator: str = ""
    """Hash of the code that computes the metric."""
    seed: int = 0
    subject: Subject | None = None
    """The trained subject; None if the runner decides."""

    def to_json(self) -> dict[str, Any]:
        """Omits a missing subject, so that ids and the seeds derived from them do not change."""
        content = {**super().to_json(), "hypotheses": tuple(claim.to_json() for claim in self.hypotheses)}
        del content["subject"]
        return content if self.subject is None else {**content, "subject": self.subject.to_json()}

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        refuse(len(set(names)) < len(names), f"arms = {names}: two arms have the same name; rename one")
        for hypothesis in self.hypotheses:
            for name in (hypothesis.arm, hypothesis.against):
                refuse(name not in names, f"hypotheses: {name!r} is not an arm of the study; the arms are {names}")
            refuse(hypothesis.arm == hypothesis.against, f"hypotheses: {hypothesis.arm!r} is compared with itself")
        refuse(not 0 < self.sesoi < math.inf, f"sesoi = {self.sesoi}: give the smallest relevant difference, above 0")
        refuse(not 0 < self.alpha < 0.5, f"alpha = {self.alpha}: choose one between 0 and 0.5, such as 0.05")
        refuse(not 0 <= self.reserve < 1, f"reserve = {self.reserve}: choose a share from 0 up to, not including, 1")
        refuse(not 0 < self.budget < math.inf, f"budget = {self.budget}: give a number of full runs above 0")
        rising = list(self.looks) == sorted(set(self.looks)) and bool(self.looks)
        refuse(not rising or self.looks[0] < 4, f"looks = {self.looks}: seeds must rise and start at 4 or more")
        climbing = list(self.rungs) == sorted(set(self.rungs)) and bool(self.rungs) and self.rungs[0] > 0
        refuse(not climbing or self.rungs[-1] != 1.0, f"rungs = {self.rungs}: fractions must rise and end with 1.0")
        for arm in self.arms:
            for knob in arm.nuisance:
                refuse(not knob.values, f"nuisance knob {knob.name!r} has no values to try")
            refuse(
                arm.num_settings > MOST_COMBINATIONS,
                f"arm {arm.name!r} would tune {arm.num_settings} combinations of its knobs: give at most "
                f"{MOST_COMBINATIONS}, with fewer values or fewer knobs",
            )

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Trial(Record):
    """A run of an arm with one seed, up to a fraction of its length. Its id is its launch key.

    Trials that differ only in `fidelity` continue each other: the shorter one is a prefix of the longer.
    """

    study: str
    arm: str
    setting: Setting
    """All differences from the base: the arm's changes and the tuned knobs."""
    seed: int
    phase: Phase
    fidelity: float = 1.0

    @cached_property
    def run(self) -> str:
        """Name of the run that it continues."""
        return hash_of([self.study, self.arm, dict(self.setting), self.seed, self.phase])


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
class Outcome(Record):
    """The end of a trial. A diverged run is a result with a score; an infrastructure failure has no score.

    `arm_failed` has no score either: the arm's own code failed, and a repeat would end the same way. Studies whose
    evaluator plays do not use it, because an agent also fails if its environment does.
    """

    trial: str
    end: End
    score: float | None = None
    """The metric at the trial's last step, not its best value."""
    curve: tuple[float, ...] = ()
    """The metric along the run, for the figures."""
    signals: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Training metrics by name, one value per step. None if a step reported no finite value."""
    settings: Setting = field(default_factory=dict)
    """The settings in effect on the server. Empty if the runner does not report them."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers: see `agentjet.research.diagnosis`; of judged subjects: `JudgedEpisodes`."""
    note: str = ""
    transcripts: tuple[Transcript, ...] = ()
    """Best, median and worst training episodes of a judged subject."""
    by_task: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    """By training task of a judged subject: least and highest reward, and number of episodes."""

    def __post_init__(self) -> None:
        refuse(
            (self.score is None) != (self.end in ("infra_failed", "arm_failed")),
            f"outcome of trial {self.trial}: end = {self.end!r} with score = {self.score}: every run has a score, "
            "and only a failure of the infrastructure or of the arm's code has none",
        )
        refuse(self.score is not None and not math.isfinite(self.score), f"outcome: score = {self.score} is not finite")


@dataclass(frozen=True)
class Diagnosis(Record):
    """The cause of a problem in a trial: what was seen, and what it means."""

    trial: str
    cause: str
    """A cause from `diagnosis.toml`, or one of the run itself: a lost server, a dead environment, an equal run."""
    seen: str
    meaning: str = ""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the symptom, by name."""


@dataclass(frozen=True)
class Finding(Record):
    """The result of a hypothesis. The verdict was read from this interval."""

    hypothesis: str
    verdict: Verdict
    reason: str
    estimate: float | None = None
    """Mean of `arm` minus mean of `against`, over the confirming seeds only."""
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """Nominal level of the interval at this look. Over all looks it is about 1 - 2 * (the claim's share of alpha),
    because alpha is one-sided.
    """
    p_value: float | None = None
    """Welch's two-sided p-value; None if no scores spread but runs differ. Compare it with 1 - `confidence` of the
    look, not with alpha.
    """
    seeds: int = 0
    """Per arm."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """By arm, the setting that was judged."""
    trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class Address(Record):
    """URL of a run, and the client token or the admin token."""

    url: str
    token: str


class Refused(AgentJetError):
    """A proposal was refused. The message states the reason for the proposer."""
