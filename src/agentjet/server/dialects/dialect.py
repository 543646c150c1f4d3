"""The `Dialect` type and the parts that dialects share.

A dialect translates one API of a provider. A request body becomes a `CallRequest`. The chunks of a call become an
answer or server-sent events. The translation is pure: it has no I/O, no clock and no state. `server.inference` does the
rest once for all dialects: keys, roles, retries, delivery and streams.

Sections: request bodies; the treatment of keys; tools and constraints; the dialect; the choices of an answer; parts of
OpenAI's dialects.

Every request key has one treatment:

* honoured: the key has its effect;
* noted: the key is accepted, counted, and shown on its episode. It changes neither the prompt nor the distribution;
* refused: a value with an effect is answered with status 400 and the name of the key. The `neutral` values and null
  have no effect and are accepted.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, from_json, to_json

from agentjet.errors import Forbidden, InvalidRequest, NotFound, RequestError, Unauthorized
from agentjet.gateway.requests import CallChunk, CallRequest, TokenLogprob
from agentjet.protocol import Int64, Temperature
from agentjet.types import SOLE_POLICY, Call, Constraint, Conversation, Message

# --- request bodies


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


Text = Annotated[str, AfterValidator(_check_whole_characters)]
"""Text in whole characters."""
JsonObject = Annotated[dict[str, Any], AfterValidator(check_portable_json)]
"""An object that any JSON parser reads: no NaN, no half characters, at most about 200 levels."""
Count = Annotated[Int64, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
"""An answer ends before this text. The bound keeps the search in every piece of the answer cheap."""
StopStrings = Annotated[list[StopString], Field(max_length=16)]
"""OpenAI allows 4."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _stop_lists_at_first_error(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list" and "items_schema" in schema:
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _stop_lists_at_first_error(part)


class FirstError(BaseModel):
    """A model whose lists stop at their first invalid item: one error for each item would take gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_lists_at_first_error(schema)
        return schema


class Body(FirstError):
    """Part of a request. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RequestBody(Body):
    """A request for an answer of the policy."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None


class TextPart(Body):
    """A part of a message's content. The policy reads text; subclasses add the keys of other parts."""

    type: str
    text: str | None = None


UNREADABLE_PARTS = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""Types of part that the policy cannot read, in any dialect, with the word used for them in the prompt."""


def placeholder_of(part_type: str, notes: list[str]) -> str:
    """Returns the text that the policy reads in place of an unreadable part. Adds to `notes`."""
    notes.append(f"{UNREADABLE_PARTS[part_type]} omitted")
    return f"[{UNREADABLE_PARTS[part_type]} omitted: this model reads text only]"


def text_of(content: str | Sequence[TextPart], text_types: Sequence[str], where: str, notes: list[str]) -> str:
    """Returns the text of a content. Parts of `text_types` hold text; unreadable parts become placeholders.

    Raises `InvalidRequest` for any other part.
    """
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type in text_types and part.text is not None:
            texts.append(part.text)
        elif part.type in UNREADABLE_PARTS:
            texts.append(placeholder_of(part.type, notes))
        else:
            raise InvalidRequest(
                f"{where}.{i} is of type {part.type!r}: the policy reads text only.",
                code="unsupported_content",
                param=f"{where}.{i}",
            )
    return "".join(texts)


# --- the treatment of keys

Treatment = Literal["honoured", "noted", "refused"]
NEUTRAL_EFFECT: dict[Treatment, str] = {"honoured": "as if absent", "noted": "not counted", "refused": "accepted"}
"""The treatment of neutral values, as the documentation prints it. The order is that of its tables."""


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The treatment of one key. `meaning` is printed in the documentation."""

    treatment: Treatment
    meaning: str = ""
    neutral: tuple[Any, ...] = ()


RequestKeys = Mapping[str, KeyRule]
"""Rules by dotted key, such as `output_config.effort`. `[]` stands for every item of a list."""


def honoured(meaning: str = "") -> KeyRule:
    return KeyRule("honoured", meaning)


def noted(meaning: str = "", *neutral: Any) -> KeyRule:
    return KeyRule("noted", meaning, neutral)


def refused(meaning: str = "", *neutral: Any) -> KeyRule:
    return KeyRule("refused", meaning, neutral)


REASONING_HINT = "the policy alone decides whether and how much it reasons"
CACHE_HINT = "prefixes are always cached"


class KeyRules:
    """The rules of one part of a body whose keys are noted or refused.

    The part is the whole body, or what stands below a `prefix` such as `messages[].`.
    """

    def __init__(self, keys: RequestKeys, prefix: str = "") -> None:
        self._rows: list[tuple[str, list[str], KeyRule]] = []
        for name, rule in keys.items():
            path = name.removeprefix(prefix)
            if name.startswith(prefix) and "[]" not in path and rule.treatment != "honoured":
                self._rows.append((name, path.split("."), rule))
        self._firsts = frozenset(path[0] for _, path, _ in self._rows)

    def check(self, body: BaseModel, where: str = "") -> list[str]:
        """Returns the noted keys of `body`, which stands at `where` in the request.

        Raises `InvalidRequest` for the first refused key.
        """
        given = body.model_fields_set & self._firsts
        return [name for name, path, rule in self._rows if path[0] in given and _is_noted(body, path, rule, where)]


def _is_noted(body: BaseModel, path: list[str], rule: KeyRule, where: str) -> bool:
    """True if the value at `path` is noted. Raises `InvalidRequest` if it is refused."""
    value: Any = body
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
    if value is None or value in rule.neutral:
        return False
    if rule.treatment == "refused":
        refuse_value(value, rule.neutral, where + ".".join(path))
    return True


def refuse_value(value: Any, neutral: tuple[Any, ...], where: str) -> None:
    """Raises `InvalidRequest` for the value at `where`, unless it is null or neutral."""
    if value is None or value in neutral:
        return
    either = " or ".join(map(_shown, neutral))
    way_out = f"leave it out or use {either}" if neutral else "leave it out"
    raise InvalidRequest(
        f"{where} = {_shown(value)} is not supported: {way_out}.", code="unsupported_parameter", param=where
    )


def unknown_key(where: str, key: str, known: Iterable[str]) -> InvalidRequest:
    """Returns the error for a key that the part at `where` cannot have."""
    place = f"{where}.{key}"
    near = get_close_matches(key, [*known], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return InvalidRequest(f"{place!r} is not a key this server knows{hint}", code="unknown_parameter", param=place)


def missing_key(where: str, key: str) -> InvalidRequest:
    """Returns the error for a key that the part at `where` must have."""
    return InvalidRequest(f"{where}.{key} is missing.", code="invalid_value", param=f"{where}.{key}")


def _shown(value: Any) -> str:
    shown = repr(value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def treatment_table(title: str, keys: RequestKeys) -> str:
    """Returns the keys of one dialect as a Markdown table, grouped by treatment."""
    lines = [f"### {title}", "", "| key | treatment | meaning |", "|---|---|---|"]
    for treatment in NEUTRAL_EFFECT:
        for name, rule in sorted((name, rule) for name, rule in keys.items() if rule.treatment == treatment):
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
            effect = f"{NEUTRAL_EFFECT[treatment]}: {neutral}" if neutral else ""
            lines.append(f"| `{name}` | {treatment} | {'; '.join(filter(None, [rule.meaning, effect]))} |")
    return "\n".join(lines)


# --- tools and constraints

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of JSON mode."""


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
        raise InvalidRequest(
            f"tool_choice = {choice!r} is not supported: use 'auto', 'none', 'required' or {form}.",
            code="unsupported_parameter",
            param="tool_choice",
        )
    return name


def check_choice(constraint: Constraint, offered: Sequence[str]) -> Constraint:
    """Returns the constraint. Raises `InvalidRequest` if the offered functions cannot satisfy it."""
    if constraint.calls == "required" and not offered:
        raise InvalidRequest("tool_choice requires a tool call, but the request offers no tools.", param="tool_choice")
    if constraint.function and constraint.function not in offered:
        raise InvalidRequest(
            f"tool_choice names the function {constraint.function!r}; offered are {', '.join(offered)}.",
            param="tool_choice",
        )
    return constraint


def call_request(
    body: RequestBody,
    conversation: Conversation,
    max_tokens: int | None,
    notes: Iterable[str],
    *,
    constraint: Constraint,
    top_k: int | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    choices: int = 1,
) -> CallRequest:
    """Returns the canonical request of a body."""
    return CallRequest(
        conversation=conversation,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, top_k or 0),
        seed=seed,
        stop=tuple(stop),
        constraint=constraint,
        choices=choices,
        stream=bool(body.stream),
        model=body.model,
        notes=tuple(dict.fromkeys(notes)),
    )


# --- the dialect

"""Maximum characters of an agent role's name. Rewards by role have the same limit."""

RequestT = TypeVar("RequestT", bound=RequestBody)
AnswerT = TypeVar("AnswerT", bound=BaseModel)
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
class ErrorShape:
    """The form of errors. `body` is the answer to a request; `event` ends a stream that failed after n events."""

    model: type[BaseModel]
    body: Callable[[RequestError], dict[str, Any]]
    event: Callable[[RequestError, int], str]


@dataclass(frozen=True, slots=True)
class Dialect(Generic[RequestT, AnswerT]):
    """One route of an API.

    `to_request` raises `RequestError` for the first thing that cannot be honoured. `to_answer` and `to_events` take the
    chunks of `Gateway.call`, and end when the chunks end. `to_events` yields server-sent events as text.
    """

    path: str
    request: type[RequestT]
    answer: type[AnswerT]
    keys: RequestKeys
    """The treatment of every key of a request."""
    errors: ErrorShape
    to_request: Callable[[RequestT, CallLookup], CallRequest]
    to_answer: Callable[[Chunks, RequestT, AnswerHead], Coroutine[Any, Any, AnswerT]]
    to_events: Callable[[Chunks, RequestT, AnswerHead], AsyncGenerator[str]]


def sse(payload: dict[str, Any], *, name: str = "") -> str:
    """Returns one server-sent event."""
    event = f"event: {name}\n" if name else ""
    return f"{event}data: {json.dumps(payload, ensure_ascii=False)}\n\n"


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


# --- shared by the dialects of OpenAI


def refuse_top_logprobs(top_logprobs: int | None) -> None:
    """Raises `InvalidRequest` for log-probabilities of tokens that were not sampled."""
    if top_logprobs:
        raise InvalidRequest(
            f"top_logprobs = {top_logprobs} is not supported: the sampler reports the log-probability of the sampled "
            "token only. Leave it out or use 0.",
            code="unsupported_parameter",
            param="top_logprobs",
        )


def refuse_unused_stream_options(body: RequestBody, options: BaseModel | None) -> None:
    """Raises `InvalidRequest` for stream options in a request that does not stream."""
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options need stream = true.", param="stream_options")


class TokenLogprobBody(BaseModel):
    """A sampled token and its log-probability under the distribution that it was sampled from."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any] = []


def logprob_bodies(tokens: Iterable[TokenLogprob]) -> list[TokenLogprobBody]:
    return [TokenLogprobBody(token=t.text, logprob=t.logprob, bytes=list(t.utf8)) for t in tokens]


class OpenAIErrorBody(BaseModel):
    """The error fields that SDKs of OpenAI read."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(BaseModel):
    """An error on a route of OpenAI's API."""

    error: OpenAIErrorBody


def openai_error(error: RequestError) -> dict[str, Any]:
    """Returns the body of an error."""
    kind = {Unauthorized: "authentication_error", Forbidden: "permission_error", NotFound: "not_found_error"}
    name = kind.get(type(error), "server_error" if error.status >= 500 else "invalid_request_error")
    name = "rate_limit_error" if error.status == 429 else name
    body = OpenAIErrorBody(message=error.message, type=name, param=error.param, code=error.code)
    return OpenAIError(error=body).model_dump()


OPENAI_ERRORS = ErrorShape(model=OpenAIError, body=openai_error, event=lambda error, num_sent: sse(openai_error(error)))
"""Also used where a path belongs to no dialect."""
