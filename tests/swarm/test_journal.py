"""Pins the file: one writer, other schemas, a folder that cannot be written to, the rows that are kept, and settings
that can no longer be read. A full disk: `test_undone.py`.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import ConfigError, NotFound
from agentjet.protocol import EpisodeQuery, EvaluationRequest
from agentjet.swarm import Journal
from agentjet.swarm.journal import encode_call
from tests.fakes import recent_episodes
from tests.swarm.world import World


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    first = Journal.open(path)
    with pytest.raises(ConfigError, match="in use by another server"):
        Journal.open(path)
    first.close()
    Journal.open(path).close()


@pytest.mark.parametrize("version", ["6", "10", "'abc'", "99"])
def test_another_schema_is_refused(tmp_path: Path, version: str) -> None:
    path = tmp_path / "journal.sqlite"
    Journal.open(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (version.strip("'"),))
    for open_journal in (Journal.open, Journal.open_read_only):
        with pytest.raises(
            ConfigError, match=rf"has journal schema {version}, this AgentJet reads 15: .*agentjet export"
        ):
            open_journal(path)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(ConfigError, match="cannot be read as a journal"):
        Journal.open(path)


def test_every_commit_waits_for_the_disk(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    assert journal.file.db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert journal.file.db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.close()


def test_episodes_that_were_not_needed_are_counted_apart(world: World) -> None:
    for reason in ("surplus: enough", "not needed: the client has its steps", "surplus", "Timeout"):
        world.abort(world.begin(code_version="v1"), reason)
    expected = {"live": 0, "finished": 0, "aborted": 2, "expired": 0, "not_needed": 2}
    assert expected.items() <= world.journal.outcomes().items()
    code = world.journal.code_versions()["v1"]
    assert (code.episodes, code.aborted, code.not_needed) == (4, 2, 2)
    world.reopen()
    assert expected.items() <= world.journal.outcomes().items()
    world.abort(world.begin(), "stale: old")
    world.reopen()
    assert world.journal.outcomes()["not_needed"] == 3


def test_a_data_dir_that_cannot_be_written_to_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, *args: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    path = tmp_path / "d" / "journal.sqlite"
    Journal.open(path).close()
    with monkeypatch.context() as mounted:
        mounted.setattr("os.open", read_only)
        with pytest.raises(ConfigError, match=r"'.*d' is not writable \(Read-only file system: .*\.lock\)"):
            Journal.open(path)
    path.with_name("journal.sqlite.lock").unlink()
    path.with_name("journal.sqlite.lock").mkdir()
    with pytest.raises(ConfigError, match=r"Is a directory.* choose another server\.data_dir"):
        Journal.open(path)


def test_old_keys_are_forgotten_with_the_tokens(world: World) -> None:
    world.begin("a", key="old")
    world.now += 90_000
    world.begin("b", key="new")
    world.prune()
    scope = "begin/anonymous"
    assert world.journal.recall(scope, "old") is None
    assert world.journal.recall(scope, "new") is not None


def test_a_server_that_only_evaluates_keeps_what_the_rule_says(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.swarm.state.PRUNE_EVERY", 5)
    monkeypatch.setattr("agentjet.swarm.journal.EPISODES_KEPT", 4)
    monkeypatch.setattr("agentjet.swarm.journal.EVENTS_KEPT", 3)
    episodes = []
    world.swarm.record_evaluation(EvaluationRequest(policy_version=0, score=0.5, num_tasks=1, num_episodes=1))
    for number in range(20):
        episodes.append(world.begin(mode="eval", key=str(number)))
        if world.swarm.is_prune_due:
            world.swarm.is_prune_due = False
            world.prune()
        world.call(episodes[-1], 7)
        world.finish(episodes[-1], 1.0)
    assert world.journal.outcomes()["finished"] == 20
    with_calls = [episode for episode in episodes if world.journal.calls(episode.id)]
    assert 0 < len(with_calls) <= 5, "calls of ended episodes go with the next prune"
    with pytest.raises(NotFound):
        world.swarm.episode(episodes[0].id)
    assert [episode.seq for episode in recent_episodes(world.reopen(), 3)] == [20, 19, 18]
    events = world.journal.events()
    assert events[0].kind == "evaluation" and 0 < len(events) < 20, "evaluations stay, and the newest other events"


def test_pages_of_episodes_are_found_by_an_index(world: World) -> None:
    queries: list[str] = []
    before = world.begin().id
    world.journal.file.db.set_trace_callback(queries.append)
    for asked in ({}, {"before": before}, {"status": "finished"}, {"status": "finished", "before": before}):
        world.journal.find_episodes(EpisodeQuery.model_validate(asked))
    world.journal.file.db.set_trace_callback(None)
    queries = [query for query in queries if "ORDER BY" in query]
    for query in queries:
        plan = [row[-1] for row in world.journal.file.db.execute(f"EXPLAIN QUERY PLAN {query}")]
        by_status = "status = 'finished'" in query
        assert len(plan) == 1 and "TEMP B-TREE" not in plan[0], (query, plan)
        assert ("episodes_by_status (status=?" in plan[0]) == by_status, (query, plan)
    assert len(queries) == 4


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ({"name": "gone.package:Recipe"}, r"'gone.package:Recipe' cannot be imported: .*: install its package"),
        ({"name": "grpo", "kl_weight": 0.1}, "'grpo' has no parameter 'kl_weight'"),
    ],
)
def test_what_can_no_longer_be_read_is_not_replaced(world: World, recipe: dict[str, Any], sentence: str) -> None:
    world.play("a", 0, 1)
    world.play("b", 0, 1)
    world.swarm.batches.compose()
    held = json.loads(world.journal.file.meta("job_settings", ""))
    for job in (held["job"], held["given"]):
        job["recipe"] = recipe
    old = world.journal.file.meta("job_settings", "")
    world.journal.file.set_meta("job_settings", json.dumps(held))
    said = (
        rf"journal.sqlite: the stored job settings \(recipe '{recipe['name']}'\) cannot be read: .*{sentence}.*branch"
    )
    with pytest.raises(ConfigError, match=said) as refused:
        world.reopen()
    assert "\n" not in str(refused.value)
    world.journal.file.set_meta("job_settings", old)
    [(job,)] = world.journal.file.db.execute("SELECT job FROM batches")
    changed = json.loads(job) | {"recipe": recipe}
    world.journal.file.db.execute("UPDATE batches SET job = ?, carry = ?", (json.dumps(changed), '{"a": 0.5}'))
    for read in (world.reopen, lambda: world.journal.batches(0)):
        with pytest.raises(ConfigError, match=rf"batch 0 \(recipe '{recipe['name']}'\) cannot be read: .*{sentence}"):
            read()
    [batch] = world.journal.batch_records(None, 1)
    assert world.journal.first_group(0) == batch.groups[0], "it needs no recipe"
    assert world.journal.newest_carry() == {"a": 0.5}


def test_a_journal_without_routes_opens_and_gets_them(tmp_path: Path) -> None:
    """The first journals of this schema have no column for them."""
    with closing(World(tmp_path)) as world:
        episode = world.begin()
        world.call(episode, 7, 8)
        path = world.journal.path
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE calls DROP COLUMN routes")
    with closing(Journal.open_read_only(path)) as journal:
        assert journal.routes(episode.id) == {} and len(journal.calls(episode.id)) == 1
    with closing(Journal.open(path)) as journal:
        assert journal.routes(episode.id) == {}
        [(call, suffix, completion)] = journal.calls(episode.id)
        body = encode_call(call, suffix, completion)
        journal.add_call(replace(call, id="second"), body, b"routes")
        assert journal.routes(episode.id) == {"second": b"routes"}
        sizes = dict(journal.file.db.execute("SELECT id, num_bytes FROM calls"))
        assert sizes == {call.id: len(body), "second": len(body) + len(b"routes")}
