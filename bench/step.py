"""One RL step, ours against TRL's `GRPOTrainer` in four modes: `python -m bench.step`.

Same model, prompts, number of sampled tokens, reward, machine and number of threads; each contender in a process of
its own, one after the other. The last line is one JSON object; its `speedup` is the step of TRL's fastest mode over
ours, each the median of the counted steps.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.workload import Workload

OURS = "agentjet, bf16 weights"
CONTENDERS = {
    OURS: ["bench.ours", "--weights", "bfloat16"],
    "trl generate, bf16 weights": ["bench.trl_peer", "--generation", "plain", "--weights", "bfloat16"],
    "trl generate, autocast": ["bench.trl_peer", "--generation", "plain", "--weights", "autocast"],
    "trl continuous, bf16 weights": ["bench.trl_peer", "--generation", "continuous", "--weights", "bfloat16"],
    "trl continuous, autocast": ["bench.trl_peer", "--generation", "continuous", "--weights", "autocast"],
}
PACKAGES = ("torch", "transformers", "trl")


def measure(contender: str, workload: Workload) -> dict[str, Any]:
    """Run one contender; a failure is a result too, with the last line of what it said."""
    command = [sys.executable, "-m", *CONTENDERS[contender], "--workload", workload.to_json()]
    threads = str(workload.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [f"exit {done.returncode}"]
    if done.returncode != 0:
        return {"failed": lines[-1]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


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


def table(results: dict[str, dict[str, Any]]) -> Table:
    grid = Table("contender", "step s", "sampling s", "learning s", "prompt tokens", "sampled tokens", "peak MB")
    for name, r in results.items():
        if "failed" in r:
            grid.add_row(name, "failed", r["failed"])
        else:
            seconds = [f"{r[key]:.2f}" for key in ("step_s", "sampling_s", "learning_s")]
            counts = [f"{r[key]:.0f}" for key in ("prompt_tokens", "sampled_tokens", "peak_mb")]
            grid.add_row(name, *seconds, *counts)
    return grid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Workload()
    parser.add_argument("--model", default=defaults.model)
    for name in ("steps", "warmup", "threads", "num_prompts", "repeats", "new_tokens", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--only", metavar="WORD", default="", help="contenders whose name contains WORD, and ours")
    arguments = vars(parser.parse_args())
    only = arguments.pop("only")
    workload = Workload(**arguments)
    if importlib.util.find_spec("trl") is None:
        print("TRL, the peer of this benchmark, is not installed. Run `make bench`, or", file=sys.stderr)
        print("  .venv/bin/pip install -c constraints.txt -e '.[server,bench]'", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    results = {}
    for contender in CONTENDERS:
        if contender == OURS or only in contender:
            console.print(f"measuring {contender} ...")
            results[contender] = measure(contender, workload)
    Console(width=120).print(table(results))
    verdict = {
        "bench": "step",
        **summarise(results),
        "contenders": results,
        "workload": json.loads(workload.to_json()),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(verdict))
    return 0 if verdict["speedup"] is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
