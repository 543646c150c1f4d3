"""From a file to a study: `space.toml` names arms, knobs and claims.

sesoi = 0.02                         # the smallest difference that matters, in units of the score

[arms.base]                          # the first arm is compared with the others, unless claims are given
[arms.short]
agent = "short.py:agent"             # another agent, or another reward in training: the agent returns it
changes = { "job.max_tokens" = 64 }  # settings that differ from the subject's

[knobs."job.optimizer.lr"]           # tuned for every arm that does not set it
values = [1e-6, 1e-5, 1e-4]
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError

from agentjet.client.agent_source import file_and_function
from agentjet.config import parse_config
from agentjet.errors import ConfigError
from agentjet.research.models import (
    ARM_NAME,
    OF_SUBJECT,
    Arm,
    Declared,
    Hypothesis,
    Knob,
    Setting,
    Study,
    Subject,
    Value,
    mistake,
    of_server,
    refuse,
)
from agentjet.research.scheduler import estimate_cost
from agentjet.research.swarm_runner import check_changes

METRIC = "mean reward on the held-out tasks, at the last step"
SESOI = 0.02
"""Default: two points of a hundred, for rewards from 0 to 1."""
MOST_SEEDS = 1000
"""Maximum seeds per arm at the last look."""
MOST_LOOKS = 20
FREE = frozenset({"job.seed", "job.max_steps"})
"""Job settings that the study controls: seeds and lengths of its trials."""
ArmName = Annotated[str, Field(pattern=ARM_NAME)]


class SpaceArm(Declared):
    changes: Mapping[str, Value] = {}
    agent: str = ""


class SpaceKnob(Declared):
    values: Annotated[tuple[float, ...], Field(min_length=1)]


def with_claim(given: object) -> object:
    """A hypothesis of the file with its sentence, and an expectation."""
    if not isinstance(given, dict):
        return given
    return {"claim": f"{given.get('arm')} scores higher than {given.get('against')}", "sign": "?", **given}


class Space(Declared):
    """The whole file."""

    arms: Annotated[dict[ArmName, SpaceArm], Field(min_length=2)]
    knobs: Mapping[str, SpaceKnob] = {}
    hypotheses: tuple[Annotated[Hypothesis, BeforeValidator(with_claim)], ...] = ()
    metric: str = METRIC
    sesoi: Annotated[float, Field(gt=0)] = SESOI
    alpha: float = 0.05
    looks: Annotated[tuple[Annotated[int, Field(le=MOST_SEEDS)], ...], Field(max_length=MOST_LOOKS)] = (4, 8, 12)

    def make_arms(self, folder: Path) -> tuple[Arm, ...]:
        """Raises `ConfigError` for a missing agent. Agents are relative to `folder`."""
        knobs = [Knob(name, tuple(sorted(set(tried.values)))) for name, tried in self.knobs.items()]
        return tuple(
            Arm(
                name,
                dict(arm.changes),
                tuple(knob for knob in knobs if knob.name not in arm.changes),
                code_hash(folder, arm.agent) if arm.agent else "",
            )
            for name, arm in self.arms.items()
        )

    def claims(self) -> tuple[Hypothesis, ...]:
        """The declared claims, or that each other arm scores higher than the first. Raises `ConfigError`."""
        first, *others = self.arms
        every = [Hypothesis(f"{other} scores higher than {first}", other, first, sign="?") for other in others]
        given = self.hypotheses or tuple(every)
        for number, claim in enumerate(given):
            pairs = [other.contrast.keys() for other in given[:number] if other.metric == claim.metric]
            refuse(
                len(claim.contrast) == 2 and claim.contrast.keys() in pairs,
                f"hypotheses: {claim.arm!r} and {claim.against!r} are compared twice, and a difference has one sign: "
                "keep one of the claims",
            )
        return given


def read_space(path: Path) -> Space:
    """Raises `ConfigError` with the file, the key and the remedy."""
    known = {name for part in (Space, SpaceArm, SpaceKnob) for name in part.model_fields}
    known |= {field.name for field in fields(Hypothesis)}
    try:
        return Space.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ConfigError(f"--space {str(path)!r} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"--space {str(path)!r}: {mistake(error, sorted(known))}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--space {str(path)!r} is not valid TOML: {error}") from None


def code_hash(folder: Path, agent: str) -> str:
    """Hash of the file of `FILE.py:FUNCTION` and of the function's name."""
    name, function = file_and_function(agent)
    path = folder / name
    refuse(not path.is_file() or not function, f"agent = {agent!r}: give FILE.py:FUNCTION, in {folder}")
    return hashlib.sha256(function.encode() + b"\0" + path.read_bytes()).hexdigest()[:16]


def plan(topic: str, *, budget: float, space: Space, subject: Subject, folder: Path = Path(), seed: int = 0) -> Study:
    """Plans a study. `budget` is in full runs, `folder` holds the agents of the space. Raises `ConfigError`."""
    arms = space.make_arms(folder)
    check_job(subject.settings)
    check_arms(arms, {"job.optimizer.total_steps": subject.steps, **subject.settings})
    agents = {name: str(folder / arm.agent) for name, arm in space.arms.items() if arm.agent}
    models = tuple(dict.fromkeys(str(arm.changes["model"]) for arm in arms if "model" in arm.changes))
    subject = replace(subject, agents={**subject.agents, **agents}, models=models)
    if subject.code:
        subject = subject.with_hashes()
        for name in agents:
            subject.load_arm_agent(name)
    study = Study(
        topic=topic,
        metric=space.metric,
        sesoi=space.sesoi,
        arms=arms,
        hypotheses=space.claims(),
        budget=float(budget),
        alpha=space.alpha,
        looks=space.looks,
        evaluator=subject.evaluator_hash() if subject.code else "",
        seed=seed,
        subject=subject,
    )
    least = estimate_cost(study).least
    refuse(
        least > budget,
        f"budget = {budget:g} full runs, but the study needs at least {least:.1f}: give at least that, or fewer arms, "
        "knobs or seeds in the file",
    )
    return study


def check_job(settings: Setting) -> None:
    """Raises `ConfigError` for settings that a server refuses, and for those that the study controls."""
    for name in sorted(FREE & settings.keys()):
        raise ConfigError(f"{name} = {settings[name]!r}: seeds and lengths of trials are the study's; leave it out")
    check_changes(settings, of_all=True)
    parse_config(settings)


def check_arms(arms: Sequence[Arm], base: Setting) -> None:
    """Raises `ConfigError` if a server would refuse an arm at a value of its knobs, or if two are trained alike."""
    trained: dict[str, object] = {}
    for arm in arms:
        try:
            for place in range(max((len(knob.values) for knob in arm.nuisance), default=1)):
                tuned = {knob.name: knob.values[min(place, len(knob.values) - 1)] for knob in arm.nuisance}
                check_changes({**of_server(arm.changes), **tuned})
                check_job({**base, **of_server(arm.changes), **tuned})
        except ConfigError as error:
            raise ConfigError(f"arm {arm.name!r}: {error}") from None
        own = {name: value for name, value in arm.changes.items() if name in OF_SUBJECT}
        new = (parse_config({**base, **of_server(arm.changes)}), own, arm.code, [knob.name for knob in arm.nuisance])
        for other, known in trained.items():
            refuse(known == new, f"arm {arm.name!r} does not differ from arm {other!r}: give it changes, or an agent")
        trained[arm.name] = new
