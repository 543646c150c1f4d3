"""`bench.scaling.faults`, shortened: one fault of each kind on this machine, and every promise kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.scaling.faults import Fault, Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]

FAULTS = (
    Fault("replica", delay=0.5),
    Fault("replica", next_replica="paused"),
    Fault("rank", at="adopt", delay=0.1),
    Fault("gateway", at="publish"),
)
WHILE_SUSPENDED = (
    Fault("replica", at="forward_backward"),
    Fault("replica", next_replica="suspended"),
    Fault("rank", at="forward_backward", delay=0.03),
)
OF_FRONTS = (
    Fault("front", delay=1.0),
    Fault("front", at="stream", delay=0.5),
    Fault("front", at="finish"),
    Fault("front", at="batch"),
    Fault("front", at="starting", delay=1.0),
    Fault("front", stops=True),
    Fault("gateway", at="finish"),
    Fault("answer lost", at="finish"),
)


@pytest.mark.parametrize(("colocated", "fronts"), [(False, 0), (True, 0), (False, 2)])
def test_a_cluster_keeps_every_promise(tmp_path: Path, colocated: bool, fronts: int) -> None:
    faults = FAULTS + WHILE_SUSPENDED * colocated + OF_FRONTS * bool(fronts)
    found = asyncio.run(Run(tmp_path, 0, faults, colocated=colocated, fronts=fronts).figures())
    assert (found["faults"], found["missed"]) == (len(faults), 0), found
    zero = ("calls_failed", "lost", "trained_twice", "failures_scored", "two_effects", "wrong_versions", "fronts_ended")
    assert {key: found[key] for key in zero} == dict.fromkeys(zero, 0), found
    assert found["weights_equal"] and found["unexpected_ends"] == [], found
    assert found["tokens_checked"] > 0 and found["batches"] > 2, found
