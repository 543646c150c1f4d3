"""1. Each arm is tuned before it is judged, with fewer runs than the grid, and judged on fresh seeds.
2. Halving is skipped if it would have lost something that matters.
3. Budget and reserve are respected. A hypothesis that cannot be paid ends as inconclusive, with the reason.
4. Lost runs are repeated with their seed, diverged ones count. The last look ignores runs that are lost for good.
5. A hypothesis that the last look would hardly decide is stopped for futility, with the reason.
6. Holm over looks: decided hypotheses pass their shares on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from agentjet.research.journal import StudyLog
from agentjet.research.models import Arm, Finding, Hypothesis, Outcome, Setting, Study, Trial
from agentjet.research.report import StudyView, render
from agentjet.research.scheduler import (
    Evidence,
    OutOfBudget,
    Spending,
    TrialLauncher,
    conduct,
    rank_loss,
    seed_of,
)
from agentjet.research.statistics import nominal_level
from tests.research.world import STUDY, Formula, hill, late


def conducted(study: Study, runner: Formula) -> tuple[Finding, StudyLog, Spending]:
    log = StudyLog()
    [finding], launcher = conduct(study, log, runner)
    return finding, log, launcher.spending


def test_arms_are_tuned_then_judged_on_fresh_seeds() -> None:
    finding, log, spending = conducted(STUDY, Formula())
    assert finding.verdict == "supported"
    assert finding.estimate == pytest.approx(3.0, abs=0.6)
    assert finding.low is not None and finding.high is not None and 0 < finding.low < 3.0 < finding.high
    assert {arm: setting["lr"] for arm, setting in finding.settings.items()} == {"a": 16.0, "b": 16.0}
    assert finding.seeds == 4, "a difference of ten deviations needs no second look"
    phases = {phase: {t.seed for t in log.trials.values() if t.phase == phase} for phase in ("explore", "confirm")}
    assert not phases["explore"] & phases["confirm"]
    assert {log.trials[name].phase for name in finding.trials} == {"confirm"}
    assert spending.total < 8 * 2 * 4 / 2, "the grid with as many seeds, halved"


def test_without_an_effect_it_is_equivalence_at_the_last_look() -> None:
    same = replace(STUDY, arms=(STUDY.arms[0], Arm("b", {"gain": 0.0}, STUDY.arms[0].nuisance)))
    finding, _, _ = conducted(same, Formula(noise=0.6))
    assert (finding.verdict, finding.seeds) == ("practically_equivalent", 12)
    assert finding.low is not None and finding.high is not None and -1 < finding.low < finding.high < 1


def test_halving_drops_at_the_first_rung() -> None:
    _, log, _ = conducted(STUDY, Formula())
    assert log.decisions["rungs"] == [1 / 9, 1 / 3, 1.0]
    ran = [t.fidelity for t in log.trials.values() if t.arm == "b" and t.phase == "explore"]
    assert (ran.count(1 / 9), ran.count(1 / 3), ran.count(1.0)) == (8, 3, 3 + 2)


def test_misleading_rungs_are_left_out() -> None:
    finding, log, _ = conducted(STUDY, Formula(score=late))
    assert log.decisions["rungs"] == [1.0]
    assert finding.settings["b"]["lr"] == 1.0
    assert finding.verdict == "supported"


def test_what_a_rung_would_have_lost() -> None:
    """Three of eight survive."""
    late = [1.0, 5.0, 2.0, 8.0, 3.0, 7.5, 4.0, 6.0]
    assert rank_loss([0, 0, 0, 9, 1, 2, 0, 0], late) == 0.0
    assert rank_loss([0, 1, 0, -9, 0, 2, 3, 0], late) == 0.5
    assert rank_loss([3, 0, 2, 0, 1, 0, 0, 0], late) == 5.0
    assert rank_loss([1.0] * 8, late) == rank_loss([float("-inf"), *late[1:]], late) == float("inf")


def test_a_rung_may_lose_what_does_not_matter() -> None:
    """Half a point at the end: irrelevant for an interest in points, too much for an interest in tenths."""

    def nearly(setting: Setting, fidelity: float) -> float:
        best_late = 0.5 if fidelity == 1 and setting["lr"] == 1.0 else 0.0
        return hill(setting, 1.0) if setting["lr"] != 1.0 else 10.0 * fidelity + best_late + float(setting["gain"])

    for sesoi, rungs in ((2.0, [1 / 9, 1 / 3, 1.0]), (0.2, [1.0])):
        _, log, _ = conducted(replace(STUDY, sesoi=sesoi), Formula(score=nearly, noise=0.0))
        assert log.decisions["rungs"] == rungs


def test_the_budget_is_kept_and_the_reserve_is() -> None:
    for budget in (0.5, 3.0, 12.0, 25.0, 40.0):
        finding, _, spending = conducted(replace(STUDY, budget=budget), Formula())
        assert spending.total <= budget
        assert spending.spent["explore"] <= 0.6 * budget + 1e-9
        if finding.verdict == "inconclusive":
            assert "budget" in finding.reason or "are left" in finding.reason
    assert finding.verdict == "supported"


def test_too_small_a_budget_is_said() -> None:
    finding, _, _ = conducted(replace(STUDY, budget=0.5), Formula())
    assert (finding.verdict, finding.estimate, finding.trials) == ("inconclusive", None, ())
    assert "budget" in finding.reason


def test_a_continued_run_costs_what_it_adds() -> None:
    launcher = TrialLauncher(STUDY, StudyLog(), Formula())
    third = Trial(STUDY.id, "a", {"lr": 1.0, "gain": 0.0}, 1, "explore", 1 / 3)
    launcher.run([third])
    launcher.run([replace(third, fidelity=1.0), replace(third, seed=2, fidelity=1 / 9)])
    assert launcher.spending.total == pytest.approx(1 + 1 / 9)
    with pytest.raises(OutOfBudget):
        launcher.run([replace(third, seed=seed, fidelity=1.0) for seed in range(3, 60)])
    assert launcher.spending.total == pytest.approx(1 + 1 / 9)


def test_a_lost_run_is_repeated_with_its_seed() -> None:
    runner = Formula(lost={1, 2, 30})
    finding, log, spending = conducted(STUDY, runner)
    undisturbed, _, _ = conducted(STUDY, Formula())
    assert finding == undisturbed
    assert sorted(log.attempts.values())[-3:] == [2, 2, 2]
    assert spending.repeated > 0
    repeated = [key for key in runner.launched if key.endswith("-2")]
    assert all(runner.launched[key] == runner.launched[key[:-1] + "1"] for key in repeated)


def test_an_infrastructure_that_loses_everything_proves_nothing() -> None:
    finding, log, spending = conducted(STUDY, Formula(always_lost=True))
    assert (finding.verdict, finding.seeds) == ("inconclusive", 0)
    assert spending.total <= STUDY.budget
    assert max(log.attempts.values()) <= 3


class Unlucky(Formula):
    """Loses the first so many confirming seeds of each arm, however often they are repeated."""

    def __init__(self, noise: float, **lost: int) -> None:
        super().__init__(score=lambda setting, fidelity: 0.0, noise=noise)
        self._lost = lost

    def collect(self, key: str) -> Outcome:
        trial = self.launched[key]
        early = [seed_of(PLAIN, "confirm", number) for number in range(self._lost.get(trial.arm, 0))]
        if trial.phase == "confirm" and trial.seed in early:
            return Outcome(trial.id, "infra_failed", note="lost")
        return super().collect(key)


PLAIN = replace(STUDY, arms=(Arm("a"), Arm("b", {"gain": 0.0})))
"""Nothing to tune, and no effect."""


@pytest.mark.parametrize(
    ("lost", "seeds", "said"),
    [
        ({}, 12, "look at 12 seeds"),
        ({"a": 1}, 11, "look at 12 seeds; lost seeds: 1 of 'a'"),
        ({"a": 1, "b": 1}, 11, "look at 12 seeds; lost seeds: 1 of 'b', 1 of 'a'"),
        ({"a": 2, "b": 7}, 5, "look at 12 seeds; lost seeds: 7 of 'b', 2 of 'a'"),
    ],
)
def test_the_last_look_is_read_without_what_is_lost_for_good(lost: dict[str, int], seeds: int, said: str) -> None:
    finding, _, _ = conducted(PLAIN, Unlucky(0.3, **lost))
    assert (finding.verdict, finding.seeds, finding.reason) == ("practically_equivalent", seeds, said)


def test_too_few_seeds_that_came_back_are_said_not_to_have_left_it_open() -> None:
    finding, _, _ = conducted(PLAIN, Unlucky(0.3, a=9))
    assert (finding.verdict, finding.estimate) == ("inconclusive", None)
    assert finding.reason == "3 seeds of 'a' came back; at least 4 per arm are required; lost seeds: 9 of 'a'"


@dataclass
class Drifting(Formula):
    """A judge that is kinder with every run, whichever arm it is of."""

    def collect(self, key: str) -> Outcome:
        outcome = super().collect(key)
        assert outcome.score is not None
        return replace(outcome, score=outcome.score + list(self.launched).index(key))


def test_what_drifts_with_time_is_no_arms() -> None:
    """Seed by seed over the arms, and back: the mean time of each is the same."""
    runner = Drifting(lambda setting, fidelity: 0.0, noise=0.01)
    finding, log, _ = conducted(PLAIN, runner)
    assert "".join(trial.arm for trial in log.trials.values()) == "abba" * 2
    assert finding.verdict == "inconclusive" and finding.estimate == pytest.approx(0.0, abs=0.1)


def failing(**shares: float) -> StudyLog:
    """The log of a study with so many failed held-out episodes."""

    class Failing(Formula):
        def collect(self, key: str) -> Outcome:
            failed = 20 * shares.get(self.launched[key].arm, 0.0)
            return replace(super().collect(key), signals={"held_out/plays": (20,), "held_out/failed": (failed,)})

    log = StudyLog()
    conduct(PLAIN, log, Failing(lambda setting, fidelity: 0.0))
    return log


def test_plays_that_failed_are_said_beside_the_verdict() -> None:
    [reason] = [found.reason for found in StudyView(failing(a=0.4, b=0.05)).findings.values()]
    assert reason == "look at 12 seeds; failed and repeated held-out episodes: 40% of 'a'"
    text = " ".join(render(failing(a=0.4, b=0.05))["report.md"].split())
    assert "96 of 240 held-out episodes of “a” failed (40.0%). Each was repeated" in text
    assert text.count("come from a selection") == 1 and "12 of 240 held-out episodes of “b” failed (5.0%)" in text
    uncounted = conducted(PLAIN, Formula(lambda setting, fidelity: 0.0))[1]
    for log in (failing(), uncounted):
        assert "held-out episodes of “" not in render(log)["report.md"]


def test_seeds_that_all_score_the_same_are_said_to() -> None:
    """Zeros against ones: no test of the scores can distinguish twelve runs from one run repeated twelve times."""
    ones = replace(PLAIN, arms=(Arm("a"), Arm("b", {"gain": 5.0})))

    def gain(setting: Setting, fidelity: float) -> float:
        return float(setting.get("gain", 0.0))

    finding, _, _ = conducted(ones, Formula(gain, noise=0.0))
    assert (finding.verdict, finding.seeds) == ("inconclusive", 12)
    assert finding.reason.startswith("undecided at the last look; all seeds of an arm scored the same")


def test_seeds_that_took_different_ways_to_the_same_score_decide() -> None:
    """Arms that saturate: the rewards along the runs show that their seeds were not ignored."""

    class Saturating(Formula):
        repeated = False

        def collect(self, key: str) -> Outcome:
            outcome, seed = super().collect(key), 0 if self.repeated else self.launched[key].seed
            assert outcome.score is not None
            return replace(outcome, signals={"reward/mean": (seed % 1_000 / 1_000, None, outcome.score)})

    def gain(setting: Setting, fidelity: float) -> float:
        return float(setting.get("gain", 0.0))

    fives, runner = replace(PLAIN, arms=(Arm("a"), Arm("b", {"gain": 5.0}))), Saturating(gain, noise=0.0)
    finding, log, _ = conducted(fives, runner)
    assert (finding.verdict, finding.seeds, finding.p_value) == ("supported", 4, None)
    assert finding.reason.startswith("look at 4 seeds; all seeds of an arm scored the same, so the interval has")
    assert "| – | supported |" in render(log)["report.md"]
    runner = Saturating(gain, noise=0.0)
    runner.repeated = True
    assert conducted(fives, runner)[0].verdict == "inconclusive"


def test_a_diverged_run_counts() -> None:
    outcomes = {"a": [Outcome("t", "diverged", score=-5.0), Outcome("u", "infra_failed")], "b": []}
    assert Evidence(STUDY, {}, outcomes).samples(STUDY.hypotheses[0]) == {"a": [-5.0], "b": []}


def test_another_outcome_of_the_same_trial_is_not_asked_for() -> None:
    """A second launcher on the same log launches nothing."""
    log, runner = StudyLog(), Formula()
    first, _ = conduct(STUDY, log, runner)
    entries = len(log.entries)
    second, _ = conduct(STUDY, log, Formula(noise=99.0))
    assert (second, len(log.entries)) == (first, entries)


# ---- nothing to learn from ------------------------------------------------------------------------------------------


class Floored(Formula):
    """All episodes fail, so no group has a gradient; `lift` is the gain of the score along the run."""

    lift = 0.0
    equal = 1.0

    def collect(self, key: str) -> Outcome:
        outcome = super().collect(key)
        assert outcome.score is not None
        signals = dict.fromkeys(("reward/mean", "reward/std"), (0.0,) * 12) | {
            "groups/zero_variance": (self.equal,) * 12
        }
        return replace(outcome, curve=(outcome.score - self.lift, outcome.score), signals=signals)


@pytest.mark.parametrize(
    ("lift", "equal", "verdict"),
    [(0.0, 1.0, "inconclusive"), (2.0, 1.0, "practically_equivalent"), (0.0, 0.3, "practically_equivalent")],
)
def test_arms_that_had_nothing_to_learn_from_are_not_equivalent(lift: float, equal: float, verdict: str) -> None:
    def bottom(setting: Setting, fidelity: float) -> float:
        return 0.0

    runner = Floored(bottom, noise=0.01)
    runner.lift, runner.equal = lift, equal
    finding, _, _ = conducted(replace(STUDY, arms=(Arm("a"), Arm("b", {"gain": 1.0}))), runner)
    assert (finding.verdict, finding.seeds) == (verdict, 12)
    assert ("neither arm had anything to learn from" in finding.reason) == (verdict == "inconclusive")


# ---- giving up -----------------------------------------------------------------------------------------------------


def test_what_the_last_look_would_hardly_settle_is_given_up() -> None:
    """An effect of the smallest size of interest: neither side of it can be shown."""
    at_the_edge = replace(STUDY, arms=(STUDY.arms[0], Arm("b", {"gain": 1.0}, STUDY.arms[0].nuisance)))
    finding, log, _ = conducted(at_the_edge, Formula())
    assert (finding.verdict, finding.seeds) == ("inconclusive", 8)
    assert "12 seeds would decide it with a chance of" in finding.reason
    assert max(list(log.attempts.values())) == 1
    assert sum(trial.phase == "confirm" for trial in log.trials.values()) == 2 * 8


def test_what_could_be_settled_is_not_given_up() -> None:
    """Nothing is known yet, by four seeds of much noise or by none that differ."""
    [open_one, *_] = FAMILY.hypotheses
    for scores in (
        {"a": [0.0, 0.4, 0.1, 0.3], "b": [0.1, 0.2, 0.4, 0.0]},
        {"a": [0.0] * 4, "b": [1.0] * 4},
        {"a": [0.0, 0.1], "b": [1.0, 1.1]},
    ):
        goes_on = evidence(**scores)
        goes_on.stop_for_futility([open_one])
        assert goes_on.findings == {}
    futile = evidence(a=[0.0, 0.1] * 4, b=[1.0, 1.1] * 4)
    futile.stop_for_futility([open_one])
    assert futile.findings[open_one.id].verdict == "inconclusive"


# ---- several hypotheses -----------------------------------------------------------------------------------------


FAMILY = replace(
    STUDY,
    arms=(Arm("a"), Arm("b"), Arm("c"), Arm("d")),
    hypotheses=(Hypothesis("", "b", "a"), Hypothesis("", "c", "a"), Hypothesis("", "d", "a", confirmatory=False)),
)


def evidence(**scores: list[float]) -> Evidence:
    outcomes = {arm: [Outcome(f"{arm}{i}", "completed", score=s) for i, s in enumerate(v)] for arm, v in scores.items()}
    return Evidence(FAMILY, {arm: {} for arm in scores}, outcomes)


def test_shares_are_handed_on_within_their_family() -> None:
    b, c, _ = FAMILY.hypotheses
    assert Evidence(FAMILY, {}).shares() == (0.025, 0.025)
    assert Evidence(FAMILY, {}, findings={b.id: Finding(b.id, "refuted", "")}).shares() == (0.05, 0.025)
    equivalent = Finding(c.id, "practically_equivalent", "")
    assert Evidence(FAMILY, {}, findings={c.id: equivalent}).shares() == (0.025, 0.05)


def test_a_called_hypothesis_helps_the_next() -> None:
    """c is significant at the whole alpha of this look and not at half of it: it is called because b is."""
    base = [0.0, 0.5, 1.0, 1.5]
    c = [2.25, 2.8, 3.25, 3.7]
    alone = evidence(a=base, b=base, c=c, d=base)
    alone.decide(list(FAMILY.hypotheses))
    assert alone.findings == {}
    both = evidence(a=base, b=[9.0, 9.5, 9.1, 9.3], c=c, d=base)
    both.decide(list(FAMILY.hypotheses))
    together = both.findings
    first, second, _ = FAMILY.hypotheses
    assert {name: found.verdict for name, found in together.items()} == {first.id: "supported", second.id: "supported"}
    assert together[first.id].confidence == pytest.approx(1 - 0.0221, abs=1e-3)
    assert together[second.id].confidence == pytest.approx(1 - nominal_level(FAMILY.looks, 0.1))


def test_what_stays_open_is_printed_at_the_level_it_was_read_at() -> None:
    """b is called at the first look and hands its share on; c is open at the last one, read at the whole alpha."""
    arms = (Arm("a"), Arm("b", {"gain": 9.0}), Arm("c", {"gain": 0.9}))
    study = replace(FAMILY, arms=arms, hypotheses=FAMILY.hypotheses[:2], looks=(4,))

    def gain(setting: Setting, fidelity: float) -> float:
        return float(setting.get("gain", 0.0))

    called, left = conduct(study, StudyLog(), Formula(gain, noise=0.5))[0]
    assert (called.verdict, left.verdict) == ("supported", "inconclusive")
    assert left.confidence == pytest.approx(1 - nominal_level(study.looks, 2 * study.alpha))


def test_an_exploratory_hypothesis_takes_no_share_and_says_so() -> None:
    third, look = FAMILY.hypotheses[2], evidence(a=[0.0, 0.1, 0.2, 0.1], d=[5.0, 5.1, 5.2, 5.1])
    look.decide([third])
    assert look.findings[third.id].verdict == "supported"
    assert "exploratory" in look.findings[third.id].reason
    assert look.shares() == (0.025, 0.025)


def test_a_runner_that_answers_for_another_trial_is_found_out() -> None:
    class Confused(Formula):
        def collect(self, key: str) -> Outcome:
            return replace(super().collect(key), trial="other")

    with pytest.raises(AssertionError, match="outcome of other"):
        TrialLauncher(STUDY, StudyLog(), Confused()).run([Trial(STUDY.id, "a", {"lr": 1.0, "gain": 0.0}, 1, "explore")])
