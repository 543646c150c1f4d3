"""What the request bodies of all dialects have in common.

The treatment of every request key: honoured, noted or refused. One treatment_table a dialect, for the code and for
the page.

* honoured: the key has its effect;
* noted: the key is accepted without an effect, counted, and shown on its episode. It changes neither the prompt nor the
  distribution that the policy is sampled from;
* refused: a value with an effect is a 400 that names the key. The `neutral` values, and null, have none.

What two keys together ask that is not honoured, in any dialect: refused by name.

The functions on offer, and what dialects ask of an answer's form: what all of them have in common on the way to a
conversation's tools and to a `Constraint`.

What a dialect is: how one API's bodies become canonical requests, and what is sampled becomes its answers.

Pure translation, without I/O, clock or state. `server.inference` does the rest, once for all of them: keys, roles,
retries, delivery, the stream.

How OpenAI's routes say what went wrong; what `server.problems` answers where no other dialect is spoken, too.

What the answers of OpenAI's dialects have in common: the chunks of all choices gathered, and what they cost.

How a request of OpenAI's two older dialects says what its answer is sampled with.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, from_json, to_json

from agentjet.errors import Forbidden, InvalidRequest, NotFound, RequestError, Unauthorized
from agentjet.gateway.requests import MAX_CHOICES, CallChunk, CallRequest, ScoredToken, TokenLogprob
from agentjet.protocol import Int64, Temperature
from agentjet.types import ANY_ANSWER, Call, Constraint, Conversation, Message


def _whole(text: str) -> str:
    """Raises `ValueError` for half a surrogate pair, which JSON's escapes can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair is no text") from error
    return text


def check_portable_json(value: dict[str, Any]) -> dict[str, Any]:
    """Raises `ValueError` for what only Python's parser takes for JSON, and for what other parsers would give up on."""
    from_json(to_json(value), allow_inf_nan=False)
    return value


Text = Annotated[str, AfterValidator(_whole)]
"""Text in whole characters."""
JsonObject = Annotated[dict[str, Any], AfterValidator(check_portable_json)]
"""An object that any JSON parser reads: without NaN and half characters, nested about 200 deep at most."""
Count = Annotated[Int64, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
"""A text before which an answer ends. The bound keeps it cheap to look for it in every piece of the answer."""
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
    """A model whose lists stop at their first wrong item: one error for each item would take gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_lists_at_first_error(schema)
        return schema


class Body(FirstError):
    """TextPart of a request: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RequestBody(Body):
    """A request for an answer of the model."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None


class TextPart(Body):
    """A part of a message's content. The policy reads text; what else a part may hold differs by dialect."""

    type: str
    text: str | None = None


UNREADABLE_PARTS = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""Types of part that the policy cannot read, in any dialect, and what they are called where they stood."""


def placeholder_of(kind: str, notes: list[str]) -> str:
    """The text that the policy is fed in place of a part of type `kind`. Adds to `notes`."""
    notes.append(f"{UNREADABLE_PARTS[kind]} omitted")
    return f"[{UNREADABLE_PARTS[kind]} omitted: this model reads text only]"


def text_of(content: str | Sequence[TextPart], kinds: Sequence[str], where: str, notes: list[str]) -> str:
    """The text of a content, `kinds` being the types of part that hold text. Raises `InvalidRequest` for any other
    that is not in `UNREADABLE_PARTS`.
    """
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type in kinds and part.text is not None:
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


Treatment = Literal["honoured", "noted", "refused"]
NEUTRAL_EFFECT: dict[Treatment, str] = {"honoured": "as if absent", "noted": "not counted", "refused": "accepted"}
"""What the page says of neutral values, in the order of its tables."""


@dataclass(frozen=True, slots=True)
class KeyRule:
    """One row of a treatment_table. `meaning` is for the page; values in `neutral` are accepted and not counted."""

    treatment: Treatment
    meaning: str = ""
    neutral: tuple[Any, ...] = ()


RequestKeys = Mapping[str, KeyRule]
"""Keys by dotted name, such as `output_config.effort`. A `[]` stands for every item of a list."""


def honoured(meaning: str = "") -> KeyRule:
    return KeyRule("honoured", meaning)


def noted(meaning: str = "", *neutral: Any) -> KeyRule:
    return KeyRule("noted", meaning, neutral)


def refused(meaning: str = "", *neutral: Any) -> KeyRule:
    return KeyRule("refused", meaning, neutral)


class KeyRules:
    """The rows of one part of a body that are not honoured: of the whole body, or below a `prefix` (`messages[].`)."""

    def __init__(self, keys: RequestKeys, prefix: str = "") -> None:
        self._rows: list[tuple[str, list[str], KeyRule]] = []
        for name, key in keys.items():
            path = name.removeprefix(prefix)
            if name.startswith(prefix) and "[]" not in path and key.treatment != "honoured":
                self._rows.append((name, path.split("."), key))
        self._firsts = frozenset(path[0] for _, path, _ in self._rows)

    def judge(self, body: BaseModel, where: str = "") -> list[str]:
        """The noted keys that `body`, which stands at `where`, has.

        Raises `InvalidRequest` naming the first key that is refused, and the way out.
        """
        given = body.model_fields_set & self._firsts
        return [name for name, path, key in self._rows if path[0] in given and _counts(body, path, key, where)]


def _counts(body: BaseModel, path: list[str], key: KeyRule, where: str) -> bool:
    """True if the value at `path` is noted. Raises `InvalidRequest` if it is refused."""
    value: Any = body
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
    if value is None or value in key.neutral:
        return False
    if key.treatment == "refused":
        refuse_value(value, key.neutral, where + ".".join(path))
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


def _shown(value: Any) -> str:
    shown = repr(value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def treatment_table(title: str, keys: RequestKeys) -> str:
    """Markdown: the keys of one dialect by treatment."""
    lines = [f"### {title}", "", "| key | treatment | meaning |", "|---|---|---|"]
    for treatment in NEUTRAL_EFFECT:
        for name, key in sorted(_rows(keys, treatment)):
            neutral = ", ".join(f"`{_json(value)}`" for value in key.neutral)
            meaning = "; ".join(
                filter(None, [key.meaning, f"{NEUTRAL_EFFECT[treatment]}: {neutral}" if neutral else ""])
            )
            lines.append(f"| `{name}` | {treatment} | {meaning} |")
    return "\n".join(lines)


def _rows(keys: RequestKeys, treatment: Treatment) -> Iterable[tuple[str, KeyRule]]:
    return ((name, key) for name, key in keys.items() if key.treatment == treatment)


def _json(value: Any) -> str:
    return json.dumps(value)


def refuse_top_logprobs(num_likeliest: int | None, where: str) -> None:
    """Raises `InvalidRequest` for log-probabilities of tokens that were not sampled."""
    if num_likeliest:
        raise InvalidRequest(
            f"{where} = {num_likeliest} is not supported: the sampler reports the log-probability of the token that it "
            "sampled, not those of others. Leave it out or use 0.",
            code="unsupported_parameter",
            param=where,
        )


def refuse_unused_stream_options(body: RequestBody, options: BaseModel | None) -> None:
    """Raises `InvalidRequest` for options of a stream that is not asked for."""
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options need stream = true.", param="stream_options")


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of JSON mode."""


def function_tool(name: str | None, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates read it; the keys that a request left out are left out."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def named_function(choice: Mapping[str, Any], named: object, form: str) -> str:
    """The function that a tool choice asks for; `named` is the part of it with the name, `form` how the dialect writes
    such a choice.
    """
    name = named.get("name") if choice.get("type") == "function" and isinstance(named, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"tool_choice = {choice!r} is not supported: use 'auto', 'none', 'required' or {form}.",
            code="unsupported_parameter",
            param="tool_choice",
        )
    return name


def check_choice(constraint: Constraint, offered: Sequence[str], param: str = "tool_choice") -> Constraint:
    """The constraint, if the functions on offer allow it; `param` is what the dialect calls the choice."""
    if constraint.calls == "required" and not offered:
        raise InvalidRequest(f"{param} asks for a tool call, and the request offers no tools.", param=param)
    if constraint.function and constraint.function not in offered:
        raise InvalidRequest(
            f"{param} names the function {constraint.function!r}; offered are {', '.join(offered)}.", param=param
        )
    return constraint


POLICY_ALIAS = "policy"
MAX_ROLE = 128
"""Characters of an agent role's name: it must fit where rewards are given by role."""

RequestT = TypeVar("RequestT", bound=RequestBody)
AnswerT = TypeVar("AnswerT", bound=BaseModel)
Chunks = AsyncGenerator[CallChunk]
CallLookup = Callable[[str], tuple[Conversation, Message] | None]
"""What a call of this episode and role was asked, and what it answered, by the call's id; None for any other id."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer says of itself before anything is sampled. `id` is that of the (first choice's) call."""

    id: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A piece of a stream, as it is sent."""

    text: str


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How errors look: `body` is the answer to a request, `event` the end of a stream that broke behind n events."""

    model: type[BaseModel]
    body: Callable[[RequestError], dict[str, Any]]
    event: Callable[[RequestError, int], str]


@dataclass(frozen=True, slots=True)
class Dialect(Generic[RequestT, AnswerT]):
    """One route of an API.

    `to_request` raises `RequestError` naming the first thing that cannot be honoured. The chunks that `to_answer` and
    `to_events` take are those of `Gateway.call`; both end when the chunks do.
    """

    path: str
    keys: RequestKeys
    """The treatment of every key of a request."""
    answer: type[AnswerT]
    errors: ErrorShape
    to_request: Callable[[RequestT, CallLookup], CallRequest]
    to_answer: Callable[[Chunks, RequestT, AnswerHead], Coroutine[Any, Any, AnswerT]]
    to_events: Callable[[Chunks, RequestT, AnswerHead], AsyncGenerator[StreamEvent]]


DONE = StreamEvent("data: [DONE]\n\n")
"""How OpenAI's older dialects end a stream."""


def sse(payload: dict[str, Any], *, name: str = "") -> str:
    """One server-sent event."""
    event = f"event: {name}\n" if name else ""
    return f"{event}data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def role_of(model: str, served: str, header: str, aliases: str = "") -> str:
    """The agent role a request speaks as: its header, or what follows `@` in the model's name.

    `aliases` are further names, comma-separated, with `*` for anything. Raises `NotFound` for another model.
    """
    for name in (served, POLICY_ALIAS, *_matching(model, aliases)):
        if model == name:
            return header
        if model.startswith(name + "@"):
            role = model[len(name) + 1 :]
            if len(role) > MAX_ROLE:
                raise InvalidRequest(
                    f"The model's name says a role of {len(role)} characters; it may have {MAX_ROLE}.", param="model"
                )
            if header and header != role:
                raise InvalidRequest(f"The model's name says role {role!r}, the header {header!r}.", param="model")
            return role
    near = get_close_matches(model, [served, POLICY_ALIAS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f": it serves {served!r}, also called {POLICY_ALIAS!r}."
    hint += " server.model_aliases lets it answer to other names."
    raise NotFound(f"The model {model!r} is not served here{hint}", code="model_not_found", param="model")


def _matching(model: str, aliases: str) -> list[str]:
    """The name in `model`, before its role, when an alias allows it."""
    name = model.partition("@")[0]
    patterns = (pattern.strip() for pattern in aliases.split(","))
    return [name] if any(fnmatchcase(name, pattern) for pattern in patterns if pattern) else []


class OpenAIErrorBody(BaseModel):
    """What OpenAI's SDKs read."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(BaseModel):
    """An error on a route of OpenAI's."""

    error: OpenAIErrorBody


def openai_error(error: RequestError) -> dict[str, Any]:
    """The body of an error."""
    kind = {Unauthorized: "authentication_error", Forbidden: "permission_error", NotFound: "not_found_error"}
    name = kind.get(type(error), "server_error" if error.status >= 500 else "invalid_request_error")
    name = "rate_limit_error" if error.status == 429 else name
    body = OpenAIErrorBody(message=error.message, type=name, param=error.param, code=error.code)
    return OpenAIError(error=body).model_dump()


OPENAI_ERRORS = ErrorShape(model=OpenAIError, body=openai_error, event=lambda error, num_sent: sse(openai_error(error)))


class UsageBody(BaseModel):
    """Tokens as the policy saw and sampled them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(slots=True)
class CollectedChoices:
    """The choices of an answer by index, as far as they have come."""

    calls: dict[int, Call] = field(default_factory=dict)
    """Of the choices that have ended."""
    tokens: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    """Of the prompt of each choice that has ended."""
    scores: dict[int, tuple[ScoredToken, ...]] = field(default_factory=dict)
    choices: int = MAX_CHOICES
    """Choices of each prompt."""

    def take(self, chunk: CallChunk) -> None:
        self.tokens.setdefault(chunk.index, []).extend(chunk.tokens)
        if chunk.call is not None:
            self.calls[chunk.index] = chunk.call
            self.prompt_tokens[chunk.index] = chunk.num_prompt_tokens
            self.scores[chunk.index] = chunk.scores

    @property
    def usage(self) -> UsageBody:
        completion = sum(len(call.completion) for call in self.calls.values())
        prompts = sum(tokens for index, tokens in self.prompt_tokens.items() if index % self.choices == 0)
        return UsageBody(prompt_tokens=prompts, completion_tokens=completion, total_tokens=prompts + completion)


async def collect(chunks: Chunks, choices: int = MAX_CHOICES) -> CollectedChoices:
    """All of them; `choices` are those of each prompt."""
    gathered = CollectedChoices(choices=choices)
    async for chunk in chunks:
        gathered.take(chunk)
    return gathered


def fingerprint_of(call: Call) -> str:
    """`policy-N`: the policy version that sampled the last token."""
    return f"policy-{call.versions[-1]}" if call.versions else "policy"


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class SamplingBody(RequestBody):
    """The keys for it, without the length of the answer."""

    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    """An extension: sample among the k likeliest tokens; 0 and -1 truncate nothing."""
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    stream_options: StreamOptions | None = None


SAMPLING_KEYS: RequestKeys = {
    "model": honoured("and the role, after `@`"),
    "temperature": honoured("0, or from 0.01 to 2; 0 is refused in training"),
    "top_p": honoured(),
    "top_k": honoured("an extension; 0 and -1 truncate nothing"),
    "seed": honoured("a whole number of 64 bits"),
    "stop": honoured("up to 16 of up to 1,000 characters"),
    "n": honoured("up to 64"),
    "stream": honoured(),
    "stream_options": honoured("`include_usage`"),
}
"""Of both dialects."""


def completion_request(
    body: SamplingBody,
    conversation: Conversation,
    max_tokens: int | None,
    constraint: Constraint = ANY_ANSWER,
    notes: Sequence[str] = (),
) -> CallRequest:
    """The canonical request that a body is."""
    return CallRequest(
        conversation=conversation,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        constraint=constraint,
        choices=body.n or 1,
        stream=bool(body.stream),
        model=body.model,
        notes=tuple(dict.fromkeys(notes)),
    )
