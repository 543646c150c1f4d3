"""Pinned here: what a commit wrote is moved out of the log while a writer goes on, the log's length is bounded, and a
failed sync is never forgotten.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from agentjet.errors import Later
from agentjet.swarm import Journal
from agentjet.swarm.journal_file import CHECKPOINT_EVERY


def test_the_log_is_moved_under_a_writer(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    journal.file.defer_commits()
    before = journal.path.stat().st_size
    for _ in range(CHECKPOINT_EVERY):
        with journal.file.transaction():
            journal.add_event("state", 0.0, {"text": "x" * 4000})
        journal.file.commit()
        with journal.file.transaction():  # Open while the other connection moves what is committed.
            journal.file.sync()
    assert journal.path.stat().st_size > before + CHECKPOINT_EVERY * 4000 / 2
    journal.file.commit()
    assert len(journal.events(0, 1000)) == CHECKPOINT_EVERY
    journal.close()


def test_the_log_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.swarm.journal_file.LONGEST_LOG", 50)
    journal = Journal.open(tmp_path / "journal.sqlite")
    journal.file.defer_commits()
    for _ in range(200):
        with journal.file.transaction():
            journal.add_event("state", 0.0, {"text": "x" * 4000})
        journal.file.commit()
        journal.file.sync()
    assert os.stat(f"{journal.path}-wal").st_size < 70 * 4200
    assert len(journal.events(0, 1000)) == 200
    journal.close()


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
