"""`docs/compatibility.md`, made of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions

from conformance.child import NODE, PYTHON
from conformance.episode import Exercise
from conformance.exercises import PACKAGES

HEAD = """# Compatibility

Made by `make conformance`; do not edit.

Each client below ran an agent through an episode of a real server, as a process that knew an address and a key.
The agents use tools and take several turns. The policy's answers were scripted, and the run checked what was *trained*:
every sampled token, behind exactly the context that the sampler was given, masked in, with the advantage that the
episode's reward makes; each prompt in the very words that a faithful history adds; timelines that begin only where this
page says so. Where a client asks for strict tools, a tool that must be called or JSON, the sampler was given a grammar
that allows the scripted answer, and the sets of tokens it chose among are trained with it. Where the model's name says
an agent role (`policy@reckoner`), the calls are that role's, and the advantage is the one that its own reward makes. No
client reached anything but the server.

"""
FOOT = """
**Timelines.** A client that sends back the history it was given continues one timeline, and every token is computed
once. One that words its history anew makes the policy see another prompt; this is how it was trained, too: the
timeline forks there, the reason is counted (`edit`: what the policy said came back in other words; `template`: the
model's own template wrote it in other words; `tools`: other tools are on offer; `branch`: a prompt of its own), and
every branch is trained in its exact context. It costs speed, never exactness.
"""


@dataclass(frozen=True)
class Result:
    """An exercise that was run, and what was wrong with it."""

    exercise: Exercise
    problems: tuple[str, ...]
    num_timelines: int


def versions() -> dict[str, str]:
    """Installed packages and their versions; those of npm begin with `npm `."""
    site = PYTHON.parent.parent.glob("lib/python*/site-packages")
    found = {one.name.lower(): one.version for one in distributions(path=[str(path) for path in site])}
    for package in json.loads((NODE / "package.json").read_text(encoding="utf-8"))["dependencies"]:
        installed = NODE / "node_modules" / package / "package.json"
        if installed.exists():
            found[f"npm {package}"] = json.loads(installed.read_text(encoding="utf-8"))["version"]
    return found


def green(results: Sequence[Result]) -> dict[str, bool]:
    """Clients in the order they ran."""
    clients: dict[str, bool] = {}
    for result in results:
        clients[result.exercise.client] = clients.get(result.exercise.client, True) and not result.problems
    return clients


def page(results: Sequence[Result], installed: Mapping[str, str]) -> str:
    """The whole page, with a line for each exercise."""
    clients = green(results)
    summary = f"{sum(clients.values())} of {len(clients)} clients are green.\n\n"
    return HEAD + summary + "\n".join(_rows(results, installed)) + "\n" + FOOT


def _rows(results: Sequence[Result], installed: Mapping[str, str]) -> Iterator[str]:
    yield "| client | version | dialect | exercised | calls | timelines | | remarks |"
    yield "|---|---|---|---|---|---|---|---|"
    last = ""
    for result in results:
        exercise = result.exercise
        name = exercise.client if exercise.client != last else ""
        numbers = _numbers(exercise.client, installed) if name else ""
        last = exercise.client
        remarks = exercise.remark if not result.problems else re.sub(r"[|\n]", " ", result.problems[0])[:300]
        state = "red" if result.problems else "green"
        cells = (name, numbers, exercise.dialect, exercise.name, len(exercise.turns), _timelines(result))
        yield "| " + " | ".join(map(str, (*cells, state, remarks))) + " |"


def _numbers(client: str, installed: Mapping[str, str]) -> str:
    packages = PACKAGES.get(client, (client,))
    if len(packages) == 1:
        return installed.get(packages[0], "?")
    return ", ".join(f"{package.removeprefix('npm ')} {installed.get(package, '?')}" for package in packages)


def _timelines(result: Result) -> str:
    """How many there are, and why calls began one."""
    forks = [turn.fork for turn in result.exercise.turns if turn.fork]
    reasons = ", ".join(f"{forks.count(reason)} `{reason}`" for reason in sorted(set(forks)))
    return f"{result.num_timelines} ({reasons})" if forks else str(result.num_timelines)
