"""The worker process: one loop that samples while completions run, and handles the other requests in between.

`backend.EmbeddedCompute` starts the worker and sends frames on standard input. A thread reads the frames and ends the
process as soon as the gateway is gone. The worker stores no facts: they are all in the gateway's journal.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from agentjet.compute.embedded import checkpoint
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy, fingerprint
from agentjet.compute.embedded.sampler import PrefixSampler, RowSampler
from agentjet.compute.embedded.token_sampling import score
from agentjet.compute.embedded.worker_process import Frame, encode_frame, read_frame
from agentjet.compute.operations import OperationLog, body_digest
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig, ModelConfig, OptimizerConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, OperationConflict
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.support import pack_sets
from agentjet.types import FinishReason, Op, PolicyId, SamplingParams

ARRIVAL_GAP_SECONDS = 0.004
"""Seconds for which the sampler waits for another request before its next step."""
ARRIVALS_SECONDS = 0.05
"""Total limit of that wait."""
LOGPROBS_TOKENS = JobConfig().micro_batch_tokens
"""Computed tokens of a micro-batch of `logprobs`."""
OPERATIONS = ("forward_backward", "optim_step")
_BY_ID = ("sample", "cancel")
"""Requests about one completion. Its tokens are the answer."""


class Fingerprints:
    """Detects whether a step changed the learner's weights and the sampler's weights.

    A float32 policy has one copy of the weights, unless a bug replaces a parameter. A bfloat16 policy has separate
    masters.
    """

    def __init__(self, learner: PolicyLearner, sampling: Policy) -> None:
        self._learner = learner
        self._sampling = sampling
        self._last = self._compute()

    def reset(self) -> None:
        """Take the present weights as the reference, after they were loaded."""
        self._last = self._compute()

    def changed(self) -> dict[str, float]:
        """Returns 1 for each side that changed since the last call, else 0."""
        before, self._last = self._last, self._compute()
        return {name: float(self._last[name] != before[name]) for name in before}

    def _compute(self) -> dict[str, int]:
        known: dict[int, Tensor] = {}
        return {
            "weights/learner": fingerprint(self._learner.masters(), known),
            "weights/sampler": fingerprint(self._sampling.trainable().values(), known),
        }


@dataclasses.dataclass(slots=True)
class _Piece:
    """Sampled tokens of a completion that are not sent yet. A piece is sent when it has `size` tokens."""

    size: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    support: list[bytes] = dataclasses.field(default_factory=list)


class Worker:
    """The state of the process: a policy, its sampler and learner, and the policy version."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._policy_id = PolicyId()
        self._version = 0
        self._is_published = True
        """False from an `optim_step` to the next `publish`: the sampler pauses, because it shares the weights."""
        self._operations = OperationLog()
        self._pieces: dict[int, _Piece] = {}
        self.policy: Policy
        self.sampler: PrefixSampler | RowSampler
        self.learner: PolicyLearner
        self.fingerprints: Fingerprints

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
            self._handle(frame)
            if frame["op"] == "sample":
                arrivals_end = arrivals_end or time.monotonic() + ARRIVALS_SECONDS

    def _next_frame(self, arrivals_end: float) -> Frame | None:
        """Returns the next request; None when the sampler should do a step.

        A step costs nearly the same for one completion as for fifty, and requests arrive together. So the loop waits
        briefly for more requests after each one.
        """
        if not hasattr(self, "sampler") or self.sampler.is_idle or not self._is_published:
            return self._inbox.get()
        try:
            if time.monotonic() < arrivals_end:
                return self._inbox.get(timeout=ARRIVAL_GAP_SECONDS)
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _handle(self, frame: Frame) -> None:
        """Handle one request. Boundary: a failure becomes an answer.

        A failed operation also ends the process, because gradients or weights may be half changed.
        """
        op = frame["op"]
        try:
            arguments = {key: value for key, value in frame.items() if key != "op" and (key != "id" or op in _BY_ID)}
            result = getattr(self, f"_{op}")(**arguments)
        except AgentJetError as error:
            self._send({"id": frame["id"], "error": type(error).__name__, "message": str(error)})
        except Exception as error:
            traceback.print_exc()
            self._send(
                {"id": frame["id"], "error": "ComputeError", "message": f"{op} failed: {type(error).__name__}: {error}"}
            )
            if op in OPERATIONS:
                raise
        else:
            if op not in _BY_ID:
                self._send({"id": frame["id"], "ok": result})

    def _start(self, config: dict[str, Any], dtype: str) -> dict[str, Any]:
        settings = ServeConfig.model_validate(config)
        model = settings.model
        if dtype and model.dtype == "auto":  # A second timing may choose another type.
            model = ModelConfig.model_validate({**config["model"], "dtype": dtype})
        self.policy = load_policy(model)
        sampler = PrefixSampler if self.policy.info.shares_prefixes else RowSampler
        self.sampler = sampler(self.policy, settings.sampler.max_concurrent, settings.sampler.cache_tokens)
        self.learner = PolicyLearner(self.policy)
        self.fingerprints = Fingerprints(self.learner, self.sampler.policy)
        return dataclasses.asdict(self.policy.info)

    def _score(
        self, policy: dict[str, str], tokens: bytes, num_likeliest: int
    ) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        self._require(PolicyId(**policy))
        scores = score(self.sampler.policy, self._token_ids(tokens), num_likeliest)
        return [(one.logprob, one.likeliest) for one in scores]

    def _token_ids(self, tokens: bytes) -> np.ndarray:
        """Returns the token ids. Raises `ComputeError` for ids outside the vocabulary."""
        ids = np.frombuffer(tokens, np.int32)
        if not len(ids) or ids.min() < 0 or ids.max() >= self.policy.vocabulary:
            raise ComputeError(f"a prompt needs token ids between 0 and {self.policy.vocabulary - 1}")
        return ids

    def _sample(self, id: int, policy: dict[str, str], tokens: bytes, params: dict[str, Any]) -> None:
        self._require(PolicyId(**policy))
        prompt = self._token_ids(tokens)
        chosen = SamplingParams(**params)
        self.sampler.submit(id, prompt, chosen)
        self._pieces[id] = _Piece(chosen.piece_tokens)

    def _cancel(self, id: int) -> None:
        self.sampler.cancel(id)
        self._pieces.pop(id, None)

    def _sample_step(self) -> None:
        complete = []
        for new in self.sampler.step():
            piece = self._pieces[new.id]
            piece.tokens.append(new.token)
            piece.logprobs.append(new.logprob)
            piece.support.append(new.support)
            if new.error is not None:
                del self._pieces[new.id]
                self._send({"id": new.id, "error": type(new.error).__name__, "message": str(new.error)})
            elif new.finish_reason is not None or len(piece.tokens) >= piece.size:
                complete.append((new.id, piece, new.finish_reason))
        self._deliver(complete)

    def _deliver(self, complete: list[tuple[int, _Piece, FinishReason | None]]) -> None:
        if complete:
            tokens = [
                (id, piece.tokens, piece.logprobs, pack_sets(piece.support), reason) for id, piece, reason in complete
            ]
            self._send({"tokens": tokens, "version": self._version})
        for id, piece, reason in complete:
            if reason is None:
                self._pieces[id] = _Piece(piece.size)
            else:
                del self._pieces[id]

    def _change_version(self, version: int) -> None:
        """Send the tokens of the old weights with the old version, then drop the sampler's cache."""
        self._deliver([(id, piece, None) for id, piece in self._pieces.items() if piece.tokens])
        self._version, self._is_published = version, True
        self.sampler.invalidate()

    def _apply(self, op: Op, body: tuple[Any, ...], apply: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Apply an operation, or return the stored result of a repeated one. Raises `OperationConflict`."""
        self._require(op.policy_id)
        digest = body_digest(*body)
        if (stored := self._operations.repeated(op, digest)) is not None:
            return stored
        result = apply()
        self._operations.record(op, digest, result)
        return result

    def _forward_backward(
        self, operation: dict[str, Any], batch: dict[str, Any], loss: dict[str, Any]
    ) -> dict[str, Any]:
        def apply() -> dict[str, Any]:
            outputs = self.learner.forward_backward(TrainingBatch.from_wire(batch), LossSpec.from_wire(loss))
            trim_malloc()
            return {"metrics": dict(outputs.metrics), "num_steps": outputs.num_steps}

        return self._apply(Op(**operation), ("forward_backward", batch, loss), apply)

    def _optim_step(self, operation: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
        def apply() -> dict[str, Any]:
            self._is_published = False
            metrics = self.learner.optim_step(OptimizerConfig.model_validate(optimizer), self._version)
            trim_malloc()
            return metrics | self.fingerprints.changed()

        return self._apply(Op(**operation), ("optim_step", optimizer), apply)

    def _logprobs(self, policy: dict[str, str], batch: dict[str, Any], reference: bool) -> bytes:
        self._require(PolicyId(**policy))
        forest = TrainingBatch.from_wire(batch).forest
        found = self.learner.batch_logprobs(forest, LOGPROBS_TOKENS, reference=reference)
        return found.tobytes()

    def _publish(self, policy: dict[str, str], version: int) -> None:
        self._require(PolicyId(**policy))
        if not self._is_published or version != self._version:
            self._change_version(version)

    def _save(self, policy: dict[str, str], path: str) -> dict[str, Any]:
        self._require(PolicyId(**policy))
        if self.learner.has_gradient or not self._is_published:
            raise OperationConflict("a checkpoint needs a published policy without a pending gradient")
        log = self._operations.state()
        digest = checkpoint.save(Path(path), self.policy, self.learner, {"policy_version": self._version, **log})
        return {"policy_version": self._version, "digest": digest, "operation": self._operations.next}

    def _load(self, policy: dict[str, str], path: str) -> dict[str, Any]:
        self._require(PolicyId(**policy))
        state = checkpoint.load(Path(path), self.policy, self.learner)
        self.fingerprints.reset()
        self._change_version(state["policy_version"])
        self._operations = OperationLog.restored(state)
        return {
            "policy_version": self._version,
            "digest": state.get("digest", ""),
            "operation": self._operations.next,
        }

    def _export(self, policy: dict[str, str], path: str, adapter: bool = False) -> None:
        self._require(PolicyId(**policy))
        checkpoint.export(Path(path), self.policy, adapter=adapter)

    def _require(self, policy: PolicyId) -> None:
        """Raises `ComputeError` unless the worker has the policy."""
        if policy != self._policy_id:
            raise ComputeError(f"this worker has no policy {policy}: it has {self._policy_id}")

    def _send(self, frame: Frame) -> None:
        self._output.write(encode_frame(frame))
        self._output.flush()


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
