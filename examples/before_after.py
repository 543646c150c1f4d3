"""The frame of examples that are measured: held-out tasks, training, the held-out tasks again.

`train` starts a server as a child of this process, on a free loopback port, and keeps the figures in `result.json`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentjet import Swarm, Task
from agentjet.cli.serve import ChildServer
from agentjet.client import wilson_interval
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config


def options_of(
    description: str | None, out: str, num_held_out: int, concurrency: int, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The options of a run, with an example's own defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' order, the sampling and the learner")
    parser.add_argument("--tasks", type=int, default=num_held_out, help="held-out tasks of each evaluation")
    parser.add_argument("--concurrency", type=int, default=concurrency, help="episodes at the same time")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    options = parser.parse_args(arguments)
    if (options.out / "server").exists():
        parser.error(f"{options.out} is there already: give another folder with --out, or remove it")
    return options


def train(
    options: argparse.Namespace,
    settings: Path,
    agent: Any,
    tasks: Iterable[Task],
    held_out: Sequence[Task],
    *,
    success: str = "",
) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`. `success` is the metric that is 1 for a solved task and 0
    for another, by default the reward."""
    started = time.monotonic()
    overrides = [f"job.seed={options.seed}", *options.set]
    job = load_config(settings, overrides).job
    held_out = held_out[: options.tasks]

    def score() -> dict[str, Any]:
        return figures(swarm, agent, held_out, options.concurrency, success)

    with (
        raise_on_signals(),
        ChildServer(settings, overrides, options.out / "server") as server,
        server.connect() as swarm,
    ):
        print(f"the server is ready; its log is {server.log}", flush=True)
        before = score()
        print(f"before: {before['success']:.1%} of {len(held_out)} held-out tasks", flush=True)
        concurrency = min(options.concurrency, job.batch_size * job.group_size)
        report = swarm.train(agent, tasks, steps=job.max_steps, concurrency=concurrency, seed=options.seed)
        after = score()
        print(f"after {job.max_steps} batches: {after['success']:.1%}", flush=True)
        shutil.move(swarm.export().path, options.out / "model")
    result = {
        "before": before,
        "after": after,
        "seconds": round(time.monotonic() - started, 1),
        "training_seconds": round(report.seconds, 1),
        "seed": options.seed,
        "batches": len(report.steps),
        "episodes": len(report.finished),
        "aborted": report.num_aborted + report.num_expired,
        "rewards": [round(reward, 4) for reward in report.rewards],
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{result['seconds']:.0f} s in all; the figures are in {options.out / 'result.json'}")
    return result


def figures(swarm: Swarm, agent: Any, held_out: Sequence[Task], concurrency: int, success: str) -> dict[str, Any]:
    """Each task once: the share that is solved, with Wilson's 95 % interval, and the means of reward and metrics."""
    report = swarm.evaluate(agent, held_out, concurrency=concurrency)
    if report.num_aborted or report.num_expired:
        raise SystemExit(f"not every task could be played: {report.errors}")
    share = report.mean_metric(success) if success else report.mean_reward
    return {
        "tasks": len(held_out),
        "success": round(share, 4),
        "interval": [round(bound, 4) for bound in wilson_interval(share * len(held_out), len(held_out))],
        "reward": round(report.mean_reward, 4),
        **{name: round(report.mean_metric(name), 4) for name in report.metrics},
        "seconds": round(report.seconds, 1),
    }
