"""The `Dialect` type and the parts that dialects share.

A dialect translates one API of a provider. Its `decode` turns the body of a request into a `CallRequest`. Its
`Encoder` turns the chunks of a call into events; their sum is the answer to a request that does not stream. The
translation is pure: it has no I/O and no clock. `front.inference` does the rest once for all dialects.

Every request key has one treatment:

* honoured: the key has its effect. It is a field of a body, and the field's docstring documents it;
* noted: the key is accepted, counted, and shown on its episode. It changes neither the prompt nor the distribution;
* refused: a value with an effect is answered with status 400 and the name of the key.

Each dialect has a table of its noted and refused keys. Their `neutral` values have no effect and are accepted, as is
null for any key. Other keys are unknown, and refused.

Sections: bodies; treatment of keys; parts of a message; tools and constraints; errors; answers; the dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import from_json, to_json

from agentjet.errors import Forbidden, InvalidRequest, NotFound, RequestError, Unauthorized, nearest_name
from agentjet.front.calls import CallChunk, CallRequest
from agentjet.protocol import Int64, Temperature, status_of
from agentjet.rendering.parser import Thought
from agentjet.types import SOLE_POLICY, Call, Constraint, Conversation, Message, ToolCall, beginning

# --- bodies


def _check_whole_characters(text: str) -> str:
    """Raises `ValueError` for half a surrogate pair, which JSON escapes can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair is not text") from error
    return text


def check_portable_json(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the value. Raises `ValueError` for values that other JSON parsers reject: NaN, too deep nesting."""
    from_json(to_json(value), allow_inf_nan=False)
    return value


ItemT = TypeVar("ItemT")
Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that is checked up to its first invalid item: one error for each item would take gigabytes."""
Text = Annotated[str, AfterValidator(_check_whole_characters)]
"""Text in whole characters."""
JsonObject = Annotated[dict[str, Any], AfterValidator(check_portable_json)]
"""An object that any JSON parser reads: no NaN, no half characters, at most about 200 levels."""
ToolName = Annotated[Text, Field(min_length=1, max_length=256)]
Count = Annotated[Int64, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
"""An answer ends before this text. The bound keeps the search in every piece of the answer cheap."""
StopStrings = Annotated[Items[StopString], Field(max_length=16)]
"""OpenAI allows 4."""


class Body(BaseModel):
    """Part of a request. pydantic checks the declared keys, `request_notes` the others."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    place: ClassVar[str] = "nowhere."
    """Start of the names of this part's keys in the tables: `tools[].`; empty for a whole request."""
    keys_of_kind: ClassVar[Mapping[str, str] | None] = None
    """The keys that each `kind` of this part has, if the kind decides, apart from `type` and `role`.

    Those with a `?` may be missing, and need no field.
    """
    unknown_kind: ClassVar[str] = "the policy reads text only."
    """The reason for refusing other kinds."""

    @property
    def kind(self) -> str:
        """The type or the role of this part."""
        return str(getattr(self, "type", ""))

    @property
    def omission(self) -> str:
        """The note about a part that the policy does not read, whose keys do not matter; else empty."""
        return ""

    @property
    def is_unreadable(self) -> bool:
        """True if the part has content that the policy cannot read, such as an image."""
        return False

    def omission_of(self, part: Body) -> str:
        """The `omission` of a part of this part."""
        return part.omission


class Distribution(Body):
    """The part of a request with the settings of the distribution."""

    place = ""
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    """0, or from 0.01 to 2; 0 is refused in training"""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None


class RequestBody(Body):
    """A request for an answer of the policy."""

    place = ""
    model: str
    """and the role, after `@`"""
    stream: bool | None = None

    @property
    def distribution(self) -> Distribution:
        """The part with the settings of the distribution: most APIs have them beside the other keys."""
        return cast(Distribution, self)


class StreamOptions(Body):
    """Options of a stream."""

    place = "stream_options."
    include_usage: bool = False


class OpenAIBody(RequestBody):
    """The keys that all of OpenAI's dialects share."""

    stream_options: StreamOptions | None = None
    """`include_usage`"""


# --- treatment of keys


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The treatment of one key. `meaning` is printed in the documentation."""

    treatment: Literal["noted", "refused"]
    meaning: str = ""
    neutral: tuple[Any, ...] = ()
    code: str = "unsupported_parameter"


RequestKeys = Mapping[str, KeyRule]
"""Rules by dotted key, such as `output_config.effort`. `[]` stands for every item of a list."""
Images = Literal["refuse", "omit"]
"""`job.images`."""
UNREADABLE = (
    "this model reads text only. Send its content as text, or set job.images = 'omit' on the server: then a text "
    "replaces each image, document, audio and video."
)
"""The reason for refusing an unreadable part, with the way out."""


def noted(names: str, meaning: str = "", *neutral: Any) -> RequestKeys:
    return dict.fromkeys(names.split(), KeyRule("noted", meaning, neutral))


def refused(names: str, meaning: str = "", *neutral: Any) -> RequestKeys:
    return dict.fromkeys(names.split(), KeyRule("refused", meaning, neutral))


REASONING_MEANING = "the policy alone decides whether and how much it reasons"
CACHE_MEANING = "prefixes are always cached"
NO_PLACE = "the chat template has no place for "
NO_OBFUSCATION = refused("stream_options.include_obfuscation", "", False)
OPENAI_KEYS: RequestKeys = {
    **noted("metadata safety_identifier moderation"),
    **noted("prompt_cache_key prompt_cache_options prompt_cache_retention", CACHE_MEANING),
    **noted("service_tier", "there is one tier"),
    **refused("top_logprobs", "the sampler reports the sampled token only", 0),
    **NO_OBFUSCATION,
}
"""The keys that chat completions and responses share."""


def request_notes(part: Body, keys: RequestKeys, images: Images, where: str = "") -> Iterator[str]:
    """Yields the noted keys of a part at `where` in the request, and notes about omitted parts.

    Raises `InvalidRequest` for the first key that is unknown, missing or refused, and for an unreadable part unless
    `images` is `omit`.
    """
    if part.keys_of_kind is not None and part.kind not in part.keys_of_kind:
        raise refusal(where[:-1], f" is of type {part.kind!r}: {part.unknown_kind}", "unsupported_content")
    declared, extra, place = part.__dict__, part.model_extra, part.place
    accepted, required = (declared, ()) if part.keys_of_kind is None else _split(part.keys_of_kind[part.kind])
    for key, value in chain(declared.items(), extra.items()) if extra else declared.items():
        if value is None:
            continue
        rule = keys.get(place + key)
        if rule is None and key in accepted and isinstance(value, str):  # Most keys end here, for speed.
            continue
        if rule is None and key not in accepted and (value not in ("", []) or key not in declared):
            beside = [known.removeprefix(place) for known in keys if known.startswith(place)]
            near = nearest_name(key, [*accepted, *beside])
            hint = f"; did you mean {near!r}?" if near else "."
            message = f"{where + key!r} is not a known key{hint}"
            raise InvalidRequest(message, code="unknown_parameter", param=where + key)
        if rule is not None and value not in rule.neutral:
            if rule.treatment == "refused":
                way_out = " or ".join(["leave it out", *(f"use {neutral!r}" for neutral in rule.neutral)])
                given = beginning(repr(value), 80)
                raise refusal(where + key, f" is not supported: {way_out} (given: {given}).", rule.code)
            yield place + key
        if isinstance(value, list):
            for i, item in enumerate(value if value and isinstance(value[0], Body) else ()):
                if images == "refuse" and item.is_unreadable:
                    raise refusal(
                        f"{where}{key}.{i}", f" is of type {item.kind!r}: {UNREADABLE}", "unsupported_content"
                    )
                if note := part.omission_of(item):
                    yield note
                else:
                    yield from request_notes(item, keys, images, f"{where}{key}.{i}.")
        elif not isinstance(value, str) and isinstance(value, Body):  # The second check is slow.
            yield from request_notes(value, keys, images, f"{where}{key}.")
    for key in required:
        if declared[key] is None:
            raise refusal(where + key, " is missing.", "invalid_value")


@cache
def _split(keys: str) -> tuple[Collection[str], Collection[str]]:
    """Returns the keys that a part may have and those that it must have."""
    accepted = frozenset({"type", "role", *(key.rstrip("?") for key in keys.split())})
    return accepted, [key for key in keys.split() if key[-1] != "?"]


def refusal(where: str, why: str, code: str = "unsupported_parameter") -> InvalidRequest:
    """Returns the error for the part at `where`. The message is its place and `why`."""
    return InvalidRequest(where + why, code=code, param=where)


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
        message = f"tool_choice names the function {constraint.function!r}; offered are {', '.join(offered)}."
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


# --- errors


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The form of errors: `body` of a response; `event` ends a stream, after `num_sent` events, with such a body."""

    model: type[BaseModel]
    body: Callable[[RequestError], dict[str, Any]]
    event: Callable[[dict[str, Any], int], dict[str, Any]] = lambda body, num_sent: body


class OpenAIError(BaseModel):
    """An error on a route of OpenAI's API: `message`, `type`, `param` and `code`."""

    error: dict[str, str | None]


def openai_error(error: RequestError) -> dict[str, Any]:
    kind = {Unauthorized: "authentication_error", Forbidden: "permission_error", NotFound: "not_found_error"}
    status = status_of(error)
    name = kind.get(type(error), "server_error" if status >= 500 else "invalid_request_error")
    name = "rate_limit_error" if status == 429 else name
    return {"error": {"message": error.message, "type": name, "param": error.param, "code": error.code}}


OPENAI_ERRORS = ErrorShape(OpenAIError, openai_error)
"""Also used where a path belongs to no dialect."""


# --- answers

Payload = dict[str, Any]


event_json = json.JSONEncoder(ensure_ascii=False).encode
"""Returns the JSON text of a part of an event."""


def sse(payload: Payload) -> str:
    """Returns one server-sent event, which has the name of its type, if it has one."""
    name = f"event: {payload['type']}\n" if "type" in payload else ""
    return f"{name}data: {event_json(payload)}\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields of an answer that are known before sampling. `id` is the id of the first choice's call."""

    id: str
    model: str
    created: int
    policy: str = SOLE_POLICY


def call_of(last: CallChunk) -> Call:
    assert last.call is not None, "the last chunk of a choice has its call"
    return last.call


RequestT = TypeVar("RequestT", bound=RequestBody)


class Encoder(Generic[RequestT]):
    """Encodes one answer. A subclass has the form of its dialect.

    `encode` takes each chunk of `Calls.answer` and yields its events. `answer` is the sum of all events. An answer that
    is not streamed has one chunk for each choice.
    """

    def __init__(self, body: RequestT, head: AnswerHead) -> None:
        self.body = body
        self.head = head
        self.num_events = 0
        """Events that `stream` returned."""

    def encode(self, chunk: CallChunk) -> Iterator[Payload]:
        raise NotImplementedError

    def stream(self, chunk: CallChunk) -> str:
        """Returns the events of a chunk as a stream has them."""
        events = [sse(event) for event in self.encode(chunk)]
        self.num_events += len(events)
        return "".join(events)

    def finish(self) -> str:
        """Returns the text that ends a stream."""
        return ""

    def answer(self) -> Payload:
        """Returns the whole answer, once all chunks were encoded."""
        raise NotImplementedError


BlockKind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A change of an answer that is a list of blocks: reasoning, text and tool calls.

    A block of text begins with `open`, grows with `add` and ends with `close`. A tool call is one event, `call`, once
    it is complete.
    """

    kind: Literal["open", "add", "close", "call"]
    index: int
    block: BlockKind
    text: str = ""
    """`add`: the new text. `close`: the text of the whole block."""
    call: ToolCall | None = None
    is_last: bool = False
    """True for the event that closes the last block of the answer."""


class Blocks:
    """Turns the chunks of a choice into blocks, in the order of the completion.

    An answer without content and calls has an empty text.
    """

    def __init__(self) -> None:
        self._index = -1
        self._open: BlockKind | None = None
        self._texts: list[str] = []
        self._has_answer = False

    def push(self, chunk: CallChunk) -> Iterator[BlockEvent]:
        parts = list(chunk.delta.parts)
        if chunk.call is not None and not self._has_answer and all(isinstance(part, Thought) for part in parts):
            parts.append("")  # Agents expect a text.
        for part in parts:
            if isinstance(part, Thought):
                yield from self._add("reasoning", part.text)
                continue
            self._has_answer = True
            if isinstance(part, str):
                yield from self._add("text", part)
            else:
                yield from self._close()
                self._index += 1
                yield BlockEvent("call", self._index, "call", call=part)
        if chunk.call is not None:
            yield from self._close(is_last=True)

    def _add(self, block: BlockKind, text: str) -> Iterator[BlockEvent]:
        if block != self._open:
            yield from self._close()
            self._index += 1
            self._open, self._texts = block, []
            yield BlockEvent("open", self._index, block)
        self._texts.append(text)
        yield BlockEvent("add", self._index, block, text)

    def _close(self, *, is_last: bool = False) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEvent("close", self._index, self._open, "".join(self._texts), is_last=is_last)
            self._open = None


# --- the dialect

CallLookup = Callable[[str], tuple[Conversation, Message] | None]
"""Returns the conversation and the answer of a call of this episode and role by its id; None for other ids."""


@dataclass(frozen=True, slots=True)
class Dialect(Generic[RequestT]):
    """One route of an API. `translate` raises `RequestError` for the first thing that cannot be honoured."""

    path: str
    request: type[RequestT]
    keys: RequestKeys
    """The noted and the refused keys of a request."""
    errors: ErrorShape
    translate: Callable[[RequestT, CallLookup], CallRequest]
    encoder: type[Encoder[RequestT]]

    def decode(self, body: RequestT, lookup_call: CallLookup, images: Images = "refuse", **fields: Any) -> CallRequest:
        """Returns the canonical request, with `fields` that are not in the body.

        Raises `RequestError` for the first thing that cannot be honoured.
        """
        notes = list(request_notes(body, self.keys, images))
        if isinstance(body, OpenAIBody) and body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options need stream = true.", param="stream_options")
        request = self.translate(body, lookup_call)
        return replace(
            request,
            temperature=body.distribution.temperature,
            top_p=1.0 if body.distribution.top_p is None else body.distribution.top_p,
            stream=bool(body.stream),
            model=body.model,
            notes=tuple(dict.fromkeys((*notes, *request.notes))),
            **fields,
        )

    def keys_table(self) -> str:
        """Returns every key as a Markdown table, grouped by treatment."""
        lines = [f"### `{self.path}`", "", "| key | treatment | meaning |", "|---|---|---|"]
        fields = sorted(_meanings(self.request))
        lines += [f"| `{name}` | honoured | {meaning} |" for name, meaning in fields if name not in self.keys]
        for treatment, effect in (("noted", "not counted"), ("refused", "accepted")):
            for name, rule in sorted((name, rule) for name, rule in self.keys.items() if rule.treatment == treatment):
                neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
                meaning = "; ".join(filter(None, [rule.meaning, neutral and f"{effect}: {neutral}"]))
                lines.append(f"| `{name}` | {treatment} | {meaning} |")
        return "\n".join(lines)


def _meanings(part: type[Body]) -> Iterator[tuple[str, str]]:
    """Yields the fields of a part, and of the parts that it always has, with the meaning of each."""
    for name, field in part.model_fields.items():
        yield part.place + name, field.description or ""
        if isinstance(field.annotation, type) and issubclass(field.annotation, Body):
            yield from _meanings(field.annotation)
