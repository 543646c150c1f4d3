"""Transcripts of HTTP: the requests that a client sent, byte by byte, and the answers.

    >>> POST /v1/chat/completions
    content-type: application/json

    BODY
    <<< 200
    content-type: application/json

    BODY

Ids are numbered in the order in which they appear, because each run has others; the episode's key is `KEY`, and times
are 0. A replay sends the ids of its own answers where the recorded requests have those of theirs.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conformance import child
from conformance.episode import JOB, Exercise
from conformance.exercises import EXERCISES
from conformance.policy import Policy
from tests.fakes import saying
from tests.locks.data_dirs import ADD, RECORDED, TOOLS, reply
from tests.locks.data_dirs import JOB as PLAIN_JOB
from tests.server.serving import Served, serving
from tests.timeline.models import make_model

FOLDER = RECORDED / "transcripts"
CONNECTION = {"host", "connection", "content-length", "transfer-encoding", "date", "server", "accept-encoding"}
"""Headers that are of the connection."""
ID = re.compile(r"(?<![0-9a-fA-F.])[0-9a-f]{16,}(?![0-9a-fA-F])|(?<=call_)[0-9a-f]{12}(?![0-9a-f])")
NUMBERED = re.compile(r"«(\d+)»")
TIMES = re.compile(r'("created(?:_at)?": ?)[\d.]+')


class Sent(NamedTuple):
    """A request as it was sent, or an answer."""

    head: str
    """`POST /path`, or a status."""
    headers: dict[str, str]
    body: str

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.headers.items() if name not in CONNECTION]
        return "\n".join([self.head, *lines, "", self.body, ""])

    @classmethod
    def parse(cls, text: str) -> Sent:
        head, _, body = text.partition("\n\n")
        first, *lines = head.split("\n")
        return cls(first, dict(line.split(": ", 1) for line in lines), body.removesuffix("\n"))


@dataclass
class Names:
    """The names of what each run has anew."""

    key: str
    ids: list[str] = field(default_factory=list)

    def hide(self, text: str) -> str:
        def number(found: re.Match[str]) -> str:
            if found[0] not in self.ids:
                self.ids.append(found[0])
            return f"«{self.ids.index(found[0])}»"

        return TIMES.sub(r"\g<1>0", ID.sub(number, text.replace(self.key, "KEY")))

    def show(self, text: str) -> str:
        """The text with the ids of this run."""
        return NUMBERED.sub(lambda found: self.ids[int(found[1])], text.replace("KEY", self.key))


class Recorder:
    """Keeps the requests of agents, and their answers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.exchanges: list[tuple[Sent, Sent]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/swarm/"):
            await self.app(scope, receive, send)
            return
        asked, answered, starts = bytearray(), bytearray(), []

        async def receive_and_keep() -> Message:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def send_and_keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                starts.append(message)
            answered.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive_and_keep, send_and_keep)
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        request = Sent(f"{scope['method']} {scope['path']}{query}", _headers(scope["headers"]), asked.decode())
        answer = Sent(str(starts[0]["status"]), _headers(starts[0]["headers"]), answered.decode())
        self.exchanges.append((request, answer))


def _headers(raw: Any) -> dict[str, str]:
    return {name.decode().lower(): value.decode() for name, value in raw}


# ---- clients ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A client, and the server that it talks to."""

    name: str
    play: Callable[[Served, dict[str, Any], Path], Awaitable[None]]
    """Runs the client on an episode."""
    serve: Callable[[Path], AbstractAsyncContextManager[Served]]
    mode: str = "train"
    """Mode of the episode."""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.http"


def of_exercise(name: str, exercise: Exercise) -> Scene:
    """A client of `conformance`, which runs in this environment."""

    def serve(folder: Path) -> AbstractAsyncContextManager[Served]:
        model = make_model(folder, exercise.template)
        policy = Policy(model, list(exercise.turns))
        job = {**JOB, "history": exercise.history, **exercise.job}
        return serving(folder / "data", policy, card=model.card, job=job, prepare=policy.attach)

    async def play(_: Served, episode: dict[str, Any], folder: Path) -> None:
        script, *arguments = exercise.command
        argv = [sys.executable, str(child.HERE / "clients" / script), *arguments]
        ended = await child.run(argv, {**episode, "model": exercise.model}, folder)
        assert ended.answer == exercise.answer, ended.errors

    return Scene(name, play, serve)


HELLO = [{"role": "user", "content": "hello the €"}]
SUM = [{"role": "system", "content": "You add."}, {"role": "user", "content": "the sum of 12 and 30?"}]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD, "strict": True}}
FORCED = {"type": "function", "function": {"name": "add"}}
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PLAIN: tuple[tuple[str, Any], ...] = (
    (CHAT, {"model": "policy", "messages": HELLO}),
    (CHAT, {"model": "policy", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"model": "policy", "messages": HELLO, "n": 2, "logprobs": True, "seed": 3, "user": "me"}),
    (CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 4, "top_k": 5, "top_logprobs": 0}),
    (CHAT, {"model": "policy@judge", "messages": HELLO, "stop": ["the"], "temperature": 0.5}),
    (CHAT, {"model": "policy", "messages": SUM, "tools": TOOLS, "tool_choice": "required"}),
    (CHAT, {"model": "policy", "messages": SUM, "tools": TOOLS, "tool_choice": FORCED, "stream": True}),
    (CHAT, {"model": "policy", "messages": HELLO, "response_format": JSON_SCHEMA}),
    (COMPLETIONS, {"model": "policy", "prompt": "hello the", "max_tokens": 3, "logprobs": 0}),
    (COMPLETIONS, {"model": "policy", "prompt": [1, 5, 6, 7], "stream": True}),
    (MESSAGES, {"model": "policy", "max_tokens": 50, "messages": HELLO, "system": "You are kind."}),
    (f"{MESSAGES}/count_tokens", {"model": "policy", "messages": HELLO}),
    (MESSAGES, {"model": "policy", "max_tokens": 2, "messages": HELLO, "stream": True}),
    (RESPONSES, {"model": "policy", "input": "hello", "instructions": "You are kind."}),
    (RESPONSES, {"model": "policy", "input": "and now?", "previous_response_id": "LAST", "stream": True}),
    (RESPONSES, {"model": "policy", "input": HELLO, "text": {"format": {"type": "json_object"}}}),
    (CHAT, {"model": "gpt-4o", "messages": HELLO}),
    (CHAT, {"model": "policy", "messages": HELLO, "best_of": 2}),
    (CHAT, {"model": "policy", "messages": []}),
    (CHAT, {"model": "policy", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    (COMPLETIONS, {"model": "policy", "prompt": "hello", "suffix": "x"}),
    (COMPLETIONS, {"model": "policy", "prompt": "hello", "echo": True}),
    (MESSAGES, {"model": "policy", "messages": HELLO}),
    (MESSAGES, {"model": "nobody", "max_tokens": 5, "messages": HELLO}),
    (RESPONSES, {"model": "policy", "input": "hello", "previous_response_id": "resp_none"}),
    (RESPONSES, {"model": "policy", "input": "hello", "background": True}),
    (CHAT, b'{"model": "policy", "messages": ['),
    (CHAT, b"\xc3\xa9"),
    ("/v1/embeddings", {"model": "policy", "input": "hello"}),
)
"""Requests of a program that sends JSON itself; the last ones are refused. `LAST` is the id of the last answer."""
SCORING: tuple[tuple[str, Any], ...] = (
    (COMPLETIONS, {"model": "policy", "prompt": "hello the", "logprobs": 1, "echo": True, "max_tokens": 1}),
    (COMPLETIONS, {"model": "policy", "prompt": [[5, 6], [7, 8]], "max_tokens": 2, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"model": "policy", "prompt": ["hello", "the"], "max_tokens": 2, "stream": True}),
    (CHAT, {"model": "policy", "messages": HELLO, "temperature": 0}),
)
"""Requests of an evaluation by likelihoods, in an episode of an evaluation."""


def serve_plain(folder: Path) -> AbstractAsyncContextManager[Served]:
    card = make_model(folder, "smollm2").card
    return serving(folder / "data", saying(reply), card=card, job=PLAIN_JOB)


async def play_plain(served: Served, episode: dict[str, Any], folder: Path) -> None:
    await send(served, episode, PLAIN)
    async with plain(served, episode) as http:
        for path in ("/v1/models", "/v1/models/policy", "/v1/models/none", "/v1/nothing", CHAT):
            await http.get(path)
        await http.get("/v1/models", headers={"Authorization": ""})
        await http.post(MESSAGES, json={"model": "policy"}, headers={"Authorization": "", "x-api-key": "wrong"})
        await http.post(f"/k/{episode['api_key']}{CHAT}", json=PLAIN[0][1], headers={"Authorization": ""})


async def play_scoring(served: Served, episode: dict[str, Any], folder: Path) -> None:
    await send(served, episode, SCORING)


def plain(served: Served, episode: dict[str, Any]) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {episode['api_key']}", "Content-Type": "application/json"}
    return httpx.AsyncClient(base_url=served.url, headers=headers, trust_env=False)


async def send(served: Served, episode: dict[str, Any], requests: Iterable[tuple[str, Any]]) -> None:
    last = ""
    async with plain(served, episode) as http:
        for path, body in requests:
            if isinstance(body, dict) and body.get("previous_response_id") == "LAST":
                body = {**body, "previous_response_id": last}
            answer = await (http.post(path, content=body) if isinstance(body, bytes) else http.post(path, json=body))
            last = answer.json().get("id", last) if answer.headers["content-type"] == "application/json" else last


CLIENTS = ("openai_sdk.py", "anthropic_sdk.py")
"""Clients of `conformance` whose packages the tests have."""


def scenes() -> list[Scene]:
    """One for each thing that these clients do, and one for each way in which the server can be set."""
    found: dict[str, Scene] = {}
    for exercise in EXERCISES:
        if exercise.command[0] in CLIENTS:
            name = f"{exercise.client}.{exercise.command[1]}"
            name += ".thinking" * (exercise.template != "smollm2") + ".role" * bool(exercise.role)
            found.setdefault(name, of_exercise(name, exercise))
    return [
        *found.values(),
        Scene("plain", play_plain, serve_plain),
        Scene("scoring", play_scoring, serve_plain, "eval"),
    ]


# ---- recording and replay --------------------------------------------------------------------------------------------


async def record(scene: Scene, folder: Path) -> str:
    """Plays the scene; returns its transcript."""
    async with scene.serve(folder) as served:
        recorder = Recorder(served.app.build_middleware_stack())
        served.app.middleware_stack = recorder
        episode = await served.begin(mode=scene.mode)
        await scene.play(served, episode, folder)
    return transcript(Names(episode["api_key"]), recorder.exchanges)


def transcript(names: Names, exchanges: list[tuple[Sent, Sent]]) -> str:
    return "".join(f">>> {names.hide(str(request))}<<< {names.hide(str(answer))}" for request, answer in exchanges)


async def replay(scene: Scene, recorded: str, folder: Path) -> str:
    """Sends the recorded requests; returns the transcript of the present answers."""
    parts = [Sent.parse(text) for text in re.split(r"(?m)^(?:>>>|<<<) ", recorded)[1:]]
    found = ""
    async with scene.serve(folder) as served:
        episode = await served.begin(mode=scene.mode)
        names = Names(episode["api_key"])
        async with httpx.AsyncClient(base_url=served.url, timeout=30, trust_env=False) as http:
            for asked in parts[::2]:
                method, path = names.show(asked.head).split(" ")
                headers = {name: names.show(value) for name, value in asked.headers.items()}
                request = httpx.Request(method, served.url + path, headers=headers, content=names.show(asked.body))
                answer = await http.send(request)
                sent = Sent(str(answer.status_code), _headers(answer.headers.raw), answer.text)
                found += f">>> {asked}<<< {names.hide(str(sent))}"
    return found


def record_all(folder: Path, names: Sequence[str]) -> None:
    """Writes the transcripts of all scenes, or of those named."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for scene in (one for one in scenes() if not names or one.name in names):
        scene.path.write_text(asyncio.run(record(scene, folder / scene.name)), encoding="utf-8")
