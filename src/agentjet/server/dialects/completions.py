"""The text completions of OpenAI's API, and the keys that chat completions share with them.

A raw prompt is continued as it stands, without the chat template. A prompt that begins with an earlier prompt and its
answer continues that timeline: see `gateway.prompts`.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import MAX_CHOICES, CallChunk, CallRequest, ScoredToken, TokenLogprob
from agentjet.protocol import Int64
from agentjet.server.dialects.dialect import (
    AnswerHead,
    Chunks,
    call_of,
    call_request,
    refuse_unused_stream_options,
)
from agentjet.server.dialects.error_shapes import sse
from agentjet.server.dialects.keys import (
    COMPLETIONS_KEYS,
    Body,
    Count,
    RequestBody,
    StopString,
    StopStrings,
    refuse_value,
    with_keys,
)
from agentjet.types import Call, Conversation

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


def sampling_request(
    body: SamplingBody, conversation: Conversation, max_tokens: int | None, notes: Iterable[str]
) -> CallRequest:
    """Returns the canonical request of a body. Raises `InvalidRequest` for stream options without a stream."""
    refuse_unused_stream_options(body, body.stream_options)
    return replace(
        call_request(body, conversation, notes),
        max_tokens=max_tokens,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        choices=body.n or 1,
    )


def usage_of(choices: Iterable[CallChunk], num_per_prompt: int = MAX_CHOICES) -> dict[str, int]:
    """Returns the numbers of tokens of an answer from the last chunks of its choices.

    Choices of one prompt count it once.
    """
    prompts = completions = 0
    for last in choices:
        completions += len(call_of(last).completion)
        prompts += last.num_prompt_tokens if last.index % num_per_prompt == 0 else 0
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def fingerprint_of(call: Call, head: AnswerHead) -> str:
    """Returns `POLICY-N`: the policy, and its version that sampled the last token."""
    return f"{head.policy}-{call.versions[-1]}" if call.versions else head.policy


# --- requests

TokenId = Annotated[int, Strict(), Field(ge=0, lt=2**24)]
MAX_LIKELIEST = 20
MAX_PROMPTS = 64
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


@with_keys(COMPLETIONS_KEYS)
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
    best_of: int | None = None


def to_request(body: CompletionBody) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    notes = body.noted_keys()
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


def to_answer(choices: Sequence[CallChunk], body: CompletionBody, head: AnswerHead) -> dict[str, Any]:
    """Returns the whole answer."""
    shown = [_whole_choice(body, last) for last in choices]
    return _answer(head, shown, usage_of(choices, body.n or 1), fingerprint_of(call_of(choices[0]), head))


async def to_events(chunks: Chunks, body: CompletionBody, head: AnswerHead) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer."""
    choices: list[CallChunk] = []
    offsets: dict[int, _Offsets] = {}
    fingerprint: str | None = None
    async for chunk in chunks:
        if chunk.call is not None:
            choices.append(chunk)
            fingerprint = fingerprint_of(chunk.call, head)
        logprobs = None
        if body.logprobs is not None:
            logprobs = offsets.setdefault(chunk.index, _Offsets()).logprobs(chunk.tokens)
        yield sse(_answer(head, [_choice(chunk, chunk.text, logprobs)], None, fingerprint))
    if body.stream_options is not None and body.stream_options.include_usage:
        yield sse(_answer(head, [], usage_of(choices), fingerprint))
    yield DONE


def _answer(
    head: AnswerHead, choices: list[Any], usage: dict[str, int] | None, fingerprint: str | None
) -> dict[str, Any]:
    """Returns the whole answer. A chunk of a stream has the same shape."""
    return {
        "id": f"cmpl-{head.id}",
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage,
        "system_fingerprint": fingerprint,
    }


def _choice(chunk: CallChunk, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a choice, or a chunk of it. Only the last chunk has a reason why it ended."""
    reason = None if chunk.call is None else chunk.call.finish_reason
    assert reason in (None, "stop", "length"), "a raw prompt's answer has no tool calls"
    return {"text": text, "index": chunk.index, "logprobs": logprobs, "finish_reason": reason}


def _whole_choice(body: CompletionBody, last: CallChunk) -> dict[str, Any]:
    prompt = _prompts(body.prompt)[last.index // (body.n or 1)]
    scored_prompt = last.scores[: last.num_prompt_tokens]
    text = call_of(last).response.content
    if body.echo:
        shown = prompt if isinstance(prompt, str) else b"".join(t.utf8 for t in scored_prompt).decode(errors="replace")
        text = shown + text
    logprobs = None
    if last.scores and body.logprobs is not None:
        scores = last.scores if body.echo else last.scores[len(scored_prompt) :]
        logprobs = _Offsets().logprobs(scores)
        if body.logprobs:
            top = [dict(sorted(token.likeliest, key=lambda pair: pair[1])) or None for token in scores]
            logprobs["top_logprobs"] = top
    elif body.logprobs is not None:
        logprobs = _Offsets().logprobs(last.tokens)
    return _choice(last, text, logprobs)


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
        """Returns the position of the next token."""
        at = self._offset
        self._offset += len(self._decoder.decode(utf8))
        return at
