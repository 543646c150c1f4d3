"""Teachers: a stronger model behind an OpenAI-compatible API, whose answers to the user's agent become demonstrations.

* `TeacherProxy` is a server on loopback. Agents get its address instead of the teacher's. It forwards their chat
  completions, and records each with its answer. The key of the teacher stays here.
* `conversations` makes demonstrations from the recorded calls of an episode.
* `CollectedFile` is the file of demonstrations. It grows with each episode, so an interrupted collection continues.
* `collect` runs the agent on tasks.

The teacher is asked without `stream`. An agent that streams gets the whole answer as one event.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import secrets
import sys
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx

from agentjet.client.connection import ClientSettings, Connection, ForeignAnswer, Retry
from agentjet.client.demonstrations import Example, read_demonstrations
from agentjet.client.episode import AsyncEpisode, Endpoint
from agentjet.client.inputs import task_digest
from agentjet.client.report import EpisodeResult, EvalReport
from agentjet.client.rollout import Agent, RolloutSpec, wait_for_first
from agentjet.client.threads import LoopThread
from agentjet.client.training import run_evaluation
from agentjet.errors import (
    AgentJetError,
    ConfigError,
    Forbidden,
    InvalidRequest,
    NotFound,
    RequestError,
    ServerFailed,
    Unauthorized,
    Unavailable,
    Unreachable,
    redact,
)
from agentjet.protocol import BeginRequest, refusal_of, status_of
from agentjet.types import Task

ANSWER_WAIT = 570.0
"""Seconds that the teacher may need for an answer, besides the usual limit of a request."""
TEACHER_KEY_VARIABLE = "AGENTJET_TEACHER_KEY"
CHAT_PATH = "/v1/chat/completions"
WHOLE = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of answers that are learned. Others were cut: the policy would learn to end in the middle."""
ANSWER_KEYS = ("content", "reasoning_content", "tool_calls")


class TeacherFailed(AgentJetError):
    """The teacher cannot be asked: a wrong address, key or model."""


class TeacherConnection(Connection):
    """The connection to an OpenAI-compatible endpoint."""

    prefix = ""

    def _unreachable(self, problem: Exception) -> Unreachable:
        reason = str(problem) or type(problem).__name__
        if isinstance(problem, ForeignAnswer):
            reason = "it answered with something else than JSON"
        return Unreachable(
            f"no answer from the teacher at {redact(self.settings.url)} ({reason}): give the address of an "
            "OpenAI-compatible endpoint, such as https://api.example.com/v1"
        )

    def _error(self, response: httpx.Response) -> RequestError:
        status, wait = response.status_code, response.headers.get("Retry-After", "")
        try:
            error = response.json()["error"]
            text = str(error["message"] if isinstance(error, Mapping) else error)
        except (ValueError, KeyError, TypeError, RecursionError):
            text = response.text[:300] or response.reason_phrase
        if self.settings.token:
            text = text.replace(self.settings.token, "***")
        text = f"the teacher at {redact(self.settings.url)} answered {status}: {text}"
        if status == 429 or status >= 500:
            return Unavailable(text, retry_after=float(wait) if wait.isdecimal() else 0.0)
        if status == 401:
            text += f" (give its key as an argument, or to a command in {TEACHER_KEY_VARIABLE})"
        if status == 404:
            text += " (check the address, which ends with /v1 at most endpoints, and the model's name)"
        return refusal_of(status)(text)


# ---- recording -------------------------------------------------------------------------------------------------------


class TaughtCall(NamedTuple):
    """A request of an agent, and one answer of the teacher."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: dict[str, Any]
    finish_reason: str


@dataclass(eq=False)
class TaughtEpisode:
    """The calls of one attempt."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """The key that the agent has."""
    calls: list[TaughtCall] = field(default_factory=list)


class TeacherProxy:
    """Forwards the calls of agents to the teacher, from a thread that agents cannot block, and records them."""

    def __init__(self, teacher: Endpoint, retry: Retry) -> None:
        key = "" if teacher.api_key == "none" else teacher.api_key
        settings = ClientSettings(teacher.base_url.rstrip("/"), key, "collect")
        self.failed: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Raises if no further call can be answered."""
        self._teacher = teacher
        self._connection = TeacherConnection(settings, retry=retry)
        self._loop = LoopThread()
        self._episodes: dict[str, TaughtEpisode] = {}
        self._asking: set[concurrent.futures.Future[dict[str, Any]]] = set()
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self))
        serve = partial(self._server.serve_forever, poll_interval=0.05)
        threading.Thread(target=serve, daemon=True, name="teacher-proxy").start()

    def begin(self, request: BeginRequest) -> tuple[AsyncEpisode, TaughtEpisode]:
        """Begin an episode whose agent calls the teacher through this proxy."""
        taught = TaughtEpisode()
        self._episodes[taught.key] = taught
        url = f"http://127.0.0.1:{self._server.server_port}/v1"
        return replace(self._teacher, base_url=url, api_key=taught.key).begin(request), taught

    def end(self, taught: TaughtEpisode) -> None:
        """Refuse further calls of an attempt."""
        self._episodes.pop(taught.key, None)

    def complete(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The teacher's answer to a body of `CHAT_PATH`. Blocks; raises a `RequestError` or `Unreachable`."""
        if (taught := self._episodes.get(key)) is None:
            raise Unauthorized("this key is not that of an episode: give the client episode.api_key")
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
            raise InvalidRequest("messages is a list of messages with role and content", param="messages")
        asking = self._loop.submit(self._ask(taught, body))
        self._asking.add(asking)
        try:
            return asking.result()
        except concurrent.futures.CancelledError:
            raise ServerFailed("the collection has ended") from None
        except (Unauthorized, Forbidden, NotFound, Unreachable) as error:
            if not self.failed.done():
                self.failed.set_exception(TeacherFailed(str(error)))
            raise
        finally:
            self._asking.discard(asking)

    async def _ask(self, taught: TaughtEpisode, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        asked["model"] = self._teacher.model
        answer = await self._connection.request("POST", "/chat/completions", body=asked, server_wait=ANSWER_WAIT)
        try:
            calls = [
                TaughtCall(
                    body["messages"],
                    body.get("tools") or [],
                    _assistant(choice["message"]),
                    choice.get("finish_reason") or "",
                )
                for choice in answer["choices"]
            ]
            for message in (*body["messages"], *(call.answer for call in calls)):
                _meaning(message)  # Raises now, and not at the end of the episode.
        except (KeyError, TypeError, AttributeError):
            raise ServerFailed(f"the teacher at {self._connection.settings.url} answered without choices") from None
        taught.calls += calls
        return dict(answer)

    async def close(self) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        for asking in [*self._asking]:
            asking.cancel()
        if self._loop.is_running:
            await asyncio.wrap_future(self._loop.submit(self._connection.close()))
            self._loop.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # An agent may hang up.
            super().handle_error(request, client_address)


def _assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the teacher or of an agent, with the keys that are learned."""
    reasoning = {"reasoning_content": message["reasoning"]} if message.get("reasoning") else {}
    known = {key: message[key] for key in ANSWER_KEYS if message.get(key)}
    return {"role": "assistant", "content": "", **reasoning, **known}


class _Handler(BaseHTTPRequestHandler):
    """One connection of an agent."""

    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: TeacherProxy, *args: Any) -> None:
        self._proxy = proxy
        super().__init__(*args)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.path.rstrip("/") != CHAT_PATH:
                raise NotFound(f"{self.path}: answers of a teacher are recorded for {CHAT_PATH} only")
            try:
                body = json.loads(content)
            except (ValueError, RecursionError):
                body = None
            if not isinstance(body, dict):
                raise InvalidRequest("the body is not a JSON object")
            answer = self._proxy.complete(self.headers.get("Authorization", "").removeprefix("Bearer "), body)
        except (RequestError, Unreachable) as error:
            status = status_of(error) if isinstance(error, RequestError) else 502
            kind = "invalid_request_error" if status < 500 else "server_error"
            code = getattr(error, "code", "unreachable")
            # The proxy has retried: a client that did so, too, would multiply the waits.
            self._send(status, {"error": {"message": str(error), "type": kind, "param": None, "code": code}})
            return
        if body.get("stream"):
            usage = (body.get("stream_options") or {}).get("include_usage", False)
            events = "".join(f"data: {json.dumps(event)}\n\n" for event in _events(answer, usage))
            self._write(200, "text/event-stream", f"{events}data: [DONE]\n\n".encode())
        else:
            self._send(200, answer)

    def do_GET(self) -> None:
        self._send(404, {"error": {"message": f"{self.path}: there is only POST {CHAT_PATH}", "code": "not_found"}})

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        self._write(status, "application/json", json.dumps(body).encode())

    def _write(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("x-should-retry", "false")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the progress of the episodes is shown."""


def _events(answer: Mapping[str, Any], with_usage: bool) -> Iterator[dict[str, Any]]:
    head = {key: value for key, value in answer.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    for choice in answer["choices"]:
        delta = {key: value for key, value in choice["message"].items() if value is not None}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        shown = {"index": choice.get("index", 0), "delta": delta, "finish_reason": None}
        yield {**head, "choices": [shown]}
        yield {**head, "choices": [{**shown, "delta": {}, "finish_reason": choice.get("finish_reason")}]}
    if with_usage:
        yield {**head, "choices": [], "usage": answer.get("usage")}


# ---- demonstrations --------------------------------------------------------------------------------------------------


def conversations(calls: Sequence[TaughtCall]) -> list[dict[str, Any]]:
    """The demonstrations of an episode: one for each call whose answer no later call sends back.

    Each whole answer of the teacher is learned once, in the context in which it was given. Other assistant messages
    have weight 0: the agent wrote or changed them, they were cut, or another demonstration has them.
    """
    ends: dict[str, int] = {}
    paths: list[dict[int, int]] = []
    """For each call the calls whose answers it sends back, by the place in its messages."""
    for number, call in enumerate(calls):
        texts = [_meaning(message) for message in call.messages]
        paths.append(
            {
                at: ends[prefix]
                for at, message in enumerate(call.messages)
                if message.get("role") == "assistant" and (prefix := "\n".join(texts[: at + 1])) in ends
            }
        )
        ends["\n".join([*texts, _meaning(call.answer)])] = number
    continued = {number for path in paths for number in path.values()}
    learned: set[int] = set()
    found = []
    for number, (call, path) in enumerate(zip(calls, paths, strict=True)):
        if number in continued:
            continue
        messages = []
        places = {**path, len(call.messages): number}
        for at, message in enumerate([*call.messages, call.answer]):
            if message.get("role") == "assistant":
                source = places.get(at)
                is_new = source is not None and source not in learned and calls[source].finish_reason in WHOLE
                learned |= {source} if is_new and source is not None else set()
                message = _assistant(message if source is None else calls[source].answer)
                message |= {} if is_new else {"weight": 0}
            messages.append(message)
        if any(message["role"] == "assistant" and "weight" not in message for message in messages):
            found.append({"messages": messages, "tools": json.dumps(call.tools, ensure_ascii=False)})
    return found


def _meaning(message: Mapping[str, Any]) -> str:
    """The parts of a message that an agent sends back unchanged."""
    if message.get("role") != "assistant":
        return json.dumps(message, sort_keys=True)
    calls = [
        (call.get("function", {}).get("name"), call.get("function", {}).get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps(["assistant", message.get("content") or "", calls], sort_keys=True)


class CollectedFile:
    """A file of demonstrations that grows, and beside it one of the episodes whose reward was too low."""

    def __init__(self, path: Path, keep: float) -> None:
        """Raises `ConfigError` for a file that cannot be read or written, or has another `keep`."""
        if not math.isfinite(keep):
            raise ConfigError(f"keep = {keep}: give a finite number")
        if not path.name or path.is_dir() or not path.absolute().parent.is_dir():
            raise ConfigError(f"{str(path)!r} is not the name of a file in a folder that exists")
        self.path, self.keep = path, keep
        self.low_path = path.with_suffix(f".low{path.suffix}")
        self.num_kept = self.num_low = 0
        """Episodes in the files."""
        self._known: Counter[str] = Counter()
        for file in (self.path, self.low_path):
            self._read(file)

    def num_of(self, task: Task) -> int:
        return self._known[task_digest(task)]

    def add(self, task: Task, result: EpisodeResult, taught: TaughtEpisode) -> bool:
        """Record a scored episode. Returns False if it has no answer to learn."""
        assert result.reward is not None
        digest = task_digest(task)
        facts = {"task_id": task.id, "task_set": task.task_set, "task_digest": digest, "reward": result.reward}
        rows = [{**row, **facts, "episode_id": taught.id} for row in conversations(taught.calls)]
        if rows:
            is_kept = result.reward >= self.keep
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            with open_file(self.path if is_kept else self.low_path, "ab") as out:
                out.write(lines.encode(errors="backslashreplace"))
            self._count(digest, is_kept)
        return bool(rows)

    def _count(self, digest: str, is_kept: bool) -> None:
        self._known[digest] += 1
        self.num_kept += is_kept
        self.num_low += not is_kept

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        is_kept_file = path == self.path
        episodes: dict[str, str] = {}
        with open_file(path, "rb") as file:
            lines = file.read().splitlines(keepends=True)
        torn = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        wrong = "is not from a collection; give another file for the new episodes"
        for number, line in enumerate(lines, 1):
            place = f"{path} line {number}"
            try:
                row = json.loads(line)
                reward, episode, digest = float(row["reward"]), row["episode_id"], row["task_digest"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ConfigError(f"{place} {wrong}") from None
            if (reward >= self.keep) != is_kept_file:
                raise ConfigError(
                    f"{place} has the reward {reward:g}, so it was collected with another keep than {self.keep:g}: "
                    "give the same one, or another file"
                )
            episodes[episode] = digest
        if torn:  # A kill left the line unfinished.
            if not torn.startswith(BEGINNING[: len(torn)]):
                raise ConfigError(f"{path} line {len(lines) + 1} {wrong}")
            with open_file(path, "r+b") as file:
                file.truncate(sum(map(len, lines)))
        for digest in episodes.values():
            self._count(digest, is_kept_file)


BEGINNING = b'{"messages": ['
"""The beginning of every line."""


@contextmanager
def open_file(path: Path, mode: str) -> Iterator[IO[Any]]:
    """An open file. Raises `ConfigError` if it cannot be read or written."""
    try:
        with path.open(mode) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


# ---- collecting ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collected:
    """The result of `collect`."""

    file: CollectedFile
    report: EvalReport | None
    """The episodes of this call, with the teacher's score; None if the file had all of them."""
    num_silent: int
    """Scored episodes without an answer of the teacher that can be learned."""

    @property
    def demonstrations(self) -> list[Example]:
        """The kept episodes of the whole file, for `sft`."""
        return read_demonstrations(self.file.path)[0]

    @property
    def reasons(self) -> str:
        """The counts, and the most frequent reason of failures."""
        common = [] if self.report is None else self.report.errors.most_common(1)
        silent = "; the agent must call episode.base_url with episode.api_key" if self.num_silent else ""
        return f"{self}{f'; the most frequent failure: {common[0][0]}' if common else ''}{silent}"

    def __str__(self) -> str:
        failed = 0 if self.report is None else len(self.report.results) - len(self.report.finished)
        counts = {
            "kept": self.file.num_kept,
            f"below the reward {self.file.keep:g}": self.file.num_low,
            "failed": failed,
            "without a whole answer of the teacher": self.num_silent,
        }
        return f"{self.file.path}: episodes " + ", ".join(
            f"{name} {count}" for name, count in counts.items() if count or name == "kept"
        )


@asynccontextmanager
async def _proxy(teacher: Endpoint, retry: Retry) -> AsyncIterator[TeacherProxy]:
    proxy = TeacherProxy(teacher, retry)
    try:
        yield proxy
    finally:
        await proxy.close()


async def collect(
    agent: Agent,
    tasks: Sequence[Task],
    teacher: Endpoint,
    file: CollectedFile,
    request: BeginRequest,
    *,
    repeats: int,
    concurrency: int,
    progress: bool,
    retry: Retry,
) -> Collected:
    """See `AsyncSwarm.collect`. `request` is that of an episode, for its fields besides the task."""
    wanted = [task for task in tasks for _ in range(repeats - file.num_of(task))]
    if not wanted:
        return Collected(file, None, 0)
    taught: dict[int, TaughtEpisode] = {}
    num_silent = 0
    reports: list[EvalReport] = []

    async with _proxy(teacher, retry) as proxy:

        def ended(spec: RolloutSpec, result: EpisodeResult) -> None:
            nonlocal num_silent
            played = taught.pop(spec.index)
            proxy.end(played)
            if result.outcome == "finished" and not file.add(spec.task, result, played):
                num_silent += 1

        async def start(spec: RolloutSpec) -> tuple[AsyncEpisode, Agent]:
            update = {"task_id": spec.task.id, "task_set": spec.task.task_set}
            if spec.index in taught:
                proxy.end(taught[spec.index])
            episode, taught[spec.index] = proxy.begin(request.model_copy(update=update))
            return episode, agent

        async def run() -> None:
            reports.append(
                await run_evaluation(
                    start,
                    wanted,
                    repeats=1,
                    concurrency=concurrency,
                    progress=progress,
                    title="collecting",
                    capacity=getattr(agent, "capacity", None),
                    on_end=ended,
                )
            )

        async def failing() -> None:
            await asyncio.wrap_future(proxy.failed)

        await wait_for_first([failing(), run()])
    return Collected(file, reports[0], num_silent)
