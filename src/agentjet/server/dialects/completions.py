"""OpenAI's legacy text completions: a raw prompt is continued as it stands, without the chat template.

What begins with an earlier prompt and its answer continues that timeline: see `gateway.prompting`.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallRequest, TokenLogprob
from agentjet.server.dialects.completions_bodies import (
    KEYS,
    Completion,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
)
from agentjet.server.dialects.dialect import DONE, Chunks, Dialect, Event, Head, sse
from agentjet.server.dialects.errors import OPENAI
from agentjet.server.dialects.gathering import Gathered, fingerprint_of, gather
from agentjet.server.dialects.refusals import refuse_idle_stream_options, refuse_other_tokens
from agentjet.server.dialects.request_keys import judge, refuse_value
from agentjet.server.dialects.sampled import sampled_request
from agentjet.types import Call, Conversation


def to_request(body: CompletionBody) -> CallRequest:
    """The canonical request. Raises `InvalidRequest` naming the first thing that cannot be honoured."""
    notes = judge(body, KEYS)
    if body.best_of != body.n:  # The best n of n are all of them.
        refuse_value(body.best_of, (1,), "best_of")
    refuse_other_tokens(body.logprobs, "logprobs")
    refuse_idle_stream_options(body, body.stream_options)
    return sampled_request(body, Conversation((), prompt=_prompt(body.prompt)), body.max_tokens, notes=notes)


async def to_answer(chunks: Chunks, body: CompletionBody, head: Head) -> Completion:
    """The whole answer, once every choice has ended."""
    gathered = await gather(chunks)
    choices = [
        CompletionChoice(
            text=call.response.content,
            index=index,
            logprobs=_Offsets().of(gathered.tokens[index]) if body.logprobs is not None else None,
            finish_reason=_finish_reason(call),
        )
        for index, call in sorted(gathered.calls.items())
    ]
    return Completion(
        id=f"cmpl-{head.id}",
        created=head.created,
        model=head.model,
        choices=choices,
        usage=gathered.usage,
        system_fingerprint=fingerprint_of(gathered.calls[0]),
    )


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
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.utf8))
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            text_offset=offsets,
        )


def _prompt(given: str | list[int] | list[str] | list[list[int]]) -> str | tuple[int, ...]:
    """The prompt, or the only one of a list."""
    if isinstance(given, str):
        return given
    first = given[0]
    if len(given) > 1 and not isinstance(first, int):
        raise InvalidRequest(
            f"prompt holds {len(given)} prompts, and a call of an episode is about one: ask for each by itself.",
            code="unsupported_parameter",
            param="prompt",
        )
    if isinstance(first, str):
        return first
    return tuple(first) if isinstance(first, list) else tuple(given)  # type: ignore[arg-type]


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
