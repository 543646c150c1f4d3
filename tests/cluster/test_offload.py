"""An optimiser that is offloaded from a device to the CPU, without such a device. Pinned here:

1. masters and moments are on the CPU, weights on the device, and no operation mixes both: see `fake_device.py`.
Numbers on a CPU: `test_ranks.py` and `tests/compute/test_learner.py`. On a GPU: `tests/compute/test_gpu.py`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.thorough
def test_no_operation_mixes_devices() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.cluster.fake_device"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
