"""The body of `POST /v1/completions`, every key of it, and of its answer.

`KEYS` has the treatment of each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Strict

from agentjet.protocol import Int64
from agentjet.server.dialects.bodies import Count, Finite
from agentjet.server.dialects.gathering import UsageBody
from agentjet.server.dialects.request_keys import KeyRules, RequestKeys, honoured, noted, refused
from agentjet.server.dialects.sampled import SAMPLED_KEYS, SampledBody

TokenId = Annotated[int, Strict(), Field(ge=0, lt=2**24)]
MAX_LIKELIEST = 20
MAX_PROMPTS = 64
Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(SampledBody):
    """A text completion request. Everything of OpenAI's that is not honoured is refused, never ignored."""

    prompt: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1)]
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
    **SAMPLED_KEYS,
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
