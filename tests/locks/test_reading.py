"""The read routes and the commands over recorded data dirs answer as recorded: 2 and 3 of `tests.locks`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from agentjet.cli.main import app
from agentjet.front import addresses
from tests.locks import commands
from tests.locks.answers import (
    LOOK_READS,
    SERVER_READS,
    Answers,
    all_events,
    ask,
    check,
    forms,
    model_reads,
    read_everything,
    recorded,
    unanswered,
    without_same,
)
from tests.locks.data_dirs import EARLIER, JOBS, Source, get_routes, looked_at, opened, unpack
from tests.server.serving import Served

RUNS = {"small": ("", "team")}
"""Runs that are read, by data dir; of the others: the default run."""
UNREAD = {
    "/openapi.json": "see `test_the_form_of_bodies`",
    "/swarm/v1/machine": "the load of this machine: tests/server/test_machine.py",
    "/swarm/v1/studies/{name}": "a study, not a run: tests/cli/test_look.py",
    "/": "the page, a static file: tests/page",
    "/ui/{digest}/{name:path}": "a static file: tests/page",
    **dict.fromkeys(
        ("/inference/v1/{path:path}", "/k/{key}/inference/v1/{path:path}"), "a refusal: tests/server/test_generate.py"
    ),
    **dict.fromkeys(get_routes(addresses.router.routes), "a refusal: tests/server/test_control.py"),
}
"""Routes without a recorded answer, and why."""


def present_of_server(source: Source, served: Served) -> Answers:
    """The answers of a server."""
    found: Answers = {}
    for run in RUNS.get(source.name, ("",)):
        found |= ask(source, run, SERVER_READS) | read_everything(source, run) | all_events(source, run)
    for live in source.get("", "/swarm/v1/episodes?limit=1&status=live").json()["episodes"]:
        found |= model_reads(source, "", served.keys.sign(live["episode_id"], live["begun"]))
    return found


def present_of_look(source: Source, name: str) -> Answers:
    """The answers of `look`; those that are as the server's are only named."""
    found = ask(source, "", (*LOOK_READS, f"/swarm/v1/compare?runs={source.default}"))
    for run in RUNS.get(name, ("",)):
        found |= read_everything(source, run)
    return without_same(found, {} if name == EARLIER else recorded(f"{name}.server"))


def present_of_commands(source: Source) -> Answers:
    """The output of commands of a server."""
    found: Answers = {}
    for run in RUNS.get(source.name, ("",)):
        page = source.get(run, "/swarm/v1/episodes?limit=40").json()["episodes"]
        found |= commands.outputs_of_server(source, run, [episode["episode_id"] for episode in page[::8]])
    return found


def present_of_folders(place: Path) -> Answers:
    """The output of commands that need no server."""
    for name in ("small", "rolled", "branched", EARLIER):
        unpack(name, place)
    return commands.outputs((*commands.OF_FOLDERS, *commands.OF_NOTHING), place, {str(place): "PLACE"})


@pytest.fixture(scope="module", params=JOBS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Source, Served]]:
    with opened(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


def test_read_routes_of_a_server(server: tuple[Source, Served]) -> None:
    source, served = server
    present = present_of_server(source, served)
    check(f"{source.name}.server", present)
    if source.name == "small":
        assert set(unanswered(source.routes, present)) <= UNREAD.keys()


def test_commands_of_a_server(server: tuple[Source, Served]) -> None:
    source, _ = server
    check(f"{source.name}.commands", present_of_commands(source))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name == "long" else ()) for name in (*JOBS, EARLIER)]
)
def test_read_routes_of_look(name: str, tmp_path: Path) -> None:
    with looked_at(name, tmp_path) as source:
        present = present_of_look(source, name)
        check(f"{name}.look", present)
        assert set(unanswered(source.routes, present)) <= UNREAD.keys()


def test_commands_over_folders(tmp_path: Path) -> None:
    check("folders.commands", present_of_folders(tmp_path))


def test_the_form_of_bodies(tmp_path: Path) -> None:
    with opened("branched", tmp_path) as (_, served):
        check("openapi", forms(served.app.openapi()))


def test_every_command_has_an_output_or_a_reason() -> None:
    questions = [one for name in (*JOBS, "folders") for one in recorded(f"{name}.commands")]
    known = {one.removeprefix("agentjet ") for one in questions} | commands.REASONS.keys()
    names = list(commands.commands(typer.main.get_command(app)))  # type: ignore[arg-type]
    missing = [name for name in names if not any(f"{one} ".startswith(f"{name} ") for one in known)]
    assert [name for name in missing if name.partition(" ")[0] not in commands.REASONS] == []
