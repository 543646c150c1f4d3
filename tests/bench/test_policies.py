"""Pins `bench.policies`: each of its parts runs at a small size and reports its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.policies import MUST, costs, refused, stall


def test_the_parts_report_their_figures(tmp_path: Path) -> None:
    figures = {**stall(tmp_path, 16, 3, 20), **refused(tmp_path, 16)}
    assert figures.keys() >= MUST.keys() - {"open_s", "list_ms", "rollback_ms"}
    assert figures["batch_tokens"] > 16 * 3 * 10


def test_a_long_run_opens_lists_and_rolls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.policies.SNAPSHOT_EVERY", 1_000)
    assert costs(tmp_path, 1_024).keys() == {"open_s", "list_ms", "rollback_ms"}
