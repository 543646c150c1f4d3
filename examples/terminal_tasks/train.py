"""Starts a server, plays the held-out tasks, trains, and plays them again; `result.json` keeps the figures.

    python -m examples.terminal_tasks.train --out terminal-tasks

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
from examples.terminal_tasks.make_tasks import NUM_HELD_OUT, make

SETTINGS = Path(__file__).with_name("job.toml")
CONCURRENCY = 16
"""Episodes at the same time, each in a process."""
PROMPT = """\
Sort the lines of a.txt.
Delete b.txt.
Copy c.txt to d.txt.
["sort -o a.txt a.txt", "rm b.txt", "cp c.txt d.txt"]

Replace x with y in e.txt.
Rename f.txt to g.txt.
Delete h.txt.
["sed -i s/x/y/ e.txt", "mv f.txt g.txt", "rm h.txt"]"""
"""Two solved tasks: without them the model often repeats one command."""
SETTINGS_OF_TASKS = {"max_turns": 1, "commands_each_turn": 3, "shows_commands": False, "system_prompt": PROMPT}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    overrides = [f"job.seed={options.seed}", *options.set]
    steps = load_config(SETTINGS, overrides).job.max_steps
    started = time.monotonic()
    server_dir, tasks = options.out / "server", options.out / "tasks"
    if server_dir.exists():
        raise SystemExit(f"{server_dir} is there already: give another folder with --out, or remove it")
    make(tasks, num_held_out=options.tasks)
    with (
        raise_on_signals(),
        ChildServer(SETTINGS, overrides, server_dir) as server,
        server.connect() as swarm,
        environments.load(f"harbor:{tasks}", processes=options.concurrency, **SETTINGS_OF_TASKS) as terminal,
    ):
        print(f"the server is ready; its log is {server.log}", flush=True)
        before = score(swarm, terminal, options.concurrency)
        print(f"before: {before['solved']:.1%} of {options.tasks} held-out tasks", flush=True)
        report = swarm.train(
            terminal.agent, terminal.tasks, steps=steps, concurrency=options.concurrency, seed=options.seed
        )
        after = score(swarm, terminal, options.concurrency)
        print(f"after {steps} batches: {after['solved']:.1%}", flush=True)
        shutil.move(swarm.export().path, options.out / "model")
        result = {
            "before": before["solved"],
            "after": after["solved"],
            "seconds": round(time.monotonic() - started, 1),
            "training_seconds": round(report.seconds, 1),
            "held_out": {"before": before, "after": after},
            "episodes": len(report.finished),
            "aborted": report.num_aborted + report.num_expired,
            "rewards": [round(reward, 4) for reward in report.rewards],
        }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return result


def score(swarm: Swarm, terminal: environments.Environment, concurrency: int) -> dict[str, Any]:
    """The share of the held-out tasks that is solved, played once each, with Wilson's 95 % interval."""
    report = swarm.evaluate(terminal.agent, terminal.held_out, concurrency=concurrency)
    if report.num_aborted or report.num_expired:
        raise SystemExit(f"not every task could be played: {report.errors}")
    num_tasks, solved = len(terminal.held_out), report.mean_metric("solved")
    return {
        "tasks": num_tasks,
        "seconds": round(report.seconds, 1),
        "reward": round(report.mean_reward, 4),
        "solved": round(solved, 4),
        "solved_interval": [round(bound, 4) for bound in wilson_interval(solved * num_tasks, num_tasks)],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("terminal-tasks"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' order, the sampling and the learner")
    parser.add_argument("--tasks", type=int, default=NUM_HELD_OUT, help="held-out tasks of each evaluation")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="episodes at the same time")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
