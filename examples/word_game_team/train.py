"""Starts two servers, one a member, and trains both models on the rounds that they play together.

    python -m examples.word_game_team.train --out word-game

The servers are children of this process, on free loopback ports, and end with it. `result.json` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentjet import Swarm, Team
from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from examples.word_game_team.agent import DESCRIBER, GUESSER, play, rounds

SETTINGS = Path(__file__).with_name("job.toml")
MEMBERS = (DESCRIBER, GUESSER)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    overrides = [f"job.seed={options.seed}", *options.set]
    job = load_config(SETTINGS, overrides, environ={}).job
    if options.out.exists():
        raise SystemExit(f"{options.out} is there already: give another folder with --out, or remove it")
    with raise_on_signals(), ExitStack() as stack:
        servers = {m: stack.enter_context(ChildServer(SETTINGS, overrides, options.out / m)) for m in MEMBERS}
        swarms: dict[str, Swarm] = {m: stack.enter_context(server.connect()) for m, server in servers.items()}
        team = stack.enter_context(Team(swarms))
        concurrency = job.batch_size * job.group_size
        report = team.train(play, rounds(), steps=job.max_steps, concurrency=concurrency, seed=options.seed)
    result = {
        "seed": options.seed,
        "episodes": len(report.finished),
        "aborted": report.num_aborted + report.num_expired,
        "seconds": round(report.seconds, 1),
        "rewards": {member: [round(reward, 4) for reward in report.rewards(member)] for member in MEMBERS},
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    for member in MEMBERS:
        first, last = ends(report.rewards(member))
        print(f"{member}: mean reward {first:.3f} in the first batches, {last:.3f} in the last", flush=True)
    return result


def ends(rewards: tuple[float, ...] | list[float]) -> tuple[float, float]:
    """Mean of the first and of the last quarter of a run's batches."""
    quarter = max(1, len(rewards) // 4)
    return statistics.mean(rewards[:quarter]), statistics.mean(rewards[-quarter:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("word-game"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' order, the sampling and the learners")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting of both")
    return parser


if __name__ == "__main__":
    main()
