"""The cluster backend: exactness and faults: `python -m bench.scale` prints a table, then a JSON object.

Runs on two CPU cores: learner ranks with gloo on SmolLM2-135M, and a whole cluster of a tiny model with fake replicas.
vLLM's log-probabilities are compared with the learner's by `tests/cluster/test_replica.py`.
"""

from __future__ import annotations

import argparse
import json

from bench.machine import bounded, report
from bench.scaling import faults, ranks

AT_LEAST = {"faults": 100}
AT_MOST = {"grad_rel_err": 1e-6, "reshard_err": 1e-6, "failover_s": 5.0}
AT_MOST |= dict.fromkeys(("calls_failed", "lost", "trained_twice", "wrong_versions"), 0)
PARTS = {"learner": lambda: {**ranks.grad_rel_err(), **ranks.reshard_err()}, "faults": faults.figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    found = {}
    for part in parser.parse_args().only:
        figures = PARTS[part]()
        print(f"{part}: {json.dumps(figures, default=str)}")
        found |= figures
    report("scale", found, bounded(found, AT_LEAST, AT_MOST))


if __name__ == "__main__":
    main()
