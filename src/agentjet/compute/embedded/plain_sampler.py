"""Sampling from a model whose state cannot branch: one cache of the library per request, nothing shared.

The interface is that of `sampler.PrefixSampler`, and so is what a request gets: its own parameters, its own random
numbers,
its own end. Slow and plain on purpose. A cache never outlives the weights that filled it: `invalidate` drops them all,
and the next step computes each running request again from its tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from agentjet.compute.embedded.policy import PROBE_TOKENS, Policy, probe_tokens, tolerance
from agentjet.compute.embedded.sampler import PROMPT_TOKENS, NewToken, dead_end, finish_reason
from agentjet.compute.embedded.token_sampling import Grammars, Guide, sample_tokens
from agentjet.errors import OutOfCache
from agentjet.types import SamplingParams

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Request:
    """A completion on its way. `cache` holds the state after all of `tokens` but the last `num_missing`."""

    id: int
    tokens: list[int]
    length: int
    """Of the prompt and the longest completion."""
    params: SamplingParams
    guide: Guide | None
    uniforms: np.random.Generator
    cache: Any = None
    num_sampled: int = 0

    @property
    def num_missing(self) -> int:
        return len(self.tokens) if self.cache is None else 1


@dataclass(slots=True)
class RowSampler:
    """Samples completions of one policy, up to `max_concurrent` and `cache_tokens` at a time."""

    policy: Policy
    max_concurrent: int
    cache_tokens: int
    _waiting: deque[_Request] = field(default_factory=deque)
    _running: dict[int, _Request] = field(default_factory=dict)
    _grammars: Grammars = field(init=False)
    _cache_name: str | None = field(init=False)
    """The argument and result of the model that is its cache; None: computed again from the tokens each time."""
    num_computed: int = 0
    """Tokens computed since the start."""

    def __post_init__(self) -> None:
        self._grammars = Grammars(self.policy.card, self.policy.vocabulary)
        self._cache_name = _cache_name(self.policy)
        if self._cache_name is None:
            log.warning("%s: keeps no state between tokens that could be relied on", self.policy.card.name)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def submit(self, id: int, prompt: np.ndarray, params: SamplingParams) -> None:
        """Queue a request; raises `OutOfCache` when it could never be held, `GrammarError` for a bad grammar."""
        length = len(prompt) + params.max_tokens
        if length > min(self.policy.card.context_length, self.cache_tokens):
            raise OutOfCache(
                f"{len(prompt)} prompt tokens + max_tokens = {params.max_tokens} exceed what the sampler can hold "
                f"(context {self.policy.card.context_length}, sampler.cache_tokens = {self.cache_tokens})"
            )
        guide = self._grammars.guide(params.grammar)
        self._waiting.append(_Request(id, prompt.tolist(), length, params, guide, np.random.default_rng(params.seed)))

    def cancel(self, id: int) -> None:
        """Forget a request; unknown ids are ignored, since it may just have ended."""
        if self._running.pop(id, None) is None:
            self._waiting = deque(request for request in self._waiting if request.id != id)

    def invalidate(self) -> None:
        """The weights changed: no state computed under the old ones is used again."""
        for request in self._running.values():
            request.cache = None

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """One sampled token for every running completion, but for those whose prompts had to wait for a later step."""
        self._admit()
        ready: list[_Request] = []
        budget = PROMPT_TOKENS
        for request in self._running.values():
            if request.cache is None and budget <= 0:
                continue
            budget -= request.num_missing if request.cache is None else 0
            ready.append(request)
        if not ready:
            return []
        hidden = torch.stack([self._advance(request) for request in ready])
        return self._sample(hidden, ready)

    def _admit(self) -> None:
        """In order of arrival, as far as the room goes."""
        taken = sum(request.length for request in self._running.values())
        while self._waiting and len(self._running) < self.max_concurrent:
            taken += self._waiting[0].length
            if taken > self.cache_tokens:
                return
            request = self._waiting.popleft()
            self._running[request.id] = request

    def _advance(self, request: _Request) -> Tensor:
        """Compute what the request's state misses; the hidden state [hidden] of its last token."""
        missing = request.tokens[-request.num_missing :]
        ids = torch.tensor([missing], device=self.policy.device)
        hidden, request.cache = _advance(self.policy, self._cache_name, ids, request.cache)
        self.num_computed += len(missing)
        return hidden[0, -1]

    def _sample(self, hidden: Tensor, ready: list[_Request]) -> list[NewToken]:
        chosen, logprobs, sets = sample_tokens(
            self.policy.head(hidden),
            range(len(ready)),
            [request.params for request in ready],
            [request.guide.mask if request.guide else b"" for request in ready],
            [request.uniforms.random() for request in ready],
        )
        new: list[NewToken] = []
        for request, token, logprob, support in zip(ready, chosen, logprobs, sets, strict=True):
            request.tokens.append(token)
            request.num_sampled += 1
            reason = finish_reason(self.policy, request.params, token, request.num_sampled)
            error = dead_end(request.guide, token, logprob, reason)
            new.append(NewToken(request.id, token, logprob, support, reason, error))
            if reason is not None or error is not None:
                del self._running[request.id]
        return new


def _advance(policy: Policy, cache_name: str | None, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Hidden states [1, T, hidden] of the tokens after what `cache` holds, and the cache after them, if one is kept."""
    if cache_name is None:
        return cast(Any, policy.decoder)(input_ids=ids, use_cache=False).last_hidden_state, None
    known = {} if cache is None else {cache_name: cache}
    out: Any = cast(Any, policy.decoder)(input_ids=ids, use_cache=True, **known)
    return out.last_hidden_state, out[cache_name]


@torch.inference_mode()
def _cache_name(policy: Policy) -> str | None:
    """How the model calls its cache; None when it has none, or when going on from it gives other logits than a pass
    over all tokens: what is reported must be what the learner will find.
    """
    accepted = inspect.signature(policy.decoder.forward).parameters
    name = next((name for name in ("cache_params", "past_key_values") if name in accepted), None)
    if name is None:
        return None
    ids = probe_tokens(policy, PROBE_TOKENS)[None]
    whole, _ = _advance(policy, None, ids, None)
    hidden, cache = _advance(policy, name, ids[:, : PROBE_TOKENS // 2], None)
    parts = [hidden]
    for i in range(PROBE_TOKENS // 2, PROBE_TOKENS):
        hidden, cache = _advance(policy, name, ids[:, i : i + 1], cache)
        parts.append(hidden)
    wanted = policy.head(whole[0]).float()
    difference = float((policy.head(torch.cat(parts, 1)[0]).float() - wanted).abs().max())
    return name if difference <= tolerance(policy.dtype, wanted) else None
