"""The text completions of OpenAI's API, and the keys that chat completions share with them.

A raw prompt is continued as it stands, without the chat template. A prompt that begins with an earlier prompt and its
answer continues that timeline: see `gateway.prompts`.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Strict

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import MAX_CHOICES, CallChunk, CallRequest, ScoredToken, TokenLogprob
from agentjet.protocol import Int64
from agentjet.server.dialects.dialect import (
    AnswerHead,
    Body,
    Chunks,
    Count,
    Finite,
    KeyRules,
    RequestBody,
    RequestKeys,
    StopString,
    StopStrings,
    call_of,
    call_request,
    collect,
    honoured,
    noted,
    refuse_unused_stream_options,
    refuse_value,
    refused,
    sse,
)
from agentjet.types import ANY_ANSWER, Call, Constraint, Conversation

# --- shared with chat completions

DONE = "data: [DONE]\n\n"
"""The end of a stream."""


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class SamplingBody(RequestBody):
    """The keys that chat completions and text completions share, except the length of the answer."""

    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    """An extension: sample among the k likeliest tokens; 0 and -1 truncate nothing."""
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None

    # Known, and not honoured: see `SAMPLING_KEYS`.
    user: Any = None
    frequency_penalty: Finite | None = None
    presence_penalty: Finite | None = None
    repetition_penalty: Finite | None = None
    min_p: Finite | None = None
    logit_bias: dict[str, float] | None = None


SAMPLING_KEYS: RequestKeys = {
    "model": honoured("and the role, after `@`"),
    "temperature": honoured("0, or from 0.01 to 2; 0 is refused in training"),
    "top_p": honoured(),
    "top_k": honoured("an extension; 0 and -1 truncate nothing"),
    "seed": honoured("a whole number of 64 bits"),
    "stop": honoured("up to 16 of up to 1,000 characters"),
    "n": honoured(f"up to {MAX_CHOICES}"),
    "stream": honoured(),
    "stream_options": honoured("`include_usage`"),
    "user": noted(),
    "frequency_penalty": refused("it would change the distribution", 0.0),
    "presence_penalty": refused("it would change the distribution", 0.0),
    "repetition_penalty": refused("it would change the distribution", 1.0),
    "min_p": refused("it would change the distribution", 0.0),
    "logit_bias": refused("it would change the distribution", {}),
}
"""The rules of `SamplingBody`."""


def sampling_request(
    body: SamplingBody,
    conversation: Conversation,
    max_tokens: int | None,
    notes: Iterable[str],
    constraint: Constraint = ANY_ANSWER,
) -> CallRequest:
    """Returns the canonical request of a body. Raises `InvalidRequest` for stream options without a stream."""
    refuse_unused_stream_options(body, body.stream_options)
    return call_request(
        body,
        conversation,
        max_tokens,
        notes,
        top_k=body.top_k,
        seed=body.seed,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        constraint=constraint,
        choices=body.n or 1,
    )


class UsageBody(BaseModel):
    """Numbers of tokens as the policy saw and sampled them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(choices: Iterable[CallChunk], num_per_prompt: int = MAX_CHOICES) -> UsageBody:
    """Returns the usage of an answer from the last chunks of its choices. Choices of one prompt count it once."""
    prompts = completions = 0
    for last in choices:
        completions += len(call_of(last).completion)
        prompts += last.num_prompt_tokens if last.index % num_per_prompt == 0 else 0
    return UsageBody(prompt_tokens=prompts, completion_tokens=completions, total_tokens=prompts + completions)


def fingerprint_of(call: Call, head: AnswerHead) -> str:
    """Returns `POLICY-N`: the policy, and its version that sampled the last token."""
    return f"{head.policy}-{call.versions[-1]}" if call.versions else head.policy


# --- requests

TokenId = Annotated[int, Strict(), Field(ge=0, lt=2**24)]
MAX_LIKELIEST = 20
MAX_PROMPTS = 64
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(SamplingBody):
    """A text completion request. Keys of OpenAI's API that cannot be honoured are refused, never ignored."""

    prompt: str | TokenIds | Annotated[list[str] | list[TokenIds], Field(min_length=1)]
    """Text, or token ids, which are used as given; or a list of either.

    Control tokens must be given as ids: in text, their names stay text.
    """
    max_tokens: Count | None = None
    """The default is the job's limit, not OpenAI's 16."""
    logprobs: Annotated[Int64, Field(ge=0, le=MAX_LIKELIEST)] | None = None
    """0: log-probabilities of the sampled tokens. Above 0, in evaluation episodes: of the likeliest tokens as well."""
    echo: bool | None = None
    """In evaluation episodes: the prompt comes back before the completion, with its log-probabilities."""

    # Known, and not honoured: see `KEYS`.
    best_of: int | None = None
    suffix: str | None = None


KEYS: RequestKeys = {
    **SAMPLING_KEYS,
    "prompt": honoured("a text or a list of token ids; in evaluation episodes a list of up to 64 of either"),
    "max_tokens": honoured("the default is the job's limit, not OpenAI's 16"),
    "logprobs": honoured("0: the sampled tokens; up to 20 in evaluation episodes: the likeliest tokens as well"),
    "echo": honoured("in evaluation episodes, without `stream`"),
    "best_of": honoured("1, or equal to `n`"),
    "suffix": refused("the policy continues a text", ""),
}
_RULES = KeyRules(KEYS)


def to_request(body: CompletionBody) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    notes = _RULES.check(body)
    if body.best_of != body.n:  # The best n of n are all of them.
        refuse_value(body.best_of, (1,), "best_of")
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
    return replace(
        sampling_request(body, Conversation((), prompt=first), body.max_tokens, notes),
        others=tuple(Conversation((), prompt=prompt) for prompt in others),
        num_likeliest=(body.logprobs or 0) if scored else None,
    )


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """Returns the prompts of a request: one, or the items of a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [tuple(given)]
    return [one if isinstance(one, str) else tuple(one) for one in given]


# --- answers


class CompletionLogprobs(BaseModel):
    """Log-probabilities of every sampled token of a choice, control tokens included."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt."""
    text_offset: list[int]
    """Position in characters at which each token begins in the tokens' text; the choice's text begins at 0."""
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(BaseModel):
    """One completion."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    """Null in the chunks of a stream, except the last of a choice."""


class TextCompletion(BaseModel):
    """The answer to a text completion request. A chunk of a stream has the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    system_fingerprint: str | None = None
    """`policy-N`: the policy version that sampled the last token."""


async def to_answer(chunks: Chunks, body: CompletionBody, head: AnswerHead) -> TextCompletion:
    """Returns the whole answer, after every choice has ended."""
    choices = await collect(chunks)
    return TextCompletion(
        id=f"cmpl-{head.id}",
        created=head.created,
        model=head.model,
        choices=[_choice(body, last) for last in choices],
        usage=usage_of(choices, body.n or 1),
        system_fingerprint=fingerprint_of(call_of(choices[0]), head),
    )


def _choice(body: CompletionBody, last: CallChunk) -> CompletionChoice:
    call, prompt = call_of(last), _prompts(body.prompt)[last.index // (body.n or 1)]
    scored_prompt = last.scores[: last.num_prompt_tokens]
    text = call.response.content
    if body.echo:
        shown = prompt if isinstance(prompt, str) else b"".join(t.utf8 for t in scored_prompt).decode(errors="replace")
        text = shown + text
    logprobs = None
    if last.scores and body.logprobs is not None:
        scores = last.scores if body.echo else last.scores[len(scored_prompt) :]
        logprobs = _Offsets().logprobs(scores)
        if body.logprobs:
            top = [dict(sorted(token.likeliest, key=lambda pair: pair[1])) or None for token in scores]
            logprobs.top_logprobs = top
    elif body.logprobs is not None:
        logprobs = _Offsets().logprobs(last.tokens)
    return CompletionChoice(text=text, index=last.index, logprobs=logprobs, finish_reason=_finish_reason(call))


async def to_events(chunks: Chunks, body: CompletionBody, head: AnswerHead) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer."""
    choices: list[CallChunk] = []
    offsets: dict[int, _Offsets] = {}
    fingerprint: str | None = None

    def event(**changes: Any) -> str:
        common = TextCompletion(id=f"cmpl-{head.id}", created=head.created, model=head.model, choices=[])
        return sse(common.model_copy(update={**changes, "system_fingerprint": fingerprint}).model_dump())

    async for chunk in chunks:
        if chunk.call is not None:
            choices.append(chunk)
            fingerprint = fingerprint_of(chunk.call, head)
        logprobs = None
        if body.logprobs is not None:
            logprobs = offsets.setdefault(chunk.index, _Offsets()).logprobs(chunk.tokens)
        choice = CompletionChoice(
            text=chunk.text,
            index=chunk.index,
            logprobs=logprobs,
            finish_reason=_finish_reason(chunk.call) if chunk.call is not None else None,
        )
        yield event(choices=[choice])
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event(usage=usage_of(choices))
    yield DONE


class _Offsets:
    """Counts the characters of one choice's tokens. A token inside a character begins where that character does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def logprobs(self, tokens: Sequence[TokenLogprob | ScoredToken]) -> CompletionLogprobs:
        """Returns the log-probabilities of the next tokens."""
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            text_offset=[self._next(token.utf8) for token in tokens],
        )

    def _next(self, utf8: bytes) -> int:
        """Returns the position of the next token."""
        at = self._offset
        self._offset += len(self._decoder.decode(utf8))
        return at


def _finish_reason(call: Call) -> Literal["stop", "length"]:
    assert call.finish_reason in ("stop", "length"), "a raw prompt's answer has no tool calls"
    return call.finish_reason
