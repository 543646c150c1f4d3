"""What judges a chaos run can say no.

1. The plan is drawn from its seed alone; a whole run passes through every transition of the journal at every moment.
2. A torn tail takes nothing of what was committed before, and does damage the log.
3. The audit finds each planted fault: what was lost, trained twice, scored by nobody, begun twice under one key.
4. A book whose writer was killed in the middle of a line is read up to there.
"""

from __future__ import annotations

import pickle
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from bench.breaking.audit import Audit, audit
from bench.breaking.plan import MOMENTS, SHARES, TRANSITIONS, WHOLE, WHOLE_RUNS_ONLY, plan
from bench.breaking.records import Book, Books, read
from bench.breaking.wal import tear
from tests.swarm.world import World


def test_plan_is_drawn_from_the_seed() -> None:
    assert plan(200, 1) == plan(200, 1)
    assert plan(200, 1) != plan(200, 2)
    assert len(plan(200, 1)) >= 200


@pytest.mark.parametrize("num_faults", [WHOLE, 200, 500])
def test_a_whole_plan_passes_through_every_transition(num_faults: int) -> None:
    faults = plan(num_faults, 0)
    died = {(fault.at, fault.when) for fault in faults if fault.kind == "gateway killed at a transition"}
    assert died >= {(at, when) for at in TRANSITIONS for when in MOMENTS} | {("commit", "before")}
    assert {fault.kind for fault in faults} == set(SHARES)


def test_a_short_plan_has_one_of_each_kind() -> None:
    assert {fault.kind for fault in plan(12, 0)} == {*SHARES} - {*WHOLE_RUNS_ONLY}


@pytest.mark.parametrize("seed", range(12))
def test_a_torn_tail_takes_only_the_last_commit(tmp_path: Path, seed: int) -> None:
    path, wal, before = tmp_path / "db", tmp_path / "db-wal", tmp_path / "before"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE facts (n INTEGER, text TEXT)")
    for n in range(50):
        db.execute("INSERT INTO facts VALUES (?, ?)", (n, "x" * 500))
    shutil.copyfile(wal, before)
    db.executemany("INSERT INTO facts VALUES (?, ?)", [(n, "y" * 500) for n in range(50, 50 + seed)] or [(50, "y")])
    crashed = tmp_path / "crashed"
    shutil.copyfile(path, crashed)
    shutil.copyfile(wal, tmp_path / "crashed-wal")
    db.close()
    whole = (tmp_path / "crashed-wal").read_bytes()
    tear(tmp_path / "crashed-wal", before, random.Random(seed))
    assert (tmp_path / "crashed-wal").read_bytes() != whole
    with sqlite3.connect(crashed) as after:
        assert after.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert [n for (n,) in after.execute("SELECT n FROM facts ORDER BY n")][:50] == list(range(50))


class Run:
    """A small run without any fault: a batch that was learned, and a group that waits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = World(folder)
        played = [*self.world.play("a", 0.25, 1.0), *self.world.play("b", 0.5, 1.0)]
        batch = self.world.swarm.batches.compose()
        self.world.swarm.batches.learned(batch, {})
        played += self.world.play("c", 0.25, 0.5)
        self.failed = self.world.begin("d")
        self.world.abort(self.failed, "crashed")
        self.books = Books(
            begun={episode.id for episode in played} | {self.failed.id},
            scoring={episode.id: [self.reward(episode.id)] for episode in played},
            finished={episode.id: self.reward(episode.id) for episode in played},
            failed={self.failed.id: "ToolCrashed"},
            aborted={self.failed.id},
        )
        self.ids = [episode.id for episode in played]
        self.answers = {f"key of {id}": {id} for id in self.ids}
        (folder / "forests").mkdir()
        self.learn(0, list(batch.episode_ids))

    def reward(self, id: str) -> float:
        reward = self.world.swarm.episode(id).reward
        assert reward is not None
        return reward

    def learn(self, batch_id: int, members: list[str]) -> None:
        (self.folder / "forests" / f"{batch_id:06d}.pickle").write_bytes(pickle.dumps({"members": members}))

    def judged(self) -> Audit:
        self.world.close()
        return audit(self.world.path, self.books, self.folder / "forests", self.answers)


@pytest.fixture
def small_run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_audit_of_a_run_without_faults(small_run: Run) -> None:
    found = small_run.judged()
    assert (found.finished, found.trained, found.waiting, found.aborted) == (6, 4, 2, 0)
    assert (found.unscored, found.batches) == ({"aborted": 1}, 1)
    assert found.lost + found.trained_twice + found.failures_scored + found.two_effects == []


def test_audit_finds_what_was_lost(small_run: Run) -> None:
    run = small_run
    run.books.begun.add("ep999999")
    run.books.finished["ep999998"] = 1.0
    run.books.finished[run.ids[0]] = 0.75
    run.books.aborted.add(run.ids[1])
    run.books.calls["nowhere"] = {"episode": run.ids[5], "call": "nowhere"}
    run.books.calls.update({f"c{i}": {"episode": run.ids[2], "call": f"c{i}"} for i in range(3)})
    assert set(run.judged().lost) == {
        "begin of ep999999",
        "reward of ep999998",
        f"reward of {run.ids[0]}",
        f"abort of {run.ids[1]}",
        f"2 calls of {run.ids[2]}",
        f"call nowhere of {run.ids[5]}",
    }


def test_audit_finds_what_was_trained_twice(small_run: Run) -> None:
    small_run.learn(0, [*small_run.ids[:4], small_run.ids[0]])
    assert small_run.judged().trained_twice == [small_run.ids[0]]


def test_audit_finds_an_episode_trained_in_the_journal_only(small_run: Run) -> None:
    small_run.learn(0, small_run.ids[:3])
    assert small_run.judged().trained_twice == [small_run.ids[3]]


def test_audit_finds_rewards_that_no_agent_returned(small_run: Run) -> None:
    run = small_run
    run.books.scoring[run.ids[0]] = [0.5]  # The agent returned another one.
    del run.books.scoring[run.ids[1]]  # The agent was killed before it returned one.
    run.books.failed[run.ids[2]] = "ToolCrashed"
    assert run.judged().failures_scored == [run.ids[0], run.ids[1], run.ids[2]]


def test_audit_finds_keys_with_two_effects(small_run: Run) -> None:
    run = small_run
    run.answers["one key"] = {run.ids[0], run.ids[1]}
    assert run.judged().two_effects == ["one key", run.ids[0], run.ids[1]]


def test_a_book_that_ends_in_the_middle_of_a_line(tmp_path: Path) -> None:
    book = Book(tmp_path / "0-0.jsonl")
    book.note("begun", "ep1")
    book.note("scoring", "ep1", reward=0.5)
    with (tmp_path / "0-0.jsonl").open("a") as file:
        file.write('{"what": "finished", "epis')
    books = read(tmp_path)
    assert (books.begun, books.scoring, books.finished) == ({"ep1"}, {"ep1": [0.5]}, {})
