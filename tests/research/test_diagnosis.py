"""1. Every planted failure is diagnosed with its cause. Its healthy twin has no diagnosis.
2. A dead environment is not a result: the run is repeated with its seed. A ruined policy keeps its score.
3. A run without a fact gets no diagnosis that needs it.
4. Diagnoses are recorded once. Equal runs are found by their numbers.
5. A study that is killed at every entry has the diagnoses of an undisturbed one.
6. Rules read metrics that servers report, and the page lists every cause.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjet.research.diagnosis import DEAD, RULES, SERVER, equal_runs, holds_since, with_dead_environment
from agentjet.research.journal import StudyLog, read_log
from agentjet.research.models import Arm, Diagnosis, Hypothesis, Outcome, Study, Trial
from agentjet.research.scheduler import conduct
from tests.research.planted_failures import HEALTHY, KINDS, STEPS, FailingRunner, Plant, Side, said, single
from tests.research.world import Doomed, killed

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
STUDY = Study(
    topic="which rate?",
    metric="success",
    sesoi=0.05,
    arms=(Arm("usual", {"job.optimizer.lr": 0.1}), Arm("large", {"job.optimizer.lr": 8.0})),
    hypotheses=(Hypothesis("the usual rate scores higher", "usual", "large"),),
    budget=24.0,
    looks=(4,),
)


def causes(log: StudyLog) -> dict[str, list[str]]:
    """By arm."""
    found: dict[str, list[str]] = {}
    for name, diagnoses in log.diagnoses.items():
        found.setdefault(log.trials[name].arm, []).extend(diagnosis.cause for diagnosis in diagnoses)
    return found


# ---- causes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_planted_failure_is_called_by_its_cause(kind: Any) -> None:
    named, log = said(kind.name, kind.ill, 2)
    assert named == {kind.cause}
    for diagnosis in (diagnosis for every in log.diagnoses.values() for diagnosis in every):
        assert diagnosis.seen and diagnosis.meaning


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_of_its_healthy_twin_nothing_is_said(kind: Any) -> None:
    assert said(kind.name, kind.well, 2)[0] == set()


@pytest.mark.parametrize("name", HEALTHY)
def test_of_other_healthy_runs_nothing_is_said(name: str) -> None:
    assert said(name, HEALTHY[name], 2)[0] == set()


# ---- infrastructure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", [Plant(mute_at=50), Plant(hangs=0.95, hangs_at=40)])
def test_a_run_whose_environment_died_is_repeated_with_its_seed(plant: Plant) -> None:
    _, log = said("dead", single(plant), 0)
    [(name, [first, second])] = log.outcomes.items()
    assert (first.end, first.score) == ("infra_failed", None)
    assert second.end == "completed" and second.score is not None
    [found] = log.diagnoses[name]
    assert found.cause == DEAD and f"step {plant.mute_at if plant.mute_at < STEPS else 40}" in found.seen


def test_a_ruined_policy_is_a_result() -> None:
    _, log = said("ruined", single(optimizer__lr=8.0), 0)
    trial = next(trial for trial in log.trials.values() if trial.phase == "confirm")
    [outcome] = log.outcomes[trial.id]
    assert outcome.end == "completed" and outcome.score is not None
    assert outcome.signals["reward/mean"][-1] == 0.0, "it earns nothing any more, as where an environment is dead"


def test_an_outcome_without_signals_is_left_as_it_is() -> None:
    for outcome in (Outcome("t", "completed", score=0.5), Outcome("t", "infra_failed", note="lost")):
        assert with_dead_environment(outcome) is outcome


def test_rewards_that_became_perfect_are_no_dead_environment() -> None:
    rewards = [0.5, 0.6, 0.7, 0.8, 0.9, *[1.0] * 10]
    signals = {
        "reward/mean": tuple(rewards),
        "reward/std": tuple(float(np.sqrt(r * (1 - r))) for r in rewards),
        "completion/tokens": (20.0,) * 15,
        "batch/episodes": (64.0,) * 15,
    }
    outcome = Outcome("t", "completed", score=1.0, signals=signals)
    assert with_dead_environment(outcome) is outcome


# ---- signs --------------------------------------------------------------------------------------------------------


def test_what_holds_must_last() -> None:
    holds = np.array([False] * 5 + [True] * 3)
    assert holds_since(holds) == 5
    assert holds_since(holds[:-1]) is None, "two steps are an incident"
    assert holds_since(~holds) is None
    assert holds_since(np.array([True] * 4)) == 0


# ---- facts --------------------------------------------------------------------------------------------------------


class Silent(FailingRunner):
    """The same runs, by a runner that reports signals only."""

    def collect(self, key: str) -> Outcome:
        return replace(super().collect(key), settings={}, facts={})


@pytest.mark.parametrize("plant", [Plant(sampler_stops_at=10), Plant(leaks=True), Plant(sign=-1.0)])
def test_what_needs_a_fact_is_not_said_without(plant: Plant) -> None:
    log = StudyLog()
    arms = (Arm("a"), Arm("b", {"job.recipe.kl_coef": 0.01}))
    conduct(replace(STUDY, arms=arms, hypotheses=()), log, Silent(plant))
    assert log.diagnoses == {}


def test_diagnoses_are_recorded_once() -> None:
    log, runner = StudyLog(), FailingRunner(Plant(world=2))
    [finding], _ = conduct(STUDY, log, runner)
    assert finding.verdict == "supported"
    assert causes(log) == {"large": ["unlearned"] * 4}
    entries = len(log.entries)
    conduct(STUDY, log, runner)
    assert len(log.entries) == entries


def test_times_do_not_make_two_runs_of_one() -> None:
    def run(seed: int, seconds: float) -> tuple[Trial, Outcome]:
        trial = Trial("s", "a", {}, seed, "confirm")
        values = tuple(float(value) for value in range(10))
        return trial, Outcome(
            trial.id, "completed", score=1.0, signals={"reward/mean": values, "time/learn": (seconds,)}
        )

    equal = equal_runs([run(1, 0.5), run(2, 0.6)])
    assert [diagnosis.cause for diagnosis in equal.values()] == ["duplicated_seed"]
    constant = {"reward/mean": (0.0,) * 10}
    same = [(trial, replace(outcome, signals=constant)) for trial, outcome in (run(1, 0.5), run(2, 0.6))]
    assert equal_runs(same) == {}, "runs that never earned anything are alike, and not the same"


# ---- kills --------------------------------------------------------------------------------------------------------


@dataclass
class Ending:
    findings: list[dict[str, Any]]
    diagnoses: dict[str, list[Diagnosis]]
    spent: float
    launched: list[str] = field(default_factory=list)


def finish(folder: Path, plant: Plant) -> Ending:
    with StudyLog(folder / "journal") as journal:
        findings, launcher = conduct(STUDY, journal, FailingRunner(plant, folder=folder))
        launched = sorted(path.name for path in folder.glob("*-?"))
        return Ending([finding.to_json() for finding in findings], journal.diagnoses, launcher.spending.total, launched)


def test_a_study_killed_at_every_entry_is_diagnosed_the_same(tmp_path: Path) -> None:
    """The same journal, killed at each of its entries in turn; the first attempts lose their server."""
    plant = Plant(world=2, dies_at=40)
    quiet, stormy = tmp_path / "quiet", tmp_path / "stormy"
    quiet.mkdir()
    stormy.mkdir()
    undisturbed = finish(quiet, plant)
    found = {diagnosis.cause for every in undisturbed.diagnoses.values() for diagnosis in every}
    assert found == {SERVER, "unlearned"}
    for number in range(len(read_log(quiet / "journal").entries)):
        killed(lambda: conduct(STUDY, Doomed(stormy / "journal", number, "after"), FailingRunner(plant, folder=stormy)))  # noqa: B023
    assert finish(stormy, plant) == undisturbed


# ---- names --------------------------------------------------------------------------------------------------------


def literals(package: str) -> set[str]:
    """Strings in the source that look like the name of a metric."""
    found = set()
    for path in (ROOT / "src/agentjet").glob(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                head, slash, tail = node.value.partition("/")
                if slash and head in METRICS and tail.isidentifier():
                    found.add(node.value)
    return found


METRICS = {"reward", "groups", "completion", "policy", "optim", "batch", "episodes"}


def test_rules_read_what_a_server_reports() -> None:
    read = literals("research/diagnosis.py") | literals("research/run_record.py")
    assert len(read) > 8
    assert read <= literals("swarm/**/*.py") | literals("compute/**/*.py") | literals("recipes/**/*.py")


def test_the_page_names_every_cause() -> None:
    page = (ROOT / "docs/research.md").read_text(encoding="utf-8")
    table = page.partition("| cause |")[2].partition("\n\n")[0]
    listed = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert listed == {rule.cause for rule in RULES} | {SERVER, "duplicated_seed", "no_op"}


def test_two_arms_of_one_setting_are_said_to_be_one() -> None:
    side = Side(settings=({"job.recipe.kl_coef": 0.0}, {}))
    named, log = said("the default, written down", side, 0)
    assert named == {"no_op"}
    [[found]] = log.diagnoses.values()
    assert "differ in ['job.recipe.kl_coef']" in found.seen
