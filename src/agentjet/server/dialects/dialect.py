"""The `Dialect` type and the parts that dialects share.

A dialect translates one API of a provider. A request body becomes a `CallRequest`. The chunks of a call become an
answer or server-sent events. The translation is pure: it has no I/O, no clock and no state. `server.inference` does the
rest once for all dialects: keys, roles, retries, delivery and streams.

Sections: parts of a message; tools and constraints; the dialect; the choices of an answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from agentjet.errors import InvalidRequest
from agentjet.gateway.calls import CallChunk, CallRequest
from agentjet.gateway.prompts import TokenLogprob
from agentjet.server.dialects.error_shapes import ErrorShape
from agentjet.server.dialects.keys import (
    Body,
    Images,
    JsonObject,
    RequestBody,
    RequestKeys,
    Text,
    refusal,
    request_notes,
)
from agentjet.types import SOLE_POLICY, Call, Constraint, Conversation, Message

# --- parts of a message

UNREADABLE_PARTS = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""Types of part that the policy cannot read, in any dialect, with the word of `job.images = "omit"`."""


class ContentPart(Body):
    """A part of a message's content. The policy reads text. An unreadable part is refused, or a text replaces it."""

    type: str
    text: Text | None = None

    @property
    def is_unreadable(self) -> bool:
        return self.type in UNREADABLE_PARTS

    @property
    def omission(self) -> str:
        return f"{UNREADABLE_PARTS[self.type]} omitted" if self.is_unreadable else ""


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """Returns the text of a content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(f"[{p.omission}: this model reads text only]" if p.omission else p.text or "" for p in content)


# --- tools and constraints


def function_tool(name: str | None, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a tool as chat templates read it, without the keys that are None."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def named_function(choice: Mapping[str, Any], named: object, form: str) -> str:
    """Returns the function that a tool choice requires. Raises `InvalidRequest` for any other choice.

    `named` is the part of the choice that has the name. `form` shows how the dialect writes such a choice.
    """
    name = named.get("name") if choice.get("type") == "function" and isinstance(named, dict) else None
    if not isinstance(name, str) or not name:
        raise refusal("tool_choice", f" = {choice!r} is not supported: use 'auto', 'none', 'required' or {form}.")
    return name


def check_choice(constraint: Constraint, offered: Sequence[str]) -> Constraint:
    """Returns the constraint. Raises `InvalidRequest` if the offered functions cannot satisfy it."""
    if constraint.calls == "required" and not offered:
        raise InvalidRequest("tool_choice requires a tool call, but the request offers no tools.", param="tool_choice")
    if constraint.function and constraint.function not in offered:
        names = ", ".join(offered)
        message = f"tool_choice names the function {constraint.function!r}; offered are {names}."
        raise InvalidRequest(message, param="tool_choice")
    return constraint


class NamedSchema(Body):
    """A JSON schema. The answer follows all of it, whether `strict` or not. The name has no effect."""

    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


def schema_of(kind: str, schema: Mapping[str, Any] | None, place: str, param: str) -> Mapping[str, Any] | None:
    """Returns the JSON schema of a format of type `kind`; None for free text.

    Raises `InvalidRequest` for `param` if the format needs a schema, which belongs to `place`.
    """
    if kind == "json_schema" and schema is None:
        raise InvalidRequest(f"A format of type 'json_schema' needs {place}.", param=param)
    return {"text": None, "json_object": {"type": "object"}}.get(kind, schema)


# --- the dialect


class StreamOptions(Body):
    """Options of a stream."""

    place = "stream_options."
    include_usage: bool = False


class OpenAIBody(RequestBody):
    """The keys that all of OpenAI's dialects share."""

    stream_options: StreamOptions | None = None
    """`include_usage`"""


RequestT = TypeVar("RequestT", bound=RequestBody)
Chunks = AsyncGenerator[CallChunk]
CallLookup = Callable[[str], tuple[Conversation, Message] | None]
"""Returns the conversation and the answer of a call of this episode and role by its id; None for other ids."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields of an answer that are known before sampling. `id` is the id of the first choice's call."""

    id: str
    model: str
    created: int
    policy: str = SOLE_POLICY


@dataclass(frozen=True, slots=True)
class Dialect(Generic[RequestT]):
    """One route of an API.

    `translate` raises `RequestError` for the first thing that cannot be honoured. `to_answer` takes the last chunks of
    `merge_chunks`. `to_events` takes the chunks of `Gateway.call`, and yields server-sent events as text.
    """

    path: str
    request: type[RequestT]
    keys: RequestKeys
    """The noted and the refused keys of a request."""
    errors: ErrorShape
    translate: Callable[[RequestT, CallLookup], CallRequest]
    to_answer: Callable[[Sequence[CallChunk], RequestT, AnswerHead], dict[str, Any]]
    to_events: Callable[[Chunks, RequestT, AnswerHead], AsyncGenerator[str]]

    def to_request(self, body: RequestT, lookup_call: CallLookup, images: Images = "refuse") -> CallRequest:
        """Returns the canonical request. Raises `RequestError` for the first thing that cannot be honoured."""
        notes = list(request_notes(body, self.keys, images))
        if isinstance(body, OpenAIBody) and body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options need stream = true.", param="stream_options")
        request = self.translate(body, lookup_call)
        return replace(
            request,
            temperature=body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            stream=bool(body.stream),
            model=body.model,
            notes=tuple(dict.fromkeys((*notes, *request.notes))),
        )


# --- the choices of an answer


async def collect(chunks: Chunks) -> list[CallChunk]:
    """Returns `merge_chunks` of a call."""
    return merge_chunks([chunk async for chunk in chunks])


def merge_chunks(chunks: Iterable[CallChunk]) -> list[CallChunk]:
    """Returns the last chunk of every choice, by index, with the tokens of all chunks of that choice."""
    tokens: dict[int, list[TokenLogprob]] = {}
    last: dict[int, CallChunk] = {}
    for chunk in chunks:
        tokens.setdefault(chunk.index, []).extend(chunk.tokens)
        if chunk.call is not None:
            last[chunk.index] = replace(chunk, tokens=tuple(tokens[chunk.index]))
    return [last[index] for index in sorted(last)]


def call_of(last: CallChunk) -> Call:
    """Returns the call of the last chunk of a choice."""
    assert last.call is not None, "the last chunk of a choice has its call"
    return last.call


def shown_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns sampled tokens, as OpenAI shows them, with the log-probabilities that they were sampled with."""
    return [{"token": t.text, "logprob": t.logprob, "bytes": list(t.utf8), "top_logprobs": []} for t in tokens]
