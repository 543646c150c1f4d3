"""Trains a team by one of the protocols of this folder: `python -m examples.teams.train cory --out team`.

The server is a child of this process, on a free loopback port, and ends with it.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from agentjet.cli.serve import ChildServer
from agentjet.client import TrainReport
from agentjet.client.threads import raise_on_signals
from examples.teams.asking import sums

PROTOCOLS = ("cory", "malt", "optima", "mmoa_rag", "spo", "curiosity", "temporal_rule")


def train(protocol: str, out: Path, steps: int, sets: list[str]) -> TrainReport:
    """Trains for some batches of two groups of four episodes."""
    module = importlib.import_module(f"examples.teams.{protocol}")
    recipe = {"name": module.RECIPE} if isinstance(module.RECIPE, str) else module.RECIPE
    settings = {"job.batch_size": 2, "job.group_size": 4, "job.max_tokens": 16, "job.checkpoint_every": 0}
    settings |= {f"job.recipe.{key}": value for key, value in recipe.items()}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    overrides += [f"policies.{name}={{}}" for name in module.POLICIES]
    with raise_on_signals(), ChildServer(None, [*overrides, *sets], out) as server, server.connect() as swarm:
        return swarm.train(module.play, sums(), steps=steps, concurrency=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("protocol", choices=PROTOCOLS)
    parser.add_argument("--out", type=Path, default=Path("team"), help="folder of the server")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    options = parser.parse_args()
    print(train(options.protocol, options.out, options.steps, options.set))


if __name__ == "__main__":
    main()
