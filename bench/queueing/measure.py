"""Measures `Costs`: loads on a real gateway over HTTP, and parts of the journal in this process.

CPU seconds of the gateway process are fitted, without negative costs, to loads that differ in tokens, turns and
streaming. They hardly depend on other programs of the machine, unlike wall-clock times.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from agentjet.compute.cluster.routing import Load, RoutedCompletion, choose
from agentjet.processes.rpc import LargeRequest, ProcessRequest
from agentjet.swarm import Journal
from agentjet.types import PolicyId
from bench.gatewaying.processes import started
from bench.policying.journals import begin, record, run_state, write_batch
from bench.queueing.costs import Costs
from bench.queueing.load import Play
from bench.queueing.serve import Settings
from bench.queueing.workload import LongTail, Workload

NEVER = 1.0
"""Seconds of a token of replicas that answer nothing within the measurement."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The sizes of the measurement."""

    seconds: float = 4.0
    agents: int = 32
    live: int = 4000
    waiting: int = 1000
    batch_episodes: int = 64


QUICK = Effort(seconds=0.5, agents=4, live=50, waiting=20, batch_episodes=8)


def constant(calls: int, context: int, completion: int, streamed: float) -> Workload:
    """Equal calls without a pause between them."""

    def always(value: float) -> LongTail:
        return LongTail(value, 0.0, value)

    return Workload(always(calls), always(0.0), context, always(context), always(completion), streamed)


LOADS = (
    constant(1, 32, 16, 0.0),
    constant(8, 32, 16, 0.0),
    constant(4, 32, 512, 0.0),
    constant(8, 32, 16, 1.0),
    constant(4, 32, 128, 1.0),
    constant(1, 1024, 16, 0.0),
    constant(16, 256, 16, 0.0),
)


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[tuple[str, str]]:
    """A gateway with a fresh data dir. Yields its address and its data dir."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        chosen = Settings(f"{made}/data", **settings)
        command = [sys.executable, "-m", "bench.queueing.serve", chosen.to_json()]
        with started(command, Path(made) / "serve.log") as url:
            yield url, chosen.data_dir


def play(load: Play) -> dict[str, Any]:
    """The outcome of a load, from a separate process. Raises `SystemExit` if the load failed."""
    command = [sys.executable, "-m", "bench.queueing.load", load.to_json()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the load ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    outcome: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return outcome


def delta(outcome: Mapping[str, Any], name: str) -> float:
    """Growth of a counter during the measurement of a load."""
    return float(outcome["after"][name] - outcome["before"][name])


def features(outcome: Mapping[str, Any], streamed: float) -> list[float]:
    """Calls, prompt tokens, new tokens of prompts, tokens of plain and of streamed answers, and episodes."""
    load, seconds = outcome["load"], outcome["seconds"]
    tokens = load["tokens_per_s"] * seconds
    calls, episodes = load["calls_per_s"] * seconds, load["episodes_per_s"] * seconds
    return [calls, outcome["prompts"], outcome["context"], tokens * (1 - streamed), tokens * streamed, episodes]


def fit(rows: list[list[float]], totals: list[float]) -> tuple[list[float], float]:
    """Costs without negative ones, of least relative error; and the largest relative error."""
    scaled = np.array(rows) / np.array(totals)[:, None]
    scale = scaled.max(axis=0)
    found, _ = nnls(scaled / scale, np.ones(len(totals)))
    costs = found / scale
    return [float(cost) for cost in costs], float(np.abs(scaled @ costs - 1).max())


def measure(folder: Path, effort: Effort) -> Costs:
    """All costs, measured one after the other."""
    rows, cpu, waited, written, outcomes = [], [], 0.0, [], []
    with serving(folder) as (url, data_dir):
        for work in LOADS:
            outcome = play(Play(url, data_dir, effort.agents, work, effort.seconds))
            outcomes.append(outcome)
            rows.append(features(outcome, work.streamed))
            cpu.append(delta(outcome, "cpu_s"))
            waited += delta(outcome, "wait_s")
            written.append(delta(outcome, "written"))
    (call, prompt, new, plain, streamed, episode), error = fit(rows, cpu)
    sizes, _ = fit([[row[0], row[2] + row[3] + row[4], row[5]] for row in rows], written)
    first, second = outcomes[0], outcomes[1]
    rows_second = delta(second, "rows") / delta(second, "calls")
    rows_first = delta(first, "rows") / delta(first, "calls")
    rows_episode = (rows_first - rows_second) / (1 - 1 / 8)  # Episodes of one call and of eight.
    live, memory_live, idle = measure_live(folder, effort, call + 48 * new + 16 * plain, episode)
    recorded, recorded_token = measure_record(folder)
    batch_token, rank_token, rank_bytes = measure_batch(folder, effort)
    sync, bandwidth = measure_disk(folder)
    return Costs(
        call=call,
        per_prompt_token=prompt,
        per_new_token=new,
        per_token=plain,
        per_streamed_token=streamed,
        record=recorded,
        record_token=recorded_token,
        begin=episode / 2,
        finish=episode / 2,
        per_live=live,
        idle_live=idle,
        route=measure_routing(),
        batch_token=batch_token,
        rank_token=rank_token,
        rank_bytes_token=rank_bytes,
        sync=sync,
        disk_bandwidth=bandwidth,
        bytes_call=sizes[0] + sizes[2] / 8,
        bytes_token=sizes[1],
        memory_live=memory_live,
        memory_token=measure_memory(folder),
        memory_call=measure_waiting(folder, effort),
        rows_episode=rows_episode,
        rows_call=rows_first - rows_episode,
        wait_share=waited / sum(outcome["seconds"] for outcome in outcomes),
        fit_error=error,
    )


def measure_live(folder: Path, effort: Effort, call: float, episode: float) -> tuple[float, float, float]:
    """CPU seconds that a live episode adds to each begin and finish; its bytes; its CPU seconds a second."""
    with serving(folder) as (url, data_dir):
        empty = play(Play(url, data_dir, 1, LOADS[0], 1.0, hold="begin"))
        idle = play(Play(url, data_dir, effort.live, LOADS[0], effort.seconds, hold="begin"))
        busy = play(Play(url, data_dir, effort.agents, LOADS[0], effort.seconds))
    episodes = busy["load"]["episodes_per_s"] * busy["seconds"]
    each = delta(busy, "cpu_s") / max(1.0, episodes) - call - episode
    memory = (idle["idle"]["rss"] - empty["after"]["rss"]) / effort.live
    at_rest = delta(idle, "cpu_s") - delta(empty, "cpu_s") * idle["seconds"] / empty["seconds"]
    return max(0.0, each / 2 / effort.live), memory, max(0.0, at_rest / idle["seconds"] / effort.live)


def measure_waiting(folder: Path, effort: Effort) -> float:
    """Bytes of the gateway for each call that waits for its answer, with its connection."""
    with serving(folder, step=NEVER) as (url, data_dir):
        held = play(Play(url, data_dir, effort.waiting, constant(1, 32, 4000, 0.0), effort.seconds, hold="call"))
    return float(held["after"]["rss"] - held["still"]["rss"]) / effort.waiting


def measure_record(folder: Path) -> tuple[float, float]:
    """CPU seconds in which a call is journalled, besides its tokens, and of each token."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        journal = Journal.open(Path(made) / "journal.sqlite")
        swarm = run_state(journal)
        swarm.store.defer_commits(lambda: None)
        times = []
        for tokens in (16, 512):
            episode, began, number = begin(swarm, f"t{tokens}"), time.process_time(), 100
            for turn in range(number):
                record(swarm, episode, turn, None, tokens, tokens)
                swarm.store.commit()
            times.append((time.process_time() - began) / number)
        journal.close()
    slope = (times[1] - times[0]) / (2 * (512 - 16))
    return max(0.0, times[0] - 32 * slope), slope


def measure_batch(folder: Path, effort: Effort) -> tuple[float, float, float]:
    """CPU seconds of a forest token in the built batch, and in the request to each rank; its bytes in that."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        journal = Journal.open(Path(made) / "journal.sqlite")
        swarm = run_state(journal, batch_size=effort.batch_episodes // 8)
        write_batch(swarm, effort.batch_episodes, 8, 600)
        batch = swarm.batches.compose()
        began = time.process_time()
        [training] = swarm.batches.training_batches(batch).values()
        built = time.process_time()
        request = asyncio.run(LargeRequest.encoded(ProcessRequest("load_batch", 1, PolicyId(), (training,))))
        message = b"".join(request.parts())
        sent = time.process_time()
        journal.close()
    nodes = training.forest.num_nodes
    return (built - began) / nodes, (sent - built) / nodes, len(message) / nodes


def measure_memory(folder: Path) -> float:
    """Bytes of the gateway for each token of a live conversation."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        journal = Journal.open(Path(made) / "journal.sqlite")
        swarm, found = run_state(journal), []
        tracemalloc.start()
        for number in range(9):
            episode, parent = begin(swarm, f"t{number}"), None
            with swarm.store.transaction():
                for turn in range(8):
                    parent = record(swarm, episode, turn, parent, 300, 300)
            found.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        journal.close()
    return (found[-1] - found[0]) / (8 * 8 * 600)


def measure_routing(replicas: int = 100) -> float:
    """CPU seconds of a choice among replicas, for each of them."""
    rng, loads = np.random.default_rng(0), {number: Load(80, 65_536) for number in range(replicas)}
    for number in range(20 * replicas):
        work = RoutedCompletion(rng.integers(0, 49_000, 2500).astype(np.int32))
        work.update_keys()
        loads[number % replicas].add(work)
    began, times = time.process_time(), 100
    for _ in range(times):
        choose(loads, work)
    return (time.process_time() - began) / times / replicas


def measure_disk(folder: Path) -> tuple[float, float]:
    """Seconds of a wait for 16 KiB, and bytes a second in waits for 1 MiB each."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        found = []
        for size in (16 * 2**10, 2**20):
            times = []
            for _ in range(64):
                os.write(file.fileno(), b"x" * size)
                began = time.perf_counter()
                os.fdatasync(file.fileno())
                times.append(time.perf_counter() - began)
            found.append(statistics.median(times))
    return found[0], 2**20 / found[1]
