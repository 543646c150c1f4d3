"""The page in the browser: `agentjet open` for a served run, `agentjet look` for runs and studies from their files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import socket
import sys
import webbrowser
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlencode, urlsplit

import typer
from typer import Argument, Option

from agentjet.cli import Server, TokenFile
from agentjet.errors import ConfigError, Unauthorized, Unavailable, Unreachable, UpstreamFailed
from agentjet.protocol import EvaluationView, JobBody, StatusResponse, StepList, flatten
from agentjet.types import DEFAULT_RUN, JOURNAL

if TYPE_CHECKING:
    import httpx

    from agentjet.client import Swarm
    from agentjet.research.report import StudyView
    from agentjet.server.app import Forward
    from agentjet.server.read import RunReader

PORT = 8401
STUDY_FILES = ("study.json", "study.sqlite")
URL = re.compile(r"https?://\S+")
MOST_STEPS = 10_000
"""Steps that are read of a run of another server."""
MEANING = (
    "What the session may do: viewer reads; client also saves, exports and aborts; admin also changes the job. "
    "It needs the token of that role."
)
Role = Annotated[Literal["viewer", "client", "admin"], Option("--role", help=MEANING)]
VIEWS = ("episodes", "groups", "batches", "swarm", "studies", "compare", "runs")
"""Beginnings of the paths of the page."""
View = Annotated[str, Argument(metavar="VIEW", help="View to open, such as `episodes` or `batches/3`.")]


def look(
    places: Annotated[
        list[str],
        Argument(
            metavar="PATH|URL...",
            help="Data dirs, folders of runs or of studies, folders that contain these, or addresses of servers.",
        ),
    ],
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.")] = PORT,
    token_file: TokenFile = None,
    only_print: Annotated[bool, Option("--print", help="Print the address and open nothing.")] = False,
) -> None:
    """Show the page over finished or crashed runs, several runs side by side, and studies. Reads only.

    Ctrl-C ends it. Runs of servers are read with AGENTJET_TOKEN or --token-file; use their viewer token.
    """
    found = RunsAndStudies(Server(token_file=token_file).read_token())
    for place in places:
        found.add(place)
    with contextlib.closing(_listen(port)) as listener, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(found, listener, only_print))


class RecordedStudy:
    """A study in its folder. It is read again when its journal has grown."""

    def __init__(self, folder: Path) -> None:
        self.title = str(folder)
        self._folder = folder
        self._read: tuple[object, dict[str, Any]] = (None, {})

    def summary(self) -> dict[str, Any]:
        view = self._view()
        verdicts = Counter(found.verdict for found in view.findings.values())
        return {
            "topic": view.study.topic,
            "metric": view.study.metric,
            "stage": view.stage,
            "claims": len(view.study.hypotheses),
            "verdicts": dict(verdicts),
            "arms": len(view.study.arms),
            "trials": len(view.launched),
            "spent": view.spent,
            "budget": view.study.budget,
        }

    def record(self) -> dict[str, Any]:
        from agentjet.research.report import gather

        files = sorted(path for path in self._folder.glob("study.*") if not path.name.endswith(("-shm", ".lock")))
        stamp = [(path, path.stat().st_mtime_ns) for path in files]
        if self._read[0] != stamp:
            self._read = stamp, {"study": gather(self._view())}
        return self._read[1]

    def _view(self) -> StudyView:
        from agentjet.research.journal import StudyFolder
        from agentjet.research.report import read_study

        return read_study(StudyFolder(self._folder))


class RemoteRun:
    """A run of another server, which is read over HTTP with a token."""

    def __init__(self, url: str, token: str | None, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises `ConfigError` if the URL or the token is malformed."""
        from agentjet.client.connection import Connection, Retry, load_settings

        self.title = url
        once = Retry(patience=0.0, first_patience=0.0)
        self._connection = Connection(load_settings(url, token), retry=once, transport=transport)
        self.close = self._connection.close

    async def status(self) -> StatusResponse:
        return StatusResponse.model_validate(await self.read("/status"))

    async def all_steps(self) -> StepList:
        return StepList.model_validate(await self.read(f"/steps?limit={MOST_STEPS}"))

    async def evaluations(self) -> list[EvaluationView]:
        return [EvaluationView.model_validate(one) for one in await self.read("/evaluations")]

    async def settings(self) -> dict[str, Any]:
        """Returns the model and the job settings, by name, for a comparison."""
        status, job = await self.status(), JobBody.model_validate(await self.read("/job"))
        weights = {"model_weights": status.model_weights} if status.model_weights else {}
        return {"model.name": status.model, **weights, **dict(flatten(job.job, "job."))}

    async def read(self, path: str) -> Any:
        """Returns the JSON answer to a read below `/swarm/v1`. Raises `RequestError`, also if the server is silent."""
        try:
            return await self._connection.request("GET", path)
        except Unauthorized as error:  # The session of the page is valid: this server refuses the token of `look`.
            raise UpstreamFailed(error.message, code="token_refused") from None
        except Unreachable as error:
            raise Unavailable(str(error), retry_after=1.0, code="server_unreachable") from None


class RunsAndStudies:
    """The runs and the studies of the given places, by the names that they have in paths."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self.runs: dict[str, RunReader | RemoteRun] = {}
        self.studies: dict[str, RecordedStudy] = {}

    @property
    def forwards(self) -> Mapping[str, Forward]:
        return {name: run.read for name, run in self.runs.items() if isinstance(run, RemoteRun)}

    def add(self, place: str) -> None:
        """Raises `ConfigError` if the place has no run and no study, or if none of them can be read."""
        if URL.fullmatch(place):
            self.runs[self._new_name(place.partition("//")[2])] = RemoteRun(place, self._token)
            return
        path = Path(place)
        if not path.is_dir():
            raise ConfigError(f"{place!r} is not a folder: name a data dir, a study's folder, or the URL of a server")
        runs, studies = list(_runs_in(path)), _studies_in(path)
        if not runs and not studies:
            raise ConfigError(
                f"{place!r} has no run and no study: name a data dir (it has runs/NAME/{JOURNAL}), the folder of a "
                "study (it has study.json), or a folder that contains some"
            )
        refused = [self._add_run(folder, place) for folder in runs]
        if all(refused) and not studies:
            raise ConfigError(refused[0])
        for folder in studies:
            self.studies[self._new_name(folder.resolve().name)] = RecordedStudy(folder)

    def _add_run(self, folder: Path, place: str) -> str:
        """Adds a run. Returns why it cannot be read, or ''."""
        from agentjet.server.read import RunReader

        if any(isinstance(run, RunReader) and run.folder.samefile(folder) for run in self.runs.values()):
            return ""  # It was named twice.
        data_dir = folder.resolve().parent.parent
        title = str(folder) if folder == Path(place) else str(folder.parent.parent)
        is_default = folder.name == DEFAULT_RUN
        name = self._new_name(data_dir.name if is_default else f"{data_dir.name}.{folder.name}")
        run = RunReader.at(folder, name=name, title=title if is_default else str(folder))
        self.runs[name] = run
        try:
            run.check()
        except ConfigError as error:
            return str(error)
        return ""

    def _new_name(self, text: str) -> str:
        """A name for a path. The default run of a server would have the name `default`, so no run here has it."""
        slug = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:40] or "run"
        taken = {DEFAULT_RUN, *self.runs, *self.studies}
        names = itertools.chain([slug], (f"{slug}-{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)


def _runs_in(path: Path) -> Iterator[Path]:
    """Folders of runs: the path itself, those of the data dir at the path, or those of the data dirs in it."""
    if (path / JOURNAL).is_file():
        yield path
        return
    for pattern in (f"runs/*/{JOURNAL}", f"*/runs/*/{JOURNAL}"):
        if found := sorted(file.parent for file in path.glob(pattern)):
            yield from sorted(found, key=lambda folder: (folder.parent, folder.name != DEFAULT_RUN, folder.name))
            return


def _studies_in(path: Path) -> list[Path]:
    """Folders of studies: the path itself, or folders in it."""
    for pattern in ("", "*/"):
        if found := {file.parent for name in STUDY_FILES for file in path.glob(pattern + name) if file.is_file()}:
            return sorted(found)
    return []


async def _serve(found: RunsAndStudies, listener: socket.socket, only_print: bool) -> None:
    """Serves until Ctrl-C or SIGTERM. Raises `AgentJetError` if a server does not answer."""
    import uvicorn

    from agentjet.config import ServerConfig
    from agentjet.front.http import uvicorn_config
    from agentjet.server.app import OfflineViewer, create_look_app
    from agentjet.server.collection import Collection

    server = ServerConfig()
    collection = Collection(found.runs, found.studies)
    app_look = OfflineViewer(collection, found.forwards, server)
    try:
        for read in found.forwards.values():
            await read("/status")
        port = listener.getsockname()[1]
        view = "" if len(found.runs) == 1 else "&to=/runs" if found.runs else "&to=/studies"
        address = f"http://127.0.0.1:{port}/#code={app_look.code}{view}"
        typer.echo(
            f"{address}\nRuns: {len(found.runs)}, studies: {len(found.studies)}. The address works until Ctrl-C ends "
            "this command."
        )
        if not only_print:
            await asyncio.to_thread(show_in_browser, address)
        await uvicorn.Server(uvicorn_config(create_look_app(app_look, server), server)).serve(sockets=[listener])
    finally:
        await collection.close()


def _listen(port: int) -> socket.socket:
    """The bound port. Raises `ConfigError` if it is in use."""
    from agentjet.front.http import listen

    try:
        return listen("127.0.0.1", port)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: 127.0.0.1:{port} is not available ({error.strerror or error}): another `agentjet look` "
            "may be using it; --port 0 takes a free one"
        ) from None


# ---- the page of a server --------------------------------------------------------------------------------------------


def open_page(
    server: Server,
    view: View = "",
    role: Role = "viewer",
    only_print: Annotated[bool, Option("--print", help="Print the address and open nothing.")] = False,
) -> None:
    """Open the page of a run in the browser: is it learning, is it healthy, what does it wait for.

    The address contains a code that opens one session within a minute. The session ends after 12 hours.
    """
    check_view(view)
    with server.connect() as swarm:
        address = page_address(swarm, role, view)
    typer.echo(f"{address}\nThis address opens one session, within 60 seconds. For another one, run the command again.")
    if not only_print:
        show_in_browser(address)


def check_view(view: str) -> None:
    """Raises `ConfigError` for a view that the page does not have."""
    name = re.split(r"[/?]", view.strip("#").strip("/"), maxsplit=1)[0]
    if name and name not in VIEWS:
        raise ConfigError(f"{view!r} is not a view: give one of {', '.join(VIEWS)}, or nothing for the Overview")


def page_address(swarm: Swarm, role: Literal["viewer", "client", "admin"], view: str) -> str:
    """Returns the address that opens one session of the page."""
    code = swarm.session_code(role).code
    path = view.strip("#").strip("/")
    server = swarm.url.partition("/runs/")[0]  # The code names the run.
    return f"{server}/#" + urlencode({"code": code, **({"to": f"/{path}"} if path else {})})


def has_browser(environ: Mapping[str, str]) -> bool:
    """True if a browser that this process starts is visible to its user."""
    if "SSH_CONNECTION" in environ:
        return False
    return sys.platform in ("darwin", "win32") or "DISPLAY" in environ or "WAYLAND_DISPLAY" in environ


def show_in_browser(address: str) -> None:
    """Opens an address. Without a browser, prints the command that forwards the port of a server on loopback to another
    machine."""
    from agentjet.client.connection import LOOPBACK

    server = urlsplit(address)
    if has_browser(os.environ):
        webbrowser.open(address)
    elif server.hostname in LOOPBACK:
        port = server.port or 80
        tunnel = f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        typer.echo(f"To open it on another machine, first run there: {tunnel}")
