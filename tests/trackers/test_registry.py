"""`--to`: built-in kinds, classes of users, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.trackers import KINDS, Run, open_tracker

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
