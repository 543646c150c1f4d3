"""A team of two policies in one run against the team of two servers of version 0.1: `team_speedup`.

Tiny models, each with all weights, in a worker of its own with one thread. The agent calls both policies at once, so
the bench measures the run and not the time in which one policy waits for the other's answer. Model, tasks, calls and
batches are those of version 0.1's `bench.team`, which measures the other side.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from agentjet import AsyncSwarm, Task
from agentjet.cli.serve import ChildServer
from agentjet.client import AsyncEpisode
from tests.tiny import make_model

POLICIES = ("planner", "coder")
CALLS = 2
"""Calls of each policy in an episode."""
TASKS = [Task(f"t{number}") for number in range(16)]
CONCURRENCY = 16
BATCH_SIZE, GROUP_SIZE = 2, 8
SIZES = {"small": (2, 32, 48), "medium": (4, 256, 96), "large": (6, 384, 160)}
"""Layers, width, and tokens of an answer at most."""


def overrides(folder: Path, size: str) -> list[str]:
    layers, hidden, max_tokens = SIZES[size]
    settings: dict[str, Any] = {
        "model.name": str(make_model(folder / "model", layers=layers, hidden=hidden)),
        "model.device": "cpu",
        "model.dtype": "float32",
        "model.threads": 1,
        "sampler.cache_tokens": 32768,
        "job.batch_size": BATCH_SIZE,
        "job.group_size": GROUP_SIZE,
        "job.checkpoint_every": 0,
        "job.max_tokens": max_tokens,
        **{f"policies.{policy}.worker": policy for policy in POLICIES},
    }
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


async def talk(http: httpx.AsyncClient, episode: AsyncEpisode, policy: str, task: Task) -> float:
    """The calls of a policy in an episode; returns its reward."""
    messages = [{"role": "user", "content": f"Say something about {task.id}"}]
    length = 0
    for _ in range(CALLS):
        answer = await http.post(
            f"{episode.base_url}/chat/completions",
            json={"model": policy, "messages": messages},
            headers={"Authorization": f"Bearer {episode.api_key}"},
        )
        message = answer.raise_for_status().json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "Go on."}]
        length += len(message["content"] or "")
    return float(length % 7)


async def run(url: str, token: str, steps: int, seed: int) -> float:
    """Seconds of a training."""
    async with AsyncSwarm(url, token) as swarm, httpx.AsyncClient(timeout=120, trust_env=False) as http:

        async def agent(task: Task, episode: AsyncEpisode) -> dict[str, float]:
            rewards = await asyncio.gather(*(talk(http, episode, policy, task) for policy in POLICIES))
            return dict(zip(POLICIES, rewards, strict=True))

        began = time.perf_counter()
        await swarm.train(agent, TASKS, steps=steps, concurrency=CONCURRENCY, seed=seed, progress=False)
        return time.perf_counter() - began


def before(checkout: Path, size: str, steps: int) -> list[float]:
    """Seconds of the trainings of a two-server team, by `bench.team` of a checkout of version 0.1."""
    command = [sys.executable, "-m", "bench.team", "--size", size, "--rounds", "1", "--steps", str(steps)]
    path = os.pathsep.join((str(checkout / "src"), str(checkout)))
    done = subprocess.run(
        command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"bench.team of {checkout} failed:\n{done.stderr[-2000:]}")
    return recorded(done.stdout, size, steps)


def recorded(output: str, size: str, steps: int) -> list[float]:
    """Seconds of the trainings that an output of `bench.team` has."""
    found = json.loads(output.strip().splitlines()[-1])
    if (found["size"], found["steps"]) != (size, steps):
        raise SystemExit(f"--before has size {found['size']} and {found['steps']} steps, not {size} and {steps}")
    seconds: list[float] = found["seconds"]["team"]
    return seconds


def compare(folder: Path, baseline: Path | None, *, size: str, steps: int, rounds: int) -> dict[str, float]:
    """The figures. With a checkout as `baseline`, both sides take turns; with a file, it has the other side's output.

    Without a baseline, the speedup is left out.
    """
    old: list[float] = [] if baseline is None or baseline.is_dir() else recorded(baseline.read_text(), size, steps)
    new: list[float] = []
    with ChildServer(None, overrides(folder, size), folder / "data") as server:
        with server.connect() as swarm:
            url = swarm.url
        token = (server.data_dir / "admin-token").read_text().strip()
        asyncio.run(run(url, token, 1, seed=0))
        for number in range(rounds):
            if baseline is not None and baseline.is_dir():
                old += before(baseline, size, steps)
            new.append(asyncio.run(run(url, token, steps, seed=number)))
    figures = {"team_s": statistics.median(new), "team_episodes": steps * BATCH_SIZE * GROUP_SIZE}
    if old:
        figures |= {"team_before_s": statistics.median(old), "team_speedup": statistics.median(old) / figures["team_s"]}
    return figures
