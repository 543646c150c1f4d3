"""Starts a server, asks the held-out questions, trains, and asks them again; `result.json` keeps the figures.

    python -m examples.calculator_tool.train --out calculator-tool

The server is a child of this process, on a free loopback port, and ends with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from agentjet import Swarm
from agentjet.cli.serve import ChildServer
from agentjet.client import TrainReport, wilson_interval
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from examples.calculator_tool.agent import NUM_HELD_OUT, Agent, held_out_tasks, training_tasks

SETTINGS = Path(__file__).with_name("job.toml")
CONCURRENCY = 96


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    overrides = [f"job.seed={options.seed}", *options.set]
    job = load_config(SETTINGS, overrides).job
    started = time.monotonic()
    server_dir = options.out / "server"
    if server_dir.exists():
        raise SystemExit(f"{server_dir} is there already: give another folder with --out, or remove it")
    with raise_on_signals(), ChildServer(SETTINGS, overrides, server_dir) as server, server.connect() as swarm:
        print(f"the server is ready; its log is {server.log}", flush=True)
        before = score(swarm, options.tasks, options.seed)
        print(f"before: {before['success']:.1%} of {options.tasks} held-out questions", flush=True)
        concurrency = min(CONCURRENCY, job.batch_size * job.group_size)
        report = swarm.train(Agent(), training_tasks(), steps=job.max_steps, concurrency=concurrency, seed=options.seed)
        after = score(swarm, options.tasks, options.seed)
        print(f"after {job.max_steps} batches: {after['success']:.1%}", flush=True)
        shutil.move(swarm.export().path, options.out / "model")
        result = summary(report, before, after, seed=options.seed, seconds=time.monotonic() - started)
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['seconds']:.0f} s in all; the figures are in {options.out / 'result.json'}")
    return result


def score(swarm: Swarm, tasks: int, seed: int) -> dict[str, Any]:
    """Shares of the held-out questions, asked once each, with Wilson's 95 % intervals."""
    report = swarm.evaluate(Agent(seed=seed), held_out_tasks(tasks), concurrency=CONCURRENCY)
    if report.num_aborted or report.num_expired:
        raise SystemExit(f"not every question could be asked: {report.errors}")
    shares = {"success": report.mean_reward, **{key: report.mean_metric(key) for key in ("called", "expression")}}
    figures: dict[str, Any] = {"tasks": tasks, "seconds": round(report.seconds, 1)}
    for key, share in shares.items():
        figures[key] = round(share, 4)
        figures[f"{key}_interval"] = [round(bound, 4) for bound in wilson_interval(share * tasks, tasks)]
    return figures


def summary(
    report: TrainReport, before: dict[str, Any], after: dict[str, Any], *, seed: int, seconds: float
) -> dict[str, Any]:
    """The content of `result.json`."""
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "training_seconds": round(report.seconds, 1),
        "before": before,
        "after": after,
        "batches": len(report.steps),
        "episodes": len(report.finished),
        "aborted": report.num_aborted + report.num_expired,
        "rewards": [round(reward, 4) for reward in report.rewards],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("calculator-tool"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' order, the sampling and the learner")
    parser.add_argument("--tasks", type=int, default=NUM_HELD_OUT, help="held-out questions of each evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
