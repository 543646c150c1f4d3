"""The worker process: one loop that samples while anything is running and carries out the other verbs in between.

Started by `backend.EmbeddedCompute` with frames on standard input and output. A thread reads frames, so that a vanished
gateway ends the process at once, whatever the loop is at: nothing here must outlive it, since every fact that counts is
in the gateway's journal.

Memory that is freed goes back to the system.

glibc keeps it: it takes blocks of up to 32 MB from a heap whose holes stay resident, and those of a learner, of another
size in every batch, add up. Twelve batches of long conversations left 8 GB of holes.
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
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from agentjet.compute.embedded import checkpoint, worker_process
from agentjet.compute.embedded.fingerprint import Fingerprints
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.plain_sampler import RowSampler
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.sampler import PrefixSampler
from agentjet.compute.embedded.token_sampling import score
from agentjet.config import JobConfig, ModelConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError
from agentjet.timeline.forest import Forest
from agentjet.timeline.support import pack_sets
from agentjet.types import FinishReason, SamplingParams

ARRIVAL_GAP_SECONDS = 0.004
"""After a request, how long the sampler waits for another one before its next step ..."""
ARRIVALS_SECONDS = 0.05
"""... and for how long in all."""
_BY_ID = ("sample", "cancel")
"""Verbs that concern one completion and are answered by its tokens."""


@dataclasses.dataclass(slots=True)
class _Piece:
    """Tokens of a completion on their way to being delivered, `size` at a time."""

    size: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    support: list[bytes] = dataclasses.field(default_factory=list)


class Worker:
    """The state of the process: a policy, its sampler and learner, and the version its weights have."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._inbox: queue.SimpleQueue[worker_process.Frame] = queue.SimpleQueue()
        self._version = 0
        self._metrics: dict[int, dict[str, float]] = {}
        self._pieces: dict[int, _Piece] = {}
        self.policy: Policy
        self.sampler: PrefixSampler | RowSampler
        self.learner: PolicyLearner
        self.fingerprints: Fingerprints

    def read_forever(self, stream: BinaryIO) -> None:
        """The reader thread's work."""
        while (frame := worker_process.read(stream)) is not None:
            self._inbox.put(frame)
        os._exit(0)  # the gateway is gone

    def run(self) -> None:
        """The main loop; returns when asked to close."""
        arrivals_end = 0.0
        while True:
            frame = self._next_frame(arrivals_end)
            if frame is None:
                self._sample_step()
                arrivals_end = 0.0
                continue
            if frame["op"] == "close":
                return
            self._carry_out(frame)
            if frame["op"] == "sample":
                arrivals_end = arrivals_end or time.monotonic() + ARRIVALS_SECONDS

    def _next_frame(self, arrivals_end: float) -> worker_process.Frame | None:
        """The next verb; None when it is time for a step of the sampler.

        A step costs nearly the same for one request as for fifty, and requests come in flocks: after one has come,
        others are waited for, for a moment.
        """
        if not hasattr(self, "sampler") or self.sampler.is_idle:
            return self._inbox.get()
        try:
            if time.monotonic() < arrivals_end:
                return self._inbox.get(timeout=ARRIVAL_GAP_SECONDS)
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _carry_out(self, frame: worker_process.Frame) -> None:
        """One verb. The boundary where a failure becomes an answer; a failed `learn` may have half changed the
        weights, so it ends the process.
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
            if op == "learn":
                raise
        else:
            if op not in _BY_ID:
                self._send({"id": frame["id"], "ok": result})

    def _start(self, config: dict[str, Any], dtype: str) -> dict[str, Any]:
        settings = ServeConfig.model_validate(config)
        model = settings.model
        if dtype and model.dtype == "auto":  # What two timings find may differ.
            model = ModelConfig.model_validate({**config["model"], "dtype": dtype})
        self.policy = load_policy(model)
        sampler = PrefixSampler if self.policy.card.shares_prefixes else RowSampler
        self.sampler = sampler(self.policy, settings.sampler.max_concurrent, settings.sampler.cache_tokens)
        self.learner = PolicyLearner(self.policy)
        self.fingerprints = Fingerprints(self.learner, self.sampler.policy)
        return dataclasses.asdict(self.policy.card)

    def _score(self, tokens: bytes, num_likeliest: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        scores = score(self.sampler.policy, self._known(tokens), num_likeliest)
        return [(one.logprob, one.likeliest) for one in scores]

    def _known(self, tokens: bytes) -> np.ndarray:
        """Token ids of this model. Raises `ComputeError` for any other."""
        ids = np.frombuffer(tokens, np.int32)
        if not len(ids) or ids.min() < 0 or ids.max() >= self.policy.vocabulary:
            raise ComputeError(f"a prompt needs token ids between 0 and {self.policy.vocabulary - 1}")
        return ids

    def _sample(self, id: int, tokens: bytes, params: dict[str, Any]) -> None:
        prompt = self._known(tokens)
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
        """New weights: what the old ones sampled is delivered under their version, and their keys are forgotten."""
        self._deliver([(id, piece, None) for id, piece in self._pieces.items() if piece.tokens])
        self._version = version
        self.sampler.invalidate()

    def _learn(self, batch_id: int, forest: dict[str, Any], job: dict[str, Any]) -> dict[str, float]:
        if batch_id < self._version:
            return self._metrics.get(batch_id, {})
        if batch_id > self._version:
            raise ComputeError(
                f"batch {batch_id} was sent to a policy at version {self._version}: the batches between are missing"
            )
        metrics = self.learner.learn(Forest.from_wire(forest), JobConfig.model_validate(job), self._version)
        metrics |= self.fingerprints.changed()
        self._metrics = {batch_id: metrics}
        self._change_version(batch_id + 1)
        trim_malloc()
        return metrics

    def _save(self, path: str) -> dict[str, Any]:
        digest = checkpoint.save(
            Path(path),
            self.policy,
            self.learner,
            {"policy_version": self._version, "metrics": self._metrics.get(self._version - 1, {})},
        )
        return {"policy_version": self._version, "digest": digest}

    def _load(self, path: str) -> dict[str, Any]:
        state = checkpoint.load(Path(path), self.policy, self.learner)
        self.fingerprints.look()
        self._change_version(state["policy_version"])
        self._metrics = {self._version - 1: state.get("metrics", {})}
        return {"policy_version": self._version, "digest": state.get("digest", "")}

    def _export(self, path: str, adapter: bool = False) -> None:
        checkpoint.export(Path(path), self.policy, adapter=adapter)

    def _send(self, frame: worker_process.Frame) -> None:
        self._output.write(worker_process.encode(frame))
        self._output.flush()


def make_deterministic() -> None:
    """Equal inputs give equal weights. Memory that is about to be written is not filled first, as `torch` would do."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False


def main() -> None:
    """Serve the gateway at the other end of standard input and output until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the gateway decides
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up between the frames
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    make_deterministic()
    worker = Worker(output)
    threading.Thread(target=worker.read_forever, args=(sys.stdin.buffer,), daemon=True).start()
    worker.run()
    sys.stderr.flush()
    os._exit(0)  # the reader thread still holds standard input, which an orderly end of the interpreter would wait for


def trim_malloc() -> None:
    """Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
