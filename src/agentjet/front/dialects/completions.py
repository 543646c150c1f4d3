"""The text completions of OpenAI's API, and the parts that chat completions share with them.

A raw prompt is continued as it stands, without the chat template. A prompt that begins with an earlier prompt and its
answer continues that timeline: see `front.prompts`.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import Field, Strict

from agentjet.errors import InvalidRequest
from agentjet.front.calls import MAX_CHOICES, CallChunk, CallRequest, ScoredToken
from agentjet.front.dialects.dialect import (
    NO_OBFUSCATION,
    OPENAI_ERRORS,
    AnswerHead,
    CallLookup,
    Count,
    Dialect,
    Encoder,
    Items,
    OpenAIBody,
    Payload,
    RequestKeys,
    StopString,
    StopStrings,
    call_of,
    noted,
    refusal,
    refused,
    sse,
)
from agentjet.front.prompts import TokenLogprob
from agentjet.protocol import Int64
from agentjet.types import Conversation

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


BodyT = TypeVar("BodyT", bound=SamplingBody)


class ChoicesEncoder(Encoder[BodyT]):
    """Encodes an answer with choices. Every event is an answer with the new `part` of one choice."""

    prefix = "cmpl"
    kind = event_kind = "text_completion"

    def __init__(self, body: BodyT, head: AnswerHead) -> None:
        super().__init__(body, head)
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._event = self._head(self.event_kind) | ({"usage": None} if self._with_usage else {})
        self._ended: dict[int, tuple[CallChunk, Payload]] = {}

    def part(self, chunk: CallChunk) -> Payload:
        """Returns the choice as an event shows it."""
        raise NotImplementedError

    def choice(self, part: Payload) -> Payload:
        """Returns the choice as the whole answer shows it, which has one chunk for each choice."""
        return part

    def encode(self, chunk: CallChunk) -> Iterator[Payload]:
        part = self.part(chunk)
        if chunk.call is not None:
            self._ended[chunk.index] = chunk, part
            self._event["system_fingerprint"] = self._fingerprint(chunk)
        yield {**self._event, "choices": [part]}

    def finish(self) -> Iterator[str]:
        if self._with_usage:
            yield sse({**self._event, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

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
            prompts += last.num_prompt_tokens if index % (self.body.n or 1) == 0 else 0
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


class CompletionEncoder(ChoicesEncoder[CompletionBody]):
    """Encodes the answer of a text completion. A part of a choice has the shape of the whole one."""

    def __init__(self, body: CompletionBody, head: AnswerHead) -> None:
        super().__init__(body, head)
        self._offsets = defaultdict[int, _Offsets](_Offsets)

    def part(self, chunk: CallChunk) -> Payload:
        reason = None if chunk.call is None else chunk.call.finish_reason
        assert reason in (None, "stop", "length"), "a raw prompt's answer has no tool calls"
        text, shown = chunk.text, chunk.scores[chunk.num_prompt_tokens :] or chunk.tokens
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


COMPLETIONS = Dialect("/v1/completions", CompletionBody, COMPLETIONS_KEYS, OPENAI_ERRORS, translate, CompletionEncoder)
