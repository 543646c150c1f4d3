"""What the answers of OpenAI's dialects have in common: the chunks of all choices gathered, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from agentjet.gateway.requests import MAX_CHOICES, CallChunk, ScoredToken, TokenLogprob
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


async def gather(chunks: Chunks, choices: int = MAX_CHOICES) -> Gathered:
    """All of them; `choices` are those of each prompt."""
    gathered = Gathered(choices=choices)
    async for chunk in chunks:
        gathered.take(chunk)
    return gathered


def fingerprint_of(call: Call) -> str:
    """`policy-N`: the policy version that sampled the last token."""
    return f"policy-{call.versions[-1]}" if call.versions else "policy"
