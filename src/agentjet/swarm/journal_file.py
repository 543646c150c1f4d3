"""`JournalFile`: the SQLite file of a journal. One process opens it, and one transaction runs at a time.

A transaction is on disk when it ends or, after `defer_commits`, once the `commit` and `sync` after it have returned.
`sync` waits for the write-ahead log, and now and then checkpoints it into the database file. It may run in another
thread. After a failed `fdatasync` nothing is written any more: the kernel may have dropped the pages, and a second call
would succeed without writing them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Self, TypeGuard

from agentjet import database
from agentjet.errors import ConfigError, Later, Unavailable
from agentjet.swarm.schema import EARLIER_SCHEMA, EARLIER_VERSION, SCHEMA, SCHEMA_VERSION, migration, views

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 64
"""Syncs between two checkpoints. A checkpoint in their thread cannot restart the log while the writer uses it."""
LONGEST_LOG = 16_384
"""Pages of 4 KiB from which each sync makes a checkpoint, until the writer has restarted the log."""
DISK_ERRORS = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})
"""SQLite's primary error codes for a failing disk, as opposed to a damaged file."""
UNAVAILABLE = "journal_unavailable"
"""Code of refusals because of the disk or the file."""


class _Closed:
    """In place of the connection of a closed file: refuses the requests that began before."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Unavailable("The run was closed during the request.", code="run_closed", retry_after=1.0)


class JournalFile:
    """The file and its transactions. Construct it with `open` or `open_read_only`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int = -1) -> None:
        self.path = path
        self.db: sqlite3.Connection | Any = connection
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
        # Without a write-ahead log the file is complete. `immutable` keeps SQLite from creating a log beside it.
        log = path.with_name(path.name + "-wal")
        how = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
        file = cls(path, database.connect(path, how))
        try:
            if file._checked_version() == EARLIER_VERSION:
                for statement in list(views(file.db)):
                    file.db.execute(statement)
        except (ConfigError, sqlite3.DatabaseError) as error:
            file.close()
            if isinstance(error, ConfigError) or error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                raise
            raise ConfigError(f"{path} cannot be read as a journal ({error})") from None
        return file

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


def _is_of_disk(error: BaseException) -> TypeGuard[sqlite3.DatabaseError]:
    """True if an error is one of the disk or of the file, as opposed to a wrong statement."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError


def _copy_log(connection: sqlite3.Connection) -> tuple[int, bool]:
    """Copies the log as far as no reader needs it. Returns its pages, and True if all of them were copied."""
    is_busy, length, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return length, not is_busy and length == copied


def _unwritable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{str(path.parent)!r} is not writable ({why}). Fix its permissions or free space, or choose another "
        "server.data_dir."
    )
