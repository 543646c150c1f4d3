"""Knowledge about the settings: their words, ranges and interactions, from the packaged `priors.toml`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agentjet.config import parse_config
from agentjet.config.reference import sections
from agentjet.config.reference import settings as settings_in
from agentjet.errors import ConfigError
from agentjet.research.models import Arm, Knob, Refused, Setting, Sign, Study, Subject, Value
from agentjet.research.servers import check_model

FREE = frozenset({"job.seed", "job.max_steps"})
"""Job settings that the study controls: seeds and lengths of its trials."""
PARTS = ("job.recipe.name", "job.recipe.loss.name")
"""Settings that other settings and their defaults depend on."""


class Prior(BaseModel):
    """A setting that studies vary. `priors.toml` documents the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    says: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    whole: bool = False
    scale: Literal["log", "linear"] = "log"
    switch: bool = False
    choices: Mapping[str, tuple[str, ...]] = {}
    ladder: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    off: str | float | None = None
    on: str | float | None = None
    tune: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    sign: Sign = "?"
    why: str = ""
    reference: str = ""

    @property
    def is_number(self) -> bool:
        return not self.switch and not self.choices

    def refusal(self, name: str, value: Value) -> str | None:
        """Reason why a study may not set this value, or None."""
        if self.switch:
            return None if isinstance(value, bool) else f"{name} = {value!r}: give true or false"
        if self.choices:
            return None if value in self.choices else f"{name} = {value!r}: give one of {', '.join(self.choices)}"
        if isinstance(value, bool | str) or not math.isfinite(value):
            return f"{name} = {value!r}: give a number"
        if self.whole and value != int(value):
            return f"{name} = {value!r}: give a whole number"
        assert self.low is not None and self.high is not None
        if not self.low <= value <= self.high:
            return f"{name} = {value!r}: give a value from {self.low:g} to {self.high:g}"
        return None

    def tried(self, base: Value) -> tuple[float, ...]:
        """Values to try, around the base value if the prior has a ladder. Empty if the setting has no scale."""
        if not self.ladder:
            return self.values
        assert self.low is not None and self.high is not None and not isinstance(base, str)
        steps = (rounded(base * factor) for factor in self.ladder)
        return tuple(sorted({min(self.high, max(self.low, round(s) if self.whole else s)) for s in steps}))

    def typed(self, value: float | str) -> Value:
        return int(value) if self.whole else value


@cache
def priors() -> dict[str, Prior]:
    """By name of the setting."""
    text = files(__package__).joinpath("priors.toml").read_text(encoding="utf-8")
    return {name: Prior.model_validate(fields) for name, fields in tomllib.loads(text).items()}


def base_value(name: str, settings: Setting) -> Value:
    """Value of a setting that no arm changes: the subject's, or the default."""
    if name in settings:
        return settings[name]
    config = parse_config({part: settings[part] for part in PARTS if part in settings})
    value: Any = config.model_dump()
    for part in name.split("."):
        if part not in value:
            raise ConfigError(f"{name}: the recipe of this study has no such parameter")
        value = value[part]
    if name == "job.recipe.aggregation" and value == "auto":
        value = vars(config.job.recipe)["loss"].aggregation
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{name} is a section: name a setting in it, such as {name}.{next(iter(value), 'NAME')}")
    return value


@cache
def whole_settings() -> frozenset[str]:
    """Settings that accept whole numbers only."""
    return frozenset(
        f"{prefix}.{name}"
        for prefix, section in sections()
        for name, field in settings_in(section)
        if field.annotation is int
    )


def knob(name: str, settings: Setting) -> Knob:
    """A knob over the values that the prior suggests."""
    return Knob(name, tuple(map(float, priors()[name].tried(base_value(name, settings)))))


def rounded(value: float, digits: int = 2) -> float:
    """Rounds to `digits` significant digits."""
    return float(f"{value:.{digits - 1}e}")


def equal_arm(arm: Arm, others: Iterable[Arm], base: Setting | None) -> Arm | None:
    """Returns one of the others that would be trained like this arm. `base` is None if no server settings vary."""

    def whole(one: Arm, names: set[str]) -> object:
        rest = {name: None if base is None else base_value(name, base) for name in names}
        return {**rest, **one.changes}, one.code, [knob.name for knob in one.nuisance]

    return next((one for one in others if whole(one, names := {*one.changes, *arm.changes}) == whole(arm, names)), None)


def base_of(subject: Subject) -> Setting:
    """Settings that all arms start from. By default, schedules end with the run."""
    return {"job.optimizer.total_steps": subject.steps, **subject.settings}


# ---- what may be changed --------------------------------------------------------------------------------------------


def check_setting(study: Study, changes: Setting) -> None:
    """Raises `Refused` for a setting or value that arms of this study may not have.

    Arms of a study with a subject may change any setting in the priors. Otherwise only names that the study uses.
    """
    own = own_values(study)
    for name, value in changes.items():
        prior = priors().get(name) if study.subject else None
        if prior:
            if reason := prior.refusal(name, value):
                raise Refused(reason)
        elif name not in own:
            known = sorted({*own, *(priors() if study.subject else ())})
            raise Refused(
                f"{name!r} is not a setting that an arm of this study may change; those are {', '.join(known)}"
            )
        elif not any(alike(value, known) for known in own[name]):
            raise Refused(f"{name} = {value!r}: the values in this study are {sorted(map(str, own[name]))}")
    if study.subject:
        try:
            check_job({**study.subject.settings, **changes})
        except ConfigError as error:
            raise Refused(str(error)) from None


def own_values(study: Study) -> dict[str, list[Value]]:
    """By name, the values in the study's arms and knobs."""
    values: dict[str, list[Value]] = {}
    for arm in study.arms:
        for name, value in arm.changes.items():
            values.setdefault(name, []).append(value)
        for tuned in arm.nuisance:
            values.setdefault(tuned.name, []).extend(tuned.values)
    return values


def alike(value: Value, known: Value) -> bool:
    """True for equal choices, and for any two numbers."""
    if isinstance(value, bool | str) or isinstance(known, bool | str):
        return type(value) is type(known) and value == known
    return True


def check_job(settings: Setting) -> None:
    """Raises `ConfigError` for settings that a server refuses, and for those that the study controls."""
    for name in sorted(FREE & settings.keys()):
        raise ConfigError(f"{name} = {settings[name]!r}: seeds and lengths of trials are the study's; leave it out")
    check_model(settings)
    parse_config(settings)
