"""What a study is made of, as frozen dataclasses whose id is the hash of their content.

    Study ── Arm ── Knob          fixed before the first trial: what is compared, and how it will be judged
      │       └── Trial ── Outcome    one run of an arm with one seed, and how it ended
      └── Hypothesis ── Finding       a claim, and what the outcomes say about it

Everything goes to JSON and comes back equal; nothing is pickled. Two objects with the same content have the same id,
in every process, so a journal can be replayed against a plan and a trial can be launched under its own name.

What can be asked of a study, as schemas: anything else is refused before anybody thinks about it.

No action names a score, an interval or a verdict, the smallest effect of interest, alpha, the looks or the evaluator:
results cannot be told to the researcher, and the rules cannot be moved.
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
    sentence,
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
    """A nuisance setting that every arm may tune for itself, over the same values."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Arm(Record):
    """One side of a comparison: what it changes of the base, the code it runs, and what is tuned before."""

    name: str
    changes: Setting = field(default_factory=dict)
    nuisance: tuple[Knob, ...] = ()
    code: str = ""
    """Hash of the agent's code, where arms differ in code."""


@dataclass(frozen=True)
class Hypothesis(Record):
    """`arm` scores higher than `against`, by more than the study's smallest effect of interest."""

    claim: str
    arm: str
    against: str
    confirmatory: bool = True
    origin: Origin = "prior"
    sign: Sign | None = None
    """Of the difference that the plan expects, and `why`: they decide nothing. None where nobody said, as once."""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without an expectation that there is none of: the ids of older studies stay what they were."""
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
    """The smallest effect of interest: less does not matter to whoever asks."""
    arms: tuple[Arm, ...]
    hypotheses: tuple[Hypothesis, ...]
    budget: float
    reserve: float = 0.4
    """The share of the budget that exploring may not touch."""
    alpha: float = 0.05
    """The chance, about, that any confirmatory claim is called where nothing that matters is, over all looks. It is
    more where `sesoi` is less than a fifth of what seeds differ by, or arms spread unequally (`bench.error_rates`).
    """
    looks: tuple[int, ...] = (4, 8, 12)
    """Seeds per arm at which the confirmation is looked at."""
    rungs: tuple[float, ...] = (1 / 9, 1 / 3, 1.0)
    """Fractions of a full run at which exploring drops the worse part."""
    evaluator: str = ""
    """Hash of what computes the metric."""
    seed: int = 0
    subject: Subject | None = None
    """What is trained; None where that is the runner's own affair."""

    def to_json(self) -> dict[str, Any]:
        """Without a subject that there is none of: its seeds, which come from its id, stay what they were."""
        content = {**super().to_json(), "hypotheses": tuple(claim.to_json() for claim in self.hypotheses)}
        del content["subject"]
        return content if self.subject is None else {**content, "subject": self.subject.to_json()}

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        refuse(len(set(names)) < len(names), f"arms = {names}: two arms have one name; rename one")
        for hypothesis in self.hypotheses:
            for name in (hypothesis.arm, hypothesis.against):
                refuse(name not in names, f"hypotheses: {name!r} is no arm of the study; the arms are {names}")
            refuse(hypothesis.arm == hypothesis.against, f"hypotheses: {hypothesis.arm!r} is compared with itself")
        refuse(
            not 0 < self.sesoi < math.inf, f"sesoi = {self.sesoi}: give the smallest difference that matters, above 0"
        )
        refuse(not 0 < self.alpha < 0.5, f"alpha = {self.alpha}: choose one between 0 and 0.5, such as 0.05")
        refuse(not 0 <= self.reserve < 1, f"reserve = {self.reserve}: choose a share from 0 up to, not including, 1")
        refuse(not 0 < self.budget < math.inf, f"budget = {self.budget}: give a number of full runs above 0")
        rising = list(self.looks) == sorted(set(self.looks)) and bool(self.looks)
        refuse(not rising or self.looks[0] < 4, f"looks = {self.looks}: seeds must rise, from 4 (fewer prove nothing)")
        climbing = list(self.rungs) == sorted(set(self.rungs)) and bool(self.rungs) and self.rungs[0] > 0
        refuse(not climbing or self.rungs[-1] != 1.0, f"rungs = {self.rungs}: fractions must rise and end with 1.0")
        for knob in (knob for arm in self.arms for knob in arm.nuisance):
            refuse(not knob.values, f"nuisance knob {knob.name!r} has no values to try")

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Trial(Record):
    """A run of an arm with one seed, up to a fraction of its length. Its id is the key it is launched under.

    Trials that differ in `fidelity` alone continue each other: the shorter one is a prefix of the longer.
    """

    study: str
    arm: str
    setting: Setting
    """The whole difference from the base: the arm's changes and the tuned knobs."""
    seed: int
    phase: Phase
    fidelity: float = 1.0


@dataclass(frozen=True)
class Outcome(Record):
    """How a trial ended. A diverged run is a result and carries its score; an infrastructure failure has none."""

    trial: str
    end: End
    score: float | None = None
    """The metric at the trial's last step, never its best one."""
    curve: tuple[float, ...] = ()
    """The metric on the way, for the plots."""
    signals: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """What training reported of itself, by the name of its metric, a value for each step: what diagnosis reads. None
    where a step reported none, or what is no number.
    """
    note: str = ""

    def __post_init__(self) -> None:
        refuse(
            (self.score is None) != (self.end == "infra_failed"),
            f"outcome of trial {self.trial}: end = {self.end!r} with score = {self.score}: every run has a score, "
            "and only an infrastructure failure has none",
        )
        refuse(self.score is not None and not math.isfinite(self.score), f"outcome: score = {self.score} is no number")


@dataclass(frozen=True)
class Diagnosis(Record):
    """What is the matter with a trial: what was seen, what was tried to tell it from its likes, and what it meant."""

    trial: str
    cause: str
    """One of `agentjet.research.diagnosis`."""
    seen: str
    tried: str = ""
    meaning: str = ""
    step: int | None = None
    """From which step on it showed."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers that `seen` and `tried` speak of, by name."""


@dataclass(frozen=True)
class Amendment(Record):
    """What was asked of a study besides its plan, and whether it was granted."""

    point: int
    """The fixed point it was taken at: so many batches of trials had ended."""
    origin: Origin
    asked: Mapping[str, Any]
    """An action of `agentjet.research.models`, or what was no action, as `text`."""
    refused: str = ""
    """Why not, as a sentence; empty where it was granted."""


@dataclass(frozen=True)
class Exchange(Record):
    """A question to a language model or a coding agent, and what came back."""

    moment: str
    question: str
    answer: str
    failed: str = ""
    """Why no answer came."""


@dataclass(frozen=True)
class Finding(Record):
    """What the outcomes say about a hypothesis. The interval is the one the verdict was read from."""

    hypothesis: str
    verdict: Verdict
    reason: str
    estimate: float | None = None
    """Mean of `arm` minus mean of `against`, over the confirming seeds only."""
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """Nominal level of the interval at this look. Over all looks it is about 1 - 2 * (the claim's share of alpha),
    since alpha is of one side.
    """
    p_value: float | None = None
    """Welch's, two-sided, to be held against 1 - `confidence` of the look, not against alpha."""
    permutation_p: float | None = None
    seeds: int = 0
    """Per arm."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """By arm, the setting it was judged at."""
    trials: tuple[str, ...] = ()


ArmName = Annotated[str, Field(pattern=ARM_NAME)]
SettingName = Annotated[str, Field(pattern=SETTING_NAME, max_length=60)]
Why = Annotated[str, Field(max_length=300)]
LONGEST_TEXT = 2_000
"""Characters that are kept of what was said."""


class Refused(AgentJetError):
    """A request that is not granted. The message is a sentence for whoever asked."""


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class AddArm(Action):
    """Another arm, and the exploratory hypothesis that it scores higher than `against`."""

    kind: Literal["add_arm"] = "add_arm"
    arm: ArmName
    against: ArmName
    changes: Annotated[Mapping[SettingName, Value], Field(max_length=8)] = {}
    """What it changes of the base, not of `against`."""
    code: Annotated[str, Field(pattern=HEXADECIMAL, max_length=64)] = ""
    """Hash of code that was taken into the study's keeping."""
    why: Why = ""


class AddHypothesis(Action):
    """`arm` scores higher than `against`, both of which are there."""

    kind: Literal["add_hypothesis"] = "add_hypothesis"
    arm: ArmName
    against: ArmName
    confirmatory: bool = False
    why: Why = ""


class AddSeeds(Action):
    """The last look at so many seeds an arm: of the plan before the data, of what is added after it."""

    kind: Literal["add_seeds"] = "add_seeds"
    seeds: Annotated[int, Field(ge=4, le=10_000)]
    why: Why = ""


class Promote(Action):
    """An exploratory hypothesis becomes a confirmatory one."""

    kind: Literal["promote"] = "promote"
    arm: ArmName
    against: ArmName
    why: Why = ""


class RequestProbe(Action):
    """One run of an arm with something changed, to understand it. It is evidence for no hypothesis."""

    kind: Literal["request_probe"] = "request_probe"
    arm: ArmName
    changes: Annotated[Mapping[SettingName, Value], Field(max_length=8)] = {}
    why: Why = ""


class Stop(Action):
    """Nothing more is proposed."""

    kind: Literal["stop"] = "stop"
    why: Why = ""


class Pause(Action):
    """No further batch of trials until `resume`."""

    kind: Literal["pause"] = "pause"


class Resume(Action):
    kind: Literal["resume"] = "resume"


class Cap(Action):
    """No more than so many full runs, in all."""

    kind: Literal["cap"] = "cap"
    runs: Annotated[float, Field(gt=0)]


class Veto(Action):
    """No further trial of an arm. What is claimed of it ends as inconclusive."""

    kind: Literal["veto"] = "veto"
    arm: ArmName


Proposal = AddArm | AddHypothesis | AddSeeds | Promote | RequestProbe | Stop
"""What a language model may ask."""
Request = AddArm | AddHypothesis | Pause | Resume | Cap | Veto
"""What a person may ask of a running study."""
PROPOSAL: TypeAdapter[Proposal] = TypeAdapter(Annotated[Proposal, Field(discriminator="kind")])
REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])


A = TypeVar("A")


def parse(schema: TypeAdapter[A], fields: object) -> A:
    """An action, or `Refused` with the first thing that is wrong about it."""
    try:
        return schema.validate_python(fields)
    except RecursionError:
        raise Refused("this is nested too deeply for an action") from None
    except ValidationError as error:
        said = sentence(error)
        raise Refused(f"{said}; actions have no other fields and kinds than their schema") from None


def loads(text: str | bytes) -> object:
    """JSON without not-a-number and infinities. Raises `Refused`."""

    def refuse(name: str) -> object:
        raise Refused(f"{name} is no number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(f"this is no JSON: {error}") from None


def as_text(content: object, limit: int = LONGEST_TEXT) -> str:
    """What was said, as far as it is kept: valid Unicode, of a bounded length."""
    try:
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    except RecursionError:
        text = "(nested too deeply)"
    return text[:limit].encode("utf-8", "replace").decode()
