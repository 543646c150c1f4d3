"""SQLite files that may come from somebody else: opened so that they run no code, and checked to have our tables only.

A view or a trigger is code of the file: a recursive view makes the first read last for ever. So a file is refused
unless each of its tables is one of ours, word by word, and everything else in it is an index of plain columns. SQLite's
`trusted_schema = OFF` would refuse our own files: an index of the journal uses json_extract.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from agentjet.errors import ConfigError

STEPS_BETWEEN_SIGNALS = 100_000
"""Instructions of SQLite, some milliseconds, after which Python handles signals."""
ADDED_COLUMNS = re.compile(r"(?:,\w+ (?:TEXT|INTEGER|REAL|BLOB))*")
"""Nullable columns that this version or a newer one added."""
PUNCTUATION = re.compile(r" ?([(),]) ?")
PLAIN_INDEX = re.compile(r"CREATE INDEX \w+ ON \w+\([\w,]+\)")
OF_SQLITE = (
    "CREATE TABLE sqlite_sequence(name,seq)",
    "CREATE TABLE sqlite_stat1(tbl,idx,stat)",
    "CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)",
)
"""Tables that SQLite makes."""


def connect(path: Path, query: str = "", *, any_thread: bool = False) -> sqlite3.Connection:
    """Connects to a file. `query` is that of SQLite's URI, such as `mode=ro`. Raises `sqlite3.OperationalError`."""
    address = f"{path.absolute().as_uri()}?{query}"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=not any_thread)
    connection.execute("PRAGMA cell_size_check = ON")
    # A signal's handler runs between two lines of Python, and a query has none.
    connection.set_progress_handler(lambda: 0, STEPS_BETWEEN_SIGNALS)
    return connection


def check_is_plain(connection: sqlite3.Connection, schema: str, path: Path) -> None:
    """Raises `ConfigError` if the file has another view or trigger than those of `schema`, or a virtual table.

    `check_tables` refuses all of these, too. This check also accepts files of other schemas, whose version must be read
    before.
    """
    ours = _made_by(schema)
    for kind, name, text in _objects(connection):
        if text == ours.get((kind, name)):
            continue
        begins = {"table": (f"CREATE TABLE {name}(",), "index": ("CREATE INDEX ", "CREATE UNIQUE INDEX ")}.get(kind, ())
        if not text.startswith(begins):
            raise _foreign(path, f"it has the {kind} {name!r} which AgentJet does not make")


def check_tables(connection: sqlite3.Connection, schema: str, path: Path) -> None:
    """Raises `ConfigError` if the file has another table, view or trigger than the statements `schema` make, or one
    with another definition. Indexes of plain columns are accepted.
    """
    ours = _made_by(schema)
    for kind, name, text in _objects(connection):
        known = ours.get((kind, name), "")
        is_harmless = {"index": PLAIN_INDEX.fullmatch(text), "table": _has_more_columns(text, known)}.get(kind)
        if text != known and not is_harmless:
            what = "with another definition" if known else "which AgentJet does not make"
            raise _foreign(path, f"it has the {kind} {name!r} {what}")


def _has_more_columns(text: str, known: str) -> bool:
    """True if a table was altered so that it has nullable columns of newer versions."""
    start, end = known[:-1], known[-1:]
    added = text.removeprefix(start).removesuffix(end)
    return end == ")" and text == f"{start}{added}{end}" and ADDED_COLUMNS.fullmatch(added) is not None


@lru_cache
def _made_by(schema: str) -> dict[tuple[str, str], str]:
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(schema)
        return {(kind, name): text for kind, name, text in _objects(fresh)}


def _objects(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Kind, name and definition of what a file has, without the parts that SQLite makes. Definitions have no
    superfluous whitespace.
    """
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    # The name of a row is not trusted: SQLite takes that of the definition.
    found = ((str(kind), str(name), PUNCTUATION.sub(r"\1", " ".join(str(sql).split()))) for kind, name, sql in rows)
    return [(kind, name, text) for kind, name, text in found if text not in OF_SQLITE]


def _foreign(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is not a file that AgentJet wrote: {what}. It is not read: use a copy from its origin")
