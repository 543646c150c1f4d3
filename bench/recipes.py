"""Every registered recipe learns, replays and costs about as much as GRPO: `python -m bench.recipes`.

| part | what happens |
|---|---|
| `tables` | a table of logits learns in a NumPy world, twice with the same seed |
| `served` | a tiny model learns in a run of a real server, which is then killed and replays all journals |
| `costs` | CPU seconds of an optimiser step on one batch, over those of GRPO's |

The last line is one JSON object: `recipes` is the number of recipes, `learned` the number of those whose reward rose by
more than its 95% interval in both worlds, `replay_equal` is true if equal seeds and replays gave equal bits everywhere,
`worst_step_cost` is the largest cost among recipes without a further pass; the others are in `costs_with_passes`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentjet.errors import AgentJetError
from bench.learning import chosen, costs, tables
from bench.learning.served import RecipeServer
from tests.tiny import make_model

Row = dict[str, Any]
"""Figures of a recipe."""


def in_tables(name: str, steps: int) -> Row:
    """Trains a table twice with the same seed."""
    recipe = chosen.chosen(name, Path("right"))
    rewards, table = tables.train(recipe, steps)
    found = chosen.rise(rewards)
    return {**found, "learned": chosen.has_risen(found), "equal": tables.train(recipe, steps)[1] == table}


async def in_runs(names: list[str], steps: int, folder: Path, model: Path) -> dict[str, Row]:
    """Trains a run for each recipe, kills the server, and compares the weights after the replay.

    The model of the first recipe is the teacher of the others.
    """

    def batches(name: str) -> int:
        return steps * chosen.LONGER.get(name, 1)

    server, rows, weights = RecipeServer(folder, model), dict[str, Row](), dict[str, str]()
    teacher: Path | None = None
    try:
        for name in names:
            try:
                trained = await server.train(name, batches(name), teacher)
            except AgentJetError as error:
                rows[name] = {"learned": False, "equal": False, "failed": str(error)}
            else:
                found = chosen.rise(trained.rewards)
                rows[name] = {**found, "learned": chosen.has_risen(found), "seconds": round(trained.seconds, 1)}
                weights[name] = trained.weights
                teacher = teacher or trained.export
            print(f"served: {name} {json.dumps(rows[name])}", file=sys.stderr, flush=True)
        server.kill_and_start()
        replayed = await server.replayed({name: batches(name) for name in weights})
    finally:
        server.stop()
    for name, before in weights.items():
        rows[name]["equal"] = replayed[name] == before
        if len(replayed[name]) != len(before):
            rows[name]["failed"] = replayed[name]
    return rows


def summary(names: list[str], parts: dict[str, dict[str, Row]], cost: dict[str, float]) -> Row:
    """The figures of the last line."""
    rows = [part for part in (parts["tables"], parts["served"]) if part]
    learned = [name for name in names if all(part[name]["learned"] for part in rows)]
    passes = {name: needed for name in cost if (needed := costs.passes(chosen.chosen(name, Path("right"))))}
    plain = {name: value for name, value in cost.items() if name not in passes}
    return {
        "recipes": len(names),
        "learned": len(learned),
        "not_learned": {name: chosen.EXCUSED.get(name, "") for name in names if name not in learned},
        "replay_equal": all(part[name]["equal"] for part in rows for name in names),
        "worst_step_cost": max(plain.values(), default=None),
        "costs_with_passes": {name: [cost[name], *needed] for name, needed in passes.items()},
    }


def show(names: list[str], parts: dict[str, dict[str, Row]], cost: dict[str, float]) -> None:
    grid = Table("recipe", "table: reward", "learned", "equal", "model: reward", "learned", "equal", "s", "step cost")
    for name in names:
        cells = [name]
        for part in ("tables", "served"):
            row = parts[part].get(name, {})
            rewards = f"{row['first']:.2f} to {row['last']:.2f} ± {row['interval']:.2f}" if "first" in row else "-"
            cells += [row.get("failed", rewards), *(str(row.get(key, "-")) for key in ("learned", "equal"))]
        cells += [str(parts["served"].get(name, {}).get("seconds", "-")), str(cost.get(name, "-"))]
        grid.add_row(*cells)
    Console(width=140).print(grid)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="*", default=None, help="these recipes; default: all")
    parser.add_argument(
        "--parts", nargs="*", choices=("tables", "served", "costs"), default=("tables", "served", "costs")
    )
    parser.add_argument("--table-steps", type=int, default=40)
    parser.add_argument("--steps", type=int, default=16, help="batches of each run")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of steps whose costs are compared")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    names = sorted(chosen.names() if options.only is None else options.only, key=lambda name: name != "grpo")
    parts: dict[str, dict[str, Row]] = {"tables": {}, "served": {}}
    cost: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        if "costs" in options.parts:  # First, before servers keep the cores busy.
            cost = costs.measure(names, model, options.rounds)
        if "tables" in options.parts:
            parts["tables"] = {name: in_tables(name, options.table_steps) for name in names}
        if "served" in options.parts:
            parts["served"] = asyncio.run(in_runs(names, options.steps, Path(folder) / "data", model))
    show(names, parts, cost)
    verdict = summary(names, parts, cost)
    print(json.dumps({"bench": "recipes", **verdict, **parts, "costs": cost}))
    excused = set(chosen.EXCUSED) >= set(verdict["not_learned"])
    return int(not (excused and verdict["replay_equal"]))


if __name__ == "__main__":
    raise SystemExit(main())
