"""What can be asked of a study, as schemas: anything else is refused before anybody thinks about it.

No action names a score, an interval or a verdict, the smallest effect of interest, alpha, the looks or the evaluator:
results cannot be told to the researcher, and the rules cannot be moved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentjet.errors import AgentJetError
from agentjet.research.models import Value
from agentjet.research.wording import ARM_NAME, HEXADECIMAL, SETTING_NAME, sentence

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
