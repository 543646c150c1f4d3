"""The yes/no checks: they are the tests of tests/page, and a figure here is their result. See `measure`."""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVERY_VIEW = ("test_every_view.test_a_view", "test_hostile.test_the_overview")
AXE = tuple(
    f"test_accessible.test_{name}"
    for name in ("a_view", "a_view_in_the_other_looks", "an_unfolded_view", "tokens", "dialogs", "views_without_data")
)
LOOK_VIEWS = ("test_look.test_every_view",)
TESTS: Mapping[str, tuple[str, ...]] = {
    "foreign": (*EVERY_VIEW, *LOOK_VIEWS),
    "csp": (*EVERY_VIEW, *LOOK_VIEWS),
    "xss": (*EVERY_VIEW, *LOOK_VIEWS, "test_hostile.test_hostile_strings_are_shown_as_they_are"),
    "axe": (*AXE, *LOOK_VIEWS),
    "keys": ("test_episodes.test_five_keys_lead_to_the_least_likely_token_of_the_worst_episode",),
    "truth": (*EVERY_VIEW, *LOOK_VIEWS, "test_look.test_a_killed_run_shows_the_same_text"),
}
"""The tests of a key, as module and function below tests/page."""
NUM_KEYS = 5
"""Keys that the test of `keys` presses."""


def run(folder: Path, marker: str, modules: Collection[str] = ("",)) -> tuple[float, dict[str, list[bool]]]:
    """Returns the seconds of the tests with a marker, and by function whether each case passed; not of skipped ones."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, f"--junitxml={report}"]
    began = time.perf_counter()
    subprocess.run(
        [*command, *(f"tests/page/{module}" for module in modules)], cwd=ROOT, stdout=sys.stderr, check=False
    )
    took, found = time.perf_counter() - began, dict[str, list[bool]]()
    for name, case in _cases(report):
        if case.find("skipped") is None:
            passed = case.find("failure") is None and case.find("error") is None
            found.setdefault(name, []).append(passed)
    return took, found


def _cases(report: Path) -> Iterator[tuple[str, ElementTree.Element]]:
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.attrib["classname"].rpartition(".")[2]
        yield f"{module}.{case.attrib['name'].partition('[')[0]}", case


def measure(folder: Path) -> dict[str, float]:
    """Returns the value of each key of `TESTS` whose tests ran, and `browser_s`: the seconds of those in `make test`.

    The value is the number of failed tests; for `keys` the number of keys, if its test passed; for `truth` the share
    of passed tests.
    """
    seconds, results = run(folder, "not thorough")
    _, more = run(folder, "thorough", ("test_look.py", "test_accessible.py", "test_every_view.py"))
    for name, passed in more.items():
        results.setdefault(name, []).extend(passed)
    found = {"browser_s": round(seconds, 1)}
    for key, names in TESTS.items():
        cases = [results.get(name, []) for name in names]
        if not all(cases):
            continue
        passed = [one for each in cases for one in each]
        if key == "keys" and all(passed):
            found[key] = NUM_KEYS
        elif key == "truth":
            found[key] = round(sum(passed) / len(passed), 3)
        elif key != "keys":
            found[key] = passed.count(False)
    return found
