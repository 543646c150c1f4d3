"""A journal that somebody else made: it is refused by name before any of its own code runs, and Ctrl-C ends a read."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType

import pytest

from agentjet import database
from agentjet.cli.main import main
from agentjet.errors import ConfigError
from agentjet.research.journal import StudyJournal as Notebook
from agentjet.swarm import Journal
from agentjet.swarm.journal_file import SCHEMA
from tests.cli.test_commands import run

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, i, i, i, i FROM n"
TABLES = ("meta", "episodes", "calls", "batches", "events")
FOREIGN = {
    **{f"view {name}": (f"DROP TABLE {name}; CREATE VIEW {name} AS {ENDLESS}", f"view '{name}'") for name in TABLES},
    "view of another name": (f"CREATE VIEW other AS {ENDLESS}", "view 'other'"),
    "trigger": ("CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM episodes; END", "trigger 't'"),
    "table": ("CREATE TABLE other (x)", "table 'other' which AgentJet does not make"),
    "virtual table": ("CREATE VIRTUAL TABLE other USING fts5(x)", "table 'other"),
    "computed column": (
        "ALTER TABLE batches ADD COLUMN more TEXT AS (hex(zeroblob(1000000000)))",
        "table 'batches' with another definition",
    ),
    "computed index": ("CREATE INDEX more ON batches (hex(zeroblob(id)))", "index 'more'"),
    "other columns": ("DROP TABLE groups; CREATE TABLE groups (id, body)", "table 'groups' with another definition"),
    "disguised view": (
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET name = 'sqlite_stat1', tbl_name = 'sqlite_stat1', "
        f"sql = 'CREATE VIEW groups AS {ENDLESS}' WHERE name = 'groups'",
        "sqlite_stat1",
    ),
}
OURS = {
    "analysed": "ANALYZE",
    "an index of the operator": "CREATE INDEX more ON calls (episode_id, seq)",
    "a column of a newer version": "ALTER TABLE calls ADD COLUMN more INTEGER",
    "compacted": "VACUUM",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "runs" / "default" / "journal.sqlite"
    Journal.open(file).close()
    return file


def execute(path: Path, statements: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(statements)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_journal_is_refused_by_name(kind: str, path: Path) -> None:
    statements, says = FOREIGN[kind]
    execute(path, statements)
    opens: tuple[Callable[[Path], Journal], ...] = (Journal.open_read_only, Journal.open)
    for open_journal in opens:
        with pytest.raises(ConfigError, match=rf"not a file that AgentJet wrote: it has the .*{says}|malformed"):
            open_journal(path)


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_check_of_tables_refuses_it_alone(kind: str, path: Path) -> None:
    """A notebook has this check only."""
    execute(path, FOREIGN[kind][0])
    with closing(sqlite3.connect(path)) as db, pytest.raises((ConfigError, sqlite3.DatabaseError)):
        database.check_tables(db, SCHEMA, path)


@pytest.mark.parametrize("open_journal", [Journal.open_read_only, Journal.open])
def test_each_check_reads_the_file_once(
    open_journal: Callable[[Path], Journal], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def counted(name: str) -> Callable[..., None]:
        check = getattr(database, name)
        return lambda *arguments: (checked.append(name), check(*arguments))[1]

    for name in ("check_is_plain", "check_tables"):
        monkeypatch.setattr(database, name, counted(name))
    open_journal(path).close()
    assert checked == ["check_is_plain", "check_tables"]


@pytest.mark.parametrize("kind", OURS)
def test_our_own_journal_is_opened(kind: str, path: Path) -> None:
    execute(path, OURS[kind])
    for open_journal in (Journal.open_read_only, Journal.open, Journal.open_read_only):
        open_journal(path).close()


@pytest.mark.parametrize("writer", [False, True])
def test_a_foreign_notebook_is_refused_by_name(writer: bool, tmp_path: Path) -> None:
    file = tmp_path / "study.sqlite"
    Notebook(file).close()
    Notebook(file).close()  # Its own triggers are accepted.
    execute(file, f"DROP TABLE entries; CREATE VIEW entries AS {ENDLESS}")
    with pytest.raises(ConfigError, match="it has the view 'entries'"):
        Notebook(file, writer=writer)


@pytest.mark.parametrize("arguments", [("look", "--print", "--port", "0"), ("compare",)])
def test_each_command_refuses_it(arguments: tuple[str, ...], path: Path, tmp_path: Path) -> None:
    execute(path, FOREIGN["view meta"][0])
    with pytest.raises(ConfigError, match="it has the view 'meta'"):
        run(*arguments, str(tmp_path), str(tmp_path))


def test_ctrl_c_ends_a_query(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query is one call of C, in which no handler of a signal runs."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def read() -> None:
        with closing(database.connect(path, "mode=ro")) as db:
            db.execute(f"SELECT MAX(i) FROM ({ENDLESS.replace('SELECT i, i, i, i, i', 'SELECT i')})").fetchone()

    before = signal.signal(signal.SIGALRM, interrupted)
    monkeypatch.setattr("agentjet.cli.main.app", read)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended.value.code == 130
