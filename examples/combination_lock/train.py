"""Trains the same agent on the same tasks with two recipes, one after the other: `grpo`, then `mars`.

    python -m examples.combination_lock.train --out lock

Each server is a child of this process, on a free loopback port, and ends with it. The model is tiny and random.
`result.json` keeps the figures.
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
from examples.combination_lock.agent import WHEELS, agent, locks
from examples.digits.random_model import make_random_model

SETTINGS = Path(__file__).with_name("job.toml")
RECIPES = ("grpo", "mars")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Both runs; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    if options.out.exists():
        raise SystemExit(f"{options.out} is there already: give another folder with --out, or remove it")
    make_random_model(options.out / "model", options.seed)
    result = {recipe: run(recipe, options.out, options.seed, options.set) for recipe in options.recipes}
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    for recipe, found in result.items():
        first, last = ends(found["opened"])
        print(f"{recipe}: {first:.0%} of the locks opened in the first batches, {last:.0%} in the last", flush=True)
        first, last = ends(found["wheels"])
        print(f"{' ' * len(recipe)}  {first:.1f} of {WHEELS} wheels were right, then {last:.1f}", flush=True)
    return result


def run(recipe: str, out: Path, seed: int, sets: list[str]) -> dict[str, Any]:
    """Trains with one recipe. Returns the share of opened locks and the mean number of right wheels of each batch."""
    overrides = [f"model.name={out / 'model'}", f"job.seed={seed}", f"job.recipe={recipe}", *sets]
    job = load_config(SETTINGS, overrides).job
    with raise_on_signals(), ChildServer(SETTINGS, overrides, out / recipe) as server, server.connect() as swarm:
        concurrency = job.batch_size * job.group_size
        report = swarm.train(agent, locks(), steps=job.max_steps, concurrency=concurrency, seed=seed)
    return {
        "seconds": round(report.seconds, 1),
        "opened": [round(reward, 4) for reward in report.rewards],
        "wheels": [round(step.metrics["agent/wheels"], 4) for step in report.steps],
    }


def ends(values: list[float]) -> tuple[float, float]:
    """Mean of the first and of the last five batches."""
    return statistics.mean(values[:5]), statistics.mean(values[-5:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("lock"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the tasks' order and the sampling")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), help="recipes to compare")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
