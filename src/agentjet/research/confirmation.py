"""Confirmation: the chosen settings run with fresh seeds and are tested at the declared looks.

Holm's procedure over looks (Maurer and Bretz 2013): each confirmatory hypothesis is tested at its share of alpha. A
supported or refuted hypothesis passes its share on. Equivalence is a separate family with its own alpha: a hypothesis
either has an effect or has none, so only one of its two errors is possible.

A difference can be found at any look, equivalence only at the last one. A few seeds that agree cannot exclude one in
ten that fails. A single test needs no correction for looks. The last look uses the scores that exist, even if seeds
were lost. Two arms without anything to learn from are not called equivalent (`nothing_to_learn`).

Testing a hypothesis stops for futility if the last look is unlikely to decide it. That saves seeds and causes no wrong
verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from agentjet.research.diagnosis import had_nothing_to_learn
from agentjet.research.launcher import OutOfBudget, TrialLauncher, seed_of
from agentjet.research.models import Finding, Hypothesis, Outcome, Study, Trial
from agentjet.research.records import Setting
from agentjet.research.run_record import MANY_FAILED, held_out_counts
from agentjet.research.statistics import LookResult, nominal_level, predictive_power, read, welch

MIN_SCORES = 4
"""Minimum scores per arm for a verdict."""
DIRECTIONAL = ("supported", "refuted")
DIGITS = 6
"""Decimals in which runs must differ. Sums in another order differ in the last ones."""
UNSEEN = "; all seeds of an arm scored the same, so the interval has what so many seeds cannot exclude"
FUTILITY = 0.1
"""A hypothesis is stopped if the last look would decide it with a smaller chance than this."""


@dataclass
class Evidence:
    """Outcomes of the confirming trials by arm, in the order of their seeds."""

    settings: Mapping[str, Setting]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def scores(self, arm: str) -> list[float]:
        """Scores of all results, including diverged runs."""
        return [outcome.score for outcome in self.outcomes.get(arm, []) if outcome.score is not None]

    def launched(self, arm: str) -> int:
        """Number of seeds so far, including lost ones."""
        return len(self.outcomes.get(arm, []))

    def trials(self, *arms: str) -> tuple[str, ...]:
        return tuple(outcome.trial for arm in arms for outcome in self.outcomes.get(arm, []))


def confirm(study: Study, settings: Mapping[str, Setting], launcher: TrialLauncher) -> list[Finding]:
    """Returns one finding per hypothesis, in their order."""
    launcher.log.decide("frozen", {name: dict(setting) for name, setting in sorted(settings.items())})
    evidence = Evidence(settings)
    findings: dict[str, Finding] = {}
    why = ""
    for seeds in study.looks:
        still_open = [h for h in study.hypotheses if h.id not in findings and {h.arm, h.against} <= settings.keys()]
        if not still_open:
            break
        try:
            extend(study, evidence, still_open, seeds, launcher)
        except OutOfBudget as refusal:
            why = str(refusal)
            break
        decide_look(study, evidence, still_open, findings)
        if seeds < study.looks[-1]:
            stop_for_futility(study, evidence, still_open, findings)
        at_look = {h.id: findings.get(h.id) or finding(study, evidence, h, findings) for h in still_open}
        launcher.log.decide(f"look {seeds}", {name: found.to_json() for name, found in at_look.items()})
        record(study, findings, launcher)
    for hypothesis in study.hypotheses:
        if hypothesis.id in findings:
            continue
        tuned = {hypothesis.arm, hypothesis.against} <= settings.keys()
        reason = why if tuned else "the budget was too small to tune both arms"
        findings[hypothesis.id] = finding(study, evidence, hypothesis, findings, reason)
    record(study, findings, launcher)
    return [findings[hypothesis.id] for hypothesis in study.hypotheses]


def record(study: Study, findings: Mapping[str, Finding], launcher: TrialLauncher) -> None:
    """Records each new finding, so that it is visible before the study ends."""
    for hypothesis in study.hypotheses:
        if hypothesis.id in findings:
            launcher.log.decide(f"finding {hypothesis.id}", findings[hypothesis.id].to_json(), kind="finding")


def extend(study: Study, evidence: Evidence, hypotheses: list[Hypothesis], seeds: int, launcher: TrialLauncher) -> None:
    """Runs every arm under test up to `seeds` seeds. Raises `OutOfBudget` before the first launch.

    The order of the arms is reversed with each seed, so that changes over time affect all arms alike.
    """
    asked = {name for hypothesis in hypotheses for name in (hypothesis.arm, hypothesis.against)}
    arms = [arm.name for arm in study.arms if arm.name in asked]
    trials = [
        Trial(study.id, arm, evidence.settings[arm], seed_of(study, "confirm", number), "confirm")
        for number in range(seeds)
        for arm in (reversed(arms) if number % 2 else arms)
        if number >= evidence.launched(arm)
    ]
    for trial, outcome in zip(trials, launcher.run(trials), strict=True):
        evidence.outcomes.setdefault(trial.arm, []).append(outcome)


def decide_look(study: Study, evidence: Evidence, hypotheses: list[Hypothesis], findings: dict[str, Finding]) -> None:
    """Adds the decisions of this look. A decision raises the shares of the others, so the test repeats until none is
    added.
    """
    while True:
        news = [finding(study, evidence, h, findings) for h in hypotheses if h.id not in findings]
        decided = [found for found in news if found.verdict != "inconclusive"]
        if not decided:
            return
        findings.update({found.hypothesis: found for found in decided})


def stop_for_futility(
    study: Study, evidence: Evidence, hypotheses: list[Hypothesis], findings: dict[str, Finding]
) -> None:
    """Closes hypotheses that even the whole alpha would hardly decide at the last look."""
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
            reason = f"{study.looks[-1]} seeds would decide it with a chance of {chance:.0%} only, so they were not run"
            findings[hypothesis.id] = finding(study, evidence, hypothesis, findings, reason)


@dataclass(frozen=True, slots=True)
class Shares:
    """Alpha of an open confirmatory hypothesis, in each of the two families."""

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


def finding(
    study: Study, evidence: Evidence, hypothesis: Hypothesis, findings: Mapping[str, Finding], reason: str = ""
) -> Finding:
    """Reads the scores of one hypothesis, at the share that the earlier findings leave. An exploratory one is tested at
    the full alpha and marked as exploratory.
    """
    a, b = evidence.scores(hypothesis.arm), evidence.scores(hypothesis.against)
    chosen = {
        arm: dict(evidence.settings[arm]) for arm in (hypothesis.arm, hypothesis.against) if arm in evidence.settings
    }
    trials = evidence.trials(hypothesis.arm, hypothesis.against)
    if min(len(a), len(b)) < MIN_SCORES:
        few, arm = min((len(a), hypothesis.arm), (len(b), hypothesis.against))
        reason = reason or f"{few} seeds of {arm!r} came back; at least {MIN_SCORES} per arm are required"
        reason += lost_seeds(evidence, hypothesis)
        return Finding(hypothesis.id, "inconclusive", reason, settings=chosen, trials=trials)
    shares = open_shares(study, findings) if hypothesis.confirmatory else Shares(study.alpha, study.alpha)
    look = max(evidence.launched(hypothesis.arm), evidence.launched(hypothesis.against))
    untested = all(
        nothing_to_learn(evidence.outcomes[arm], study.sesoi) for arm in (hypothesis.arm, hypothesis.against)
    )
    both = [outcome for arm in (hypothesis.arm, hypothesis.against) for outcome in evidence.outcomes[arm]]
    all_scores = [score for outcome in both for score in (*outcome.curve, outcome.score) if score is not None]
    reading = read(
        a,
        b,
        sesoi=study.sesoi,
        difference_level=nominal_level(study.looks, 2 * shares.difference),  # two-sided, and one side can err
        equivalence_level=shares.equivalence if look >= study.looks[-1] and not untested else None,
        different=min(different_runs(evidence.outcomes[arm]) for arm in (hypothesis.arm, hypothesis.against)),
        span=(min(all_scores), max(all_scores)),
    )
    if reading.verdict == "inconclusive":
        reason = reason or "undecided at the last look"
        reason += remarks(reading, untested=untested)
    else:
        reason = f"look at {look} seeds" + ("" if hypothesis.confirmatory else ", exploratory")
        reason += UNSEEN if reading.p_value is None else ""
    return Finding(
        hypothesis.id,
        reason=reason + lost_seeds(evidence, hypothesis) + repeated_episodes(evidence, hypothesis),
        **asdict(reading),
        seeds=min(len(a), len(b)),
        settings=chosen,
        trials=trials,
    )


def nothing_to_learn(outcomes: list[Outcome], sesoi: float) -> bool:
    """True if most of an arm's runs had no gradient from the start and moved no score by `sesoi`.

    The scores of two such arms agree for no other reason. A run that reported no metrics does not count.
    """
    ended = [outcome for outcome in outcomes if outcome.score is not None]
    still = [
        outcome
        for outcome in ended
        if had_nothing_to_learn(outcome) and all(abs(value - outcome.curve[0]) < sesoi for value in outcome.curve)
    ]
    return 2 * len(still) > len(ended)


def different_runs(outcomes: list[Outcome]) -> int:
    """Number of runs with a score that differ in their curves or training rewards, at least 1. Seeds that are ignored
    repeat one run.
    """
    ways = {
        tuple(round(value or 0.0, DIGITS) for value in (*outcome.curve, *outcome.signals.get("reward/mean", ())))
        for outcome in outcomes
        if outcome.score is not None
    }
    return max(1, len(ways))


def remarks(reading: LookResult, *, untested: bool) -> str:
    """Explains a look that decided nothing."""
    text = ""
    if reading.p_value is None:
        text += UNSEEN
    elif reading.low == reading.high:
        text += "; all seeds of an arm scored the same, so the effect of chance is unknown"
    elif reading.low > 0 or reading.high < 0:
        text += "; there is a difference, but it may be too small to matter"
    if untested:
        text += "; neither arm had anything to learn from, so equal scores are not evidence"
    return text


def lost_seeds(evidence: Evidence, hypothesis: Hypothesis) -> str:
    """Lists seeds that the infrastructure lost for good."""
    arms = (hypothesis.arm, hypothesis.against)
    lost = {arm: evidence.launched(arm) - len(evidence.scores(arm)) for arm in arms}
    counts = [f"{count} of {arm!r}" for arm, count in lost.items() if count]
    return f"; lost seeds: {', '.join(counts)}" if counts else ""


def repeated_episodes(evidence: Evidence, hypothesis: Hypothesis) -> str:
    """Lists arms with many failed held-out episodes, whose scores may come from a selection."""
    shares = {arm: held_out_counts(evidence.outcomes[arm]).share for arm in (hypothesis.arm, hypothesis.against)}
    counts = [f"{share:.0%} of {arm!r}" for arm, share in shares.items() if share > MANY_FAILED]
    return f"; failed and repeated held-out episodes: {', '.join(counts)}" if counts else ""
