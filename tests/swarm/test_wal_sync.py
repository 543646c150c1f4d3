"""Pinned here: what a commit wrote is moved out of the log while a writer goes on, the log's length is bounded, and a
failed sync is never forgotten.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from agentjet.errors import Later
from agentjet.swarm import Journal, journal_file
from agentjet.swarm.journal_file import CHECKPOINT_EVERY, segment_of


def write(journal: Journal, size: int = 4000) -> None:
    with journal.file.transaction():
        journal.add_event("state", 0.0, {"text": "x" * size})


def test_the_log_is_moved_under_a_writer(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    journal.file.defer_commits()
    before = journal.path.stat().st_size
    for _ in range(CHECKPOINT_EVERY):
        write(journal)
        journal.file.commit()
        with journal.file.transaction():  # Open while the other connection moves what is committed.
            journal.file.sync()
    assert journal.path.stat().st_size > before + CHECKPOINT_EVERY * 4000 / 2
    journal.file.commit()
    assert len(journal.events(0, 1000)) == CHECKPOINT_EVERY
    journal.close()


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_log_begins_anew_and_no_commit_copies_more_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_busy: bool
) -> None:
    """`is_busy`: changes come while the thread waits for the disk, so that the thread alone can never restart it.

    The file of another process is attached, as with fronts. Its log is not the affair of this one.
    """
    monkeypatch.setattr(journal_file, "LONGEST_LOG", 200)
    monkeypatch.setattr(journal_file, "CHECKPOINT_EVERY", 16)
    journal = Journal.open(tmp_path / "journal.sqlite")
    other = Journal.open(segment_of(journal.path, 0))
    write(other)
    journal.file.attach([other.path], live=True)
    journal.file.defer_commits()
    copy_log, pages, own = journal_file._copy_log, [0], []

    def counting(connection: sqlite3.Connection) -> tuple[int, bool]:
        length, is_copied = copy_log(connection)
        if connection is journal.file.db:
            own.append(length - pages[-1])
        pages.append(length)
        return length, is_copied

    monkeypatch.setattr(journal_file, "_copy_log", counting)
    for _ in range(800):
        write(journal)
        journal.file.commit()
        if is_busy:
            write(journal)
        journal.file.sync()
    assert max(pages) < 300 and bool(own) == is_busy
    assert all(0 < copied <= 16 for copied in own), "the pages of one commit"
    journal.file.commit()
    assert len(journal.events(0, 2000)) == 800 * (1 + is_busy)
    assert journal.file.db.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
    assert not caplog.records
    journal.close()
    other.close()


def test_a_disk_without_room_for_the_move_fails_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    journal.file.defer_commits()

    class Full:
        def execute(self, statement: str) -> sqlite3.Cursor:
            raise sqlite3.OperationalError("database or disk is full")

        def close(self) -> None: ...

    with monkeypatch.context() as full:
        full.setattr("sqlite3.connect", lambda *_, **__: Full())
        for _ in range(CHECKPOINT_EVERY):
            journal.file.sync()
    assert "could not be checkpointed" in caplog.text and not journal.file.refusal
    journal.close()


def test_a_failure_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    journal.file.defer_commits()

    def fails(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("os.fdatasync", fails)
        with pytest.raises(Later, match="Input/output"):
            journal.file.sync()
    with pytest.raises(Later, match="Input/output"):
        journal.file.sync()
    journal.close()
    journal.close()
