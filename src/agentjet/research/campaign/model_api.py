"""`Model`: a language model behind an OpenAI- or Anthropic-compatible URL, or the record of one.

`Recorded` writes each answer to a file before it is used. `Played` gives the answers of such a file again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.campaign.models import ProposerAway
from agentjet.research.records import Record

MAX_ANSWER_BYTES = 1 << 20
Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolCall(Record):
    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True)
class Reply(Record):
    """An answer of a model: text, and calls of tools."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class Model(Protocol):
    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        """Raises `ProposerAway`. Messages have OpenAI's chat format; tools have a name, a description and a schema."""
        ...


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """Answers of `model`, each a line of `file` before it is used."""

    file: Path
    model: Model

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        reply = self.model.reply(messages, tools)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"asked": messages[-1], "reply": reply.to_json()}) + "\n")
        return reply


@dataclass
class Played:
    """A model that gives the answers of a record, after the first `before`."""

    record: Path
    before: int = 0

    def __post_init__(self) -> None:
        self._replies = iter(replies_in(self.record)[self.before :])

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        reply = next(self._replies, None)
        if reply is None:
            raise ProposerAway(f"{self.record.name}: the record ends here")
        return reply


def replies_in(record: Path) -> list[Reply]:
    """The answers of a record, one a line. Raises `ConfigError` for a line that has none."""
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{record}: {getattr(error, 'strerror', error)}: give a record of answers") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(Reply.from_json(json.loads(line)["reply"]))
        except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
            raise ConfigError(f"{record} line {number} has no answer of a model ({error!r}): correct it") from None
    return found


# ---- endpoints -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """A model behind an API. `url` is the part before `/chat/completions` (openai) or `/messages` (anthropic), such as
    `http://127.0.0.1:8000/v1`.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    kind: Literal["openai", "anthropic"] = "openai"
    seconds: float = 180.0
    """Time limit for a whole answer, also if it arrives slowly."""

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        path, body, headers = (openai_request if self.kind == "openai" else anthropic_request)(self, messages, tools)
        content = self._post(f"{self.url.rstrip('/')}{path}", body, headers)
        try:
            return (openai_reply if self.kind == "openai" else anthropic_reply)(json.loads(content))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, AgentJetError):
            raise ProposerAway(f"{self.url}: the answer is not one of the {self.kind} API") from None

    def _post(self, address: str, body: object, headers: Mapping[str, str]) -> bytes:
        """Raises `ProposerAway` for an answer that is late, too long or an error."""
        import httpx

        deadline, parts, size = time.monotonic() + self.seconds, [], 0
        try:
            with (
                httpx.Client(timeout=self.seconds, follow_redirects=False) as client,
                client.stream("POST", address, json=body, headers=dict(headers)) as response,
            ):
                for part in response.iter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_ANSWER_BYTES:
                        raise ProposerAway(f"{self.url}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise ProposerAway(f"{self.url}: the answer took longer than {self.seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProposerAway(f"{self.url}: {self._without_key(str(error)) or type(error).__name__}") from None
        if response.status_code != 200:
            raise ProposerAway(f"{self.url}: answered with status {response.status_code}")
        return b"".join(parts)

    def _without_key(self, text: str) -> str:
        """Removes the key, plain or escaped, because errors go to the notebook and may contain headers."""
        for key in filter(None, (self.api_key, repr(self.api_key)[1:-1])):
            text = text.replace(key, "(the key)")
        return text


Request = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers."""


def openai_request(endpoint: Endpoint, messages: Sequence[Message], tools: Sequence[Tool]) -> Request:
    functions = [{"type": "function", "function": tool} for tool in tools]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return "/chat/completions", {"model": endpoint.model, "messages": [*messages], "tools": functions}, headers


def openai_reply(content: Any) -> Reply:
    message = content["choices"][0]["message"]
    calls = [
        ToolCall(str(call["id"]), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return checked(Reply(message.get("content") or "", tuple(calls)))


def anthropic_request(endpoint: Endpoint, messages: Sequence[Message], tools: Sequence[Tool]) -> Request:
    named = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools]
    turns: list[Message] = []
    for message in messages[1:]:
        role, blocks = ("assistant" if message["role"] == "assistant" else "user"), anthropic_blocks(message)
        if turns and turns[-1]["role"] == role:  # results of several calls are one turn
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    system = messages[0]["content"]
    body = {"model": endpoint.model, "max_tokens": 8192, "system": system, "messages": turns, "tools": named}
    return "/messages", body, {"x-api-key": endpoint.api_key, "anthropic-version": "2023-06-01"}


def anthropic_blocks(message: Message) -> list[Message]:
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
    blocks: list[Message] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError:
            arguments = {"text": function["arguments"]}
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks or [{"type": "text", "text": "(empty)"}]


def anthropic_reply(content: Any) -> Reply:
    blocks = content["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [
        ToolCall(block["id"], block["name"], json.dumps(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return checked(Reply(text, tuple(calls)))


def checked(reply: Reply) -> Reply:
    """Raises `ConfigError` for an answer with values of other types."""
    return Reply.from_json(reply.to_json())
