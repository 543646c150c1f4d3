"""`Model`: the policy's API as an environment's process sees it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentjet.errors import AgentJetError

PATIENCE_SECONDS = 120.0
"""Time of repeats while the server is away. A repeat has the same key, so a call is sampled once."""
PAUSE_SECONDS = 1.0
READ_SECONDS = 900.0
"""Calls wait while the policy learns."""
Message = dict[str, Any]


class ModelRefused(AgentJetError):
    """The server refused a call."""


class ContextFull(ModelRefused):
    """The conversation leaves no room for an answer."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """An answer of the model. `action` is its text, or the value of its JSON."""

    message: Message
    action: Any


@dataclass(frozen=True)
class Model:
    """The API of an episode. Libraries with an OpenAI client use `base_url`, `api_key` and `name`.

    `OPENAI_BASE_URL`, `OPENAI_API_KEY` and their Anthropic names are in the environment, too.
    """

    base_url: str
    api_key: str
    name: str
    url_with_key: str = ""
    """For clients that cannot send a key. Empty: the model is not of an AgentJet server."""
    max_turns: int = 0
    """Maximum calls that the recipe allows; 0: no maximum."""
    max_tokens: int | None = None
    temperature: float | None = None
    asked: list[Any] | None = field(default=None, repr=False)
    """Gets the valid actions of each call of `act`."""

    def act(
        self, messages: Sequence[Message], actions: Sequence[str] = (), schema: Mapping[str, Any] | None = None
    ) -> ModelAnswer:
        """Asks for an action. With `actions` or `schema`, the sampler produces nothing else."""
        if self.asked is not None:
            self.asked.append([*actions] or schema)
        if actions:
            schema = {"type": "string", "enum": list(dict.fromkeys(actions))}
        form = {"type": "json_schema", "json_schema": {"name": "action", "schema": schema}}
        message = self.chat(messages, **({} if schema is None else {"response_format": form}))
        text = message.get("content") or ""
        try:
            action = text if schema is None else json.loads(text)
        except ValueError:  # cut at `max_tokens`
            raise ModelRefused(
                f"the action is cut: {text[:80]!r}; allow longer answers with max_tokens, or shorten the actions"
            ) from None
        return ModelAnswer({"role": "assistant", "content": text}, action)

    def chat(self, messages: Sequence[Message], **options: Any) -> Message:
        """The message of a chat completion. Raises `ContextFull`, or `ModelRefused` with the server's reason."""
        limits = {"max_completion_tokens": self.max_tokens, "temperature": self.temperature}
        body = {"model": self.name, "messages": list(messages)} | {k: v for k, v in limits.items() if v is not None}
        return dict(self._post("/chat/completions", body | options)["choices"][0]["message"])

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}", "Idempotency-Key": uuid.uuid4().hex}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = _client().post(self.base_url + path, json=body, headers=headers)
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise ModelRefused(f"no answer from {self.base_url}: {error}") from error
                time.sleep(PAUSE_SECONDS)
                continue
            if answer.is_success:
                return answer.json()
            if answer.status_code in RETRIED and time.monotonic() < deadline:
                time.sleep(_pause(answer))
                continue
            raise _refusal(answer)


RETRIED = (429, 502, 503, 504)
_clients: list[httpx.Client] = []


def _client() -> httpx.Client:
    if not _clients:  # The server is named by the user: no proxy of the environment is asked.
        _clients.append(httpx.Client(timeout=httpx.Timeout(READ_SECONDS, connect=10.0), trust_env=False))
    return _clients[0]


def _pause(answer: httpx.Response) -> float:
    try:
        return min(30.0, float(answer.headers.get("retry-after", PAUSE_SECONDS)))
    except ValueError:
        return PAUSE_SECONDS


def _refusal(answer: httpx.Response) -> ModelRefused:
    try:
        error = answer.json()["error"]
        code, message = error.get("code"), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        code, message = None, answer.text[:300]
    return (ContextFull if code == "context_length_exceeded" else ModelRefused)(message)
