"""Starts a server, plays the held-out tasks, trains, and plays them again; `result.json` keeps the figures.

    python -m examples.household_game.train --out household-game

The server is a child of this process, on a free loopback port, and ends with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from agentjet import Swarm, environments
from agentjet.cli.serve import ChildServer
from agentjet.client import wilson_interval
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from agentjet.environments import Environment

SETTINGS = Path(__file__).with_name("job.toml")
GAME = "examples.household_game.house/Household"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    overrides = [f"job.seed={options.seed}", *options.set]
    job = load_config(SETTINGS, overrides).job
    started = time.monotonic()
    server_dir = options.out / "server"
    if server_dir.exists():
        raise SystemExit(f"{server_dir} is there already: give another folder with --out, or remove it")
    with (
        raise_on_signals(),
        environments.load(GAME, processes=options.processes) as game,
        ChildServer(SETTINGS, overrides, server_dir) as server,
        server.connect() as swarm,
    ):
        print(f"the server is ready; its log is {server.log}", flush=True)
        before = score(swarm, game, options.tasks)
        print(f"before: {before['success']:.1%} of {before['tasks']} held-out tasks", flush=True)
        report = swarm.train(
            game.agent, game.tasks, steps=job.max_steps, concurrency=options.processes, seed=options.seed
        )
        after = score(swarm, game, options.tasks)
        print(f"after {job.max_steps} batches: {after['success']:.1%}", flush=True)
        shutil.move(swarm.export().path, options.out / "model")
    result = {
        "before": before["success"],
        "after": after["success"],
        "seconds": round(time.monotonic() - started, 1),
        "training_seconds": round(report.seconds, 1),
        "seed": options.seed,
        "held_out": {"before": before, "after": after},
        "batches": len(report.steps),
        "episodes": len(report.finished),
        "aborted": report.num_aborted + report.num_expired,
        "rewards": [round(reward, 4) for reward in report.rewards],
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['seconds']:.0f} s in all; the figures are in {options.out / 'result.json'}")
    return result


def score(swarm: Swarm, game: Environment, tasks: int) -> dict[str, Any]:
    """Share of the held-out tasks that are solved, played once each, with Wilson's 95 % interval."""
    report = swarm.evaluate(game.agent, game.held_out[:tasks], concurrency=game.kind.processes)
    if report.num_aborted or report.num_expired:
        raise SystemExit(f"not every task could be played: {report.errors}")
    count, success = len(report.finished), report.mean_metric("success")
    return {
        "tasks": count,
        "success": round(success, 4),
        "interval": [round(bound, 4) for bound in wilson_interval(success * count, count)],
        "reward": round(report.mean_reward, 4),
        "turns": round(report.mean_metric("turns"), 2),
        "seconds": round(report.seconds, 1),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("household-game"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' order, the sampling and the learner")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks of each evaluation")
    parser.add_argument("--processes", type=int, default=24, help="episodes that are played at the same time")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
