"""The body of `POST /v1/completions`, every key of it, and of its answer.

`KEYS` has the treatment of each.

OpenAI's legacy text completions: a raw prompt is continued as it stands, without the chat template.

What begins with an earlier prompt and its answer continues that timeline: see `gateway.prompting`.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Strict

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallRequest, ScoredToken, TokenLogprob
from agentjet.protocol import Int64
from agentjet.server.dialects.dialect import (
    DONE,
    OPENAI_ERRORS,
    SAMPLING_KEYS,
    AnswerHead,
    Chunks,
    CollectedChoices,
    Count,
    Dialect,
    Finite,
    KeyRules,
    RequestKeys,
    SamplingBody,
    StreamEvent,
    UsageBody,
    collect,
    completion_request,
    fingerprint_of,
    honoured,
    noted,
    refuse_unused_stream_options,
    refuse_value,
    refused,
    sse,
)
from agentjet.types import Call, Conversation

TokenId = Annotated[int, Strict(), Field(ge=0, lt=2**24)]
MAX_LIKELIEST = 20
MAX_PROMPTS = 64
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(SamplingBody):
    """A text completion request. Everything of OpenAI's that is not honoured is refused, never ignored."""

    prompt: str | TokenIds | Annotated[list[str] | list[TokenIds], Field(min_length=1)]
    """Text, or token ids, which are fed as given; or a list of either.

    Control tokens are written as ids: in text their names stay text.
    """
    max_tokens: Count | None = None
    """Without it as the job says, and not OpenAI's 16."""
    logprobs: Annotated[Int64, Field(ge=0, le=MAX_LIKELIEST)] | None = None
    """0: log-probabilities of the sampled tokens. Above, in evaluation episodes: those of the likeliest tokens, too."""
    echo: bool | None = None
    """In evaluation episodes: the prompt comes back before the completion, with its log-probabilities."""

    # Known, and not honoured: see `KEYS`.
    user: Any = None
    best_of: int | None = None
    suffix: str | None = None
    frequency_penalty: Finite | None = None
    presence_penalty: Finite | None = None
    repetition_penalty: Finite | None = None
    min_p: Finite | None = None
    logit_bias: dict[str, float] | None = None


KEYS: RequestKeys = {
    **SAMPLING_KEYS,
    "prompt": honoured("a text or a list of token ids; in evaluation episodes a list of up to 64 of either"),
    "max_tokens": honoured("without it the job's limit, not OpenAI's 16"),
    "logprobs": honoured("0: the sampled tokens; up to 20 in evaluation episodes: the likeliest tokens, too"),
    "echo": honoured("in evaluation episodes, without `stream`"),
    "best_of": honoured("1, or equal to `n`"),
    "user": noted(),
    "suffix": refused("the policy continues a text", ""),
    "frequency_penalty": refused("it would change the distribution", 0.0),
    "presence_penalty": refused("it would change the distribution", 0.0),
    "repetition_penalty": refused("it would change the distribution", 1.0),
    "min_p": refused("it would change the distribution", 0.0),
    "logit_bias": refused("it would change the distribution", {}),
}
BODY = KeyRules(KEYS)


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a choice, token by token: every sampled token, control tokens included."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt."""
    text_offset: list[int]
    """Where each token begins in the tokens' text, in characters; 0 is the beginning of the choice's text."""
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(BaseModel):
    """One completion."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    """Null in the chunks of a stream but for the last of a choice."""


class TextCompletion(BaseModel):
    """The answer to a text completion request; a chunk of a stream has the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    system_fingerprint: str | None = None
    """`policy-N`: the policy version that sampled the last token."""


def to_request(body: CompletionBody) -> CallRequest:
    """The canonical request. Raises `InvalidRequest` naming the first thing that cannot be honoured."""
    notes = BODY.judge(body)
    if body.best_of != body.n:  # The best n of n are all of them.
        refuse_value(body.best_of, (1,), "best_of")
    refuse_unused_stream_options(body, body.stream_options)
    scored = bool(body.echo or body.logprobs)
    first, *others = _prompts(body.prompt)
    if len(others) >= MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt holds {len(others) + 1} prompts; a request may have {MAX_PROMPTS}: send several requests.",
            param="prompt",
        )
    if body.stream and (scored or others):
        raise InvalidRequest(
            "echo, logprobs above 0 and several prompts are answered whole: leave out stream.",
            code="unsupported_parameter",
            param="stream",
        )
    request = completion_request(body, Conversation((), prompt=first), body.max_tokens, notes=notes)
    return replace(
        request,
        others=tuple(Conversation((), prompt=prompt) for prompt in others),
        num_likeliest=(body.logprobs or 0) if scored else None,
    )


async def to_answer(chunks: Chunks, body: CompletionBody, head: AnswerHead) -> TextCompletion:
    """The whole answer, once every choice has ended."""
    choices = body.n or 1
    gathered = await collect(chunks, choices)
    return TextCompletion(
        id=f"cmpl-{head.id}",
        created=head.created,
        model=head.model,
        choices=[_choice(body, gathered, index, call) for index, call in sorted(gathered.calls.items())],
        usage=gathered.usage,
        system_fingerprint=fingerprint_of(gathered.calls[0]),
    )


def _choice(body: CompletionBody, gathered: CollectedChoices, index: int, call: Call) -> CompletionChoice:
    scores, prompt = gathered.scores[index], _prompts(body.prompt)[index // (body.n or 1)]
    asked = scores[: gathered.prompt_tokens[index]]
    text = call.response.content
    if body.echo:
        shown = prompt if isinstance(prompt, str) else b"".join(t.utf8 for t in asked).decode(errors="replace")
        text = shown + text
    logprobs = None
    if scores and body.logprobs is not None:
        logprobs = _Offsets().scored(scores if body.echo else scores[len(asked) :], bool(body.logprobs))
    elif body.logprobs is not None:
        logprobs = _Offsets().of(gathered.tokens[index])
    return CompletionChoice(text=text, index=index, logprobs=logprobs, finish_reason=_finish_reason(call))


async def to_events(chunks: Chunks, body: CompletionBody, head: AnswerHead) -> AsyncGenerator[StreamEvent]:
    """The chunks of a streamed answer."""
    gathered = CollectedChoices()
    offsets: dict[int, _Offsets] = {}
    fingerprint: str | None = None

    def event(**changes: Any) -> StreamEvent:
        common = TextCompletion(id=f"cmpl-{head.id}", created=head.created, model=head.model, choices=[])
        return StreamEvent(sse(common.model_copy(update={**changes, "system_fingerprint": fingerprint}).model_dump()))

    async for chunk in chunks:
        gathered.take(chunk)
        if chunk.call is not None:
            fingerprint = fingerprint_of(chunk.call)
        logprobs = None
        if body.logprobs is not None:
            logprobs = offsets.setdefault(chunk.index, _Offsets()).of(chunk.tokens)
        choice = CompletionChoice(
            text=chunk.text,
            index=chunk.index,
            logprobs=logprobs,
            finish_reason=_finish_reason(chunk.call) if chunk.call is not None else None,
        )
        yield event(choices=[choice])
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event(usage=gathered.usage)
    yield DONE


class _Offsets:
    """Counts the characters of one choice's tokens. A token within a character begins where that character does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """The logprobs of the next tokens."""
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            text_offset=[self._next(token.utf8) for token in tokens],
        )

    def scored(self, tokens: Sequence[ScoredToken], with_likeliest: bool) -> CompletionLogprobs:
        """The same of tokens at temperature 1, with the likeliest ones in each place."""
        likeliest = [dict(sorted(token.likeliest, key=lambda one: one[1])) or None for token in tokens]
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            text_offset=[self._next(token.utf8) for token in tokens],
            top_logprobs=likeliest if with_likeliest else None,
        )

    def _next(self, utf8: bytes) -> int:
        """Where the next token begins."""
        at = self._offset
        self._offset += len(self._decoder.decode(utf8))
        return at


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """The prompts of a request: one, or the items of a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [tuple(given)]
    return [one if isinstance(one, str) else tuple(one) for one in given]


def _finish_reason(call: Call) -> Any:
    assert call.finish_reason in ("stop", "length"), "a raw prompt's answer has no tool calls"
    return call.finish_reason


DIALECT = Dialect(
    path="/v1/completions",
    keys=KEYS,
    answer=TextCompletion,
    errors=OPENAI_ERRORS,
    to_request=lambda body, past: to_request(body),
    to_answer=to_answer,
    to_events=to_events,
)
