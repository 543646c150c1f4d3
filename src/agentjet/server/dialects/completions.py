"""OpenAI's legacy text completions: a raw prompt is continued as it stands, without the chat template.

What begins with an earlier prompt and its answer continues that timeline: see `gateway.prompting`.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallRequest, ScoredToken, TokenLogprob
from agentjet.server.dialects.completions_bodies import (
    BODY,
    KEYS,
    MAX_PROMPTS,
    Completion,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
)
from agentjet.server.dialects.dialect import DONE, Chunks, Dialect, Event, Head, sse
from agentjet.server.dialects.errors import OPENAI
from agentjet.server.dialects.gathering import Gathered, fingerprint_of, gather
from agentjet.server.dialects.refusals import refuse_idle_stream_options
from agentjet.server.dialects.request_keys import refuse_value
from agentjet.server.dialects.sampled import sampled_request
from agentjet.types import Call, Conversation


def to_request(body: CompletionBody) -> CallRequest:
    """The canonical request. Raises `InvalidRequest` naming the first thing that cannot be honoured."""
    notes = BODY.judge(body)
    if body.best_of != body.n:  # The best n of n are all of them.
        refuse_value(body.best_of, (1,), "best_of")
    refuse_idle_stream_options(body, body.stream_options)
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
    request = sampled_request(body, Conversation((), prompt=first), body.max_tokens, notes=notes)
    return replace(
        request,
        others=tuple(Conversation((), prompt=prompt) for prompt in others),
        num_likeliest=(body.logprobs or 0) if scored else None,
    )


async def to_answer(chunks: Chunks, body: CompletionBody, head: Head) -> Completion:
    """The whole answer, once every choice has ended."""
    choices = body.n or 1
    gathered = await gather(chunks, choices)
    return Completion(
        id=f"cmpl-{head.id}",
        created=head.created,
        model=head.model,
        choices=[_choice(body, gathered, index, call) for index, call in sorted(gathered.calls.items())],
        usage=gathered.usage,
        system_fingerprint=fingerprint_of(gathered.calls[0]),
    )


def _choice(body: CompletionBody, gathered: Gathered, index: int, call: Call) -> CompletionChoice:
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


async def to_events(chunks: Chunks, body: CompletionBody, head: Head) -> AsyncGenerator[Event]:
    """The chunks of a streamed answer."""
    gathered = Gathered()
    offsets: dict[int, _Offsets] = {}
    fingerprint: str | None = None

    def event(**changes: Any) -> Event:
        common = Completion(id=f"cmpl-{head.id}", created=head.created, model=head.model, choices=[])
        return Event(sse(common.model_copy(update={**changes, "system_fingerprint": fingerprint}).model_dump()))

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
    answer=Completion,
    errors=OPENAI,
    to_request=lambda body, past: to_request(body),
    to_answer=to_answer,
    to_events=to_events,
)
