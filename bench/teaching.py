"""Teachers that the server asks, for `bench.recipes`: rewards of a tiny model before and after.

* `endpoint`: `distill` from an own process that serves a trained model as vLLM does. The process is killed twice on the
  way and started again.
* `self`: `opsd` without its limit of a token. The model was prepared to write the letter that it is shown, and any
  letter otherwise. Only the teacher, which is the model itself, is shown the letter of a task. The reward is the share
  of that letter; `shown` is that of the prepared model if it is shown the letter.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from agentjet import Reward, Task
from agentjet.client import AsyncEpisode
from bench.recipes import GROUP_SIZE, GROUPS, TASKS, Player, RecipeServer, Row, rise
from tests.teacher import NAME, Teacher, free_port
from tests.tiny import make_model

LETTERS = "abcd"
SHOWN = [Task(4 * chr(ord("K") + 3 * number), payload=letter) for number, letter in enumerate(LETTERS)]
DEMONSTRATIONS, EPOCHS = 768, 6
Play = Callable[[Task, AsyncEpisode], Awaitable[Reward]]


async def train(
    server: RecipeServer, name: str, recipe: dict[str, Any], tasks: list[Task], steps: int, play: Play
) -> Path:
    """Trains a run with a recipe. Returns the folder of its model."""
    async with server.client() as swarm:
        job = {**(await swarm.job()).job, "recipe": recipe, "optimizer": {"lr": 1e-2}}
        await swarm.start_run(name, job=job)
        async with swarm.of_run(name) as run:
            await run.train(play, tasks, steps=steps, concurrency=GROUPS * GROUP_SIZE, progress=False, code_version="1")
            return Path((await run.export()).path)


async def endpoint(folder: Path, model: Path, steps: int) -> Row:
    """Distils a model that `grpo` trained from an endpoint that is killed twice."""
    server = RecipeServer(folder, model)
    restarts: list[asyncio.Task[None]] = []
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        try:
            trained = await train(server, "grpo", {"name": "grpo"}, TASKS, steps, Player(http).play)
            teacher = Teacher(trained, free_port())
            player = Player(http)

            async def restart() -> None:
                await asyncio.sleep(2)
                await asyncio.to_thread(teacher.start)

            async def play(task: Task, episode: AsyncEpisode) -> Reward:
                reward = await player.play(task, episode)
                if len(player.rewards) in (steps * 3, steps * 5):
                    teacher.kill()
                    restarts.append(asyncio.create_task(restart()))
                return reward

            recipe = {"name": "distill", "teacher": teacher.url, "teacher_model": NAME}
            try:
                await train(server, "endpoint", recipe, TASKS, steps, play)
            finally:
                await asyncio.gather(*restarts)
                teacher.kill()
        finally:
            server.stop()
    return {**rise([part.tolist() for part in np.array_split(player.rewards, steps)]), "kills": len(restarts)}


def demonstrations() -> list[dict[str, Any]]:
    """Half of them show the letter."""
    chance, found = random.Random(0), []
    for number in range(DEMONSTRATIONS):
        letter, task = chance.choice(LETTERS), chance.choice(SHOWN)
        asked = f"{task.id}\n\n{letter}" if number % 2 else task.id
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": 7 * letter}]
        found.append({"messages": messages})
    return found


async def itself(folder: Path, steps: int) -> Row:
    """Distils a model from itself, with the letter of the task in the context of the teacher."""
    server = RecipeServer(folder / "prepared", make_model(folder / "model", hidden=64))
    try:
        async with server.client() as swarm:
            await swarm.start_run("sft", job={**(await swarm.job()).job, "optimizer": {"lr": 5e-3}})
            async with swarm.of_run("sft") as run:
                await run.sft(demonstrations(), epochs=EPOCHS, batch_size=32, progress=False)
                prepared = Path((await run.export()).path)
    finally:
        server.stop()
    rewards = list[float]()
    server = RecipeServer(folder / "taught", prepared)
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:

        async def play(task: Task, episode: AsyncEpisode, hint: str = "") -> Reward:
            answer = await http.post(
                f"{episode.base_url}/chat/completions",
                json={"model": episode.model, "messages": [{"role": "user", "content": task.id + hint}]},
                headers={"Authorization": f"Bearer {episode.api_key}"},
            )
            text = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
            reward = text.count(task.payload) / max(7, len(text))
            rewards.append(reward)
            return Reward(reward, text=task.payload)

        async def shown(task: Task, episode: AsyncEpisode) -> Reward:
            return await play(task, episode, f"\n\n{task.payload}")

        try:
            async with server.client() as swarm:
                await swarm.evaluate(shown, SHOWN, repeats=4, progress=False)
            with_letter, rewards = sum(rewards) / len(rewards), []
            recipe = {
                "name": "opsd",
                "template": "{text}",
                "top_k": 16,
                "loss": {"name": "distill_top_k", "beta": 0.0, "token_clip": 0.0},
            }
            await train(server, "self", recipe, SHOWN, steps, play)
        finally:
            server.stop()
    found = rise([part.tolist() for part in np.array_split(rewards, steps)])
    return {**found, "shown": round(with_letter, 4)}


async def measured(folder: Path, steps: int) -> dict[str, Row]:
    return {
        "endpoint": await endpoint(folder / "endpoint", make_model(folder / "model"), steps),
        "self": await itself(folder / "self", 6 * steps),
    }
