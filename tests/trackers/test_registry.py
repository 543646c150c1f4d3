"""`--to`: built-in kinds, classes of users, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.trackers.sink import KINDS, open_sink

MINE = """
class Mine:
    def begin(self, run): return None
    def write(self, steps): ...
    def end(self): ...

class Half:
    def begin(self, run): return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user."""
    (tmp_path / "my_trackers.py").write_text(MINE)
    (tmp_path / "my_broken_tracker.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_trackers"


def test_a_class_of_the_user(module: str) -> None:
    assert type(open_sink(f"{module}:Mine")).__name__ == "Mine"


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("tensorboard", "has no target: give one of tensorboard:DIR, wandb:PROJECT, .*, or module:Class"),
        ("wandb:", "has no target"),
        ("tensorbord:runs", "no tracker and no module 'tensorbord'; did you mean tensorboard:DIR"),
        ("nowhere:Class", "no tracker and no module 'nowhere'; put its folder on PYTHONPATH"),
        ("my_trackers:Missing", "the module 'my_trackers' has no such class; it has "),
        ("my_trackers:Half", "has no method 'write': a sink has begin, write and end"),
    ],
)
def test_a_wrong_target_is_refused(module: str, label: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sink(label)


def test_a_module_of_the_user_that_needs_a_package(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        open_sink("my_broken_tracker:Class")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.package])
def test_a_missing_package_is_refused_with_the_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, KINDS[name].package, None)
    with pytest.raises(ConfigError, match=rf"needs the package '{KINDS[name].package}': pip install '\.\[{name}\]'"):
        open_sink(f"{name}:x")
