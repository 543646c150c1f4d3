"""Every recipe trains a run of one real server on a tiny model. Then the server is killed, and all runs replay.

The reward is the share of letters and digits in the answers of two turns. Each recipe has a run, one after the other.
The kill is SIGKILL, without a checkpoint on the disk: the started server learns every batch of each journal again, and
each policy must have the weights from before the kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import load_file

from agentjet import AsyncSwarm, Reward, Task
from agentjet.cli.serve import ChildServer
from agentjet.client import AsyncEpisode
from bench.learning.chosen import chosen, settings

TURNS, GROUPS, GROUP_SIZE = 2, 2, 4
TASKS = [Task(f"word {number}", task_set=("early", "late")[number % 2]) for number in range(2 * GROUPS)]
DEMONSTRATIONS = [
    {
        "messages": [
            {"role": "user", "content": task.id},
            {"role": "assistant", "content": "abcdefg"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "hijklmn"},
        ]
    }
    for task in TASKS
]
SECONDS = 600.0
"""Maximum of the replay of all runs."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that was trained."""

    rewards: list[list[float]]
    export: Path
    weights: str
    seconds: float


def run_name(recipe: str) -> str:
    return recipe.replace("_", "-")


def overrides(model: Path) -> list[str]:
    chosen: dict[str, Any] = {
        "model.name": str(model),
        "model.device": "cpu",
        "model.dtype": "float32",
        "model.threads": 1,
        "sampler.cache_tokens": 4096,
        "job.batch_size": GROUPS,
        "job.group_size": GROUP_SIZE,
        "job.max_tokens": 8,
        "job.checkpoint_every": 0,
    }
    return [f"{name}={json.dumps(value)}" for name, value in chosen.items()]


def share(text: str) -> float:
    """Returns the share of letters and digits."""
    return sum(one.isascii() and one.isalnum() for one in text) / len(text) if text else 0.0


class Player:
    """The agent of all runs. It records the rewards of a run."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.rewards: list[float] = []

    async def play(self, task: Task, episode: AsyncEpisode) -> Reward:
        messages = [{"role": "user", "content": task.id}]
        turns: list[float] = []
        for _ in range(TURNS):
            answer = await self._http.post(
                f"{episode.base_url}/chat/completions",
                json={"model": episode.model, "messages": messages},
                headers={"Authorization": f"Bearer {episode.api_key}"},
            )
            if answer.status_code == 400 and "turn_limit" in answer.text:
                break
            message = answer.raise_for_status().json()["choices"][0]["message"]
            turns.append(share(message["content"] or ""))
            messages += [message, {"role": "user", "content": "more"}]
        reward = sum(turns) / len(turns)
        self.rewards.append(reward)
        return Reward(reward, by_turn=turns, metrics={"env_seconds": 1.0 + len(self.rewards) % 3})


class RecipeServer:
    """The server of all runs on a folder. It can be killed and started again."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self._server = self._start()

    def _start(self) -> ChildServer:
        server = ChildServer(None, overrides(self._model), self._folder)
        server.connect().close()
        return server

    def client(self) -> AsyncSwarm:
        return AsyncSwarm(self._server.url, (self._folder / "admin-token").read_text().strip())

    def kill_and_start(self) -> None:
        os.kill(self._server._process.pid, signal.SIGKILL)
        self._server._process.communicate()
        self._server = self._start()

    def stop(self) -> None:
        self._server.stop()

    async def train(self, recipe: str, steps: int, teacher: Path | None) -> Trained:
        """Creates the run of a recipe and trains it. Raises `AgentJetError` if it cannot be trained."""
        began = time.monotonic()
        async with self.client() as swarm, httpx.AsyncClient(timeout=120, trust_env=False) as http:
            job = {**(await swarm.job()).job, "recipe": settings(recipe, teacher), "optimizer": {"lr": 1e-2}}
            await swarm.start_run(run_name(recipe), job=job)
            player = Player(http)
            async with swarm.of_run(run_name(recipe)) as run:
                if chosen(recipe, teacher).only_given:
                    rewards = await shown(run, player, steps)
                else:
                    rewards = await played(run, player, steps)
                export = Path((await run.export()).path)
        return Trained(rewards, export, digest(export), time.monotonic() - began)

    async def replayed(self, steps: Mapping[str, int]) -> dict[str, str]:
        """Returns the weights of runs after a start, once they have learned all batches again: `steps` by recipe."""
        found: dict[str, str] = {}
        deadline = time.monotonic() + SECONDS
        async with self.client() as swarm:
            while missing := [name for name in steps if name not in found]:
                views = {view.name: view for view in await swarm.runs()}
                for name in missing:
                    view = views[run_name(name)]
                    if view.state == "failed" or time.monotonic() > deadline:
                        found[name] = f"{view.state}: {view.reason}"
                    elif view.state == "sampling" and view.policy_version == steps[name]:
                        async with swarm.of_run(run_name(name)) as run:
                            found[name] = digest(Path((await run.export()).path))
        return found


async def played(run: AsyncSwarm, player: Player, steps: int) -> list[list[float]]:
    """Trains on episodes. Returns the rewards in the order of the ends of episodes, in equal parts."""
    places = GROUPS * GROUP_SIZE
    await run.train(player.play, TASKS, steps=steps, concurrency=places, progress=False, code_version="1")
    return [part.tolist() for part in np.array_split(player.rewards, steps)]


async def shown(run: AsyncSwarm, player: Player, steps: int) -> list[list[float]]:
    """Trains on demonstrations. Returns the rewards of evaluations before and after."""
    rewards: list[list[float]] = []
    for epochs in (steps, 0):
        await run.evaluate(player.play, TASKS, repeats=4, concurrency=GROUPS * GROUP_SIZE, progress=False)
        rewards.append(player.rewards)
        player.rewards = []
        if epochs:
            await run.sft(DEMONSTRATIONS, epochs=epochs, batch_size=len(DEMONSTRATIONS), progress=False)
    return rewards


def digest(export: Path) -> str:
    """Returns a digest of the bits of all weights of an exported model."""
    weights = load_file(export / "model.safetensors")
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].tobytes())
    return found.hexdigest()
