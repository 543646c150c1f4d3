"""Studies on real servers with a tiny model.

1. Whatever is killed in the middle of a study, the researcher with all it started, or a server alone: the study ends,
   nothing was launched twice or lost, the ledger says what an undisturbed study's would, and no process is left.
2. Equal seeds and settings give equal runs. A longer trial goes on from where the shorter one ended.
3. Ctrl-C and SIGTERM end a study that can be gone on with, and leave no process.
4. A run whose environment is dead, or whose tasks cannot be played, has no score; code that changed stops the study.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.cli.trial_servers import LocalServerSlot, local_slots
from agentjet.errors import ConfigError
from agentjet.research.journal import StudyFolder, read_log
from agentjet.research.models import Subject, Trial
from agentjet.research.swarm_runner import SwarmRunner
from tests.e2e.researching import AGENT, LONG, STEPS, Researcher, children, scores_of, study_of
from tests.e2e.server import is_running

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def test_a_study_that_is_killed_ends_as_if_it_had_not_been(subject: Subject, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    StudyFolder(folder).write(study_of(subject), "")
    first = Researcher(folder)
    first.until(lambda: first.is_training() and bool(read_log(folder / "study.sqlite").outcomes))
    started = children(first.process.pid)
    first.process.kill()
    first.process.wait()
    assert len(started) >= 2

    second = Researcher(folder)
    second.until(lambda: not any(map(is_running, started)))  # they end with whoever started them
    second.until(lambda: bool(second.servers()) and second.is_training())
    os.kill(second.servers()[0], signal.SIGKILL)
    assert second.process.wait(LONG) == 0, second.log

    log = read_log(folder / "study.sqlite")
    assert len(log.trials) == 8 and set(log.attempts.values()) == {1}, second.log
    assert {len(outcomes) for outcomes in log.outcomes.values()} == {1}
    assert {outcome.end for [outcome] in log.outcomes.values()} == {"completed"}
    for trial in log.trials.values():
        [outcome] = log.outcomes[trial.id]
        assert len(outcome.curve) == STEPS + 1 and outcome.score == outcome.curve[-1]
        assert len(outcome.signals["reward/mean"]) == STEPS and None not in outcome.signals["reward/mean"]
        assert {*scores_of(folder / "runs" / trial.run / "record.json")} == {"0", "1", "2", "3"}
    assert (folder / "report.html").exists() and (folder / "report.md").exists()
    assert children(second.process.pid) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_process(number: int, code: int, subject: Subject, tmp_path: Path) -> None:
    """The servers are loading."""
    folder = tmp_path / "study"
    StudyFolder(folder).write(study_of(subject), "")
    researcher = Researcher(folder)
    researcher.until(lambda: len(researcher.servers()) == 2)
    started = children(researcher.process.pid)
    researcher.process.send_signal(number)
    assert researcher.process.wait(LONG) == code, researcher.log
    assert not any(map(is_running, started))
    assert (f"continue with: agentjet research run {folder}" in researcher.log) == (number == signal.SIGINT)
    assert read_log(folder / "study.sqlite").outcomes == {}


def test_equal_seeds_give_equal_runs_also_in_two_parts(subject: Subject, tmp_path: Path) -> None:
    """The arms differ in name only, and the first goes on from a shorter trial."""
    short = Trial("s", "a", {"job.optimizer.lr": 1e-3}, 5, "explore", 1 / 3)
    trials = {"short": short, "long": replace(short, fidelity=1.0), "other": replace(short, arm="b", fidelity=1.0)}
    trials["seed"] = replace(short, seed=6)
    with SwarmRunner(subject, tmp_path, local_slots(1)) as runner:
        for key, trial in trials.items():
            runner.launch(key, trial)
        first, long, other, seed = (runner.collect(key) for key in trials)
    assert len(first.curve) == 2 and long.curve[:2] == first.curve and len(long.curve) == STEPS + 1
    assert long.curve == other.curve and seed.curve != first.curve
    for name in ("reward/mean", "completion/tokens"):
        assert long.signals[name] == other.signals[name], name
    for name in ("policy/entropy", "optim/grad_norm"):  # last digits depend on the answers that are sampled together
        assert long.signals[name] == pytest.approx(other.signals[name], rel=1e-5), name
    with SwarmRunner(subject, tmp_path, []) as later:  # what ended is known without a server
        assert later.has("long") and later.collect("long") == long


def test_a_dead_environment_is_no_score(subject: Subject, tmp_path: Path) -> None:
    broken = replace(subject, agent=subject.agent.replace(":agent", ":broken"), evaluator=subject.agent, code="")
    with SwarmRunner(broken, tmp_path, local_slots(1)) as runner:
        runner.launch("k", Trial("s", "a", {}, 5, "confirm"))
        with pytest.raises(ConfigError, match=r"does not count(.|\n)*the game's server is gone"):
            runner.collect("k")
    assert not (tmp_path / "launches" / "k" / "outcome.json").exists()
    assert not list((tmp_path / "runs").iterdir())  # a repeat begins anew


def test_code_that_changed_stops_the_study(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT + "# edited\n")
    with SwarmRunner(subject, tmp_path, [LocalServerSlot(1, 1)]) as runner:
        runner.launch("k", Trial("s", "a", {}, 5, "confirm"))
        with pytest.raises(ConfigError, match=r"subject\.code: .* restore"):
            runner.collect("k")
