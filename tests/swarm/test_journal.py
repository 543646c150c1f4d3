"""Pins the file: one writer, older schemas, and that a write the disk refuses leaves no half of itself anywhere."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentjet.errors import ConfigError, Later
from agentjet.swarm import Journal
from tests.swarm.world import World


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    first = Journal.open(path)
    with pytest.raises(ConfigError, match="in use by another server"):
        Journal.open(path)
    first.close()
    Journal.open(path).close()


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6])
def test_an_older_schema_is_brought_forward(tmp_path: Path, version: int) -> None:
    world = World(tmp_path, batch_size=1)
    world.play("learned", 0, 1)
    batch = world.swarm.batches.compose()
    world.swarm.batches.learned(batch, {})
    episode = world.begin(task_set="algebra")
    call = world.call(episode, 7)
    world.close()
    newer = {"episodes": "instance_id"}
    dropped = [
        "TABLE operations",
        "INDEX episodes_of_client",
        "INDEX episodes_of_instance",
        "TABLE checkpoints",
        "TABLE notes",
    ]
    if version < 4:
        newer["episodes"] += " temperature"
    if version < 3:
        newer = {"calls": "allowed", "episodes": "code_version team at_version temperature instance_id"}
        newer |= {"groups": "task_set code_version", "batches": "carry"}
        dropped += ["INDEX episodes_of_team", "INDEX episodes_of_code", "TABLE promises"]
    if version < 2:
        newer["calls"] += " ask fork retry_of context"
        dropped.append("TABLE undelivered")
    newer["calls"] = f"{newer.get('calls', '')} untrained"
    with closing(sqlite3.connect(world.path)) as db, db:  # as that schema had it
        for what in dropped:
            db.execute(f"DROP {what}")
        for table, columns in newer.items():
            for column in columns.split():
                db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        if version < 5:
            db.execute("ALTER TABLE batches ADD COLUMN seed INTEGER NOT NULL DEFAULT 0")
        origin = ("model", "small") if version < 6 else ("origin", '{"model.name": "small"}')
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", origin)
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(version),))
    world.open()
    assert world.journal.origin == {"model.name": "small"}
    assert world.journal.undigested_until() == 1
    assert world.swarm.batches.from_version(0) == [batch]
    assert world.swarm.queries.groups[0].task_set == episode.task_set == "algebra"
    assert world.swarm.tree(episode.id, "").calls == (call,)
    world.call(episode, 8, parent=call, kept=3)
    assert world.swarm.queries.orphans(episode.id) == {}
    world.reopen()
    assert len(world.swarm.tree(episode.id, "").calls) == 2
    world.close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    with pytest.raises(ConfigError, match="has journal schema 99"):
        Journal.open(path)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(ConfigError, match="cannot be read as a journal"):
        Journal.open(path)


def test_every_commit_waits_for_the_disk(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.close()


def test_what_was_acknowledged_is_in_the_files_of_a_killed_server(world: World, tmp_path: Path) -> None:
    episode = world.begin()
    world.call(episode, 5)
    world.finish(episode, 1.0)
    copy = tmp_path / "copy"
    shutil.copytree(world.path.parent, copy)  # as a kill leaves them: never closed
    journal = Journal.open(copy / world.path.name)
    assert journal.episode(episode.id) == world.swarm.episode(episode.id)
    journal.close()


def fill_disk(world: World) -> None:
    db = world.journal._db
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_said_and_nothing_is_half_done(world: World) -> None:
    live, finished = world.begin(), world.begin()
    world.call(live, 5)
    before = (
        world.swarm.queries.status_counts(),
        world.swarm.queries.events(),
        world.swarm.queries.groups,
        world.swarm.episode(live.id),
    )
    heard: list[str] = []
    world.swarm.store.on_event = lambda event: heard.append(event.kind)
    fill_disk(world)
    with pytest.raises(Later) as refused, world.swarm.store.transaction():
        world.finish(finished, 1.0)
        world.call(live, *range(20_000))
    assert (refused.value.status, refused.value.code) == (503, "journal_unavailable")
    assert "full" in refused.value.message
    assert heard == []
    now = (
        world.swarm.queries.status_counts(),
        world.swarm.queries.events(),
        world.swarm.queries.groups,
        world.swarm.episode(live.id),
    )
    assert now == before
    assert len(world.swarm.tree(live.id, "").calls) == 1
    world.journal._db.execute("PRAGMA max_page_count = 1000000")
    assert world.finish(finished, 1.0).status == "finished"


def test_a_data_dir_that_cannot_be_written_to_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, *args: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    path = tmp_path / "d" / "journal.sqlite"
    Journal.open(path).close()
    with monkeypatch.context() as mounted:
        mounted.setattr("os.open", read_only)
        with pytest.raises(ConfigError, match=r"server\.data_dir = '.*d' .* \(Read-only file system: .*\.lock\)"):
            Journal.open(path)
    path.with_name("journal.sqlite.lock").unlink()
    path.with_name("journal.sqlite.lock").mkdir()
    with pytest.raises(ConfigError, match=r"server\.data_dir = .*Is a directory.* choose another folder"):
        Journal.open(path)


def test_an_error_inside_a_transaction_undoes_all_of_it(world: World) -> None:
    with pytest.raises(ZeroDivisionError), world.swarm.store.transaction():
        world.begin()
        raise ZeroDivisionError
    assert world.swarm.queries.status_counts()["live"] == 0 == len(world.swarm.queries.events())
    assert world.begin().seq == 1


def test_old_keys_are_forgotten_with_the_tokens(world: World) -> None:
    world.begin("a", key="old")
    world.now += 90_000
    world.begin("b", key="new")
    world.swarm.batches.checkpointed(1)
    scope = "begin/anonymous"
    assert world.journal.recall(scope, "old") is None
    assert world.journal.recall(scope, "new") is not None
