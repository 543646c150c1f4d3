"""`plan`: a topic or a file in, a study out, without a language model."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.research.confirm import FEWEST
from agentjet.research.models import Arm, Hypothesis, Setting, Study, Subject
from agentjet.research.planner.plan import Plan
from agentjet.research.planner.priors import base_of, check_job, twin
from agentjet.research.planner.rehearsal import rehearse
from agentjet.research.planner.space import Space
from agentjet.research.planner.templates import Claim, Sketch, sketch
from agentjet.research.planner.topics import Understood, understand
from agentjet.research.servers import check_changes

METRIC = "mean reward on the held-out tasks, at the last step"
SESOI = 0.02
"""Where nobody says: two points of a hundred, of rewards from 0 to 1."""
LONGEST_TOPIC = 500
"""Characters."""
SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def plan(
    topic: str,
    *,
    budget: str,
    subject: Subject | None = None,
    space: Space | None = None,
    folder: Path = Path(),
    sesoi: float | None = None,
    run_seconds: float | None = None,
    servers: int = 1,
    seed: int = 0,
) -> Plan:
    """The plan of a study. Raises `ConfigError` for what is not understood, cannot be compared, or cannot be paid.

    `budget` is in full runs ("60") or in time ("4h"), for which a run's seconds must be known. `folder` is where the
    agents of a space file are.
    """
    if sesoi is not None and not 0 < sesoi < math.inf:
        raise ConfigError(f"--sesoi {sesoi:g}: give a finite difference of scores above 0; leave it out for {SESOI:g}")
    if run_seconds is not None and not 0 < run_seconds < math.inf:
        raise ConfigError(f"--run-minutes {run_seconds / 60:g}: give the finite minutes of a full run, above 0")
    check_topic(topic)
    base: Setting = subject.settings if subject else {}
    if subject:
        check_job(base)
        base = base_of(subject)
    understood = None if space else understand(topic)
    found = space.sketch(folder) if space else sketch(understood, base) if understood else Sketch()
    for arm in found.arms if subject or understood else ():
        check_arm(arm, base)
    if understood or subject:
        check_differ(found.arms, base)
    if space and subject:
        agents = {name: str(folder / arm.agent) for name, arm in space.arms.items() if arm.agent}
        subject = with_agents(subject, agents)
        for arm_name in agents if subject.code else ():
            subject.player(arm_name)
    study = Study(
        topic=topic,
        metric=space.metric if space and space.metric else METRIC,
        sesoi=next(given for given in (sesoi, space.sesoi if space else None, SESOI) if given is not None),
        arms=tuple(found.arms),
        hypotheses=tuple(hypothesis(claim) for claim in found.claims),
        budget=runs_of(budget, run_seconds, servers),
        alpha=space.alpha if space else 0.05,
        looks=space.looks if space else (4, 8, 12),
        evaluator=subject.evaluator_now() if subject and subject.code else "",
        seed=seed,
        subject=subject,
    )
    cost = rehearse(study)
    if cost.least > study.budget:
        raise ConfigError(
            f"budget = {budget}: {study.budget:g} full runs, and the study takes {cost.least:.1f} where all is plain; "
            f"give at least that{cheaper(study, 'in the file' if space else 'in a file: --space space.toml')}"
        )
    return Plan(
        study,
        understood.kind if understood else None,
        tuple(meanings(understood)) if understood else (),
        understood.ignored if understood else (),
        cost,
        tuple(found.notes),
        run_seconds,
        servers,
    )


def check_topic(topic: str) -> None:
    """Raises `ConfigError` for what is no title of a page."""
    if len(topic) > LONGEST_TOPIC:
        raise ConfigError(
            f"the topic has {len(topic)} characters: ask one question in {LONGEST_TOPIC} or fewer; what is to be "
            "compared can stand in a file, --space space.toml"
        )
    if wrong := next((character for character in topic if unicodedata.category(character) in ("Cc", "Cs")), ""):
        raise ConfigError(f"the topic has the character {wrong!a}, which cannot be printed: leave it out")


def cheaper(study: Study, where: str) -> str:
    """What would make a study cost less, of what this one leaves to change."""
    ways = [
        *([f"compare fewer than {len(study.arms)} arms"] if len(study.arms) > 2 else []),
        *(["have less tuned"] if any(arm.nuisance for arm in study.arms) else []),
        *([f"look before {study.looks[0]} seeds"] if study.looks[0] > FEWEST else []),
    ]
    return f", or {' or '.join(ways)}, {where}" if ways else ""


def with_agents(subject: Subject, agents: Mapping[str, str]) -> Subject:
    """The subject with agents of some arms' own; if its code was hashed, theirs is too."""
    subject = replace(subject, agents={**subject.agents, **agents})
    return subject.hashed() if subject.code else subject


def hypothesis(claim: Claim) -> Hypothesis:
    return Hypothesis(
        f"{claim.arm} scores higher than {claim.against}",
        claim.arm,
        claim.against,
        claim.confirmatory,
        sign=claim.sign,
        why=f"{claim.why} ({claim.reference})" if claim.reference else claim.why,
    )


def meanings(understood: Understood) -> list[tuple[str, str]]:
    named = (
        (mention.words, f"{mention.setting} = {mention.choice}" if mention.choice else mention.setting)
        for mention in understood.mentions
    )
    return list(dict.fromkeys(named))


def check_arm(arm: Arm, base: Setting) -> None:
    """Raises `ConfigError` when a server would not take it, at any value of its knobs."""
    longest = max((len(knob.values) for knob in arm.nuisance), default=1)
    for position in range(longest):
        tuned = {knob.name: knob.values[min(position, len(knob.values) - 1)] for knob in arm.nuisance}
        try:
            check_changes({**arm.changes, **tuned})
            check_job({**base, **arm.changes, **tuned})
        except ConfigError as error:
            raise ConfigError(f"arm {arm.name!r}: {error}") from None


def check_differ(arms: Sequence[Arm], base: Setting) -> None:
    """Raises `ConfigError` for two arms that would be trained alike."""
    for number, arm in enumerate(arms):
        if other := twin(arm, arms[:number], base):
            raise ConfigError(f"arm {arm.name!r} changes nothing of arm {other.name!r}: give it changes, or an agent")


def runs_of(budget: str, run_seconds: float | None, servers: int) -> float:
    """Full runs that a budget pays for. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", budget.strip().lower())
    unit = match[2].removesuffix("s") if match and match[2] != "s" else "s" if match else ""
    if not match or float(match[1]) <= 0 or unit not in ("", "run", *SECONDS):
        raise ConfigError(f"budget = {budget!r}: give full runs, such as 60, or time, such as 4h or 90m")
    if unit in ("", "run"):
        return float(match[1])
    if run_seconds is None:
        raise ConfigError(
            f"budget = {budget!r}: how long a run lasts is not known; say it (--run-minutes), or give full runs"
        )
    return float(match[1]) * SECONDS[unit] * servers / run_seconds
