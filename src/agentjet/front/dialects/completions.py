"""The completions of OpenAI's API: text completions, chat completions, and the demonstrations in the form of a chat.

Text completions continue a raw prompt as it stands, without the chat template. A prompt that begins with an earlier
prompt and its answer continues that timeline: see `front.prompts`.

Messages of a chat are compared by meaning, so forms with one meaning become one form here. An assistant's null content
is the empty string. The text parts of a content list are joined. `developer` is `system`. The messages of
demonstrations have the same keys.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import Field, Strict, ValidationError

from agentjet.errors import InvalidRequest
from agentjet.front.calls import MAX_CHOICES, CallChunk, CallRequest, ScoredToken
from agentjet.front.dialects.dialect import (
    CACHE_MEANING,
    NO_OBFUSCATION,
    OPENAI_ERRORS,
    OPENAI_KEYS,
    REASONING_MEANING,
    AnswerHead,
    Body,
    CallLookup,
    ContentPart,
    Count,
    Dialect,
    Distribution,
    Encoder,
    Images,
    Items,
    JsonObject,
    NamedSchema,
    OpenAIBody,
    Payload,
    RequestKeys,
    StopString,
    StopStrings,
    Text,
    ToolName,
    call_of,
    check_choice,
    event_json,
    function_tool,
    named_function,
    noted,
    refusal,
    refused,
    schema_of,
    sse,
    text_of,
)
from agentjet.front.prompts import Demonstration, TokenLogprob
from agentjet.protocol import DemonstrationBody, Int64
from agentjet.types import Constraint, Conversation, Message, ToolCall

# --- shared by text and chat completions


class SamplingKeys(Distribution):
    """The keys of sampling that all requests with choices share, except the length of the answer."""

    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    """an extension; 0 and -1 truncate nothing"""
    seed: Int64 | None = None
    """a whole number of 64 bits"""
    stop: StopString | StopStrings | None = None
    """up to 16 of up to 1,000 characters"""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """up to 64"""


def sampling_request(
    body: SamplingKeys, conversation: Conversation, max_tokens: int | None, **fields: Any
) -> CallRequest:
    """Returns the request with the keys of sampling, and with these other `fields`."""
    return CallRequest(
        conversation,
        max_tokens=max_tokens,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        choices=body.n or 1,
        **fields,
    )


class ChoicesBody(OpenAIBody):
    """A request whose answer has choices."""

    @property
    def sampling(self) -> SamplingKeys:
        """The part with the keys of sampling: OpenAI has them beside the other keys."""
        return cast(SamplingKeys, self)


class SamplingBody(SamplingKeys, ChoicesBody):
    """The keys that chat completions and text completions share."""


BodyT = TypeVar("BodyT", bound=ChoicesBody)


class ChoicesEncoder(Encoder[BodyT]):
    """Encodes an answer with choices. Every event is an answer with the new `part` of one choice."""

    prefix = "cmpl"
    kind = event_kind = "text_completion"

    def __init__(self, body: BodyT, head: AnswerHead) -> None:
        super().__init__(body, head)
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._event = self._head(self.event_kind) | ({"usage": None} if self._with_usage else {})
        self._constant = ""
        """The part that all events share, as JSON; empty if it must be encoded again."""
        self._ended: dict[int, tuple[CallChunk, Payload]] = {}

    def part(self, chunk: CallChunk) -> Payload:
        """Returns the choice as an event shows it."""
        raise NotImplementedError

    def choice(self, part: Payload) -> Payload:
        """Returns the choice as the whole answer shows it, which has one chunk for each choice."""
        return part

    def encode(self, chunk: CallChunk) -> Iterator[Payload]:
        part = self._next_part(chunk)
        yield {**self._event, "choices": [part]}

    def stream(self, chunk: CallChunk) -> str:
        part = self._next_part(chunk)
        self.num_events += 1
        if not self._constant:
            self._constant = event_json(self._event)[:-1]
        return f'data: {self._constant}, "choices": [{event_json(part)}]}}\n\n'

    def _next_part(self, chunk: CallChunk) -> Payload:
        part = self.part(chunk)
        if chunk.call is not None:
            self._ended[chunk.index] = chunk, part
            self._event["system_fingerprint"] = self._fingerprint(chunk)
            self._constant = ""
        return part

    def finish(self) -> str:
        usage = sse({**self._event, "choices": [], "usage": self._usage()}) if self._with_usage else ""
        return usage + "data: [DONE]\n\n"

    def answer(self) -> Payload:
        in_order = [self._ended[index] for index in sorted(self._ended)]
        choices = [self.choice(part) for _, part in in_order]
        fingerprint = {"system_fingerprint": self._fingerprint(in_order[0][0])}
        return {**self._head(self.kind), **fingerprint, "choices": choices, "usage": self._usage()}

    def _head(self, kind: str) -> Payload:
        known = {"id": f"{self.prefix}-{self.head.id}", "object": kind}
        return {**known, "created": self.head.created, "model": self.head.model, "system_fingerprint": None}

    def _fingerprint(self, last: CallChunk) -> str:
        """Returns `POLICY-N`, with the version of the last token."""
        versions = call_of(last).versions
        return f"{self.head.policy}-{versions[-1]}" if versions else self.head.policy

    def _usage(self) -> dict[str, int]:
        """Returns the numbers of tokens. Choices of one prompt count it once."""
        prompts = completions = 0
        for index, (last, _) in self._ended.items():
            completions += len(call_of(last).completion)
            prompts += last.num_prompt_tokens if index % (self.body.sampling.n or 1) == 0 else 0
        return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


# --- requests

_DISTRIBUTION = "it would change the distribution"
COMPLETIONS_KEYS: RequestKeys = {
    **noted("user"),
    **refused("frequency_penalty presence_penalty min_p", _DISTRIBUTION, 0.0),
    **refused("repetition_penalty", _DISTRIBUTION, 1.0),
    **refused("logit_bias", _DISTRIBUTION, {}),
    **NO_OBFUSCATION,
    **refused("suffix", "the policy continues a text", ""),
}

TokenId = Annotated[int, Strict(), Field(ge=0, lt=2**24)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
MAX_PROMPTS = 64


class CompletionBody(SamplingBody):
    """A text completion request. Keys of OpenAI's API that cannot be honoured are refused, never ignored."""

    prompt: str | TokenIds | Annotated[Items[str] | Items[TokenIds], Field(min_length=1)]
    """a text or a list of token ids; in evaluation episodes a list of up to 64 of either"""
    max_tokens: Count | None = None
    """the default is the job's limit, not OpenAI's 16"""
    logprobs: Annotated[Int64, Field(ge=0, le=20)] | None = None
    """0: the sampled tokens; up to 20 in evaluation episodes: the likeliest tokens as well"""
    echo: bool | None = None
    """in evaluation episodes, without `stream`"""
    best_of: int | None = None
    """1, or equal to `n`"""


def translate_text(body: CompletionBody, _: CallLookup) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    if body.best_of not in (None, 1, body.n):  # The best n of n are all of them.
        raise refusal("best_of", f" = {body.best_of} is not supported: leave it out or use n.")
    scored = bool(body.echo or body.logprobs)
    first, *others = _prompts(body.prompt)
    if len(others) >= MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt holds {len(others) + 1} prompts; a request may have {MAX_PROMPTS}: send several requests.",
            param="prompt",
        )
    if body.stream and (scored or others):
        raise InvalidRequest(
            "echo, logprobs above 0 and several prompts cannot be streamed: leave out stream.",
            code="unsupported_parameter",
            param="stream",
        )
    return sampling_request(
        body,
        Conversation((), prompt=first),
        body.max_tokens,
        others=tuple(Conversation((), prompt=prompt) for prompt in others),
        num_likeliest=(body.logprobs or 0) if scored else None,
        shows_tokens=body.logprobs is not None,
    )


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | tuple[int, ...]]:
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [tuple(given)]
    return [one if isinstance(one, str) else tuple(one) for one in given]


# --- answers


class CompletionEncoder(ChoicesEncoder[CompletionBody]):
    """Encodes the answer of a text completion. A part of a choice has the shape of the whole one."""

    def __init__(self, body: CompletionBody, head: AnswerHead) -> None:
        super().__init__(body, head)
        self._offsets = defaultdict[int, _Offsets](_Offsets)

    def part(self, chunk: CallChunk) -> Payload:
        reason = None if chunk.call is None else chunk.call.finish_reason
        assert reason in (None, "stop", "length"), "a raw prompt's answer has no tool calls"
        text, shown = chunk.delta.text, chunk.scores[chunk.num_prompt_tokens :] or chunk.tokens
        if self.body.echo:
            text, shown = self._prompt(chunk) + text, chunk.scores
        logprobs = None if self.body.logprobs is None else self._offsets[chunk.index].logprobs(shown)
        if logprobs is not None and self.body.logprobs:
            likeliest = [dict(sorted(score.likeliest, key=lambda pair: pair[1])) for score in chunk.scores]
            logprobs["top_logprobs"] = [one or None for one in likeliest[-len(shown) :]]
        return {"text": text, "index": chunk.index, "logprobs": logprobs, "finish_reason": reason}

    def _prompt(self, last: CallChunk) -> str:
        prompt = _prompts(self.body.prompt)[last.index // (self.body.n or 1)]
        if isinstance(prompt, str):
            return prompt
        return b"".join(score.utf8 for score in last.scores[: last.num_prompt_tokens]).decode(errors="replace")


class _Offsets:
    """Counts the characters of one choice's tokens. A token inside a character begins where that character does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def logprobs(self, tokens: Sequence[TokenLogprob | ScoredToken]) -> dict[str, Any]:
        """Returns the log-probabilities of the next tokens; null for the first token of a prompt.

        `text_offset` has the position in characters at which each token begins. The choice's text begins at 0.
        """
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "text_offset": [self._next(token.utf8) for token in tokens],
            "top_logprobs": None,
        }

    def _next(self, utf8: bytes) -> int:
        at = self._offset
        self._offset += len(self._decoder.decode(utf8))
        return at


COMPLETIONS = Dialect(
    "/v1/completions", CompletionBody, COMPLETIONS_KEYS, OPENAI_ERRORS, translate_text, CompletionEncoder
)


# --- chat completions

_REASONING_TEXT = "`reasoning_content` has the text"
CHAT_KEYS: RequestKeys = {
    **{name: rule for name, rule in COMPLETIONS_KEYS.items() if name != "suffix"},
    **OPENAI_KEYS,
    **noted("chat_template_kwargs", "refused if this model's template would write another prompt with it", {}),
    **noted(
        "cache_control messages[].cache_control messages[].content[].cache_control tools[].cache_control", CACHE_MEANING
    ),
    **noted("store", "answers cannot be fetched again", False),
    **noted("prediction", "a hint for speed"),
    **noted("usage", "answers always have it"),
    **noted("reasoning_effort reasoning thinking enable_thinking thinking_budget", REASONING_MEANING),
    **noted("include_reasoning", "answers have `reasoning_content`", True),
    **noted("verbosity", "state the wanted length in the prompt"),
    **noted("web_search_options", "no provider runs the search; the policy is not offered it"),
    **noted("messages[].provider_specific_fields", "the policy never read it", {}),
    **noted("messages[].reasoning messages[].reasoning_text messages[].reasoning_opaque", _REASONING_TEXT, ""),
    **noted("messages[].reasoning_details messages[].reasoning_items messages[].thinking_blocks", _REASONING_TEXT, []),
    **refused("modalities", "the policy writes text only", ["text"]),
    **refused("audio", "the policy writes text only"),
    **refused("function_call", "use `tool_choice`", "auto"),
    **refused("functions", "use `tools`", []),
    **refused("messages[].refusal", "the policy refuses in plain text"),
    **refused("messages[].annotations", "", []),
    **refused("messages[].audio", "the policy reads text only"),
    **refused("messages[].function_call", "use `tool_calls`"),
}


class ChatPart(ContentPart):
    """A part of a message's content."""

    place = "messages[].content[]."
    keys_of_kind: ClassVar = {"text": "text citations? refusal?"}


class HistoryFunction(Body):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """The parsed `arguments`, which `stream` and `parse` of OpenAI's SDK add. Ignored: it repeats `arguments`."""


class HistoryToolCall(Body):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: HistoryFunction
    index: int | None = None
    """Kept by agents that join the chunks of a stream. Ignored: it repeats the order of the list."""


class MessageBody(Body):
    """A message."""

    place = "messages[]."
    keys_of_kind: ClassVar = {  # `parsed` is added by OpenAI's SDK, and repeats `content`.
        **dict.fromkeys(("system", "developer", "user"), "content name?"),
        "assistant": "content? reasoning_content? tool_calls? name? parsed?",
        "tool": "content tool_call_id name?",
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ChatPart] | None = None
    reasoning_content: str | None = None
    """The reasoning of an assistant, as the answers of this server have it."""
    tool_calls: Items[HistoryToolCall] | None = None
    tool_call_id: str | None = None
    """May be empty, because the `id` of a tool call may be. vLLM accepts both, too."""
    name: str | None = None

    @property
    def kind(self) -> str:
        return self.role


class FunctionBody(Body):
    """A function that the policy may call; `parameters` is a JSON schema."""

    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool definition."""

    place = "tools[]."
    type: Literal["function"]
    function: FunctionBody


class ResponseFormat(Body):
    """The form of the answer's content: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ChatBody(SamplingBody):
    """A chat completion request. Keys of OpenAI's API that cannot be honoured are refused, never ignored."""

    messages: Annotated[Items[MessageBody], Field(min_length=1)]
    """text, also in parts; tool calls and their results; `reasoning_content`"""
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """the same as `max_tokens`"""
    logprobs: bool | None = None
    """every sampled token, control tokens included"""
    tools: Items[ToolBody] | None = None
    """of type `function`, also `strict`"""
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    """[constraints.md](constraints.md)"""
    chat_template_kwargs: JsonObject | None = None


def translate_chat(body: ChatBody, _: CallLookup) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest(
            f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens} differ.",
            param="max_completion_tokens",
        )
    functions = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]
    conversation = Conversation(
        tuple(map(_message, body.messages)),
        tuple(function_tool(function.name, function.description, function.parameters) for function in functions),
    )
    return sampling_request(
        body,
        conversation,
        body.max_completion_tokens or body.max_tokens,
        constraint=_constraint(body, functions),
        template_kwargs=body.chat_template_kwargs or {},
        shows_tokens=bool(body.logprobs),
    )


def _message(body: MessageBody) -> Message:
    calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in body.tool_calls or ()]
    return Message(
        role="system" if body.role == "developer" else body.role,
        content=text_of(body.content),
        reasoning=body.reasoning_content or "",
        tool_calls=tuple(calls),
        tool_call_id=body.tool_call_id or "",
        name=body.name or "",
    )


def _constraint(body: ChatBody, functions: list[FunctionBody]) -> Constraint:
    choice, required, where = body.tool_choice, "", "response_format.json_schema"
    if isinstance(choice, dict):
        form = "{'type': 'function', 'function': {'name': ...}}"
        required = named_function(choice, choice.get("function"), form)
    shape = body.response_format or ResponseFormat(type="text")
    schema = shape.json_schema.schema_ if shape.json_schema else None
    constraint = Constraint(
        schema=schema_of(shape.type, schema, f"{where}.schema", where),
        calls="required" if choice == "required" or required else "auto",
        function=required,
        strict=frozenset(function.name for function in functions if function.strict),
        parallel=body.parallel_tool_calls is not False,
    )
    return check_choice(constraint, [function.name for function in functions])


class ChatEncoder(ChoicesEncoder[ChatBody]):
    """Encodes the answer of a chat completion. A part of a choice is its delta."""

    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, head: AnswerHead) -> None:
        super().__init__(body, head)
        self._num_calls: dict[int, int] = {}
        """Tool calls that were sent, by choice."""

    def part(self, chunk: CallChunk) -> Payload:
        call, delta, new = chunk.call, dict[str, Any](), chunk.delta
        if chunk.index not in self._num_calls:
            self._num_calls[chunk.index] = 0
            delta |= {"role": "assistant", "content": ""}
        if reasoning := new.reasoning:
            delta["reasoning_content"] = reasoning
        if text := new.text:
            delta["content"] = text
        if calls := new.calls:
            start = self._num_calls[chunk.index]
            delta["tool_calls"] = [{**_shown(one), "index": i} for i, one in enumerate(calls, start)]
            self._num_calls[chunk.index] += len(calls)
        logprobs = _logprobs(chunk) if self.body.logprobs and chunk.tokens else None
        reason = None if call is None else call.finish_reason
        return {"index": chunk.index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}

    def choice(self, part: Payload) -> Payload:
        delta = part["delta"]
        calls = [{key: one[key] for key in ("id", "type", "function")} for one in delta.get("tool_calls", ())]
        message = {
            "role": "assistant",
            "content": delta["content"] or (None if calls else ""),
            "reasoning_content": delta.get("reasoning_content"),
            "tool_calls": calls or None,
            "refusal": None,
        }
        logprobs = part["logprobs"] or ({"content": [], "refusal": None} if self.body.logprobs else None)
        return {
            "index": part["index"],
            "message": message,
            "logprobs": logprobs,
            "finish_reason": part["finish_reason"],
        }


def _shown(call: ToolCall) -> Payload:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(chunk: CallChunk) -> Payload:
    """Returns the sampled tokens with the log-probabilities that they were sampled with."""
    shown = [{"token": t.text, "logprob": t.logprob, "bytes": list(t.utf8), "top_logprobs": []} for t in chunk.tokens]
    return {"content": shown, "refusal": None}


CHAT = Dialect("/v1/chat/completions", ChatBody, CHAT_KEYS, OPENAI_ERRORS, translate_chat, ChatEncoder)


# --- demonstrations


def to_demonstration(body: DemonstrationBody, images: Images) -> Demonstration:
    """Returns a demonstration. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    weights = [_take_weight(message, f"{body.task_id}: messages.{i}.") for i, message in enumerate(body.messages)]
    asked = {"model": "policy", "messages": [message for message, _ in weights], "tools": body.tools or None}
    try:
        chat = ChatBody.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{body.task_id}: {where}: {first['msg']}.", param=where) from None
    try:
        conversation = CHAT.decode(chat, lambda _: None, images).conversation
    except InvalidRequest as error:
        raise InvalidRequest(f"{body.task_id}: {error}", code=error.code, param=error.param) from None
    learned = frozenset(i for i, (_, weight) in enumerate(weights) if weight)
    return Demonstration(body.task_id, conversation, learned, body.reward, body.group)


def _take_weight(message: Mapping[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """Returns a message without its `weight`, and True if its answer is learned."""
    rest = dict(message)
    weight = rest.pop("weight", 1)
    if weight not in (0, 1):
        raise InvalidRequest(f"{where}weight = {weight!r}: it is 1 to learn the answer, or 0.", param="weight")
    return rest, rest.get("role") == "assistant" and bool(weight)
