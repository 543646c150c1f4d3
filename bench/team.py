"""The cost of a team: `python -m bench.team`.

Two servers on tiny models, one core each. The same calls to both, the same episodes and batches, in two ways:

* **apart**: a separate run on each server, side by side; the time until both are done;
* **team**: one run of a team. Its agent calls both members at once, so the bench measures the team and not the time in
  which one member waits for the other's answer.

The two ways take turns, in the order apart, team, team, apart, ...; the figure is the ratio of the medians. With
`--size small` the models answer at once, and requests are most of the work. With the others an episode takes seconds,
as the figures show. Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from agentjet import AsyncSwarm, AsyncTeam, Task
from agentjet.cli.serve import ChildServer
from agentjet.client import AsyncEpisode, AsyncTeamEpisode
from agentjet.client.threads import raise_on_signals
from tests.tiny import make_model

MEMBERS = ("planner", "coder")
CALLS = 2
"""Calls of each member in an episode."""
TASKS = [Task(f"t{number}") for number in range(16)]
SETTINGS = """
[model]
device = "cpu"
dtype = "float32"
threads = 1
[sampler]
cache_tokens = 32768
[job]
batch_size = 2
group_size = 8
checkpoint_every = 0
"""
CONCURRENCY = 16
SIZES = {"small": (2, 32, 48), "medium": (4, 256, 96), "large": (6, 384, 160)}
"""Layers, width, and tokens of an answer at most."""


async def talk(http: httpx.AsyncClient, part: AsyncEpisode, task: Task, talks: list[float] | None = None) -> float:
    """The calls of a member in an episode; returns its reward. Its duration in seconds is appended to `talks`."""
    began = time.perf_counter()
    messages = [{"role": "user", "content": f"Say something about {task.id}"}]
    length = 0
    for _ in range(CALLS):
        answer = await http.post(
            f"{part.base_url}/chat/completions",
            json={"model": part.model, "messages": messages},
            headers={"Authorization": f"Bearer {part.api_key}"},
        )
        message = answer.raise_for_status().json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "Go on."}]
        length += len(message["content"] or "")
    if talks is not None:
        talks.append(time.perf_counter() - began)
    return float(length % 7)


async def apart(
    swarms: Mapping[str, AsyncSwarm], http: httpx.AsyncClient, steps: int, seed: int, talks: list[float] | None = None
) -> float:
    async def agent(task: Task, episode: AsyncEpisode) -> float:
        return await talk(http, episode, task, talks)

    began = time.perf_counter()
    await asyncio.gather(
        *[
            swarm.train(agent, TASKS, steps=steps, concurrency=CONCURRENCY, seed=seed, progress=False)
            for swarm in swarms.values()
        ]
    )
    return time.perf_counter() - began


async def together(team: AsyncTeam, http: httpx.AsyncClient, steps: int, seed: int) -> float:
    async def agent(task: Task, episode: AsyncTeamEpisode) -> dict[str, float]:
        rewards = await asyncio.gather(*[talk(http, part, task) for part in episode.values()])
        return dict(zip(episode, rewards, strict=True))

    began = time.perf_counter()
    await team.train(agent, TASKS, steps=steps, concurrency=CONCURRENCY, seed=seed, progress=False)
    return time.perf_counter() - began


async def measured(
    servers: Mapping[str, tuple[str, str]], rounds: int, steps: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each run, by way, and of each episode apart; `servers` are addresses and tokens."""
    talks: list[float] = []
    seconds: dict[str, list[float]] = {"apart": [], "team": []}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=120, verify=False, trust_env=False))
        swarms = {m: await stack.enter_async_context(AsyncSwarm(*where)) for m, where in servers.items()}
        team = await stack.enter_async_context(AsyncTeam({m: swarm.clone() for m, swarm in swarms.items()}))
        await apart(swarms, http, 1, seed=0)
        await together(team, http, 1, seed=0)
        for number in range(rounds):
            for way in ("apart", "team") if number % 2 == 0 else ("team", "apart"):
                if way == "apart":
                    seconds[way].append(await apart(swarms, http, steps, seed=number, talks=talks))
                else:
                    seconds[way].append(await together(team, http, steps, seed=number))
    return seconds, talks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large", help="of the models and their answers")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6, help="batches of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, raise_on_signals(), ExitStack() as stack:
        folder = Path(name)
        (folder / "settings.toml").write_text(SETTINGS)
        layers, hidden, max_tokens = SIZES[options.size]
        overrides = [
            f"job.max_tokens={max_tokens}",
            f"model.name={json.dumps(str(make_model(folder / 'model', layers=layers, hidden=hidden)))}",
        ]
        children = {
            m: stack.enter_context(ChildServer(folder / "settings.toml", overrides, folder / m)) for m in MEMBERS
        }
        servers = {}
        for member, child in children.items():
            with child.connect() as swarm:
                servers[member] = (swarm.url, (child.data_dir / "token").read_text().strip())
        seconds, talks = asyncio.run(measured(servers, options.rounds, options.steps))
    medians = {way: statistics.median(runs) for way, runs in seconds.items()}
    ratio = medians["team"] / medians["apart"]
    extra = 1000 * (medians["team"] - medians["apart"]) / (options.steps * 16)
    table = Table("way", "median s", "runs")
    for way, runs in seconds.items():
        table.add_row(way, f"{medians[way]:.2f}", " ".join(f"{run:.2f}" for run in runs))
    talk_seconds = statistics.median(talks)
    Console().print(
        table, f"team / apart = {ratio:.3f}; {extra:.1f} ms an episode, which takes {talk_seconds:.2f} s apart"
    )
    print(
        json.dumps(
            {
                "bench": "team",
                "size": options.size,
                "ratio": round(ratio, 4),
                "extra_ms_per_episode": round(extra, 2),
                "episode_seconds_apart": round(talk_seconds, 3),
                "seconds": {way: [round(run, 3) for run in runs] for way, runs in seconds.items()},
                "steps": options.steps,
                "episodes_per_run": options.steps * 16,
                "calls_per_member_and_episode": CALLS,
                "cores": os.cpu_count(),
                "machine": platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
