"""The gain from merging: `python -m bench.merge`. One row per call, one row per timeline, and the forest.

Forward, backward and optimiser step of the embedded learner on the same batch, with the same packing budget, four
layers of SmolLM2's width. Every mode runs in a separate process, one after the other. Memory is measured in an extra
step, whose allocator gives everything back at once. Prints a table, then one JSON object as the last line. Ratios are
the baseline's seconds over the forest's. `token_ratio` is the ratio of token counts alone.

In bfloat16 matrix products are five times as fast on some machines and attention is not: there the ratios are lower,
and follow the attention's arithmetic rather than the tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from agentjet.timeline import Row, build_forest
from bench.machine import environment, grid, last_json, report, run_contender
from bench.merge_layouts import (
    MODES,
    VOCABULARY,
    WORKLOADS,
    Measured,
    Run,
    limits,
    measure,
)
from bench.random_model import make_model

BY_DEFAULT = [name for name in WORKLOADS if name != "turns40_long" and not name.endswith("_large")]
WITHOUT_CALLS = ("turns40_long", "turns20_large")  # Up to two million tokens as one row per call: it is left out
WITH_MEMORY = ("turns12", "turns40", "shared_prompt")  # Where peak memory is worth the time of another step
COLUMNS = ("call_s", "timeline_s", "forest_s", "vs_call", "token_ratio", "vs_timeline", "token_ratio_timeline")
COLUMNS += ("forest_peak_mb", "timeline_peak_mb")
QUICK_SHRINK = 20
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
"""glibc then maps every larger block on its own, and resident memory is memory in use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a child process."""

    folder: str
    vocabulary: int
    quick: bool
    run: Run

    def rows(self, workload: str) -> list[Row]:
        """The batch of a workload."""
        return WORKLOADS[workload](self.vocabulary, QUICK_SHRINK if self.quick else 1)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "run": Run(**values["run"])})


def measured(settings: Settings, mode: str, workload: str, **extra: str) -> Measured:
    """One mode on one workload, in a process with the served worker's environment."""
    child = ["bench.merge", "--child", json.dumps(dataclasses.asdict(settings)), mode, workload]
    done = run_contender(f"{workload}: {mode}", child, environment(settings.run.threads, **extra))
    if done.failed:
        raise SystemExit(f"{mode} on {workload} failed:\n{done.errors}")
    return Measured(**last_json(done.output))


def compare(settings: Settings, workload: str, repeats: int) -> dict[str, Any]:
    """All modes on one workload."""
    rows = settings.rows(workload)
    calls, timelines = limits(rows)
    result: dict[str, Any] = {
        "distinct_tokens": build_forest(rows).num_nodes,
        "token_ratio": round(calls, 3),
        "token_ratio_timeline": round(timelines, 3),
        "vs_call": None,
    }
    for mode in MODES:
        if mode == "call" and workload in WITHOUT_CALLS:
            continue
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


def _with_steps(settings: Settings, steps: int) -> Settings:
    return dataclasses.replace(settings, run=dataclasses.replace(settings.run, steps=steps))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=BY_DEFAULT, metavar="NAME", help=", ".join(WORKLOADS)
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch, in every mode")
    parser.add_argument("--repeats", type=int, default=3, help="counted steps; one row per call is measured once")
    parser.add_argument("--model", default="", help="a folder; by default one with four of SmolLM2's layers is made")
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
    run = Run(chosen.dtype, chosen.threads, 1024 if chosen.quick else chosen.budget)
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or str(make_model(Path(folder), chosen.vocabulary, quick=chosen.quick))
        settings = Settings(model, chosen.vocabulary, chosen.quick, run)
        repeats = 1 if chosen.quick else chosen.repeats
        results = {name: compare(settings, name, repeats) for name in chosen.workloads}
    figures = {
        "workloads": results,
        "recompute": max((r["recompute"] for r in results.values()), default=None),
        "run": dataclasses.asdict(run),
        "vocabulary": chosen.vocabulary,
    }
    report("merge", figures, grid(results, *COLUMNS))


if __name__ == "__main__":
    main()
