"""Figures of whole servers: the same job on the embedded and on the cluster backend, with real ranks and vLLM replicas.

The model is a tiny one, so that the runs take minutes on two cores; the agent is that of `bench.seeded`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from scipy.stats import t as student

from agentjet import Swarm
from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from bench.seeded import SETTINGS, TASKS, agent
from tests.tiny import make_model

STEPS, LAST, SEEDS = 20, 5, 6
"""Batches of a run, those at its end whose rewards count, and runs of each backend.

Rewards of equal runs differ by a factor of two between seeds, so three say little.
"""
REPEATS = 16
"""Episodes of each task that evaluate the untrained policy. They show whether both backends sample alike."""
CONCURRENCY = 8
LONG = "job.max_tokens=96"
"""Four times the answers of `bench.seeded`: sampling a batch then takes longer than learning one."""
CALLS_PER_BATCH = 16
TOGETHER, AT_A_TIME = 24, 4
"""Batches of the cluster while both backends train beside each other, and of one training."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What one run of `STEPS` batches showed."""

    reward: float
    """Mean of the last batches."""
    untrained: tuple[float, ...]
    """Rewards of the untrained policy. Equal samplers give equal means, and these vary less than what was learned."""
    gateway_ms: float
    """CPU time of the gateway per call, in milliseconds."""
    overlap: float
    """Share of learning time in which tokens were sampled."""


@contextmanager
def served(backend: str, python: str, settings: Sequence[str]) -> Iterator[tuple[psutil.Process, Swarm]]:
    """A new server of the tiny model: its gateway and a client. `python` is the interpreter of the samplers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "settings.toml").write_text(SETTINGS)
        overrides = [f"model.name={json.dumps(str(make_model(folder / 'model', hidden=64)))}"]
        overrides.append(f"compute.backend={json.dumps(backend)}")
        if backend == "cluster":
            overrides += [f"compute.sampler_python={json.dumps(python)}", "compute.ranks=2", "compute.samplers=2"]
        overrides += settings
        with ChildServer(folder / "settings.toml", overrides, folder / "data") as child, child.connect() as swarm:
            yield psutil.Process(child._process.pid), swarm


def train(backend: str, seed: int, *, python: str, staleness: int = 0, settings: Sequence[str] = ()) -> Trained:
    """Train the tiny model on a new server."""
    chosen = [f"job.seed={seed}", f"job.max_staleness={staleness}", *settings]
    with raise_on_signals(), served(backend, python, chosen) as (gateway, swarm):
        before = swarm.evaluate(agent, TASKS, repeats=REPEATS, concurrency=CONCURRENCY, progress=False)
        cpu = _cpu(gateway)
        report = swarm.train(agent, TASKS, steps=STEPS, concurrency=CONCURRENCY, seed=seed, progress=False)
        cpu = _cpu(gateway) - cpu
    steps = [step.metrics for step in report.steps]
    return Trained(
        reward=statistics.fmean(step["reward/mean"] for step in steps[-LAST:]),
        untrained=tuple(result.reward for result in before.finished if result.reward is not None),
        gateway_ms=1e3 * cpu / (CALLS_PER_BATCH * len(steps)),
        overlap=statistics.fmean(step.get("sampler/overlap", 0.0) for step in steps[1:]),
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def same_learning(python: str) -> dict[str, Any]:
    """Returns rewards of both backends on the same job, and the CPU time of a call in the gateway of each.

    Intervals are those of 95 % for the mean: over the seeds after training, over all episodes before it.
    """
    runs: dict[str, list[Trained]] = {"embedded": [], "cluster": []}
    for seed in range(SEEDS):  # In turn, so that a machine that slows down slows both.
        for backend, found in runs.items():
            found.append(train(backend, seed, python=python))
    intervals = {backend: _interval([run.reward for run in found]) for backend, found in runs.items()}
    (low, high), (other_low, other_high) = intervals["embedded"], intervals["cluster"]
    untrained = {backend: _interval([one for run in found for one in run.untrained]) for backend, found in runs.items()}
    costs = {backend: statistics.median(run.gateway_ms for run in found) for backend, found in runs.items()}
    return {
        "same_learning": low <= other_high and other_low <= high,
        "reward_embedded": [round(run.reward, 3) for run in runs["embedded"]],
        "reward_cluster": [round(run.reward, 3) for run in runs["cluster"]],
        "interval_embedded": intervals["embedded"],
        "interval_cluster": intervals["cluster"],
        "untrained_embedded": untrained["embedded"],
        "untrained_cluster": untrained["cluster"],
        "gateway_ms_apart_embedded": costs["embedded"],
        "gateway_ms_apart_cluster": costs["cluster"],
    }


def gateway_ratio(python: str) -> dict[str, float]:
    """Returns the gateway's cost of a call in the cluster relative to the embedded backend, both at the same time.

    A process takes more CPU time for the same work if others share its cores and caches. Alone, an embedded server has
    two busy processes and a cluster five. Beside each other, both gateways have the same neighbours.
    """
    found: dict[str, float] = {}
    ended = threading.Event()

    def train_some(swarm: Swarm, seed: int) -> None:
        swarm.train(agent, TASKS, steps=AT_A_TIME, concurrency=CONCURRENCY, seed=seed, progress=False)

    def measure(backend: str, gateway: psutil.Process, swarm: Swarm) -> None:
        train_some(swarm, 0)  # warms up
        before, batches = _cpu(gateway), 0
        while batches < TOGETHER if backend == "cluster" else not (ended.is_set() and batches):
            train_some(swarm, batches)
            batches += AT_A_TIME
        found[backend] = 1e3 * (_cpu(gateway) - before) / (CALLS_PER_BATCH * batches)

    with raise_on_signals(), served("embedded", python, []) as alone, served("cluster", python, []) as cluster:
        beside = threading.Thread(target=measure, args=("embedded", *alone))
        beside.start()
        try:
            measure("cluster", *cluster)
        finally:
            ended.set()
            beside.join()
    return {
        "gateway_ratio": found["cluster"] / found["embedded"],
        "gateway_ms_embedded": found["embedded"],
        "gateway_ms_cluster": found["cluster"],
    }


def overlap(python: str) -> dict[str, float]:
    """Returns the share of learning time in which tokens were sampled, with `max_staleness = 1`; mean of three runs.

    While a batch is learned, only the next one may be sampled. If that is complete first, the samplers must wait. Short
    answers show it: a batch of them is sampled in less time than one is learned.
    """
    runs = [train("cluster", seed, python=python, staleness=1, settings=[LONG]).overlap for seed in range(3)]
    short = train("cluster", 0, python=python, staleness=1).overlap
    return {"overlap": statistics.fmean(runs), "overlap_worst": min(runs), "overlap_short_answers": short}


def _interval(values: Sequence[float]) -> tuple[float, float]:
    mean = statistics.fmean(values)
    error = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return round(mean - error, 3), round(mean + error, 3)
