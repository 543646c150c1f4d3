"""The text completions of OpenAI's API, and the keys that chat completions share with them.

A raw prompt is continued as it stands, without the chat template. A prompt that begins with an earlier prompt and its
answer continues that timeline: see `gateway.prompts`.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, Strict

from agentjet.errors import InvalidRequest
from agentjet.gateway.calls import MAX_CHOICES, CallChunk, CallRequest, ScoredToken
from agentjet.gateway.prompts import TokenLogprob
from agentjet.protocol import Int64
from agentjet.server.dialects.dialect import AnswerHead, CallLookup, Chunks, Dialect, OpenAIBody, call_of
from agentjet.server.dialects.error_shapes import OPENAI_ERRORS, sse
from agentjet.server.dialects.keys import COMPLETIONS_KEYS, Count, Items, StopString, StopStrings, refusal
from agentjet.types import Call, Conversation

# --- shared with chat completions


class SamplingBody(OpenAIBody):
    """The keys that chat completions and text completions share, except the length of the answer."""

    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    """an extension; 0 and -1 truncate nothing"""
    seed: Int64 | None = None
    """a whole number of 64 bits"""
    stop: StopString | StopStrings | None = None
    """up to 16 of up to 1,000 characters"""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """up to 64"""


def sampling_request(body: SamplingBody, conversation: Conversation, max_tokens: int | None) -> CallRequest:
    """Returns the canonical request of a body."""
    return CallRequest(
        conversation,
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


def answer_head(head: AnswerHead, prefix: str, kind: str, call: Call | None = None) -> dict[str, Any]:
    """Returns an answer without its choices. The fingerprint is `POLICY-N`, with the version of the last token."""
    version = f"-{call.versions[-1]}" if call is not None and call.versions else ""
    fingerprint = f"{head.policy}{version}" if call is not None else None
    known = {"id": f"{prefix}-{head.id}", "object": kind, "created": head.created, "model": head.model}
    return {**known, "system_fingerprint": fingerprint}


async def stream_choices(
    chunks: Chunks, body: OpenAIBody, head_of: Callable[[Call | None], dict[str, Any]], show: Callable[[CallChunk], Any]
) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer. `show` returns the new part of a choice."""
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    choices: list[CallChunk] = []
    event = head_of(None) | ({"usage": None} if with_usage else {})
    async for chunk in chunks:
        if chunk.call is not None:
            choices.append(chunk)
            event |= head_of(chunk.call)
        yield sse({**event, "choices": [show(chunk)]})
    if with_usage:
        yield sse({**event, "choices": [], "usage": usage_of(choices)})
    yield "data: [DONE]\n\n"


# --- requests

TokenIds = Annotated[Items[Annotated[int, Strict(), Field(ge=0, lt=2**24)]], Field(min_length=1)]
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


def translate(body: CompletionBody, _: CallLookup) -> CallRequest:
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
    return replace(
        sampling_request(body, Conversation((), prompt=first), body.max_tokens),
        others=tuple(Conversation((), prompt=prompt) for prompt in others),
        num_likeliest=(body.logprobs or 0) if scored else None,
    )


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | tuple[int, ...]]:
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [tuple(given)]
    return [one if isinstance(one, str) else tuple(one) for one in given]


# --- answers


def to_answer(choices: Sequence[CallChunk], body: CompletionBody, head: AnswerHead) -> dict[str, Any]:
    """Returns the whole answer."""
    shown = [_whole_choice(body, last) for last in choices]
    known = answer_head(head, "cmpl", "text_completion", call_of(choices[0]))
    return {**known, "choices": shown, "usage": usage_of(choices, body.n or 1)}


def to_events(chunks: Chunks, body: CompletionBody, head: AnswerHead) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer. They have the shape of the whole answer."""
    offsets = defaultdict[int, _Offsets](_Offsets)

    def show(chunk: CallChunk) -> dict[str, Any]:
        logprobs = None if body.logprobs is None else offsets[chunk.index].logprobs(chunk.tokens)
        return _choice(chunk, chunk.text, logprobs)

    return stream_choices(chunks, body, partial(answer_head, head, "cmpl", "text_completion"), show)


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
        at = self._offset
        self._offset += len(self._decoder.decode(utf8))
        return at


COMPLETIONS = Dialect(
    "/v1/completions", CompletionBody, COMPLETIONS_KEYS, OPENAI_ERRORS, translate, to_answer, to_events
)
