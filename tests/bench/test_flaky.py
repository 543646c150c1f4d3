"""`bench.flaky` measures its figures.

1. Groups are read from the journal; one with two tasks, or with two payloads of one task, is mixed.
2. A figure that misses its floor is named.
3. (thorough) The whole bench, small: a real server trains a flaky agent, and no group mixes tasks or code.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench import flaky
from bench.mixed_code import mixed_code


@pytest.mark.parametrize(
    ("second", "payload", "num"),
    [(("", "a"), 1, 1), (("", "b"), 1, 2), (("s", "a"), 1, 2), (("", "a"), 2, 2)],
)
def test_groups_are_read_from_the_journal(tmp_path: Path, second: tuple[str, str], payload: int, num: int) -> None:
    members = [("ep1", ("", "a")), ("ep2", second)]
    with closing(sqlite3.connect(tmp_path / "journal")) as connection:
        connection.execute("CREATE TABLE episodes (body TEXT)")
        for episode_id, (task_set, task_id) in members:
            body = {"id": episode_id, "group_id": 7, "task_set": task_set, "task_id": task_id}
            connection.execute("INSERT INTO episodes VALUES (?)", [json.dumps(body)])
        connection.commit()
    groups = flaky.groups_of(tmp_path / "journal", {"ep1": 1, "ep2": payload})
    assert {group: len(seen) for group, seen in groups.items()} == {7: num}


@pytest.mark.parametrize(
    ("results", "names"),
    [
        ({"slowdown": 1.8, "stalled": 0, "mixed": 0, "mixed_code": 0}, []),
        ({"slowdown": 1.81}, ["slowdown"]),
        ({"stalled": 1, "mixed": 2, "mixed_code": 3}, ["stalled", "mixed", "mixed_code"]),
    ],
)
def test_a_figure_that_misses_its_floor_is_named(results: dict[str, Any], names: list[str]) -> None:
    assert flaky.missed(results) == names


@pytest.mark.e2e
@pytest.mark.thorough
def test_the_bench_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flaky, "SHARES", (flaky.JUDGED,))
    monkeypatch.setattr(flaky, "LEASE_SECONDS", 120.0)  # No machine is so busy that a batch takes as long.
    monkeypatch.setitem(flaky.JOB, "job__lease_seconds", 120.0)
    results = flaky.run(tmp_path, ["slowdown", "mixed"], steps=2, pairs=1, lists=2)
    share = results["shares"]["0.3"]
    assert share["failed"] > 0 and results["stalled"] == 0
    assert results["groups"] >= 16 and results["refused"] > 0
    assert results["mixed"] == results["wrongly_refused_or_taken"] == 0


@pytest.mark.thorough
def test_few_edits_of_the_code_mix_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    found = mixed_code(8)
    assert (found["edits"], found["mixed_code"]) == (8, 0)
    assert found["groups"] >= 16 and all(found[way]["states"] > 1 for way in ("reload", "watch"))
