from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.campaign.models import Budget, Intervention
from agentjet.research.campaign.notebook import NAME, Notebook


def test_entries_survive_and_are_numbered(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        first = notebook.entry("started", {"topic": "x"})
        second = notebook.entry("observed", {"score": 0.5}, [first.number])
        assert second.number == 2 and second.because == (1,)
    with Notebook(tmp_path) as again:
        assert [entry.content for entry in again.entries] == [{"topic": "x"}, {"score": 0.5}]


def test_one_writer(tmp_path: Path) -> None:
    with Notebook(tmp_path), pytest.raises(ConfigError, match="is being written by another process"):
        Notebook(tmp_path)


def test_readers_beside_the_writer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no campaign"):
        Notebook(tmp_path / "none", writer=False)
    with Notebook(tmp_path) as notebook, Notebook(tmp_path, writer=False) as reader:
        notebook.entry("started", {})
        reader.refresh()
        assert len(reader.entries) == 1


def test_append_only(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.entry("started", {})
        for statement in ("UPDATE entries SET content = '1'", "DELETE FROM entries"):
            with sqlite3.connect(tmp_path / NAME) as other, pytest.raises(sqlite3.IntegrityError, match="append only"):
                other.execute(statement)


def test_budgets() -> None:
    assert Budget.parse("48h") == Budget(hours=48.0)
    assert Budget.parse("500runs") == Budget(runs=500.0)
    for wrong in ("much", "0h", "-1runs", "nanh", "xh"):
        with pytest.raises(ConfigError, match="budget"):
            Budget.parse(wrong)


def test_an_intervention_changes_something() -> None:
    with pytest.raises(ConfigError, match="changes nothing"):
        Intervention("idle", "settings")
