"""Agents that fail now and then, and groups that mix tasks or code: `python -m bench.flaky`.

* **slowdown**: a real server on a tiny model learns the same tasks from an agent that raises in a share of its episodes
  and from one that never does, in turn. The figure is the median, over pairs, of the ratio of their times for a batch.
  A batch is `stalled` if it took at least as long as a lease.
* **mixed**: random task lists with repeated and long ids. A list that repeats an identity, and a generator that repeats
  one with another payload, must be refused. The others train. A group is mixed if its members in the journal have two
  tasks, or if its agents saw two payloads.
* **mixed_code**: see `bench.mixed_code`.

Prints a table, then one JSON object as the last line. The exit code is 1 if a figure misses its floor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

from agentjet.client import Episode, Swarm
from agentjet.types import Task
from bench.mixed_code import mixed_code
from tests.e2e.server import Server
from tests.tiny import make_model

LEASE_SECONDS = 20.0
SHARES = (0.1, 0.2, 0.3, 0.5)
JUDGED = 0.3
"""Share of failures whose slowdown has a floor."""
WORST_SLOWDOWN = 1.8
PARTS = ("slowdown", "mixed", "mixed_code")
JOB = {
    "job__batch_size": 4,
    "job__group_size": 4,
    "job__max_tokens": 8,
    "job__lease_seconds": LEASE_SECONDS,
    "sampler__cache_tokens": 16384,
}
LONG = "x" * 200


class Flaky(Exception):
    """The failure of an agent that fails now and then."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A training run: seconds of each batch, and its episodes that failed."""

    seconds: tuple[float, ...]
    num_failed: int

    @property
    def typical(self) -> float:
        return statistics.mean(self.seconds)

    @property
    def stalled(self) -> int:
        return sum(one >= LEASE_SECONDS for one in self.seconds)


class Players:
    """Agents of a server. Each asks the model once and records the payload of its episode."""

    def __init__(self, server: Server, llm: openai.OpenAI) -> None:
        self.server, self._llm = server, llm
        self.payloads: dict[str, Any] = {}
        """The payload that the agent of each episode saw."""

    def call(self, task: Task, episode: Episode) -> float:
        self.payloads[episode.id] = task.payload
        client = self._llm.with_options(base_url=episode.base_url, api_key=episode.api_key)
        answer = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": f"Say digits. {task.id[-20:]}"}]
        )
        text = answer.choices[0].message.content or ""
        return sum(character.isdigit() for character in text) / max(1, len(text))

    def failing(self, share: float, seed: int) -> Callable[[Task, Episode], float]:
        """An agent that raises after its call in `share` of its episodes."""
        draw, lock = random.Random(seed), threading.Lock()

        def agent(task: Task, episode: Episode) -> float:
            reward = self.call(task, episode)
            with lock:
                fails = draw.random() < share
            if fails:
                raise Flaky("the tool did not answer")
            return reward

        return agent

    def train(self, agent: Callable[[Task, Episode], float], tasks: Iterable[Task], steps: int) -> Timed:
        """Train, and time each batch until the server composed it. Raises `ValueError` for tasks that are refused."""
        began = time.time()
        with Swarm(self.server.url, token=self.server.token) as swarm:
            report = swarm.train(agent, tasks, steps=steps, concurrency=16, progress=False)
            known = swarm.steps()
        times = dict(zip(known.versions, known.times, strict=True))
        ends = [began, *(times[step.policy_version] for step in report.steps)]
        num_failed = sum("Flaky" in result.error for result in report.results)
        return Timed(tuple(later - earlier for earlier, later in itertools.pairwise(ends)), num_failed)


def slowdown(players: Players, shares: Sequence[float], steps: int, pairs: int) -> dict[str, Any]:
    """The median slowdown of each share of failures, and the batches of all runs that stalled."""
    tasks = [Task(f"t{number}") for number in range(16)]
    players.train(players.failing(0.0, 0), tasks, 1)  # The first batch compiles and warms caches.
    ratios: dict[float, list[float]] = {share: [] for share in shares}
    failed: dict[float, int] = dict.fromkeys(shares, 0)
    stalled: dict[float, int] = dict.fromkeys((0.0, *shares), 0)
    for pair in range(pairs):
        whole = players.train(players.failing(0.0, pair), tasks, steps)
        stalled[0.0] += whole.stalled
        for share in shares:
            flaky = players.train(players.failing(share, pair), tasks, steps)
            ratios[share].append(flaky.typical / whole.typical)
            failed[share] += flaky.num_failed
            stalled[share] += flaky.stalled
    return {
        "slowdown": round(statistics.median(ratios[JUDGED]), 2) if JUDGED in ratios else None,
        "stalled": sum(stalled.values()),
        "shares": {
            f"{share:g}": {
                "slowdown": round(statistics.median(each), 2),
                "least": round(min(each), 2),
                "most": round(max(each), 2),
                "failed": failed[share],
                "stalled": stalled[share],
            }
            for share, each in ratios.items()
        },
    }


def random_tasks(draw: random.Random) -> list[Task]:
    """Tasks of which some repeat an identity, some with another payload, and some have ids that begin alike."""
    tasks: list[Task] = []
    for number in range(12):
        task_id = f"{draw.choice(['', LONG, LONG + 'y' * 40])}{draw.randrange(12)}"
        tasks.append(Task(task_id, draw.choice(["", "a"]), payload=draw.choice([0, number])))
    return tasks


def mixed(players: Players, num_lists: int, steps: int) -> dict[str, Any]:
    """Trains on random tasks, as lists and from generators; counts refusals, and groups that mix tasks."""
    refused = wrongly = 0
    for seed in range(num_lists):
        tasks = random_tasks(random.Random(seed))
        first: dict[tuple[str, str], Any] = {}
        for task in tasks:
            first.setdefault((task.task_set, task.id), task.payload)
        is_repeated = len(first) < len(tasks)
        is_other = any(first[task.task_set, task.id] != task.payload for task in tasks)
        again = [Task(task.id, task.task_set, first[task.task_set, task.id]) for task in tasks]
        for given, must_refuse in ((tasks, is_repeated), (iter(tasks), is_other), (iter(again), False)):
            try:
                players.train(players.call, given, steps)
                is_refused = False
            except ValueError:
                is_refused = True
            refused += is_refused
            wrongly += is_refused != must_refuse
    groups = groups_of(players.server.folder / "journal.sqlite", players.payloads)
    return {
        "groups": len(groups),
        "mixed": sum(len(seen) > 1 for seen in groups.values()),
        "refused": refused,
        "wrongly_refused_or_taken": wrongly,
    }


def groups_of(journal: Path, payloads: dict[str, Any]) -> dict[int, set[tuple[str, str, str]]]:
    """The tasks and payloads of the members of each group in a journal, by the number of the group."""
    groups: defaultdict[int, set[tuple[str, str, str]]] = defaultdict(set)
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT id, group_id, task_set, task_id FROM episodes").fetchall()
    for episode, group, task_set, task in rows:
        if episode in payloads:
            groups[group].add((task_set, task, repr(payloads[episode])))
    return dict(groups)


def run(folder: Path, only: Sequence[str], *, steps: int = 8, pairs: int = 5, lists: int = 6) -> dict[str, Any]:
    """The chosen parts on one server."""
    results: dict[str, Any] = {}
    if {"slowdown", "mixed"} & {*only}:
        model = make_model(folder / "model")
        with (
            Server(model, folder / "data", **JOB) as server,
            openai.OpenAI(
                base_url=server.url, api_key="-", http_client=openai.DefaultHttpxClient(trust_env=False)
            ) as llm,
        ):
            players = Players(server, llm)
            if "slowdown" in only:
                results |= slowdown(players, SHARES, steps, pairs)
            if "mixed" in only:
                results |= mixed(players, lists, steps=2)
    if "mixed_code" in only:
        with redirect_stdout(StringIO()):
            results["mixed_code"] = mixed_code(100)["mixed_code"]
    return results


def missed(results: dict[str, Any]) -> list[str]:
    """The figures of `results` that miss their floor."""
    slow = results.get("slowdown")
    zeros = ("stalled", "mixed", "wrongly_refused_or_taken", "mixed_code")
    return [name for name in zeros if results.get(name)] + (["slowdown"] if slow and slow > WORST_SLOWDOWN else [])


def table(results: dict[str, Any]) -> Table:
    grid = Table("episodes that fail", "slowdown", "least", "most", "failed", "stalled")
    for share, row in results["shares"].items():
        grid.add_row(f"{float(share):.0%}", *(str(row[name]) for name in list(row)))
    return grid


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--steps", type=int, default=8, help="batches of each run")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each share")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="flaky-") as folder:
        only = [given.only] if given.only else PARTS
        results = run(Path(folder), only, steps=given.steps, pairs=given.pairs)
    if "shares" in results:
        Console(width=100).print(table(results))
    print(json.dumps({"bench": "flaky", **results}))
    return 1 if missed(results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
