"""`AmendedStudy`: what requests have made of a study, and `grant`, the rules by which they are granted.

Before the data a request changes the plan. After the first launch the study is fixed: an arm can be vetoed and the
budget capped, and what is added becomes a study of its own, the annex. It is exploratory, begins when the first has its
findings, draws fresh seeds on both sides of each claim, and is paid from what the first leaves. So nothing
that is seen can change what was promised, and no claim is read off the scores that suggested it.

`AmendmentLog`: requests are judged once, and what was said of them stands in the book.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from agentjet.research.journal import StudyLog
from agentjet.research.models import (
    PROPOSAL,
    REQUEST,
    Action,
    AddArm,
    AddHypothesis,
    AddSeeds,
    Amendment,
    Arm,
    Cap,
    Hypothesis,
    Origin,
    Pause,
    Promote,
    Refused,
    RequestProbe,
    Resume,
    Setting,
    Stop,
    Study,
    Veto,
    as_text,
    loads,
    parse,
)
from agentjet.research.planner.priors import base_of, check_setting, equal_arm


@dataclass(frozen=True)
class AmendedStudy:
    """A value: every request that is granted makes a new one."""

    study: Study
    """Fixed once `begun`; the plan so far before."""
    begun: bool
    codes: frozenset[str] = frozenset()
    """Hashes of the code that arms may name."""
    paused: bool = False
    cap: float | None = None
    vetoed: frozenset[str] = frozenset()
    stopped: bool = False
    arms: tuple[Arm, ...] = ()
    """Added after the data began, as are the hypotheses."""
    hypotheses: tuple[Hypothesis, ...] = ()
    dropped: tuple[Hypothesis, ...] = ()
    """Of those added: what a veto took with it."""
    seeds: int = 0
    """The last look of what is added; 0 is that of the study."""
    probes: tuple[tuple[str, Setting], ...] = ()
    """Arms, and the whole difference from the base they are to be run with once."""

    @property
    def all_arms(self) -> dict[str, Arm]:
        return {arm.name: arm for arm in (*self.study.arms, *self.arms)}

    def least_cost(self) -> float:
        """Full runs without which what is asked cannot reach its first look, or the one that was asked for."""
        study = self.study
        claims = self.hypotheses if self.begun else study.hypotheses
        asked = {name for claim in claims for name in (claim.arm, claim.against)}
        return len(asked) * (self.seeds or study.looks[0]) + len(self.probes)


EVERYTHING = float("inf")
"""Left to spend, for whoever only follows what was granted."""


def grant(course: AmendedStudy, action: Action, origin: Origin, left: float) -> AmendedStudy:
    """The course with the action granted, or `Refused`. `left` is what may still be spent, in full runs."""
    if origin == "llm":
        check_words(action)
    match action:
        case AddArm():
            after = with_arm(course, action, origin)
        case AddHypothesis():
            after = with_claim(course, Hypothesis("", action.arm, action.against, action.confirmatory, origin))
        case AddSeeds():
            after = with_seeds(course, action.seeds)
        case Promote():
            after = promoted(course, action)
        case RequestProbe():
            after = with_probe(course, action)
        case Pause() | Resume():
            after = replace(course, paused=isinstance(action, Pause))
        case Cap():
            after = capped(course, action.runs)
        case Veto():
            after = without(course, action.arm)
        case Stop():
            after = replace(course, stopped=True)
        case _:
            raise AssertionError(action)
    if after.least_cost() > max(left, course.least_cost()):
        raise Refused(f"this takes {after.least_cost():g} full runs at the least, and {left:.2f} are left")
    return after


def check_words(action: Action) -> None:
    """A model's reasons say what is expected, never how much: numbers come from trials."""
    why = getattr(action, "why", "")
    if any(character.isnumeric() for character in why):
        raise Refused(f"why = {why!r}: a reason with numbers; numbers come from trials")


def check_name(arm: str) -> None:
    """A model's names say what an arm changes: those that judge it would stand in every table of the report."""
    from agentjet.research.report.document import CLAIMS, OVERSTATED

    for word in re.findall(r"[^\W\d_]+", arm.lower()):
        if word in OVERSTATED.union(CLAIMS, *CLAIMS.values()):
            raise Refused(f"arm = {arm!r}: {word!r} judges it; name the arm by what it changes")


def known_arm(course: AmendedStudy, name: str) -> Arm:
    if name not in course.all_arms:
        raise Refused(f"{name!r} is no arm of the study; the arms are {sorted(course.all_arms)}")
    if name in course.vetoed:
        raise Refused(f"arm {name!r} was vetoed")
    return course.all_arms[name]


def with_arm(course: AmendedStudy, action: AddArm, origin: Origin) -> AmendedStudy:
    against = known_arm(course, action.against)
    if action.arm in course.all_arms:
        raise Refused(f"there is an arm {action.arm!r} already; choose another name")
    if action.code and action.code not in course.codes:
        raise Refused(f"code = {action.code!r} is not in the study's keeping")
    check_setting(course.study, action.changes)
    nuisance = tuple(knob for knob in against.nuisance if knob.name not in action.changes)
    arm = Arm(action.arm, dict(action.changes), nuisance, action.code)
    subject = course.study.subject
    if other := equal_arm(arm, course.all_arms.values(), base_of(subject) if subject else None):
        raise Refused(f"arm {action.arm!r} would be arm {other.name!r} under another name")
    if course.begun:
        course = replace(course, arms=(*course.arms, arm))
    else:
        course = replace(course, study=replace(course.study, arms=(*course.study.arms, arm)))
    return with_claim(course, Hypothesis("", action.arm, action.against, False, origin))


def with_claim(course: AmendedStudy, claim: Hypothesis) -> AmendedStudy:
    """The words of a claim are made here: nobody's prose is tested, printed or believed."""
    for name in (claim.arm, claim.against):
        known_arm(course, name)
    if claim.arm == claim.against:
        raise Refused(f"{claim.arm!r} is compared with itself")
    if course.begun and claim.confirmatory:
        raise Refused("the data have begun: a claim made now is exploratory; ask for confirmatory = false")
    claim = replace(claim, claim=f"{claim.arm} scores higher than {claim.against}")
    there = course.hypotheses if course.begun else course.study.hypotheses
    if any({claim.arm, claim.against} == {other.arm, other.against} for other in there):
        raise Refused(f"{claim.arm!r} and {claim.against!r} are compared already")
    if course.begun:
        return replace(course, hypotheses=(*there, claim))
    return replace(course, study=replace(course.study, hypotheses=(*there, claim)))


def with_seeds(course: AmendedStudy, seeds: int) -> AmendedStudy:
    if course.begun:
        if not course.hypotheses:
            raise Refused("the looks were fixed before the data; only a claim that is added can be given seeds")
        return replace(course, seeds=seeds)
    study = course.study
    asked = {name for claim in study.hypotheses for name in (claim.arm, claim.against)}
    if len(asked) * seeds > study.budget:
        raise Refused(f"{seeds} seeds of {len(asked)} arms are more than the budget of {study.budget:g} full runs")
    return replace(course, study=replace(study, looks=looks_up_to(study.looks, seeds)))


def looks_up_to(looks: tuple[int, ...], seeds: int) -> tuple[int, ...]:
    return (*(look for look in looks if look < seeds), seeds)


def promoted(course: AmendedStudy, action: Promote) -> AmendedStudy:
    if course.begun:
        raise Refused("the data have begun: what was exploratory stays so")
    claims = course.study.hypotheses
    chosen = [c for c in claims if (c.arm, c.against, c.confirmatory) == (action.arm, action.against, False)]
    if not chosen:
        raise Refused(f"no exploratory hypothesis says {action.arm!r} scores higher than {action.against!r}")
    kept = tuple(replace(c, confirmatory=True) if c in chosen else c for c in claims)
    return replace(course, study=replace(course.study, hypotheses=kept))


def with_probe(course: AmendedStudy, action: RequestProbe) -> AmendedStudy:
    if not course.begun:
        raise Refused("a probe is of something that was seen, and nothing has run yet")
    arm = known_arm(course, action.arm)
    check_setting(course.study, action.changes)
    return replace(course, probes=(*course.probes, (arm.name, {**arm.changes, **action.changes})))


def capped(course: AmendedStudy, runs: float) -> AmendedStudy:
    if runs > course.study.budget:
        raise Refused(f"cap = {runs:g} is above the budget of {course.study.budget:g} full runs, which was fixed")
    return replace(course, cap=runs)


def without(course: AmendedStudy, arm: str) -> AmendedStudy:
    known_arm(course, arm)
    kept = tuple(claim for claim in course.hypotheses if arm not in (claim.arm, claim.against))
    dropped = tuple(claim for claim in course.hypotheses if claim not in kept)
    return replace(course, vetoed=course.vetoed | {arm}, hypotheses=kept, dropped=(*course.dropped, *dropped))


NOT_ADDED = "granted, and not tested"
"""The decision that says which claims, and why."""


def not_added(course: AmendedStudy, left: float) -> dict[str, str]:
    """Claims that were granted and that no annex tests, with the reason."""
    reasons = {
        claim.claim: f"arm {min({claim.arm, claim.against} & course.vetoed)!r} was vetoed" for claim in course.dropped
    }
    return reasons if left > 0 else reasons | {claim.claim: "nothing is left to spend" for claim in course.hypotheses}


def annex(course: AmendedStudy, settings: Mapping[str, Setting], left: float) -> Study | None:
    """The study of what was added, or None. Arms that were tuned run at the setting they were judged at."""
    asked = {name for claim in course.hypotheses for name in (claim.arm, claim.against)} - course.vetoed
    if not asked or left <= 0:
        return None
    arms = [
        replace(arm, changes=settings[name], nuisance=()) if name in settings else arm
        for name, arm in course.all_arms.items()
        if name in asked
    ]
    study = course.study
    return replace(
        study,
        topic=f"{study.topic} (added after the data)",
        arms=tuple(arms),
        hypotheses=course.hypotheses,
        budget=left,
        looks=looks_up_to(study.looks, course.seeds) if course.seeds else study.looks,
    )


PLANNING = -1
"""The point of what is asked before a study is fixed."""


class AmendmentLog:
    """The requests of a plan, or of a running study, and the course they have made of it."""

    def __init__(self, course: AmendedStudy, book: StudyLog, left: Callable[[], float]) -> None:
        self.course = course
        self.point = PLANNING
        self._book = book
        self._left = left
        self._taken: dict[Origin, int] = {"human": 0, "llm": 0}

    def take(self, said: object, origin: Origin) -> Amendment:
        """The next request of this origin: as the book has it, or granted or refused now."""
        amendment = self.recorded(origin) or self._judge(said, origin)
        self._taken[origin] += 1
        if not amendment.refused:
            self.course = grant(self.course, parsed(origin, amendment.asked), origin, EVERYTHING)
        return amendment

    def recorded(self, origin: Origin) -> Amendment | None:
        """What the book has as the next request of this origin, if that was taken by now."""
        planning = self.point == PLANNING
        mine = [a for a in self._book.amendments if a.origin == origin and (a.point == PLANNING) == planning]
        following = mine[self._taken[origin] :][:1]
        return following[0] if following and following[0].point <= self.point else None

    def pass_over(self, origin: Origin) -> None:
        """What the book has of this origin was taken elsewhere."""
        while self.recorded(origin):
            self._taken[origin] += 1

    def taken(self, origin: Origin) -> int:
        """How many requests of this origin were taken."""
        return self._taken[origin]

    def granted(self, action: Action, origin: Origin) -> AmendedStudy:
        """The course with this, too. Raises `Refused`."""
        if origin == "llm" and isinstance(action, AddArm):
            check_name(action.arm)  # here alone: what was granted once stands
        return grant(self.course, action, origin, self._left())

    def refuse(self, said: object, origin: Origin, refusal: Refused) -> Amendment:
        """Record that something was asked, and why it was not granted."""
        amendment = Amendment(self.point, origin, {"text": as_text(said)}, as_text(str(refusal)))
        self._book.append("refusal", amendment.to_json())
        return self._book.amendments[-1]

    def _judge(self, said: object, origin: Origin) -> Amendment:
        try:
            action = parsed(origin, loads(said) if isinstance(said, str) else said)
            self.granted(action, origin)
        except Refused as refusal:
            return self.refuse(said, origin, refusal)
        amendment = Amendment(self.point, origin, action.model_dump(mode="json"))
        self._book.append("amendment", amendment.to_json())
        return self._book.amendments[-1]


def parsed(origin: Origin, fields: object) -> Action:
    return parse(REQUEST, fields) if origin == "human" else parse(PROPOSAL, fields)
