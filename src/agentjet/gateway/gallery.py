"""`Gallery`: calls of chosen episodes, kept in `gallery.sqlite` after the journal has deleted them.

The journal keeps calls for replays only. Before it deletes some, the gallery copies those of a few episodes:

* of each batch the best, the worst, and the group with the median mean reward;
* of each reason the `KEPT_PER_REASON` newest episodes that were aborted, expired or dropped;
* of each task the newest evaluation.

The file never exceeds `server.keep_transcripts`: the calls that were kept first are deleted first. A thread copies from
a snapshot of the journal. So training neither waits for the gallery nor fails with it. A crash within that second loses
the copies of one checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from agentjet.errors import AgentJetError
from agentjet.protocol import Kept
from agentjet.swarm import Batch, Episode, Journal
from agentjet.swarm.journal import RecordedCall, unpacked

log = logging.getLogger(__name__)

FILE = "gallery.sqlite"
SCHEMA_VERSION = 1
SCHEMA = f"""
PRAGMA auto_vacuum = FULL;
BEGIN IMMEDIATE;
CREATE TABLE transcripts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    episode_id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX transcripts_of_kind ON transcripts (kind, name, seq);
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
KEPT_PER_REASON = 50
KEPT_PER_TASK = 1
LONGEST_REASON = 80
"""Characters of a reason that distinguish it from others."""
MAX_SNAPSHOTS = 4
"""Snapshots that wait for the thread. A further one is skipped, because each keeps the journal's log from shrinking."""

Kind = Literal["batch", "unscored", "dropped", "eval"]


class Chosen(NamedTuple):
    """An episode to keep, and the batch, reason or task that it is kept for."""

    kind: Kind
    name: str
    episode_id: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """The calls of an episode in the order they were recorded."""

    kept: Kept
    calls: Sequence[RecordedCall]
    undelivered: frozenset[str]
    """Ids of the calls whose answer did not reach the agent."""


def transcript(journal: Journal, episode: Episode) -> Transcript:
    """Returns the calls of an episode from the journal, else from the gallery beside it."""
    if calls := journal.calls(episode.id):
        return Transcript("journal", calls, journal.undelivered(episode.id))
    if not (episode.is_settled and episode.num_calls):
        return Transcript("journal", (), frozenset())
    path = journal.path.with_name(FILE)
    try:
        if (found := _read(path, episode.id)) is not None:
            return Transcript("gallery", *unpacked(found))
    except (sqlite3.Error, zlib.error, ValueError) as error:
        log.warning("%s cannot be read: %s", path, error)
    return Transcript("gone", (), frozenset())


def _read(path: Path, episode_id: str) -> str | None:
    """Returns the packed calls of an episode, or None. Raises `sqlite3.Error`, `zlib.error`."""
    if not path.is_file():
        return None
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        row = connection.execute("SELECT body FROM transcripts WHERE episode_id = ?", (episode_id,)).fetchone()
    return None if row is None else zlib.decompress(row[0]).decode()


class Gallery:
    """Keeps transcripts of one run. `before_prune` is called in the event loop; `close()` ends the thread."""

    def __init__(self, journal: Journal, max_mb: int) -> None:
        self._journal = journal
        self._path = journal.path.with_name(FILE)
        self._max_bytes = max_mb * 1_000_000
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gallery")
        self._waiting = 0
        """Snapshots that are not copied yet."""
        self._failure = ""
        """The last failure, which is not logged again."""

    def before_prune(self, durable_version: int) -> None:
        """Keeps calls that the journal is about to delete. They are copied later, in a thread."""
        if not self._max_bytes:
            return
        if self._waiting >= MAX_SNAPSHOTS:
            self._failed("the disk is slower than the checkpoints")
            return
        try:
            snapshot = self._journal.snapshot()
        except sqlite3.Error as error:
            self._failed(str(error))
            return
        self._waiting += 1
        run = asyncio.get_running_loop().run_in_executor
        copied = run(self._thread, self._copy, snapshot, durable_version, self._max_bytes)
        copied.add_done_callback(self._copied)

    async def close(self) -> None:
        """Waits for the copies; later calls are not kept. Idempotent."""
        self._max_bytes = 0
        await asyncio.to_thread(self._thread.shutdown)

    def _copied(self, done: asyncio.Future[str]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            self._failed(done.result())

    def _failed(self, why: str) -> None:
        if why and why != self._failure:
            log.warning(
                "%s: transcripts that the journal deletes are not kept (%s). Training goes on. Free space, or remove "
                "that file if it is damaged.",
                self._path,
                why,
            )
        self._failure = why

    def _copy(self, snapshot: Journal, durable_version: int, max_bytes: int) -> str:
        """Copies chosen calls of a snapshot, and closes it. Returns the failure, if any."""
        try:
            with closing(snapshot):
                chosen = list(choose(snapshot.prunable(durable_version), _batches_of(snapshot)))
                keep(self._path, chosen, snapshot.packed, max_bytes)
        except (sqlite3.Error, OSError, AgentJetError) as error:
            return str(error)
        except Exception as error:  # The boundary: a gallery that fails must not stop training.
            log.exception("the gallery failed")
            return repr(error)
        return ""


def _batches_of(journal: Journal) -> Callable[[int], Batch | None]:
    return lambda batch_id: next(iter(journal.batches(batch_id, batch_id + 1)), None)


# ---- the choice ------------------------------------------------------------------------------------------------------


def choose(episodes: Sequence[Episode], batch_of: Callable[[int], Batch | None]) -> Iterator[Chosen]:
    """Yields the episodes to keep, of `episodes` in the order they began."""
    trained: defaultdict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.trained_in is not None:
            trained[episode.trained_in].append(episode)
        elif episode.dropped:
            yield Chosen("dropped", episode.dropped, episode.id)
        elif episode.status != "finished":
            yield Chosen("unscored", _reason(episode), episode.id)
        elif episode.mode == "eval":
            yield Chosen("eval", f"{episode.task_set}/{episode.task_id}", episode.id)
    for batch_id, members in sorted(trained.items()):
        for episode_id in _of_batch(members, batch_of(batch_id)):
            yield Chosen("batch", str(batch_id), episode_id)


def _reason(episode: Episode) -> str:
    """Returns what distinguishes the reason from others: the text before a colon."""
    return f"{episode.status} {episode.reason.partition(':')[0][:LONGEST_REASON]}"


def _of_batch(members: Sequence[Episode], batch: Batch | None) -> list[str]:
    """Returns the best and the worst member of a batch, and the group with the median mean reward."""
    rewards = {member.id: member.reward or 0.0 for member in members}
    by_reward = sorted(rewards, key=rewards.__getitem__)
    groups = [group for group in (batch.groups if batch else ()) if rewards.keys() >= set(group)]
    by_mean = sorted(groups, key=lambda group: sum(rewards[one] for one in group) / len(group))
    median = by_mean[len(by_mean) // 2] if by_mean else ()
    return list(dict.fromkeys([by_reward[-1], by_reward[0], *median]))


# ---- the file --------------------------------------------------------------------------------------------------------


def keep(path: Path, chosen: Sequence[Chosen], packed: Callable[[str], str], max_bytes: int) -> None:
    """Writes the `packed` calls of the chosen episodes, and deletes the oldest others. Raises `sqlite3.Error`."""
    with closing(_opened(path)) as db, db:
        db.execute("BEGIN IMMEDIATE")
        for kind, name, episode_id in chosen:
            body = zlib.compress(packed(episode_id).encode(), level=1)
            if len(body) > max_bytes // 2:
                continue
            db.execute(
                "INSERT OR REPLACE INTO transcripts (episode_id, kind, name, body) VALUES (?, ?, ?, ?)",
                (episode_id, kind, name, body),
            )
            _delete_others(db, kind, name)
            _shrink(db, max_bytes)
        _shrink(db, max_bytes)


def _opened(path: Path) -> sqlite3.Connection:
    """Returns a connection to the file, which is made if it is missing. Raises `OSError`, `sqlite3.Error`."""
    if not path.exists():
        path.touch(0o600)
    db = sqlite3.connect(path, isolation_level=None)
    try:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if not version:
            db.executescript(SCHEMA)
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"it has schema {version}, this AgentJet writes {SCHEMA_VERSION}")
    except BaseException:
        db.close()
        raise
    return db


def _delete_others(db: sqlite3.Connection, kind: Kind, name: str) -> None:
    """Deletes the oldest transcripts of a reason or a task above its number."""
    if kind == "batch":
        return
    most = KEPT_PER_TASK if kind == "eval" else KEPT_PER_REASON
    db.execute(
        "DELETE FROM transcripts WHERE kind = ? AND name = ? AND seq <= "
        "(SELECT seq FROM transcripts WHERE kind = ? AND name = ? ORDER BY seq DESC LIMIT 1 OFFSET ?)",
        (kind, name, kind, name, most),
    )


def _shrink(db: sqlite3.Connection, max_bytes: int) -> None:
    """Deletes the oldest transcripts until the file fits."""
    [page_size] = db.execute("PRAGMA page_size").fetchone()
    while True:
        [pages], [free] = db.execute("PRAGMA page_count").fetchone(), db.execute("PRAGMA freelist_count").fetchone()
        if (pages - free) * page_size <= max_bytes:
            return
        if not db.execute("DELETE FROM transcripts WHERE seq = (SELECT MIN(seq) FROM transcripts)").rowcount:
            return
