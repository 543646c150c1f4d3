"""The body of `POST /v1/completions`, every key of it, and of its answer.

What cannot be honoured is listed here, to be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, Strict

from agentjet.protocol import Int64
from agentjet.server.dialects.bodies import Count, Finite
from agentjet.server.dialects.gathering import UsageBody
from agentjet.server.dialects.refusals import Neutral
from agentjet.server.dialects.sampled import SampledBody

TokenId = Annotated[int, Strict(), Field(ge=0, lt=2**24)]
Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(SampledBody):
    """A text completion request. Everything of OpenAI's that is not honoured is refused, never ignored."""

    prompt: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1)]
    """Text, or token ids, which are fed as given; either may be the only item of a list.

    Control tokens are written as ids: in text their names stay text.
    """
    max_tokens: Count | None = None
    """Without it as the job says, and not OpenAI's 16."""
    logprobs: Annotated[Int64, Field(ge=0)] | None = None
    """0: log-probabilities of the sampled tokens. Those of other tokens are not known."""

    # A name for the caller's own use, which asks nothing of the model.
    user: str | None = None

    # Known, and honoured in their neutral form only: see `NEUTRAL`.
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    frequency_penalty: Finite | None = None
    presence_penalty: Finite | None = None
    logit_bias: dict[str, float] | None = None


NEUTRAL: Neutral = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "logit_bias": ({},),
}


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a choice, token by token: every sampled token, control tokens included."""

    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    """Where each token begins in the tokens' text, in characters; 0 is the beginning of the completion."""
    top_logprobs: None = None


class CompletionChoice(BaseModel):
    """One completion."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    """Null in the chunks of a stream but for the last of a choice."""


class Completion(BaseModel):
    """The answer to a text completion request; a chunk of a stream has the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    system_fingerprint: str | None = None
    """`policy-N`: the policy version that sampled the last token."""
