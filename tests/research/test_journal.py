"""1. Entries are there when the journal is opened again. A torn last line is cut off, a changed line refused.
2. There is one writer. A study is fixed, and so are its decisions.
3. Killed before, within and after every entry, a study ends with the findings and the spending of an undisturbed one,
   and launches nothing twice.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyJournal, journal_line
from agentjet.research.models import Arm, Knob, Outcome, Study, Trial
from agentjet.research.scheduler import conduct
from tests.research.world import STUDY, Doomed, Formula

pytestmark = pytest.mark.thorough

FEW = replace(
    STUDY,
    arms=(replace(STUDY.arms[0], nuisance=(Knob("lr", (8.0, 16.0)),)), Arm("b", {"gain": 3.0, "lr": 16.0})),
    rungs=(1.0,),
    looks=(4,),
    budget=30.0,
)
TRIAL = Trial(STUDY.id, "a", {"lr": 1.0}, 3, "confirm")


def written(path: Path) -> StudyJournal:
    """A study, a launch and its outcome."""
    journal = StudyJournal(path)
    journal.open_study(STUDY)
    journal.append("intent", {"key": "k", "trial": TRIAL.to_json()})
    journal.append("ack", {"key": "k"})
    journal.append("outcome", Outcome(TRIAL.id, "completed", score=1 / 3).to_json())
    journal.decide("rungs", [1.0])
    journal.close()
    return journal


def test_what_was_written_is_there(tmp_path: Path) -> None:
    before = written(tmp_path / "j")
    with StudyJournal(tmp_path / "j") as after:
        assert after.study == STUDY
        assert after.trials == {TRIAL.id: TRIAL}
        assert after.outcomes == before.outcomes
        assert (after.unacknowledged, after.attempts, after.num_entries) == ({}, {TRIAL.id: 1}, 5)
        after.decide("rungs", (1.0,))  # the same again
        assert after.num_entries == 5


def test_a_torn_line_is_cut_off_wherever_it_tore(tmp_path: Path) -> None:
    written(tmp_path / "j")
    whole = (tmp_path / "j").read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        (tmp_path / "j").write_bytes(whole[:end])
        with StudyJournal(tmp_path / "j") as journal:
            assert (journal.num_entries, journal.decisions) == (4, {})
            journal.decide("rungs", [1.0])
        assert (tmp_path / "j").read_bytes() == whole


@pytest.mark.parametrize("line", [0, 1, 3, 4])
def test_a_changed_line_is_refused(tmp_path: Path, line: int) -> None:
    written(tmp_path / "j")
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"kind"', b'"Kind"')
    (tmp_path / "j").write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=f"line {line + 1}: was changed"):
        StudyJournal(tmp_path / "j")


def test_a_line_rewritten_with_its_sum_breaks_the_chain(tmp_path: Path) -> None:
    written(tmp_path / "j")
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    fields = json.loads(lines[3])
    lines[3] = journal_line(3, fields["prev"], "outcome", {**fields["body"], "score": 9.0})
    (tmp_path / "j").write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match="line 5: was changed"):
        StudyJournal(tmp_path / "j")


def test_one_writer(tmp_path: Path) -> None:
    with StudyJournal(tmp_path / "j"), pytest.raises(ConfigError, match="another process"):
        StudyJournal(tmp_path / "j")
    StudyJournal(tmp_path / "j").close()


def test_a_study_and_its_decisions_are_fixed(tmp_path: Path) -> None:
    written(tmp_path / "j")
    with StudyJournal(tmp_path / "j") as journal:
        with pytest.raises(ConfigError, match=r"they differ in sesoi\. A study is fixed before its data"):
            journal.open_study(replace(STUDY, sesoi=0.1))
        with pytest.raises(ConfigError, match="'rungs' was"):
            journal.decide("rungs", [0.5, 1.0])


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    """The limit lets half of the line through."""
    with StudyJournal(tmp_path / "j") as journal:
        journal.open_study(STUDY)
        before = (tmp_path / "j").read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))
        try:
            with pytest.raises(OSError, match=f"{tmp_path / 'j'}"):
                journal.decide("rungs", [1.0])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (journal.decisions, (tmp_path / "j").read_bytes()) == ({}, before)
        journal.decide("rungs", [1.0])
    with StudyJournal(tmp_path / "j") as journal:
        assert journal.decisions == {"rungs": [1.0]}


# ---- kills ------------------------------------------------------------------------------------------------------


def study_until_killed(folder: Path, number: int, moment: str) -> None:
    """Runs in a separate process."""
    child = os.fork()
    if child == 0:
        try:
            conduct(FEW, Doomed(folder / "journal", number, moment), Formula(folder=folder))
        finally:
            os._exit(1)  # not killed: the parent will see
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"entry {number}: {status}"


def finish(study: Study, folder: Path) -> tuple[list[dict[str, Any]], float, set[str]]:
    """Findings, spending, and the keys that were launched."""
    with StudyJournal(folder / "journal") as journal:
        findings, launcher = conduct(study, journal, Formula(folder=folder))
        assert journal.unacknowledged == {}
    keys = {path.name for path in folder.iterdir()} - {"journal"}
    return [finding.to_json() for finding in findings], launcher.spending.total, keys


@pytest.mark.parametrize("moment", ["before", "torn", "after"])
def test_killed_at_every_entry(tmp_path: Path, moment: str) -> None:
    """`Formula.launch` refuses a key it has, so a second launch fails the study."""
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    undisturbed = finish(FEW, quiet)
    assert undisturbed[0][0]["verdict"] == "supported"
    num_entries = len((quiet / "journal").read_bytes().splitlines())
    assert num_entries > 40
    for number in range(num_entries):
        folder = tmp_path / str(number)
        folder.mkdir()
        study_until_killed(folder, number, moment)
        assert finish(FEW, folder) == undisturbed, number


def test_killed_at_one_entry_after_the_other(tmp_path: Path) -> None:
    """The same journal, killed at each of its entries in turn."""
    quiet, stormy = tmp_path / "quiet", tmp_path / "stormy"
    quiet.mkdir()
    stormy.mkdir()
    undisturbed = finish(FEW, quiet)
    for number in range(len((quiet / "journal").read_bytes().splitlines())):
        study_until_killed(stormy, number, "after")
    assert finish(FEW, stormy) == undisturbed
