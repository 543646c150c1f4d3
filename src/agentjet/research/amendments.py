"""Amendments: `grant` applies a request to an `AmendedStudy`, and `AmendmentLog` records each request with its result.

Before the data, a request changes the plan. After the first launch the study is fixed: an arm can be vetoed and the
budget capped. Additions become a separate study, the annex. It is exploratory, starts after the findings, uses fresh
seeds on both sides of each claim, and spends what the first study left. So no observation can change a declared test,
and no claim is tested on the scores that suggested it.
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
    """A study with its granted requests. Immutable: each granted request returns a new one."""

    study: Study
    """Fixed if `begun`; otherwise the plan so far."""
    begun: bool
    codes: frozenset[str] = frozenset()
    """Hashes of code that arms may use."""
    paused: bool = False
    cap: float | None = None
    vetoed: frozenset[str] = frozenset()
    stopped: bool = False
    arms: tuple[Arm, ...] = ()
    """Added after the data began, like `hypotheses`."""
    hypotheses: tuple[Hypothesis, ...] = ()
    dropped: tuple[Hypothesis, ...] = ()
    """Added hypotheses that a veto removed."""
    seeds: int = 0
    """The last look of the annex; 0 means that of the study."""
    probes: tuple[tuple[str, Setting], ...] = ()
    """Arms with all differences from the base, each to be run once."""

    @property
    def all_arms(self) -> dict[str, Arm]:
        return {arm.name: arm for arm in (*self.study.arms, *self.arms)}

    def least_cost(self) -> float:
        """Full runs needed to reach the first look, or the requested one."""
        study = self.study
        claims = self.hypotheses if self.begun else study.hypotheses
        asked = {name for claim in claims for name in (claim.arm, claim.against)}
        return len(asked) * (self.seeds or study.looks[0]) + len(self.probes)


EVERYTHING = float("inf")
"""A budget for replaying granted requests, which were already checked."""


def grant(amended: AmendedStudy, action: Action, origin: Origin, left: float) -> AmendedStudy:
    """Returns the study with the action applied. Raises `Refused`. `left` is the remaining budget in full runs."""
    if origin == "llm":
        check_words(action)
    match action:
        case AddArm():
            after = with_arm(amended, action, origin)
        case AddHypothesis():
            after = with_claim(amended, Hypothesis("", action.arm, action.against, action.confirmatory, origin))
        case AddSeeds():
            after = with_seeds(amended, action.seeds)
        case Promote():
            after = promoted(amended, action)
        case RequestProbe():
            after = with_probe(amended, action)
        case Pause() | Resume():
            after = replace(amended, paused=isinstance(action, Pause))
        case Cap():
            after = capped(amended, action.runs)
        case Veto():
            after = without(amended, action.arm)
        case Stop():
            after = replace(amended, stopped=True)
        case _:
            raise AssertionError(action)
    if after.least_cost() > max(left, amended.least_cost()):
        raise Refused(f"this takes {after.least_cost():g} full runs at the least, and {left:.2f} are left")
    return after


def check_words(action: Action) -> None:
    """Refuses numbers in a model's reasons: numbers come from trials."""
    why = getattr(action, "why", "")
    if any(character.isnumeric() for character in why):
        raise Refused(f"why = {why!r}: a reason with numbers; numbers come from trials")


def check_name(arm: str) -> None:
    """Refuses a model's arm name with a judging word, because the name is printed in every table of the report."""
    from agentjet.research.report.document import CLAIMS, OVERSTATED

    for word in re.findall(r"[^\W\d_]+", arm.lower()):
        if word in OVERSTATED.union(CLAIMS, *CLAIMS.values()):
            raise Refused(f"arm = {arm!r}: {word!r} is a judgement; name the arm after its change")


def known_arm(amended: AmendedStudy, name: str) -> Arm:
    if name not in amended.all_arms:
        raise Refused(f"{name!r} is not an arm of the study; the arms are {sorted(amended.all_arms)}")
    if name in amended.vetoed:
        raise Refused(f"arm {name!r} was vetoed")
    return amended.all_arms[name]


def with_arm(amended: AmendedStudy, action: AddArm, origin: Origin) -> AmendedStudy:
    against = known_arm(amended, action.against)
    if action.arm in amended.all_arms:
        raise Refused(f"there is an arm {action.arm!r} already; choose another name")
    if action.code and action.code not in amended.codes:
        raise Refused(f"code = {action.code!r} is not in the study's keeping")
    check_setting(amended.study, action.changes)
    nuisance = tuple(knob for knob in against.nuisance if knob.name not in action.changes)
    arm = Arm(action.arm, dict(action.changes), nuisance, action.code)
    subject = amended.study.subject
    if other := equal_arm(arm, amended.all_arms.values(), base_of(subject) if subject else None):
        raise Refused(f"arm {action.arm!r} would be arm {other.name!r} under another name")
    if amended.begun:
        amended = replace(amended, arms=(*amended.arms, arm))
    else:
        amended = replace(amended, study=replace(amended.study, arms=(*amended.study.arms, arm)))
    return with_claim(amended, Hypothesis("", action.arm, action.against, False, origin))


def with_claim(amended: AmendedStudy, claim: Hypothesis) -> AmendedStudy:
    """Adds a claim. Its text is generated, so that proposed text is never printed as a claim."""
    for name in (claim.arm, claim.against):
        known_arm(amended, name)
    if claim.arm == claim.against:
        raise Refused(f"{claim.arm!r} is compared with itself")
    if amended.begun and claim.confirmatory:
        raise Refused("the data collection has started: new claims are exploratory; set confirmatory = false")
    claim = replace(claim, claim=f"{claim.arm} scores higher than {claim.against}")
    there = amended.hypotheses if amended.begun else amended.study.hypotheses
    if any({claim.arm, claim.against} == {other.arm, other.against} for other in there):
        raise Refused(f"{claim.arm!r} and {claim.against!r} are compared already")
    if amended.begun:
        return replace(amended, hypotheses=(*there, claim))
    return replace(amended, study=replace(amended.study, hypotheses=(*there, claim)))


def with_seeds(amended: AmendedStudy, seeds: int) -> AmendedStudy:
    if amended.begun:
        if not amended.hypotheses:
            raise Refused("the looks were fixed before the data; only a claim that is added can be given seeds")
        return replace(amended, seeds=seeds)
    study = amended.study
    asked = {name for claim in study.hypotheses for name in (claim.arm, claim.against)}
    if len(asked) * seeds > study.budget:
        raise Refused(f"{seeds} seeds of {len(asked)} arms are more than the budget of {study.budget:g} full runs")
    return replace(amended, study=replace(study, looks=looks_up_to(study.looks, seeds)))


def looks_up_to(looks: tuple[int, ...], seeds: int) -> tuple[int, ...]:
    return (*(look for look in looks if look < seeds), seeds)


def promoted(amended: AmendedStudy, action: Promote) -> AmendedStudy:
    if amended.begun:
        raise Refused("the data collection has started: an exploratory claim stays exploratory")
    claims = amended.study.hypotheses
    chosen = [c for c in claims if (c.arm, c.against, c.confirmatory) == (action.arm, action.against, False)]
    if not chosen:
        raise Refused(f"there is no exploratory hypothesis that {action.arm!r} scores higher than {action.against!r}")
    kept = tuple(replace(c, confirmatory=True) if c in chosen else c for c in claims)
    return replace(amended, study=replace(amended.study, hypotheses=kept))


def with_probe(amended: AmendedStudy, action: RequestProbe) -> AmendedStudy:
    if not amended.begun:
        raise Refused("a probe is of something that was seen, and nothing has run yet")
    arm = known_arm(amended, action.arm)
    check_setting(amended.study, action.changes)
    return replace(amended, probes=(*amended.probes, (arm.name, {**arm.changes, **action.changes})))


def capped(amended: AmendedStudy, runs: float) -> AmendedStudy:
    if runs > amended.study.budget:
        raise Refused(f"cap = {runs:g} is above the budget of {amended.study.budget:g} full runs; the budget is fixed")
    return replace(amended, cap=runs)


def without(amended: AmendedStudy, arm: str) -> AmendedStudy:
    known_arm(amended, arm)
    kept = tuple(claim for claim in amended.hypotheses if arm not in (claim.arm, claim.against))
    dropped = tuple(claim for claim in amended.hypotheses if claim not in kept)
    return replace(amended, vetoed=amended.vetoed | {arm}, hypotheses=kept, dropped=(*amended.dropped, *dropped))


NOT_ADDED = "granted, and not tested"
"""Name of the decision that lists granted claims which were not tested."""


def not_added(amended: AmendedStudy, left: float) -> dict[str, str]:
    """Returns granted claims that no annex tests, with the reason."""
    reasons = {
        claim.claim: f"arm {min({claim.arm, claim.against} & amended.vetoed)!r} was vetoed" for claim in amended.dropped
    }
    return reasons if left > 0 else reasons | {claim.claim: "nothing is left to spend" for claim in amended.hypotheses}


def annex(amended: AmendedStudy, settings: Mapping[str, Setting], left: float) -> Study | None:
    """Returns the study of the additions, or None. Tuned arms use the setting they were judged at."""
    asked = {name for claim in amended.hypotheses for name in (claim.arm, claim.against)} - amended.vetoed
    if not asked or left <= 0:
        return None
    arms = [
        replace(arm, changes=settings[name], nuisance=()) if name in settings else arm
        for name, arm in amended.all_arms.items()
        if name in asked
    ]
    study = amended.study
    return replace(
        study,
        topic=f"{study.topic} (added after the data)",
        arms=tuple(arms),
        hypotheses=amended.hypotheses,
        budget=left,
        looks=looks_up_to(study.looks, amended.seeds) if amended.seeds else study.looks,
    )


PLANNING = -1
"""The point of requests made before a study is fixed."""


class AmendmentLog:
    """Requests to a plan or a running study, and the amended study that results."""

    def __init__(
        self,
        amended: AmendedStudy,
        log: StudyLog,
        left: Callable[[], float],
        check: Callable[[AmendedStudy], None] = lambda amended: None,
    ) -> None:
        """`left` returns the remaining budget. `check` raises `Refused` for a study that must not result."""
        self.amended = amended
        self.point = PLANNING
        self._log = log
        self._left = left
        self._check = check
        self._taken: dict[Origin, int] = {"human": 0, "llm": 0}

    def take(self, request: object, origin: Origin) -> Amendment:
        """Takes the next request of this origin: from the log, or grants or refuses it now."""
        amendment = self.recorded(origin) or self._judge(request, origin)
        self._taken[origin] += 1
        if not amendment.refused:
            self.amended = grant(self.amended, parse_action(origin, amendment.asked), origin, EVERYTHING)
        return amendment

    def recorded(self, origin: Origin) -> Amendment | None:
        """Returns the next logged request of this origin, if it was taken at or before this point."""
        planning = self.point == PLANNING
        mine = [a for a in self._log.amendments if a.origin == origin and (a.point == PLANNING) == planning]
        following = mine[self._taken[origin] :][:1]
        return following[0] if following and following[0].point <= self.point else None

    def skip_recorded(self, origin: Origin) -> None:
        """Skips logged requests of this origin that were already applied."""
        while self.recorded(origin):
            self._taken[origin] += 1

    def taken(self, origin: Origin) -> int:
        return self._taken[origin]

    def refuse(self, request: object, origin: Origin, refusal: Refused) -> Amendment:
        """Records a refused request with the reason."""
        amendment = Amendment(self.point, origin, {"text": as_text(request)}, as_text(str(refusal)))
        self._log.append("refusal", amendment.to_json())
        return self._log.amendments[-1]

    def _judge(self, request: object, origin: Origin) -> Amendment:
        try:
            action = parse_action(origin, loads(request) if isinstance(request, str) else request)
            if origin == "llm" and isinstance(action, AddArm):
                check_name(action.arm)  # only here, not in `grant`: a granted action must stay valid on resume
            self._check(grant(self.amended, action, origin, self._left()))
        except Refused as refusal:
            return self.refuse(request, origin, refusal)
        amendment = Amendment(self.point, origin, action.model_dump(mode="json"))
        self._log.append("amendment", amendment.to_json())
        return self._log.amendments[-1]


def parse_action(origin: Origin, fields: object) -> Action:
    return parse(REQUEST, fields) if origin == "human" else parse(PROPOSAL, fields)
