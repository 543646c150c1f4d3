"""Four adapters in one worker against four servers one after the other.

Both sides train four runs with the same settings, tasks and numbers of batches, on policy. On one side a server has
the four runs at the same time: their adapters share the base model, and their rows share the sampler's batches. On the
other side each run has a server alone, with the whole machine. Starts and one batch of each run are not counted.

One client process plays all episodes: plain asynchronous agents over HTTP. With several calls, a tool that takes
`tool_seconds` comes between two of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from agentjet import AsyncSwarm, Task
from agentjet.cli.serve import ChildServer
from agentjet.client import AsyncEpisode

MODEL = "smollm2-135m"
RUNS = ("default", "b", "c", "d")
THINGS = ("a lighthouse", "two rivers", "an old clock", "the first snow", "a lost letter", "a blue door")
WORKER_MODULE = "agentjet.compute.embedded"


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of each run."""

    model: str = MODEL
    rank: int = 8
    dtype: str = "auto"
    batch_size: int = 1
    group_size: int = 4
    max_tokens: int = 64
    batches: int = 8
    calls: int = 1
    tool_seconds: float = 0.0

    @property
    def episodes(self) -> int:
        """Counted episodes of a run."""
        return self.batches * self.batch_size * self.group_size

    @property
    def concurrency(self) -> int:
        return self.batch_size * self.group_size

    def overrides(self) -> list[str]:
        settings: dict[str, Any] = {
            "model.name": self.model,
            "model.device": "cpu",
            "model.dtype": self.dtype,
            "model.threads": os.cpu_count(),
            "model.lora.rank": self.rank,
            "sampler.cache_tokens": 16384,
            "job.batch_size": self.batch_size,
            "job.group_size": self.group_size,
            "job.max_tokens": self.max_tokens,
            "job.checkpoint_every": 0,
        }
        return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


@dataclass(frozen=True, slots=True)
class Measured:
    """A server while it trained."""

    seconds: float
    peak_mb: float
    """Largest resident memory of its worker, in MiB."""


async def trained(server: ChildServer, names: Sequence[str], workload: Workload) -> Measured:
    """Trains runs of a server at the same time."""
    tasks = [Task(f"Tell a long story about {thing}.") for thing in THINGS]
    token = (server.data_dir / "admin-token").read_text().strip()
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=600, trust_env=False))
        swarm = await stack.enter_async_context(AsyncSwarm(server.url, token))
        for name in names[1:]:
            await swarm.start_run(name)
        swarms = [await stack.enter_async_context(swarm.of_run(name)) for name in names]

        async def agent(task: Task, episode: AsyncEpisode) -> float:
            messages = [{"role": "user", "content": task.id}]
            for call in range(workload.calls):
                if call:
                    await asyncio.sleep(workload.tool_seconds)
                    messages.append({"role": "user", "content": "Go on."})
                answer = await http.post(
                    f"{episode.base_url}/chat/completions",
                    json={"model": episode.model, "messages": messages},
                    headers={"Authorization": f"Bearer {episode.api_key}"},
                )
                messages.append(answer.raise_for_status().json()["choices"][0]["message"])
            text = messages[-1]["content"] or ""
            return text.count("e") / max(1, len(text))

        async def train(batches: int, seed: int) -> None:
            await asyncio.gather(
                *(
                    one.train(agent, tasks, steps=batches, concurrency=workload.concurrency, seed=seed, progress=False)
                    for one in swarms
                )
            )

        await train(1, seed=0)
        began = time.perf_counter()
        await train(workload.batches, seed=1)
        return Measured(time.perf_counter() - began, peak_mb())


def served(folder: Path, names: Sequence[str], workload: Workload) -> Measured:
    """Starts a server, trains the runs, ends the server."""
    with ChildServer(None, workload.overrides(), folder) as server:
        server.connect().close()
        return asyncio.run(trained(server, names, workload))


def peak_mb() -> float:
    """Largest resident memory of the only worker so far, in MiB (Linux)."""
    [worker] = [
        child for child in psutil.Process().children(recursive=True) if child.cmdline()[2:4] == ["-m", WORKER_MODULE]
    ]
    lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def compare(folder: Path, workload: Workload) -> dict[str, float]:
    """The figures of both sides."""
    together = served(folder / "together", RUNS, workload)
    alone = [served(folder / name, RUNS[:1], workload) for name in RUNS]
    episodes = len(RUNS) * workload.episodes
    seconds = sum(one.seconds for one in alone)
    peak = statistics.median(one.peak_mb for one in alone)
    return {
        "adapters4_speedup": seconds / together.seconds,
        "adapters4_memory": together.peak_mb / peak,
        "adapters4_episodes_per_s": episodes / together.seconds,
        "servers4_episodes_per_s": episodes / seconds,
        "adapters4_s": together.seconds,
        "servers4_s": seconds,
        "adapters4_peak_mb": together.peak_mb,
        "adapter1_peak_mb": peak,
    }
