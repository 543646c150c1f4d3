"""`Command`: any program as an agent, one process an episode. `CapturedProcess`: a program with a limit of its output.

The program finds the model in its environment (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`, and the same for
`ANTHROPIC_`). So an agent written with either SDK needs no change, in any language. In a run with named policies
`AGENTJET_POLICIES` has their names. `AGENTJET_MAX_TURNS` is set if the recipe limits the turns of the episode. No shell
is involved. The program runs in a fresh working directory and in a new process group (POSIX only).

* Every end of the episode (reward, crash, time-out, server, Ctrl-C) also ends the whole process group.
* A program that crashed, was too slow or printed more than 256 MiB is never scored.
* The client's own token is not in the program's environment.
* The output travels through pipes. A file would have no limit: a program, or a process that it left, could fill the
  disk. A program could also put another file into its place. A process that outlives the program holds the other end of
  a pipe open, so the reading ends with the program.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from agentjet import sandbox as sandboxes
from agentjet.client.connection import TOKEN_VARIABLE, URL_VARIABLE, without_proxy
from agentjet.client.episode import AsyncEpisode, Returned
from agentjet.client.threads import in_thread
from agentjet.errors import ConfigError
from agentjet.sandbox import Limits, Sandbox
from agentjet.types import Task, shown

MAX_KEPT_BYTES = 16 * 2**20
"""Longest part of each output in memory: the end of it."""
MAX_PRINTED_BYTES = 256 * 2**20
"""Longest output. A program that prints more is ended."""
CHUNK_BYTES = 2**16
LEFT_BYTES = 2**20
"""Longest part that is read after the program's end. It is the largest pipe of Linux."""
POLL_SECONDS = 0.1
"""Time until the end of a program is seen whose output another process holds open."""


class CapturedProcess:
    """A program in a new session. `wait` must be called: a program that nothing reads stops at a full pipe."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        limit: int = MAX_PRINTED_BYTES,
        merged: bool = False,
        copy: BinaryIO | None = None,
        sandbox: Sandbox | None = None,
        **options: Any,
    ) -> None:
        """`limit` is in bytes, for each output. `merged`: stderr goes to stdout. `copy` gets all output. `options` are
        those of `Popen`; in a sandbox `stdin` and `cwd`. Raises `OSError` for a program that cannot be started, and
        `ConfigError` for a sandbox that cannot be made.
        """
        self.exceeded = ""
        """Name of the output that exceeded the limit."""
        self._limit, self._copy = limit, copy
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if merged else subprocess.PIPE}
        self._process: subprocess.Popen[bytes] | sandboxes.SandboxProcess
        if sandbox is not None:
            self._process = sandbox.start(arguments, **options)
            self._limit = min(limit, sandbox.limits.output or limit)
        else:
            self._process = subprocess.Popen(arguments, bufsize=0, start_new_session=True, **options)
        self.stdin: Any = self._process.stdin
        self._pipes = {
            name: pipe
            for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
            if pipe is not None
        }
        self._ends = {name: bytearray() for name in self._pipes}
        self._num_bytes = dict.fromkeys(self._pipes, 0)

    @property
    def excess(self) -> str:
        """The reason why a limit ended the program, or ""."""
        if isinstance(self._process, sandboxes.SandboxProcess) and self._process.exceeded:
            return self._process.exceeded
        return self.exceeded and (
            f"printed more than {self._limit / 2**20:g} MiB to {self.exceeded} and was ended: print less, or write to "
            "a file"
        )

    def text(self, name: str = "stdout") -> str:
        """The end of an output, `MAX_KEPT_BYTES` at most."""
        return self._ends[name].decode(errors="replace")

    def tail(self, length: int) -> str:
        """The end of stderr, or of stdout if stderr is empty: many programs report their errors there."""
        for name in sorted(self._ends):
            if end := self._ends[name][-length:].decode(errors="replace").strip():
                return f"its {name} ends with: {end}"
        return "it printed nothing"

    def wait(self, seconds: float | None = None) -> int | None:
        """Reads the output until the program ends. Returns its exit code, or None if it runs after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for name, pipe in self._pipes.items():
                selector.register(pipe, selectors.EVENT_READ, name)
            while self._process.poll() is None:
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                self._read(selector, POLL_SECONDS)
            left = LEFT_BYTES
            while left > 0 and (num_read := self._read(selector, 0)):
                left -= num_read
        for pipe in self._pipes.values():
            pipe.close()  # A process that still writes there gets an error.
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program and the processes that it started."""
        if isinstance(self._process, sandboxes.SandboxProcess):
            self._process.send_signal(number)
            return
        with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, when nothing but a zombie is left
            os.killpg(self._process.pid, number)

    def _read(self, selector: selectors.BaseSelector, seconds: float) -> int:
        """Read once from each pipe that has output. Returns the number of bytes."""
        if not selector.get_map():  # The program closed its outputs, and runs.
            time.sleep(seconds)
            return 0
        total = 0
        for key, _ in selector.select(seconds):
            content = os.read(key.fd, CHUNK_BYTES)
            if not content:
                selector.unregister(key.fileobj)
            total += len(content)
            self._keep(key.data, content)
        return total

    def _keep(self, name: str, content: bytes) -> None:
        end = self._ends[name]
        end += content
        del end[:-MAX_KEPT_BYTES]
        self._num_bytes[name] += len(content)
        if self._num_bytes[name] > self._limit:
            self.exceeded = self.exceeded or name
            self.signal(signal.SIGKILL)
        elif self._copy is not None:
            self._copy.write(content)


PLACEHOLDER = re.compile(r"\{task((?:\.[\w-]+)*)\}")
BARE = re.compile(r"\{([\w-]+)\}")
GRACE_SECONDS = 1.0
"""Seconds from SIGTERM to SIGKILL."""
TAIL_BYTES = 1500
"""Longest part of stderr (of stdout, if stderr is empty) in the reason of an abort."""
FIRST_FAILURE_CODE = 125
"""From this exit code on a program could not be run or was killed, by the convention of shells, `env`, `timeout` and
`git bisect run`."""
POLICIES = "AGENTJET_POLICIES"
"""Variable with the names of the run's policies, separated by commas."""
WITHHELD = (TOKEN_VARIABLE, "ANTHROPIC_AUTH_TOKEN")
"""Variables that programs do not get: see `environment`."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables with the certificates that programs trust."""


def fill_placeholders(word: str, payload: Any) -> str:
    """`word` with its placeholders replaced. Raises `ConfigError` naming the existing keys.

    `{task}` is the task's payload as JSON, `{task.key}` one value of it, and `{task.a.b}` a nested one. Text is
    inserted as it is, other values as JSON. Other braces stay unchanged.
    """
    if isinstance(payload, Mapping):
        for name in BARE.findall(word):
            if name in payload and name != "task":
                raise ConfigError(f"{{{name}}} is not a placeholder: write {{task.{name}}}")

    def value(match: re.Match[str]) -> str:
        found = payload
        for key in filter(None, match[1].split(".")):
            if not isinstance(found, Mapping):
                raise ConfigError(f"{match[0]}: {json.dumps(found)[:60]} is not an object, so it has no keys")
            if key not in found:
                keys = ", ".join(sorted(map(str, found))) or "none"
                raise ConfigError(f"{match[0]}: the task has no {key!r}; its keys are: {keys}")
            found = found[key]
        return found if isinstance(found, str) else json.dumps(found)

    return PLACEHOLDER.sub(value, word)


def payload_json(task: Task) -> str:
    """The payload of a task as JSON. Raises `ConfigError` naming the task, and the value that is not JSON."""
    try:
        return json.dumps(task.payload, default=_refuse)
    except RecursionError:
        why = "it is nested too deeply"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise ConfigError(
        f"task {task.id!r}: its payload is not JSON: {why}. A program gets its task as JSON: give text, numbers, "
        "booleans, None, and lists and dicts of these; make text of other values with str()"
    )


def _refuse(value: object) -> None:
    raise TypeError(f"{shown(value)} is a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", ""))


@dataclass(frozen=True, slots=True)
class Result:
    """The output of a program, of which the last 16 MiB are kept. `seconds` is its running time. `folder` is its
    working directory, which is removed after scoring."""

    stdout: str
    stderr: str
    exit_code: int
    seconds: float
    folder: Path


Score = Callable[[Any, Result], Returned | Awaitable[Returned]]
"""`score(payload of the task, result) -> reward`. A plain function runs in a thread. An exception aborts the episode.
"""


class CommandFailed(Exception):
    """The program could not be started, crashed or was too slow: its episode is not scored."""


@dataclass(eq=False)
class Command:
    """An agent for `Swarm.train` and `Swarm.evaluate` that runs a program."""

    arguments: Sequence[str]
    """The command line; `{task}` in it becomes the task's payload as JSON, `{task.key}` one value of it."""
    score: Score
    """Computes the reward from the program's output."""
    _: KW_ONLY
    timeout: float | None = None
    """Seconds after which a program is ended and its episode aborted."""
    any_exit_code: bool = False
    """Score exit codes 1 to 124, too. Otherwise each code but 0 aborts the episode."""
    score_refused: bool = False
    """Score episodes in which the server refused a request, too. Otherwise they are aborted."""
    shared_home: bool = False
    """Inherit HOME, the XDG folders and TMPDIR. Otherwise each episode has its own."""
    code_version: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that replace those of the inherited environment."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Folders that the program runs from, with the originals. The reason of a failure names the originals."""
    sandbox: Limits | None = None
    """Limits of the sandbox that the program runs in. It sees its working directory, `readable` and the system's
    programs, inherits no variables, and reaches the episode's model only. None: it runs with the rights of this user.
    """
    readable: Sequence[Path] = ()
    """Files and folders that the program sees in a sandbox."""

    def __post_init__(self) -> None:
        if not self.arguments:
            raise ValueError("the command is empty: give a program and its arguments")

    @property
    def __wrapped__(self) -> Score:
        """`inspect.unwrap` finds the function by this name, so that an exception in it is shown with file and line."""
        return self.score

    def filled(self, task: Task) -> list[str]:
        """The command line for a task. Raises `ConfigError` if it names a key that the task does not have."""
        return [fill_placeholders(word, task.payload) for word in self.arguments]

    async def __call__(self, task: Task, episode: AsyncEpisode) -> Returned:
        with sandboxes.ProgramFolder(prefix="agentjet-") as place:
            result = await self._run(task, episode, Path(place))
            reward = await in_thread(self.score, task.payload, result)
            return await reward if inspect.isawaitable(reward) else reward

    async def _run(self, task: Task, episode: AsyncEpisode, place: Path) -> Result:
        """The result of a program that ended. Raises `CommandFailed` for one that is not scored."""
        folder = place / "work"
        folder.mkdir()
        own = dict(self.variables) | ({} if self.shared_home else own_folders(place))
        arguments = self.filled(task)
        started = time.monotonic()
        options: dict[str, Any] = {"cwd": folder, "stdin": subprocess.DEVNULL}
        if self.sandbox is not None:
            options["sandbox"] = Sandbox(
                folder=folder,
                writable=(place,),
                readable=tuple(self.readable),
                network="model",
                model_url=episode.base_url,
                limits=self.sandbox,
                variables=model_variables(task, episode) | own,
            )
        else:
            options["env"] = environment(task, episode) | own
        try:
            program = await _started(partial(CapturedProcess, arguments, **options))
        except OSError as error:
            raise CommandFailed(f"{arguments[0]} could not be started: {error.strerror or error}") from error
        exited = asyncio.ensure_future(in_thread(program.wait))
        try:
            await asyncio.wait([exited], timeout=self.timeout)
            if not exited.done():
                raise CommandFailed(f"the program ran longer than {self.timeout:g} s; {self._tail(program)}")
        finally:
            await _end(program, exited)
        seconds = time.monotonic() - started
        if not self.score_refused:
            await _check_refusals(episode)
        code = exited.result()
        assert code is not None
        if failure := program.excess or self._failure(code):
            raise CommandFailed(f"the program {failure}; {self._tail(program)}")
        return Result(program.text("stdout"), program.text("stderr"), code, seconds, folder)

    def _tail(self, program: CapturedProcess) -> str:
        text = program.tail(TAIL_BYTES)
        for copy, original in self.copies.items():
            text = text.replace(copy, original)
        return text

    def _failure(self, code: int) -> str:
        """The reason not to score an exit code, or ""."""
        if code < 0:
            return f"was ended by {_signal_name(-code)}"
        return f"ended with exit code {code}" if code >= FIRST_FAILURE_CODE or (code and not self.any_exit_code) else ""


def environment(task: Task, episode: AsyncEpisode) -> dict[str, str]:
    """The environment of a program: the inherited one, the model's address and key, its episode and its task.

    Variables that would lead an SDK elsewhere are removed or overridden: Anthropic's bearer token, which takes
    precedence over the key, and a proxy for a server on this machine. The client's token is removed, because it opens
    more than one episode. A run with named policies gives their names instead of a model's: the program chooses.
    """
    kept = {name: value for name, value in os.environ.items() if name not in WITHHELD}
    kept |= {name: os.path.abspath(kept[name]) for name in CERTIFICATES if kept.get(name)}  # It runs in another folder.
    return kept | without_proxy(urlsplit(episode.base_url).hostname, kept) | model_variables(task, episode)


def model_variables(task: Task, episode: AsyncEpisode) -> dict[str, str]:
    """The model's address and key, the episode and the task."""
    server, model = re.sub(r"/v1/?$", "", episode.base_url), episode.model
    named = {"OPENAI_MODEL": model, "ANTHROPIC_MODEL": model} if model else {POLICIES: ",".join(episode.policies)}
    named |= {"AGENTJET_MAX_TURNS": str(episode.max_turns)} if episode.max_turns else {}
    return named | {
        URL_VARIABLE: server,
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "ANTHROPIC_BASE_URL": server,
        "ANTHROPIC_API_KEY": episode.api_key,
        "AGENTJET_EPISODE": episode.id,
        "AGENTJET_TASK": payload_json(task),
    }


def own_folders(place: Path) -> dict[str, str]:
    """HOME and the folders that follow from it, created below `place`. Programs keep sessions, caches and settings
    there, which episodes must not share."""
    home = place / "home"
    folders = {
        "HOME": home,
        "XDG_CONFIG_HOME": home / ".config",
        "XDG_DATA_HOME": home / ".local" / "share",
        "XDG_STATE_HOME": home / ".local" / "state",
        "XDG_CACHE_HOME": home / ".cache",
        "TMPDIR": place / "tmp",
    }
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    return {name: str(folder) for name, folder in folders.items()}


async def _check_refusals(episode: AsyncEpisode) -> None:
    """Raises `CommandFailed` if the server refused a request of the program. Many programs exit with 0 nevertheless,
    and the reward would score the refusal."""
    view = await episode.heartbeat()
    if view.unscorable:
        refused = ", ".join(f"{name} ({count})" for name, count in view.refused.items())
        raise CommandFailed(f"the server refused requests of the program: {refused}")


async def _started(start: Callable[[], CapturedProcess]) -> CapturedProcess:
    """Starts a program in a thread: a sandbox takes tens of milliseconds. A cancelled start is ended."""
    starting = asyncio.ensure_future(in_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:

        def end(started: asyncio.Future[CapturedProcess]) -> None:
            if not started.cancelled() and started.exception() is None:
                started.result().signal(signal.SIGKILL)

        starting.add_done_callback(end)
        raise


async def _end(program: CapturedProcess, exited: asyncio.Future[int | None]) -> None:
    try:
        if not exited.done():
            program.signal(signal.SIGTERM)
            await asyncio.wait([exited], timeout=GRACE_SECONDS)
    finally:
        program.signal(signal.SIGKILL)
    await asyncio.wait([exited], timeout=GRACE_SECONDS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
