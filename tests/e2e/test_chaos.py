"""The chaos run, shortened: a fault of each kind, and every promise kept.

`python -m bench.chaos` passes through every transition of the journal; this one through a few, on the same code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.breaking.plan import SHARES, WHOLE_RUNS_ONLY
from tests.e2e.server import ROOT, environment

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

NUM_FAULTS = 13
PATIENCE = 600.0


def test_a_short_chaos_run_keeps_every_promise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.chaos", "--faults", str(NUM_FAULTS), "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    said = f"{done.stdout}\n{done.stderr[-5000:]}"
    assert done.returncode == 0, said
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] >= NUM_FAULTS, said
    assert len(found["by_kind"]) >= len({*SHARES} - {*WHOLE_RUNS_ONLY}) - found["missed"], said
    assert found["finished"] == found["trained"] + found["waiting"] + found["aborted"]
    assert found["trained"] > 0
    assert (found["lost"], found["trained_twice"], found["failures_scored"]) == (0, 0, 0)
    assert found["weights_equal"] is True
