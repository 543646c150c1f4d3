"""The recorded data dirs: packed and unpacked, opened by a server, and read by `look`."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agentjet.client.threads import LoopThread
from agentjet.config import ServerConfig
from agentjet.server.app import create_look_app
from agentjet.server.monitoring import Gap
from tests import recorded_data_dir
from tests.cli.test_look import found_at, looking
from tests.fakes import saying
from tests.server.serving import ADMIN, Served, in_thread, serving
from tests.timeline.models import make_model

RECORDED = Path(__file__).with_name("recorded")
NOW = "now"
"""File in a recorded data dir: the time at its end."""
JOB: dict[str, Any] = {
    "max_tokens": 64,
    "spare_groups": 1,
    "lease_seconds": 120,
    "checkpoint_every": 2,
    "side_calls": [{"name": "title", "system": "You are a title generator*", "train": False}],
}
LONG_JOB: dict[str, Any] = {"batch_size": 5, "group_size": 4, "max_tokens": 256, "lease_seconds": 600}
"""As in `tests.locks.long_run`, which wrote the data dir."""
JOBS = {"small": JOB, "long": LONG_JOB, "rolled": JOB | {"checkpoint_every": 1}, "branched": JOB}
"""Settings of the servers, by data dir."""
EARLIER = "earlier"
"""Data dir of `tests.recorded_data_dir`. A server of it needs its model, so it is only looked at."""
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}]
DEMO = "demo"
"""Data dir with the journal of six batches by the settings of the demo, and with the tiny model that learned them."""
MACHINE = "machine"
"""File in it: the machine that learned them."""
LATER = 60.0
"""Seconds from the end of a recording to the start of the server that opens it."""


def reply(prompt: str) -> str:
    """The scripted policy: it uses the tool that it is offered, and answers with a character of several tokens."""
    last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    if "<tool_response>" in last:
        return "The sum is 42 € 🙂."
    if "<tools>" in prompt and "sum" in last:
        return '<tool_call>\n{"name": "add", "arguments": {"a":12,  "b": 30}}\n</tool_call>'
    return f"hello the {len(last)}"


def unpack(name: str, folder: Path) -> Path:
    """Writes a recorded data dir into `folder`. Returns the data dir."""
    if name == EARLIER:
        return recorded_data_dir.unpack(folder / name).parents[1]
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def starting(name: str, data_dir: Path, *, now: float) -> Any:
    """Context of a server with the settings of a recorded data dir."""
    card = make_model(data_dir.parent / "model", "smollm2").card
    return serving(data_dir, saying(reply), job=JOBS[name], card=card, now=now)


def get_routes(routes: Iterable[Any], prefix: str = "") -> Iterator[str]:
    """The paths of an application's GET routes, in the order in which they are tried."""
    for route in routes:
        if (included := getattr(route, "original_router", None)) is not None:
            yield from get_routes(included.routes, prefix + route.include_context.prefix)
        elif "GET" in (route.methods or ()):
            yield prefix + route.path


@dataclass(frozen=True)
class Source:
    """Answers over a recorded data dir, of a server that opened it or of `look`."""

    data_dir: Path
    url: str
    routes: tuple[str, ...]
    """Paths of the GET routes."""
    http: httpx.AsyncClient
    loop: LoopThread
    default: str = ""
    """Name of the default run in paths; a server needs none."""

    @property
    def name(self) -> str:
        return self.data_dir.name

    @property
    def names(self) -> dict[str, str]:
        """Names in answers for the address and the folders."""
        return {self.url: "URL", str(self.data_dir): "DATA", str(self.data_dir.parent): "PLACE"}

    def path(self, run: str, path: str) -> str:
        """The path of a run's route."""
        name = ".".join(filter(None, [self.default, run]))
        return f"/runs/{name}{path}" if name else path

    def get(self, run: str, path: str, **headers: str) -> httpx.Response:
        return self.loop.run(self.http.get(self.path(run, path), headers=headers))

    def events(self, run: str, query: str, is_last: Callable[[str], bool]) -> list[str]:
        """The lines of the events, up to the last one."""

        async def read() -> list[str]:
            lines = []
            async with self.http.stream("GET", self.path(run, f"/swarm/v1/events{query}")) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    if is_last(line):
                        break
            return lines

        return self.loop.run(read())


@contextmanager
def opened(name: str, folder: Path) -> Iterator[tuple[Source, Served]]:
    """A server that opened the recorded data dir `name` in `folder`. Requests have its admin token."""
    data_dir = unpack(name, folder)
    now = float((data_dir / NOW).read_text()) + LATER
    with in_thread(starting(name, data_dir, now=now)) as (served, loop):
        served.run.runs.lag.recent = lambda: Gap(0.0, 0.03, 0.04)  # type: ignore[method-assign]  # That of the tests.
        served.http.headers["Authorization"] = f"Bearer {ADMIN}"
        source = Source(data_dir, served.url, tuple(get_routes(served.app.routes)), served.http, loop)
        for run in source.get("", "/swarm/v1/runs").json()["runs"]:
            while run["is_open"] and loop.run(served.http.get(f"{run['path']}/readyz")).status_code != 200:
                pass
        yield source, served


@contextmanager
def looked_at(name: str, folder: Path) -> Iterator[Source]:
    """`look` at the recorded data dir `name`, which is unpacked into `folder`."""
    data_dir = unpack(name, folder)
    with in_thread(looking(found_at(data_dir))) as ((http, look), loop):
        routes = tuple(get_routes(create_look_app(look, ServerConfig()).routes))
        yield Source(data_dir, str(http.base_url), routes, http, loop, default=data_dir.name)
