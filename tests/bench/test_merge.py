"""Pins of the merge bench:

1. its workloads have the token counts that the figures are about;
2. the baselines lay out the very same sampled tokens as the forest, each once;
3. pieces under the bench's budget repeat next to nothing;
4. a quick run ends with every figure the docs quote.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agentjet.timeline import Forest, build_forest
from agentjet.timeline.forest import chunk_forest
from agentjet.types import Message
from bench.merge import BY_DEFAULT, WITHOUT_CALLS, possible
from bench.merging.gateway import Point, microseconds_per_kilobyte
from bench.merging.modes import MODES, lay_out
from bench.merging.replay import made_up, read_conversations
from bench.merging.workloads import REAL, SYNTHETIC, Shape, limits, timelines

ROOT = Path(__file__).parent.parent.parent
LIMITS = {
    "turns12": (42_720, 8.68, 1.17),
    "turns40": (366_400, 22.73, 1.05),
    "shared_prompt": (4 * 8_480, 5.73, 5.73),
    "subagents": (231_840, 9.46, 7.41),
}


@pytest.mark.parametrize("name", LIMITS)
def test_workloads_have_the_token_counts_of_the_figures(name: str) -> None:
    rows = SYNTHETIC[name](Shape())
    tokens, calls, lines = LIMITS[name]
    assert sum(len(row.tokens) for row in rows) == tokens
    assert limits(rows).calls == pytest.approx(calls, abs=0.01)
    assert limits(rows).timelines == pytest.approx(lines, abs=0.01)


@pytest.mark.parametrize("name", LIMITS)
def test_shrunk_workloads_keep_their_ratios(name: str) -> None:
    assert limits(SYNTHETIC[name](Shape(shrink=10))).calls == pytest.approx(LIMITS[name][1], rel=0.02)


def targets(forest: Forest) -> list[tuple[object, ...]]:
    """Every target with its context."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(forest.tokens.tolist(), forest.parent.tolist(), strict=True):
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    numbers = zip(forest["advantage"].tolist(), forest["sequence"].tolist(), strict=True)
    return sorted((paths[node], *line) for node, line in zip(forest.node.tolist(), numbers, strict=True))


def test_every_mode_trains_the_same_tokens_in_the_same_contexts() -> None:
    rows = SYNTHETIC["subagents"](Shape(vocabulary=100, shrink=20))
    by_mode = {mode: targets(lay_out(mode, rows)) for mode in MODES}
    assert by_mode["call"] == by_mode["timeline"] == by_mode["forest"]
    assert len(by_mode["forest"]) == sum(len(row["logprob"]) for row in rows)


def test_a_timeline_is_a_row_that_no_other_continues() -> None:
    rows = SYNTHETIC["turns12"](Shape(shrink=10))
    groups = timelines(rows)
    assert [len(group) for group in groups] == [12] * 8
    assert all(np.array_equal(group[-1].tokens[: len(row.tokens)], row.tokens) for group in groups for row in group)


@pytest.mark.parametrize("name", list(SYNTHETIC))
def test_pieces_repeat_next_to_nothing(name: str) -> None:
    forest = build_forest(SYNTHETIC[name](Shape()))
    computed = sum(piece.num_nodes for piece, _ in chunk_forest(forest, 8192))
    assert forest.num_nodes <= computed <= 1.01 * forest.num_nodes


def test_the_slope_is_of_the_longer_half() -> None:
    points = [Point(1, 0, 1.0, 9.0), Point(100, 0, 100.0, 2.0), Point(200, 0, 200.0, 4.5)]
    assert microseconds_per_kilobyte(points) == pytest.approx(25.0)


def record(task: int, messages: list[Message]) -> dict[str, Any]:
    """A conversation as it is recorded on disk."""
    return {"task_id": task, "messages": [plain(message) for message in messages]}


def plain(message: Message) -> dict[str, Any]:
    calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls]
    return {
        "role": message.role,
        "content": message.content or None,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """One task with two trials of a few turns."""
    path = tmp_path / "conversations.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for trial in range(2):
            messages = made_up(3)[0][: 4 + 2 * trial]
            file.write(json.dumps(record(7, messages)) + "\n")
    return path


def test_recorded_conversations_are_read_as_they_were(recorded: Path) -> None:
    trials = read_conversations(recorded)[7]
    assert trials == [made_up(3)[0][:4], made_up(3)[0][:6]]


@pytest.mark.thorough
def test_a_quick_run_has_every_figure(recorded: Path) -> None:
    small = ["--quick", "--threads", "1", "--vocabulary", "1000", "--tasks", "1"]
    command = [sys.executable, "-m", "bench.merge", *small, "--real", str(recorded)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures["workloads"]) == {*BY_DEFAULT} == {*SYNTHETIC, REAL} - {*WITHOUT_CALLS}
    for name, workload in figures["workloads"].items():
        assert workload["vs_call"] > 0 and workload["vs_timeline"] > 0 and workload["token_ratio"] > 1, name
    assert figures["grad_rel_err_fp64"] < 1e-9
    assert figures["recompute"] >= 1
    assert figures["gateway_ms_per_call"] > 0
    assert {"gateway_us_per_kb", "gateway_curve"} <= set(figures)


def test_without_recorded_conversations_that_workload_is_skipped_aloud(tmp_path: Path) -> None:
    said = io.StringIO()
    console = Console(file=said)
    assert possible(["turns12", "real"], str(tmp_path / "no"), console) == ["turns12"]
    assert possible(["real"], "", console) == []
    assert "real: skipped, --real PATH" in said.getvalue()
