"""Starts a server, plays against a random player, trains by self-play, and plays against the random player again.

    python -m examples.textarena_self_play.train --out self-play

The server is a child of this process, on a free loopback port, and ends with it. `result.json` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from agentjet import Swarm
from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from examples.textarena_self_play.agent import against_random, games, self_play

SETTINGS = Path(__file__).with_name("job.toml")
CONCURRENCY = 32


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    overrides = [f"job.seed={options.seed}", *options.set]
    job = load_config(SETTINGS, overrides).job
    server_dir = options.out / "server"
    if server_dir.exists():
        raise SystemExit(f"{server_dir} is there already: give another folder with --out, or remove it")
    with raise_on_signals(), ChildServer(SETTINGS, overrides, server_dir) as server, server.connect() as swarm:
        before = score(swarm, options.games)
        print(f"before, against a random player: {before}", flush=True)
        concurrency = min(CONCURRENCY, job.batch_size * job.group_size)
        report = swarm.train(self_play, games(256), steps=job.max_steps, concurrency=concurrency, seed=options.seed)
        after = score(swarm, options.games)
        print(f"after {job.max_steps} batches: {after}", flush=True)
    result = {
        "seed": options.seed,
        "before": before,
        "after": after,
        "batches": len(report.steps),
        "seconds": round(report.seconds, 1),
        "episodes": len(report.finished),
        "aborted": report.num_aborted + report.num_expired,
        "played_to_the_end": [round(reward, 4) for reward in report.rewards],
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def score(swarm: Swarm, count: int) -> dict[str, float]:
    """Mean points a game (a win 1, a draw 1/2), and the share of games that illegal moves of the policy ended."""
    report = swarm.evaluate(against_random, games(count), concurrency=CONCURRENCY)
    if report.num_aborted or report.num_expired:
        raise SystemExit(f"not every game could be played: {report.errors}")
    return {"games": count, "points": round(report.mean_reward, 4), "illegal": round(report.mean_metric("illegal"), 4)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("self-play"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' order, the sampling and the learner")
    parser.add_argument("--games", type=int, default=200, help="games of each evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
