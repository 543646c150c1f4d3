"""The gain from merging: `python -m bench.merge`. One row per call, one row per timeline, and the forest.

Forward, backward and optimiser step of the embedded learner on the same batch, with the same packing budget, four
layers of SmolLM2's width. Every mode runs in a separate process, one after the other. Memory is measured in an extra
step, whose allocator gives everything back at once. Prints a table, then one JSON object as the last line. Ratios are
the baseline's seconds over the forest's. `token_ratio` is the ratio of token counts alone.

In bfloat16 matrix products are five times as fast on some machines and attention is not: there the ratios are lower,
and follow the attention's arithmetic rather than the tokens.

`--real` takes recorded conversations (JSON lines, gzipped: `task_id` and `messages` in OpenAI's chat format).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentjet.timeline import Row, build_forest
from bench.machine import environment, run_contender
from bench.merging import gateway
from bench.merging.exactness import gradient_error
from bench.merging.model import make_model, smollm2_card
from bench.merging.modes import MODES, Measured, Run, measure
from bench.merging.replay import conversation_rows
from bench.merging.workloads import REAL, SYNTHETIC, VOCABULARY, Lengths, Shape, limits, subagents, turns

NAMES = (*SYNTHETIC, REAL)
BY_DEFAULT = [name for name in NAMES if name != "turns40_long"]
WITHOUT_CALLS = ("turns40_long",)
"""Two million tokens as one row per call: that baseline is left out."""
WITH_MEMORY = ("turns12", "turns40", "shared_prompt", REAL)
"""Where peak memory is worth the time of another step."""
QUICK_SHRINK = 20
EXACT = Lengths(prompt=20, context=5, sampled=4)
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
"""glibc then maps every larger block on its own, and resident memory is memory in use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a child process."""

    folder: str
    vocabulary: int
    quick: bool
    real: str
    tasks: int
    run: Run

    def rows(self, workload: str) -> list[Row]:
        """The batch of a workload."""
        if workload == REAL:
            return conversation_rows(smollm2_card(), Path(self.real), self.tasks, self.vocabulary)
        return SYNTHETIC[workload](Shape(self.vocabulary, QUICK_SHRINK if self.quick else 1))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "run": Run(**values["run"])})


def measured(settings: Settings, mode: str, workload: str, **extra: str) -> Measured:
    """One mode on one workload, in a process with the served worker's environment; of the quick run, in this one."""
    if settings.quick:
        return measure(mode, settings.rows(workload), Path(settings.folder), settings.run)
    child = ["bench.merge", "--child", json.dumps(dataclasses.asdict(settings)), mode, workload]
    done = run_contender(f"{workload}: {mode}", child, environment(settings.run.threads, **extra))
    if done.failed:
        raise SystemExit(f"{mode} on {workload} failed:\n{done.errors}")
    return Measured(**json.loads(done.output.splitlines()[-1]))


def compare(
    settings: Settings, workload: str, repeats: int, console: Console, *, with_calls: bool = True
) -> dict[str, Any]:
    """All modes on one workload."""
    rows = settings.rows(workload)
    bound = limits(rows)
    result: dict[str, Any] = {
        "distinct_tokens": build_forest(rows).num_nodes,
        "token_ratio": round(bound.calls, 3),
        "token_ratio_timeline": round(bound.timelines, 3),
        "vs_call": None,
    }
    for mode in MODES:
        if mode == "call" and (workload in WITHOUT_CALLS or not with_calls):
            continue
        if settings.quick:
            console.print(f"{workload}: {mode} ...")
        steps = 1 if mode == "call" else repeats
        step = measured(_with_steps(settings, steps), mode, workload)
        result |= {f"{mode}_s": statistics.median(step.seconds), f"{mode}_tokens": step.tokens}
        if mode != "call" and workload in WITH_MEMORY:
            apart = step if settings.quick else measured(_with_steps(settings, 1), mode, workload, **ALLOCATOR)
            result[f"{mode}_peak_mb"] = apart.peak_mb
    result |= {
        f"vs_{mode}": round(result[f"{mode}_s"] / result["forest_s"], 3) for mode in MODES if f"{mode}_s" in result
    }
    result["recompute"] = round(result["forest_tokens"] / result["distinct_tokens"], 4)
    del result["vs_forest"]
    return result


def exactness() -> float:
    """Relative error of the gradient in float64, with several turns, branches, and more than one micro-batch."""
    with tempfile.TemporaryDirectory() as folder:
        small = make_model(Path(folder), 300, quick=True)
        rows = turns(EXACT, 4, repeats=3, tasks=2, vocabulary=300)
        rows += [row.with_columns(sequence=row["sequence"] + 100) for row in subagents(EXACT, vocabulary=300, seed=1)]
        return gradient_error(rows, small, budget=200)


def _with_steps(settings: Settings, steps: int) -> Settings:
    return dataclasses.replace(settings, run=dataclasses.replace(settings.run, steps=steps))


def table(results: dict[str, dict[str, Any]]) -> Table:
    grid = Table("workload", "call s", "timeline s", "forest s", "vs call", "tokens", "vs timeline", "tokens", "MB")
    for name, r in results.items():
        seconds = [f"{r[f'{mode}_s']:.2f}" if f"{mode}_s" in r else "" for mode in MODES]
        against_call = f"{r['vs_call']:.2f}" if r["vs_call"] else ""
        memory = f"{r['forest_peak_mb']:.0f} / {r['timeline_peak_mb']:.0f}" if "forest_peak_mb" in r else ""
        ratios = [
            against_call,
            f"{r['token_ratio']:.2f}",
            f"{r['vs_timeline']:.2f}",
            f"{r['token_ratio_timeline']:.2f}",
        ]
        grid.add_row(name, *seconds, *ratios, memory)
    return grid


def possible(names: list[str], real: str, console: Console) -> list[str]:
    """The workloads that can run: without `real` if `--real` is missing, which is printed."""
    if REAL not in names or Path(real).is_file():
        return names
    console.print(f"real: skipped, --real {real or 'PATH'} names no file of recorded conversations", soft_wrap=True)
    return [name for name in names if name != REAL]


def gateway_figures(quick: bool, console: Console) -> dict[str, Any]:
    """Milliseconds of the gateway's own work per call, at 20 turns and over the curve."""
    console.print("gateway ...")
    points = gateway.curve(smollm2_card(), repeats=1 if quick else 3, num_turns=20 if quick else gateway.TURNS[-1])
    grid = Table("turns", "tokens", "kB", "ms per call")
    for point in points:
        grid.add_row(str(point.turns), str(point.tokens), f"{point.kilobytes:.1f}", f"{point.ms:.2f}")
    Console(width=80).print(grid)
    return {
        "gateway_ms_per_call": round(next(point.ms for point in points if point.turns == 20), 3),
        "gateway_us_per_kb": round(gateway.microseconds_per_kilobyte(points), 2),
        "gateway_curve": [dataclasses.asdict(point) for point in points],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", choices=NAMES, default=BY_DEFAULT, metavar="NAME", help=", ".join(NAMES)
    )
    parser.add_argument("--real", default="", metavar="PATH", help="recorded conversations; without, `real` is skipped")
    parser.add_argument("--tasks", type=int, default=2, help="tasks of `real`, each with all its trials")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch, in every mode")
    parser.add_argument("--repeats", type=int, default=3, help="counted steps; one row per call is measured once")
    parser.add_argument("--without-calls", action="store_true", help="leave out one row per call, the slowest by far")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument(
        "--quick", action="store_true", help="everything in miniature: shows that it works, not how fast"
    )
    parser.add_argument("--child", nargs=3, metavar=("SETTINGS", "MODE", "WORKLOAD"), help="used by the bench itself")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    if chosen.child:
        text, mode, workload = chosen.child
        settings = Settings.from_json(text)
        print(
            json.dumps(dataclasses.asdict(measure(mode, settings.rows(workload), Path(settings.folder), settings.run)))
        )
        return
    console = Console(stderr=True)
    names = possible(chosen.workloads, chosen.real, console)
    run = Run(chosen.dtype, chosen.threads, 1024 if chosen.quick else chosen.budget)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), chosen.vocabulary, quick=chosen.quick)
        settings = Settings(folder, chosen.vocabulary, chosen.quick, chosen.real, chosen.tasks, run)
        repeats = 1 if chosen.quick else chosen.repeats
        results = {
            name: compare(settings, name, repeats, console, with_calls=not chosen.without_calls) for name in names
        }
        error = exactness()
    Console(width=120).print(table(results))
    figures = {
        "bench": "merge",
        "workloads": results,
        "recompute": max((r["recompute"] for r in results.values()), default=None),
        "grad_rel_err_fp64": error,
        **gateway_figures(chosen.quick, console),
        "run": dataclasses.asdict(run),
        "vocabulary": chosen.vocabulary,
        "machine": f"{os.uname().machine}, {os.cpu_count()} cores",
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
