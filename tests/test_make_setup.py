"""`make setup` with another Python than AgentJet needs, with remains of an earlier try, and what it prints.

The programs named `python` are shell scripts, so that nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("python3", "python3.13", "python3.12", "python3.11")
OLD = """#!/bin/sh
case "$*" in *version_info*|*pip*) exit 1 ;; *--version*) echo Python 3.10.12 ;; esac
"""
NEW = """#!/bin/sh
case "$*" in
    *version_info*|*ensurepip*|*"pip --version"*) ;;
    *"-m venv"*) for venv; do :; done; mkdir -p "$venv/bin"; cp "$0" "$venv/bin/python" ;;
    *"pip install"*) i=0; while [ $i -lt 300 ]; do i=$((i + 1)); echo "Collecting $i"; done; test -z "$PIP_FAILS" ;;
esac
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone, without the files that set-up does not read."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def set_up(clone: Path, pythons: dict[str, str], *options: str, **environment: str) -> tuple[int, str]:
    """The exit code of `make setup` and what it prints, with these programs first in the path."""
    for name, text in pythons.items():
        program(clone.parent / "bin" / name, text)
    path = f"{clone.parent / 'bin'}:{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))}
    done = subprocess.run(
        ["make", "setup", *options], cwd=clone, env={**environ, "PATH": path, **environment}, capture_output=True
    )
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("is_named", [False, True])
def test_an_older_python_is_refused_before_anything_is_made(clone: Path, is_named: bool) -> None:
    if is_named:
        old = program(clone.parent / "old" / "python", OLD)
        code, text = set_up(clone, {"python3": NEW}, f"PYTHON={old}")
    else:
        code, text = set_up(clone, dict.fromkeys(NAMES, OLD))
    assert code != 0 and "AgentJet needs Python 3.11 or newer, and found Python 3.10.12: install it, or name" in text
    assert not (clone / ".venv").exists()


def test_a_newer_python_beside_an_older_one_is_found(clone: Path) -> None:
    code, text = set_up(clone, {**dict.fromkeys(NAMES, OLD), "python3.12": NEW})
    assert code == 0, text
    assert (clone / ".venv" / "bin" / "python").read_text() == NEW


def test_an_environment_of_an_older_python_is_made_again(clone: Path) -> None:
    program(clone / ".venv" / "bin" / "python", OLD)
    (clone / ".venv" / "remains").touch()
    code, text = set_up(clone, {"python3": NEW})
    assert code == 0, text
    assert (clone / ".venv" / ".installed").exists() and not (clone / ".venv" / "remains").exists()


def test_it_prints_how_long_it_takes_and_little_else(clone: Path) -> None:
    code, text = set_up(clone, {"python3": NEW})
    assert code == 0 and "minutes" in text and len(text.splitlines()) <= 2, text
    assert "Collecting 300" in (clone / ".venv" / "setup.log").read_text()


def test_a_failure_shows_the_end_of_the_log_and_is_tried_again(clone: Path) -> None:
    code, text = set_up(clone, {"python3": NEW}, PIP_FAILS="1")
    assert code != 0 and "Collecting 300" in text and "set-up failed" in text and len(text.splitlines()) < 30
    assert not (clone / ".venv" / ".installed").exists()
    assert set_up(clone, {"python3": NEW})[0] == 0
