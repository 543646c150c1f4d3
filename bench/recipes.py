"""Every registered recipe learns, and replays after a kill: `python -m bench.recipes`.

A tiny model learns in a run of one real server for each recipe. The reward of a run is the share of letters and digits
in the answers of two turns. Then the server is killed (SIGKILL, without a checkpoint on the disk): the started server
learns every batch of each journal again.

The last line is one JSON object: `recipes` is the number of recipes, `learned` the number of those whose reward rose by
more than its 95% interval, `replay_equal` is true if each policy had the same bits after the replay. Without `--only`
it also has the figures of `bench/whole_batch.py` and `bench/short_runs.py`, and `teachers`, those of
`bench/teaching.py`; `--only` without a name has nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import load_file

from agentjet import AsyncSwarm, Reward, Task
from agentjet.cli.serve import ChildServer
from agentjet.client import AsyncEpisode
from agentjet.errors import AgentJetError
from agentjet.recipes import registry
from agentjet.recipes.recipe import Recipe
from agentjet.recipes.registry import make_recipe
from bench import short_runs, whole_batch
from bench.machine import bounded, grid, report
from bench.short_runs import share
from tests.tiny import make_model

Row = dict[str, Any]  # Figures of a recipe
TEACHER = "TEACHER"  # In parameters: the folder of a model that earns more reward
PARAMETERS: dict[str, dict[str, Any]] = {
    "distill": {"teacher": TEACHER},
    "distill_top_k": {"teacher": TEACHER},
    "kdrl": {"teacher": TEACHER, "beta": 0.1},
    # This world has no words that help its model, so the teacher is a better model, which sees what the policy sees.
    "opsd": {"teacher": TEACHER, "template": ""},
    "sdft": {"teacher": TEACHER, "template": ""},
    "sdpo": {"teacher": TEACHER, "top_of": "teacher", "solution_template": "", "feedback_template": ""},
    "pass_rate": {"retest": 1},  # The world has few tasks, which are all passed or failed at some time.
    "rapo_pruning": {"retest": 1},
    "rft": {"threshold": 0.5},  # The world's rewards are shares: few episodes reach 1.
    "staged": {"stages": ["early", "late"], "ends": [8]},
    "vapo": {"warm_up": 2, "alpha": 1.0},  # Answers have few tokens.
}
"""By recipe, where its defaults are for other rewards or lengths than those of this world."""
LONGER = {"digirl": 3}
"""How many times the batches of the other recipes a served run has: its critic of single steps must learn first."""
Z = 1.96  # Half the width of the interval, in standard errors: 95%


def settings(name: str, teacher: Path | None) -> dict[str, Any]:
    """Returns the section `[job.recipe]` of a recipe in this world."""
    own = {key: str(teacher) if value == TEACHER else value for key, value in PARAMETERS.get(name, {}).items()}
    return {"name": name, **own}


def rise(batches: Sequence[Sequence[float]]) -> Row:
    """Returns the mean reward of the first and of the last quarter of the batches, the interval's half-width of the
    difference, and whether the difference is larger.
    """
    count = max(1, round(len(batches) / 4))
    first, last = (np.concatenate([np.asarray(b, float) for b in part]) for part in (batches[:count], batches[-count:]))
    error = np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    means = {"first": float(first.mean()), "last": float(last.mean()), "interval": float(Z * error)}
    rounded = {name: round(value, 4) for name, value in means.items()}
    return {**rounded, "learned": means["last"] - means["first"] > means["interval"]}


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
LABELLED = [
    {"prompt": task.id, "completion": answer, "label": answer.isalnum()}
    for task in TASKS
    for answer in ("abcdefg", "#%&*+-/")
]
SECONDS = 600.0  # Maximum of the replay of all runs


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that was trained."""

    rewards: list[list[float]]
    export: Path
    weights: str
    seconds: float


def run_name(recipe: str) -> str:
    return recipe.replace("_", "-")


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
        model = {"name": str(self._model), "device": "cpu", "dtype": "float32", "threads": 1}
        job = {"batch_size": GROUPS, "group_size": GROUP_SIZE, "max_tokens": 8, "checkpoint_every": 0}
        made = {
            f"{section}.{key}": value for section, of in (("model", model), ("job", job)) for key, value in of.items()
        }
        settings = [f"{name}={json.dumps(value)}" for name, value in {**made, "sampler.cache_tokens": 4096}.items()]
        server = ChildServer(None, settings, self._folder)
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
                made = make_recipe(settings(recipe, teacher))
                if made.only_given:
                    rewards = await shown(run, player, steps, made)
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


async def shown(run: AsyncSwarm, player: Player, steps: int, recipe: Recipe) -> list[list[float]]:
    """Trains on demonstrations. Returns the rewards of evaluations before and after."""
    lines = LABELLED if recipe.takes_given == "scored" else DEMONSTRATIONS
    rewards: list[list[float]] = []
    for epochs in (steps, 0):
        await run.evaluate(player.play, TASKS, repeats=4, concurrency=GROUPS * GROUP_SIZE, progress=False)
        rewards.append(player.rewards)
        player.rewards = []
        if epochs:
            await run.sft(lines, epochs=epochs, batch_size=len(lines), progress=False, recipe=recipe.name)
    return rewards


def digest(export: Path) -> str:
    """Returns a digest of the bits of all weights of an exported model."""
    weights = load_file(export / "model.safetensors")
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].tobytes())
    return found.hexdigest()


async def in_runs(names: list[str], steps: int, folder: Path, model: Path) -> dict[str, Row]:
    """Trains a run for each recipe, kills the server, and compares the weights after the replay.

    The model of the first recipe is the teacher of the others.
    """

    def batches(name: str) -> int:
        return steps * LONGER.get(name, 1)

    server, rows, weights = RecipeServer(folder, model), dict[str, Row](), dict[str, str]()
    teacher: Path | None = None
    try:
        for name in names:
            try:
                trained = await server.train(name, batches(name), teacher)
            except AgentJetError as error:
                rows[name] = {"learned": False, "equal": False, "failed": str(error)}
            else:
                rows[name] = {**rise(trained.rewards), "seconds": round(trained.seconds, 1)}
                weights[name] = trained.weights
                teacher = teacher or trained.export
            print(f"served: {name} {json.dumps(rows[name])}", file=sys.stderr, flush=True)
        server.kill_and_start()
        replayed = await server.replayed({name: batches(name) for name in weights})
    finally:
        server.stop()
    for name, before in weights.items():
        rows[name]["equal"] = replayed[name] == before
        if len(replayed[name]) != len(before):
            rows[name]["failed"] = replayed[name]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="*", default=None, help="these recipes; default: all")
    parser.add_argument("--steps", type=int, default=16, help="batches of each run")
    options = parser.parse_args()
    names = sorted({*registry.built_in(), *registry.installed()}) if options.only is None else options.only
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        names.sort(key=lambda name: name != "grpo")
        rows = asyncio.run(in_runs(names, options.steps, Path(folder), model)) if names else {}
    failed = [name for name, row in rows.items() if not row["learned"]]
    verdict = {
        "recipes": len(rows),
        "learned": len(rows) - len(failed),
        "not_learned": failed,
        "replay_equal": all(row["equal"] for row in rows.values()),
    }
    columns = ("first", "last", "interval", "learned", "equal", "seconds", "failed")
    tables = [grid(rows, *columns)] if rows else []
    if not options.only:
        from bench import teaching  # It uses the server of this module.

        with tempfile.TemporaryDirectory() as folder:
            teachers = asyncio.run(teaching.measured(Path(folder), options.steps))
        print(f"teachers: {json.dumps(teachers)}", file=sys.stderr, flush=True)
        failed += [name for name, row in teachers.items() if not row["learned"]]
        found, more = whole_batch.measured()
        verdict |= {**found, **short_runs.measured(), "teachers": teachers}
        tables.append(grid(teachers, *columns[:4], "kills", "shown", title="teachers that the server asks"))
        tables += [*more, bounded(found, {}, whole_batch.MOST)]
    report("recipes", {**verdict, "served": rows}, *tables, machine=False)
    return int(bool(failed) or not verdict["replay_equal"])


if __name__ == "__main__":
    raise SystemExit(main())
