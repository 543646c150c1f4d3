"""The laboratory without servers. With servers: `tests/e2e/test_campaign.py`.

1. Without a server or disk space the laboratory is away. The same order continues later, and is launched once.
2. A study's trials run the commits of its arms.
3. A new laboratory of the folder knows what was launched.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import cast

import pytest

from agentjet.errors import AgentJetError
from agentjet.research.campaign.laboratory import LaboratoryAway
from agentjet.research.campaign.models import Order
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.campaign.swarm_laboratory import SwarmLaboratory
from agentjet.research.models import Arm, Hypothesis, Outcome, Study, Trial
from agentjet.research.records import Setting, canonical
from agentjet.research.servers import RunningServer, ServerUnavailable
from agentjet.research.subject import Subject

SUBJECT = Subject("m", "a.py:agent", "a.jsonl", "b.jsonl", "judge.py:score", settings={}, steps=4, judged=True)


@dataclass
class Repo:
    """Commits whose subjects differ in a setting."""

    folder: Path

    def subject(self, commit: str) -> Subject:
        return replace(SUBJECT, settings={"job.optimizer.lr": float(len(commit))})


@dataclass
class Slot:
    """A server that is away, has no disk space, or completes its trials with the learning rate as score."""

    trouble: Exception | None = None
    name: str = "server"
    served: list[Setting] = field(default_factory=list)

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[RunningServer]:
        if self.trouble is not None:
            raise self.trouble
        self.served.append(settings)
        for file in run.parent.parent.glob("launches/*/trial.json"):
            trial = Trial.from_json(json.loads(file.read_text()))
            if not file.with_name("outcome.json").exists():
                ended = Outcome(trial.id, "completed", float(str(settings["job.optimizer.lr"])))
                file.with_name("draft.json").write_text(canonical(ended.to_json()))
        raise AgentJetError("over")
        yield

    def check(self) -> None:
        if isinstance(self.trouble, AgentJetError):
            raise ServerUnavailable("--server: no answer")

    def run_finished(self, run: Path) -> None:
        """It keeps its files."""


def laboratory(folder: Path, slot: Slot) -> SwarmLaboratory:
    return SwarmLaboratory(cast(SubjectRepo, Repo(folder)), [slot], notify=lambda line: None)


@pytest.mark.parametrize(
    "trouble", [AgentJetError("no answer"), OSError(errno.ENOSPC, "No space left on device", "runs")]
)
def test_a_trouble_of_the_machine_costs_only_time(trouble: Exception, tmp_path: Path) -> None:
    slot = Slot(trouble)
    with laboratory(tmp_path, slot) as lab:
        lab.launch("k 1", Order("c0", 7))
        for _ in range(2):
            with pytest.raises(LaboratoryAway, match=r"no answer$|No space left"):
                lab.collect("k 1")
        slot.trouble = None
        assert lab.has("k 1") and lab.collect("k 1").score == 2.0
    assert len(slot.served) == 1 and slot.served[0]["job.seed"] == 7


def test_the_trials_of_a_study_run_commits(tmp_path: Path) -> None:
    arms = (Arm("base", code="c0"), Arm("changed", code="c0c0"))
    study = Study("t", "score", 0.1, arms, (Hypothesis("it helps", "changed", "base"),), budget=20.0)
    trial = Trial(study.id, "changed", {}, 7, "confirm")
    slot = Slot()
    with laboratory(tmp_path, slot) as lab:
        runner = lab.runner(study)
        assert not runner.has(f"{trial.id}-1")
        runner.launch(f"{trial.id}-1", trial)
        assert runner.collect(f"{trial.id}-1") == Outcome(trial.id, "completed", 4.0)
    with laboratory(tmp_path, slot) as later:
        assert later.runner(study).has(f"{trial.id}-1")
        assert later.runner(study).collect(f"{trial.id}-1").score == 4.0
    assert len(slot.served) == 1
