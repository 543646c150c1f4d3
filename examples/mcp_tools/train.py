"""Starts a server, asks the held-out questions, trains, and asks them again; `result.json` keeps the figures.

    python -m examples.mcp_tools.train --out mcp-tools

The last line of the output is the result as JSON. The MCP server is `server.py` beside this file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentjet import Swarm, Task, environments
from agentjet.cli.serve import ChildServer
from agentjet.client import wilson_interval
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from agentjet.environments import Environment
from examples.mcp_tools import tasks

SETTINGS = Path(__file__).with_name("job.toml")
SERVER = Path(__file__).with_name("server.py")


def load(task_file: Path) -> Environment:
    """The shop. Its servers keep no state, so a process keeps its server for the next episode."""
    return environments.load(
        f"mcp:python {SERVER}",
        task_set="shop",
        task_file=task_file,
        reward="contains",
        tool_choice="required",
        strict=True,
        shared=True,
        max_turns=2,
        max_tokens=40,
        processes=16,
    )


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
        ChildServer(SETTINGS, overrides, server_dir) as server,
        load(tasks.write(options.out / "tasks.jsonl")) as shop,
        server.connect() as swarm,
    ):
        held_out = shop.held_out[: options.tasks]
        before = score(swarm, shop, held_out)
        print(f"before: {before['success']:.1%} of {len(held_out)} held-out questions", flush=True)
        report = swarm.train(shop.agent, shop.tasks, steps=job.max_steps, seed=options.seed)
        after = score(swarm, shop, held_out)
        print(f"after {job.max_steps} batches: {after['success']:.1%}", flush=True)
        shutil.move(swarm.export().path, options.out / "model")
    result = {
        "before": before["success"],
        "after": after["success"],
        "seconds": round(time.monotonic() - started, 1),
        "training_seconds": round(report.seconds, 1),
        "seed": options.seed,
        "tasks": len(held_out),
        "intervals": {"before": before["interval"], "after": after["interval"]},
        "call_errors": {"before": before["call_errors"], "after": after["call_errors"]},
        "episodes": len(report.finished),
        "aborted": report.num_aborted + report.num_expired,
        "rewards": [round(reward, 4) for reward in report.rewards],
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return result


def score(swarm: Swarm, shop: Environment, held_out: Sequence[Task]) -> dict[str, Any]:
    """Share of the questions with the right answer, asked once each, with its 95 % interval."""
    report = swarm.evaluate(shop.agent, held_out)
    if report.num_aborted or report.num_expired:
        raise SystemExit(f"not every question could be asked: {report.errors}")
    interval = wilson_interval(report.mean_reward * len(held_out), len(held_out))
    return {
        "success": round(report.mean_reward, 4),
        "interval": [round(bound, 4) for bound in interval],
        "call_errors": round(report.mean_metric("call_errors"), 4),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("mcp-tools"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' order, the sampling and the learner")
    parser.add_argument("--tasks", type=int, default=tasks.NUM_HELD_OUT, help="held-out questions of each evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
