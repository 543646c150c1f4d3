"""`Endpoint`: a language model behind an OpenAI-compatible API, and how long and how much it may talk."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentjet.research.planner.actions import PROPOSAL
from agentjet.research.planner.consult import MAX_ACTIONS, Message, Silence

MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class Endpoint:
    """`url` ends where `/chat/completions` begins, such as `http://127.0.0.1:8000/v1`."""

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    seconds: float = 120.0
    """For the whole answer, however it trickles in."""

    def answer(self, messages: Sequence[Message]) -> str:
        import httpx

        body = {"model": self.model, "messages": list(messages), "temperature": 0, "response_format": answer_format()}
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        address = f"{self.url.rstrip('/')}/chat/completions"
        deadline = time.monotonic() + self.seconds
        parts: list[bytes] = []
        try:
            with (
                httpx.Client(timeout=self.seconds, follow_redirects=False) as client,
                client.stream("POST", address, json=body, headers=headers) as response,
            ):
                for part in response.iter_bytes():
                    parts.append(part)
                    if sum(map(len, parts)) > MAX_ANSWER_BYTES:
                        raise Silence(f"{self.url}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise Silence(f"{self.url}: the answer took longer than {self.seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Silence(f"{self.url}: {self._without_key(str(error)) or type(error).__name__}") from None
        if response.status_code != 200:
            raise Silence(f"{self.url}: answered with status {response.status_code}")
        return content_of(b"".join(parts), self.url)

    def _without_key(self, text: str) -> str:
        """What a failure says goes to a journal, and some say what was in the headers: as it is, or with escapes."""
        for key in filter(None, (self.api_key, repr(self.api_key)[1:-1])):
            text = text.replace(key, "(the key)")
        return text


def answer_format() -> dict[str, object]:
    """As `response_format` wants it."""
    schema = PROPOSAL.json_schema()
    actions = {
        "type": "object",
        "properties": {"actions": {"type": "array", "maxItems": MAX_ACTIONS, "items": {"$ref": "#/$defs/Proposal"}}},
        "required": ["actions"],
        "additionalProperties": False,
        "$defs": {**schema.pop("$defs"), "Proposal": schema},
    }
    return {"type": "json_schema", "json_schema": {"name": "actions", "schema": actions}}


def content_of(body: bytes, url: str) -> str:
    """The text of the first choice. Raises `Silence`."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise Silence(f"{url}: the answer is no chat completion with text")
    return text
