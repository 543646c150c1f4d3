"""Faults of a whole cluster beside their bounds: `python -m bench.scale` prints a table, then a JSON object.

`python -m bench.scaling.faults` has options. The gradients and checkpoints of ranks are compared with those of one rank
by `tests/cluster/test_ranks.py`, and vLLM's log-probabilities with the learner's by `tests/cluster/test_replica.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from bench.machine import bounded, report
from bench.scaling.faults import Run

AT_LEAST = {"faults": 100}
AT_MOST = {"failover_s": 5.0, **dict.fromkeys(("calls_failed", "lost", "trained_twice", "wrong_versions"), 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="share of the faults")
    share = parser.parse_args().share
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(Run.drawn(Path(folder).resolve(), share, 0).figures())
    report("scale", found, bounded({name: found[name] for name in (*AT_LEAST, *AT_MOST)}, AT_LEAST, AT_MOST))


if __name__ == "__main__":
    main()
