"""Several policies and runs on one server, and costs that must not grow with a run: `python -m bench.policies`.

| part | figures |
|---|---|
| `adapters` | four adapters in one worker against four servers one after the other: speed, memory |
| `isolation` | weights of a policy trained beside others against those of one trained alone |
| `team` | a team of two policies in one run against the two-server team of version 0.1 (with `--before`) |
| `journal` | opening, listing and rolling back a run of 1,000 to 1,000,000 episodes |
| `stall` | the longest stop of the event loop while a batch is built |
| `begin` | CPU of a refused `begin` |

Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentjet.client.threads import raise_on_signals
from agentjet.server.http import tune_python
from bench.policying import adapters, isolation, journals, team
from tests.tiny import make_model

AT_LEAST = {"adapters4_speedup": 2, "isolated_bit_equal": 1, "team_speedup": 1}
AT_MOST = {
    "adapters4_memory": 1.3,
    "open_s": 2,
    "list_ms": 10,
    "rollback_ms": 10,
    "loop_stall_ms": 50,
    "begin_refused_ms": 0.2,
}
SIZES = (1_000, 10_000, 100_000, 1_000_000)
Curve = dict[int, dict[str, float]]
"""Figures by number of episodes."""


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    folder: Path
    quick: bool
    before: Path | None = None
    size: str = "large"
    steps: int = 6
    rounds: int = 6
    workload: adapters.Workload = field(default_factory=adapters.Workload)


def measure_adapters(options: Options) -> dict[str, float]:
    if not options.quick:
        return adapters.compare(options.folder, options.workload)
    tiny = str(make_model(options.folder / "tiny"))
    return adapters.compare(
        options.folder, replace(options.workload, model=tiny, rank=2, group_size=2, max_tokens=8, batches=1)
    )


def measure_isolation(options: Options) -> dict[str, float]:
    """Adapters, and all weights beside each other."""
    tiny = str(make_model(options.folder / "tiny"))
    trials = [isolation.Trial(tiny, rank=0), isolation.Trial(tiny if options.quick else adapters.MODEL, rank=8)]
    folders = {f"isolation-{trial.rank}": trial for trial in trials}
    equal = [isolation.is_bit_equal(options.folder / name, trial) for name, trial in folders.items()]
    return {"isolated_bit_equal": all(equal)}


def measure_team(options: Options) -> dict[str, float]:
    size, steps, rounds = ("small", 1, 1) if options.quick else (options.size, options.steps, options.rounds)
    return team.compare(options.folder / "team", options.before, size=size, steps=steps, rounds=rounds)


def measure_stall(options: Options) -> dict[str, float]:
    return journals.stall(options.folder, *((16, 4, 40) if options.quick else (128, 40, 400)))


def measure_begin(options: Options) -> dict[str, float]:
    return journals.refused(options.folder, 64 if options.quick else 1024)


PARTS: dict[str, Callable[[Options], dict[str, float]]] = {
    "adapters": measure_adapters,
    "isolation": measure_isolation,
    "team": measure_team,
    "stall": measure_stall,
    "begin": measure_begin,
}
JOURNAL = "journal"


def table(curve: Curve, figures: dict[str, float]) -> Table:
    """Each figure at its largest size, and how it grew."""
    grid = Table("figure", "measured", "must", "by episodes")
    for name, value in figures.items():
        bound = f">= {AT_LEAST[name]:g}" if name in AT_LEAST else f"<= {AT_MOST[name]:g}" if name in AT_MOST else ""
        growth = ", ".join(f"{number:,}: {row[name]:.2f}" for number, row in curve.items() if name in row)
        grid.add_row(name, f"{value:.3f}", bound, growth)
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = (*PARTS, JOURNAL)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--quick", action="store_true", help="small sizes, for the tests")
    parser.add_argument(
        "--before", type=Path, help="a checkout of version 0.1, which takes turns; or a file with its output"
    )
    parser.add_argument("--size", choices=team.SIZES, default=Options.size, help="of the team's models and answers")
    parser.add_argument("--steps", type=int, default=Options.steps, help="batches of a team's training")
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="trainings of a team")
    parser.add_argument("--groups", type=int, default=1, help="groups of four in a batch of the adapters")
    parser.add_argument("--calls", type=int, default=1, help="calls of an episode of the adapters")
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="seconds between two of these calls")
    given = parser.parse_args()
    tune_python()  # As the server runs.
    curve: Curve = {}
    figures: dict[str, float] = {}
    before = None if given.before is None else given.before.resolve()
    with tempfile.TemporaryDirectory() as folder, raise_on_signals():
        workload = adapters.Workload(batch_size=given.groups, calls=given.calls, tool_seconds=given.tool_seconds)
        options = Options(Path(folder), given.quick, before, given.size, given.steps, given.rounds, workload)
        for name, measure in PARTS.items():
            if name in given.only:
                figures |= measure(options)
        if JOURNAL in given.only:
            curve = {number: journals.costs(options.folder, number) for number in SIZES[: 2 if given.quick else None]}
            figures |= curve[max(curve)]
    Console(width=140).print(table(curve, figures))
    rounded = {number: {name: round(value, 4) for name, value in row.items()} for number, row in curve.items()}
    summary = {name: value if isinstance(value, bool) else round(value, 4) for name, value in figures.items()}
    machine = f"{os.uname().machine}, {os.cpu_count()} cores"
    print(json.dumps({"bench": "policies", **summary, "curve": rounded, "machine": machine}))


if __name__ == "__main__":
    main()
