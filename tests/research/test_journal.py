"""1. Entries are there when the journal is opened again, and for readers at once. None can be changed.
2. There is one writer. A study is fixed, and so are its decisions.
3. Killed before, within and after every entry, a study ends with the findings and the spending of an undisturbed one,
   and launches nothing twice.
"""

from __future__ import annotations

import resource
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog, read_log
from agentjet.research.models import Arm, Knob, Outcome, Study, Trial
from agentjet.research.scheduler import conduct
from tests.research.world import STUDY, Doomed, Formula, killed

pytestmark = pytest.mark.thorough

FEW = replace(
    STUDY,
    arms=(replace(STUDY.arms[0], nuisance=(Knob("lr", (8.0, 16.0)),)), Arm("b", {"gain": 3.0, "lr": 16.0})),
    rungs=(1.0,),
    looks=(4,),
    budget=30.0,
)
TRIAL = Trial(STUDY.id, "a", {"lr": 1.0}, 3, "confirm")


def written(path: Path) -> StudyLog:
    """A study, a launch and its outcome, with the acknowledgement that earlier versions wrote."""
    journal = StudyLog(path)
    journal.open_study(STUDY)
    journal.entry("intent", {"key": "k", "trial": TRIAL.to_json()})
    journal.entry("ack", {"key": "k"})
    journal.entry("outcome", Outcome(TRIAL.id, "completed", score=1 / 3).to_json())
    journal.decide("rungs", [1.0])
    journal.close()
    return journal


def test_what_was_written_is_there(tmp_path: Path) -> None:
    before = written(tmp_path / "j")
    with StudyLog(tmp_path / "j") as after:
        assert after.study == STUDY
        assert after.trials == {TRIAL.id: TRIAL}
        assert after.outcomes == before.outcomes
        assert (after.attempts, len(after.entries)) == ({TRIAL.id: 1}, 5)
        after.decide("rungs", (1.0,))  # the same again
        assert len(after.entries) == 5


def test_entries_can_be_added_and_nothing_else(tmp_path: Path) -> None:
    written(tmp_path / "j")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["j", "j.lock"], "a closed journal is one file"
    with closing(sqlite3.connect(tmp_path / "j")) as db:
        for change in (
            "UPDATE entries SET kind = 'x'",
            "DELETE FROM entries",
            "INSERT INTO entries VALUES (1, '', '', 0, '', '')",
        ):
            with pytest.raises(sqlite3.IntegrityError):
                db.execute(change)


def test_a_reader_sees_what_is_committed_while_it_is_written(tmp_path: Path) -> None:
    assert len(read_log(tmp_path / "j").entries) == 0
    with StudyLog(tmp_path / "j") as journal:
        journal.open_study(STUDY)
        assert read_log(tmp_path / "j").study == STUDY
        journal.decide("rungs", [1.0])
        assert read_log(tmp_path / "j").decisions == {"rungs": [1.0]}


def test_a_reader_may_come_before_the_tables(tmp_path: Path) -> None:
    (tmp_path / "j").touch()
    with StudyLog(tmp_path / "j", writer=False) as reader:
        assert reader.entries == []
        with StudyLog(tmp_path / "j") as journal:
            journal.open_study(STUDY)
            reader.refresh()
            assert reader.study == STUDY


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("no journal " * 100)
    with pytest.raises(ConfigError, match="is not a journal of this version"):
        StudyLog(tmp_path / "j")
    with pytest.raises(ConfigError, match="restore the file"):
        read_log(tmp_path / "j")


def test_one_writer(tmp_path: Path) -> None:
    with StudyLog(tmp_path / "j"), pytest.raises(ConfigError, match="another process"):
        StudyLog(tmp_path / "j")
    StudyLog(tmp_path / "j").close()


def test_a_study_and_its_decisions_are_fixed(tmp_path: Path) -> None:
    written(tmp_path / "j")
    with StudyLog(tmp_path / "j") as journal:
        with pytest.raises(ConfigError, match=r"they differ in sesoi\. A study is fixed before its data"):
            journal.open_study(replace(STUDY, sesoi=0.1))
        with pytest.raises(ConfigError, match="'rungs' was"):
            journal.decide("rungs", [0.5, 1.0])
        journal.decide("rungs", [1.0 + 1e-12])  # the last digits of another processor


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    with StudyLog(tmp_path / "j") as journal:
        journal.open_study(STUDY)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "j-wal").stat().st_size + 40, hard))
        try:
            with pytest.raises(OSError, match=f"{tmp_path / 'j'}"):
                journal.decide("rungs", [1.0])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (journal.decisions, read_log(tmp_path / "j").decisions) == ({}, {})
        journal.decide("rungs", [1.0])
    with StudyLog(tmp_path / "j") as journal:
        assert journal.decisions == {"rungs": [1.0]}


# ---- kills ------------------------------------------------------------------------------------------------------


def study_until_killed(folder: Path, number: int, moment: str) -> None:
    killed(lambda: conduct(FEW, Doomed(folder / "journal", number, moment), Formula(folder=folder)))


def finish(study: Study, folder: Path) -> tuple[list[dict[str, Any]], float, set[str]]:
    """Findings, spending, and the keys that were launched."""
    with StudyLog(folder / "journal") as journal:
        findings, launcher = conduct(study, journal, Formula(folder=folder))
    keys = {path.name for path in folder.glob("*-?")}
    return [finding.to_json() for finding in findings], launcher.spending.total, keys


@pytest.mark.parametrize("moment", ["before", "within", "after"])
def test_killed_at_every_entry(tmp_path: Path, moment: str) -> None:
    """`Formula.launch` refuses a key it has, so a second launch fails the study."""
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    undisturbed = finish(FEW, quiet)
    assert undisturbed[0][0]["verdict"] == "supported"
    num_entries = len(read_log(quiet / "journal").entries)
    assert num_entries > 25
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
    for number in range(len(read_log(quiet / "journal").entries)):
        study_until_killed(stormy, number, "after")
    assert finish(FEW, stormy) == undisturbed
