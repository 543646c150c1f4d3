"""The documentation site: `make site` builds it, and Sphinx refuses what these tests do not see.

1. Each page is in the sidebar, which has at most 30 entries, or below a page of it, once.
2. The page of routes has each route with its token and each body that it refers to; the page of commands each command.
3. The page of Python names has each public name.
4. The gathered folder has the files that pages link to.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import agentjet
from agentjet.cli.main import app

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site"
MADE = ("reference/commands", "reference/http", "reference/python")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))

    def find(name: str) -> ModuleType:
        return importlib.import_module(name)

    return find


def test_every_page_has_one_place_and_the_sidebar_is_short(module: Any) -> None:
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (SITE / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    sidebar = [re.sub(r"^.*<(.*)>$", r"\1", line) for line in lines]
    assert len(sidebar) <= 30
    gather = module("gather")
    named = Counter([*sidebar, *(str(page.with_suffix("")) for top in gather.BELOW for page in gather.below(top))])
    assert named == Counter([*(str(page.with_suffix("")) for page in gather.pages()), *MADE])


def test_the_page_of_routes_is_complete(module: Any) -> None:
    page = module("reference").http_page()
    route = page.split("### GET /swarm/v1/episodes/{episode_id}\n")[1].split("### ")[0]
    assert "* Token: any token of the run, or the key of the episode." in route
    assert "* Answer: [EpisodeTree](#episodetree) or [EpisodeRuns](#episoderuns)." in route
    assert "* Token: the key of an episode." in page.split("### GET /v1/models/{name}\n")[1].split("### ")[0]
    routes = dict(re.findall(r"^### (\w+ /.*)\n\n(?:.*\n)*?\* Token: (.*)\.$", page, re.MULTILINE))
    assert {name for name, token in routes.items() if token == "none"} == {
        "GET /healthz",
        "GET /readyz",
        "POST /swarm/v1/sessions/exchange",
    }
    headings = {name.lower() for name in re.findall(r"^### (\w+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= headings and "episodetree" in headings


def test_the_page_of_commands_is_complete(module: Any) -> None:
    page = module("reference").commands_page()
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        below = getattr(command, "commands", {})
        for path in (f"agentjet {name}", *(f"agentjet {name} {one}" for one in below)):
            assert f"# `{path}`" in page, path


def test_the_page_of_python_names_is_complete() -> None:
    page = (SITE / "python.md").read_text(encoding="utf-8")
    named = set(re.findall(r"autoclass:: (\w+)", page))
    assert named == set(agentjet.__all__) - {"__version__", "AgentJetError"}
    assert "automodule:: agentjet.errors" in page


def test_the_computed_tables_of_costs_are_current(module: Any) -> None:
    costs = module("costs")
    page = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    assert page.partition(costs.MARK)[2].strip() == costs.tables().strip(), "run `make docs`"
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert module("fits").table() in page, "write the output of `python docs/site/fits.py` into the page"


def test_linked_files_are_gathered(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = module("reference")
    monkeypatch.setattr(reference, "http_page", lambda: "# HTTP\n")
    monkeypatch.setattr(reference, "commands_page", lambda: "# Commands\n")
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "of_an_earlier_build.md").touch()
    module("gather").gather(folder)
    assert (folder / "docs" / "timelines.svg").is_file() and (folder / "examples/arithmetic/agent.py").is_file()
    assert (folder / "conf.py").is_file() and (folder / "reference" / "python.md").is_file()
    assert not (folder / "of_an_earlier_build.md").exists()
