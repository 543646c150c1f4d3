"""Undone changes.

1. A change that is undone, by itself or with its commit, leaves memory and journal as they were, whatever was changed.
   Only signs of life stay.
2. A request whose commit was refused can be repeated: the end of an episode counts as a sign of life, and its lease and
   its silence are those of before.
3. Those who wait for an undone commit get the reason: the disk, or the failure of another change.
4. A request in slices has its whole effect once, or none, wherever it fails.
"""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from agentjet.errors import Later
from agentjet.protocol import BeginRequest, CloseGroupsRequest, GroupName, SftRequest, status_of
from agentjet.swarm.batches import Answered
from agentjet.swarm.state import State
from tests.swarm.world import LEASE, MAX_SECONDS, World, refused_commits

Make = Callable[..., World]
Change = Callable[[World], Iterator[None]]


# ---- 1. every change ------------------------------------------------------------------------------------------------


def opens(world: World) -> Iterator[None]:
    with pytest.raises(Later):
        for number in range(9):
            world.begin(f"{number}", client_id="other")
    world.abort(next(e for e in world.swarm.live() if e.client_id == "other"))
    world.swarm.places.refused(BeginRequest(task_id="t", client_id="a"))
    yield
    world.begin("new", client_id="a")


def joins(world: World) -> Iterator[None]:
    world.begin("g")
    yield
    world.call(world.begin("g"), 7)


def calls(world: World) -> Iterator[None]:
    first = world.call(world.begin("g"), 7, 8)
    yield
    world.call(world.swarm.episode(first.episode_id), 9, parent=first, kept=4)


def finishes(world: World) -> Iterator[None]:
    episode = world.begin("g")
    world.call(episode, 7)
    yield
    world.finish(episode, 1.0)


def completes(world: World) -> Iterator[None]:
    episode, other = world.begin("g"), world.begin("g")
    for one in (episode, other):
        world.call(one, 7)
    world.finish(other, 0.0)
    yield
    world.finish(episode, 1.0)


def aborts(world: World) -> Iterator[None]:
    episode = world.begin("g")
    yield
    world.abort(episode)


def expires(world: World) -> Iterator[None]:
    world.call(world.begin("g"), 7)
    world.now += LEASE - 1
    yield
    world.swarm.reap()


def leaves(world: World) -> Iterator[None]:
    world.play("g", 1.0)
    world.begin("g")
    yield
    [*_] = world.swarm.close_groups(CloseGroupsRequest(groups=[GroupName(group="g")]))


def drops(world: World) -> Iterator[None]:
    world.call(world.begin("g"), 7)
    yield
    [*_] = world.swarm.close_groups(CloseGroupsRequest(groups=[GroupName(group="g")], not_needed=True))


def composes(world: World) -> Iterator[None]:
    for group in "ab":
        world.play(group, 0.0, 1.0)
    world.begin("surplus")
    yield
    world.swarm.batches.compose()


def learns(world: World) -> Iterator[None]:
    for group in "ab":
        world.play(group, 0.0, 1.0)
    batch = world.swarm.batches.compose()
    yield
    world.swarm.batches.learned(batch, {"loss": 1.0})


def gives_up(world: World) -> Iterator[None]:
    for group in "ab":
        world.play(group, 0.0, 1.0)
    batch = world.swarm.batches.compose()
    yield
    world.swarm.batches.quarantine(batch, "poison")


def demonstrates(world: World) -> Iterator[None]:
    slices = demonstrating(world)
    yield
    [*_] = slices()


def is_replaced(world: World) -> Iterator[None]:
    world.begin("g", instance_id="old")
    yield
    world.begin("g", instance_id="new")


def set_joins(world: World) -> Iterator[None]:
    yield
    world.begin("g", task_set="a")


def set_leaves(world: World) -> Iterator[None]:
    world.abort(world.begin("g", task_set="a"))
    world.now += LEASE - 1
    yield
    world.swarm.reap()


def set_stalls(world: World) -> Iterator[None]:
    world.abort(world.begin("g", task_set="b"))
    world.now += MAX_SECONDS + LEASE - 1
    world.play("g", 0.0, 1.0, task_set="a")
    world.begin("g", task_set="b")
    yield
    world.swarm.reap()


def job_changes(world: World) -> Iterator[None]:
    yield
    world.swarm.replace_job(world.job.model_copy(update={"batch_size": 5}))


WEIGHTS: dict[str, Any] = {"task_weights": {"a": 1.0, "b": 1.0}}
CHANGES: list[tuple[Change, dict[str, Any]]] = [
    *((change, {}) for change in (opens, joins, calls, finishes, completes, aborts, expires, leaves, drops)),
    *((change, {}) for change in (learns, gives_up, demonstrates, is_replaced, job_changes)),
    (composes, {"spare_groups": 1}),
    *((change, WEIGHTS) for change in (set_joins, set_leaves, set_stalls)),
]
SIGNS_OF_LIFE = {"_last_seen", "_last_active", "_active"}
"""Times that may be newer."""
NOT_COMPARED = {
    *{"clients", "_ends"},  # Clients that were seen.
    *{"_outbox", "_committed", "_changed", "restores"},  # Of the commit.
    *{"is_prune_due", "is_undone", "_is_moved"},  # Ask for another look.
    "trees",  # A cache: see `conversations`.
}


def memory(world: World) -> dict[str, Any]:
    """Everything that the objects of a run keep, by name."""
    swarm = world.swarm
    kept: dict[str, Any] = {}
    for part in (swarm, swarm.leases, swarm.places, swarm.mixture, swarm.batches, swarm.queries):
        for name, value in vars(part).items():
            if name in NOT_COMPARED or not isinstance(value, dict | set | frozenset | list | int | float | str | State):
                continue
            in_order = list(value.items()) if isinstance(value, dict) else value
            key = f"{type(part).__name__}.{name}"
            kept[key] = sorted(value) if name in SIGNS_OF_LIFE else copy.deepcopy(in_order)
    pending, settings = swarm.pending, swarm.settings
    return {**kept, "pending": pending, "settings": settings, "conversations": conversations(world)}


def conversations(world: World) -> dict[str, list[str]]:
    """The calls of each live episode, as the next call would find them."""
    return {e.id: [call.id for call in world.swarm.tree(e.id, "").calls] for e in world.swarm.live()}


def rows(world: World) -> list[str]:
    return [*world.journal.file.db.iterdump()]


@pytest.mark.parametrize("way", ["the commit", "another change", "its transaction"])
@pytest.mark.parametrize(("change", "job"), CHANGES, ids=lambda one: getattr(one, "__name__", ""))
def test_an_undone_change_leaves_no_trace(make_world: Make, change: Change, job: dict[str, Any], way: str) -> None:
    world = make_world(**job)
    store, steps = world.swarm, change(world)
    next(steps)
    world.now += 1
    store.defer_commits(lambda: None)
    before, before_rows = memory(world), rows(world)
    if way == "its transaction":
        with pytest.raises(KeyError), store.transaction():
            assert next(steps, None) is None and memory(world) != before
            raise KeyError("bug")
    else:
        assert next(steps, None) is None and memory(world) != before
        if way == "another change":
            store.abandon(KeyError("bug"))
        with refused_commits(world.journal), pytest.raises(Later):
            store.commit()
    assert memory(world) == before and rows(world) == before_rows
    store.commit()
    assert rows(world) == before_rows


def test_calls_of_the_same_commit_stay_when_another_change_is_undone(world: World) -> None:
    """They are not committed, so another thread would not read them."""
    store, episode = world.swarm, world.begin()
    store.defer_commits(lambda: None)
    first = world.call(episode, 7)
    with pytest.raises(KeyError), store.transaction():
        world.begin("other")
        raise KeyError("bug")
    assert not world.swarm.is_unread(episode.id)
    assert [call.id for call in world.swarm.tree(episode.id, "").calls] == [first.id]


# ---- 2. repeated requests -------------------------------------------------------------------------------------------


def ends_late(world: World) -> str:
    """An episode that was kept by heartbeats for longer than a lease, and ends when its lease is nearly over."""
    episode = world.begin("g")
    world.call(episode, 7, 8)
    for _ in range(4):
        world.now += 0.9 * LEASE
        world.swarm.heartbeat(episode.id)
    world.now += LEASE - 1
    world.swarm.defer_commits(lambda: None)
    return episode.id


@pytest.mark.parametrize("end", ["finish", "abort"])
@pytest.mark.parametrize("way", ["the disk", "another change"])
def test_an_end_whose_commit_was_undone_can_be_repeated(world: World, end: str, way: str) -> None:
    store, episode_id = world.swarm, ends_late(world)
    silent = world.swarm.queries.silence(world.swarm.episode(episode_id)).seconds

    def ends() -> str:
        episode = world.swarm.episode(episode_id)
        return (world.finish(episode, 1.0, key="k") if end == "finish" else world.abort(episode, key="k")).status

    for _ in range(3):
        ends()
        if way == "another change":
            store.abandon(KeyError("bug"))
        with refused_commits(world.journal), pytest.raises(Later):
            store.commit()
        assert world.swarm.queries.silence(world.swarm.episode(episode_id)).seconds == silent
        world.now += 0.5 * LEASE
        silent += 0.5 * LEASE
        world.swarm.reap()
    assert ends() == f"{end}ed"
    store.commit()


def test_an_expiry_that_was_undone_renews_nothing(world: World) -> None:
    store, episode_id = world.swarm, ends_late(world)
    for _ in range(2):
        world.now += 1
        assert [episode.id for episode in world.swarm.reap()] == [episode_id]
        with refused_commits(world.journal), pytest.raises(Later):
            store.commit()
    world.swarm.reap()
    store.commit()
    assert world.swarm.episode(episode_id).status == "expired"


def test_begins_that_were_undone_take_no_share(make_world: Make) -> None:
    world = make_world(batch_size=4)
    world.swarm.defer_commits(lambda: None)
    for number in range(3):
        world.begin(f"{number}", client_id="a")
        with refused_commits(world.journal), pytest.raises(Later):
            world.swarm.commit()
    world.swarm.places.refused(BeginRequest(task_id="t", client_id="b"))
    assert world.begin("g", client_id="a").status == "live"
    assert set(world.swarm.leases._last_seen) == {episode.id for episode in world.swarm.live()}


# ---- 3. the reason --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "is_disk"),
    [
        (
            KeyError("bug"),
            r"^Another change in the same commit failed \(KeyError\('bug'\)\) and undid this one: repeat the request",
            False,
        ),
        (Later("not now", retry_after=1.0), r"^Another change in the same commit failed \(Later\('not now'\)\)", False),
        (sqlite3.OperationalError("disk I/O error"), r"could not be written \(disk I/O error\).*check the disk", True),
        (sqlite3.OperationalError("disk is full"), r"could not be written .*free some space", True),
    ],
)
def test_the_reason_of_an_undone_commit(world: World, error: Exception, message: str, is_disk: bool) -> None:
    store = world.swarm
    store.defer_commits(lambda: None)
    world.begin()
    store.abandon(error)
    with pytest.raises(Later, match=message) as refused:
        store.commit()
    assert status_of(refused.value) == 503 and refused.value.retry_after > 0
    assert bool(store.file.refusal) == is_disk
    world.begin()
    store.commit()


def test_a_full_disk_in_a_slice_is_the_reason_for_the_others(world: World) -> None:
    store = world.swarm
    store.defer_commits(lambda: None)
    world.begin()
    full = store.file.db.execute("PRAGMA page_count").fetchone()[0]
    store.file.db.execute(f"PRAGMA max_page_count = {full}")
    with pytest.raises(Later) as own:
        store.emit("state", {"much": "x" * 1_000_000})
    store.abandon(own.value)
    with pytest.raises(Later) as others:
        store.commit()
    assert others.value.message == own.value.message and "free some space" in own.value.message


# ---- 4. requests in slices ------------------------------------------------------------------------------------------


def demonstrating(world: World) -> Callable[[], Iterator[Any]]:
    evaluated = world.begin("e", mode="eval")
    call = world.call(evaluated, 7, 8)
    world.abort(evaluated)
    answered = [Answered(f"t{n}", ((replace(call, id=f"c{n}"), [b"a"] * 2, [b"b"] * 2),)) for n in range(3)]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    request = SftRequest.model_validate({"demonstrations": [{"task_id": "one", "messages": messages}]})
    return lambda: world.swarm.demonstrate(request, answered, "policy", idempotency_key="k")


def closing(world: World, *, not_needed: bool = False) -> Callable[[], Iterator[Any]]:
    for group in "ab":
        world.play(group, 0.0)
    names = [GroupName(group=group) for group in "ab"]
    request = CloseGroupsRequest(groups=names, not_needed=not_needed)
    return lambda: world.swarm.close_groups(request, idempotency_key="k")


def dropping(world: World) -> Callable[[], Iterator[Any]]:
    return closing(world, not_needed=True)


def learning(world: World) -> Callable[[], Iterator[Any]]:
    for group in "ab":
        world.play(group, 0.0, 1.0)
    batch = world.swarm.batches.compose()
    return lambda: world.swarm.batches.learned_in_slices(batch, {"loss": 1.0})


def learning_demonstrations(world: World) -> Callable[[], Iterator[Any]]:
    [*_] = demonstrating(world)()
    batch = world.swarm.pending
    assert batch is not None
    return lambda: world.swarm.batches.learned_in_slices(batch, {"loss": 1.0})


@pytest.mark.parametrize("request_of", [demonstrating, closing, dropping, learning, learning_demonstrations])
def test_only_one_transaction_comes_before_the_second_slice(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, request_of: Callable[[World], Callable[[], Iterator[Any]]]
) -> None:
    """A failure in the first slice undoes that transaction. Later failures undo the commit: see `in_slices`."""
    monkeypatch.setattr("agentjet.swarm.batches.MEMBERS_A_SLICE", 1)
    world = make_world(batch_size=2, group_size=2)
    slices = request_of(world)
    world.swarm.defer_commits(lambda: None)
    before = rows(world)
    transaction, num_failing = world.journal.file.transaction, 0

    @contextmanager
    def fails() -> Iterator[None]:
        nonlocal num_left
        num_left -= 1
        with transaction():
            yield
            if num_left < 0:
                raise MemoryError

    while True:
        num_left = num_failing
        with monkeypatch.context() as patch:
            patch.setattr(world.journal.file, "transaction", fails)
            running, is_first = slices(), True
            try:
                for _ in running:
                    is_first = False
                break
            except MemoryError:
                if is_first:
                    assert num_failing == 0, "the first slice has one transaction"
                else:
                    world.swarm.abandon(MemoryError())
        if num_failing:
            with pytest.raises(Later):
                world.swarm.commit()
        assert rows(world) == before
        num_failing += 1
    assert num_failing >= 3 and rows(world) != before
    world.swarm.commit()
