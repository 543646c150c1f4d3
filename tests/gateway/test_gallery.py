"""The gallery: calls that stay readable after the journal has deleted them.

1. Of a batch it keeps the best, the worst and one median group; of each reason the newest; of each task the newest
   evaluation.
2. The file never exceeds its size: the oldest go first, and a transcript too large for it is left out.
3. Its calls equal those that the journal had, with their deliveries, also while the gallery is being written.
4. A gallery that cannot be written or read is logged once and changes nothing else. 0 MB: there is no file.
5. Calls that nobody kept are `gone`; those of a live episode, or of one without calls, never are.
"""

from __future__ import annotations

import logging
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.gateway import gallery
from agentjet.gateway.gallery import FILE, Chosen, Gallery, choose, keep, transcript
from agentjet.protocol import AbortRequest, BeginRequest, EpisodeTree
from agentjet.swarm import Batch, Episode, Journal
from agentjet.swarm.journal import unpacked
from tests.fakes import Running, running
from tests.swarm.world import World

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, batch_size=3)
    yield world
    world.close()


def learned(world: World, *groups: tuple[float, ...]) -> list[list[Episode]]:
    """Plays and learns a batch of groups with these rewards."""
    played = [world.play(f"g{i}", *rewards) for i, rewards in enumerate(groups)]
    world.swarm.batches.learned(world.swarm.batches.compose(), {})
    return played


def chosen_of(world: World) -> list[Chosen]:
    """The choice at a prune that covers all learned batches."""
    with closing(world.journal.snapshot()) as journal:
        return list(choose(journal.prunable(world.swarm.policy_version), gallery._batches_of(journal)))


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_of_a_batch_the_best_the_worst_and_the_median_group(world: World) -> None:
    [low, middle, high] = learned(world, (0.0, 0.25), (0.25, 0.5), (0.75, 1.0))
    chosen = chosen_of(world)
    assert {(one.kind, one.name) for one in chosen} == {("batch", "0")}
    assert [one.episode_id for one in chosen] == [high[1].id, low[0].id, middle[0].id, middle[1].id]


def test_failures_are_named_by_their_reason_and_evaluations_by_their_task(world: World) -> None:
    for reason in ("Timeout: after 3 s", "Timeout: after 4 s", "x" * 300):
        episode = world.begin()
        world.call(episode, 7)
        world.abort(episode, reason)
    world.play("e", 1.0, mode="eval", task_id="q1", task_set="math")
    names = [(one.kind, one.name) for one in chosen_of(world)]
    assert names == [
        ("unscored", "aborted Timeout"),
        ("unscored", "aborted Timeout"),
        ("unscored", f"aborted {'x' * 80}"),
        ("eval", "math/q1"),
    ]


def test_calls_that_a_replay_needs_and_live_episodes_are_not_chosen(world: World) -> None:
    learned(world, (0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    world.call(world.begin(), 7)
    with closing(world.journal.snapshot()) as journal:
        assert journal.prunable(0) == []
        assert len(journal.prunable(1)) == 6


def test_a_batch_of_demonstrations_has_no_rewards(world: World) -> None:
    [episodes, *_] = learned(world, (0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    members = [replace(world.swarm.episode(one.id), reward=None) for one in episodes]
    chosen = list(choose(members, lambda batch_id: Batch(0, tuple((one.id,) for one in members), world.job, 0.0)))
    assert {one.episode_id for one in chosen} <= {one.id for one in members} and chosen


# ---- the file --------------------------------------------------------------------------------------------------------


def kept(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return [row[0] for row in db.execute("SELECT episode_id FROM transcripts ORDER BY seq")]


def packed(episode_id: str) -> str:
    """Text that hardly compresses."""
    return random.Random(episode_id).randbytes(20_000).hex()


def test_the_newest_of_each_reason_and_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "KEPT_PER_REASON", 2)
    chosen = [Chosen("unscored", "Timeout", f"t{i}") for i in range(4)]
    chosen += [Chosen("eval", "math/q", f"e{i}") for i in range(3)]
    chosen += [Chosen("unscored", "other", "o"), *(Chosen("batch", "0", f"b{i}") for i in range(4))]
    keep(tmp_path / FILE, chosen, packed, 10**9)
    assert kept(tmp_path / FILE) == ["t2", "t3", "e2", "o", "b0", "b1", "b2", "b3"]
    keep(tmp_path / FILE, [Chosen("unscored", "Timeout", "t9")], packed, 10**9)
    assert kept(tmp_path / FILE) == ["t3", "e2", "o", "b0", "b1", "b2", "b3", "t9"]


def test_the_file_stays_below_its_size_and_shrinks_with_it(tmp_path: Path) -> None:
    path = tmp_path / FILE
    for batch in range(20):
        keep(path, [Chosen("batch", str(batch), f"{batch}.{i}") for i in range(10)], packed, 500_000)
        assert path.stat().st_size <= 500_000
    newest = [f"{batch}.{i}" for batch in range(20) for i in range(10)]
    assert 10 < len(kept(path)) == len(set(kept(path)))
    assert kept(path) == newest[-len(kept(path)) :]
    keep(path, [], packed, 200_000)
    assert path.stat().st_size <= 200_000 and kept(path)
    keep(path, [Chosen("batch", "20", "large")], lambda episode_id: packed("large") * 30, 200_000)
    assert "large" not in kept(path) and kept(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_calls_come_back_as_they_were(world: World) -> None:
    episode = world.begin(mode="eval")
    first = world.call(episode, 7, 8)
    second = world.call(episode, 9, parent=first, kept=3)
    world.journal.add_undelivered([second.id])
    world.finish(episode, 1.0)
    before = transcript(world.journal, world.swarm.episode(episode.id))
    assert before.kept == "journal" and len(before.calls) == 2 and before.undelivered == {second.id}
    keep(world.path.with_name(FILE), [Chosen("eval", "t", episode.id)], world.journal.packed, 10**6)
    world.swarm.store.prune()
    after = transcript(world.journal, world.swarm.episode(episode.id))
    assert after == replace(before, kept="gallery")
    assert unpacked("[]") == ([], frozenset())


def test_a_snapshot_keeps_what_is_deleted_after_it(world: World) -> None:
    [episode] = world.play("e", 1.0, mode="eval")
    with closing(world.journal.snapshot()) as journal:
        world.swarm.store.prune()
        assert world.journal.calls(episode.id) == []
        assert [one.id for one in journal.prunable(0)] == [episode.id]
        assert unpacked(journal.packed(episode.id))[0] == journal.calls(episode.id) != []


def test_a_gallery_of_a_newer_version_or_a_damaged_one_is_left_alone(world: World) -> None:
    [episode] = world.play("e", 1.0, mode="eval")
    path = world.path.with_name(FILE)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(sqlite3.DatabaseError, match="it has schema 9, this AgentJet writes 1"):
        keep(path, [Chosen("eval", "t", episode.id)], world.journal.packed, 10**6)
    world.swarm.store.prune()
    assert transcript(world.journal, world.swarm.episode(episode.id)).kept == "gone"
    path.write_bytes(b"not a database at all" * 100)
    assert transcript(world.journal, world.swarm.episode(episode.id)).kept == "gone"


def test_an_episode_without_calls_is_not_gone(world: World) -> None:
    assert transcript(world.journal, world.begin()).kept == "journal"
    episode = world.begin(mode="eval")
    assert transcript(world.journal, world.finish(episode, 0.0)).kept == "journal"


# ---- the gateway -----------------------------------------------------------------------------------------------------


async def lost(run: Running, reason: str) -> str:
    begun = await run.gateway.begin(BeginRequest(task_id="t", client_id="c", wait=5))
    await run.say(begun.id, "hello")
    await run.gateway.abort(begun.id, AbortRequest(reason=reason))
    return begun.id


async def tree_of(run: Running, episode_id: str) -> EpisodeTree:
    return EpisodeTree.model_validate_json(await run.gateway.reader.episode(episode_id))


async def test_transcripts_outlive_checkpoints_and_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1, "group_size": 3}) as run:
        failed = await lost(run, "Timeout: tool")
        ids = await run.fill_batch()
        await run.until(lambda: run.gateway.swarm.policy_version == 1)
        await run.batch()
        await run.until(lambda: (run.folder / FILE).exists() and failed in kept(run.folder / FILE))
    async with running(tmp_path / "d") as run:
        trees = [await tree_of(run, one) for one in ids]
        assert [tree.kept for tree in trees] == ["gallery", "gone", "gone", "gallery", "gallery", "gallery"]
        assert [bool(tree.calls) for tree in trees] == [tree.kept == "gallery" for tree in trees]
        tree = await tree_of(run, failed)
        assert (tree.kept, tree.reason, len(tree.calls)) == ("gallery", "Timeout: tool", 1)
        assert "".join(tree.calls[0].texts).startswith("<|im_start|>") and tree.calls[0].response["content"] == "hi"


async def test_a_gallery_that_cannot_be_written_changes_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agentjet.gateway.gallery")
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1}) as run:
        (run.folder / FILE).mkdir()
        for _ in range(3):
            await run.batch()
    [warning] = [record.getMessage() for record in caplog.records]
    assert "transcripts that the journal deletes are not kept (unable to open database file)" in warning


async def test_nothing_is_kept_with_0_mb(tmp_path: Path) -> None:
    settings = {"checkpoint_every": 1, "keep_checkpoints": 1}
    async with running(tmp_path / "d", job=settings, server={"keep_transcripts": 0}) as run:
        await run.batch()
    assert not (run.folder / FILE).exists()


async def test_snapshots_that_pile_up_are_skipped(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "agentjet.gateway.gallery")
    opened: list[Journal] = []
    taken = world.journal.snapshot
    monkeypatch.setattr(world.journal, "snapshot", lambda: opened.append(taken()) or opened[-1])
    kept_by = Gallery(world.journal, 1)
    for _ in range(gallery.MAX_SNAPSHOTS + 2):  # The event loop has no turn to take note of ended copies.
        kept_by.before_prune(0)
    await kept_by.close()
    assert len(opened) == gallery.MAX_SNAPSHOTS
    [warning] = [record.getMessage() for record in caplog.records]
    assert "the disk is slower than the checkpoints" in warning
