"""A policy that diverges.

1. A metric without a finite value is not recorded, and clients can still read the status. The log, the batch and the
   health of the run name it, and the hook `next_state`, which is not called.
2. Weights that are not finite are reported in the log and the status, also after a restart. They are never saved over
   the last good checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agentjet.errors import Conflict
from agentjet.protocol import StatusResponse
from tests.fakes import RUN, Running, running

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("recipe", "kept"), [("grpo", False), ({"name": "adaptive_kl", "kl_coef": 0.1}, True)], ids=["grpo", "adaptive_kl"]
)
async def test_metrics_that_are_no_number_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recipe: object, kept: bool
) -> None:
    async with running(tmp_path / "d", job={"recipe": recipe}) as run:
        await run.batch()
        assert await named(run) == ("ok", "all metrics are finite")
        run.compute.metrics = {"policy/mismatch_kl": math.nan, "policy/kl": math.inf, "optim/skipped_steps": 1.0}
        await run.batch()
        shown = StatusResponse.model_validate_json(run.gateway.status().model_dump_json())
        assert shown.last_step == run.gateway.swarm.last_step
        assert shown.last_step["optim/skipped_steps"] == 1.0
        assert not {"policy/mismatch_kl", "policy/kl"} & shown.last_step.keys()
        assert {"batch/not_finite/policy/mismatch_kl", "batch/not_finite/policy/kl"} < shown.last_step.keys()
        level, text = await named(run)
        assert level == "warn" and "the metrics 'policy/mismatch_kl', 'policy/kl' of 1 of the newest 2 batches" in text
        assert "batch 1: recipe " in caplog.text and "'policy/kl' of the batch are NaN or infinite" in caplog.text
        assert all(("`next_state` was not called" in said) == kept for said in (text, caplog.text))
    [_, line] = (tmp_path / "d" / RUN / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in line and "Infinity" not in line


async def named(run: Running) -> tuple[str, str]:
    """The level and the text of the rule about metrics."""
    health = await run.gateway.reader.health()
    return next((rule.level, rule.text) for rule in health.rules if rule.name == "metrics")


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
