"""Transcripts: calls that the journal keeps for people when no replay needs them.

1. Of a batch it keeps the best, the worst and one median group; of each reason the newest; of each task the newest
   evaluation.
2. They never exceed their size: the oldest go first, and one too large for it goes before all others.
3. Calls that a replay needs, and those of live episodes, stay in any case.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentjet.swarm import EpisodeRecord, state
from tests.swarm.world import World


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    world = make_world(batch_size=3)
    world.swarm.transcript_bytes = 10**6
    return world


def learned(world: World, *groups: tuple[float, ...]) -> list[list[EpisodeRecord]]:
    """Plays and learns a batch of groups with these rewards."""
    played = [world.play(f"g{i}", *rewards) for i, rewards in enumerate(groups)]
    world.swarm.batches.learned(world.swarm.batches.compose(), {})
    return played


def kept(world: World) -> list[str]:
    """The episodes with calls after a prune that covers all learned batches, in the order they began."""
    world.swarm.batches.checkpointed(world.swarm.policy_version)
    world.prune()
    rows = world.journal.file.db.execute("SELECT DISTINCT episode_id FROM calls ORDER BY seq")
    return [episode_id for (episode_id,) in rows]


def failed(world: World, reason: str, *tokens: int) -> str:
    episode = world.begin()
    world.call(episode, *(tokens or (7,)))
    world.abort(episode, reason)
    return episode.id


def test_of_a_batch_the_best_the_worst_and_the_median_group(world: World) -> None:
    [low, middle, high] = learned(world, (0.0, 0.25), (0.25, 0.5), (0.75, 1.0))
    assert kept(world) == [low[0].id, middle[0].id, middle[1].id, high[1].id]


def test_the_newest_of_each_reason_and_of_each_task(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "KEPT_PER_REASON", 2)
    timeouts = [failed(world, f"Timeout: after {i} s") for i in range(4)]
    other = failed(world, "x" * 300)
    evaluated = [world.play("e", 1.0, mode="eval", task_id="q1", task_set="math")[0].id for _ in range(3)]
    assert kept(world) == [*timeouts[2:], other, evaluated[-1]]
    timeouts.append(failed(world, "Timeout: once more"))
    assert kept(world) == [timeouts[3], other, evaluated[-1], timeouts[4]]


def test_the_oldest_go_first_and_a_large_one_before_them(world: World) -> None:
    episodes = [failed(world, f"reason {i}") for i in range(9)]
    sizes = dict(world.journal.file.db.execute("SELECT episode_id, num_bytes FROM transcripts"))
    world.swarm.transcript_bytes = sum(sizes[episode] for episode in episodes[-6:])
    large = failed(world, "large", *[7] * sizes[episodes[0]] * 4)
    assert kept(world) == episodes[-6:] and large not in kept(world)
    world.swarm.transcript_bytes = 0
    assert kept(world) == []


def test_calls_of_replays_and_of_live_episodes_stay(world: World) -> None:
    world.swarm.transcript_bytes = 0
    learned(world, (0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    waiting = world.play("w", 0.0, 1.0)
    live = world.begin()
    world.call(live, 7)
    world.begin(mode="eval")
    assert kept(world) == [*(episode.id for episode in waiting), live.id]
