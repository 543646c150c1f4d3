"""`JournalFile`: the SQLite file of a journal: its transactions, its tables and their migration.

One process opens the file, and one transaction runs at a time.

A transaction is on disk when it ends or, after `defer_commits`, once the `commit` and `sync` after it have returned.
`sync` waits for the write-ahead log, and now and then checkpoints it into the database file. It may run in another
thread. So the log stays near `LONGEST_LOG` pages in a long run, also that of a front's file, which its front
checkpoints. After a failed `fdatasync` nothing is written any more: the kernel may have dropped the pages, and a second
call would succeed without writing them.

Each front writes calls into its own file, `calls/front-N.sqlite` beside the journal, with the same tables. A journal
reads them, too: `calls` is then a view of all files, and `main.calls` the journal's own table. The journal records the
names of the files that its newest start read, so that a missing one is noticed.

In the schema before, most facts were JSON. One set of queries returns rows of the present tables from those of the
earlier schema. A journal that is only read gets them as temporary views with the names of the present tables. A journal
that is opened for writing is migrated by them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Self, TypeGuard

from agentjet import database
from agentjet.errors import ConfigError, Later, Unavailable, counted, run_closed

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 64
"""Syncs between two checkpoints. A checkpoint in their thread cannot restart the log while the writer uses it."""
LONGEST_LOG = 16_384
"""Pages of 4 KiB from which each sync makes a checkpoint, until the writer has restarted the log."""
DISK_ERRORS = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})
"""SQLite's primary error codes for a failing disk, as opposed to a damaged file."""
SEGMENTS = "calls"
"""Folder of the files of fronts, beside the journal."""
UNAVAILABLE = "journal_unavailable"
"""Code of refusals because of the disk or the file."""


class _Closed:
    """In place of the connection of a closed file: refuses the requests that began before."""

    def __getattr__(self, name: str) -> NoReturn:
        raise run_closed()


class JournalFile:
    """The file and its transactions. Construct it with `open` or `open_read_only`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int = -1) -> None:
        self.path = path
        self.db: sqlite3.Connection | Any = connection
        self.segments: dict[str, Path] = {}
        """Other files with calls that are read, by the name of their schema."""
        self._apart: JournalFile | None = None
        """A second connection for facts about calls: see `_read_calls_apart`."""
        self.in_transaction = False
        self.refusal = ""
        """Why the disk refuses writes, and what to do; empty again after the next successful write."""
        self._lock = lock
        self._log = -1
        """The write-ahead log, once commits are deferred."""
        self._num_syncs = 0
        self._is_long = False
        """True if the log had `LONGEST_LOG` pages at its newest checkpoint."""
        self._can_restart = False
        """True if the log is long and all of it was copied."""
        self._lost: Exception | None = None
        """Why transactions were undone that no `commit` has committed yet."""
        self._distrusted: BaseException | None = None
        """Why writes are refused until the file is opened again."""

    # ---- the file ------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the file of a journal, or create it. A file of `EARLIER_VERSION` is migrated in one transaction.

        Raises `ConfigError` if another process has it open, the disk refuses it, or it has another schema.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unwritable(path, f"{error.strerror}: {error.filename}") from None
        file = None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists():
                path.touch(0o600)  # SQLite creates the files beside it with the same mode.
            file = cls(path, database.connect(path, any_thread=True), lock)
            file.db.execute("PRAGMA journal_mode = WAL")
            file.db.execute("PRAGMA synchronous = FULL")
            # Debian's SQLite overwrites deleted pages by default and so writes each of them: 36 s for 1 GB of calls.
            file.db.execute("PRAGMA secure_delete = OFF")
            if not file.db.execute("SELECT 1 FROM sqlite_master").fetchone():
                version = f"INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}')"
                file.db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {version}; COMMIT;")
            if file._checked_version() == EARLIER_VERSION:
                file._migrate()
            if not file.has_routes:
                file.db.execute("ALTER TABLE calls ADD COLUMN routes BLOB")
            return file
        except BaseException as error:
            os.close(lock) if file is None else file.close()
            if isinstance(error, BlockingIOError):
                raise ConfigError(
                    f"The run in {str(path.parent)!r} is in use by another server: stop that server, or choose another "
                    "server.data_dir"
                ) from None
            is_disk = isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode & 0xFF in DISK_ERRORS
            if is_disk or isinstance(error, OSError):
                raise _unwritable(path, str(error)) from None
            if isinstance(error, sqlite3.DatabaseError):
                raise ConfigError(
                    f"{path} cannot be read as a journal ({error}). Restore it; or move only checkpoints/ to "
                    "runs/default/ of a new server.data_dir, which starts at the newest good one"
                ) from None
            raise

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        """Open an existing journal to read it, also beside a running server. Nothing in its folder changes. One of
        `EARLIER_VERSION` is read through temporary views. The file may come from somebody else.

        Raises `ConfigError` if there is none, or if it has another schema.
        """
        if not path.is_file():
            raise ConfigError(f"{str(path.parent)!r} is not a data dir of AgentJet: it has no {path.name}")
        file = cls(path, database.connect(path, _reading(path)))
        try:
            if file._checked_version() == EARLIER_VERSION:
                for statement in list(views(file.db)):
                    file.db.execute(statement)
            file.attach(segments_of(path))
        except (ConfigError, sqlite3.DatabaseError) as error:
            file.close()
            if isinstance(error, ConfigError) or error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                raise
            raise ConfigError(f"{path} cannot be read as a journal ({error})") from None
        return file

    def attach(self, segments: Sequence[Path], *, live: bool = False) -> None:
        """Read the calls of other files, too. `live`: other processes write them. Raises `ConfigError`."""
        for path in segments:
            if not live:  # They may come from somebody else.
                JournalFile.open_read_only(path).close()
            name = path.stem.replace("-", "_")
            address = f"{path.absolute().as_uri()}?{'mode=ro' if live else _reading(path)}"
            try:
                self.db.execute(f"ATTACH ? AS {name}", (address,))
                self.db.execute(f"SELECT 1 FROM {name}.calls LIMIT 1").fetchone()
            except sqlite3.DatabaseError as error:
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                    raise
                raise ConfigError(
                    f"{path} cannot be read as the calls of a front ({error}). Restore it with {path.name}-wal; or "
                    "move it away and go on without its calls, with an empty file of its name; or "
                    "move only checkpoints/ to runs/default/ of a new server.data_dir, which starts at the newest good "
                    "one"
                ) from None
            self.segments[name] = path
        if self.segments:
            names = ", ".join(_CALL_NAMES)
            tables = " UNION ALL ".join(f"SELECT {names} FROM {schema}.calls" for schema in ("main", *self.segments))
            self.db.execute(f"CREATE TEMP VIEW calls AS {tables}")

    def open_segments(self, fronts: int) -> None:
        """Read the calls of fronts, too, and create the files of so many fronts if they are missing.

        Raises `ConfigError` if a file that the start before read is gone, and with it calls that may still be learned.
        """
        before = self.meta("segments", "").split()
        folder = segment_of(self.path, 0).parent
        for path in segments_of(self.path):
            create_segment(path)
        if gone := [folder / name for name in before if not (folder / name).exists()]:
            self._check_calls(gone)
        for front in range(fronts):
            create_segment(segment_of(self.path, front))
        self.attach(found := segments_of(self.path), live=True)
        if (names := [path.name for path in found]) != before:
            self.set_meta("segments", " ".join(names))
        if found and (num_episodes := self._num_lacking()):
            log.warning(
                "the files of fronts lack calls of %s: these calls are not learned, the rewards count in the groups",
                counted(num_episodes, "episode"),
            )
        if fronts:
            self._read_calls_apart()

    def _check_calls(self, gone: Sequence[Path]) -> None:
        """Raises `ConfigError` if the files of fronts that are not `gone` lack calls that may still be learned."""
        with closing(JournalFile(self.path, database.connect(self.path, "mode=ro"))) as file:
            file.attach(segments_of(self.path), live=True)
            num_episodes = file._num_lacking()
        if num_episodes:
            raise ConfigError(
                f"server.data_dir lacks {', '.join(map(str, gone))}, with calls of "
                f"{counted(num_episodes, 'episode')} that may still be learned. Put each file back, together with the "
                "one beside it that ends in -wal, if there was one; or go on without these calls, which are then not "
                f"learned, with an empty file in each place: touch {' '.join(map(str, gone))}"
            )

    def _num_lacking(self) -> int:
        return int(self.db.execute(_LACK_CALLS).fetchone()[0])

    def _read_calls_apart(self) -> None:
        """Read facts about calls outside of transactions from here on, because other processes write them.

        A transaction does not see what others committed after its begin, and it may stay open for a while.
        """
        self._apart = JournalFile(self.path, database.connect(self.path, "mode=ro", any_thread=True))
        self._apart.attach(tuple(self.segments.values()), live=True)

    @property
    def calls(self) -> sqlite3.Connection | Any:
        """The connection for facts about calls."""
        return self.db if self._apart is None else self._apart.db

    def _checked_version(self) -> int:
        """The version of the schema. Raises `ConfigError` if it is unknown, or if the tables are not those of it."""
        database.check_is_plain(self.db, SCHEMA, self.path)  # Before the first read of a table, which could be a view.
        found = self.meta("schema_version", "0")
        schemas = {str(SCHEMA_VERSION): SCHEMA, str(EARLIER_VERSION): EARLIER_SCHEMA}
        if found not in schemas:
            shown = found if found.isdecimal() else repr(found[:20])
            raise ConfigError(
                f"{self.path} has journal schema {shown}, this AgentJet reads {SCHEMA_VERSION}: use the AgentJet that "
                "wrote it, or begin a new server.data_dir with an export of its policy (`agentjet export`) as "
                "model.name"
            )
        database.check_tables(self.db, schemas[found], self.path)
        return int(found)

    @property
    def has_routes(self) -> bool:
        """False for a file of an earlier program that is only read: its calls have no column `routes`."""
        return bool(self.segments) or "routes" in _columns(self.db, "calls")

    def _migrate(self) -> None:
        """Write the rows of the earlier schema into new tables. A kill or an error leaves the file as it was."""
        (number,) = self.db.execute("SELECT COUNT(*) FROM episodes").fetchone()
        log.warning("migrating %s to journal schema %d: %d episodes", self.path, SCHEMA_VERSION, number)
        self.db.execute("BEGIN IMMEDIATE")
        try:
            for statement in list(migration(self.db)):
                self.db.execute(statement)
            self.db.execute("COMMIT")
        except BaseException:
            self.db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close and unlock the file. Idempotent. Later uses raise `Later`."""
        if isinstance(self.db, _Closed):
            return
        if self._apart is not None:
            self._apart.close()
        self.db.close()
        self.db = _Closed()
        for descriptor in (self._log, self._lock):
            if descriptor >= 0:
                os.close(descriptor)

    def interrupt(self) -> None:
        """End the query of another thread: it raises `sqlite3.OperationalError`."""
        with suppress(sqlite3.ProgrammingError, Later):  # It was closed a moment ago.
            self.db.interrupt()

    # ---- transactions --------------------------------------------------------------------------------------

    def defer_commits(self) -> None:
        """From here on `commit` commits transactions, and `sync` has them on disk, so that many share one wait."""
        self.db.execute("PRAGMA synchronous = NORMAL")
        self.db.execute("PRAGMA wal_autocheckpoint = 0")  # A checkpoint within a commit would hold the event loop.
        self._log = os.open(f"{self.path}-wal", os.O_RDONLY)
        self.sync()  # Commits of a killed server may not be synced, and reading acknowledges them.

    @property
    def defers_commits(self) -> bool:
        return self._log >= 0

    @property
    def has_uncommitted(self) -> bool:
        return bool(self.db.in_transaction)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Group changes: all or none. An error undoes this transaction only. Transactions are not nested.

        Raises `Unavailable` if the disk refuses the write.
        """
        self._require_trusted()
        follows = self.has_uncommitted
        try:
            if not follows:
                self.db.execute("BEGIN IMMEDIATE")
            self.db.execute("SAVEPOINT one")
            self.in_transaction = True
            yield
            self.db.execute("RELEASE one")
        except BaseException as error:
            # After a refused write SQLite may have undone everything uncommitted. Then the next `commit` fails, so that
            # none of it is acknowledged.
            if follows and not self.has_uncommitted and isinstance(error, sqlite3.OperationalError):
                self._lost = error
            elif follows and self.has_uncommitted:
                self.db.execute("ROLLBACK TO one")
                self.db.execute("RELEASE one")
            self._raise_refused(error, undo=not follows)
        finally:
            self.in_transaction = False
        if not self.defers_commits:
            self.commit()

    def commit(self) -> None:
        """Commit all ended transactions together, before `sync`. Raises `Later` if that failed; all are then undone."""
        assert not self.in_transaction, "a commit comes between transactions"
        self._require_trusted()
        lost, self._lost = self._lost, None
        try:
            if lost is not None:
                raise lost
            if self.has_uncommitted:
                self.db.execute("COMMIT")
        except (sqlite3.DatabaseError, Later) as error:
            self._raise_refused(error, undo=True)
        if self.refusal:
            log.warning("the journal %s is written again", self.path)
            self.refusal = ""
        if self._can_restart:
            self._restart_log()

    def abandon(self, error: BaseException) -> None:
        """Undo all uncommitted transactions. The next `commit` fails because of the error."""
        if not self.has_uncommitted:
            return
        self.db.execute("ROLLBACK")
        if _is_of_disk(error) or (isinstance(error, Later) and error.code == UNAVAILABLE):
            self._lost = error
        else:
            self._lost = Unavailable(
                f"Another change in the same commit failed ({error!r}) and undid this one: repeat the request.",
                code="commit_undone",
                retry_after=1.0,
            )

    def sync(self) -> None:
        """Return once the committed changes are on disk. May be called from another thread.

        Raises `Later`: the changes must not be acknowledged, and writes are refused until the file is opened again.
        """
        if self._distrusted is not None:
            raise self.refuse_writes(self._distrusted)
        try:
            os.fdatasync(self._log)
        except OSError as error:
            raise self.refuse_writes(error) from error
        self._num_syncs += 1
        if self._is_long or self._num_syncs % CHECKPOINT_EVERY == 0:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Copy pages that no reader needs from the log into the database file. After a failure they stay in the log."""
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
                length, is_copied = _copy_log(connection)
        except sqlite3.OperationalError as error:
            log.warning("the journal's write-ahead log could not be checkpointed: %s", error)
            return
        self._is_long = length >= LONGEST_LOG
        self._can_restart = self._is_long and is_copied

    def _restart_log(self) -> None:
        """Copy the newest commit, so that the next transaction begins the log again. Only the writer can do that, and
        only between two transactions.
        """
        self._is_long = self._can_restart = False
        try:
            _copy_log(self.db)
        except sqlite3.OperationalError as error:
            log.warning("the journal's write-ahead log could not be restarted: %s", error)

    # ---- refusals ------------------------------------------------------------------------------------------

    def refuse_writes(self, error: BaseException) -> Later:
        """Refuse all writes until the file is opened again, because it is unknown which changes are on disk.
        Returns the error for those who wait for a write.
        """
        self._distrusted = self._distrusted or error
        return self._refusing(
            f"The journal {self.path} is not trusted any more ({error}): check the disk, then restart the "
            "server. Nothing is recorded until then.",
            retry_after=30.0,
        )

    def probe_disk(self) -> None:
        """Write a meaningless value. `refusal` then shows if the disk accepted it."""
        self.set_meta("tries", str(int(self.meta("tries", "0")) + 1))  # SQLite skips a write of an equal value.

    def _require_trusted(self) -> None:
        """Raises `Later` if writes are refused until the file is opened again."""
        if self._distrusted is not None:
            if self.has_uncommitted:
                self.db.execute("ROLLBACK")
            raise self.refuse_writes(self._distrusted) from self._distrusted

    def _raise_refused(self, error: BaseException, *, undo: bool) -> NoReturn:
        """Raises `Later` for an error of the disk or the file, else `error`. `undo` rolls back everything first."""
        if undo and self.has_uncommitted:
            self.db.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            way_out = "free some space there" if "full" in str(error) else "check the disk"
            raise self._refusing(
                f"The journal {self.path} could not be written ({error}), nothing was recorded: {way_out}. The server "
                "goes on by itself then.",
                retry_after=5.0,
            ) from error
        if type(error) is sqlite3.DatabaseError:  # The file is damaged.
            raise self.refuse_writes(error) from error
        raise error

    def _refusing(self, sentence: str, *, retry_after: float) -> Later:
        if not self.refusal:  # Logged once, when it begins.
            log.error("%s", sentence)
        self.refusal = sentence
        return Unavailable(sentence, code=UNAVAILABLE, retry_after=retry_after)

    # ---- rows ----------------------------------------------------------------------------------------------

    def meta(self, key: str, default: str) -> str:
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def segments_of(journal: Path) -> list[Path]:
    found = (journal.parent / SEGMENTS).glob("front-*.sqlite")
    return sorted(path for path in found if re.fullmatch(r"front-\d{1,3}", path.stem))


def segment_of(journal: Path, front: int) -> Path:
    return journal.parent / SEGMENTS / f"front-{front}.sqlite"


def create_segment(path: Path) -> None:
    """Create the file of a front if it is missing or empty. Raises `ConfigError`."""
    try:
        JournalFile.open_read_only(path).close()
    except ConfigError:  # It is missing, or a killed server had begun it.
        if path.exists():
            path.chmod(0o600)  # Somebody else may have made it.
        JournalFile.open(path).close()


def _reading(path: Path) -> str:
    """The query of an address by which a file is only read, and nothing in its folder changes."""
    # Without a write-ahead log the file is complete. `immutable` keeps SQLite from creating a log beside it.
    log = path.with_name(path.name + "-wal")
    return "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"


def _is_of_disk(error: BaseException) -> TypeGuard[sqlite3.DatabaseError]:
    """True if an error is one of the disk or of the file, as opposed to a wrong statement."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError


def _copy_log(connection: sqlite3.Connection) -> tuple[int, bool]:
    """Copies the log as far as no reader needs it. Returns its pages, and True if all of them were copied."""
    # Without `main`, it would copy the logs of attached files, too, which only their own processes may write.
    is_busy, length, copied = connection.execute("PRAGMA main.wal_checkpoint(PASSIVE)").fetchone()
    return length, not is_busy and length == copied


def _unwritable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{str(path.parent)!r} is not writable ({why}). Fix its permissions or free space, or choose another "
        "server.data_dir."
    )


_LACK_CALLS = """
SELECT COUNT(*) FROM main.episodes WHERE num_calls > (SELECT COUNT(*) FROM calls WHERE episode_id = episodes.id) AND (
    NOT settled OR id IN (
        SELECT member.value FROM main.batches, json_each(batches.groups) AS members, json_each(members.value) AS member
        WHERE batches.id >= COALESCE((SELECT value ->> '$.durable_version' FROM main.meta WHERE key = 'state'), 0)
    )
)
"""
"""Number of episodes without some of the calls that `Journal.unneeded` keeps for the learner."""


# ---- the schema and the migration from the earlier one --------------------------------------------------------

SCHEMA_VERSION = 15
EARLIER_VERSION = 14
"""The schema that is migrated."""
UNCHANGED = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE tasks (
    seq INTEGER PRIMARY KEY,
    task_set TEXT NOT NULL,
    task_id TEXT NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (task_set, task_id)
);

CREATE TABLE instances (
    number INTEGER PRIMARY KEY,
    client_id TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    UNIQUE (client_id, instance_id)
);

CREATE TABLE transcripts (
    seq INTEGER PRIMARY KEY,
    episode_id TEXT NOT NULL UNIQUE,
    reason TEXT NOT NULL,
    most INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL
);

CREATE TABLE operations (
    policy TEXT NOT NULL,
    number INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('forward_backward', 'optim_step')),
    batch_id INTEGER NOT NULL,
    PRIMARY KEY (policy, number)
) WITHOUT ROWID;
CREATE INDEX operations_of_batch ON operations (batch_id);

CREATE TABLE checkpoints (policy_version INTEGER PRIMARY KEY, digest TEXT NOT NULL);

CREATE TABLE idempotency (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    episode_id TEXT NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (scope, key)
) WITHOUT ROWID;

CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    time REAL NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX events_of_kind ON events (kind, seq) WHERE kind IN ('evaluation', 'rollback');
"""
CALL_COLUMNS = {
    "role": ("TEXT", "body ->> '$[0].role'"),
    "after_call": ("TEXT", "body ->> '$[0].ask.after'"),
    "retry_of": ("TEXT", "body ->> '$[0].retry_of'"),
    "untrained": ("TEXT", "COALESCE(body ->> '$[0].untrained', '')"),
    "num_tokens": ("INTEGER", "json_array_length(body, '$[0].completion')"),
    "num_bytes": ("INTEGER", "LENGTH(CAST(body AS BLOB))"),
    "routes": ("BLOB", "NULL"),
}
"""Columns of calls that the first journals of the earlier schema lack, or have as NULL: type, and value by the body.

They stand at the end of the table, so that a migration adds them without a copy of the bodies.
"""
_CALL_NAMES = ("seq", "id", "episode_id", "undelivered", "body", *CALL_COLUMNS)
_CALLS = """
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    episode_id TEXT NOT NULL,
    undelivered INTEGER NOT NULL,
    body TEXT NOT NULL{more}
);
"""
# The first journals of this schema lack `routes`: `JournalFile.open` adds the column to all.
_ADDED = ", ".join(f"{name} {kind}" for name, (kind, _) in CALL_COLUMNS.items() if name != "routes")
# An index of all facts: the event loop reads them without the bodies, which may have megabytes.
CALL_INDEXES = """
CREATE INDEX facts_of_calls ON calls
    (episode_id, seq, id, undelivered, role, after_call, retry_of, untrained, num_tokens, num_bytes);
CREATE INDEX idempotency_by_age ON idempotency (created);
"""
_CALL_INDEXES = ("facts_of_calls", "idempotency_by_age")
REBUILT = """
CREATE TABLE counts (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    batch INTEGER NOT NULL,
    name TEXT NOT NULL,
    number INTEGER NOT NULL,
    UNIQUE (kind, batch, name)
);

CREATE TABLE code_versions (
    version TEXT PRIMARY KEY,
    last_episode INTEGER NOT NULL,
    episodes INTEGER NOT NULL,
    finished INTEGER NOT NULL,
    aborted INTEGER NOT NULL,
    not_needed INTEGER NOT NULL,
    reward_sum REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE episodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    settled INTEGER NOT NULL,
    client_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    task_set TEXT NOT NULL,
    "group" TEXT NOT NULL,
    group_id INTEGER,
    mode TEXT NOT NULL,
    policy_version INTEGER NOT NULL,
    begun REAL NOT NULL,
    status TEXT NOT NULL,
    ended REAL,
    reward REAL,
    by_role TEXT NOT NULL,
    call_rewards TEXT NOT NULL,
    call_rewards_digest TEXT NOT NULL,
    metrics TEXT NOT NULL,
    reward_text TEXT NOT NULL,
    reason TEXT NOT NULL,
    not_needed TEXT NOT NULL,
    num_calls INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    trained_in INTEGER,
    oldest_version INTEGER,
    dropped TEXT NOT NULL,
    code_version TEXT NOT NULL,
    at_version INTEGER,
    temperature REAL,
    max_turns INTEGER NOT NULL,
    task_mean REAL,
    instance_id TEXT NOT NULL,
    seed INTEGER,
    noted TEXT NOT NULL,
    refused TEXT NOT NULL
);
CREATE INDEX episodes_by_status ON episodes (status, seq);
CREATE INDEX unsettled_episodes ON episodes (seq) WHERE NOT settled;
CREATE INDEX episodes_of_group ON episodes (group_id);

CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    client_id TEXT NOT NULL,
    name TEXT NOT NULL,
    opened REAL NOT NULL,
    touched REAL NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    closed REAL,
    task_set TEXT NOT NULL,
    code_version TEXT NOT NULL,
    is_left INTEGER NOT NULL,
    size INTEGER NOT NULL,
    temperature REAL,
    max_turns INTEGER NOT NULL,
    task_mean REAL
);

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    groups TEXT NOT NULL,
    job TEXT NOT NULL,
    composed REAL NOT NULL,
    carry TEXT NOT NULL,
    metrics TEXT,
    fingerprint TEXT
);
"""
SCHEMA = UNCHANGED + _CALLS.format(more=f", {_ADDED}") + CALL_INDEXES + REBUILT
EARLIER_SCHEMA = f"""{UNCHANGED}{_CALLS.format(more="")}
CREATE TABLE episodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    settled INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX episodes_by_status ON episodes (status, seq);
CREATE INDEX unsettled_episodes ON episodes (seq) WHERE NOT settled;
CREATE INDEX episodes_of_group ON episodes (json_extract(body, '$.group_id'));

CREATE TABLE groups (id INTEGER PRIMARY KEY, body TEXT NOT NULL);

CREATE TABLE batches (id INTEGER PRIMARY KEY, body TEXT NOT NULL, metrics TEXT);
"""
_NOT_NEEDED = " ".join(
    f"WHEN body ->> 'reason' GLOB '{start}:*' THEN '{start}'"
    for start in ("surplus", "stale", "not needed", "replaced")
)
_STATE = "(SELECT value FROM main.meta WHERE key = 'state')"
# Keys of `losses` were `BATCH/groups/REASON` and `BATCH/episodes/REASON`.
_AFTER_BATCH = "substr(key, instr(key, '/') + 1)"
COUNTS = f"""
SELECT ROW_NUMBER() OVER () AS seq, * FROM (
SELECT 'outcome' AS kind, 0 AS batch, key AS name, value AS number FROM json_each({_STATE}, '$.counts')
UNION ALL SELECT 'dropped', 0, key, value FROM json_each({_STATE}, '$.dropped')
UNION ALL SELECT 'lost_' || substr({_AFTER_BATCH}, 1, instr({_AFTER_BATCH}, '/') - 1),
    CAST(substr(key, 1, instr(key, '/') - 1) AS INTEGER),
    substr({_AFTER_BATCH}, instr({_AFTER_BATCH}, '/') + 1), value
    FROM json_each({_STATE}, '$.losses'))
"""
# At most 20, whose order is kept. An episode of the present schema has a higher number.
CODE_VERSIONS = f"""
SELECT key AS version, ROW_NUMBER() OVER (ORDER BY id) - 20 AS last_episode,
    value ->> 'episodes' AS episodes, value ->> 'finished' AS finished,
    value ->> 'aborted' AS aborted, COALESCE(value ->> 'not_needed', 0) AS not_needed,
    value ->> 'reward_sum' AS reward_sum
    FROM json_each({_STATE}, '$.code_versions')
"""


def _rebuilt(connection: sqlite3.Connection) -> dict[str, dict[str, str]]:
    """The present columns of the tables that a migration rebuilds, by the columns of the earlier table."""

    def each(names: str, expression: str) -> dict[str, str]:
        return {name: expression.replace("NAME", name) for name in names.split()}

    text, number = "COALESCE(body ->> '$.NAME', '')", "COALESCE(body ->> '$.NAME', 0)"
    mapping, optional = "COALESCE(body -> '$.NAME', '{}')", "json_extract(body, '$.NAME')"  # As an index has it.
    return {
        "episodes": {
            **each("seq id status settled", "NAME"),
            **each("client_id task_id task_set group mode call_rewards_digest reward_text reason dropped", text),
            **each("code_version instance_id", text),
            **each("policy_version begun num_calls num_tokens max_turns", number),
            **each("group_id ended reward trained_in oldest_version at_version temperature task_mean seed", optional),
            **each("by_role call_rewards metrics noted refused", mapping),
            "not_needed": f"CASE WHEN status != 'aborted' THEN '' {_NOT_NEEDED} ELSE '' END",
        },
        "groups": {
            "id": "id",
            **each("client_id name state reason task_set code_version", text),
            **each("opened touched is_left size max_turns", number),
            **each("closed temperature task_mean", optional),
        },
        "batches": {
            **each("id metrics", "NAME"),
            **each("groups job", "body -> '$.NAME'"),
            "composed": number.replace("NAME", "composed"),
            "carry": mapping.replace("NAME", "carry"),
            "fingerprint": "fingerprint" if "fingerprint" in _columns(connection, "batches") else "NULL",
        },
    }


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def _select(columns: dict[str, str], table: str) -> str:
    return f"SELECT {', '.join(f'{value} AS {chr(34)}{name}{chr(34)}' for name, value in columns.items())} FROM {table}"


def views(connection: sqlite3.Connection) -> Iterator[str]:
    """The statements after which a file of the earlier schema is read as one of the present."""
    present = _columns(connection, "calls")
    calls = {name: name for name in ("seq", "id", "episode_id", "undelivered", "body")}
    for name, (_, value) in CALL_COLUMNS.items():
        calls[name] = f"COALESCE({name}, {value})" if name in present else value
    queries = {table: _select(columns, f"main.{table}") for table, columns in _rebuilt(connection).items()}
    queries |= {"calls": _select(calls, "main.calls"), "counts": COUNTS, "code_versions": CODE_VERSIONS}
    for table, query in queries.items():
        yield f"CREATE TEMP VIEW {table} AS {query}"  # It hides the table of that name.


def migration(connection: sqlite3.Connection) -> Iterator[str]:
    """The statements of one transaction that migrates a file of the earlier schema.

    The bodies of calls stay where they are: a run may have gigabytes of them.
    """
    rebuilt, present = _rebuilt(connection), _columns(connection, "calls")
    for name, (kind, _) in CALL_COLUMNS.items():
        if name not in present:
            yield f"ALTER TABLE calls ADD COLUMN {name} {kind}"
    values = ", ".join(f"{name} = {value}" for name, (_, value) in CALL_COLUMNS.items())
    yield f"UPDATE calls SET {values} WHERE num_bytes IS NULL"
    for index in ("episodes_by_status", "unsettled_episodes", "episodes_of_group", "calls_of_episode", *_CALL_INDEXES):
        yield f"DROP INDEX IF EXISTS {index}"
    for table in rebuilt:
        yield f"ALTER TABLE {table} RENAME TO earlier_{table}"
    yield from filter(str.strip, (REBUILT + CALL_INDEXES).split(";"))
    for table, columns in rebuilt.items():
        names = ", ".join(f'"{name}"' for name in columns)
        yield f"INSERT INTO {table} ({names}) {_select(columns, f'earlier_{table}')}"
        yield f"DROP TABLE earlier_{table}"
    yield f"INSERT INTO counts {COUNTS}"
    yield f"INSERT INTO code_versions {CODE_VERSIONS}"
    yield (
        "UPDATE meta SET value = json_remove(value, '$.counts', '$.dropped', '$.losses', '$.code_versions', "
        "'$.carry', '$.num_episodes', '$.num_groups') WHERE key = 'state'"
    )
    yield f"UPDATE meta SET value = '{SCHEMA_VERSION}' WHERE key = 'schema_version'"
