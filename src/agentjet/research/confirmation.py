"""Confirming: the chosen settings are frozen, run with fresh seeds, and judged at the looks declared before.

Holm's procedure over the confirmatory hypotheses, by looks (Maurer and Bretz 2013): each is tested at its share of
alpha, and a hypothesis that is called by its sign hands its share on. Equivalence is a family of its own, with an alpha
of its own: a hypothesis has an effect or has none, so at most one of its two errors is possible.

A difference may be called at any look, equivalence at the last one only: a few seeds that agree say little about
the one in ten that fails, and a single test needs no correction for looks. The last look is the one after which no
more scores come; it is read from those that there are, whatever was lost. Arms that both had nothing to learn from are
not called equivalent (`nothing_to_learn`). A hypothesis that the last look is unlikely to settle is given up
before it: that saves its seeds, and can call nothing wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentjet.research.launcher import OutOfBudget, TrialLauncher, seed_of
from agentjet.research.models import Finding, Hypothesis, Outcome, Setting, Study, Trial
from agentjet.research.rules import share_equal
from agentjet.research.run_signals import MANY_FAILED, Signals, held_out_counts
from agentjet.research.statistics import LookResult, nominal_level, permutation_p, predictive_power, read, welch

MIN_SCORES = 4
"""Scores per arm without which there is no verdict."""
DIRECTIONAL = ("supported", "refuted")
FUTILITY = 0.1
"""A smaller chance that the last look decides is not paid for."""


@dataclass
class Evidence:
    """Outcomes of the confirming trials, by arm, in the order of their seeds."""

    settings: Mapping[str, Setting]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def scores(self, arm: str) -> list[float]:
        """Of every run that is a result: the diverged ones too."""
        return [outcome.score for outcome in self.outcomes.get(arm, []) if outcome.score is not None]

    def launched(self, arm: str) -> int:
        """Its seeds so far, those that were lost for good included."""
        return len(self.outcomes.get(arm, []))

    def trials(self, *arms: str) -> tuple[str, ...]:
        return tuple(outcome.trial for arm in arms for outcome in self.outcomes.get(arm, []))


def confirm(study: Study, settings: Mapping[str, Setting], desk: TrialLauncher) -> list[Finding]:
    """One finding for each hypothesis, in their order."""
    desk.book.decide("frozen", {name: dict(setting) for name, setting in sorted(settings.items())})
    evidence = Evidence(settings)
    findings: dict[str, Finding] = {}
    why = ""
    for seeds in study.looks:
        usable = settings.keys() - desk.vetoed
        still_open = [h for h in study.hypotheses if h.id not in findings and {h.arm, h.against} <= usable]
        if not still_open:
            break
        try:
            extend(study, evidence, still_open, seeds, desk)
        except OutOfBudget as refusal:
            why = str(refusal)
            break
        judge(study, evidence, still_open, findings)
        if seeds < study.looks[-1]:
            stop_for_futility(study, evidence, still_open, findings)
        record(study, findings, desk)
    for hypothesis in study.hypotheses:
        if hypothesis.id in findings:
            continue
        if vetoed := sorted({hypothesis.arm, hypothesis.against} & desk.vetoed):
            trials = evidence.trials(hypothesis.arm, hypothesis.against)
            reason = f"arm {vetoed[0]!r} was vetoed"
            findings[hypothesis.id] = Finding(hypothesis.id, "inconclusive", reason, trials=trials)
        else:
            tuned = {hypothesis.arm, hypothesis.against} <= settings.keys()
            reason = why if tuned else "the budget did not suffice to tune both arms"
            shares = open_shares(study, findings)
            findings[hypothesis.id] = finding(study, evidence, hypothesis, reason=reason, shares=shares)
    record(study, findings, desk)
    return [findings[hypothesis.id] for hypothesis in study.hypotheses]


def record(study: Study, findings: Mapping[str, Finding], desk: TrialLauncher) -> None:
    """What is decided so far, each finding once: whoever looks on sees it before the study ends."""
    for hypothesis in study.hypotheses:
        if hypothesis.id in findings:
            desk.book.decide(f"finding {hypothesis.id}", findings[hypothesis.id].to_json(), kind="finding")


def extend(study: Study, evidence: Evidence, hypotheses: list[Hypothesis], seeds: int, desk: TrialLauncher) -> None:
    """Run every arm that is still asked about up to so many seeds. Raises `OutOfBudget`, having run none of it.

    Seed by seed over the arms, and back through them with the next seed: what changes with time is then no arm's.
    """
    asked = {name for hypothesis in hypotheses for name in (hypothesis.arm, hypothesis.against)}
    arms = [arm.name for arm in study.arms if arm.name in asked]
    trials = [
        Trial(study.id, arm, evidence.settings[arm], seed_of(study, "confirm", number), "confirm")
        for number in range(seeds)
        for arm in (reversed(arms) if number % 2 else arms)
        if number >= evidence.launched(arm)
    ]
    for trial, outcome in zip(trials, desk.run(trials), strict=True):
        evidence.outcomes.setdefault(trial.arm, []).append(outcome)


def judge(study: Study, evidence: Evidence, hypotheses: list[Hypothesis], findings: dict[str, Finding]) -> None:
    """Add what this look decides. A decision raises the shares of the others, so it is gone over until none falls."""
    while True:
        shares = open_shares(study, findings)
        news = [finding(study, evidence, h, shares=shares) for h in hypotheses if h.id not in findings]
        decided = [found for found in news if found.verdict != "inconclusive"]
        if not decided:
            return
        findings.update({found.hypothesis: found for found in decided})


def stop_for_futility(
    study: Study, evidence: Evidence, hypotheses: list[Hypothesis], findings: dict[str, Finding]
) -> None:
    """Close as inconclusive what even the whole of alpha, if the others were to hand it on, would hardly settle."""
    for hypothesis in hypotheses:
        a, b = evidence.scores(hypothesis.arm), evidence.scores(hypothesis.against)
        if hypothesis.id in findings or min(len(a), len(b)) < MIN_SCORES:
            continue
        chance = predictive_power(
            welch(a, b),
            min(len(a), len(b)),
            study.looks[-1],
            sesoi=study.sesoi,
            difference_level=nominal_level(study.looks, 2 * study.alpha),
            equivalence_level=study.alpha,
        )
        if chance < FUTILITY:
            reason = f"{study.looks[-1]} seeds would settle it with a chance of {chance:.0%}, and were not run"
            shares = open_shares(study, findings)
            findings[hypothesis.id] = finding(study, evidence, hypothesis, reason=reason, shares=shares)


@dataclass(frozen=True, slots=True)
class Shares:
    """Alpha of a confirmatory hypothesis that is still open, for each of the two families."""

    difference: float
    equivalence: float


def open_shares(study: Study, findings: Mapping[str, Finding]) -> Shares:
    family = [h.id for h in study.hypotheses if h.confirmatory]
    verdicts = [findings[name].verdict for name in family if name in findings]
    called = sum(verdict in DIRECTIONAL for verdict in verdicts)
    equivalent = verdicts.count("practically_equivalent")
    return Shares(
        study.alpha / max(1, len(family) - called),
        study.alpha / max(1, len(family) - equivalent),
    )


def finding(study: Study, evidence: Evidence, hypothesis: Hypothesis, *, shares: Shares, reason: str = "") -> Finding:
    """What the scores so far say of one hypothesis. An exploratory one is read at the full alpha, and says so."""
    a, b = evidence.scores(hypothesis.arm), evidence.scores(hypothesis.against)
    chosen = {
        arm: dict(evidence.settings[arm]) for arm in (hypothesis.arm, hypothesis.against) if arm in evidence.settings
    }
    trials = evidence.trials(hypothesis.arm, hypothesis.against)
    if min(len(a), len(b)) < MIN_SCORES:
        few, arm = min((len(a), hypothesis.arm), (len(b), hypothesis.against))
        reason = reason or f"{few} seeds of {arm!r} came back; at least {MIN_SCORES} per arm are required"
        reason += losses(evidence, hypothesis)
        return Finding(hypothesis.id, "inconclusive", reason, settings=chosen, trials=trials)
    if not hypothesis.confirmatory:
        shares = Shares(study.alpha, study.alpha)
    look = max(evidence.launched(hypothesis.arm), evidence.launched(hypothesis.against))
    untested = all(
        nothing_to_learn(evidence.outcomes[arm], study.sesoi) for arm in (hypothesis.arm, hypothesis.against)
    )
    reading = read(
        a,
        b,
        sesoi=study.sesoi,
        difference_level=nominal_level(study.looks, 2 * shares.difference),  # one side of it can err
        equivalence_level=shares.equivalence if look >= study.looks[-1] and not untested else None,
    )
    if reading.verdict == "inconclusive":
        reason = reason or "the last look left it open"
        reason += remarks(reading, untested=untested)
    else:
        reason = f"look at {look} seeds" + ("" if hypothesis.confirmatory else ", exploratory")
    return Finding(
        hypothesis.id,
        reading.verdict,
        reason + losses(evidence, hypothesis) + replays(evidence, hypothesis),
        estimate=reading.estimate,
        low=reading.low,
        high=reading.high,
        confidence=1 - reading.level,
        p_value=reading.p_value,
        permutation_p=permutation_p(a, b),
        seeds=min(len(a), len(b)),
        settings=chosen,
        trials=trials,
    )


def nothing_to_learn(outcomes: list[Outcome], sesoi: float) -> bool:
    """Whether most of an arm's runs had no gradient from the start on, and moved no score by what matters.

    Everybody fails, or everybody succeeds: such arms agree whatever separates them. Read off what training reported;
    a run that reported nothing is not nothing_to_learn.
    """
    ended = [outcome for outcome in outcomes if outcome.score is not None]
    still = [
        outcome
        for outcome in ended
        if share_equal(Signals(outcome.signals)) is not None
        and all(abs(value - outcome.curve[0]) < sesoi for value in outcome.curve)
    ]
    return 2 * len(still) > len(ended)


def remarks(reading: LookResult, *, untested: bool) -> str:
    """What else is to be said of a look that left it open."""
    said = ""
    if reading.low == reading.high:
        said += "; within an arm all seeds scored the same, which does not tell how far chance reaches"
    elif reading.low > 0 or reading.high < 0:
        said += "; there is a difference, whether it matters is open"
    if untested:
        said += "; neither arm had anything to learn from, so that they agree says nothing"
    return said


def losses(evidence: Evidence, hypothesis: Hypothesis) -> str:
    """Which seeds the infrastructure lost for good."""
    arms = (hypothesis.arm, hypothesis.against)
    lost = {arm: evidence.launched(arm) - len(evidence.scores(arm)) for arm in arms}
    counts = [f"{count} of {arm!r}" for arm, count in lost.items() if count]
    return f"; seeds lost for good: {', '.join(counts)}" if counts else ""


def replays(evidence: Evidence, hypothesis: Hypothesis) -> str:
    """Of which arms so many held-out plays failed that their scores may be of a choice among plays."""
    shares = {arm: held_out_counts(evidence.outcomes[arm]).share for arm in (hypothesis.arm, hypothesis.against)}
    told = [f"{share:.0%} of {arm!r}" for arm, share in shares.items() if share > MANY_FAILED]
    return f"; held-out plays that failed and were played again: {', '.join(told)}" if told else ""
