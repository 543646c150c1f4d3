"""A policy that diverges.

1. A metric without a finite value is not recorded, and clients can still read the status.
2. Weights that are not finite are reported in the log and the status, also after a restart. They are never saved over
   the last good checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agentjet.errors import Conflict
from agentjet.protocol import StatusResponse
from tests.fakes import RUN, running

pytestmark = pytest.mark.anyio


async def test_metrics_that_are_no_number_are_left_out(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        run.compute.metrics = {"policy/mismatch_kl": math.nan, "policy/kl": math.inf, "optim/skipped_steps": 1.0}
        await run.batch()
        shown = StatusResponse.model_validate_json(run.gateway.status().model_dump_json())
        assert shown.last_step == run.gateway.swarm.last_step
        assert shown.last_step["optim/skipped_steps"] == 1.0
        assert not {"policy/mismatch_kl", "policy/kl"} & shown.last_step.keys()
    [line] = (tmp_path / "d" / RUN / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in line and "Infinity" not in line


async def test_a_policy_that_diverged_says_so_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1}) as run:
        run.compute.metrics = {"weights/finite": 1.0}
        await run.batch()
        assert "diverged" not in run.gateway.status().waiting_for and "diverged" not in caplog.text
        run.compute.metrics = {"weights/finite": 0.0}
        await run.batch()
        assert "the policy has diverged" in run.gateway.status().waiting_for and "has diverged" in caplog.text
        for written in (run.gateway.versions.save, run.gateway.versions.export):
            with pytest.raises(Conflict, match="has diverged"):
                await written()
    assert not (tmp_path / "d" / RUN / "exports").exists()
    async with running(tmp_path / "d") as run:
        assert [info.policy_version for info in run.gateway.store.listing()] == [1]
        assert run.gateway.status().policy_version == 2
        assert "the policy has diverged" in run.gateway.status().waiting_for
