"""Tests that need more than `make setup` installs are skipped by name, and fail where that is required.

1. A test without what it needs is skipped with the command that gives it; `AGENTJET_REQUIRE` makes it fail.
2. `AGENTJET_REQUIRE` with an unknown name, and a marker with one, are refused.
3. `.ci/run` requires names that exist; CONTRIBUTING.md names the others.
4. No test skips for a missing package or program by another way.
5. `.ci/run` names every file with a thorough test.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import needs
from tests.needs import NEEDS, REQUIRE, need, required

ROOT = Path(__file__).parent.parent
OTHER_WAYS = re.compile(r"importorskip|skipif\(.*(?:which|find_spec)|skip\(.*(?:install|needs|missing)")
NAMED = re.compile(r"mark\.needs\(\"([^\"]+)\"\)|\bneed\(\"([^\"]+)\"\)")


@pytest.mark.parametrize(
    ("value", "raised"),
    [("", pytest.skip.Exception), ("ray", pytest.fail.Exception), ("node,ray", pytest.fail.Exception)],
)
def test_what_is_missing(value: str, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needs.NEEDS, "ray", (lambda: False, "Ray: make ray"))
    monkeypatch.setenv(REQUIRE, value)
    with pytest.raises(raised, match="needs Ray: make ray"):
        need("ray")


def test_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needs.NEEDS, "ray", (lambda: True, ""))
    need("ray")


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE, "ray,brwoser")
    with pytest.raises(pytest.UsageError, match=r"AGENTJET_REQUIRE: brwoser: the names are bitsandbytes, .*ray"):
        required()


def test_the_names_in_use_exist() -> None:
    used = {name for path in files_of_tests() for found in NAMED.findall(path.read_text()) for name in found if name}
    assert used and used <= NEEDS.keys()
    script = (ROOT / ".ci" / "run").read_text()
    listed = set(",".join(re.findall(r"(?:AGENTJET_REQUIRE=|,\}|\},)([a-z,-]+)", script)).split(","))
    assert listed and listed <= NEEDS.keys()


def test_the_guide_names_what_ci_never_requires() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    never = sorted(
        name for name in NEEDS if name != "cpu" and not re.search(rf"AGENTJET_REQUIRE.*[=,}}]{name}\b", script)
    )
    [sentence] = re.findall("CI never requires (.*):", (ROOT / "CONTRIBUTING.md").read_text())
    assert re.findall("`([^`]+)`", sentence) == never


def test_no_test_skips_in_another_way() -> None:
    ways = [
        f"{path}: {line}"
        for path in files_of_tests()
        for line in path.read_text().splitlines()
        if OTHER_WAYS.search(line)
    ]
    assert not ways


def files_of_tests() -> list[Path]:
    return [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("needs.py", Path(__file__).name)]


def test_the_script_names_every_file_with_a_thorough_test() -> None:
    """A thorough test that it does not name would never run in CI."""
    listed = re.findall(r"tests\+=\(([^)]*)\)", (ROOT / ".ci" / "run").read_text())
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {' '.join(listed)}"], cwd=ROOT, capture_output=True, check=True
    )
    named = {ROOT / line for line in shown.stdout.decode().split()}
    assert [path for path in named if not path.exists()] == []
    marked = [path for path in files_of_tests() if re.search(r"mark\.thorough", path.read_text())]
    assert (
        marked and [path for path in marked if not {path, *path.parents} & named and path.name != "test_gpu.py"] == []
    )
