"""`space.toml`: what a person wants compared, where no topic says it. Arms, what every arm tunes, claims, how to judge.

sesoi = 0.02                         # the smallest difference that matters, in units of the score

[arms.base]                          # the first arm is what the others are held against, unless claims say more
[arms.short]
agent = "short.py:agent"             # another agent, or another reward in training: the agent returns it
changes = { "job.max_tokens" = 64 }  # settings, where they differ from the subject's

[knobs."job.optimizer.lr"]           # tuned for every arm that does not set it
low = 1e-6
high = 1e-3
"""

from __future__ import annotations

import difflib
import hashlib
import math
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentjet.errors import ConfigError
from agentjet.research.models import Arm, Knob, Sign, Value
from agentjet.research.planner.actions import ArmName
from agentjet.research.planner.priors import rounded, whole_settings
from agentjet.research.planner.templates import Claim, Sketch
from agentjet.research.wording import sentence

MOST_SEEDS = 1000
"""Of an arm, at the last look."""
MOST_LOOKS = 20
RANGE_VALUES = 25
"""Values that a range has, both ends among them: finer than the noise of any run can tell apart."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SpaceArm(Part):
    changes: dict[str, Value] = {}
    agent: str = ""


class SpaceKnob(Part):
    """`values`, or a range."""

    values: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None
    scale: Literal["log", "linear"] = "log"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        ranged = self.low is not None and self.high is not None
        if bool(self.values) == ranged or ranged != (self.low is not None or self.high is not None):
            raise ValueError("give either values, or low and high")
        if ranged and not self._low() < self._high():
            raise ValueError(f"low = {self.low} is not below high = {self.high}")
        if ranged and self.scale == "log" and self._low() <= 0:
            raise ValueError(f"low = {self.low} has no logarithm; give scale = 'linear', or a low above 0")
        return self

    def ladder(self, *, whole: bool) -> tuple[float, ...]:
        """The values; or the ends of the range and what it is cut into, to whole numbers or to three digits."""
        if self.values:
            return tuple(sorted(set(self.values)))
        low, high = self._low(), self._high()
        shares = [i / (RANGE_VALUES - 1) for i in range(1, RANGE_VALUES - 1)]
        if self.scale == "linear":
            cuts = [low + share * (high - low) for share in shares]
        else:
            cuts = [math.exp(math.log(low) + share * math.log(high / low)) for share in shares]
        between = {float(round(cut)) if whole else rounded(cut, 3) for cut in cuts}
        return tuple(sorted({low, high, *(value for value in between if low < value < high)}))

    def _low(self) -> float:
        assert self.low is not None
        return self.low

    def _high(self) -> float:
        assert self.high is not None
        return self.high


class SpaceClaim(Part):
    arm: ArmName
    against: ArmName
    sign: Sign = "?"
    why: str = ""
    confirmatory: bool = True


class Space(Part):
    """The whole file. `folder` is where its agents are looked for."""

    arms: Annotated[dict[ArmName, SpaceArm], Field(min_length=2)]
    knobs: dict[str, SpaceKnob] = {}
    hypotheses: tuple[SpaceClaim, ...] = ()
    metric: str = ""
    sesoi: Annotated[float | None, Field(gt=0)] = None
    alpha: float = 0.05
    looks: Annotated[tuple[Annotated[int, Field(le=MOST_SEEDS)], ...], Field(max_length=MOST_LOOKS)] = (4, 8, 12)

    @model_validator(mode="after")
    def _compared_once(self) -> Self:
        claimed: set[frozenset[str]] = set()
        for claim in self.hypotheses:
            if (pair := frozenset((claim.arm, claim.against))) in claimed:
                raise ValueError(
                    f"hypotheses: {claim.arm!r} and {claim.against!r} are compared twice, and a difference has one "
                    "sign: keep one of the claims"
                )
            claimed.add(pair)
        return self

    def sketch(self, folder: Path) -> Sketch:
        """Raises `ConfigError` for an agent that is not there."""
        knobs = [Knob(name, tried.ladder(whole=name in whole_settings())) for name, tried in self.knobs.items()]
        arms = [
            Arm(
                name,
                dict(arm.changes),
                tuple(knob for knob in knobs if knob.name not in arm.changes),
                code_hash(folder, arm.agent) if arm.agent else "",
            )
            for name, arm in self.arms.items()
        ]
        first, *others = self.arms
        claims = [
            Claim(claim.arm, claim.against, claim.sign, claim.why, confirmatory=claim.confirmatory)
            for claim in self.hypotheses
        ]
        return Sketch(arms, claims or [Claim(other, first, "?") for other in others])


def read_space(path: Path) -> Space:
    """Raises `ConfigError` naming the file, the key and the way out."""
    try:
        return Space.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--space {str(path)!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--space {str(path)!r} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"--space {str(path)!r}: {misfit(error)}") from None


def misfit(error: ValidationError) -> str:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    said = sentence(error)
    if first["type"] != "extra_forbidden":
        return said
    known = sorted({name for part in (Space, SpaceArm, SpaceKnob, SpaceClaim) for name in part.model_fields})
    near = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
    return f"{said}; " + (f"did you mean {near[0]}?" if near else f"those are {', '.join(known)}")


def code_hash(folder: Path, agent: str) -> str:
    """Of the file of `FILE.py:FUNCTION`, and of which function it is."""
    name, _, function = agent.partition(":")
    path = folder / name
    if not path.is_file() or not function:
        raise ConfigError(f"agent = {agent!r}: give FILE.py:FUNCTION, in {folder}")
    return hashlib.sha256(function.encode() + b"\0" + path.read_bytes()).hexdigest()[:16]
