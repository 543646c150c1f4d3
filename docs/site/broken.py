"""Two runs that are broken on purpose, for the pictures of `docs/first-run.md`."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentjet import Episode, Reward, Swarm, Task
from agentjet.cli.serve import ChildServer
from examples.arithmetic.agent import agent, training_tasks

STEPS = 10
JOB = {"batch_size": 4, "group_size": 4, "max_tokens": 12, "seed": 7, "lease_seconds": 10, "optimizer.lr": 3e-5}


def fails(episode: Episode, share: float) -> bool:
    """True for this share of all episodes."""
    return random.Random(zlib.crc32(episode.id.encode())).random() < share


def always_zero(task: Task, episode: Episode) -> Reward:
    """Every answer has the same reward, so that groups have nothing to compare."""
    agent(task, episode)
    return Reward(0.0)


def often_fails(task: Task, episode: Episode) -> Reward:
    """A tool fails in two episodes of five."""
    reward = agent(task, episode)
    if fails(episode, 0.4):
        raise ConnectionError("the search tool refused the connection")
    return reward


@dataclass(frozen=True)
class Broken:
    """A run whose agent has a mistake."""

    name: str
    agent: Callable[[Task, Episode], Reward]


RUNS = (Broken("equal", always_zero), Broken("failing", often_fails))


@contextmanager
def broken(run: Broken, folder: Path) -> Iterator[Swarm]:
    """Trains such a run for `STEPS` batches in a new folder, and serves it."""
    overrides = [f"job.{name}={value}" for name, value in JOB.items()]
    with ChildServer(None, overrides, folder) as server, server.connect() as swarm:
        token = (folder / "token").read_text().strip()
        with Swarm(server.url, token, client_id="agent-host") as client:  # By default its name has that of the machine.
            client.train(run.agent, training_tasks(), steps=STEPS, concurrency=16, seed=7, progress=False)
        yield swarm
        server.stop()
