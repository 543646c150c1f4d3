"""Costs that must not grow with the length of a run: `python -m bench.policies`.

| part | figures |
|---|---|
| `journal` | opening, listing and rolling back a run of 1,000 to 1,000,000 episodes |
| `stall` | the longest stop of the event loop while a batch is built |
| `begin` | CPU of a refused `begin` |

Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from agentjet.config import JobConfig
from agentjet.errors import Later
from agentjet.front.http import tune_python
from agentjet.protocol import BeginRequest, EpisodeQuery, FinishRequest
from agentjet.swarm import Batch, EpisodeRecord, Journal, SwarmState
from agentjet.swarm.state import State
from agentjet.types import SOLE_POLICY, Call, Message
from bench.machine import bounded, grid, report
from bench.scripted import Watch

# ---- a long run: costs that must not grow with it --------------------------------------------------------------------

GROUP_SIZE = 8
NUM_UNSETTLED = 1024
EPISODES_PER_BATCH = 512
CLIENT = "bench"
TICK = 0.001  # Seconds between two looks at the event loop


def run_state(journal: Journal, **job: Any) -> SwarmState:
    journal.file.db.execute("PRAGMA synchronous = OFF")
    settings = {"batch_size": NUM_UNSETTLED // GROUP_SIZE, "group_size": GROUP_SIZE, "lease_seconds": 1e6}
    return SwarmState(journal, JobConfig(**{**settings, "max_episode_seconds": 1e7, **job}))


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
        with swarm.transaction():
            for episode in swarm.live()[:10]:
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
    filters: list[dict[str, Any]] = [{}, {"status": "finished"}, {"status": "aborted"}]
    filters.append({"before": f"ep_{number // 2:027x}"})
    queries = [EpisodeQuery(limit=50, **one) for one in filters]
    pages = [timed(partial(journal.find_episodes, query), 20) for query in queries]
    store = swarm
    before = deepcopy(store.state), dict(store.episodes), dict(store.groups)
    rollback = timed(lambda: fail(swarm), 20)
    assert (store.state, store.episodes, store.groups) == before, "a failed transaction leaves nothing"
    journal.close()
    return {"open_s": open_s, "list_ms": 1e3 * max(pages), "rollback_ms": 1e3 * rollback}


def write_batch(swarm: SwarmState, episodes: int, turns: int, tokens: int) -> None:
    """A complete batch of long conversations: each turn has `tokens` new tokens, half of them sampled."""
    for n in range(episodes):
        episode, parent = begin(swarm, f"t{n // GROUP_SIZE}"), None
        with swarm.transaction():
            for turn in range(turns):
                parent = record(swarm, episode, turn, parent, tokens // 2, tokens // 2)
        swarm.finish(episode.id, FinishRequest(reward=n % 2))


async def longest_gap(work: Callable[[], Any], *, in_thread: bool) -> tuple[float, float]:
    """Seconds of the longest time without a turn of the event loop, and of the work."""
    watch = Watch(TICK)
    await asyncio.sleep(0.05)
    watch.watched()
    started = time.perf_counter()
    await asyncio.to_thread(work) if in_thread else work()
    seconds = time.perf_counter() - started
    await asyncio.sleep(0.01)
    return watch.watched()["wall_s"] - TICK, seconds


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


# ---- the parts -------------------------------------------------------------------------------------------------------

AT_MOST = {"open_s": 2, "list_ms": 10, "rollback_ms": 10}
AT_MOST |= {"loop_stall_ms": 50, "begin_refused_ms": 0.2}
SIZES = (1_000, 10_000, 100_000, 1_000_000)
PARTS = ("stall", "begin", "journal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, which show that the bench works")
    given = parser.parse_args()
    tune_python()  # As the server runs.
    curve: dict[int, dict[str, float]] = {}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "stall" in given.only:
            figures |= stall(Path(folder), *((16, 4, 40) if given.quick else (128, 40, 400)))
        if "begin" in given.only:
            figures |= refused(Path(folder), 64 if given.quick else 1024)
        if "journal" in given.only:
            curve = {number: costs(Path(folder), number) for number in SIZES[: 2 if given.quick else None]}
            figures |= curve[max(curve)]
    rounded = {number: {name: round(value, 4) for name, value in row.items()} for number, row in curve.items()}
    summary = {name: round(value, 4) for name, value in figures.items()}
    growth = grid({f"{number:,} episodes": row for number, row in curve.items()})
    report("policies", {**summary, "curve": rounded}, bounded(summary, {}, AT_MOST), growth)


if __name__ == "__main__":
    main()
