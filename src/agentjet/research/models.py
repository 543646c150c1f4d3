"""The parts of a study as frozen dataclasses, and the actions that may be requested of it.

    Study ── Arm ── Knob          fixed before the first trial: what is compared, and how it will be judged
      │       └── Trial ── Outcome    one run of an arm with one seed, and how it ended
      └── Hypothesis ── Finding       a claim, and what the outcomes show about it

The id of a record is the hash of its content, so it is equal in every process. Records are stored as JSON, never
pickled.

An action cannot change scores, intervals, verdicts, the smallest effect of interest, alpha, the looks or the evaluator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentjet.errors import AgentJetError
from agentjet.research.records import (
    ARM_NAME,
    HEXADECIMAL,
    SETTING_NAME,
    Record,
    Setting,
    Value,
    canonical,
    refuse,
    validation_message,
)
from agentjet.research.subject import Subject

__all__ = [
    "Amendment",
    "Arm",
    "EXPECTED",
    "Diagnosis",
    "End",
    "Exchange",
    "Finding",
    "Hypothesis",
    "Knob",
    "Origin",
    "Outcome",
    "Phase",
    "Record",
    "Setting",
    "Sign",
    "Study",
    "Subject",
    "Trial",
    "Value",
    "Verdict",
    "canonical",
    "refuse",
]

Phase = Literal["explore", "confirm", "probe"]
End = Literal["completed", "pruned", "diverged", "infra_failed"]
Verdict = Literal["supported", "refuted", "practically_equivalent", "inconclusive"]
Origin = Literal["prior", "llm", "human"]
Sign = Literal["+", "-", "0", "?"]
EXPECTED: Mapping[Sign, str] = {
    "+": "higher",
    "-": "lower",
    "0": "no difference that matters",
    "?": "nothing is known",
}


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


@dataclass(frozen=True)
class Hypothesis(Record):
    """`arm` scores higher than `against`, by more than the study's smallest effect of interest."""

    claim: str
    arm: str
    against: str
    confirmatory: bool = True
    origin: Origin = "prior"
    sign: Sign | None = None
    """Expected sign of the difference. `sign` and `why` decide nothing. None in older studies."""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Omits an empty expectation, so that the ids of older studies do not change."""
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
        for knob in (knob for arm in self.arms for knob in arm.nuisance):
            refuse(not knob.values, f"nuisance knob {knob.name!r} has no values to try")

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


@dataclass(frozen=True)
class Outcome(Record):
    """The end of a trial. A diverged run is a result with a score; an infrastructure failure has no score."""

    trial: str
    end: End
    score: float | None = None
    """The metric at the trial's last step, not its best value."""
    curve: tuple[float, ...] = ()
    """The metric along the run, for the figures."""
    signals: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Training metrics by name, one value per step. None if a step reported no finite value."""
    note: str = ""

    def __post_init__(self) -> None:
        refuse(
            (self.score is None) != (self.end == "infra_failed"),
            f"outcome of trial {self.trial}: end = {self.end!r} with score = {self.score}: every run has a score, "
            "and only an infrastructure failure has none",
        )
        refuse(self.score is not None and not math.isfinite(self.score), f"outcome: score = {self.score} is not finite")


@dataclass(frozen=True)
class Diagnosis(Record):
    """The cause of a problem in a trial: what was seen, how other causes were ruled out, and what it means."""

    trial: str
    cause: str
    """A cause from `agentjet.research.diagnosis` or `agentjet.research.run_signals`."""
    seen: str
    tried: str = ""
    meaning: str = ""
    step: int | None = None
    """The first step of the symptom."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers in `seen` and `tried`, by name."""


@dataclass(frozen=True)
class Amendment(Record):
    """A request to change a study after its plan, and whether it was granted."""

    point: int
    """Number of batches of trials that had ended when the request was taken."""
    origin: Origin
    asked: Mapping[str, Any]
    """An action of this module, or an invalid request as `text`."""
    refused: str = ""
    """Reason for the refusal; empty if granted."""


@dataclass(frozen=True)
class Exchange(Record):
    """A question to a language model or a coding agent, with its answer."""

    moment: str
    question: str
    answer: str
    failed: str = ""
    """Reason why no answer came."""


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
    """Welch's two-sided p-value. Compare it with 1 - `confidence` of the look, not with alpha."""
    permutation_p: float | None = None
    seeds: int = 0
    """Per arm."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """By arm, the setting that was judged."""
    trials: tuple[str, ...] = ()


ArmName = Annotated[str, Field(pattern=ARM_NAME)]
SettingName = Annotated[str, Field(pattern=SETTING_NAME, max_length=60)]
Why = Annotated[str, Field(max_length=300)]
LONGEST_TEXT = 2_000
"""Maximum characters that are stored of a request."""


class Refused(AgentJetError):
    """A request was refused. The message states the reason for the requester."""


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class AddArm(Action):
    """Adds an arm, with the exploratory hypothesis that it scores higher than `against`."""

    kind: Literal["add_arm"] = "add_arm"
    arm: ArmName
    against: ArmName
    changes: Annotated[Mapping[SettingName, Value], Field(max_length=8)] = {}
    """Changes to the base, not to `against`."""
    code: Annotated[str, Field(pattern=HEXADECIMAL, max_length=64)] = ""
    """Hash of code that is stored in the study's folder."""
    why: Why = ""


class AddHypothesis(Action):
    """Adds the claim that `arm` scores higher than `against`; both arms exist."""

    kind: Literal["add_hypothesis"] = "add_hypothesis"
    arm: ArmName
    against: ArmName
    confirmatory: bool = False
    why: Why = ""


class AddSeeds(Action):
    """Sets the seeds per arm at the last look. Before the data this changes the plan, afterwards the annex."""

    kind: Literal["add_seeds"] = "add_seeds"
    seeds: Annotated[int, Field(ge=4, le=10_000)]
    why: Why = ""


class Promote(Action):
    """Makes an exploratory hypothesis confirmatory."""

    kind: Literal["promote"] = "promote"
    arm: ArmName
    against: ArmName
    why: Why = ""


class RequestProbe(Action):
    """Runs an arm once with changed settings, to understand it. The run is not evidence for a hypothesis."""

    kind: Literal["request_probe"] = "request_probe"
    arm: ArmName
    changes: Annotated[Mapping[SettingName, Value], Field(max_length=8)] = {}
    why: Why = ""


class Stop(Action):
    """Ends the proposals of a language model."""

    kind: Literal["stop"] = "stop"
    why: Why = ""


class Pause(Action):
    """Starts no further batch of trials until `resume`."""

    kind: Literal["pause"] = "pause"


class Resume(Action):
    kind: Literal["resume"] = "resume"


class Cap(Action):
    """Limits the total spending, in full runs."""

    kind: Literal["cap"] = "cap"
    runs: Annotated[float, Field(gt=0)]


class Veto(Action):
    """Starts no further trial of an arm. Its claims end as inconclusive."""

    kind: Literal["veto"] = "veto"
    arm: ArmName


Proposal = AddArm | AddHypothesis | AddSeeds | Promote | RequestProbe | Stop
"""Actions that a language model may propose."""
Request = AddArm | AddHypothesis | Pause | Resume | Cap | Veto
"""Actions that a person may request of a running study."""
PROPOSAL: TypeAdapter[Proposal] = TypeAdapter(Annotated[Proposal, Field(discriminator="kind")])
REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])


A = TypeVar("A")


def parse(schema: TypeAdapter[A], fields: object) -> A:
    """Validates an action. Raises `Refused` with the first error."""
    try:
        return schema.validate_python(fields)
    except RecursionError:
        raise Refused("an action must not be nested so deeply") from None
    except ValidationError as error:
        message = validation_message(error)
        raise Refused(f"{message}; use only the fields and kinds of the action schema") from None


def loads(text: str | bytes) -> object:
    """Parses JSON without NaN and infinity. Raises `Refused`."""

    def refuse(name: str) -> object:
        raise Refused(f"{name} is not a number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(f"invalid JSON: {error}") from None


def as_text(content: object, limit: int = LONGEST_TEXT) -> str:
    """Text of a request for the journal: valid Unicode of limited length."""
    try:
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    except RecursionError:
        text = "(nested too deeply)"
    return text[:limit].encode("utf-8", "replace").decode()
