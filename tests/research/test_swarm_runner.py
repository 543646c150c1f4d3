"""The runner where no server is to be had. With servers: `tests/e2e/test_research.py`.

1. A place that cannot serve is asked three times, then the trial is lost to the infrastructure; a repeat begins anew.
2. A launch is on disk when it returns; the next runner of the folder takes up what the last one left waiting.
3. What is wrong with the study ends it where it waits.
4. Trials share a run when they differ in fidelity alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

import pytest

from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.models import Subject, Trial
from agentjet.research.records import Setting
from agentjet.research.servers import Served
from agentjet.research.swarm_runner import MAX_SERVINGS, SwarmRunner, name_of_run

SUBJECT = Subject("m", "agentjet.cli.digits:agent", "a.jsonl", "b.jsonl", settings={"job.group_size": 4}, steps=9)
TRIAL = Trial("s", "a", {"job.optimizer.lr": 0.5}, 7, "confirm", 1 / 3)


@dataclass
class Refusing:
    """A place that raises what it is given, and notes what it was asked for."""

    error: AgentJetError
    name: str = "nowhere"
    asked: list[Setting] = field(default_factory=list)
    closed: bool = False

    @contextmanager
    def serving(self, run: Path, settings: Setting, stopping: Event) -> Iterator[Served]:
        (run / "trace").touch()
        self.asked.append(settings)
        raise self.error
        yield

    def over(self, run: Path) -> None:
        raise AssertionError("nothing was completed")

    def close(self) -> None:
        self.closed = True


def test_a_place_that_cannot_serve(tmp_path: Path) -> None:
    place = Refusing(AgentJetError("no port is free"))
    with SwarmRunner(SUBJECT, tmp_path, [place]) as runner:
        runner.launch("k-1", TRIAL)
        outcome = runner.collect("k-1")
        assert (outcome.trial, outcome.end, outcome.score) == (TRIAL.id, "infra_failed", None)
        assert outcome.note == "nowhere: no port is free"
        assert (tmp_path / "launches" / "k-1" / "run" / "trace").exists()
        runner.launch("k-2", TRIAL)
        runner.collect("k-2")
        assert runner.ask("k-1", "settings") is None
    assert len(place.asked) == 2 * MAX_SERVINGS and place.closed
    assert place.asked[0] == {
        "job.optimizer.total_steps": 9,
        "job.group_size": 4,
        "job.optimizer.lr": 0.5,
        "model.name": "m",
        "job.seed": 7,
        "job.max_steps": 3,
    }


def test_what_waits_is_taken_up_by_the_next(tmp_path: Path) -> None:
    with SwarmRunner(SUBJECT, tmp_path, []) as first:
        assert not first.has("k-1")
        first.launch("k-1", TRIAL)
        assert first.has("k-1")
    place = Refusing(AgentJetError("no port is free"))
    with SwarmRunner(SUBJECT, tmp_path, [place]) as second:
        assert second.has("k-1") and second.collect("k-1").end == "infra_failed"
    with SwarmRunner(SUBJECT, tmp_path, []) as third:
        assert third.collect("k-1").end == "infra_failed"


def test_what_is_wrong_with_the_study_ends_it(tmp_path: Path) -> None:
    with SwarmRunner(SUBJECT, tmp_path, [Refusing(ConfigError("no such setting"))]) as runner:
        runner.launch("k-1", TRIAL)
        with pytest.raises(ConfigError, match="no such setting"):
            runner.collect("k-1")
    assert not (tmp_path / "launches" / "k-1" / "outcome.json").exists()


def test_which_trials_share_a_run() -> None:
    assert name_of_run(replace(TRIAL, fidelity=1.0)) == name_of_run(TRIAL)
    others = [
        replace(TRIAL, seed=8),
        replace(TRIAL, arm="b"),
        replace(TRIAL, phase="explore"),
        replace(TRIAL, study="t"),
    ]
    assert len({name_of_run(trial) for trial in (TRIAL, *others)}) == 5
