"""The cost of agents that fail now and then: `python -m bench.flaky`.

A real server on a tiny model learns the same tasks from an agent that raises in a share of its episodes and from one
that never does, in turn. `slowdown` is the median, over pairs, of the ratio of their times for a batch. A batch is
`stalled` if it took at least as long as a lease. `mixed` and `mixed_code` are 0 if the tests pass that no group mixes
tasks, or states of the agent's code.

Prints a table, then one JSON object as the last line. The exit code is 1 if a figure misses its floor.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai

from agentjet.client import Episode, Swarm
from agentjet.types import Task
from bench.machine import bounded, grid, missed_bounds, report, tests_pass
from tests.e2e.server import Server
from tests.tiny import make_model

LEASE_SECONDS = 20.0
SHARES = (0.1, 0.2, 0.3, 0.5)
JUDGED = 0.3  # Share of failures whose slowdown has a floor
AT_MOST = {"slowdown": 1.8, "stalled": 0, "mixed": 0, "mixed_code": 0}
TESTS = {"mixed": "tests/client/test_inputs.py", "mixed_code": "tests/client/test_live_reload.py"}
JOB = {
    "job__batch_size": 4,
    "job__group_size": 4,
    "job__max_tokens": 8,
    "job__lease_seconds": LEASE_SECONDS,
    "sampler__cache_tokens": 16384,
}


class Flaky(Exception):
    """The failure of an agent that fails now and then."""


class Players:
    """Agents of a server. Each asks the model once."""

    def __init__(self, server: Server, llm: openai.OpenAI) -> None:
        self.server, self._llm = server, llm

    def call(self, task: Task, episode: Episode) -> float:
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

    def train(self, agent: Callable[[Task, Episode], float], tasks: Sequence[Task], steps: int) -> dict[str, float]:
        """Trains. Returns the mean seconds of a batch until it was composed, the batches that stalled, and
        the episodes that failed.
        """
        began = time.time()
        with Swarm(self.server.url, token=self.server.token) as swarm:
            report = swarm.train(agent, tasks, steps=steps, concurrency=16, progress=False)
            known = swarm.steps()
        times = dict(zip(known.versions, known.times, strict=True))
        ends = [began, *(times[step.policy_version] for step in report.steps)]
        seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
        stalled = sum(one >= LEASE_SECONDS for one in seconds)
        failed = sum("Flaky" in result.error for result in report.results)
        return {"mean": statistics.mean(seconds or [0.0]), "stalled": stalled, "failed": failed}


def slowdown(players: Players, shares: Sequence[float], steps: int, pairs: int) -> dict[str, Any]:
    """The median slowdown of each share of failures, and the batches of all runs that stalled."""
    tasks = [Task(f"t{number}") for number in range(16)]
    players.train(players.failing(0.0, 0), tasks, 1)  # The first batch compiles and warms caches.
    ratios: dict[float, list[float]] = {share: [] for share in shares}
    rows = {share: {"failed": 0, "stalled": 0} for share in (0.0, *shares)}
    for pair in range(pairs):
        whole = 0.0
        for share in (0.0, *shares):
            found = players.train(players.failing(share, pair), tasks, steps)
            rows[share] = {name: rows[share][name] + int(found[name]) for name in rows[share]}
            whole = whole or found["mean"]
            if share:
                ratios[share].append(found["mean"] / whole)
    figures = {"slowdown": statistics.median, "least": min, "most": max}
    return {
        "slowdown": round(statistics.median(ratios[JUDGED]), 2) if JUDGED in ratios else None,
        "stalled": sum(row["stalled"] for row in rows.values()),
        "shares": {
            f"{share:g}": {**{name: round(of(each), 2) for name, of in figures.items()}, **rows[share]}
            for share, each in ratios.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="batches of each run")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each share")
    parser.add_argument("--quick", action="store_true", help="small sizes, which show that the bench works")
    given = parser.parse_args()
    shares, steps, pairs = ((JUDGED,), 2, 1) if given.quick else (SHARES, given.steps, given.pairs)
    http = openai.DefaultHttpxClient(trust_env=False)
    with tempfile.TemporaryDirectory(prefix="flaky-") as name:
        model = make_model(Path(name) / "model")
        with (
            Server(model, Path(name) / "data", **JOB) as server,
            openai.OpenAI(base_url=server.url, api_key="-", http_client=http) as llm,
        ):
            found = slowdown(Players(server, llm), shares, steps, pairs)
    found |= {key: 0 if tests_pass(path, "-m", "not thorough") else None for key, path in TESTS.items()}
    figures = {key: found[key] for key in AT_MOST}
    report("flaky", found, grid(found["shares"]), bounded(figures, {}, AT_MOST), machine=False)
    return int(bool(missed_bounds(figures, {}, AT_MOST)) or None in figures.values())


if __name__ == "__main__":
    raise SystemExit(main())
