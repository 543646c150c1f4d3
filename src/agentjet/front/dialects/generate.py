"""Token-in, token-out: vLLM's `/inference/v1/generate`, as the train clients of verifiers and prime-rl send it.

The client renders and tokenises by itself. Its prompt is a list of token ids, and the policy gets exactly these,
control tokens included. The answer has the sampled ids, with the log-probabilities of the distribution that they were
sampled from. There is no text in either direction, so keys that concern text have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from agentjet.front.calls import CallChunk, CallRequest
from agentjet.front.dialects.completions import (
    COMPLETIONS_KEYS,
    ChoicesBody,
    ChoicesEncoder,
    SamplingKeys,
    TokenId,
    TokenIds,
    sampling_request,
)
from agentjet.front.dialects.dialect import (
    CACHE_MEANING,
    NO_OBFUSCATION,
    OPENAI_ERRORS,
    REASONING_MEANING,
    CallLookup,
    Count,
    Dialect,
    Distribution,
    Items,
    KeyRule,
    Payload,
    RequestKeys,
    noted,
    refused,
)
from agentjet.types import Conversation

_NO_TEXT = "neither prompt nor answer is text"
_UNREADABLE = "the policy reads token ids of text only"
_SAMPLING: RequestKeys = {
    **{name: rule for name, rule in COMPLETIONS_KEYS.items() if name.endswith(("_penalty", "min_p", "logit_bias"))},
    **refused("allowed_token_ids bad_words", "it would change the distribution", []),
    **refused("structured_outputs", "chat completions have `response_format`"),
    **refused("min_tokens thinking_token_budget", "the policy alone decides when it ends", 0),
    **refused("ignore_eos", "an answer ends with an end token of the model", False),
    **refused("prompt_logprobs", "text completions score prompts in evaluation episodes"),
    **refused("logprob_token_ids", "the sampler reports the sampled token only", []),
    **refused("extra_args repetition_detection", "", {}),
    **noted("skip_special_tokens spaces_between_special_tokens detokenize", _NO_TEXT, True, False),
    **noted("include_stop_str_in_output", "`token_ids` has every sampled token", True, False),
    **noted("routed_experts_prompt_start", "the server keeps the routes for training; answers have none"),
    **noted("return_token_ids", "the key of the request is honoured", True, False),
    **noted("reasoning_effort", REASONING_MEANING),
}
GENERATE_KEYS: RequestKeys = {
    **{f"sampling_params.{name}": rule for name, rule in _SAMPLING.items()},
    **dict.fromkeys(
        ("features", "content_parts"), KeyRule("refused", _UNREADABLE, ([], {}), code="unsupported_content")
    ),
    **refused("kv_transfer_params ec_transfer_params", "the server moves its caches itself", {}),
    **refused("output_mode", "text completions answer with text", "tokens"),
    **noted("cache_salt", CACHE_MEANING),
    **noted("priority", "calls are served in their order", 0),
    **noted("request_id", "the answer's is the id of its call"),
    **noted("token_offsets", _NO_TEXT),
    **noted("reasoning_ended reasoning_parser_kwargs", "the client parses the answer"),
    **NO_OBFUSCATION,
}


class GenerateSampling(SamplingKeys):
    """The sampling parameters of a request."""

    place = "sampling_params."
    max_tokens: Count | None = None
    """the default is the job's limit, not vLLM's 16"""
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=256)] | None = None
    """up to 256, besides the end tokens of the model; the answer ends with the token"""
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 or 1: every sampled token; alternatives are not reported"""


class GenerateBody(ChoicesBody):
    """A request for a continuation of token ids. Keys that cannot be honoured are refused, never ignored."""

    token_ids: TokenIds
    """the whole prompt, used token by token"""
    sampling_params: GenerateSampling = GenerateSampling()
    """the keys below"""
    return_token_ids: bool | None = None
    """the answer has `prompt_token_ids`"""

    @property
    def sampling(self) -> SamplingKeys:
        return self.sampling_params

    @property
    def distribution(self) -> Distribution:
        return self.sampling_params


def translate(body: GenerateBody, _: CallLookup) -> CallRequest:
    conversation = Conversation((), prompt=tuple(body.token_ids), is_exact=True)
    keys = body.sampling_params
    stop_ids = tuple(keys.stop_token_ids or ())
    return sampling_request(keys, conversation, keys.max_tokens, stop_ids=stop_ids, shows_tokens=True)


class GenerateEncoder(ChoicesEncoder[GenerateBody]):
    """Encodes an answer in token ids. A part of a choice has the shape of the whole one."""

    def part(self, chunk: CallChunk) -> Payload:
        reason = None if chunk.call is None else chunk.call.finish_reason
        logprobs = None if self.body.sampling_params.logprobs is None else {"content": _entries(chunk)}
        ids = [token.id for token in chunk.tokens]
        return {"index": chunk.index, "token_ids": ids, "logprobs": logprobs, "finish_reason": reason}

    def _head(self, kind: str) -> Payload:
        known = {"request_id": self.head.id, "created": self.head.created, "model": self.head.model}
        prompt = {"prompt_token_ids": self.body.token_ids} if self.body.return_token_ids else {}
        return {**known, "system_fingerprint": None, **prompt}


def _entries(chunk: CallChunk) -> list[dict[str, Any]]:
    """Returns the sampled tokens with their log-probabilities.

    Clients of vLLM before `token_id` read `token`, which has the id as text.
    """
    return [
        {"token": f"token_id:{one.id}", "token_id": one.id, "logprob": one.logprob, "top_logprobs": []}
        for one in chunk.tokens
    ]


GENERATE = Dialect("/inference/v1/generate", GenerateBody, GENERATE_KEYS, OPENAI_ERRORS, translate, GenerateEncoder)
