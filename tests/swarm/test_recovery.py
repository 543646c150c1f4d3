"""Pins recovery: after each step of any history the rows of the journal equal the state in memory, a failed
transaction changes nothing, and the books balance. A kill between any two statements leaves no half of a transaction.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.compute.protocol import body_digest
from agentjet.errors import CheckpointError, Conflict, Later
from agentjet.protocol import EpisodeQuery
from agentjet.swarm import EpisodeRecord, Journal
from agentjet.swarm.store import Store
from agentjet.types import Call, CheckpointStamp
from tests.swarm.world import World

PICKS = st.integers(0, 50)
REWARDS = st.sampled_from([0.0, 0.5, 1.0])
KINDS = st.fixed_dictionaries(
    {"task_set": st.sampled_from(["", "s"]), "code_version": st.sampled_from(["", "v1", "v2"])}
)
KEYS = st.none() | st.sampled_from(["1", "2", "3"])


def steps(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *arguments)


CLIENT_STEPS = [
    steps(
        "begin",
        st.sampled_from("abcd"),
        st.sampled_from("xy"),
        st.sampled_from(["train", "train", "eval"]),
        KEYS,
        KINDS,
    ),
    steps("play", st.sampled_from("abcd"), REWARDS, KINDS),
    steps("call", PICKS, st.sampled_from(["", "critic"]), st.lists(st.integers(4, 9), max_size=3)),
    steps("finish", PICKS, REWARDS, KEYS),
    steps("abort", PICKS, KEYS),
    steps("heartbeat", PICKS),
]
SERVER_STEPS = [
    steps("wait", st.sampled_from([1.0, 60.0, 400.0])),
    steps("compose"),
    steps("learn"),
    steps("checkpoint", st.integers(0, 2)),
    steps("restart"),
    steps("fail", PICKS, REWARDS, st.sampled_from("abcd")),
]
JOBS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 2),
        "group_size": st.integers(2, 3),
        "task_weights": st.sampled_from([{}, {"s": 2.0, "*": 1.0}]),
        "recipe": st.fixed_dictionaries({"drop_zero_variance": st.booleans(), "max_dropped_groups": st.just(2)}),
    }
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(job=JOBS, history=st.lists(st.one_of(*CLIENT_STEPS, *CLIENT_STEPS, *SERVER_STEPS), min_size=50, max_size=100))
def test_a_reopened_journal_is_the_state_that_was_in_memory(
    job: dict[str, Any], history: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr("agentjet.swarm.store.PRUNE_EVERY", 5)
        run = History(World(Path(folder), **job))
        try:
            for name, *arguments in history:
                getattr(run, name)(*arguments)
                run.check_books()
            run.restart()
        finally:
            run.world.close()


def test_a_server_that_is_killed_at_any_statement_has_all_of_a_transaction_or_nothing(tmp_path: Path) -> None:
    """The files are copied before each statement, as a kill would leave them."""
    world = World(tmp_path / "live", batch_size=1, task_weights={"s": 2.0, "*": 1.0})
    file, copies = world.journal.file, list[tuple[Path, int]]()
    complete = [rows(world.journal)]
    commit = file.commit

    def copy(statement: str) -> None:
        folder = tmp_path / str(len(copies))
        shutil.copytree(world.path.parent, folder)
        copies.append((folder / world.path.name, len(complete)))

    def committing() -> None:
        commit()
        file.db.set_trace_callback(None)
        complete.append(rows(world.journal))
        file.db.set_trace_callback(copy)

    file.commit = committing  # type: ignore[method-assign]
    file.db.set_trace_callback(copy)
    for change in changes(world):
        change()
    world.close()
    assert len(copies) > 200 and len(complete) > 20
    for path, number in copies:
        journal = Journal.open(path)
        assert rows(journal) in complete[number - 1 : number + 1], "no half of a transaction"
        episodes = journal.find_episodes(EpisodeQuery(limit=100)).episodes
        counted = Counter(name for episode in episodes for name in episode.counted_as)
        assert {name: n for name, n in journal.outcomes().items() if n} == counted, (
            "the counts are those of the episodes"
        )
        journal.close()


def changes(world: World) -> Iterator[Callable[[], object]]:
    """Changes of all kinds."""
    first = world.begin
    begun: list[EpisodeRecord] = []
    yield lambda: begun.append(first("a", task_set="s", key="k", instance_id="p1"))
    yield lambda: begun.append(first("a", task_set="s", instance_id="p1"))
    for n in (0, 1):
        yield lambda n=n: world.call(begun[n], 7, 8)  # type: ignore[misc]
    yield lambda: world.swarm.undelivered(begun[1].id, [f"{begun[1].id}.2"])
    yield lambda: world.swarm.note(begun[1].id, refused=["too_large"])
    yield lambda: world.finish(begun[0], 1.0, key="f")
    yield lambda: world.finish(begun[1], 0.0)
    yield lambda: world.swarm.batches.compose()
    batch = world.swarm.pending
    assert batch is not None
    yield lambda: world.swarm.batches.record_operation("policy", 0, "forward_backward", batch)
    yield lambda: world.swarm.batches.record_operation("policy", 1, "optim_step", batch)
    yield lambda: world.swarm.batches.learned(batch, {"policy/entropy": 0.25})
    yield lambda: world.swarm.batches.record_checkpoint(CheckpointStamp(1, "d1"))
    yield lambda: world.swarm.batches.checkpointed(1)
    yield world.prune
    yield lambda: begun.append(first("b", task_set="s"))
    yield lambda: begun.append(first("b", task_set="s"))
    yield lambda: world.abort(begun[3])
    yield lambda: begun.append(first("b", task_set="s"))
    yield lambda: world.call(begun[2], 5)
    yield lambda: world.finish(begun[2], 1.0)
    yield lambda: world.finish(begun[4], 1.0)
    yield lambda: world.swarm.batches.compose()
    poisoned = world.swarm.pending
    assert poisoned is not None
    yield lambda: world.swarm.batches.quarantine(poisoned, "it kills workers")
    yield lambda: world.swarm.replace_job(world.job.model_copy(update={"batch_size": 3}))
    yield lambda: world.swarm.batches.roll_back(0, CheckpointStamp(2, "d2"))


def rows(journal: Journal) -> dict[str, Any]:
    """All rows of all tables."""
    db = journal.file.db
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()]
    return {name: db.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in tables}


class History:
    """Clients, a training loop and restarts on one journal; each method is a step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.begun: list[EpisodeRecord] = []
        self.calls: dict[tuple[str, str], Call] = {}
        self.trained: list[str] = []

    def begin(self, group: str, client: str, mode: str, key: str | None, kind: dict[str, str]) -> None:
        try:
            episode = self.world.begin(group, client_id=client, mode=mode, key=key, **kind)
        except (Later, Conflict):
            return
        if all(episode.id != known.id for known in self.begun):
            self.begun.append(episode)

    def play(self, group: str, reward: float, kind: dict[str, str]) -> None:
        """A whole group at once, so that batches fill up."""
        for number in range(self.world.job.group_size):
            known = len(self.begun)
            self.begin(group, "x", "train", None, kind)
            for episode in self.begun[known:]:
                self.calls[episode.id, ""] = self.world.call(episode, 4, 5 + number)
                self.world.finish(episode, reward * number)

    def call(self, pick: int, role: str, tokens: list[int]) -> None:
        if not (episode := self.pick(pick)):
            return
        parent = self.calls.get((episode.id, role))
        try:
            call = self.world.call(episode, *tokens, role=role, parent=parent, kept=1 if parent else 0)
        except Conflict:
            return
        self.calls[episode.id, role] = call

    def finish(self, pick: int, reward: float, key: str | None) -> None:
        if not (episode := self.pick(pick)):
            return
        before = self.world.swarm.episode(episode.id)
        try:
            after = self.world.finish(episode, reward, key=key, by_role={"critic": 1.0 - reward})
        except Conflict:
            return
        assert after.reward == reward and (before.status == "live" or before == after)

    def abort(self, pick: int, key: str | None) -> None:
        if not (episode := self.pick(pick)):
            return
        try:
            assert self.world.abort(episode, "why", key=key).reward is None
        except Conflict:
            assert self.world.swarm.episode(episode.id).status == "finished"

    def heartbeat(self, pick: int) -> None:
        try:
            if episode := self.pick(pick):
                self.world.swarm.heartbeat(episode.id)
        except Conflict:
            pass

    def pick(self, number: int) -> EpisodeRecord | None:
        """Mostly one of the newest."""
        return self.begun[-1 - number % min(8, len(self.begun))] if self.begun else None

    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        for episode in self.world.swarm.reap():
            assert episode.status == "expired"
        assert self.world.swarm.reap() == []

    def compose(self) -> None:
        if self.world.swarm.batches.ready():
            batch = self.world.swarm.batches.compose()
            self.trained += batch.episode_ids
            assert self.world.forest(batch).num_targets > 0

    def learn(self) -> None:
        batch = self.world.swarm.pending
        if batch is not None:
            self.world.forest(batch)
            self.world.swarm.batches.learned(batch, {"policy/entropy": 0.25})

    def checkpoint(self, back: int) -> None:
        self.world.swarm.batches.checkpointed(max(0, self.world.swarm.policy_version - back))
        for rows in self.world.swarm.unneeded()[: back + 1]:  # The server may stop between two slices.
            self.world.swarm.prune(rows)

    def restart(self) -> None:
        before = self.state()
        wires = self.wires()
        self.world.reopen()
        assert self.state() == before
        assert self.wires() == wires

    def fail(self, pick: int, reward: float, group: str) -> None:
        """Changes of all kinds in a transaction that fails leave nothing behind."""
        before = self.state()
        with pytest.raises(ZeroDivisionError), self.world.swarm.transaction():
            for change in (
                lambda: self.world.begin(group),
                lambda: self.world.call(self.begun[-1], 7),
                lambda: self.world.finish(self.begun[-1 - pick % len(self.begun)], reward),
                self.world.swarm.reap,
                lambda: self.world.swarm.batches.ready() and self.world.swarm.batches.compose(),
            ):
                with contextlib.suppress(Later, Conflict, IndexError, ZeroDivisionError):
                    change()
            raise ZeroDivisionError
        assert self.state() == before

    def state(self) -> dict[str, Any]:
        swarm = self.world.swarm
        return {
            "episodes": [swarm.episode(episode.id) for episode in self.begun],
            "groups": swarm.queries.groups,
            "pending": swarm.pending,
            "version": swarm.policy_version,
            "counts": swarm.queries.journal.outcomes(),
            "last_step": swarm.last_step,
            "carry": swarm.carry,
            "code_versions": list(swarm.queries.journal.code_versions().items()),
            "task_sets": swarm.queries.mixture.shares(),
            "events": swarm.queries.journal.events(),
            "trees": {key: swarm.tree(*key).calls for key in self.calls},
        }

    def wires(self) -> list[Any]:
        """The bytes of every batch that may still be learned or replayed."""
        swarm = self.world.swarm
        try:
            batches = swarm.batches.from_version(max(swarm.state.durable_version, swarm.policy_version - 2))
        except CheckpointError:
            raise AssertionError("batches above the durable version can always be replayed") from None
        return [(batch, body_digest(self.world.training(batch))) for batch in batches]

    def check_books(self) -> None:
        swarm, job = self.world.swarm, self.world.job
        stored, live = Store(self.world.journal, lambda: 0.0), swarm
        for name in ("state", "episodes", "groups", "settings", "pending", "steps"):
            assert getattr(stored, name) == getattr(live, name), name
        for name in ("episodes", "groups", "steps"):
            assert [*getattr(stored, name)] == [*getattr(live, name)], f"the order of {name}"
        counts = swarm.queries.journal.outcomes()
        episodes = {episode.id: swarm.episode(episode.id) for episode in self.begun}.values()
        for status in ("live", "finished", "aborted", "expired"):
            assert counts[status] == sum(episode.status == status for episode in episodes)
        scored = sum(episode.status == "finished" and episode.mode == "train" for episode in episodes)
        assert counts["trained"] + counts["waiting"] + counts["dropped"] == scored
        assert counts["dropped"] == sum(bool(episode.dropped) for episode in episodes)
        assert counts["dropped"] == sum(swarm.queries.journal.counts("dropped").values())
        assert len(self.trained) == len(set(self.trained))
        assert len(swarm.queries.groups) <= job.batch_size
        assert all(len(group.members) <= job.group_size for group in swarm.queries.groups)
