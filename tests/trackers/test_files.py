"""`--to`, and the sinks `csv:` and `jsonl:`.

1. Each step is there once after 20 kills at any line of the package, with equal values.
2. A line that a kill left incomplete is written again.
3. A new metric adds a column, and names with quotes, line breaks and other scripts survive.
4. A file of another program and of another run is refused, and a second process, too.
5. Built-in kinds, classes of users, and refusals.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.trackers import KINDS, Run, open_tracker
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


# ---- kinds -----------------------------------------------------------------------------------------------------------


MINE = """
class Mine:
    def begin(self, run): return None
    def write(self, steps): ...
    def end(self): ...

class Half:
    def begin(self, run): return None

class Raises:
    def __init__(self):
        self.x = self.absent

class Ends:
    def __init__(self):
        raise SystemExit(3)
"""
BROKEN = {
    "needs": "import no_such_library",
    "raises": "import os\nos.absent",
    "ends": "raise SystemExit(3)",
    "typo": "x =",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user."""
    (tmp_path / "my_trackers.py").write_text(MINE)
    for name, source in BROKEN.items():
        (tmp_path / f"my_{name}.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_trackers"


def test_a_class_of_the_user(module: str) -> None:
    with open_tracker(f"{module}:Mine").open(Run("a", "one", {})) as (version, _):
        assert version is None


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("tensorboard", "has no target: give one of tensorboard:DIR, wandb:PROJECT, .*, or module:Class"),
        ("wandb:", "has no target"),
        ("tensorbord:runs", "no tracker and no module 'tensorbord'; did you mean tensorboard:DIR"),
        ("nowhere:Class", "no tracker and no module 'nowhere'; put its folder on PYTHONPATH"),
        ("nowhere.deep:Class", "no tracker and no module 'nowhere'; put its folder on PYTHONPATH"),
        ("my_trackers:Missing", "the module 'my_trackers' has no such class; it has "),
        ("agentjet.trackers:Nope", "no such class; it has TrackedStep, Run, Tracker, Sink, "),  # None that it imports
        ("my_trackers:Raises", r"Raises\(\) failed at .*my_trackers.py:12: AttributeError: 'Raises' object has no"),
        ("my_trackers:Ends", r"Ends\(\) failed at .*my_trackers.py:16: SystemExit: 3"),
        ("my_needs:Class", "importing 'my_needs' failed at .*my_needs.py:1: ModuleNotFoundError: .*'no_such_library'"),
        ("my_raises:Class", "importing 'my_raises' failed at .*my_raises.py:2: AttributeError: module 'os' has no att"),
        ("my_ends:Class", "importing 'my_ends' failed at .*my_ends.py:1: SystemExit: 3"),
        ("my_typo:Class", "importing 'my_typo' failed at .*my_typo.py:1: SyntaxError: invalid syntax"),
        ("my_trackers:Half", "has no method 'write': a sink has begin, write and end"),
    ],
)
def test_a_wrong_target_is_refused(module: str, label: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tracker(label)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.package])
def test_a_missing_package_is_refused_with_the_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, KINDS[name].package, None)
    with pytest.raises(ConfigError, match=rf"needs the package '{KINDS[name].package}': pip install '\.\[{name}\]'"):
        open_tracker(f"{name}:x")
