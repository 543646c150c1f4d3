"""The sampler: continuous batching that computes every token-in-context once, also between completions.

Completions of one prompt share a cache row while they have sampled the same tokens. The row branches where they
differ. A model that does not share prefixes has a cache of `transformers` in each row, and a pass for each row.

Each request has its own parameters, random numbers and end. The worker's loop calls `step`. Nothing here blocks or
runs in a thread. A sampler serves one policy of full weights, or any number of adapters over one base model. A
policy is `paused` before its weights change; call `invalidate` afterwards: its running completions then continue under
the new weights, and their cached state is computed again. Completions of other policies are not affected.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from agentjet.compute.attention import AttentionPlan, flat_forward
from agentjet.compute.cache import CacheRow, KeyValueCache
from agentjet.compute.cached_attention import Spans, step_inputs
from agentjet.compute.cached_states import StateSlots
from agentjet.compute.decode_graphs import DecodeGraphs, ReadTokens
from agentjet.compute.memory import STATES_PER_COMPLETION
from agentjet.compute.model import copied_modules
from agentjet.compute.policy import PROBE_TOKENS, Policy, distance, first_line, probe_tokens, tolerance
from agentjet.compute.routes import RoutePass, present_routes, routing
from agentjet.compute.token_choice import ChoiceRules, ChosenTokens, Grammars, Guide, sample_tokens
from agentjet.errors import ComputeError, GrammarError, OutOfCache
from agentjet.processes.progress import PROGRESS
from agentjet.timeline.forest import EVERYTHING
from agentjet.timeline.routes import Choices
from agentjet.types import FinishReason, SamplingParams

log = logging.getLogger(__name__)

PROMPT_TOKENS = 2048
"""Prompt tokens computed in one step, at most."""
CHUNK_TOKENS = 512
"""Tokens of long prompts computed in one step beside other completions: short calls wait for no more than these."""
LONG_SHARE = 0.4
"""Least share of the time for long prompts while other completions run."""
CUDA_FACTOR = 4
"""Factor of these numbers of tokens on CUDA: a GPU computes few tokens as slowly as many."""
UNIFORMS = 64
"""Random numbers of a completion that are drawn at once."""


@dataclass(slots=True, eq=False)
class RunningCompletion:
    """A request to the sampler. `tokens` is the prompt; after an eviction, prompt and sampled tokens."""

    id: int
    tokens: np.ndarray
    length: int
    """Tokens of the prompt plus `max_tokens`."""
    params: SamplingParams
    guide: Guide | None
    policy: Policy
    place: int = -1
    """Its place in `_Running`; -1 while it waits."""
    num_sampled: int = 0
    """Tokens sampled before it started or was evicted last."""
    num_routed: int = 0
    """Tokens whose routes were reported, or were not asked for."""


class _Running:
    """The parameters of running completions as arrays: a step reads those of all completions at once."""

    def __init__(self, num_places: int) -> None:
        self.temperatures = np.zeros(num_places, np.float32)
        self.top_ks = np.zeros(num_places, np.int64)
        self.top_ps = np.ones(num_places)
        self.left = np.zeros(num_places, np.int64)
        """Tokens that a completion may still sample."""
        self.is_special = np.zeros(num_places, bool)
        """True for completions with a grammar or with routes, which are handled one by one."""
        self.is_plain = np.zeros(num_places, bool)
        """True for completions that a graph chooses tokens for."""
        self.num_left = np.zeros(num_places, np.int64)
        """Completions that have left each place."""
        self._generators: dict[int, np.random.Generator] = {}
        self._uniforms = np.zeros((num_places, UNIFORMS))
        self._num_drawn = np.zeros(num_places, np.int64)
        self._free = list(range(num_places - 1, -1, -1))

    def enter(self, completion: RunningCompletion) -> None:
        """Give a completion a place. Its random numbers go on after the tokens that it has sampled."""
        params, place = completion.params, self._free.pop()
        completion.place = place
        self.temperatures[place], self.left[place] = params.temperature, params.max_tokens - completion.num_sampled
        self.top_ks[place], self.top_ps[place] = params.top_k, params.top_p
        self.is_special[place] = completion.guide is not None or params.routes_from is not None
        self.is_plain[place] = not (self.is_special[place] or params.top_k or params.top_p < 1)
        self._generators[place] = generator = np.random.default_rng(params.seed)
        generator.random(completion.num_sampled)
        self._num_drawn[place] = UNIFORMS

    def leave(self, completion: RunningCompletion) -> None:
        completion.num_sampled = completion.params.max_tokens - int(self.left[completion.place])
        self.num_left[completion.place] += 1
        del self._generators[completion.place]
        self._free.append(completion.place)
        completion.place = -1

    def rules(self, places: NDArray[np.int64], rows: NDArray[np.int64], masks: dict[int, bytes]) -> ChoiceRules:
        """Returns the rules of the next tokens of completions, with one random number each. Counts these tokens."""
        drawn = self._num_drawn[places]
        for place in places[drawn == UNIFORMS].tolist():
            self._generators[place].random(out=self._uniforms[place])
            self._num_drawn[place] = 0
        drawn %= UNIFORMS
        self._num_drawn[places] = drawn + 1
        self.left[places] -= 1
        uniforms = self._uniforms[places, drawn]
        return ChoiceRules(rows, self.temperatures[places], self.top_ks[places], self.top_ps[places], uniforms, masks)

    def undo(self, places: NDArray[np.int64]) -> None:
        """Take back the last call of `rules`: its tokens are chosen again."""
        self.left[places] += 1
        self._num_drawn[places] -= 1


class _Batch(NamedTuple):
    """The C completions that a step samples, by row."""

    rows: list[CacheRow]
    groups: list[list[RunningCompletion]]
    completions: list[RunningCompletion]
    places: NDArray[np.int64]

    def only(self, wanted: NDArray[np.bool_]) -> _Batch:
        """Returns a part of a batch whose rows have one completion each."""
        if wanted.all():
            return self
        rows, groups = [*compress(self.rows, wanted)], [*compress(self.groups, wanted)]
        return _Batch(rows, groups, [*compress(self.completions, wanted)], self.places[wanted])


@dataclass(frozen=True, slots=True)
class _StepAhead:
    """A step whose tokens are not read: a graph chooses one for each row, which has one completion."""

    batch: _Batch
    num_left: NDArray[np.int64]
    """See `_Running.num_left`: another number now means that the completion has ended."""
    is_last: NDArray[np.bool_]
    """True for completions that end with this token."""
    read: ReadTokens


@dataclass(frozen=True, slots=True)
class NewToken:
    """One sampled token of completion `id`, and the set from which it was chosen (see `timeline.forest`)."""

    id: int
    token: int
    logprob: float
    support: bytes
    finish_reason: FinishReason | None
    error: ComputeError | None = None
    """The reason why the completion ends here with an error; None if the completion may continue."""
    routes: Choices | None = None
    """Routes of the tokens before this one that were not reported before; None if they are not asked for."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of one step, as columns of equal length. Ends, errors and routes are listed by position."""

    ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[bytes] | None = None
    """None if each token was chosen from the whole vocabulary."""
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    errors: dict[int, ComputeError] = field(default_factory=dict)
    routes: dict[int, Choices] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[NewToken]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> NewToken:
        at = range(len(self))[at]
        support = self.support[at] if self.support else EVERYTHING
        others = self.reasons.get(at), self.errors.get(at), self.routes.get(at)
        return NewToken(self.ids[at], self.tokens[at], self.logprobs[at], support, *others)


class ModelSampler:
    """Samples completions, up to `max_concurrent` at a time.

    A step computes the tokens of all adapters in one forward pass of the base model. Where each running completion
    computes one token, a graph chooses the tokens, too. The next step is launched before they are read, so the device
    does not wait for the host: the end of a completion is found one step late, and its extra token is dropped.
    """

    def __init__(self, policy: Policy, max_concurrent: int, cache_tokens: int, *, graphs: bool | None = None) -> None:
        """`policy` is the policy of full weights, or the base model. `graphs` is None for graphs on CUDA only."""
        self.policy = policy
        self.num_computed = 0
        """Tokens computed since the start."""
        self._max_concurrent = max_concurrent
        self._cache_tokens = cache_tokens
        self.grammars = Grammars(policy.info, policy.vocabulary)
        shape = policy.cache_shape if policy.info.shares_prefixes else None
        slots = None
        if policy.info.shares_prefixes and policy.state_shape:
            slots = StateSlots(STATES_PER_COMPLETION * max_concurrent, policy.device, policy.state_shape)
        self._cache = KeyValueCache(shape, cache_tokens, policy.dtype, policy.device, slots)
        self._graphs: DecodeGraphs | None = None
        if policy.info.shares_prefixes and not slots and (policy.device.type == "cuda" if graphs is None else graphs):
            self._graphs = DecodeGraphs(self._cache, max_concurrent, policy.info.context_length)
        self._state_name = None if policy.info.shares_prefixes else _state_name(policy)
        self._waiting: deque[RunningCompletion] = deque()
        self._running: dict[CacheRow, list[RunningCompletion]] = {}
        self._places = _Running(max_concurrent)
        self._ahead: _StepAhead | None = None
        self._debt = 0.0
        """Seconds that other completions get before long prompts go on."""
        self.paused: set[Policy] = set()
        """Policies of which nothing is sampled until `invalidate`."""
        self._mixture: AdapterMixture | None = None
        self._may_admit = False
        """True if an event since the last attempt may allow a waiting request to start."""

    @property
    def is_idle(self) -> bool:
        """True if a step would do nothing. Paused completions may wait."""
        if any(row.owner not in self.paused for row in self._running):
            return False
        return not (self._may_admit and any(c.policy not in self.paused for c in self._waiting))

    def submit(
        self,
        id: int,
        prompt: np.ndarray,
        params: SamplingParams,
        policy: Policy | None = None,
        guide: Guide | None = None,
    ) -> None:
        """Queue a request to `policy`, an adapter over the base model; None for the sampler's own policy.

        `guide` follows the grammar of `params`; None to compile it here. Raises `OutOfCache` when the request could
        never be held, `GrammarError` for a bad grammar.
        """
        length, context = len(prompt) + params.max_tokens, self.policy.info.context_length
        if length > min(context, self._cache.max_tokens):
            raise OutOfCache(
                f"{len(prompt)} prompt tokens + max_tokens = {params.max_tokens} exceed what the sampler can hold "
                f"(context {context}, sampler.cache_tokens = {self._cache_tokens})"
            )
        guide = guide or self.grammars.guide(params.grammar)
        completion = RunningCompletion(id, prompt, length, params, guide, policy or self.policy)
        completion.num_routed = params.routes_from or 0
        self._waiting.append(completion)
        self._may_admit = True

    def cancel(self, id: int) -> None:
        """Drop a request. Unknown ids are ignored, because the request may just have ended."""
        self._may_admit = True
        self._waiting = deque(c for c in self._waiting if c.id != id)
        for row, completions in [*self._running.items()]:
            for c in [c for c in completions if c.id == id]:
                self._places.leave(c)
                self._keep(row, [other for other in completions if other is not c])

    def invalidate(self, policy: Policy | None = None) -> None:
        """Drop the cached state of a policy, and resume it: its weights changed, or it was removed."""
        policy = policy or self.policy
        if (ahead := self._ahead) is not None and ahead.batch.rows[0].owner is policy:
            self._places.undo(ahead.batch.places[self._is_live(ahead)])
            self._ahead = None
        self._cache.clear(policy)
        self.paused.discard(policy)
        if self._mixture is not None:
            self._mixture.invalidate()
        if self._graphs is not None:
            self._graphs.forget(policy)
        self._may_admit = True

    @torch.inference_mode()
    def step(self) -> NewTokens:
        """Compute what the rows miss; returns one sampled token for every completion whose row is complete.

        A row that was just sampled from misses one token. A new prompt misses the part that no other row holds. Long
        prompts are spread over several steps, so that they do not delay running completions.
        """
        if self._ahead is not None and self._is_live(self._ahead).any():
            return self._read(self._ahead)
        self._ahead = None
        self._admit()
        rows = [row for row in self._running if row.owner not in self.paused] if self.paused else [*self._running]
        singles = [(row, 1) for row in rows if row.length - row.filled == 1]
        if len(singles) == len(rows) and (ahead := self._launched(rows)) is not None:
            self._debt = 0.0
            return self._read(ahead)
        short, long, share = self._prompts(rows, len(singles)) if len(singles) < len(rows) else ([], [], 0.0)
        logits: list[Tensor] = []
        complete: list[CacheRow] = []
        began, long_seconds = time.perf_counter(), 0.0
        self._compute(singles, logits, complete)
        if long:
            between = self._finished()
            self._compute(sorted(short + long, key=_is_longer), logits, complete)
            num_long, num_short = (sum(n for _, n in spans) for spans in (long, short))
            long_seconds = (self._finished() - between) * num_long / (num_long + num_short)
        else:
            self._compute(sorted(short, key=_is_longer), logits, complete)
        new = self._sample(torch.cat(logits) if len(logits) > 1 else logits[0], complete) if complete else NewTokens()
        other_seconds = time.perf_counter() - began - long_seconds
        self._debt = max(0.0, self._debt + (long_seconds * (1 - share) / share if long else 0) - other_seconds)
        return new

    def _prompts(self, rows: list[CacheRow], num_singles: int) -> tuple[Spans, Spans, float]:
        """Returns the parts of short and of long prompts that a step computes, and the share of time of the long ones.

        Short prompts come in every step, in order of arrival. Long ones get their share of the time while others run,
        in chunks. A prompt is cut only if the model shares prefixes: the cache of `transformers` continues a state
        token by token.
        """
        factor = CUDA_FACTOR if self.policy.device.type == "cuda" else 1
        prompts = [row for row in rows if row.num_missing > 1]
        budget, chunk = factor * PROMPT_TOKENS, min(factor * CHUNK_TOKENS, factor * PROMPT_TOKENS)
        short = self._cut([row for row in prompts if row.num_missing <= chunk // 2], budget)
        long = [row for row in prompts if row.num_missing > chunk // 2]
        num_others = num_singles + len(prompts) - len(long)
        if not num_others:
            return [], self._cut(long, budget), 1.0
        share = max(LONG_SHARE, len(long) / (len(long) + num_others))
        return short, self._cut(long, chunk) if self._debt <= 0 else [], share

    def _cut(self, prompts: list[CacheRow], budget: int) -> Spans:
        """Returns the next tokens of prompts, `budget` in total."""
        spans: Spans = []
        for row in prompts:
            if budget <= 0:
                break
            count = min(row.num_missing, budget) if self.policy.info.shares_prefixes else row.num_missing
            spans.append((row, count))
            budget -= count
        return spans

    def _finished(self) -> float:
        """Returns the time at which the computation so far is finished: the present. On CUDA, waits for it."""
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _batch_of(self, rows: list[CacheRow]) -> _Batch:
        groups = [self._running[row] for row in rows]
        completions = [c for group in groups for c in group]
        return _Batch(rows, groups, completions, np.array([c.place for c in completions], np.int64))

    def _launched(self, rows: list[CacheRow]) -> _StepAhead | None:
        """Launch a step in which each row computes one token; None if no graph chooses all of the tokens."""
        if self._graphs is None or len({row.owner for row in rows}) != 1 or rows[0].owner.records_routes:
            return None
        batch = self._batch_of(rows)
        if len(batch.completions) > len(rows) or not self._places.is_plain[batch.places].all():
            return None
        return self._step_of(batch)

    def _step_of(self, batch: _Batch, source: NDArray[np.int64] | None = None) -> _StepAhead | None:
        """Launch a step. Tokens that are not read come from rows `source` of the step before."""
        rows, places = batch.rows, batch.places
        if self._graphs is None or (graph := self._graphs.of(rows[0].owner, len(rows))) is None:
            return None
        graph.launch(rows[0].owner, rows, self._places.rules(places, np.arange(len(rows)), {}), source)
        self._cache.advance([(row, 1) for row in rows])
        self.num_computed += len(rows)
        return _StepAhead(batch, self._places.num_left[places], self._places.left[places] == 0, graph.chosen())

    def _read(self, ahead: _StepAhead) -> NewTokens:
        """Returns the tokens of a step. Launches the one after it before, unless other work may come first."""
        self._ahead = None
        is_live = self._is_live(ahead)
        goes_on = is_live & ~ahead.is_last
        if goes_on.any() and not self.paused and not (self._waiting and self._may_admit):
            self._ahead = self._step_of(ahead.batch.only(goes_on), np.flatnonzero(goes_on))
        tokens, logprobs = ahead.read()
        live = np.flatnonzero(is_live)
        chosen = ChosenTokens(tokens[live].astype(np.int64), logprobs[live], None)
        return self._take(ahead.batch.only(is_live), chosen, ahead.is_last[is_live])

    def _is_live(self, ahead: _StepAhead) -> NDArray[np.bool_]:
        """Returns True for the completions of a step that have not ended since it was launched."""
        return np.equal(self._places.num_left[ahead.batch.places], ahead.num_left)

    def _compute(self, spans: Spans, logits: list[Tensor], complete: list[CacheRow]) -> None:
        """Compute the next tokens of rows. Adds the complete rows, and the logits after their last tokens."""
        for owners, part in _passes(spans):
            graph = None
            if self._graphs is not None and len(owners) == 1 and part[-1][1] == 1:
                graph = self._graphs.of(next(iter(owners)), len(part))
            is_long = self.policy.device.type == "cpu" or not self.num_computed  # The first step compiles.
            with PROGRESS.long_step(is_long), self._recorded(owners, part):
                if graph is None:
                    hidden = self._forward(owners, part)
                else:
                    graph.launch(next(iter(owners)), [row for row, _ in part])
                    self.num_computed += len(part)
            self._cache.advance(part)
            whole = [row for row, _ in part if row.filled == row.length]
            complete += whole
            if graph is not None:
                logits.append(graph.logits[: len(part)].clone())  # The next graph overwrites them.
            elif whole:
                if len(whole) < len(hidden):
                    last = np.cumsum([n for _, n in part]) - 1
                    hidden = hidden[torch.from_numpy(last[[row.filled == row.length for row, _ in part]])]
                logits.append(_logits(self.policy, owners, hidden, whole))

    def _admit(self) -> None:
        """Start waiting requests: of the policy with the fewest running completions, then in order of arrival.

        No request overtakes one that waits for free blocks. Overtaken are the requests of paused policies, and one
        whose prefix another row computes now. Does nothing unless something changed since the last time.
        """
        if not (self._waiting and self._may_admit):
            return
        self._may_admit = False
        self._waiting = deque(self._fairly(self._waiting))
        same = {(row.owner, row.tokens[: row.length].tobytes()): row for row in self._running}
        num_free = self._max_concurrent - sum(map(len, self._running.values()))
        postponed: deque[RunningCompletion] = deque()
        while self._waiting and num_free > 0:
            completion = self._waiting.popleft()
            if completion.policy in self.paused:
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
            self._running.setdefault(row, []).append(completion)
            self._places.enter(completion)
            num_free -= 1
        self._waiting = postponed + self._waiting

    def _fairly(self, waiting: Iterable[RunningCompletion]) -> list[RunningCompletion]:
        """Returns the requests by the number of completions that their policy has when they start."""
        started = Counter(c.policy for completions in self._running.values() for c in completions)
        ranked = []
        for completion in waiting:
            ranked.append((started[completion.policy], completion))
            started[completion.policy] += 1
        return [completion for _, completion in sorted(ranked, key=lambda pair: pair[0])]

    @contextmanager
    def _recorded(self, owners: set[Policy], spans: Spans) -> Iterator[None]:
        """Context of a pass that adds the routes of the tokens to their rows if a policy records them."""
        shape = next((owner.info.routes for owner in owners if owner.records_routes), None)
        if shape is None:
            yield
            return
        with routing(recorded := RoutePass()):
            yield
        choices, start = recorded.chosen.to(torch.int8 if shape.experts <= 128 else torch.int16).cpu().numpy(), 0
        for row, count in spans:
            row.add_routes(choices[start : start + count])
            start += count

    def _forward(self, owners: set[Policy], spans: Spans) -> Tensor:
        """Compute the next tokens of each row and store their state; returns their hidden states in order.

        `owners` are the policies of the rows.
        """
        if not self.policy.info.shares_prefixes:
            return torch.cat([self._forward_row(row, n) for row, n in spans])
        self.num_computed += sum(n for _, n in spans)
        inputs = step_inputs(spans, self._cache)
        if len(owners) == 1:
            return flat_forward(next(iter(owners)).decoder, *inputs)
        if self._mixture is None:
            self._mixture = AdapterMixture(self.policy)
        return self._mixture.forward(*inputs, [(row.owner, n) for row, n in spans])

    def _forward_row(self, row: CacheRow, count: int) -> Tensor:
        """Compute a row by the model's own attention: after its state, or all of it if there is none."""
        tokens = row.tokens[0 if row.state is None else row.filled : row.filled + count]
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self.policy.device)[None]
        self.num_computed += len(tokens)
        hidden, row.state = _continued(row.owner, self._state_name, ids, row.state)
        if (routes := present_routes()) is not None:
            routes.keep_last(count)
        return hidden[0, -count:]

    def _sample(self, logits: Tensor, rows: list[CacheRow]) -> NewTokens:
        """Sample one token for each completion of the rows, after whose last tokens these are the logits."""
        batch = self._batch_of(rows)
        of = np.arange(len(rows))
        if len(batch.completions) > len(rows):
            of = np.repeat(of, [len(group) for group in batch.groups])
        special = np.flatnonzero(self._places.is_special[batch.places]).tolist()
        masks = {i: guide.mask for i in special if (guide := batch.completions[i].guide)}
        chosen = sample_tokens(logits, self._places.rules(batch.places, of, masks))
        return self._take(batch, chosen, self._places.left[batch.places] == 0)

    def _take(self, batch: _Batch, chosen: ChosenTokens, is_over: NDArray[np.bool_]) -> NewTokens:
        """Returns the tokens of a step as new ones. Ends completions, or adds the tokens to their rows.

        `is_over` [C] is True for completions that end by their length.
        """
        rows, groups, completions, places = batch
        special = np.flatnonzero(self._places.is_special[places]).tolist()
        tokens, logprobs, support = chosen
        owners = {row.owner for row in rows}
        new = NewTokens([c.id for c in completions], tokens.tolist(), logprobs.tolist(), support)
        new.reasons.update(dict.fromkeys(np.flatnonzero(is_over).tolist(), "length"))
        ends = frozenset[int]().union(*(policy.end_tokens for policy in owners))
        for i in np.flatnonzero(np.isin(tokens, list(ends))).tolist():
            if new.tokens[i] in completions[i].policy.end_tokens:
                new.reasons[i] = "stop"
        for i in np.flatnonzero(~np.isfinite(logprobs)).tolist():
            new.errors[i] = ComputeError("the policy has diverged: its logits are not finite")
        row_of = [row for row, group in zip(rows, groups, strict=True) for _ in group] if special else []
        for i in special:
            guide = completions[i].guide
            if guide and i not in new.reasons and i not in new.errors and (refused := guide.advance(new.tokens[i])):
                new.errors[i] = GrammarError(refused)
            if (routes := _new_routes(completions[i], row_of[i])) is not None:
                new.routes[i] = routes
        is_over[[*new.reasons, *new.errors]] = True
        if is_over.any():
            self._may_admit = True
        start = 0
        over = is_over.tolist()
        for row, group in zip(rows, groups, strict=True):
            stop = start + len(group)
            if len(group) == 1 and not over[start]:
                row.tokens[row.length] = new.tokens[start]  # As `append`: a call takes longer.
                row.length += 1
            else:
                row.tokens[row.length : row.filled] = new.tokens[start]  # The step ahead has computed the last token.
                by_token: dict[int, list[RunningCompletion]] = {}
                for c, token, ended in zip(group, new.tokens[start:stop], over[start:stop], strict=True):
                    if ended:
                        self._places.leave(c)
                    else:
                        by_token.setdefault(token, []).append(c)
                self._branch(row, by_token)
            start = stop
        return new

    def _branch(self, row: CacheRow, by_token: dict[int, list[RunningCompletion]]) -> None:
        """Continue a row's completions: those with the first token keep the row, the others get copies of it."""
        for token, completions in list(by_token.items())[1:]:
            twin = self._cache.branch(row)
            if twin is not None:
                twin.append(token)
                self._running[twin] = completions
                continue
            for c in completions:  # no free blocks: the completion waits, with all its tokens so far
                c.tokens = np.append(row.tokens[: row.length], np.int32(token))
                self._places.leave(c)
                self._waiting.appendleft(c)
                self._may_admit = True
        token, keeping = next(iter(by_token.items()), (0, []))
        self._keep(row, keeping)
        if keeping:
            row.append(token)

    def _keep(self, row: CacheRow, completions: list[RunningCompletion]) -> None:
        """Reduce the completions of a row to these; without any, the row is released."""
        self._running[row] = completions
        if not completions:
            del self._running[row]
            self._cache.release(row)


def _new_routes(completion: RunningCompletion, row: CacheRow) -> Choices | None:
    """Returns the routes of a row that its completion has not reported; None if it reports none."""
    if completion.params.routes_from is None or row.routes is None or not completion.policy.records_routes:
        return None
    first, completion.num_routed = completion.num_routed, row.filled
    return row.routes[first : row.filled].copy()


def _is_longer(span: tuple[CacheRow, int]) -> bool:
    """The order of the spans of a pass: single tokens come first."""
    return span[1] > 1


def _passes(spans: Spans) -> list[tuple[set[Policy], Spans]]:
    """Returns the spans of each forward pass, with their policies. Adapters that cannot be mixed have a pass alone."""
    owners = {row.owner for row, _ in spans}
    if len(owners) == 1:
        return [(owners, spans)]
    passes: dict[Policy | None, tuple[set[Policy], Spans]] = {}
    for row, count in spans:
        owners, part = passes.setdefault(None if row.owner.mixable_layers else row.owner, (set(), []))
        owners.add(row.owner)
        part.append((row, count))
    return list(passes.values())


def _logits(base: Policy, owners: set[Policy], hidden: Tensor, rows: list[CacheRow]) -> Tensor:
    """Returns logits [R, V] of hidden states [R, hidden], each by the head of its row's policy, one of `owners`."""
    if not any(owner.adapts_head for owner in owners):
        return base.head(hidden)
    return torch.cat([row.owner.head(one[None]) for row, one in zip(rows, hidden, strict=True)])


def _continued(policy: Policy, state_name: str | None, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Returns hidden states [1, T, hidden] of `ids`, which follow `state`, and the state after them, if any."""
    decoder = cast(Any, policy.decoder)
    with policy.attention(policy.own_attention):
        if state_name is None:
            return decoder(input_ids=ids, use_cache=False).last_hidden_state, None
        out = decoder(input_ids=ids, use_cache=True, **({} if state is None else {state_name: state}))
        return out.last_hidden_state, out[state_name]


@torch.inference_mode()
def _state_name(policy: Policy) -> str | None:
    """Returns the name of the model's cache argument and result; None if it has no cache, or an inexact one.

    A cache is inexact if continuing from it gives other logits than a pass over all tokens. The learner would then find
    other log-probabilities than the sampler reported. Without a cache, each token computes its sequence again.
    """
    accepted = inspect.signature(policy.decoder.forward).parameters
    name = next((name for name in ("cache_params", "past_key_values") if name in accepted), None)
    reason = "it has none" if name is None else _cache_obstacle(policy, name)
    if reason is None:
        return name
    log.warning(
        "%s: no usable cache between tokens (%s); sampling computes each sequence again", policy.info.name, reason
    )
    return None


def _cache_obstacle(policy: Policy, name: str) -> str | None:
    """Returns the reason why a model's cache is not used; None if it is exact.

    Boundary: any exception of the cache's code becomes a reason.
    """
    ids = probe_tokens(policy, PROBE_TOKENS)[None]
    wanted = policy.head(_continued(policy, None, ids, None)[0]).float()
    state, parts = None, []
    try:
        for part in torch.split(ids, [PROBE_TOKENS // 2] + [1] * (PROBE_TOKENS // 2), 1):
            hidden, state = _continued(policy, name, part, state)
            parts.append(hidden)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    difference = distance(policy.head(torch.cat(parts, 1)), wanted)
    if difference <= tolerance(policy.dtype, wanted):
        return None
    return f"its logits differ by {difference:.3f} from those of a pass over all tokens"


ADAPTER = "default"
"""Name of a policy's adapter in `peft`, and in its files."""


class AdapterMixture:
    """The base model's decoder with the stacked adapters of some policies: several adapters in one forward pass.

    Each adapter has separate modules around the shared weights. It is loaded, trained and saved as if it were alone.
    For sampling, the matrices of the adapters are stacked. Every layer computes the low-rank products of all adapters,
    and masks those of other policies:

        out = W x + B (mask * (A x)),    A [R, in] and B [out, R] stacked,    R the sum of the ranks

    The log-probabilities equal those of a separate pass within rounding.
    """

    def __init__(self, base: Policy) -> None:
        self._decoder = copied_modules(base.decoder)
        self._layers: dict[str, _MixedLayer] = {}
        self._ranks: dict[Policy, slice] = {}
        """The place of each stacked policy among the R rows."""

    def invalidate(self) -> None:
        """Drop the stacked matrices: weights of a policy changed."""
        self._ranks.clear()
        for layer in self._layers.values():
            layer.down = layer.up = None

    def forward(
        self, tokens: Tensor, positions: Tensor, plan: AttentionPlan, owners: Sequence[tuple[Policy, int]]
    ) -> Tensor:
        """Returns hidden states [N, hidden]. `owners` are the policies of the tokens, with their numbers, in order."""
        policies = dict.fromkeys(policy for policy, _ in owners)
        if not policies.keys() <= self._ranks.keys():
            self._stack(list(policies | self._ranks))
        num_ranks = max(place.stop for place in self._ranks.values())
        outside = np.ones((len(tokens), num_ranks), bool)
        start = 0
        for policy, count in owners:
            outside[start : start + count, self._ranks[policy]] = False
            start += count
        mask = torch.from_numpy(outside).to(tokens.device)
        for layer in self._layers.values():
            layer.outside = mask
        return flat_forward(self._decoder, tokens, positions, plan)

    def _stack(self, policies: list[Policy]) -> None:
        self.invalidate()
        start = 0
        for policy in policies:
            rank = next(iter(policy.mixable_layers.values())).r[ADAPTER]
            self._ranks[policy] = slice(start, start + rank)
            start += rank
        for path in dict.fromkeys(path for policy in policies for path in policy.mixable_layers):
            if path not in self._layers:
                self._layers[path] = _MixedLayer(self._decoder.get_submodule(path))
                self._decoder.set_submodule(path, self._layers[path])
            layers = ((policy.mixable_layers.get(path), self._ranks[policy]) for policy in policies)
            self._layers[path].stack([(layer, place) for layer, place in layers if layer is not None], num_ranks=start)


class _MixedLayer(nn.Module):
    """A linear layer of the base model, with the stacked matrices of the adapters."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.weight, self.bias = base.weight, base.bias  # Mamba multiplies one of its matrices itself.
        self.down: Tensor | None = None
        self.up: Tensor | None = None
        self.outside: Tensor | None = None
        """Mask [N, R]: True where a token does not belong to the policy of the rank."""

    def stack(self, adapters: list[tuple[Any, slice]], num_ranks: int) -> None:
        """Stack the adapters of this layer, each at its ranks."""
        down, up = adapters[0][0].lora_A[ADAPTER].weight, adapters[0][0].lora_B[ADAPTER].weight
        self.down = down.new_zeros(num_ranks, down.shape[1])
        self.up = up.new_zeros(up.shape[0], num_ranks)
        for layer, place in adapters:
            self.down[place] = layer.lora_A[ADAPTER].weight
            self.up[:, place] = layer.lora_B[ADAPTER].weight * layer.scaling[ADAPTER]
        # 0 times NaN is NaN: in `up`, a diverged adapter would reach the tokens of the others.
        diverged = ~self.up.isfinite().all(0)
        self.up.masked_fill_(diverged, 0)
        self.down.masked_fill_(diverged[:, None], torch.nan)

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Linear`. `x` are all tokens of the pass in order."""
        out: Tensor = self.base(x)
        if self.down is None or self.up is None or self.outside is None:
            return out
        low = F.linear(x, self.down).masked_fill_(self.outside, 0)
        return out + F.linear(low, self.up)
