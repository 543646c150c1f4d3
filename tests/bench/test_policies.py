"""Pins `bench.policies`: its parts run at a small size and report their figures.

1. Journals, the event loop and refused begins.
2. A policy beside others has the weights of one alone; a difference would be found.
3. The recorded output of version 0.1's team is the other side only if it did the same work.
4. Adapters in one worker and a team train on real servers (thorough).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.policies import AT_LEAST, AT_MOST, Options, measure_adapters, measure_isolation, measure_team, table
from bench.policying.isolation import saved
from bench.policying.journals import costs, refused, stall
from bench.policying.team import recorded


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(tmp_path, quick=True)


def test_the_parts_report_their_figures(tmp_path: Path) -> None:
    figures = {**stall(tmp_path, 16, 3, 20), **refused(tmp_path, 16)}
    assert figures.keys() >= {"loop_stall_ms", "begin_refused_ms"}
    assert figures["batch_tokens"] > 16 * 3 * 10


def test_a_long_run_opens_lists_and_rolls_back(tmp_path: Path) -> None:
    figures = costs(tmp_path, 1_024)
    assert figures.keys() == {"open_s", "list_ms", "rollback_ms"}
    assert table({1_024: figures}, figures).row_count == 3


def test_a_recorded_team_did_the_same_work() -> None:
    line = json.dumps({"size": "large", "steps": 6, "seconds": {"team": [2.0, 3.0], "apart": [1.0]}})
    assert recorded(f"a table\n{line}\n", "large", 6) == [2.0, 3.0]
    with pytest.raises(SystemExit, match="has size large and 6 steps, not large and 4"):
        recorded(line, "large", 4)


@pytest.mark.e2e
@pytest.mark.thorough
def test_policies_train_on_real_servers(options: Options) -> None:
    figures = {**measure_adapters(options), **measure_team(options), **measure_isolation(options)}
    assert figures.keys() >= (AT_LEAST.keys() | {"adapters4_memory"}) - {"team_speedup"}
    assert figures["isolated_bit_equal"] is True and figures["team_episodes"] == 16
    assert AT_MOST.keys() & figures.keys() == {"adapters4_memory"}
    alone = saved(options.folder / "isolation-8" / "alone")
    other = options.folder / "isolation-8" / "alone" / "checkpoint" / "trainer.pt"
    other.write_bytes(other.read_bytes()[:-1] + b"x")
    assert saved(options.folder / "isolation-8" / "alone") != alone
