"""The path of a completion through the server's process, traced: the second turn of a chat with one tool, whole,
embedded.

1. A file counts if a function of it runs between the request and its answer. Modules of vocabulary do not count, nor do
   timers that run beside every request. The compute process has a path of its own.
2. A value type is a stage of the call: it holds the request, the prompt or the answer. Parts of one do not count, nor
   does state. A new type on the path is a stage unless `PARTS` names it.

`tools/shape.py` reports both numbers.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
import uvicorn

import agentjet
from agentjet.compute.backend import ProcessCompute
from agentjet.config import parse_config
from agentjet.front.http import listen, uvicorn_config
from agentjet.front.keys import Keys
from agentjet.server.app import create_app
from agentjet.server.runs import Runs
from tests.e2e.server import SETTINGS
from tests.server.serving import ADMIN, SECRET, TOKEN, VIEWER
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CALL_FILES = 23
CALL_TYPES = 7
ROOT = Path(agentjet.__file__).parent
VOCABULARY = ("protocol", "types.py", "errors.py", "config")
BESIDE = ("LoopLag.", "Gateway._check_leases", "Engine.")
"""Names of the work that goes on without requests."""
READ = {"ChatBody", "Sampled"}
"""Stages that libraries make from JSON and from messages of the compute process."""
PARTS = {
    "of a conversation": {"Conversation", "Message", "Constraint", "ToolCall"},
    "of a prompt": {"NewContext", "Match", "Identity", "_Node", "Rendered", "BodySlot", "_Body"},
    "of an answer": {"TokenLogprob", "AnswerHead"},
    "names": {"PolicyId"},
    "state": {"EpisodeRecord", "EpisodeCalls", "Pending"},
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Trace:
    """The files whose functions ran, and the dataclasses that were made, in all threads of this process."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.types: set[str] = set()
        self.is_on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which this thread and those that it starts are traced."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        if code.co_name == "__init__" and code.co_filename == "<string>":
            kind = type(frame.f_locals["self"])
            if kind.__module__.startswith("agentjet.") and not _is_beside(frame):
                self.types.add(kind.__name__)
        elif code.co_filename.startswith(str(ROOT)) and code.co_name != "<module>" and not _is_beside(frame):
            self.files.add(str(Path(code.co_filename).relative_to(ROOT)))


def _is_beside(frame: FrameType | None) -> bool:
    """True if the outermost function of AgentJet on the stack is not that of a request."""
    outermost = ""
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(ROOT)):
            outermost = frame.f_code.co_qualname
        frame = frame.f_back
    return outermost.startswith(BESIDE)


async def second_turn(model: Path, data_dir: Path, trace: Trace) -> None:
    """Serves a run, answers two turns of a chat with one tool and traces the second one."""
    settings = dict[str, Any]()
    for name, value in {**SETTINGS, "model.name": str(model), "server.data_dir": str(data_dir)}.items():
        section, key = name.split(".")
        settings.setdefault(section, {})[key] = value
    config = parse_config(settings)
    runs = Runs(config, ProcessCompute(config))
    listener = listen("127.0.0.1", 0)
    keys = Keys({"client": TOKEN, "admin": ADMIN, "viewer": VIEWER, "keys": SECRET})
    server = uvicorn.Server(uvicorn_config(create_app(runs, keys), config.server))
    await runs.start()
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await runs.default.engine.wait_until_up()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            client = {"Authorization": f"Bearer {TOKEN}"}
            episode = (await http.post("/swarm/v1/episodes", json={"task_id": "t"}, headers=client)).json()
            agent = {"Authorization": f"Bearer {episode['api_key']}"}
            messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
            for is_second in (False, True):
                body = {"model": "policy", "messages": messages, "tools": [TOOL]}
                trace.is_on = is_second
                answer = await http.post("/v1/chat/completions", json=body, headers=agent)
                trace.is_on = False
                assert answer.status_code == 200, answer.text
                content = answer.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Well?"}]
    finally:
        await runs.drain()
        server.should_exit = True
        await serving
        await runs.close()


def test_a_completion_passes_few_files_and_value_types(tmp_path: Path) -> None:
    trace = Trace()
    model = make_model(tmp_path / "model", template="qwen3")
    with trace.installed():
        asyncio.run(second_turn(model, tmp_path / "data", trace))
    files = sorted(file for file in trace.files if not file.startswith(VOCABULARY))
    assert "front/inference.py" in files and "front/calls.py" in files, "the trace saw the path"
    assert len(files) <= CALL_FILES, files
    stages = (trace.types | READ) - set().union(*PARTS.values())
    assert {"CallRequest", "Prompt", "SamplingParams", "CallChunk", "Call"} <= stages, "the trace saw the types"
    assert len(stages) <= CALL_TYPES, stages
