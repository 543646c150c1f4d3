"""The worker process: one loop that samples while completions run, and handles the other requests in between.

It hosts policies. Adapters share one base model and one sampler; a policy of full weights has both alone.

`worker_process.WorkerProcess` starts the worker and sends frames on standard input. A thread reads the frames and ends
the process as soon as the gateway is gone. The worker stores no facts: they are all in the gateway's journal.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from agentjet.compute.embedded.hosted_policy import HostedPolicy
from agentjet.compute.embedded.model import BaseModel
from agentjet.compute.embedded.sampler import ModelSampler
from agentjet.compute.embedded.token_sampling import score
from agentjet.compute.embedded.worker_process import Frame, encode_frame, read_frame
from agentjet.config import ModelConfig, SamplerConfig
from agentjet.errors import AgentJetError, ComputeError, ConfigError, PolicyRemoved
from agentjet.timeline.support import pack_sets
from agentjet.types import FinishReason, PolicyId, SamplingParams

ARRIVAL_GAP_SECONDS = 0.004
"""Seconds for which the sampler waits for another request before its next step."""
ARRIVALS_SECONDS = 0.05
"""Total limit of that wait."""
OPERATIONS = ("forward_backward", "optim_step")
_ENDING = (*OPERATIONS, "remove")
"""Requests whose failure ends the process, because gradients, weights or the sampler may be half changed."""
_BY_ID = ("sample", "cancel")
"""Requests about one completion. Its tokens are the answer."""
_OF_WORKER = ("add", "remove", "sample", "cancel", "score")
"""Requests that the worker handles itself. `HostedPolicy` handles the others."""


@dataclasses.dataclass(slots=True)
class _Piece:
    """Sampled tokens of a completion that are not sent yet. A piece is sent when it has `size` tokens."""

    hosted: HostedPolicy
    size: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    support: list[bytes] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class _SharedBase:
    """The base model of the worker's adapters, and their sampler."""

    model: BaseModel
    sampler: ModelSampler


class Worker:
    """The state of the process: policies by id, and the completions of all of them."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._pieces: dict[int, _Piece] = {}
        self._shared_base: _SharedBase | None = None
        self.policies: dict[PolicyId, HostedPolicy] = {}

    def read_forever(self, stream: BinaryIO) -> None:
        """The loop of the reader thread."""
        while (frame := read_frame(stream)) is not None:
            self._inbox.put(frame)
        os._exit(0)  # the gateway is gone

    def run(self) -> None:
        """The main loop; returns on the request `close`."""
        arrivals_end = 0.0
        while True:
            frame = self._next_frame(arrivals_end)
            if frame is None:
                self._sample_step()
                arrivals_end = 0.0
                continue
            if frame["op"] == "close":
                return
            self._answer(frame)
            if frame["op"] == "sample":
                arrivals_end = arrivals_end or time.monotonic() + ARRIVALS_SECONDS

    def handle(self, op: str, policy: PolicyId, **arguments: Any) -> Any:
        """Handle one request; returns its result. Raises `AgentJetError`, or anything else for a bug."""
        if op in _OF_WORKER:
            return getattr(self, f"_{op}")(policy, **arguments)
        result = getattr(self._hosted(policy), op)(**arguments)
        if op in OPERATIONS:
            trim_malloc()
        return result

    def _next_frame(self, arrivals_end: float) -> Frame | None:
        """Returns the next request; None when the samplers should do a step.

        A step costs nearly the same for one completion as for fifty, and requests arrive together. So the loop waits
        briefly for more requests after each one.
        """
        if all(sampler.is_idle for sampler in self._samplers()):
            return self._inbox.get()
        try:
            if time.monotonic() < arrivals_end:
                return self._inbox.get(timeout=ARRIVAL_GAP_SECONDS)
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _answer(self, frame: Frame) -> None:
        """Handle a frame. Boundary: a failure becomes an answer, and may also end the process."""
        op, id = frame["op"], frame["id"]
        arguments = {key: value for key, value in frame.items() if key not in ("op", "policy")}
        if op not in _BY_ID:
            del arguments["id"]
        try:
            result = self.handle(op, PolicyId(**frame["policy"]), **arguments)
        except AgentJetError as error:
            self._fail(id, error)
        except Exception as error:
            traceback.print_exc()
            self._fail(id, ComputeError(f"{op} failed: {type(error).__name__}: {error}"), ends=op in _ENDING)
            if op in _ENDING:
                raise
        else:
            if op not in _BY_ID:
                self._send({"id": id, "ok": result})

    def _add(self, policy: PolicyId, model: dict[str, Any], dtype: str, sampler: dict[str, Any]) -> dict[str, Any]:
        config = ModelConfig.model_validate(model)
        if dtype and config.dtype == "auto":  # A second timing may choose another type.
            config = ModelConfig.model_validate({**model, "dtype": dtype})
        self._remove(policy)
        if config.lora.rank:
            shared = self._base_of_adapters(policy, config, SamplerConfig.model_validate(sampler))
            loaded, sampled = shared.model.adapted(config.lora), shared.sampler
        else:
            loaded = BaseModel(config).policy
            settings = SamplerConfig.model_validate(sampler)
            sampled = ModelSampler(loaded, settings.max_concurrent, settings.cache_tokens)
        self.policies[policy] = HostedPolicy(policy, loaded, sampled, functools.partial(self._flush, policy))
        return dataclasses.asdict(loaded.info)

    def _base_of_adapters(self, policy: PolicyId, config: ModelConfig, sampler: SamplerConfig) -> _SharedBase:
        """Returns the base model of the worker's adapters. Raises `ConfigError` if it is not that of `config`."""
        users = [other for other, hosted in self.policies.items() if hosted.policy.has_adapters]
        if self._shared_base is None or not users:
            self._shared_base = None  # So that a base without users is freed before the next one is loaded.
            model = BaseModel(config)
            self._shared_base = _SharedBase(
                model, ModelSampler(model.policy, sampler.max_concurrent, sampler.cache_tokens)
            )
        elif reason := self._shared_base.model.difference(config):
            own = next((f"policy {other}" for other in users if other.run == policy.run), "another run")
            raise ConfigError(
                f"policy {policy}: {reason} of {own}; the adapters of one worker share one base model: "
                f"set policies.{policy.policy}.worker to another name, or use the same base"
            )
        return self._shared_base

    def _remove(self, policy: PolicyId) -> None:
        """Free a policy. The base model of adapters is freed with the last of them."""
        hosted = self.policies.pop(policy, None)
        if hosted is None:  # An `add` that failed may have loaded the base model of adapters.
            self._free_base()
            return
        for id in [id for id, piece in self._pieces.items() if piece.hosted is hosted]:
            self._cancel(policy, id)
            self._fail(id, PolicyRemoved(f"the policy {policy} was removed from the worker"))
        hosted.sampler.invalidate(hosted.policy)
        del hosted
        self._free_base()

    def _free_base(self) -> None:
        """Free the base model of adapters if there is no adapter, and return freed memory to the system."""
        if not any(hosted.policy.has_adapters for hosted in self.policies.values()):
            self._shared_base = None
        gc.collect()
        trim_malloc()

    def _score(
        self, policy: PolicyId, tokens: bytes, num_likeliest: int
    ) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        hosted = self._hosted(policy)
        scores = score(hosted.policy, _token_ids(hosted, tokens), num_likeliest)
        return [(one.logprob, one.likeliest) for one in scores]

    def _sample(self, policy: PolicyId, id: int, tokens: bytes, params: dict[str, Any]) -> None:
        hosted = self._hosted(policy)
        chosen = SamplingParams(**params)
        hosted.sampler.submit(id, _token_ids(hosted, tokens), chosen, hosted.policy)
        self._pieces[id] = _Piece(hosted, chosen.piece_tokens)

    def _cancel(self, policy: PolicyId, id: int) -> None:
        """Drop a completion, unless it has ended."""
        if (piece := self._pieces.pop(id, None)) is not None:
            piece.hosted.sampler.cancel(id)

    def _samplers(self) -> list[ModelSampler]:
        return list({id(hosted.sampler): hosted.sampler for hosted in self.policies.values()}.values())

    def _sample_step(self) -> None:
        complete = []
        for new in [new for sampler in self._samplers() for new in sampler.step()]:
            piece = self._pieces[new.id]
            piece.tokens.append(new.token)
            piece.logprobs.append(new.logprob)
            piece.support.append(new.support)
            if new.error is not None:
                del self._pieces[new.id]
                self._fail(new.id, new.error)
            elif new.finish_reason is not None or len(piece.tokens) >= piece.size:
                complete.append((new.id, piece, new.finish_reason))
        self._deliver(complete)

    def _flush(self, policy: PolicyId) -> None:
        """Send the sampled tokens of a policy with its present version."""
        hosted = self.policies[policy]
        unsent = [(id, piece) for id, piece in self._pieces.items() if piece.hosted is hosted and piece.tokens]
        self._deliver([(id, piece, None) for id, piece in unsent])

    def _deliver(self, complete: list[tuple[int, _Piece, FinishReason | None]]) -> None:
        if complete:
            tokens = [
                (id, piece.hosted.version, piece.tokens, piece.logprobs, pack_sets(piece.support), reason)
                for id, piece, reason in complete
            ]
            self._send({"tokens": tokens})
        for id, piece, reason in complete:
            if reason is None:
                self._pieces[id] = _Piece(piece.hosted, piece.size)
            else:
                del self._pieces[id]

    def _hosted(self, policy: PolicyId) -> HostedPolicy:
        if policy not in self.policies:
            raise PolicyRemoved(f"the worker has no policy {policy}")
        return self.policies[policy]

    def _fail(self, id: int, error: AgentJetError, *, ends: bool = False) -> None:
        """`ends`: the process ends because of this request, and not because of those that wait behind it."""
        self._send({"id": id, "error": type(error).__name__, "message": str(error), "ends": ends})

    def _send(self, frame: Frame) -> None:
        self._output.write(encode_frame(frame))
        self._output.flush()


def _token_ids(hosted: HostedPolicy, tokens: bytes) -> np.ndarray:
    """Returns the token ids of a prompt. Raises `ComputeError` for ids outside the vocabulary."""
    ids = np.frombuffer(tokens, np.int32)
    vocabulary = hosted.policy.vocabulary
    if not len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
        raise ComputeError(f"a prompt needs token ids between 0 and {vocabulary - 1}")
    return ids


def trim_malloc() -> None:
    """Return freed memory to the system; does nothing if the C library is not glibc.

    glibc keeps freed blocks of up to 32 MB in its heap. A learner's blocks have another size in every batch, so gaps
    add up: 8 GB after twelve batches of long conversations.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def make_deterministic() -> None:
    """Make torch deterministic. New tensors stay uninitialised, because filling them would cost time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False


def main() -> None:
    """Serve the gateway on standard input and output until it closes them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the gateway decides
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that no library prints between the frames
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    make_deterministic()
    worker = Worker(output)
    threading.Thread(target=worker.read_forever, args=(sys.stdin.buffer,), daemon=True).start()
    worker.run()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would wait for the reader thread, which blocks on standard input
