"""What the answers of OpenAI's dialects have in common: the chunks of all choices gathered, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from agentjet.gateway.requests import CallChunk, TokenLogprob
from agentjet.server.dialects.dialect import Chunks
from agentjet.types import Call


class UsageBody(BaseModel):
    """Tokens as the policy saw and sampled them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(slots=True)
class Gathered:
    """The choices of an answer by index, as far as they have come."""

    calls: dict[int, Call] = field(default_factory=dict)
    """Of the choices that have ended."""
    tokens: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    num_prompt_tokens: int = 0

    def take(self, chunk: CallChunk) -> None:
        self.tokens.setdefault(chunk.index, []).extend(chunk.tokens)
        if chunk.call is not None:
            self.calls[chunk.index] = chunk.call
            self.num_prompt_tokens = chunk.num_prompt_tokens

    @property
    def usage(self) -> UsageBody:
        completion = sum(len(call.completion) for call in self.calls.values())
        return UsageBody(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=completion,
            total_tokens=self.num_prompt_tokens + completion,
        )


async def gather(chunks: Chunks) -> Gathered:
    """All of them."""
    gathered = Gathered()
    async for chunk in chunks:
        gathered.take(chunk)
    return gathered


def fingerprint_of(call: Call) -> str:
    """`policy-N`: the policy version that sampled the last token."""
    return f"policy-{call.versions[-1]}" if call.versions else "policy"
