"""A rank: a process that hosts policies for the server and learns them, alone or together with other ranks.

* A rank that joins no group samples, too, and hosts several policies: the worker of the embedded backend. Adapters
  share one base model and one sampler; a policy of full weights has both alone. One loop samples while completions run,
  and handles the other requests in between.
* Ranks that join a group learn one policy together, and publish its weights for the replicas. The server sends every
  request to every rank (`compute.ranks`). A failure that is not an `AgentJetError` ends the process: the other ranks
  may wait for it.

The server starts the process (`compute.backend`). It stores no facts: they are all in the server's journal.

    rendezvous() -> "HOST:PORT" (rank 0)          join(rank, num_ranks, address, timeout)
    add(model, sampler, compute) -> ModelInfo     remove, sample, cancel, score
    publish(version, wanted) -> Publication, or None without `wanted` and for a rank that samples
    load_batch, forward_backward, optim_step, save, load, export: see `Learner`
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from agentjet.compute import checkpoint
from agentjet.compute.group import RankGroup, Rendezvous, chosen_sharding, join
from agentjet.compute.learner import ROUTES_MEASURED, PolicyLearner
from agentjet.compute.memory import STATES_PER_COMPLETION, USABLE, Learning, SamplerRoom, embedded_need
from agentjet.compute.model import BaseModel, load_policy, reported_download
from agentjet.compute.passes import score
from agentjet.compute.policy import Policy, probe_tokens, resolve_device
from agentjet.compute.protocol import EMBEDDED, FINGERPRINT, LossSpec, OperationLog, Outputs, body_digest
from agentjet.compute.routes import ROUTE_MISMATCH
from agentjet.compute.sampler import ModelSampler
from agentjet.compute.token_choice import Guide
from agentjet.compute.transfers import SharedWeights, send
from agentjet.compute.weights import (
    PROBE_TOKENS,
    Publication,
    WeightsServer,
    publishes_adapter,
    write_adapter,
)
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig, SamplerConfig, SamplerLimits
from agentjet.errors import ComputeError, ConfigError, HookHung, OperationConflict, PolicyRemoved
from agentjet.processes.progress import PROGRESS
from agentjet.processes.rpc import Answer, Link, ProcessRequest, Send, answering
from agentjet.recipes import hooks
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import EVERYTHING, Row, build_forest
from agentjet.timeline.routes import Routes
from agentjet.types import (
    CheckpointStamp,
    FinishReason,
    ModelInfo,
    Op,
    PolicyId,
    Sampled,
    SamplingParams,
    TokenScore,
)

log = logging.getLogger(__name__)

ARRIVAL_GAP_SECONDS = 0.004
"""Seconds for which the sampler waits for another request before its next step."""
ARRIVALS_SECONDS = 0.05
"""Total limit of that wait."""
HOOK_CHECKS_PER_LIMIT = 10
_ENDING = ("forward_backward", "optim_step", "remove")
"""Requests whose failure ends the process, because gradients, weights or the sampler may be half changed."""
_COMPILED = "compiled"
"""The request of the process to itself to start the completion whose grammar its thread has compiled."""
_COUNTED = ("forward_backward", "optim_step", "score")
"""Requests whose code counts its steps. Others load, compile or write files: their CPU time shows progress."""
_UNANSWERED = ("sample", "cancel", _COMPILED)
"""Requests about one completion. Its tokens are the answer."""
_OF_RANK = ("rendezvous", "join", "add", "remove", "sample", "cancel", "score", _COMPILED)
"""Requests that the process handles itself. `PolicyHost` handles the others."""
LARGEST_ROUTE_MISMATCH = 1e-3
"""Share of differing choices up to which routes need not be recorded."""
GROWTH = 1.25
"""Growth since the first batch from which freed memory is returned."""
ROOM = 2.0
"""Available memory from which a process keeps what it freed, as a multiple of the memory that it has."""


# ---- policies --------------------------------------------------------------------------------------------------------


class PolicyHost:
    """Applies the requests of one policy, see `Learner`: each operation once, in order."""

    def __init__(
        self,
        learner: PolicyLearner,
        sampler: ModelSampler | None = None,
        deliver: Callable[[], None] = lambda: None,
        write: Callable[[int], Any] | None = None,
    ) -> None:
        """`sampler` shares the weights, and may serve other policies, too. Its tokens are sent by `deliver`.

        `write` writes the weights of a version for samplers that have a copy of them; returns a `Publication` on rank
        0. All ranks call it together.
        """
        self.policy = learner.policy
        self.learner = learner
        self.sampler = sampler
        self.version = 0
        self._deliver = deliver
        self._write = write
        self._publication: Any = None
        """That of the present weights, on rank 0."""
        self._is_published = True
        """False from an `optim_step` to the next `publish`."""
        self._operations = OperationLog()
        self._batch: TrainingBatch | None = None
        self._batch_digest = ""
        self._route_mismatches: list[float] = []
        """`ROUTE_MISMATCH` of the first batches with routes."""

    def load_batch(self, batch: TrainingBatch) -> None:
        self._batch, self._batch_digest = batch, body_digest(batch)

    def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        batch = self._batch
        if batch is None or batch.id != batch_id:
            raise ComputeError(f"policy {op.policy_id} does not have batch {batch_id}: load it first")
        body = ("forward_backward", self._batch_digest, loss)
        return self._operations.apply(op, body, lambda: self._learn(batch, loss))

    def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        return self._operations.apply(op, ("optim_step", optimizer), lambda: self._update(optimizer))

    def publish(self, version: int, wanted: bool = True) -> Any:
        """Give the present weights this version; returns their publication if one is `wanted`. Idempotent.

        Raises `ComputeError` for a file that cannot be written.
        """
        if not self._is_published or version != self.version:
            self._change_version(version)
        ranks = self.learner.ranks
        if wanted and self._write is not None:
            if not all(ranks.gather(ranks.rank != 0 or self._publication is not None)):
                self._publication = self._write(version)
            return self._publication
        return None

    def save(self, path: Path) -> CheckpointStamp:
        if self.learner.has_gradient or not self._is_published:
            raise OperationConflict("a checkpoint needs a published policy without a pending gradient")
        state: dict[str, Any] = {"policy_version": self.version, "operation": self._operations.next}
        if self.learner.recipe_states:
            state["recipe_states"] = self.learner.recipe_states
        return self._stamp(checkpoint.save(path, self.learner, state))

    def load(self, path: Path) -> CheckpointStamp:
        state = checkpoint.load(path, self.learner)
        self.learner.recipe_states = state.get("recipe_states", {})
        self._change_version(state["policy_version"])
        self._operations = OperationLog(state["operation"])
        return self._stamp(state["digest"])

    def export(self, path: Path, adapter: bool) -> None:
        checkpoint.export(path, self.learner, adapter=adapter)

    def _learn(self, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        """Add a gradient. With `model.expert_routes = "auto"`, stop recording routes if they make no difference.

        Separate samplers go on: their kernels are others.
        """
        outputs = self.learner.forward_backward(batch, loss)
        measured = self._route_mismatches
        if ROUTE_MISMATCH in outputs.metrics and len(measured) < ROUTES_MEASURED:
            measured.append(outputs.metrics[ROUTE_MISMATCH])
            if len(measured) == ROUTES_MEASURED and self.policy.measures_routes and self.sampler is not None:
                self.policy.records_routes = max(measured) > LARGEST_ROUTE_MISMATCH
                log.info(
                    "%s: at most %.4f of the expert choices differ between sampling and learning: routes are %s",
                    self.policy.info.name, max(measured), "recorded" if self.policy.records_routes else "not recorded",
                )  # fmt: skip
        return outputs

    def _update(self, optimizer: OptimizerConfig) -> dict[str, float]:
        """Change the weights; returns metrics."""
        if self.sampler is not None:
            self.sampler.paused.add(self.policy)  # Until the next `publish`, because it shares the weights.
        self._is_published = False
        with PROGRESS.long_step(self.learner.masters()[0].device.type == "cpu"):
            metrics = self.learner.optim_step(optimizer, self.version) | self.learner.weights_changed()
        metrics[FINGERPRINT] = float(self.learner.fingerprint)
        if self.learner.ranks.mesh is not None:
            metrics["learner/ranks"] = float(self.learner.ranks.num_ranks)
        HEAP.settle()
        return metrics

    def _change_version(self, version: int) -> None:
        """Name the present weights with this version. Frees the batch that led to it.

        Sends the tokens of the old weights with the old version, then drops the cached keys of this policy.
        """
        self._deliver()
        self.version, self._is_published, self._batch, self._publication = version, True, None, None
        if self.sampler is not None:
            self.sampler.invalidate(self.policy)

    def _stamp(self, digest: str) -> CheckpointStamp:
        return CheckpointStamp(self.version, digest, self._operations.next)


class Heap:
    """Freed memory that the C library keeps for the next batch, see `WORKER_VARIABLES`.

    A batch's blocks differ in size from those before, so gaps may add up: 8 GB after twelve batches of long
    conversations without `trim`.
    """

    def __init__(self) -> None:
        self._needed = 0

    def settle(self) -> None:
        """After a batch: keep freed memory for the next one, unless gaps add up or other programs may need it."""
        resident = psutil.Process().memory_info().rss
        self._needed = self._needed or resident
        if resident > GROWTH * self._needed or psutil.virtual_memory().available < ROOM * resident:
            self.trim()

    def trim(self) -> None:
        """Return freed memory to the system; does nothing if the C library is not glibc."""
        self._needed = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


HEAP = Heap()
"""That of the process."""


def publish(
    learner: PolicyLearner,
    server: WeightsServer | None,
    version: int,
    *,
    is_hot: bool,
    shared: SharedWeights | None = None,
) -> Publication | None:
    """Write the weights of a version for the replicas, with all ranks; returns the publication on rank 0.

    `server` is that of rank 0, which writes the weights of all ranks. `is_hot` is the result of `publishes_adapter`.
    With `shared`, whole weights stay in memory that the replica reads. Raises `ComputeError` if neither is possible.
    """
    policy = learner.policy
    tokens = probe_tokens(policy, PROBE_TOKENS).cpu().numpy().astype(np.int32)
    logprobs = learner.logprobs(build_forest([Row(tokens, slice(1, None), {})])).double().cpu()
    weights = learner.adapter_weights() if is_hot else learner.whole_weights()
    adapter = ""

    def save(path: Path) -> None:
        nonlocal adapter
        if is_hot:
            adapter = write_adapter(policy.model, weights, path)
        else:
            write_weights(policy, weights or {}, path)

    def write() -> Publication | None:
        if server is None:
            return None
        sent = policy.trainable() if is_hot else weights or {}
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
        probe = policy.info.dtype, tuple(tokens.tolist()), tuple(logprobs.tolist())
        if shared is not None and not is_hot:
            handles = shared.handles(file_weights(base_model(policy), weights or {}), policy.model)
            return Publication(version, server.address, "", num_bytes, os.urandom(8).hex(), *probe, handles=handles)
        path, digest = server.write(version, num_bytes, save)
        return Publication(version, server.address, str(path), path.stat().st_size, digest, *probe, adapter)

    return learner.ranks.agreed(write)


def write_weights(policy: Policy, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write all weights of a base model to one safetensors file, with the names of the model's own files."""
    folder = path.with_suffix("")
    base_model(policy).save_pretrained(folder, state_dict=weights, max_shard_size=1 << 62)
    (folder / "model.safetensors").rename(path)
    shutil.rmtree(folder)


def file_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights that `write_weights` writes, with their names there, without a copy where possible."""
    saved = {name: one for name, one in weights.items() if name not in (model._keys_to_ignore_on_save or ())}
    found: dict[str, torch.Tensor] = revert_weight_conversion(model, remove_tied_weights_from_state_dict(saved, model))
    return found


def base_model(policy: Policy) -> Any:
    """Returns the model of transformers, without adapters."""
    model: Any = policy.model
    return model.get_base_model() if policy.has_adapters else model


# ---- the process -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Piece:
    """Sampled tokens of a completion that are not sent yet."""

    hosted: PolicyHost
    params: SamplingParams
    sent_at: float = -1.0
    """Time of the piece before; -1 if this is the first."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: dict[int, bytes] = field(default_factory=dict)
    """Sets of the tokens that were not chosen from the whole vocabulary, by position."""
    routes: list[np.ndarray] = field(default_factory=list)
    num_routed: int = 0
    """Tokens before the first of `routes`."""

    def sampled(self, reason: FinishReason | None) -> Sampled:
        support: tuple[bytes, ...] = ()
        shape, routes = self.hosted.policy.info.routes, b""
        if self.support:
            support = tuple(self.support.get(at, EVERYTHING) for at in range(len(self.tokens)))
        if self.routes and shape is not None:
            found = Routes(self.num_routed, self.hosted.version, np.concatenate(self.routes))
            self.num_routed, routes = found.stop, found.pack(shape.experts)
        return Sampled(tuple(self.tokens), tuple(self.logprobs), self.hosted.version, reason, support, routes)

    def clear(self) -> None:
        """Begin the next piece."""
        for column in (self.tokens, self.logprobs, self.support, self.routes):
            column.clear()


class Rank:
    """The state of the process: its place in a group, policies by id, and the completions of all of them."""

    def __init__(self, send: Send, host: str = "127.0.0.1", secret: bytes = b"") -> None:
        """`send` sends a message to the server, from any thread.

        `host` is the address of this machine for other ranks and replicas, `secret` that of their connections.
        """
        self._host = host
        self._secret = secret
        self._meeting: Rendezvous | None = None
        self._place: tuple[int, int] | None = None
        """Rank and number of ranks of the group that it joined."""
        self._server: WeightsServer | None = None
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
            request = self.next_request(arrivals_end)
            if request is None:
                with PROGRESS.counted():
                    self.sample_step()
                arrivals_end = 0.0
                continue
            self.answer(request)
            if request.op == "sample":
                arrivals_end = arrivals_end or time.monotonic() + ARRIVALS_SECONDS

    def handle(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """Handle one request; returns its result. Raises `AgentJetError`, or anything else for a bug."""
        if op in _OF_RANK:
            return getattr(self, f"_{op}")(policy, *args)
        return getattr(self._hosted(policy), op)(*args)

    def next_request(self, arrivals_end: float) -> ProcessRequest | None:
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

    def answer(self, request: ProcessRequest) -> None:
        """Handle a request. Raises a failure that may have left half a change."""
        op, id, policy, args = self.present = request
        assert policy is not None
        with answering(request, self._send, ends=lambda error: self._place is not None or op in _ENDING):
            with PROGRESS.counted() if op in _COUNTED else nullcontext():
                result = self.handle(op, policy, *args)
            if op not in _UNANSWERED:
                self._send(Answer(id, result))

    def close(self) -> None:
        """Remove the files of this rank. Idempotent."""
        if self._server is not None:
            self._server.close()

    def _rendezvous(self, policy: PolicyId) -> str:
        self._meeting = Rendezvous(self._host)
        return self._meeting.address

    def _join(self, policy: PolicyId, rank: int, num_ranks: int, address: str, timeout: float) -> None:
        join(rank, num_ranks, address, self._meeting, self._host, timeout)
        self._place = rank, num_ranks
        if rank == 0:
            self._server = WeightsServer(self._host, self._secret)

    def _add(
        self, policy: PolicyId, model: ModelConfig, sampler: SamplerConfig, compute: ComputeConfig = EMBEDDED
    ) -> ModelInfo:
        """Host a policy: as a rank of the group that this process joined, or alone with a sampler."""
        self._remove(policy)
        if self._place is not None:
            hosted = self._as_rank(model, compute, *self._place)
        else:
            hosted = self._with_sampler(policy, model, sampler)
        self.policies[policy] = hosted
        return hosted.policy.info

    def _as_rank(self, model: ModelConfig, compute: ComputeConfig, rank: int, num_ranks: int) -> PolicyHost:
        device = resolve_device(model.device)
        if (device.type == "cpu" or model.offload_optimizer) and not model.threads:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))  # The ranks share this machine.
        group = RankGroup(rank, num_ranks, device)
        if self._server is not None and compute.weight_transfer == "nccl":
            # For groups made from now on: one with a replica that died must not end the rank. See `nccl_variables`.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
            self._server.send = partial(send, host=self._host, device=device)
        shared = SharedWeights() if compute.weight_transfer == "ipc" else None
        policy = group.agreed(lambda: load_policy(model))
        sharding = chosen_sharding(compute.sharding, policy, group)
        log.info("rank %d of %d learns %s, %s", rank, num_ranks, model.name, sharding)
        learner = group.agreed(lambda: PolicyLearner(policy, group, sharding))
        is_hot = publishes_adapter(model.lora, policy.config.architectures)

        def write(version: int) -> Publication | None:
            publication = publish(learner, self._server, version, is_hot=is_hot, shared=shared)
            if compute.colocated:
                torch.cuda.empty_cache()  # The replicas need the memory now.
            return publication

        return PolicyHost(learner, write=write)

    def _with_sampler(self, policy: PolicyId, model: ModelConfig, settings: SamplerConfig) -> PolicyHost:
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
            sampler = None
        loaded = base.policy_of(model)
        if sampler is None:
            limits = sampler_limits(loaded, settings)
            log.info("%s: %d completions are sampled at a time, in a cache of %d tokens", model.name, *limits)
            sampler = ModelSampler(base.policy, *limits)
        hosted = PolicyHost(PolicyLearner(loaded), sampler, lambda: self._flush(policy))
        if loaded.has_adapters:
            self._shared = base, sampler
        return hosted

    def _adapters(self) -> list[PolicyId]:
        return [policy for policy, hosted in self.policies.items() if hosted.policy.has_adapters]

    def _remove(self, policy: PolicyId) -> None:
        """Free a policy. The base model of adapters is freed with the last of them."""
        if (hosted := self.policies.pop(policy, None)) is not None:
            compiling = [id for id, (of, _) in self._compiling.items() if of == policy]
            for id in [*compiling, *(id for id, piece in self._pieces.items() if piece.hosted is hosted)]:
                self._cancel(policy, id)
                self._send(Answer(id, error=PolicyRemoved(f"the policy {policy} was removed from the worker")))
            if hosted.sampler is not None:
                hosted.sampler.invalidate(hosted.policy)
            del hosted
        if not self._adapters():
            self._shared = None
        gc.collect()
        HEAP.trim()

    def _score(self, policy: PolicyId, tokens: np.ndarray, num_likeliest: int) -> list[TokenScore]:
        hosted = self._hosted(policy)
        _check_tokens(hosted, tokens)
        with PROGRESS.long_step(hosted.policy.device.type == "cpu"):
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
        self._pieces[id] = _Piece(hosted, params, num_routed=params.routes_from or 0)

    def _cancel(self, policy: PolicyId, id: int) -> None:
        """Drop a completion, unless it has ended."""
        if id in self._compiling:
            self._compiling.pop(id)[1].cancel()
        if (piece := self._pieces.pop(id, None)) is not None:
            _sampler_of(piece.hosted).cancel(id)

    def _samplers(self) -> list[ModelSampler]:
        return list(dict.fromkeys(host.sampler for host in self.policies.values() if host.sampler is not None))

    def sample_step(self) -> None:
        complete: dict[int, FinishReason | None] = {}
        stepped = [sampler.step() for sampler in self._samplers()]
        now = time.monotonic()
        for new in stepped:
            for id, token, logprob in zip(new.ids, new.tokens, new.logprobs, strict=True):
                piece = self._pieces[id]
                piece.tokens.append(token)
                piece.logprobs.append(logprob)
                if piece.params.is_due(len(piece.tokens), piece.sent_at, now):
                    complete[id] = None
            for at, members in enumerate(new.support or ()):
                if members != EVERYTHING:
                    piece = self._pieces[new.ids[at]]
                    piece.support[len(piece.tokens) - 1] = members
            for at, routes in new.routes.items():
                self._pieces[new.ids[at]].routes.append(routes)
            complete.update({new.ids[at]: reason for at, reason in new.reasons.items()})
            for at, error in new.errors.items():
                complete.pop(new.ids[at], None)
                del self._pieces[new.ids[at]]
                self._send(Answer(new.ids[at], error=error))
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
            if reason is None:
                self._pieces[id].clear()
                self._pieces[id].sent_at = time.monotonic()
            else:
                del self._pieces[id]

    def _hosted(self, policy: PolicyId) -> PolicyHost:
        if policy not in self.policies:
            raise PolicyRemoved(f"the worker has no policy {policy}")
        return self.policies[policy]


def _sampler_of(hosted: PolicyHost) -> ModelSampler:
    assert hosted.sampler is not None, "replicas sample the policies of a group"
    return hosted.sampler


def _check_tokens(hosted: PolicyHost, tokens: np.ndarray) -> None:
    """Raises `ComputeError` for an empty prompt, and for ids outside the vocabulary."""
    vocabulary = hosted.policy.vocabulary
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ComputeError(f"a prompt needs token ids between 0 and {vocabulary - 1}")


def sampler_limits(policy: Policy, settings: SamplerConfig) -> SamplerLimits:
    """Returns the numbers of the sampler in this process, by the memory of its device beside a policy and its learner.

    Raises `ConfigError` for numbers that the memory does not hold.
    """
    learned = sum(p.numel() for p in policy.trainable().values())
    learning = Learning(policy.dtype.itemsize, learned, offload=policy.offloads_optimizer)
    need = embedded_need(sum(p.numel() for p in policy.model.parameters()), learning)
    if on_cuda := policy.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(policy.device)
        left, kept = free - need.total + need.weights, int((1 - USABLE) * total)
    else:
        left, kept = psutil.virtual_memory().total - need.total, 0
    values = sum(sizes.kv_heads * (sizes.key_dim + sizes.value_dim) for sizes in policy.cache_shape.values())
    states = sum(math.prod(size.shape) * size.dtype.itemsize for size in policy.state_shape.values())
    shares = policy.info.shares_prefixes
    room = SamplerRoom(
        left,
        kept,
        by_token=shares * policy.dtype.itemsize * values,
        by_row=shares * STATES_PER_COMPLETION * states,
        context=policy.info.context_length,
    )
    return room.limits(settings, on_cuda=on_cuda)


def make_deterministic() -> None:
    """Make torch deterministic. New tensors stay uninitialised, because filling them would cost time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False


def end_overdue(limit: float, request: Callable[[], ProcessRequest | None], send: Send) -> None:
    """Start a thread that ends the process when a hook of a recipe takes more than `limit` seconds.

    A hook in an endless loop uses CPU time, which is progress because a hook counts no steps. The thread reports the
    hook first. `request` returns the request that the process works on. A hook that holds Python's lock in C stops the
    thread, and the signs of work: the watchdog ends the process.
    """
    text = f"{limit:g} s (server.hook_timeout)"
    PROGRESS.is_limited = lambda: bool(hooks.RUNNING)

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
    """Serve the server until it closes the connection. A failure exits without the collectives of an orderly end."""
    link = Link.of_program()
    make_deterministic()
    rank = Rank(link.send, link.local_host, link.secret)
    link.before_exit = rank.close
    link.read_forever(rank.inbox.put)
    end_overdue(float(sys.argv[1]), lambda: rank.present, link.send)
    try:
        rank.run()
    finally:
        link.exit(1)
