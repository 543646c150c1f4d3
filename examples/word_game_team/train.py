"""Starts a server with two policies and trains both on the rounds that they play together.

    python -m examples.word_game_team.train --out word-game

The server is a child of this process, on a free loopback port, and ends with it. `result.json` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from examples.word_game_team.agent import DESCRIBER, GUESSER, play, rounds

SETTINGS = Path(__file__).with_name("job.toml")
POLICIES = (DESCRIBER, GUESSER)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    overrides = [f"job.seed={options.seed}", *options.set]
    job = load_config(SETTINGS, overrides).job
    if options.out.exists():
        raise SystemExit(f"{options.out} is there already: give another folder with --out, or remove it")
    concurrency = job.batch_size * job.group_size
    server_dir = options.out / "server"
    with raise_on_signals(), ChildServer(SETTINGS, overrides, server_dir) as server, server.connect() as swarm:
        report = swarm.train(play, rounds(), steps=job.max_steps, concurrency=concurrency, seed=options.seed)
    result = {
        "seed": options.seed,
        "episodes": len(report.finished),
        "aborted": report.num_aborted + report.num_expired,
        "seconds": round(report.seconds, 1),
        "rewards": {policy: [round(reward, 4) for reward in report.rewards_of(policy)] for policy in POLICIES},
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    for policy in POLICIES:
        first, last = ends(report.rewards_of(policy))
        print(f"{policy}: mean reward {first:.3f} in the first batches, {last:.3f} in the last", flush=True)
    return result


def ends(rewards: tuple[float, ...] | list[float]) -> tuple[float, float]:
    """Mean of the first and of the last quarter of a run's batches."""
    quarter = max(1, len(rewards) // 4)
    return statistics.mean(rewards[:quarter]), statistics.mean(rewards[-quarter:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("word-game"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' order, the sampling and the learner")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
