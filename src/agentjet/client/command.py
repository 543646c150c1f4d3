"""Placeholders in a command line: `{task}` is the task's payload as JSON, `{task.key}` one value of it, `{task.a.b}`
one further down. Text is filled in as it is, anything else as JSON. Every other brace stays what it is.

`Command`: any program as an agent, one process an episode.

The program finds the model in its environment (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`, and the same for
`ANTHROPIC_`), so an agent written with either SDK needs no change, in whatever language it is. No shell is
involved. It runs in a fresh working directory and in a process group of its own (POSIX only).

Invariants: whatever ends the episode (the reward, a crash, a time-out, the server, Ctrl-C) also ends the whole process
group; a program that crashed or was too slow is never scored; the client's own token is not in its environment.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentjet.client.connection import LOOPBACK, TOKEN_VARIABLE, inherited_environment
from agentjet.client.episode import AsyncEpisode
from agentjet.client.threads import in_thread
from agentjet.errors import ConfigError
from agentjet.types import Reward, Task

PLACEHOLDER = re.compile(r"\{task((?:\.[\w-]+)*)\}")
BARE = re.compile(r"\{([\w-]+)\}")


def filled(word: str, payload: Any) -> str:
    """`word` with its placeholders filled. Raises `ConfigError` naming the keys there are."""
    if isinstance(payload, Mapping):
        for name in BARE.findall(word):
            if name in payload and name != "task":
                raise ConfigError(f"{{{name}}} is no placeholder: write {{task.{name}}}")

    def value(match: re.Match[str]) -> str:
        found = payload
        for key in filter(None, match[1].split(".")):
            if not isinstance(found, Mapping):
                raise ConfigError(f"{match[0]}: there is nothing below {json.dumps(found)[:60]}, which is no object")
            if key not in found:
                keys = ", ".join(sorted(map(str, found))) or "none"
                raise ConfigError(f"{match[0]}: the task has no {key!r}; its keys are: {keys}")
            found = found[key]
        return found if isinstance(found, str) else json.dumps(found)

    return PLACEHOLDER.sub(value, word)


GRACE_SECONDS = 1.0
"""Between asking a program to end and ending it."""
TAIL_BYTES = 1500
"""How much of stderr, or of stdout where that is empty, goes into the reason of an abort."""
MAX_OUTPUT_BYTES = 16 * 2**20
"""How much of stdout, and of stderr, a `Result` holds: the end of it."""
FIRST_FAILURE_CODE = 125
"""Exit codes from here on say that a program could not be run or was killed, by the convention of shells, `env`,
`timeout` and `git bisect run`."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables in which programs find the certificates to trust."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a program left behind. `seconds` is how long it ran, `folder` its working directory, which is removed once
    the reward is known."""

    stdout: str
    stderr: str
    exit_code: int
    seconds: float
    folder: Path


Score = Callable[[Any, Result], float | Reward | Awaitable[float | Reward]]
"""`score(payload of the task, result) -> reward`. A plain function runs in a thread. An exception aborts the
episode."""


class CommandFailed(Exception):
    """The program could not be started, crashed or was too slow: there is nothing to score."""


class Command:
    """An agent for `Swarm.train` and `Swarm.evaluate`.

    `arguments` is the command line; `{task}` in it becomes the task's payload as JSON, `{task.key}` one value of it.
    `score` judges what the program did. An exit code other than 0 aborts the episode, unless `any_exit_code`: then 1 to
    124 are judged, too. An episode in which the server refused a request is aborted whatever the exit code is, unless
    `score_refused`. Each program has a HOME, XDG folders and TMPDIR of its episode, unless `shared_home`. `timeout` is
    in seconds.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        score: Score,
        *,
        timeout: float | None = None,
        any_exit_code: bool = False,
        score_refused: bool = False,
        shared_home: bool = False,
        code_version: str = "",
    ) -> None:
        if not arguments:
            raise ValueError("there is no command")
        self.arguments = tuple(arguments)
        self.timeout = timeout
        self.any_exit_code = any_exit_code
        self.score_refused = score_refused
        self.shared_home = shared_home
        self.code_version = code_version
        """What the server is told of the program's source."""
        # By this name Python's own tools find the function that stands behind a callable: an exception in it is shown
        # with its file and line.
        self.__wrapped__ = score

    def filled(self, task: Task) -> list[str]:
        """The command line for a task. Raises `ConfigError` when it names what the task has not."""
        return [filled(word, task.payload) for word in self.arguments]

    def changed(self, arguments: Sequence[str], score: Score, code_version: str) -> Command:
        """The same, of another version of its source."""
        return Command(
            arguments,
            score,
            timeout=self.timeout,
            any_exit_code=self.any_exit_code,
            score_refused=self.score_refused,
            shared_home=self.shared_home,
            code_version=code_version,
        )

    def __repr__(self) -> str:
        return f"Command({list(self.arguments)!r})"

    async def __call__(self, task: Task, episode: AsyncEpisode) -> float | Reward:
        with tempfile.TemporaryDirectory(prefix="agentjet-", ignore_cleanup_errors=True) as place:
            result = await self._run(task, episode, Path(place))
            if not self.score_refused:
                await _check_refusals(episode)
            self._check(result)
            reward = await in_thread(self.__wrapped__, task.payload, result)
            return await reward if inspect.isawaitable(reward) else reward

    async def _run(self, task: Task, episode: AsyncEpisode, place: Path) -> Result:
        folder, stdout, stderr = place / "work", place / "stdout", place / "stderr"
        folder.mkdir()
        given = environment(task, episode) | ({} if self.shared_home else own_folders(place))
        arguments = self.filled(task)
        started = time.monotonic()
        # Files, not pipes: a process that outlives the program would hold a pipe open, and nothing is read meanwhile.
        with stdout.open("wb") as out, stderr.open("wb") as err:
            try:
                process = subprocess.Popen(
                    arguments,
                    cwd=folder,
                    env=given,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandFailed(f"{arguments[0]} could not be started: {error.strerror or error}") from error
        exited = asyncio.ensure_future(in_thread(process.wait))
        try:
            await asyncio.wait([exited], timeout=self.timeout)
            if not exited.done():
                raise CommandFailed(f"it ran longer than {self.timeout:g} s{_tail(place)}")
        finally:
            await _end(process, exited)
        return Result(_text(stdout), _text(stderr), exited.result(), time.monotonic() - started, folder)

    def _check(self, result: Result) -> None:
        """Raises `CommandFailed` for a program that crashed."""
        code, tail = result.exit_code, _tail(result.folder.parent)
        if code < 0:
            raise CommandFailed(f"it was ended by {_signal_name(-code)}{tail}")
        if code >= FIRST_FAILURE_CODE or (code and not self.any_exit_code):
            raise CommandFailed(f"exit code {code}{tail}")


def environment(task: Task, episode: AsyncEpisode, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a program is given to know: the model's address and key, its episode and its task, beside what is inherited.

    What would lead an SDK elsewhere is taken out: Anthropic's bearer token, which goes before its key, and a proxy for
    a server on this machine. So is the client's token, which opens more than one episode.
    """
    base = inherited_environment() if inherited is None else inherited
    kept = {name: value for name, value in base.items() if name not in (TOKEN_VARIABLE, "ANTHROPIC_AUTH_TOKEN")}
    kept |= {name: os.path.abspath(kept[name]) for name in CERTIFICATES if kept.get(name)}  # It runs in another folder.
    address = urlsplit(episode.base_url)
    if address.hostname in LOOPBACK:
        direct = ",".join(filter(None, [kept.get("NO_PROXY") or kept.get("no_proxy", ""), address.hostname]))
        kept |= {"NO_PROXY": direct, "no_proxy": direct}
    return kept | {
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "OPENAI_MODEL": episode.model,
        "ANTHROPIC_BASE_URL": re.sub(r"/v1/?$", "", episode.base_url),
        "ANTHROPIC_API_KEY": episode.api_key,
        "ANTHROPIC_MODEL": episode.model,
        "AGENTJET_EPISODE": episode.id,
        "AGENTJET_TASK": json.dumps(task.payload),
    }


def own_folders(place: Path) -> dict[str, str]:
    """HOME and the folders that follow from it, made below `place`: programs keep sessions, caches and settings there,
    which episodes must not share."""
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
    """Raises `CommandFailed` when the server refused a request of the program: many exit with 0 all the same, and the
    reward would judge the refusal."""
    view = await episode.heartbeat()
    if view.unscorable:
        refused = ", ".join(f"{name} ({count})" for name, count in view.refused.items())
        raise CommandFailed(f"the server refused requests of the program: {refused}")


async def _end(process: subprocess.Popen[bytes], exited: asyncio.Future[int]) -> None:
    """End the program, and whatever it left running in its process group."""
    try:
        if not exited.done():
            _signal_group(process, signal.SIGTERM)
            await asyncio.wait([exited], timeout=GRACE_SECONDS)
    finally:
        _signal_group(process, signal.SIGKILL)
    await asyncio.wait([exited], timeout=GRACE_SECONDS)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:  # macOS, when nothing but a zombie is left
        pass


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _text(path: Path, limit: int = MAX_OUTPUT_BYTES) -> str:
    """The last `limit` bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return file.read().decode(errors="replace")


def _tail(place: Path) -> str:
    """The end of stderr, or of stdout if stderr is empty: many programs report their errors there."""
    for name in ("stderr", "stdout"):
        if end := _text(place / name, TAIL_BYTES).strip():
            return f"; its {name} ends with: {end}"
    return "; its stderr and its stdout are empty"
