"""Figures of whole servers: the same job on the embedded and on the cluster backend, with real ranks and vLLM replicas.

The model is a tiny one, so that the runs take minutes on two cores; the agent is that of `bench.seeded`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from scipy.stats import t as student

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
    seconds: float


def train(backend: str, seed: int, *, python: str, staleness: int = 0, settings: Sequence[str] = ()) -> Trained:
    """Train the tiny model on a new server; `python` is the interpreter of the samplers."""
    with tempfile.TemporaryDirectory() as name, raise_on_signals():
        folder = Path(name)
        (folder / "settings.toml").write_text(SETTINGS)
        overrides = [f"model.name={json.dumps(str(make_model(folder / 'model', hidden=64)))}"]
        overrides += [f"job.seed={seed}", f"job.max_staleness={staleness}", f"compute.backend={json.dumps(backend)}"]
        if backend == "cluster":
            overrides += [f"compute.sampler_python={json.dumps(python)}", "compute.ranks=2", "compute.samplers=2"]
        overrides += settings
        with ChildServer(folder / "settings.toml", overrides, folder / "data") as child, child.connect() as swarm:
            before = swarm.evaluate(agent, TASKS, repeats=REPEATS, concurrency=CONCURRENCY, progress=False)
            gateway = psutil.Process(child._process.pid)
            cpu, began = _cpu(gateway), time.monotonic()
            report = swarm.train(agent, TASKS, steps=STEPS, concurrency=CONCURRENCY, seed=seed, progress=False)
            cpu, seconds = _cpu(gateway) - cpu, time.monotonic() - began
        lines = next((folder / "data").rglob("metrics.jsonl")).read_text().splitlines()
    steps = [step.metrics for step in report.steps]
    calls = sum(step["episodes"] for step in map(json.loads, lines) if "episodes" in step) or len(steps) * 8
    return Trained(
        reward=statistics.fmean(step["reward/mean"] for step in steps[-LAST:]),
        untrained=tuple(result.reward for result in before.finished if result.reward is not None),
        gateway_ms=1e3 * cpu / (2 * calls),
        overlap=statistics.fmean(step.get("sampler/overlap", 0.0) for step in steps[1:]),
        seconds=seconds,
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def same_learning(python: str) -> dict[str, Any]:
    """Returns rewards of both backends on the same job, and the gateway's cost of a call in one relative to the other.

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
        "gateway_ratio": costs["cluster"] / costs["embedded"],
        "gateway_ms_embedded": costs["embedded"],
        "gateway_ms_cluster": costs["cluster"],
    }


def overlap(python: str) -> dict[str, float]:
    """Returns the share of learning time in which tokens were sampled, with `max_staleness = 1`."""
    return {"overlap": train("cluster", 0, python=python, staleness=1).overlap}


def _interval(values: Sequence[float]) -> tuple[float, float]:
    mean = statistics.fmean(values)
    error = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return round(mean - error, 3), round(mean + error, 3)
