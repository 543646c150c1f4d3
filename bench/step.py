"""One RL step, ours against TRL's `GRPOTrainer` in six modes: `python -m bench.step`.

Same model, prompts, number of sampled tokens, reward, machine and number of threads. Each contender is a separate
process, one after the other. Ours runs in the environment of the served worker, with weights of the type `auto`. Each
mode of TRL runs in that environment, too, and in OpenMP's default one, and the faster run counts; the result names it.

The last line is one JSON object. `speedup` is the step of TRL's fastest mode over ours, each the median of the counted
steps. `speedup_shared` is the same beside a program that keeps one core busy, with the mode that was fastest without.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console

from bench.machine import SERVED, busy_cores, environment, grid, last_json, report, run_contender
from bench.workload import Workload

OURS = "agentjet, as served"
WEIGHTS = {"bf16 weights": "bfloat16", "autocast": "autocast", "float32": "float32"}
CONTENDERS = {
    OURS: ["bench.ours"],
    **{
        f"trl {generation}, {name}": ["bench.trl_peer", "--generation", generation, "--weights", weights]
        for generation in ("generate", "continuous")
        for name, weights in WEIGHTS.items()
    },
}
PACKAGES = ("torch", "transformers", "trl")


PEER_WAITS = (SERVED, "default")  # The environments that TRL may choose from


def measure(contender: str, workload: Workload, waiting: str = SERVED) -> dict[str, Any]:
    """Runs one contender. A failure is a result too, with the last line of its output."""
    command = [*CONTENDERS[contender], "--workload", workload.to_json()]
    done = run_contender(f"{contender}, waiting {waiting}", command, environment(workload.threads, waiting))
    told = {"waiting": waiting, "load": done.load}
    return {**told, "failed": done.failed} if done.failed else {**last_json(done.output), **told}


def measure_peer(contender: str, workload: Workload) -> dict[str, Any]:
    """The faster of the environments that TRL may choose from."""
    runs = [measure(contender, workload, waiting) for waiting in PEER_WAITS]
    best = min(runs, key=lambda run: run.get("step_s", float("inf")))
    return {**best, "step_s_by_waiting": {run["waiting"]: run.get("step_s") for run in runs}}


def summarise(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The verdict: ratios of medians, ours against the fastest mode of TRL that ran."""
    ours = results[OURS]
    peers = {name: r for name, r in results.items() if name != OURS and "failed" not in r}
    if "failed" in ours or not peers:
        return {"speedup": None}
    best = min(peers, key=lambda name: peers[name]["step_s"])
    return {
        "speedup": round(peers[best]["step_s"] / ours["step_s"], 3),
        "best_trl": best,
        "speedup_sampling": round(peers[best]["sampling_s"] / ours["sampling_s"], 3),
        "speedup_learning": round(peers[best]["learning_s"] / ours["learning_s"], 3),
        "equal_sampled_tokens": len({r["sampled_tokens"] for r in [ours, *peers.values()]}) == 1,
        "equal_prompt_tokens": len({r["prompt_tokens"] for r in [ours, *peers.values()]}) == 1,
    }


COLUMNS = ("waiting", "step_s", "sampling_s", "learning_s", "prompt_tokens", "sampled_tokens", "peak_mb", "failed")


def compare(workload: Workload, only: str, *, shared: bool) -> dict[str, Any]:
    """The verdict on all contenders whose names contain `only`."""
    peers = [name for name in CONTENDERS if name != OURS and only in name]
    results = {OURS: measure(OURS, workload), **{name: measure_peer(name, workload) for name in peers}}
    Console(width=140).print(grid(results, *COLUMNS))
    verdict = summarise(results)
    beside: dict[str, dict[str, Any]] = {}
    if shared and verdict["speedup"] is not None:
        best = verdict["best_trl"]
        with busy_cores(1):
            beside = {OURS: measure(OURS, workload), best: measure_peer(best, workload)}
        print("Beside one busy core:")
        Console(width=140).print(grid(beside, *COLUMNS))
        verdict["speedup_shared"] = summarise(beside)["speedup"]
    return {**verdict, "contenders": results, "contenders_shared": beside}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Workload()
    parser.add_argument("--model", default=defaults.model)
    for name in ("steps", "warmup", "threads", "num_prompts", "repeats", "new_tokens", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--only", metavar="WORD", default="", help="contenders whose name contains WORD, and ours")
    parser.add_argument("--without-shared", action="store_true", help="leave out the runs beside a busy core")
    return parser.parse_args()


def main() -> int:
    chosen = vars(arguments())
    only, shared = chosen.pop("only"), not chosen.pop("without_shared")
    workload = Workload(**chosen)
    if importlib.util.find_spec("trl") is None:
        print("TRL, the peer of this benchmark, is not installed. Run `make bench`, or", file=sys.stderr)
        print("  .venv/bin/pip install -c constraints.txt -e '.[server,bench]'", file=sys.stderr)
        return 2
    verdict = compare(workload, only, shared=shared)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    report("step", {**verdict, "versions": versions, "workload": asdict(workload)})
    return 0 if verdict["speedup"] is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
