"""The learning of a run with 1 front and with 3, from the same seeds and tasks: `python -m bench.same_learning`.

Real servers with two ranks each, on a tiny model. Replicas have no model: each token is a function of its context, the
seed of its request and the policy version (`tests/cluster/fake_replica.py`). With `max_staleness = 0` the version of
each token is fixed, too. So the rewards, which are functions of the answers, and the learned weights must be equal.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from agentjet.cli.serve import ChildServer
from bench.breaking.reference import WEIGHTS, make_model
from bench.machine import grid, report
from bench.scaling.faults import make_sampler_python
from bench.wire import Connection, ask

BATCHES, GROUPS, GROUP_SIZE = 6, 4, 4


@dataclass(frozen=True, slots=True)
class Learned:
    """The rewards of each batch, and the weights after the last one."""

    rewards: list[list[float]]
    weights: bytes

    def intervals(self) -> list[tuple[float, float]]:
        """Returns the 95 % interval of each batch's mean reward."""
        middles = [(fmean(one), 1.96 * stdev(one) / math.sqrt(len(one))) for one in self.rewards]
        return [(mean - half, mean + half) for mean, half in middles]


def learn(folder: Path, fronts: int) -> Learned:
    """A real server with two ranks and replicas whose tokens are functions of context, seed and version, learns
    batches of always the same tasks and seeds. No token is older than the policy (`max_staleness` is 0).
    """
    folder.mkdir()
    make_model(folder / "model")
    settings = {
        "model": {"name": folder / "model", "device": "cpu", "dtype": "float32", "threads": 1},
        "compute": {"backend": "cluster", "ranks": 2, "samplers": 2, "sampler_python": make_sampler_python(folder)},
        "sampler": {"max_concurrent": 8, "cache_tokens": 8192},
        "server": {"fronts": fronts},
        "job": {"batch_size": GROUPS, "group_size": GROUP_SIZE, "max_staleness": 0, "max_tokens": 64},
    }
    overrides = [f"{section}.{name}={value}" for section, own in settings.items() for name, value in own.items()]
    server = ChildServer(None, [*overrides, "job.optimizer.lr=1e-3"], folder / "data")
    try:
        server.connect().close()
        token = (server.data_dir / "admin-token").read_text().strip()
        rewards = [asyncio.run(learn_batch(server.url, token, number)) for number in range(BATCHES)]
        exported = ask("POST", f"{server.url}/swarm/v1/exports", token, {"policy": ""})["path"]
        return Learned(rewards, (Path(exported) / WEIGHTS).read_bytes())
    finally:
        server.stop()


async def learn_batch(url: str, token: str, number: int) -> list[float]:
    """Plays the episodes of a batch and waits until they are learned; returns their rewards.

    The order of begins and finishes is that of the batch. Calls come at once.
    """
    control = Connection(url)
    begins = [{"task_id": f"task-{number}-{i // GROUP_SIZE}", "client_id": "bench"} for i in range(GROUPS * GROUP_SIZE)]
    begun = [(await control.request("POST", "/swarm/v1/episodes", token, body)).json() for body in begins]
    rewards = await asyncio.gather(*(play_seeded(one, 1000 * number + i) for i, one in enumerate(begun)))
    for one, reward in zip(begun, rewards, strict=True):
        path = f"/swarm/v1/episodes/{one['episode_id']}/finish"
        (await control.request("POST", path, token, {"reward": reward})).json()
    while (await control.request("GET", "/swarm/v1/status", token)).json()["policy_version"] <= number:
        await asyncio.sleep(0.05)
    control.close()
    return list(rewards)


async def play_seeded(begun: Mapping[str, str], seed: int) -> float:
    """Plays two calls of an episode; returns the share of ASCII in its answers as its reward."""
    connection, messages = Connection(begun["base_url"]), list[dict[str, str]]()
    for turn in range(2):
        messages.append({"role": "user", "content": f"number {seed}, turn {turn}"})
        body = {"model": "policy", "messages": messages, "max_tokens": 16, "seed": 2 * seed + turn, "stream": turn > 0}
        reply = await connection.request("POST", "/v1/chat/completions", begun["api_key"], body)
        messages.append({"role": "assistant", "content": reply.text()})
    connection.close()
    answers = "".join(one["content"] for one in messages if one["role"] == "assistant")
    return sum(map(str.isascii, answers)) / len(answers)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        one, three = (learn(Path(folder).resolve() / f"fronts-{fronts}", fronts) for fronts in (1, 3))
    intervals = list(zip(one.intervals(), three.intervals(), strict=True))
    rows = {
        f"batch {number}": {"mean, 1 front": fmean(one.rewards[number]), "95 %": first}
        | {"mean, 3 fronts": fmean(three.rewards[number]), "95 % ": second}
        for number, (first, second) in enumerate(intervals)
    }
    figures = {
        "same_learning": all(first[0] <= second[1] and second[0] <= first[1] for first, second in intervals),
        "equal_rewards": one.rewards == three.rewards,
        "equal_weights": one.weights == three.weights,
    }
    report("same_learning", figures, grid(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
