"""`JournalFile`: the SQLite file of a journal. One process opens it, and one transaction runs at a time.

`open` migrates an older schema. A write that the disk refuses is undone and reported.

`WalSync` waits until the write-ahead log is on disk, and now and then checkpoints it into the database file. Both may
take as long as the disk needs, so they may run in another thread than the journal's. Invariants:

* what was committed before `wait` was called is on disk when it returns;
* after a failed `fdatasync` every later `wait` fails: the kernel may have dropped the pages, and a second call would
  succeed without writing them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self

from agentjet.errors import ConfigError, Later
from agentjet.swarm.schema import OLDEST_SCHEMA, SCHEMA, SCHEMA_VERSION, migrate

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 256
"""Waits between two checkpoints. A checkpoint in this thread cannot restart the log while the writer uses it. The
writer restarts it at `LONGEST_LOG` pages, and then has almost nothing left to copy.
"""
LONGEST_LOG = 16_384
"""Pages of 4 KiB."""


class WalSync:
    """The write-ahead log of one open database."""

    def __init__(self, path: Path) -> None:
        """`path` is the database's. Raises `OSError` if it has no log."""
        self._path = path
        self._file = os.open(f"{path}-wal", os.O_RDONLY)
        self._connection: sqlite3.Connection | None = None
        self._waits = 0
        self.failed: OSError | None = None
        """The first failure, if any."""

    def wait(self) -> None:
        """Return once the log is on disk. Raises `OSError`, from then on always."""
        if self.failed is not None:
            raise self.failed
        try:
            os.fdatasync(self._file)
        except OSError as error:
            self.failed = error
            raise
        self._waits += 1
        if self._waits % CHECKPOINT_EVERY == 0:
            self._checkpoint()

    def close(self) -> None:
        """Idempotent. Not while another thread waits."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _checkpoint(self) -> None:
        """Copy pages that no reader needs from the log into the database file. After a failure they stay in the log."""
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.OperationalError as error:
            log.warning("the journal's write-ahead log could not be checkpointed: %s", error)


DISK_ERRORS = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})
"""SQLite's primary error codes for a failing disk, as opposed to a damaged file."""


class _Closed:
    """In place of the connection of a closed file: refuses the requests that began before.

    Their repetitions find the run open again, or get the error for a run that is not open.
    """

    def __getattr__(self, name: str) -> NoReturn:
        raise Later("The run was closed during the request.", code="run_closed", status=503, retry_after=1.0)


class JournalFile:
    """The file and its transactions. Construct it with `open`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int) -> None:
        self.path = path
        self.db: sqlite3.Connection | Any = connection
        self._lock = lock
        self._depth = 0
        self._lost: sqlite3.OperationalError | None = None
        self._log: WalSync | None = None
        self._distrusted: BaseException | None = None
        """Why writes are refused until the file is opened again."""
        self.refusal = ""
        """Why the disk refuses writes, and what to do; empty again after the next successful write."""

    # ---- the file ------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the file of a journal.

        Raises `ConfigError` if another process has it open, the disk refuses it, or it has an unknown schema.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unwritable(path, f"{error.strerror}: {error.filename}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"The run in {str(path.parent)!r} is in use by another server: stop that server, or choose another "
                "server.data_dir"
            ) from None
        try:
            if not path.exists():
                path.touch(0o600)  # SQLite creates the files beside it with the same mode.
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.OperationalError) as error:
            os.close(lock)
            raise _unwritable(path, str(error)) from None
        file = cls(path, connection, lock)
        try:
            file._prepare()
        except sqlite3.DatabaseError as error:
            file.close()
            if error.sqlite_errorcode & 0xFF in DISK_ERRORS:
                raise _unwritable(path, str(error)) from None
            raise ConfigError(
                f"{path} cannot be read as a journal ({error}). Restore it; or move only checkpoints/ to a new "
                "server.data_dir, which starts at the newest good one"
            ) from None
        except BaseException:
            file.close()
            raise
        return file

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        """Open an existing journal to read it, also beside a running server. Nothing in its folder changes.

        Raises `ConfigError` if there is none, or if it has another schema than this AgentJet's.
        """
        if not path.is_file():
            raise ConfigError(f"{str(path.parent)!r} is not a data dir of AgentJet: it has no {path.name}")
        # Without a write-ahead log the file is complete. `immutable` keeps SQLite from creating a log beside it.
        log = path.with_name(path.name + "-wal")
        how = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, isolation_level=None)
        file = cls(path, connection, -1)
        try:
            found = int(file.meta("schema_version", "0"))
        except sqlite3.DatabaseError as error:
            file.close()
            raise ConfigError(f"{path} cannot be read as a journal ({error})") from None
        if found != SCHEMA_VERSION:
            file.close()
            raise ConfigError(
                f"{path} has journal schema {found}, this AgentJet reads {SCHEMA_VERSION}: start a server on that data "
                "dir once, or use the AgentJet that wrote it"
            )
        return file

    def close(self) -> None:
        """Close and unlock the file. Idempotent. Later uses raise `Later`."""
        if isinstance(self.db, _Closed):
            return
        if self._log is not None:
            self._log.close()
        self.db.close()
        self.db = _Closed()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _prepare(self) -> None:
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        if not self.db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            self.db.executescript(
                f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}'); COMMIT;"
            )
        found = int(self.meta("schema_version", "0"))
        if OLDEST_SCHEMA <= found < SCHEMA_VERSION:
            with self.transaction():
                migrate(self.db, found)
        elif found != SCHEMA_VERSION:
            way_out = "start AgentJet 0.1 on it once" if found < OLDEST_SCHEMA else "use the AgentJet that wrote it"
            raise ConfigError(
                f"{self.path} has journal schema {found}, this AgentJet reads {OLDEST_SCHEMA} to {SCHEMA_VERSION}: "
                f"{way_out}, or choose another server.data_dir"
            )

    def defer_commits(self) -> None:
        """From here on `commit` commits transactions, and `sync` has them on disk, so that many share one wait."""
        self.db.execute("PRAGMA synchronous = NORMAL")
        self.db.execute(f"PRAGMA wal_autocheckpoint = {LONGEST_LOG}")
        self._log = WalSync(self.path)
        self.sync()  # Commits of a killed server may not be synced, and reading acknowledges them.

    @property
    def commits_each(self) -> bool:
        """True if each transaction is committed, and on disk, when it ends."""
        return self._log is None

    @property
    def in_transaction(self) -> bool:
        return self._depth > 0

    @property
    def has_uncommitted(self) -> bool:
        return self.db.in_transaction

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Group changes: all or none. Nested ones join the outermost. An error undoes this transaction only.

        Raises `Later` (503) if the disk refuses the write.
        """
        if self._depth:
            yield
            return
        self._require_trusted()
        try:
            if not self.db.in_transaction:
                self.db.execute("BEGIN IMMEDIATE")
            self.db.execute("SAVEPOINT one")
            self._depth = 1
            yield
            self.db.execute("RELEASE one")
            if self.commits_each:
                self.db.execute("COMMIT")
                self._mark_written()
        except BaseException as error:
            self._undo(error)
            if isinstance(error, sqlite3.OperationalError):
                raise self._refused(error) from error
            if type(error) is sqlite3.DatabaseError:  # The file is damaged.
                raise self.refuse_writes(error) from error
            raise
        finally:
            self._depth = 0

    def commit(self) -> None:
        """Commit all ended transactions together, before `sync`. Raises `Later` if that failed; all are then undone."""
        assert not self._depth, "a commit comes between transactions"
        self._require_trusted()
        lost, self._lost = self._lost, None
        try:
            if lost is not None:
                raise lost
            if self.db.in_transaction:
                self.db.execute("COMMIT")
                self._mark_written()
        except sqlite3.DatabaseError as error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            is_disk = isinstance(error, sqlite3.OperationalError)
            raise (self._refused(error) if is_disk else self.refuse_writes(error)) from error

    def sync(self) -> None:
        """Return once the committed changes are on disk. May be called from another thread.

        Raises `Later`: the changes must not be acknowledged, and writes are refused until the file is opened again.
        """
        assert self._log is not None, "transactions that commit themselves wait for the disk themselves"
        try:
            self._log.wait()
        except OSError as error:
            raise self.refuse_writes(error) from error

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
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise self.refuse_writes(self._distrusted) from self._distrusted

    def _undo(self, error: BaseException) -> None:
        """Undo the transaction. After a refused write SQLite may have undone everything uncommitted: then the next
        `commit` fails, so that none of it is acknowledged.
        """
        if self.db.in_transaction and not self.commits_each:
            self.db.execute("ROLLBACK TO one")
            self.db.execute("RELEASE one")
        elif self.db.in_transaction:
            self.db.execute("ROLLBACK")
        elif isinstance(error, sqlite3.OperationalError) and not self.commits_each:
            self._lost = error

    def _mark_written(self) -> None:
        if self.refusal:
            log.warning("the journal %s is written again", self.path)
            self.refusal = ""

    def _refused(self, error: sqlite3.DatabaseError) -> Later:
        way_out = "free some space there" if "full" in str(error) else "check the disk"
        return self._refusing(
            f"The journal {self.path} could not be written ({error}), nothing was recorded: {way_out}. The server goes "
            "on by itself then.",
            retry_after=5.0,
        )

    def _refusing(self, sentence: str, *, retry_after: float) -> Later:
        if not self.refusal:  # Logged once, when it begins.
            log.error("%s", sentence)
        self.refusal = sentence
        return Later(sentence, code="journal_unavailable", status=503, retry_after=retry_after)

    def meta(self, key: str, default: str) -> str:
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def insert(self, table: str, values: Sequence[Any]) -> int:
        marks = ", ".join("?" * len(values))
        return int(self.db.execute(f"INSERT INTO {table} VALUES ({marks})", tuple(values)).lastrowid or 0)


def _unwritable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{str(path.parent)!r} is not writable ({why}). Fix its permissions or free space, or choose another "
        "server.data_dir."
    )
