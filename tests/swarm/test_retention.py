"""The journal deletes in slices: each is short, the run goes on between them, and a crash between two loses nothing.

1. A slice has at most `SLICE_ROWS` rows and `SLICE_BYTES` of calls, whatever the size of the run and of the rows.
2. Deleted pages are not overwritten.
3. Between two slices episodes begin, call and finish, batches are learned, and the run is rolled back or closed.
4. After a crash between two slices each episode has a beginning of its calls, and the next time deletes the rest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest

from agentjet.swarm import journal
from agentjet.swarm.facts import load_trees
from agentjet.swarm.journal import Slice
from agentjet.types import CheckpointStamp
from tests.swarm.world import World

Make = Callable[..., World]


def learned(world: World, *, turns: int = 3, tokens: int = 8) -> list[str]:
    """The episodes of a batch that was learned, and that a checkpoint covers."""
    members = []
    for group in ("a", "b"):
        begun = [world.begin(group) for _ in range(2)]
        for reward, episode in enumerate(begun):
            call = None
            for _ in range(turns):
                call = world.call(episode, *range(tokens), parent=call, kept=0 if call is None else 2)
            world.finish(episode, reward)
            members.append(episode.id)
    batch = world.swarm.batches.compose()
    world.swarm.batches.learned(batch, {})
    world.swarm.batches.checkpointed(world.swarm.policy_version)
    return members


def with_calls(world: World) -> set[str]:
    return {row[0] for row in world.journal.file.db.execute("SELECT DISTINCT episode_id FROM calls")}


@pytest.mark.parametrize(("tokens", "most_bytes"), [(2, 10**9), (400, 20_000)])
def test_a_slice_is_bounded_by_rows_and_by_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch, tokens: int, most_bytes: int
) -> None:
    monkeypatch.setattr(journal, "SLICE_ROWS", 4)
    monkeypatch.setattr(journal, "SLICE_BYTES", most_bytes)
    learned(world, turns=5, tokens=tokens)
    for key in range(30):
        world.abort(world.begin("keys", key=str(key)))
    world.now += 2 * journal.IDEMPOTENCY_SECONDS
    sizes = dict(world.journal.file.db.execute("SELECT seq, LENGTH(CAST(body AS BLOB)) FROM calls"))
    slices = world.swarm.unneeded()
    calls = [rows for rows in slices if rows.table == "calls"]
    assert {seq for rows in calls for (seq,) in rows.keys} == set(sizes), "all of them, once"
    for rows in slices:
        assert 0 < len(rows.keys) <= 4
        if rows.table == "calls":
            assert rows.num_bytes == sum(sizes[seq] for (seq,) in rows.keys)
            assert rows.num_bytes <= most_bytes or len(rows.keys) == 1
    assert (max(len(rows.keys) for rows in calls) == 4) == (tokens == 2)
    assert sum(len(rows.keys) for rows in slices if rows.table == "idempotency") == 30


def test_deleted_pages_are_not_overwritten(world: World) -> None:
    """Debian's SQLite does so by default."""
    assert world.journal.file.db.execute("PRAGMA secure_delete").fetchone() == (0,)
    assert sqlite3.connect(":memory:").execute("PRAGMA auto_vacuum").fetchone() == (0,), "nor moved at each commit"


def interrupted(world: World) -> list[Slice]:
    """The slices of a clean-up, one call a slice."""
    slices = world.swarm.unneeded()
    assert sum(rows.table == "calls" for rows in slices) == 12
    return slices


@pytest.fixture
def one_row_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SLICE_ROWS", 1)


@pytest.mark.usefixtures("one_row_a_slice")
def test_the_run_goes_on_between_two_slices(world: World) -> None:
    members = learned(world)
    between = [
        lambda: world.call(live, 5),
        lambda: world.play("c", 0.0, 1.0),
        lambda: world.play("d", 0.0, 1.0),
        lambda: world.finish(live, 1.0),
        lambda: world.swarm.batches.compose(),
        lambda: world.swarm.batches.learned(world.swarm.pending, {}),  # type: ignore[arg-type]
        lambda: world.begin("e", key="k"),
    ]
    live = world.begin(mode="eval")
    for number, rows in enumerate(interrupted(world)):
        if number < len(between):
            between[number]()
        world.swarm.prune(rows)
    assert with_calls(world).isdisjoint(members)
    [batch] = world.swarm.batches.from_version(1)
    assert world.forest(batch).num_targets == 8, "the next batch has its calls"


@pytest.mark.usefixtures("one_row_a_slice")
@pytest.mark.parametrize("num_done", range(13))
def test_a_crash_between_two_slices_is_mended_the_next_time(make_world: Make, num_done: int) -> None:
    world = make_world()
    members = learned(world)
    slices = interrupted(world)
    first = next(number for number, rows in enumerate(slices) if rows.table == "calls")
    for rows in slices[: first + num_done]:
        world.swarm.prune(rows)
    world.reopen()
    left = [len(world.swarm.queries.journal.calls(member)) for member in members]
    assert sum(left) == 12 - num_done
    for member in members:  # A tree whose call lacks its parent cannot be built.
        trees = load_trees(world.swarm.queries.journal, member)
        assert sum(len(tree.calls) for tree in trees.values()) == len(world.swarm.queries.journal.calls(member))
    world.prune()
    assert not with_calls(world) and not world.swarm.unneeded()


@pytest.mark.usefixtures("one_row_a_slice")
def test_transcripts_go_before_their_calls(make_world: Make) -> None:
    """A transcript without some of its calls would be shown as whole."""
    world = make_world()
    world.swarm.transcript_bytes = 10**6
    learned(world)
    world.swarm.transcript_bytes = 0
    tables = [rows.table for rows in world.swarm.unneeded()]
    num_transcripts = tables.count("transcripts")
    assert num_transcripts and tables[:num_transcripts] == ["transcripts"] * num_transcripts


@pytest.mark.usefixtures("one_row_a_slice")
def test_a_rollback_between_two_slices(world: World) -> None:
    members = learned(world)
    learned(world)
    slices = world.swarm.unneeded()
    world.swarm.prune(slices[0])
    world.swarm.batches.roll_back(1, CheckpointStamp(3, "d"))
    for rows in slices[1:]:
        world.swarm.prune(rows)
    world.prune()
    assert not with_calls(world) and all(world.swarm.episode(member).trained_in == 0 for member in members)


def test_a_slice_that_the_disk_refuses_changes_nothing(world: World) -> None:
    learned(world)
    before = with_calls(world)
    rows = next(rows for rows in world.swarm.unneeded() if rows.table == "calls")
    with pytest.raises(ZeroDivisionError), world.swarm.transaction():
        world.swarm.prune(rows)
        raise ZeroDivisionError
    assert with_calls(world) == before
    with closing(sqlite3.connect(world.path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
