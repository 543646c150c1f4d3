"""The world of `bench.research` is fair to research on, the truth is computed, and the rates add up.

1. A run is its setting's and seed's alone; a shorter run is the longer one's beginning; evaluation is unbiased.
2. Its effects are the ones claimed: training helps, a hacked grader misleads, a label changes nothing.
3. An oracle's truth has a sign from the smallest effect of interest on, and is kept under its content.
4. Rates are over the claims they say.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentjet.research.models import Trial
from bench.research import Tally, main, scores, standard_error
from bench.researching.oracle import Truth, grid, grid_verdicts, truths
from bench.researching.runner import WorldRunner
from bench.researching.suite import SUITE, TWO, Case, suite
from bench.researching.world import STEPS, World, curves, measured

WORLD = World(0)


def test_a_run_is_its_own(tmp_path: Path) -> None:
    settings = [{"lr": lr, "num_repeat": g} for lr in (4.0, 16.0) for g in (2.0, 8.0)]
    together = curves(WORLD, settings, [1, 2, 3, 4], [10, 30])
    for i, (setting, seed) in enumerate(zip(settings, (1, 2, 3, 4), strict=True)):
        assert curves(WORLD, [setting], [seed], [10, 30])[0] == pytest.approx(together[i], abs=1e-6)
    assert len({float(score) for score in together[:, 1]}) == 4


def test_a_shorter_run_is_the_beginning_of_the_longer() -> None:
    setting = {"lr": 8.0, "collapse": 0.5}
    longer = curves(WORLD, [setting] * 6, range(6), [10, 30])
    assert curves(WORLD, [setting] * 6, range(6), [10])[:, 0] == pytest.approx(longer[:, 0])


def test_evaluation_is_unbiased() -> None:
    reported = [measured(WORLD, {"lr": 8.0}, seed, STEPS, 60.0) for seed in range(2_000)]
    assert np.mean(reported) == pytest.approx(60.0, abs=0.15)
    assert np.std(reported) == pytest.approx(100 * np.sqrt(0.6 * 0.4 / 1000), rel=0.1)


def test_training_helps_and_a_hacked_grader_misleads() -> None:
    def gain(world: World, **setting: float) -> float:
        found = curves(world, [{"lr": 16.0, **setting}] * 8, range(8), [1, STEPS])
        return float((found[:, 1] - found[:, 0]).mean())

    assert gain(World(1)) > 10
    assert gain(World(1, hackable=True)) < -10
    assert gain(World(1, hackable=True), kl=1.0) > gain(World(1, hackable=True)) + 10


def test_a_label_changes_the_numbers_and_not_the_mean() -> None:
    a, b = (curves(WORLD, [{"label": label}] * 64, range(64), [STEPS])[:, 0] for label in (1.0, 2.0))
    assert not np.any(a == b)
    assert abs(a.mean() - b.mean()) < 4 * np.sqrt((a.var() + b.var()) / 64)


def test_the_runner_reveals_no_more_than_was_paid_for() -> None:
    runner = WorldRunner(WORLD, (1 / 9, 1 / 3, 1.0))
    short = Trial("s", "a", {"lr": 8.0}, 5, "explore", 1 / 9)
    for trial in (short, replace(short, fidelity=1.0)):
        runner.launch(trial.id, trial)
    first, whole = runner.collect(short.id), runner.collect(replace(short, fidelity=1.0).id)
    assert (len(first.curve), len(whole.curve)) == (1, 3)
    assert first.score == whole.curve[0]


def test_truth_has_the_sign_of_an_effect_that_matters(tmp_path: Path) -> None:
    gain = Case("gain", WORLD, {"a": {"lr": 8.0}, "b": {"lr": 8.0, "skill": 0.04}}, TWO, tuned=False)
    found = grid(gain, 8, tmp_path)
    [truth] = truths(gain, found)
    assert truth.effect == pytest.approx(4.0, abs=4 * truth.error)
    assert (truth.verdict, truth.decidable) == ("supported", True)
    [small] = truths(replace(gain, sesoi=6.0), found)
    assert small.verdict == "practically_equivalent"
    assert not truths(replace(gain, sesoi=truth.effect), found)[0].decidable
    assert grid_verdicts(gain, found, 8, np.random.default_rng(0)) == ["supported"]
    assert len(list(tmp_path.glob("grid-*.npz"))) == 1
    assert np.array_equal(grid(gain, 8, tmp_path).best["b"], found.best["b"])
    grid(replace(gain, sesoi=1.5), 8, tmp_path)
    assert len(list(tmp_path.glob("grid-*.npz"))) == 2


def test_rates_are_over_the_claims_they_say() -> None:
    easy = Truth(3.0, 0.1, "supported", 0.9)
    hard = Truth(0.1, 0.1, "practically_equivalent", 0.3)
    tallies = [
        Tally(SUITE[0], "", easy, ["supported", "supported", "inconclusive", "refuted"]),
        Tally(SUITE[0], "", hard, ["supported", "inconclusive", "inconclusive", "inconclusive"]),
    ]
    assert scores(tallies) == (0.25, 0.5, 0.5)
    assert standard_error([(0.5, 25), (0.5, 25)]) == pytest.approx(0.1 / np.sqrt(2))


def test_the_suite_has_the_traps() -> None:
    assert len(SUITE) >= 10
    assert len({case.name for case in SUITE}) == len(SUITE)
    assert {case.world.seed for case in SUITE}.isdisjoint(case.world.seed for case in suite(environment=1))
    for case in SUITE:
        assert {name for claim in case.claims for name in claim} <= set(case.arms)


@pytest.mark.thorough
def test_a_quick_run_ends_with_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = main(["--quick", "--cache", str(tmp_path)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert (result["wrong"], result["correct"], result["aa_false_positive"]) == (0.0, 1.0, 0.0)
    assert result["diagnosis_correct"] >= 0.9 and result["false_alarms"] <= 0.05
