"""The worker process: one loop that samples while completions run, and handles the other requests in between.

It hosts policies. Adapters share one base model and one sampler; a policy of full weights has both alone.

The server starts the worker (`compute.backend`) and sends it requests. The worker stores no facts: they are all in the
server's journal.
"""

from __future__ import annotations

import gc
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from agentjet.compute.embedded.distributions import score
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import BaseModel, reported_download
from agentjet.compute.embedded.policy_host import HEAP, PolicyHost
from agentjet.compute.embedded.sampler import ModelSampler
from agentjet.compute.token_choice import Guide
from agentjet.config import ModelConfig, SamplerConfig
from agentjet.errors import ComputeError, ConfigError, HookHung, PolicyRemoved
from agentjet.processes.rpc import Answer, Link, ProcessRequest, Send, answering
from agentjet.recipes import hooks
from agentjet.types import FinishReason, ModelInfo, PolicyId, Sampled, SamplingParams, TokenScore

ARRIVAL_GAP_SECONDS = 0.004
"""Seconds for which the sampler waits for another request before its next step."""
ARRIVALS_SECONDS = 0.05
"""Total limit of that wait."""
HOOK_CHECKS_PER_LIMIT = 10
_ENDING = ("forward_backward", "optim_step", "remove")
"""Requests whose failure ends the process, because gradients, weights or the sampler may be half changed."""
_COMPILED = "compiled"
"""The request of the worker to itself to start the completion whose grammar its thread has compiled."""
_UNANSWERED = ("sample", "cancel", _COMPILED)
"""Requests about one completion. Its tokens are the answer."""
_OF_WORKER = ("add", "remove", "sample", "cancel", "score", _COMPILED)
"""Requests that the worker handles itself. `PolicyHost` handles the others."""


@dataclass(slots=True)
class _Piece:
    """Sampled tokens of a completion that are not sent yet. A piece is sent when it has `size` tokens."""

    hosted: PolicyHost
    size: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[bytes] = field(default_factory=list)

    def sampled(self, reason: FinishReason | None) -> Sampled:
        support = tuple(self.support) if any(self.support) else ()
        return Sampled(tuple(self.tokens), tuple(self.logprobs), self.hosted.version, reason, support)


class Worker:
    """The state of the process: policies by id, and the completions of all of them."""

    def __init__(self, send: Send) -> None:
        """`send` sends a message to the server, from any thread."""
        self.inbox: queue.SimpleQueue[ProcessRequest] = queue.SimpleQueue()
        self._pieces: dict[int, _Piece] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        """Compiles new grammars while the main loop samples: that may take seconds, without the lock of Python."""
        self._compiling: dict[int, tuple[PolicyId, Future[Guide | None]]] = {}
        """By completion that has not started."""
        self.present: ProcessRequest | None = None
        """The request that the main loop works on."""
        self._send = send
        self.policies: dict[PolicyId, PolicyHost] = {}
        self._shared: tuple[BaseModel, ModelSampler] | None = None
        """The base model of all adapters, and its sampler."""

    def run(self) -> None:
        """The main loop. Raises the failure of a request that may have left half a change."""
        arrivals_end = 0.0
        while True:
            request = self._next_request(arrivals_end)
            if request is None:
                self._sample_step()
                arrivals_end = 0.0
                continue
            self._answer(request)
            if request.op == "sample":
                arrivals_end = arrivals_end or time.monotonic() + ARRIVALS_SECONDS

    def handle(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """Handle one request; returns its result. Raises `AgentJetError`, or anything else for a bug."""
        if op in _OF_WORKER:
            return getattr(self, f"_{op}")(policy, *args)
        return getattr(self._hosted(policy), op)(*args)

    def _next_request(self, arrivals_end: float) -> ProcessRequest | None:
        """Returns the next request; None when the samplers should do a step.

        A step costs nearly the same for one completion as for fifty, and requests arrive together. So the loop waits
        briefly for more requests after each one.
        """
        if all(sampler.is_idle for sampler in self._samplers()):
            return self.inbox.get()
        try:
            if time.monotonic() < arrivals_end:
                return self.inbox.get(timeout=ARRIVAL_GAP_SECONDS)
            return self.inbox.get_nowait()
        except queue.Empty:
            return None

    def _answer(self, request: ProcessRequest) -> None:
        """Handle a request. Raises a failure that may have left half a change."""
        op, id, policy, args = self.present = request
        assert policy is not None
        with answering(request, self._send, ends=lambda error: op in _ENDING):
            result = self.handle(op, policy, *args)
            if op not in _UNANSWERED:
                self._send(Answer(id, result))

    def _add(self, policy: PolicyId, model: ModelConfig, settings: SamplerConfig) -> ModelInfo:
        self._remove(policy)
        if model.lora.rank and self._shared is not None:
            base, sampler = self._shared
            if reason := base.difference(model):
                own = next((f"policy {other}" for other in self._adapters() if other.run == policy.run), "another run")
                raise ConfigError(
                    f"policy {policy}: {reason} of {own}; the adapters of one worker share one base model: "
                    f"set policies.{policy.policy}.worker to another name, or use the same base"
                )
        else:
            with reported_download(model.name, self._send):
                base = BaseModel(model)
            sampler = ModelSampler(base.policy, settings.max_concurrent, settings.cache_tokens)
        loaded = base.policy_of(model)
        self.policies[policy] = PolicyHost(PolicyLearner(loaded), sampler, lambda: self._flush(policy))
        if loaded.has_adapters:
            self._shared = base, sampler
        return loaded.info

    def _adapters(self) -> list[PolicyId]:
        return [policy for policy, hosted in self.policies.items() if hosted.policy.has_adapters]

    def _remove(self, policy: PolicyId) -> None:
        """Free a policy. The base model of adapters is freed with the last of them."""
        if (hosted := self.policies.pop(policy, None)) is not None:
            compiling = [id for id, (of, _) in self._compiling.items() if of == policy]
            for id in [*compiling, *(id for id, piece in self._pieces.items() if piece.hosted is hosted)]:
                self._cancel(policy, id)
                self._send(Answer(id, error=PolicyRemoved(f"the policy {policy} was removed from the worker")))
            _sampler_of(hosted).invalidate(hosted.policy)
            del hosted
        if not self._adapters():
            self._shared = None
        gc.collect()
        HEAP.trim()

    def _score(self, policy: PolicyId, tokens: np.ndarray, num_likeliest: int) -> list[TokenScore]:
        hosted = self._hosted(policy)
        _check_tokens(hosted, tokens)
        return score(hosted.policy, tokens, num_likeliest)

    def _sample(self, policy: PolicyId, id: int, tokens: np.ndarray, params: SamplingParams) -> None:
        hosted = self._hosted(policy)
        _check_tokens(hosted, tokens)
        grammars = _sampler_of(hosted).grammars
        guide = grammars.known_guide(params.grammar)
        if guide is not None or not params.grammar:
            self._start(hosted, id, tokens, params, guide)
            return
        compiled = self._compiler.submit(grammars.guide, params.grammar)
        self._compiling[id] = policy, compiled
        compiled.add_done_callback(
            lambda done: self.inbox.put(ProcessRequest(_COMPILED, id, policy, (id, tokens, params, done)))
        )

    def _compiled(
        self, policy: PolicyId, id: int, tokens: np.ndarray, params: SamplingParams, compiled: Future[Guide | None]
    ) -> None:
        """Start a completion whose grammar is compiled, unless it was cancelled or its policy was removed."""
        if self._compiling.get(id) == (policy, compiled):
            del self._compiling[id]
            self._start(self._hosted(policy), id, tokens, params, compiled.result())

    def _start(
        self, hosted: PolicyHost, id: int, tokens: np.ndarray, params: SamplingParams, guide: Guide | None
    ) -> None:
        _sampler_of(hosted).submit(id, tokens, params, hosted.policy, guide)
        self._pieces[id] = _Piece(hosted, params.piece_tokens)

    def _cancel(self, policy: PolicyId, id: int) -> None:
        """Drop a completion, unless it has ended."""
        if id in self._compiling:
            self._compiling.pop(id)[1].cancel()
        if (piece := self._pieces.pop(id, None)) is not None:
            _sampler_of(piece.hosted).cancel(id)

    def _samplers(self) -> list[ModelSampler]:
        return list(dict.fromkeys(map(_sampler_of, self.policies.values())))

    def _sample_step(self) -> None:
        complete: dict[int, FinishReason | None] = {}
        for new in [new for sampler in self._samplers() for new in sampler.step()]:
            piece = self._pieces[new.id]
            piece.tokens.append(new.token)
            piece.logprobs.append(new.logprob)
            piece.support.append(new.support)
            if new.error is not None:
                del self._pieces[new.id]
                self._send(Answer(new.id, error=new.error))
            elif new.finish_reason is not None or len(piece.tokens) >= piece.size:
                complete[new.id] = new.finish_reason
        self._deliver(complete)

    def _flush(self, policy: PolicyId) -> None:
        """Send the sampled tokens of a policy with its present version."""
        hosted = self.policies[policy]
        self._deliver({id: None for id, piece in self._pieces.items() if piece.hosted is hosted and piece.tokens})

    def _deliver(self, complete: dict[int, FinishReason | None]) -> None:
        """Send pieces, given by completion, with the reason if the completion ends."""
        if complete:
            self._send([(id, self._pieces[id].sampled(reason)) for id, reason in complete.items()])
        for id, reason in complete.items():
            piece = self._pieces.pop(id)
            if reason is None:
                self._pieces[id] = _Piece(piece.hosted, piece.size)

    def _hosted(self, policy: PolicyId) -> PolicyHost:
        if policy not in self.policies:
            raise PolicyRemoved(f"the worker has no policy {policy}")
        return self.policies[policy]


def _sampler_of(hosted: PolicyHost) -> ModelSampler:
    assert hosted.sampler is not None, "a worker samples every policy that it hosts"
    return hosted.sampler


def _check_tokens(hosted: PolicyHost, tokens: np.ndarray) -> None:
    """Raises `ComputeError` for an empty prompt, and for ids outside the vocabulary."""
    vocabulary = hosted.policy.vocabulary
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ComputeError(f"a prompt needs token ids between 0 and {vocabulary - 1}")


def make_deterministic() -> None:
    """Make torch deterministic. New tensors stay uninitialised, because filling them would cost time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False


def end_overdue(limit: float, request: Callable[[], ProcessRequest | None], send: Send) -> None:
    """Start a thread that ends the process when a hook of a recipe takes more than `limit` seconds.

    A hook in an endless loop uses CPU time, so the watchdog takes it for work. The thread reports the hook first.
    `request` returns the request that the process works on. A hook that holds Python's lock in C stops the thread, too:
    then only the watchdog is left.
    """
    text = f"{limit:g} s (server.hook_timeout)"

    def watch() -> None:
        while not (overdue := hooks.overdue_call(limit, text)):
            time.sleep(limit / HOOK_CHECKS_PER_LIMIT)
        present = request()
        if present is not None:
            send(Answer(present.id, error=HookHung(overdue, during=str(present.policy)), ends=True))
        os._exit(1)

    if limit < math.inf:
        threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Serve the server until it closes the connection."""
    link = Link.of_program()
    make_deterministic()
    worker = Worker(link.send)
    link.read_forever(worker.inbox.put)
    end_overdue(float(sys.argv[1]), lambda: worker.present, link.send)
    worker.run()
