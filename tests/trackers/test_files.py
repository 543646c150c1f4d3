"""The sinks `csv:` and `jsonl:`.

1. Each step is there once after 20 kills at any line of the package, with equal values.
2. A line that a kill left incomplete is written again.
3. A new metric adds a column, and names with quotes, line breaks and other scripts survive.
4. A file of another program and of another run is refused, and a second process, too.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from tests.trackers.steps import ListSource, Rows, copy, copy_through_kills, follower, rows_of, steps_of

STEPS, MANY = steps_of(40), steps_of(200)


def read_jsonl(path: Path) -> Rows:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row.pop("step"), {n: v for n, v in row.items() if n != "time"}) for row in rows]


def read_csv(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values = [{n: float(v) for n, v in row.items() if n not in ("step", "time") and v} for row in rows]
    return [(int(row["step"]), one) for row, one in zip(rows, values, strict=True)]


READERS = {"csv": read_csv, "jsonl": read_jsonl}
kinds = pytest.mark.parametrize("kind", READERS)


@kinds
def test_each_step_is_there_once_after_20_kills(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / "steps.txt"
    copy_through_kills(MANY, f"{kind}:{path}", tmp_path)
    assert READERS[kind](path) == rows_of(MANY)


@kinds
def test_an_incomplete_line_is_written_again(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.txt"
    copy(STEPS[:30], f"{kind}:{path}", tmp_path)
    whole = path.read_bytes()
    for cut in range(1, len(whole) - whole[:-1].rindex(b"\n")):
        path.write_bytes(whole[:-cut])
        copy(STEPS[:30], f"{kind}:{path}", tmp_path)
        assert path.read_bytes() == whole


@kinds
def test_a_file_of_another_program_is_refused_and_kept(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(ConfigError, match=r"has content of another program: choose another target"):
        copy(STEPS, f"{kind}:{path}", tmp_path)
    assert path.read_text() == "dear diary"


@kinds
def test_a_damaged_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.txt"
    copy(STEPS, f"{kind}:{path}", tmp_path)
    path.write_text("step,time\nseven,8\n" if kind == "csv" else "[1]\n")
    with pytest.raises(ConfigError, match=r"last line of .* is not a step"):
        copy(STEPS, f"{kind}:{path}", tmp_path)


@kinds
def test_a_file_belongs_to_one_run(kind: str, tmp_path: Path) -> None:
    label = f"{kind}:{tmp_path / 'steps.txt'}"
    copy(STEPS, label, tmp_path)
    with pytest.raises(ConfigError, match="belongs to another run"):
        copy(STEPS[1:], label, tmp_path)


def test_two_processes_do_not_write_the_same_file(tmp_path: Path) -> None:
    label = f"jsonl:{tmp_path / 'steps.jsonl'}"
    refused = []

    def start_another() -> None:
        with pytest.raises(ConfigError, match="held by another `agentjet track`") as error:
            copy(STEPS, label, tmp_path)
        refused.append(error)
        source.ready = len(STEPS)

    source = ListSource(STEPS, ready=10, end=STEPS[-1].version)
    follower(source, label, tmp_path, pause=start_another).run(stay=True)
    assert refused and read_jsonl(tmp_path / "steps.jsonl") == rows_of(STEPS)


def test_the_times_are_those_of_the_steps(tmp_path: Path) -> None:
    copy(STEPS, f"jsonl:{tmp_path / 'a'}", tmp_path)
    copy(STEPS, f"csv:{tmp_path / 'b'}", tmp_path)
    times = [json.loads(line)["time"] for line in (tmp_path / "a").read_text().splitlines()]
    with (tmp_path / "b").open(newline="") as file:
        assert [float(row["time"]) for row in csv.DictReader(file)] == times == [step.time for step in STEPS]
