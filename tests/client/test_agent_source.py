"""1. Errors in a user's file, even `sys.exit`, become one message. 2. The search order for packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentjet.client.agent_source import load_function, source_of
from agentjet.errors import ConfigError


def test_a_file_that_ends_the_program(tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text("import sys\nsys.exit('no key')\n")
    with pytest.raises(ConfigError, match=r"--reward .*ends.py: importing it ends the program \(SystemExit: no key\)"):
        load_function(f"{file}:reward", option="--reward")


def test_a_package_of_the_current_folder_is_found_after_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tasks_xyz.py").write_text("def reward(): return 1\n")
    (tmp_path / "wave.py").write_text("raise SystemExit('a module of the standard library was replaced')\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert source_of("my_tasks_xyz:reward", option="--reward") == tmp_path / "my_tasks_xyz.py"
    assert load_function("my_tasks_xyz:reward", option="--reward")() == 1
    assert callable(load_function("wave:open", option="--reward"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos.absent\n", "AttributeError: module 'os' has no attribute 'absent'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import no_such_library\n", "No module named 'no_such_library'"),
    ],
)
def test_a_package_whose_import_fails_is_refused(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a function in a package is found by an import of the package."""
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"--reward .*{message}"):
        source_of("broken_package.agent:reward", option="--reward")
