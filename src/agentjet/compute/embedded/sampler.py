"""Two samplers with one interface: `PrefixSampler` shares prefixes between requests, `RowSampler` shares nothing.

`PrefixSampler` does continuous batching and computes every token-in-context once, also between completions.
Completions of one prompt share a cache row while they have sampled the same tokens. The row branches where they
differ. `RowSampler` serves models that do not support prefix sharing, with one cache of the library per request.

Each request has its own parameters, random numbers and end. The worker's loop calls `step`. Nothing here blocks or
runs in a thread. A sampler serves one policy of full weights, or any number of adapters over one base model. Call
`pause` before the weights of a policy change and `invalidate` afterwards: its running completions then continue under
the new weights, and their cached state is computed again. Completions of other policies are not affected.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from agentjet.compute.embedded.adapters import AdapterMixture
from agentjet.compute.embedded.attention import flat_forward
from agentjet.compute.embedded.cache import CacheRow, KeyValueCache, StepPlan
from agentjet.compute.embedded.policy import PROBE_TOKENS, Policy, probe_tokens, tolerance
from agentjet.compute.embedded.token_sampling import Grammars, Guide, dead_end, finish_reason, sample_tokens
from agentjet.errors import ComputeError, OutOfCache
from agentjet.types import FinishReason, SamplingParams

log = logging.getLogger(__name__)

PROMPT_TOKENS = 2048
"""Prompt tokens computed in one step. The limit keeps long prompts from delaying running completions."""


@dataclass(slots=True, eq=False)
class RunningCompletion:
    """A request to the `PrefixSampler`. `tokens` is the prompt; after an eviction, prompt and sampled tokens."""

    id: int
    tokens: np.ndarray
    length: int
    """Tokens of the prompt plus `max_tokens`."""
    params: SamplingParams
    guide: Guide | None
    uniforms: np.random.Generator
    policy: Policy
    row: CacheRow | None = None
    num_sampled: int = 0

    @property
    def place(self) -> CacheRow:
        assert self.row is not None
        return self.row


@dataclass(frozen=True, slots=True)
class NewToken:
    """One sampled token of completion `id`, and the set from which it was chosen (see `timeline.support`)."""

    id: int
    token: int
    logprob: float
    support: bytes
    finish_reason: FinishReason | None
    error: ComputeError | None = None
    """The reason why the completion ends here with an error; None if the completion may continue."""


@dataclass(slots=True)
class PrefixSampler:
    """Samples completions, up to `max_concurrent` at a time. `policy` is the policy of full weights, or the base model.

    A step computes the tokens of all adapters in one forward pass of the base model.
    """

    policy: Policy
    max_concurrent: int
    cache_tokens: int
    _cache: KeyValueCache = field(init=False)
    _grammars: Grammars = field(init=False)
    _waiting: deque[RunningCompletion] = field(default_factory=deque)
    _running: dict[int, RunningCompletion] = field(default_factory=dict)
    _paused: set[Policy] = field(default_factory=set)
    _mixture: AdapterMixture | None = None
    _may_admit: bool = False
    """True if an event since the last attempt may allow a waiting request to start."""
    num_computed: int = 0
    """Tokens computed since the start."""

    def __post_init__(self) -> None:
        self._grammars = Grammars(self.policy.info, self.policy.vocabulary)
        shape = self.policy.shape
        self._cache = KeyValueCache(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            context=self.policy.info.context_length,
            max_tokens=self.cache_tokens,
            dtype=self.policy.dtype,
            device=self.policy.device,
        )

    @property
    def is_idle(self) -> bool:
        """True if a step would do nothing. Paused completions may wait."""
        if any(c.policy not in self._paused for c in self._running.values()):
            return False
        return not (self._may_admit and any(c.policy not in self._paused for c in self._waiting))

    def submit(self, id: int, prompt: np.ndarray, params: SamplingParams, policy: Policy | None = None) -> None:
        """Queue a request to `policy`, an adapter over the base model; None for the sampler's own policy.

        Raises `OutOfCache` when it could never be held, `GrammarError` for a bad grammar.
        """
        length = len(prompt) + params.max_tokens
        if not self._cache.fits(length):
            raise OutOfCache(
                f"{len(prompt)} prompt tokens + max_tokens = {params.max_tokens} exceed what the sampler can hold "
                f"(context {self.policy.info.context_length}, sampler.cache_tokens = {self.cache_tokens})"
            )
        guide = self._grammars.guide(params.grammar)
        uniforms = np.random.default_rng(params.seed)
        self._waiting.append(RunningCompletion(id, prompt, length, params, guide, uniforms, policy or self.policy))
        self._may_admit = True

    def cancel(self, id: int) -> None:
        """Drop a request. Unknown ids are ignored, because the request may just have ended."""
        running = self._running.pop(id, None)
        if running is not None:
            self._leave(running)
        else:
            self._waiting = deque(c for c in self._waiting if c.id != id)
            self._may_admit = True

    def pause(self, policy: Policy) -> None:
        """Sample nothing of this policy until `invalidate`."""
        self._paused.add(policy)

    def invalidate(self, policy: Policy | None = None) -> None:
        """Drop the cached keys of a policy, and resume it: its weights changed."""
        policy = policy or self.policy
        self._cache.clear(policy)
        self._paused.discard(policy)
        if self._mixture is not None:
            self._mixture.invalidate()
        self._may_admit = True

    def remove(self, policy: Policy) -> None:
        """Forget a policy without requests."""
        assert all(c.policy is not policy for c in (*self._running.values(), *self._waiting))
        self.invalidate(policy)

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Run one forward pass; returns one sampled token for every completion whose row is complete.

        A row that was just sampled from misses one token. A new prompt misses the part that no other row holds. Long
        prompts are spread over several steps, so that they do not delay running completions.
        """
        self._admit()
        users: dict[int, list[RunningCompletion]] = {}
        for c in self._running.values():
            if c.policy not in self._paused:
                users.setdefault(id(c.place), []).append(c)
        found: list[Tensor] = []
        ready: list[list[RunningCompletion]] = []
        for rows in _passes([completions[0].place for completions in users.values()]):
            spans = _spans(rows)
            hidden = self._forward(spans)
            indices: list[int] = []
            last = -1
            for row, count in spans:
                last += count
                row.filled += count
                if row.filled == row.length:
                    indices.append(last)
                    ready.append(users[id(row)])
            found.append(hidden[indices])
        return self._sample(torch.cat(found), ready) if ready else []

    def _admit(self) -> None:
        """Start waiting requests in order of arrival. No request overtakes one that waits for free blocks.

        A request is postponed while another row computes a prefix of its prompt.
        """
        if not (self._waiting and self._may_admit):
            return
        self._may_admit = False
        same = {(c.policy, c.place.tokens[: c.place.length].tobytes()): c.place for c in self._running.values()}
        postponed: deque[RunningCompletion] = deque()
        while self._waiting and len(self._running) < self.max_concurrent:
            completion = self._waiting.popleft()
            if completion.policy in self._paused:
                postponed.append(completion)
                continue
            key = completion.policy, completion.tokens.tobytes()
            row = same.get(key)
            if row is None or row.capacity < completion.length:
                if self._cache.awaits_prefix(completion.tokens, completion.policy):
                    postponed.append(completion)
                    self._may_admit = True
                    continue
                row = self._cache.acquire(completion.tokens, completion.length, completion.policy)
            if row is None:
                self._waiting.appendleft(completion)
                break
            same[key] = row
            self._join(completion, row)
        self._waiting = postponed + self._waiting

    def _join(self, completion: RunningCompletion, row: CacheRow) -> None:
        row.users += 1
        completion.row = row
        self._running[completion.id] = completion

    def _leave(self, completion: RunningCompletion) -> None:
        row = completion.place
        row.users -= 1
        self._may_admit = True
        if not row.users:
            self._cache.release(row)

    def _sample(self, hidden: Tensor, shared: list[list[RunningCompletion]]) -> list[NewToken]:
        """Sample one token for each completion; `shared` holds the completions of each row of `hidden`."""
        everyone = [c for completions in shared for c in completions]
        of = [i for i, completions in enumerate(shared) for _ in completions]
        chosen, logprobs, sets = sample_tokens(
            _logits(self.policy, hidden, [completions[0].policy for completions in shared]),
            of,
            [c.params for c in everyone],
            [c.guide.mask if c.guide else b"" for c in everyone],
            [c.uniforms.random() for c in everyone],
        )
        new: list[NewToken] = []
        continuing: dict[int, dict[int, list[RunningCompletion]]] = {}
        for c, token, logprob, support in zip(everyone, chosen, logprobs, sets, strict=True):
            c.num_sampled += 1
            reason = finish_reason(c.policy, c.params, token, c.num_sampled)
            error = dead_end(c.guide, token, logprob, reason)
            new.append(NewToken(c.id, token, logprob, support, reason, error))
            if reason is None and error is None:
                continuing.setdefault(id(c.place), {}).setdefault(token, []).append(c)
            else:
                del self._running[c.id]
                self._leave(c)
        for by_token in continuing.values():
            self._branch(next(iter(by_token.values()))[0].place, by_token)
        return new

    def _branch(self, row: CacheRow, by_token: dict[int, list[RunningCompletion]]) -> None:
        """Continue a row's completions: those with the first token keep the row, the others get copies of it."""
        for token, completions in list(by_token.items())[1:]:
            twin = self._cache.branch(row)
            for c in completions:
                self._leave(c)
                if twin is not None:
                    self._join(c, twin)
                else:  # no free blocks: the completion waits, with all its tokens so far
                    del self._running[c.id]
                    c.row, c.tokens = None, np.append(row.tokens[: row.length], np.int32(token))
                    self._waiting.appendleft(c)
            if twin is not None:
                twin.append(token)
        row.append(next(iter(by_token)))

    def _forward(self, spans: list[tuple[CacheRow, int]]) -> Tensor:
        """Compute the next tokens of each row and store their keys; returns their hidden states in order."""
        device = self.policy.device
        for row, n in spans:
            self._cache.extend(row, row.filled + n)
        tokens = np.concatenate([row.tokens[row.filled : row.filled + n] for row, n in spans])
        positions = np.concatenate([np.arange(row.filled, row.filled + n) for row, n in spans])
        self.num_computed += len(tokens)
        inputs = (
            torch.as_tensor(tokens, dtype=torch.long, device=device),
            torch.as_tensor(positions, dtype=torch.long, device=device),
            StepPlan(spans, positions, self._cache),
        )
        owners = [(row.owner, n) for row, n in spans]
        if all(policy is owners[0][0] for policy, _ in owners):
            return flat_forward(owners[0][0].decoder, *inputs)
        if self._mixture is None:
            self._mixture = AdapterMixture(self.policy)
        return self._mixture.forward(*inputs, owners)


def _passes(rows: list[CacheRow]) -> list[list[CacheRow]]:
    """Returns the rows of each forward pass. Adapters that cannot be mixed with others have a pass alone."""
    passes: dict[Policy | None, list[CacheRow]] = {}
    for row in rows:
        passes.setdefault(None if row.owner.mixable_layers else row.owner, []).append(row)
    return list(passes.values())


def _logits(base: Policy, hidden: Tensor, policies: Sequence[Policy]) -> Tensor:
    """Returns logits [R, V] of hidden states [R, hidden], each by the head of its policy."""
    if not any(policy.adapts_head for policy in policies):
        return base.head(hidden)
    return torch.cat([policy.head(row[None]) for policy, row in zip(policies, hidden, strict=True)])


def _spans(rows: list[CacheRow]) -> list[tuple[CacheRow, int]]:
    """Returns the number of tokens that a step computes for each row.

    Rows that miss one token come first, then prompts in order of arrival, `PROMPT_TOKENS` in total.
    """
    spans = [(row, 1) for row in rows if row.length - row.filled == 1]
    budget = PROMPT_TOKENS
    for row in rows:
        count = min(row.length - row.filled, budget)
        if row.length - row.filled > 1 and count:
            spans.append((row, count))
            budget -= count
    return spans


@dataclass(slots=True, eq=False)
class _Request:
    """A request to the `RowSampler`. `cache` holds the state after all `tokens` except the last `num_missing`."""

    id: int
    tokens: list[int]
    length: int
    """Tokens of the prompt plus `max_tokens`."""
    params: SamplingParams
    guide: Guide | None
    uniforms: np.random.Generator
    policy: Policy
    cache: Any = None
    num_sampled: int = 0

    @property
    def num_missing(self) -> int:
        return len(self.tokens) if self.cache is None else 1


@dataclass(slots=True)
class RowSampler:
    """Samples completions, up to `max_concurrent` and `cache_tokens` at a time. `policy` as in `PrefixSampler`."""

    policy: Policy
    max_concurrent: int
    cache_tokens: int
    _waiting: deque[_Request] = field(default_factory=deque)
    _running: dict[int, _Request] = field(default_factory=dict)
    _paused: set[Policy] = field(default_factory=set)
    _grammars: Grammars = field(init=False)
    _cache_name: str | None = field(init=False)
    """Name of the model's cache argument and result; None: every token is computed from the full sequence."""
    num_computed: int = 0
    """Tokens computed since the start."""

    def __post_init__(self) -> None:
        self._grammars = Grammars(self.policy.info, self.policy.vocabulary)
        self._cache_name = _cache_name(self.policy)
        if self._cache_name is None:
            log.warning(
                "%s: no usable cache between tokens; sampling computes each sequence again", self.policy.info.name
            )

    @property
    def is_idle(self) -> bool:
        """True if a step would do nothing. Paused completions may wait."""
        return all(request.policy in self._paused for request in self._running.values()) and not self._may_admit()

    def submit(self, id: int, prompt: np.ndarray, params: SamplingParams, policy: Policy | None = None) -> None:
        """See `PrefixSampler.submit`."""
        length = len(prompt) + params.max_tokens
        if length > min(self.policy.info.context_length, self.cache_tokens):
            raise OutOfCache(
                f"{len(prompt)} prompt tokens + max_tokens = {params.max_tokens} exceed what the sampler can hold "
                f"(context {self.policy.info.context_length}, sampler.cache_tokens = {self.cache_tokens})"
            )
        guide = self._grammars.guide(params.grammar)
        uniforms = np.random.default_rng(params.seed)
        self._waiting.append(_Request(id, prompt.tolist(), length, params, guide, uniforms, policy or self.policy))

    def cancel(self, id: int) -> None:
        """Drop a request. Unknown ids are ignored, because the request may just have ended."""
        if self._running.pop(id, None) is None:
            self._waiting = deque(request for request in self._waiting if request.id != id)

    def pause(self, policy: Policy) -> None:
        """See `PrefixSampler.pause`."""
        self._paused.add(policy)

    def invalidate(self, policy: Policy | None = None) -> None:
        """Drop the cached state of a policy, and resume it: its weights changed."""
        policy = policy or self.policy
        self._paused.discard(policy)
        for request in self._running.values():
            if request.policy is policy:
                request.cache = None

    def remove(self, policy: Policy) -> None:
        """See `PrefixSampler.remove`."""
        self.invalidate(policy)

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Sample one token for every running completion, except those whose prompt waits for a later step."""
        self._admit()
        ready: list[_Request] = []
        budget = PROMPT_TOKENS
        for request in self._running.values():
            if request.policy in self._paused or (request.cache is None and budget <= 0):
                continue
            budget -= request.num_missing if request.cache is None else 0
            ready.append(request)
        if not ready:
            return []
        hidden = torch.stack([self._advance(request) for request in ready])
        return self._sample(hidden, ready)

    def _admit(self) -> None:
        """Start waiting requests in order of arrival, within `max_concurrent` and `cache_tokens`."""
        while self._may_admit():
            request = self._waiting.popleft()
            self._running[request.id] = request

    def _may_admit(self) -> bool:
        """True if the first waiting request may start. It may be of a paused policy."""
        if not self._waiting or len(self._running) >= self.max_concurrent:
            return False
        taken = sum(request.length for request in self._running.values())
        return taken + self._waiting[0].length <= self.cache_tokens

    def _advance(self, request: _Request) -> Tensor:
        """Compute the tokens that the request's state misses; returns the hidden state [hidden] of its last token."""
        missing = request.tokens[-request.num_missing :]
        ids = torch.tensor([missing], device=self.policy.device)
        hidden, request.cache = _advance(request.policy, self._cache_name, ids, request.cache)
        self.num_computed += len(missing)
        return hidden[0, -1]

    def _sample(self, hidden: Tensor, ready: list[_Request]) -> list[NewToken]:
        chosen, logprobs, sets = sample_tokens(
            _logits(self.policy, hidden, [request.policy for request in ready]),
            range(len(ready)),
            [request.params for request in ready],
            [request.guide.mask if request.guide else b"" for request in ready],
            [request.uniforms.random() for request in ready],
        )
        new: list[NewToken] = []
        for request, token, logprob, support in zip(ready, chosen, logprobs, sets, strict=True):
            request.tokens.append(token)
            request.num_sampled += 1
            reason = finish_reason(request.policy, request.params, token, request.num_sampled)
            error = dead_end(request.guide, token, logprob, reason)
            new.append(NewToken(request.id, token, logprob, support, reason, error))
            if reason is not None or error is not None:
                del self._running[request.id]
        return new


def _advance(policy: Policy, cache_name: str | None, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Returns hidden states [1, T, hidden] of `ids`, which follow `cache`, and the cache after them, if any."""
    if cache_name is None:
        return cast(Any, policy.decoder)(input_ids=ids, use_cache=False).last_hidden_state, None
    known = {} if cache is None else {cache_name: cache}
    out: Any = cast(Any, policy.decoder)(input_ids=ids, use_cache=True, **known)
    return out.last_hidden_state, out[cache_name]


@torch.inference_mode()
def _cache_name(policy: Policy) -> str | None:
    """Returns the name of the model's cache argument; None if the model has no cache, or an inexact one.

    A cache is inexact if continuing from it gives other logits than a pass over all tokens. The learner would then find
    other log-probabilities than the sampler reported.
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
