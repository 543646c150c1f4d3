"""A stronger model plays the user's agent, over real sockets: what is recorded, kept, continued and refused.

1. Turns, tools and streams become conversations. Each whole answer is learned once.
2. Episodes are kept by their reward. The file grows, and an interrupted collection continues.
3. The key of the teacher is in no file and no message. Agents do not see it.
4. A teacher that is away, refuses or fails ends the collection or the episode with its sentence.
5. `agentjet sft --teacher` trains on the file.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.client import AgentFailing, AsyncSwarm, Collected, Endpoint, Retry, TeacherFailed
from agentjet.client.teacher import TaughtCall, conversations
from agentjet.errors import ConfigError
from agentjet.types import Task
from tests.client.test_real_server import client
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

KEY = "sk-the-key-of-the-teacher"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TASKS = [Task(f"t{n}", payload=n) for n in range(4)]
Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


def message(finish_reason: str = "stop", **message: Any) -> tuple[int, dict[str, Any]]:
    answered = {"role": "assistant", "content": None, **message}
    choice = {"index": 0, "message": answered, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "c", "object": "chat.completion", "created": 1, "model": "strong"}
    return 200, {**head, "choices": [choice], "usage": usage}


def doubled(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Asks for the tool first, if there is one; then answers twice the number of the question."""
    number = int(body["messages"][0]["content"])
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        function = {"name": "add", "arguments": json.dumps({"a": number})}
        return message("tool_calls", tool_calls=[{"id": "call_1", "type": "function", "function": function}])
    return message(content=str(2 * number))


class Scripted(ThreadingHTTPServer):
    """A teacher that answers by a function."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked = answer, list[tuple[str, dict[str, Any]]]()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self.server_port}/v1", "strong", KEY)


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.headers["Authorization"], body))
        status, answer = self.server.answer(body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def teacher() -> Iterator[Scripted]:
    server = Scripted(doubled)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def agent(task: Task, episode: Any) -> float:
    """Two turns with a tool, one as a stream; its reward is 0 for the third task."""
    assert KEY not in (episode.api_key, episode.base_url)
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as llm:
        messages: list[Any] = [{"role": "user", "content": str(task.payload)}]
        asked: Any = {"model": episode.model, "messages": messages, "tools": [ADD]}
        first = llm.chat.completions.create(**asked).choices[0].message
        messages += [first.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "ok"}]
        with llm.chat.completions.stream(**asked) as stream:
            answer = stream.get_final_completion().choices[0].message.content
    return float(answer == str(2 * task.payload) and task.payload != 2)


def once(task: Task, episode: Any) -> float:
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as llm:
        llm.chat.completions.create(model="any", messages=[{"role": "user", "content": str(task.payload)}])
    return 1.0


async def collect(path: Path, endpoint: Endpoint, **options: Any) -> Collected:
    given = {"agent": agent, "tasks": TASKS, "concurrency": 2, "progress": False, **options}
    quick = Retry(first_patience=0.2, patience=0.4, first_delay=0.01, longest_delay=0.1)
    async with AsyncSwarm("http://127.0.0.1:9", "t", retry=quick) as swarm:
        return await swarm.collect(given.pop("agent"), given.pop("tasks"), endpoint, path / "c.jsonl", **given)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_turns_tools_and_streams_become_conversations(tmp_path: Path, teacher: Scripted) -> None:
    collected = await collect(tmp_path, teacher.endpoint)
    assert str(collected) == f"{tmp_path}/c.jsonl: episodes kept 3, below the reward 1 1"
    assert [body["model"] for _, body in teacher.asked] == ["strong"] * 8
    assert {key for key, _ in teacher.asked} == {f"Bearer {KEY}"}
    assert not any("stream" in body for _, body in teacher.asked)
    assert [row["task_id"] for row in rows(tmp_path / "c.low.jsonl")] == ["t2"]
    found = {row["task_id"]: row for row in rows(tmp_path / "c.jsonl")}
    assert sorted(found) == ["t0", "t1", "t3"] and json.loads(found["t3"]["tools"]) == [ADD]
    asked, call, told, answer = found["t3"]["messages"]
    assert (asked["content"], told["content"], answer) == ("3", "ok", {"role": "assistant", "content": "6"})
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 3}'} and "weight" not in call
    assert KEY not in "".join(file.read_text() for file in tmp_path.iterdir())
    assert len(collected.demonstrations) == 3


async def test_an_interrupted_collection_continues(tmp_path: Path, teacher: Scripted) -> None:
    await collect(tmp_path, teacher.endpoint, tasks=TASKS[:3])
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "us')  # a kill in the middle of a line
    num_asked = len(teacher.asked)
    collected = await collect(tmp_path, teacher.endpoint)
    assert len(teacher.asked) - num_asked == 2 and collected.file.num_kept == 3
    changed = [Task("t0", payload=7), *TASKS[1:]]
    assert (await collect(tmp_path, teacher.endpoint, tasks=changed, repeats=2)).file.num_kept == 7
    assert len(teacher.asked) - num_asked == 2 + 2 * (2 + 3), "an equal id with another payload is another task"
    again = await collect(tmp_path, teacher.endpoint, tasks=changed, repeats=2)
    assert again.report is None and len(rows(tmp_path / "c.jsonl")) == 7
    with pytest.raises(ConfigError, match=r"c.low.jsonl line 1 has the reward 0, .* another keep than 0"):
        await collect(tmp_path, teacher.endpoint, keep=0)
    for text in ('{"id": "t1"}\n{"id": "t2"}', '{"id": "t1"}'):  # a file of something else keeps its last line
        (tmp_path / "c.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"c.jsonl line 1 is not from a collection"):
            await collect(tmp_path, teacher.endpoint)
        assert (tmp_path / "c.jsonl").read_text() == text


async def test_failures(tmp_path: Path, teacher: Scripted) -> None:
    def failing(task: Task, episode: Any) -> float:
        raise RuntimeError("broken")

    def silent(task: Task, episode: Any) -> float:
        return 1.0

    refused = {"error": {"message": f"Incorrect API key provided: {KEY}", "code": "invalid_api_key"}}
    unknown = {"error": {"message": "The model `strong` does not exist", "code": "model_not_found"}}
    cases: list[tuple[Answer, dict[str, Any], type[Exception], str]] = [
        (lambda body: (401, refused), {}, TeacherFailed, r"answered 401: Incorrect API key provided: \*\*\*"),
        (
            lambda body: (404, unknown),
            {},
            TeacherFailed,
            r"answered 404: The model `strong` does not exist \(check the address",
        ),
        (lambda body: (400, {"error": "max_tokens"}), {}, AgentFailing, "answered 400: max_tokens"),
        (lambda body: (503, {}), {}, AgentFailing, "answered 503"),
        (lambda body: (200, {"choices": 1}), {}, AgentFailing, "answered without choices"),
        (doubled, {"agent": failing}, AgentFailing, "broken"),
        (doubled, {"agent": silent}, ConfigError, "without a whole answer of the teacher 4; the agent must call"),
        (doubled, {"keep": 2}, ConfigError, "nothing to learn: .* kept 0, below the reward 2 4"),
        (lambda body: message("length", content="cut"), {"agent": once}, ConfigError, "without a whole answer"),
        (doubled, {"tasks": []}, ValueError, "there are no tasks"),
    ]
    for number, (answer, options, kind, why) in enumerate(cases):
        teacher.answer, folder = answer, tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(kind, match=why):
            await collect(folder, teacher.endpoint, **options)
    with pytest.raises(TeacherFailed, match=r"no answer from the teacher at http://127.0.0.1:9/v1 \(.*\): give the"):
        await collect(tmp_path, Endpoint("http://127.0.0.1:9/v1", "strong"))


async def test_an_overload_is_waited_for(tmp_path: Path, teacher: Scripted) -> None:
    refusals = iter([429, 500])
    teacher.answer = lambda body: (status, {}) if (status := next(refusals, 0)) else doubled(body)
    assert (await collect(tmp_path, teacher.endpoint, agent=once)).file.num_kept == 4


def test_each_answer_is_learned_once() -> None:
    def call(messages: list[str], answer: str, finish_reason: str = "stop") -> TaughtCall:
        roles = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(messages)]
        return TaughtCall(roles, [], {"role": "assistant", "content": answer}, finish_reason)

    calls = [
        call(["a"], "b"),
        call(["a", "b", "c"], "d"),
        call(["a", "b", "e"], "f"),  # a branch
        call(["a", "changed", "g"], "h"),
        call(["i"], "cut", "length"),
        call(["i", "cut", "on"], "j"),
    ]
    shown = [
        [(message["content"], message.get("weight")) for message in row["messages"] if message["role"] == "assistant"]
        for row in conversations(calls)
    ]
    assert shown == [
        [("b", None), ("d", None)],
        [("b", 0), ("f", None)],
        [("changed", 0), ("h", None)],
        [("cut", 0), ("j", None)],
    ]


async def test_the_file_is_learned(tmp_path: Path, teacher: Scripted) -> None:
    collected = await collect(tmp_path, teacher.endpoint, agent=once)
    async with serving(tmp_path / "d") as served, client(served) as swarm:
        report = await swarm.sft(collected.demonstrations, progress=False)
        assert report.num_answers == 4 and served.run.compute.learned == [0]


URL = ["--teacher", "http://127.0.0.1:9/v1"]
OPTIONS = [
    ([], "give FILE.jsonl, or --teacher URL"),
    (["f.jsonl", "--keep", "0"], "--keep is for --teacher URL"),
    (["f.jsonl", *URL], "f.jsonl and --teacher exclude each other"),
    (["--teacher", "host/v1"], "--teacher 'host/v1' is not a URL"),
    (URL, r"also give the model's name \(--teacher-model\)"),
    ([*URL, "--teacher-model", "m"], "--teacher needs --agent and --task-file, or --env"),
    ([*URL, "--teacher-model", "m", "--agent", "a.py:a", "--env", "k:t"], "--env and --agent exclude each other"),
    ([*URL, "--recipe", "dpo"], "the answers of a teacher are learned with sft"),
    (["f.jsonl", "--set", "beta=1"], "--set beta=1: it is a parameter of --recipe"),
]


@pytest.mark.parametrize(("words", "why"), OPTIONS)
def test_options_that_lack_one_or_exclude_each_other(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        CliRunner().invoke(app, ["sft", *words], catch_exceptions=False)
