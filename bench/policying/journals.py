"""Costs of a run that must not grow with its length, and times in which the event loop is stopped.

`open_s`, `list_ms` and `rollback_ms` are measured on journals of many settled episodes and 1,024 unsettled ones. A
start and a failed transaction read the latter. Settled rows are written by the journal alone, everything else by the
package. The disk is not waited for (`synchronous=OFF`): these figures are CPU and page cache.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from agentjet.config import JobConfig
from agentjet.errors import Later
from agentjet.protocol import BeginRequest, EpisodeQuery, FinishRequest
from agentjet.swarm import Batch, EpisodeRecord, Journal, SwarmState
from agentjet.swarm.state import State
from agentjet.types import SOLE_POLICY, Call, Message

GROUP_SIZE = 8
NUM_UNSETTLED = 1024
EPISODES_PER_BATCH = 512
CLIENT = "bench"


def run_state(journal: Journal, **job: Any) -> SwarmState:
    journal.file.db.execute("PRAGMA synchronous = OFF")
    settings = {
        "batch_size": NUM_UNSETTLED // GROUP_SIZE,
        "group_size": GROUP_SIZE,
        "lease_seconds": 1e6,
        "max_episode_seconds": 1e7,
    }
    return SwarmState(journal, JobConfig(**(settings | job)))


def begin(swarm: SwarmState, task: str) -> EpisodeRecord:
    return swarm.begin(BeginRequest(task_id=task, client_id=CLIENT))


def record(
    swarm: SwarmState, episode: EpisodeRecord, number: int, parent: Call | None, context: int, sampled: int
) -> Call:
    """Record a call that continues `parent` from its end, with `context` new tokens before `sampled` ones."""
    call = Call(
        id=f"{episode.id}.{number}",
        episode_id=episode.id,
        role="",
        parent=None if parent is None else parent.id,
        kept=0 if parent is None else swarm.tree(episode.id, "").num_tokens(parent.id),
        suffix=tuple(range(context)),
        completion=tuple((episode.seq + i) % 30_000 for i in range(sampled)),
        logprobs=(-0.5,) * sampled,
        versions=(swarm.policy_version,) * sampled,
        temperature=1.0,
        finish_reason="stop",
        response=Message("assistant", "word " * sampled),
        prompt_key="",
        created=0.0,
    )
    swarm.record_call(call, [b"word "] * context, [b"word "] * sampled)
    return call


# ---- a long run --------------------------------------------------------------------------------------------


def settled(number: int) -> Iterator[EpisodeRecord]:
    """Episodes of learned batches, with what real ones carry."""
    for n in range(number):
        yield EpisodeRecord(
            id=f"ep_{n:027x}",
            seq=n + 1,
            client_id=CLIENT,
            task_id=f"task-{n % 1000}",
            task_set="",
            group=f"task-{n % 1000}",
            group_id=n // GROUP_SIZE + 1,
            mode="train",
            policy_version=n // EPISODES_PER_BATCH,
            begun=n / 100,
            status="finished",
            ended=n / 100 + 1,
            reward=(n % 10) / 10,
            metrics={"turns": 3.0, "seconds": 1.5},
            num_calls=3,
            num_tokens=300,
            trained_in=n // EPISODES_PER_BATCH,
            oldest_version=n // EPISODES_PER_BATCH,
        )


def write_history(path: Path, number: int) -> None:
    """A journal after `number` episodes, and unsettled ones."""
    journal = Journal.open(path)
    db = journal.file.db
    db.execute("PRAGMA synchronous = OFF")
    batches = number // EPISODES_PER_BATCH
    job = JobConfig()
    metrics = json.dumps({f"metric/{i}": i / 3 for i in range(60)})
    db.execute("BEGIN")
    for episode in settled(number):
        journal.put_episode(episode)
    for i in range(batches):
        start = i * EPISODES_PER_BATCH
        firsts = range(start, start + EPISODES_PER_BATCH, GROUP_SIZE)
        groups = tuple(tuple(f"ep_{n:027x}" for n in range(first, first + GROUP_SIZE)) for first in firsts)
        journal.add_batch(Batch(i, groups, job, float(i)))
    db.execute("UPDATE batches SET metrics = ?", (metrics,))
    keys = ((f"begin/{CLIENT}", str(n), "0" * 64, f"ep_{n:027x}", time.time()) for n in range(min(number, 200_000)))
    db.executemany("INSERT INTO idempotency VALUES (?, ?, ?, ?, ?)", keys)
    events = (("episode", float(n), json.dumps({"episode_id": f"ep_{n:027x}"})) for n in range(min(number, 100_000)))
    db.executemany("INSERT INTO events (kind, time, body) VALUES (?, ?, ?)", events)
    journal.put_state(State(batches, durable_version=batches))
    journal.count("outcome", "finished", number)
    journal.count("outcome", "trained", number)
    db.execute("COMMIT")
    swarm = run_state(journal)
    live = [begin(swarm, f"live-{n}") for n in range(NUM_UNSETTLED // GROUP_SIZE) for _ in range(GROUP_SIZE)]
    for episode in live[: EPISODES_PER_BATCH // 2]:
        swarm.finish(episode.id, FinishRequest(reward=episode.seq % 2))
    for n in range(1000):
        record(swarm, live[-1 - n % 100], n, None, 2, 2)
    journal.close()


def timed(work: Callable[[], object], repeats: int) -> float:
    """Median seconds."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def fail(swarm: SwarmState) -> None:
    """A transaction of 20 changes that fails at its end."""
    try:
        with swarm.store.transaction():
            for episode in swarm.store.live()[:10]:
                swarm.note(episode.id, noted=["something"])
                swarm.finish(episode.id, FinishRequest(reward=1.0))
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


def costs(folder: Path, number: int) -> dict[str, float]:
    """Costs of opening, listing and rolling back a run of `number` episodes."""
    path = folder / f"{number}" / "journal.sqlite"
    write_history(path, number)

    def reopen() -> None:
        journal = Journal.open(path)
        run_state(journal)
        journal.close()

    open_s = timed(reopen, 3)
    journal = Journal.open(path)
    swarm = run_state(journal)
    pages = [
        timed(lambda: swarm.store.journal.find_episodes(EpisodeQuery(limit=50)), 20),
        timed(lambda: swarm.store.journal.find_episodes(EpisodeQuery(limit=50, status="finished")), 20),
        timed(lambda: swarm.store.journal.find_episodes(EpisodeQuery(limit=50, status="aborted")), 20),
        timed(lambda: swarm.store.journal.find_episodes(EpisodeQuery(limit=50, before=f"ep_{number // 2:027x}")), 20),
    ]
    store = swarm.store
    before = deepcopy(store.state), dict(store.episodes), dict(store.groups)
    rollback = timed(lambda: fail(swarm), 20)
    assert (store.state, store.episodes, store.groups) == before, "a failed transaction leaves nothing"
    journal.close()
    return {"open_s": open_s, "list_ms": 1e3 * max(pages), "rollback_ms": 1e3 * rollback}


# ---- the event loop ----------------------------------------------------------------------------------------


def write_batch(swarm: SwarmState, episodes: int, turns: int, tokens: int) -> None:
    """A complete batch of long conversations: each turn has `tokens` new tokens, half of them sampled."""
    for n in range(episodes):
        episode, parent = begin(swarm, f"t{n // GROUP_SIZE}"), None
        with swarm.store.transaction():
            for turn in range(turns):
                parent = record(swarm, episode, turn, parent, tokens // 2, tokens // 2)
        swarm.finish(episode.id, FinishRequest(reward=n % 2))


async def longest_gap(work: Callable[[], Any], *, in_thread: bool) -> tuple[float, float]:
    """Seconds of the longest time without a turn of the event loop, and of the work."""
    gaps = [0.0]

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    started = time.perf_counter()
    await asyncio.to_thread(work) if in_thread else work()
    seconds = time.perf_counter() - started
    await asyncio.sleep(0.01)
    ticking.cancel()
    return max(gaps), seconds


def stall(folder: Path, episodes: int, turns: int, tokens: int) -> dict[str, float]:
    journal = Journal.open(folder / "batch" / "journal.sqlite")
    swarm = run_state(journal, batch_size=episodes // GROUP_SIZE)
    write_batch(swarm, episodes, turns, tokens)
    batch = swarm.batches.compose()
    idle, _ = asyncio.run(longest_gap(lambda: time.sleep(2), in_thread=True))
    runs = [asyncio.run(longest_gap(lambda: swarm.batches.training_batches(batch), in_thread=True)) for _ in range(3)]
    on_loop, _ = asyncio.run(longest_gap(lambda: swarm.batches.training_batches(batch), in_thread=False))
    forest = swarm.batches.training_batches(batch)[SOLE_POLICY].forest
    journal.close()
    return {
        "loop_stall_ms": 1e3 * statistics.median(gap for gap, _ in runs),
        "loop_stall_max_ms": 1e3 * max(gap for gap, _ in runs),
        "loop_idle_ms": 1e3 * idle,
        "build_s": statistics.median(seconds for _, seconds in runs),
        "stall_on_loop_ms": 1e3 * on_loop,
        "batch_tokens": forest.num_nodes,
    }


def refused(folder: Path, live: int) -> dict[str, float]:
    """CPU of a refused `begin` beside `live` live episodes."""
    journal = Journal.open(folder / "refused" / "journal.sqlite")
    swarm = run_state(journal, batch_size=live // GROUP_SIZE)
    for n in range(live):
        begin(swarm, f"t{n // GROUP_SIZE}")
    request = BeginRequest(task_id="more", client_id=CLIENT)
    repeats = 2_000
    started = time.process_time()
    for _ in range(repeats):
        try:
            swarm.begin(request)
        except Later:
            continue
        raise AssertionError("the batch is full")
    seconds = time.process_time() - started
    journal.close()
    return {"begin_refused_ms": 1e3 * seconds / repeats}
