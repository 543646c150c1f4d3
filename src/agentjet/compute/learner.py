"""Learning on a forest: log-probabilities of the targets, gradients of a loss, optimiser steps.

* bfloat16 weights have masters and moments in float32.
* Masters, moments and gradients are on the weights' device, or on the CPU if the policy offloads its optimiser.
* `passes` gives log-probabilities, of the learning policy, the old policy and the reference alike.
* The state of the recipe changes with an optimiser step, and is saved with the weights.
* Deterministic: equal weights, optimiser state and batch give equal weights, bit by bit, on one number of threads or
  ranks.

With several ranks, every rank receives the whole batch. Advantages, loss weights and mini-batches are computed on the
whole batch. Then each rank computes its part of the forest (`part_of`), and gradients are summed. So any number
of ranks gives the gradient of one within rounding.

* *gathered*: each rank has all weights and its own gradients. Masters and moments are divided among the ranks.
  Ranks meet once a mini-batch, so any pass works, with any number of micro-batches.
* *sharded*: the decoder's layers are divided, too (FSDP2). They are gathered for each pass and freed after it. So ranks
  do equal numbers of passes: a rank with fewer micro-batches fills in passes over one node without a target. Prefixes
  are not kept between micro-batches. Embeddings, norms and head stay gathered, because tied weights have two users.

Tensors of the model travel over NCCL on CUDA and over gloo elsewhere, arrays and errors over gloo. Collectives of
offloaded tensors are those of gloo, because their mesh stays that of the device. All ranks call the same methods in the
same order. Never run: NCCL. There was no machine with several GPUs.

Invariant: gathered weights are equal on all ranks, bit by bit. `weights_changed` checks it.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_

from agentjet.compute.memory import USABLE, Learning, gathered_need
from agentjet.compute.model import decoder_layers
from agentjet.compute.passes import Pass, Teacher, ValueModel, chunks, measured, numbers, pass_of, to_device
from agentjet.compute.policy import Policy, merged_weights, summed
from agentjet.compute.protocol import LossSpec, Outputs, means
from agentjet.compute.routes import OWN_ROUTES_KL, ROUTE_MISMATCH
from agentjet.config import OptimizerConfig
from agentjet.errors import AgentJetError, ComputeError, ConfigError
from agentjet.processes.rpc import host_and_port, listen
from agentjet.recipes import hooks
from agentjet.recipes.losses import kl_k3
from agentjet.recipes.policy_gradient import MISMATCH
from agentjet.recipes.recipe import Recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, part_of, restrict, select

Result = TypeVar("Result")
Number = TypeVar("Number", bound=np.generic)
Sharding = Literal["gathered", "sharded"]

TIMEOUT = timedelta(hours=12)
"""Limit of one collective. The gateway detects ranks that died; this ends only a group that it forgot."""
JOIN_TIMEOUT = timedelta(minutes=10)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankGroup:
    """The ranks that learn together. `mesh` has one dimension; without a mesh, this process learns alone."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, device: torch.device | None = None) -> None:
        """With a device, the process group of `torch.distributed` must exist."""
        self.rank = rank
        self.num_ranks = num_ranks
        self.mesh: DeviceMesh | None = None if device is None else init_device_mesh(device.type, (num_ranks,))

    def sum(self, values: NDArray[Number]) -> NDArray[Number]:
        """Returns the sum of equally shaped arrays of all ranks."""
        if self.mesh is None:
            return values
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total)
        return total.numpy()

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank. They must be small."""
        values: list[Any] = [value] * self.num_ranks
        if self.mesh is not None:
            dist.all_gather_object(values, value)
        return values

    def agreed(self, action: Callable[[], Result]) -> Result:
        """Call an action on every rank; returns this rank's result.

        An `AgentJetError` of any rank is raised on all of them, so that none waits for one that gave up. The action
        must not call other ranks after something that can fail on this rank only.
        """
        result, error = None, None
        try:
            result = action()
        except AgentJetError as raised:
            error = raised
        for found in self.gather(error):
            if found is not None:
                raise found from error
        return result  # type: ignore[return-value]  # Without an error there is a result.


def fingerprint(weights: Sequence[Tensor], ranks: RankGroup, known: dict[int, Tensor]) -> int:
    """Returns one number for all bits of some weights, which does not depend on the number of ranks.

    `known` caches the sums of tensors by id. 135 million weights in bfloat16 and their masters take 27 ms on two cores.
    Raises `RuntimeError` if weights that every rank has whole differ between ranks.
    """
    for tensor in weights:
        if id(tensor) in known:
            continue
        if isinstance(tensor, DTensor):
            # As `torch.chunk` divides the rows: the last ranks may have fewer, or none.
            rows = -(-len(tensor) // ranks.num_ranks) if tensor.dim() else 0
            known[id(tensor)] = summed(tensor.to_local(), ranks.rank * rows)
        else:
            known[id(tensor)] = summed(tensor)
    sums = torch.stack([known[id(tensor)].to(weights[0].device) for tensor in weights])
    if ranks.mesh is not None:
        is_part = np.array([isinstance(w, DTensor) and w.placements[0].is_shard() for w in weights])
        numbers = sums.cpu().numpy()
        if len({whole.tobytes() for whole in ranks.gather(numbers[~is_part])}) > 1:
            raise RuntimeError("the weights of the ranks differ, which would train another policy on each")
        sums = torch.from_numpy(np.where(is_part, ranks.sum(numbers), numbers))
    return int(summed(sums))


def shard_layers(policy: Policy, ranks: RankGroup) -> list[nn.Module]:
    """Divide the weights of the decoder's layers among the ranks; returns the layers.

    Trained bfloat16 weights become float32 masters, from which FSDP makes the bfloat16 weights of a pass.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    layers = decoder_layers(policy, "compute.sharding = 'sharded'")
    is_cuda = policy.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=is_cuda) if policy.offloads_optimizer else OffloadPolicy()
    for layer in layers:
        types = {p.dtype for p in layer.parameters()}
        is_half = torch.bfloat16 in types
        if is_half and len(types) > 1:
            raise ConfigError(
                f"compute.sharding = 'sharded': layers of {policy.info.name!r} hold float32 weights beside bfloat16 "
                "ones, which this mode would round: use 'gathered'"
            )
        for p in layer.parameters():
            if is_half and p.requires_grad:
                p.data = p.data.float()
        fully_shard(
            layer,
            mesh=ranks.mesh,
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if is_half else None,
                reduce_dtype=torch.float32 if is_half else None,
                cast_forward_inputs=False,
            ),
            offload_policy=offload,
        )
    inside = {p for layer in layers for p in layer.parameters()}
    fully_shard(
        policy.decoder,
        mesh=ranks.mesh,
        mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        ignored_params={p for p in policy.decoder.parameters() if p not in inside},
    )
    for module in policy.decoder.modules():
        if isinstance(module, FSDPModule):  # Loss weights are those of the whole batch, so gradients are summed.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return layers


def chosen_sharding(wanted: Literal["auto", "gathered", "sharded"], policy: Policy, group: RankGroup) -> Sharding:
    """Returns the mode of a group: `auto` is `gathered` for one rank, or if that fits the memory of every rank."""
    if wanted != "auto":
        return wanted
    if group.num_ranks == 1:
        return "gathered"
    if policy.device.type == "cuda":
        memory = torch.cuda.get_device_properties(policy.device).total_memory
    else:
        memory = psutil.virtual_memory().total // group.num_ranks
    numbers = [p.numel() for p in policy.model.parameters()]
    trained = sum(p.numel() for p in policy.trainable().values())
    offload = policy.offloads_optimizer and policy.device.type == "cuda"
    need = gathered_need(sum(numbers), Learning(policy.dtype.itemsize, trained, offload), ranks=group.num_ranks)
    fits = need.total <= USABLE * memory
    return "gathered" if all(group.gather(fits)) else "sharded"


class Rendezvous:
    """The place at which the ranks of a new group meet. It belongs to rank 0."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host` only."""
        listener, self.address = listen(host)
        self.store = TCPStore(
            *host_and_port(self.address),
            is_master=True,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join(rank: int, num_ranks: int, address: str, rendezvous: Rendezvous | None, host: str) -> None:
    """Meet the other ranks at the address of rank 0's rendezvous. `host` is the address of this machine."""
    for variable in INTERFACES:
        if interface := interface_of(host):
            os.environ.setdefault(variable, interface)
    if rendezvous is not None:
        store = rendezvous.store
    else:
        store = TCPStore(*host_and_port(address), is_master=False, timeout=JOIN_TIMEOUT)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)


def interface_of(host: str) -> str:
    """Returns the network interface that has an address; empty if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    return ""


# ---- the learner -----------------------------------------------------------------------------------------------------

TOKENS_COMPUTED = "forest/tokens_computed"
SLOPE = "slope of "
"""Beginning of the names of columns with derivatives of a `batch_loss`."""
NOT_FINITE = "recipe/not_finite"
"""Sum over the tokens of a mini-batch; not a metric."""
REPEATED = "moe/repeated"
"""Number of repeated choices; not a metric."""
ROUTES_MEASURED = 2
"""Number of first batches with routes that are also computed without them, to see what repeating them changes."""


@dataclass(frozen=True, slots=True)
class _PreparedBatch:
    """A batch with its columns, as the first `forward_backward` on it made it."""

    batch_id: int
    loss: LossSpec
    forest: Forest
    metrics: Mapping[str, float]
    steps: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of the steps so far."""

    @property
    def steps_per_epoch(self) -> int:
        return max(1, min(self.loss.recipe.mini_batches, self.forest.num_sequences))

    @property
    def num_steps(self) -> int:
        return self.loss.recipe.epochs * self.steps_per_epoch

    def mini_batch(self, step: int) -> Forest:
        """Returns the whole sequences of one optimiser step. Each epoch deals them at random."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self.steps_per_epoch == 1:
            return self.forest
        sequences = np.unique(self.forest["sequence"])
        np.random.default_rng([abs(s) for s in (self.loss.seed, self.batch_id, epoch)]).shuffle(sequences)
        chosen = np.array_split(sequences, self.steps_per_epoch)[number]
        return select(self.forest, np.isin(self.forest["sequence"], chosen))


class PolicyLearner:
    """Owns the masters and the optimiser of one policy, or a rank's part of them.

    All ranks call the same methods in the same order.
    """

    def __init__(self, policy: Policy, ranks: RankGroup | None = None, sharding: Sharding = "gathered") -> None:
        """Divides the layers of `policy` in place if `sharded`. Raises `ConfigError` for a model that cannot be."""
        self.policy = policy
        self.ranks = ranks or RankGroup()
        self._layers = shard_layers(policy, self.ranks) if sharding == "sharded" else []
        self._pass = self._make_pass()
        self._float = np.float64 if policy.dtype == torch.float64 else np.float32
        self._params = policy.trainable()
        self._sums: dict[str, Tensor] = {}
        """Gradients of this process since the last reduction, by name, in the type of the masters."""
        self._masters = {name: self._make_master(p) for name, p in self._params.items()}
        self._optimizer = torch.optim.AdamW(self.masters(), lr=0.0, fused=True)
        self.recipe_states: dict[str, Mapping[str, float]] = {}
        """States of recipes by name, without empty ones."""
        self._next_states: dict[str, Mapping[str, float]] | None = None
        """The same after the batch. The optimiser step after its last `forward_backward` adopts them."""
        self._values: ValueModel | None = None
        """The heads of the last recipe that had some."""
        self._teacher: Teacher | None = None
        self._num_measured = 0
        """Batches that were computed without their routes."""
        self._reference: dict[str, Tensor] | None = None
        self._prepared: _PreparedBatch | None = None
        """The batch between its first and its last step."""
        self._contributed = False
        """True if a target contributed to the loss since the last optimiser step."""
        self._fingerprints: dict[str, int] = {}
        self.weights_changed()
        if self._layers:
            # FSDP notes at its first pass which weights learn. That must not be a pass of the reference, because an
            # adapter that is switched off counts as frozen.
            self.logprobs(build_forest([Row(np.zeros(1, np.int32), slice(0), {})]))

    def forward_backward(self, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        """Add the gradient of one mini-batch to the accumulated gradient; returns its metrics.

        A failure changes nothing. Raises `ComputeError` if a later step of a batch comes without its first step.
        """
        with self._undone_on_failure():
            return self._forward_backward(batch, loss)

    def _forward_backward(self, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        if loss.step == 0:
            self._prepared = self._prepare(batch, loss)
        prepared = self._prepared
        if prepared is None or (prepared.batch_id, prepared.loss) != (batch.id, replace(loss, step=0)):
            raise ComputeError(f"step {loss.step} of batch {batch.id} came without step 0 of the same batch and loss")
        if loss.step >= prepared.num_steps:
            raise ComputeError(f"step {loss.step} of batch {batch.id} is not one of its {prepared.num_steps} steps")
        metrics = self._add_gradient(prepared.mini_batch(loss.step), loss.recipe, loss)
        if loss.step == 0:
            metrics |= prepared.metrics
        else:  # Only before the first optimiser step the learner has the weights that sampled.
            metrics.pop(MISMATCH, None)
            metrics.pop(ROUTE_MISMATCH, None)
        steps = [*prepared.steps, metrics]
        if loss.step == prepared.num_steps - 1:
            state = hooks.next_state(loss.recipe, self._state_of(loss.recipe), means(steps))
            states = {**self.recipe_states, loss.recipe.name: state}
            self._next_states = {name: values for name, values in states.items() if values}
            self._prepared = None
        prepared.steps.append(metrics)
        return Outputs(metrics, num_steps=prepared.num_steps)

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Context of a `forward_backward`. After a failure the gradient is that of the operations before it."""
        before = self._prepared, self._next_states, self._contributed, self._values
        heads = None if self._values is None else self._values.heads
        accumulated = self._take_gradients()
        try:
            yield
        except BaseException:
            self._take_gradients()
            self._pass.forget()
            self._prepared, self._next_states, self._contributed, self._values = before
            if self._values is not None and heads is not None:
                self._values.heads = heads
            raise
        finally:
            for tensor, gradient in accumulated:
                tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)

    def _take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Remove the gradients of masters, weights and value heads; returns them beside their tensors."""
        self._sums.clear()
        tensors = [*self.masters(), *self._params.values()]
        tensors += [] if self._values is None else [self._values.weights]
        taken: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:  # Some masters are the weights themselves.
            if tensor.grad is not None:
                taken.append((tensor, tensor.grad))
                tensor.grad = None
        return taken

    def optim_step(self, optimizer: OptimizerConfig, version: int) -> dict[str, float]:
        """Apply the accumulated gradient; returns metrics. `version` is the policy version, for the schedule.

        If no target contributed since the last step, no weight changes, not even by momentum. A norm that is not finite
        skips the step. The metrics show both, with the norm before clipping.
        """
        masters = self.masters()
        contributed, self._contributed = self._contributed, False
        norm = self._change_masters(masters, optimizer, version) if contributed else 0.0
        is_finite = math.isfinite(norm)
        if is_finite and self._next_states is not None:
            self.recipe_states = self._next_states
        self._next_states = None
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "optim/grad_norm": norm,
            "optim/skipped_steps": float(not is_finite),
            "optim/lr": learning_rate(optimizer, version),
            "optim/steps": float(contributed),
            "weights/finite": float(math.isfinite(self._norm(masters))),
        }

    def _change_masters(self, masters: Sequence[Tensor], optimizer: OptimizerConfig, version: int) -> float:
        """Make a step of the optimiser; returns the norm of the gradient before clipping.

        A norm that is not finite changes nothing, and neither does a gradient of the value heads that is not finite.
        """
        betas, rate = (optimizer.beta1, optimizer.beta2), learning_rate(optimizer, version)
        for group in self._optimizer.param_groups:
            group.update(lr=rate, betas=betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)
        for master in masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        total_norm = self._norm([cast(Tensor, master.grad) for master in masters])
        clip_grads_with_norm_(masters, optimizer.max_grad_norm or math.inf, total_norm)
        norm = float(total_norm)
        if self._values is not None and not self._values.has_finite_gradient:
            norm = math.nan
        if math.isfinite(norm):
            self._optimizer.step()
            self._copy_masters()
        if self._values is not None:
            if math.isfinite(norm):
                self._values.step()
            self._values.drop_gradient()
        return norm

    @property
    def has_gradient(self) -> bool:
        """True between a `forward_backward` and the next `optim_step`."""
        return any(master.grad is not None for master in self.masters())

    def _prepare(self, batch: TrainingBatch, loss: LossSpec) -> _PreparedBatch:
        heads = hooks.declared(loss.recipe, "value_heads")
        if heads is not None:
            if self._values is None or self._values.heads.names != heads.names:
                self._values = ValueModel(heads, self.policy)
            self._values.heads = heads
        self._check_routes(batch.forest)
        outputs = self._outputs(batch.forest, loss.recipe, loss.micro_batch_tokens)
        forest = batch.forest.with_columns(**outputs)
        batch = replace(batch, forest=forest, state=self._state_of(loss.recipe))
        prepared, metrics = hooks.columns(loss.recipe, batch, outputs)
        return _PreparedBatch(batch.id, loss, prepared, {**metrics, **self._without_routes(forest, loss)})

    def _check_routes(self, forest: Forest) -> None:
        shape = self.policy.info.routes
        if forest.routes is None or shape is None:
            return
        found, wanted = forest.routes.shape[1:], (len(shape.layers), shape.choices)
        if found != wanted or forest.routes.max(initial=-1) >= shape.experts:
            raise ComputeError(
                f"the batch has routes of {found} routers and choices, the model {wanted} of {shape.experts} experts: "
                "they were recorded with another model; set model.expert_routes = 'off'"
            )

    def _without_routes(self, forest: Forest, loss: LossSpec) -> dict[str, float]:
        """Returns the mismatch of the first batches if their routes are not repeated."""
        if forest.routes is None or self.policy.info.routes is None or self._num_measured >= ROUTES_MEASURED:
            return {}
        self._num_measured += 1
        plain = replace(forest, routes=None)
        logp = self._of_batch(plain, ["proximal"], loss.micro_batch_tokens)["proximal"]
        return {OWN_ROUTES_KL: float(kl_k3(*(torch.from_numpy(x) for x in (forest["logprob"], logp))).mean())}

    def _state_of(self, recipe: Recipe) -> Mapping[str, float]:
        return self.recipe_states.get(recipe.name, {})

    def _outputs(self, forest: Forest, recipe: Recipe, max_tokens: int) -> dict[str, NDArray[np.float32]]:
        """Returns the numbers [M] of each of the recipe's `needs` and value heads."""
        needs, heads = hooks.declared(recipe, "needs"), hooks.declared(recipe, "value_heads")
        own: list[str] = sorted(needs - {"reference", "teacher"})
        own += heads.names if heads is not None else ()
        outputs = self._of_batch(forest, own, max_tokens) if own else {}
        if "reference" in needs:
            with self._reference_weights():
                outputs["reference"] = self._of_batch(forest, ["proximal"], max_tokens)["proximal"]
        if "teacher" in needs:
            folder = hooks.declared(recipe, "teaching").sources[0]
            if self._teacher is None or self._teacher.folder != folder:
                self._teacher = None  # Frees the memory of another one.
                self._teacher = Teacher(folder, self.policy)
            outputs["teacher"] = self._teacher.logprobs(forest, max_tokens)
        return outputs

    def _add_gradient(self, forest: Forest, recipe: Recipe, loss: LossSpec) -> dict[str, float]:
        """Add the gradient of a mini-batch, micro-batch by micro-batch; returns means over its targets.

        Only targets that contribute to the loss are computed. Their weights count every target. The mismatch is a mean
        over computed targets. A skipped target is never clipped, and with a KL term no target is skipped.
        """
        contributing = hooks.contributing(recipe, forest)
        reads, reports = hooks.declared(recipe, "reads"), hooks.declared(recipe, "reports")
        if not contributing.any():
            return {**dict.fromkeys(reports if forest.num_targets else (), 0.0), TOKENS_COMPUTED: 0.0}
        self._contributed = True
        weighted = select(forest.with_columns(weight=hooks.weights(recipe, forest)), contributing)
        if "reference" in reads and "reference" not in weighted.targets:
            with self._reference_weights():
                found = self._of_batch(weighted, ["proximal"], loss.micro_batch_tokens)
            weighted = _with_column(weighted, "reference", found["proximal"])
        sums = defaultdict[str, float](float, dict.fromkeys((NOT_FINITE, *reports), 0.0))
        pieces = [piece for piece, _ in self._pieces(weighted, loss.micro_batch_tokens)]
        if hooks.loss_hook(recipe) == "batch_loss" and (len(pieces) > 1 or self.ranks.num_ranks > 1):
            names = self._numbers(recipe)
            found = {name: weighted[name] for name in names if loss.step == 0 and name in weighted.targets}
            if found.keys() != {*names}:
                found = self._of_batch(weighted, names, loss.micro_batch_tokens)
            present = {name: to_device(values, self.policy.device) for name, values in found.items()}
            weighted = self._with_slopes(weighted, recipe, present, sums)
            pieces = [piece for piece, _ in self._pieces(weighted, loss.micro_batch_tokens)]
        for piece in pieces:
            self._accumulate(piece, recipe, sums)
        self._pass.finish()
        self._reduce_gradients()
        sums[TOKENS_COMPUTED] = float(sum(map(self._pass.num_computed, pieces)))
        totals: Counter[str] = Counter()
        for of_rank in self.ranks.gather(dict(sums)):
            totals.update(of_rank)
        counts = {
            MISMATCH: weighted.num_targets,
            TOKENS_COMPUTED: 1,
            ROUTE_MISMATCH: max(1.0, totals.pop(REPEATED, 0.0)),
        }
        hooks.check_loss(recipe, totals.pop(NOT_FINITE, 0.0), weighted)
        return {name: total / counts.get(name, forest.num_targets) for name, total in totals.items()}

    def _of_batch(self, forest: Forest, names: Sequence[str], max_tokens: int) -> dict[str, NDArray[np.floating[Any]]]:
        """Returns values [M] of the targets of a whole batch, micro-batch by micro-batch."""
        found: dict[str, NDArray[np.floating[Any]]] = {
            name: np.zeros(forest.num_targets, self._float) for name in names
        }
        for piece, targets in self._pieces(forest, max_tokens):
            for name, values in measured(self.policy, self._pass, piece, names, self._values).items():
                found[name][targets] = _array(values.float() if self._float is np.float32 else values)
        return {name: self.ranks.sum(values) for name, values in found.items()}

    def logprobs(self, forest: Forest) -> Tensor:
        """Returns the log-probabilities [M] of the forest's targets, without gradient."""
        return measured(self.policy, self._pass, forest, ["proximal"])["proximal"]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Compute with the weights of version 0 inside the context. The reference chooses its experts itself."""
        self._pass.repeats_routes = False
        try:
            with self._exchanged_weights():
                yield
        finally:
            self._pass.repeats_routes = True

    @contextmanager
    def _exchanged_weights(self) -> Iterator[None]:
        if self.policy.has_adapters:
            with cast(Any, self.policy.model).disable_adapter():
                yield
            return
        if self._reference is None:
            self._reference = self.policy.original_weights()
        self._exchange_reference(self._reference)
        try:
            yield
        finally:
            self._exchange_reference(self._reference)

    def _accumulate(self, forest: Forest, recipe: Recipe, sums: defaultdict[str, float]) -> None:
        """Forward, loss and backward of one micro-batch. The pass may postpone a part of the backward."""
        hidden, rows = self._pass.hidden(forest)
        if self._pass.routes is not None:
            differing, repeated = self._pass.routes.counts
            sums[ROUTE_MISMATCH] += differing
            sums[REPEATED] += repeated
        hook, names = hooks.loss_hook(recipe), self._numbers(recipe)
        if hook == "batch_loss" and SLOPE + names[0] not in forest.targets:  # It is the whole mini-batch.
            with torch.no_grad():
                forest = self._with_slopes(
                    forest, recipe, numbers(self.policy, hidden, rows, forest, names, self._values), sums
                )
        cut = hidden.detach().requires_grad_()
        # The head's graph lives for one chunk only. The body's backward runs once, from the summed gradient.
        for chunk, logp, entropy in chunks(self.policy, cut, rows, forest, entropy="entropy" in names):
            new = {"proximal": logp, "entropy": entropy}
            if self._values is not None:
                new |= self._values.values(cut.index_select(0, rows[to_device(chunk, cut.device)]))
            if hook == "batch_loss":
                old = to_device(forest["logprob"][chunk], cut.device)
                slopes = [to_device(forest[SLOPE + name][chunk], cut.device) for name in names]
                torch.autograd.backward([new[name] for name in names], slopes)
            else:
                columns = {name: to_device(forest[name][chunk], cut.device).to(logp.dtype) for name in _read(recipe)}
                old = columns["logprob"]
                columns |= {f"new_{name}": new[name] for name in names[1:]}
                loss, metrics = hooks.loss(recipe, logp, columns)
                _count(sums, metrics, hooks.num_not_finite(loss, logp, columns))
                with hooks.running(recipe.name, hook):  # A loss may have a backward pass of its own.
                    (loss * columns["weight"]).sum().backward()  # type: ignore[no-untyped-call]
            sums[MISMATCH] += float(kl_k3(old.to(logp.dtype), logp.detach()).sum())
        # Of a sharded model, the other ranks wait for a backward pass of every piece.
        self._pass.backward(hidden, torch.zeros_like(cut) if cut.grad is None and self._layers else cut.grad)
        self._gather_gradients()

    def _numbers(self, recipe: Recipe) -> list[str]:
        """Returns the names in `measured` of the numbers with gradient of a loss, the log-probabilities first."""
        heads = hooks.declared(recipe, "value_heads")
        entropy = ["entropy"] if "new_entropy" in hooks.declared(recipe, "reads") else []
        return ["proximal", *entropy, *(heads.names if heads is not None else ())]

    def _with_slopes(
        self, forest: Forest, recipe: Recipe, present: Mapping[str, Tensor], sums: defaultdict[str, float]
    ) -> Forest:
        """Returns a whole mini-batch with the derivatives [M] of its `batch_loss` by the numbers with gradient.

        By the chain rule, the gradient of the loss is the sum of the numbers' gradients, each times its derivative. So
        micro-batches can be computed one after the other.
        """
        device = self.policy.device
        columns = {name: to_device(forest[name], device) for name in _read(recipe)}
        dtype = next(iter(present.values())).dtype
        columns = {
            name: values.to(dtype if values.is_floating_point() else torch.int64) for name, values in columns.items()
        }
        leaves = {name: values.detach().clone().requires_grad_() for name, values in present.items()}
        logp = leaves["proximal"]
        columns |= {f"new_{name}": values for name, values in leaves.items() if name != "proximal"}
        with torch.enable_grad():
            loss, metrics = hooks.loss(recipe, logp, columns)
        if self.ranks.rank == 0:
            _count(sums, metrics, hooks.num_not_finite(loss, logp, columns))
        with torch.enable_grad(), hooks.running(recipe.name, "batch_loss"):
            (loss * columns["weight"] if loss.shape else loss).sum().backward()  # type: ignore[no-untyped-call]
        for name, values in leaves.items():
            slopes = torch.zeros_like(values) if values.grad is None else values.grad
            forest = _with_column(forest, SLOPE + name, _array(slopes))
        return forest

    def _make_pass(self) -> Pass:
        return pass_of(self.policy, keeps=not self._layers)

    def _make_master(self, p: nn.Parameter) -> Tensor:
        """Returns the tensor that the optimiser changes instead of a weight; with several ranks this rank's rows."""
        if isinstance(p, DTensor):  # FSDP's weights of a sharded layer are masters already.
            return p
        values = p.detach().to(torch.promote_types(p.dtype, torch.float32))
        if self.ranks.mesh is not None:
            return self._part(values, [Shard(0) if p.dim() else Replicate()]).requires_grad_()
        if self.policy.offloads_optimizer:
            return values.to("cpu", copy=True).requires_grad_()
        return p if values.dtype == p.dtype else values.requires_grad_()

    def _part(self, values: Tensor, placements: Sequence[Any]) -> DTensor:
        """Returns a copy of this rank's part of a tensor that all ranks have, where masters are."""
        mesh = self.ranks.mesh
        whole = distribute_tensor(values, mesh, placements, src_data_rank=None)
        part = DTensor.from_local(
            whole.to_local().clone(), mesh, placements, shape=values.shape, stride=values.stride()
        )
        return cast(DTensor, part.cpu()) if self.policy.offloads_optimizer else part

    def _pieces(self, forest: Forest, max_tokens: int) -> Sequence[tuple[Forest, NDArray[np.int64]]]:
        """Returns the micro-batches that this process computes, with the indices of their targets."""
        if self.ranks.num_ranks == 1:
            return self._pass.pieces(forest, max_tokens)
        part, targets = part_of(forest, self.ranks.rank, self.ranks.num_ranks)
        found = self._pass.pieces(part, max_tokens) if part.num_targets else ()
        pieces: list[tuple[Forest, NDArray[np.int64]]] = [(piece, targets[of]) for piece, of in found]
        if self._layers:
            missing = max(self.ranks.gather(len(pieces))) - len(pieces)
            filling = restrict(forest, np.zeros(1, np.int64), np.zeros(forest.num_targets, bool))
            pieces += [(filling, np.zeros(0, np.int64))] * missing
        return pieces

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return _whole(torch.nn.utils.get_total_norm(tensors))

    def _gather_gradients(self) -> None:
        """Add the weights' gradients to the sums in the masters' type, unless autograd adds them up in that type.

        Sums are on the masters' device, but with several ranks on that of the weights, where they are reduced.
        """
        has_ranks = self.ranks.mesh is not None
        for name, p in self._params.items():
            master = self._masters[name]
            if p.grad is None or master is p or (has_ranks and p.dtype == master.dtype):
                continue
            own = p.grad.to(p.device if has_ranks else master.device).to(master.dtype)
            self._sums[name] = self._sums[name].add_(own) if name in self._sums else own
            p.grad = None

    def _reduce_gradients(self) -> None:
        """Give the masters their gradients after the last micro-batch, summed over all ranks.

        FSDP has added up those of its layers.
        """
        self._gather_gradients()
        for name, p in self._params.items():
            master = self._masters[name]
            if master is p:
                continue
            total = self._sums.pop(name, p.grad)
            if isinstance(master, DTensor):
                own = torch.zeros_like(p, dtype=master.dtype) if total is None else total
                partial = DTensor.from_local(own, self.ranks.mesh, [Partial()], run_check=False)
                total = partial.redistribute(placements=master.placements).to(master.device)
            master.grad, p.grad = total, None

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, p in self._params.items():
            if (master := self._masters[name]) is not p:
                p.copy_(_whole(master.to(p.device, p.dtype)) if isinstance(master, DTensor) else master)

    @property
    def fingerprint(self) -> int:
        """52 bits that depend on all bits of the masters, as `weights_changed` found them."""
        return self._fingerprints["weights/learner"] % 2**52

    def _exchange_reference(self, reference: dict[str, Tensor]) -> None:
        """Exchange the weights with those of the reference."""
        parts: dict[str, DTensor] = {}
        for name, p in self._params.items():
            if isinstance(tensor := cast(Tensor, p), DTensor):
                parts[name] = tensor
            else:
                p.data, reference[name] = reference[name], p.data
        if parts and self.policy.offloads_optimizer and self.policy.device.type == "cuda":
            torch.cuda.synchronize()  # The last pass may still copy layers from the CPU's memory.
        for name, part in parts.items():  # FSDP gathers a layer from this very tensor.
            if not isinstance(reference[name], DTensor):
                reference[name] = self._part(reference[name].to(part.dtype), part.placements)
            own, other = (cast(DTensor, tensor).to_local().detach() for tensor in (part, reference[name]))
            present = own.clone()
            own.copy_(other)
            other.copy_(present)

    def masters(self) -> list[Tensor]:
        """Returns the tensors that the optimiser changes: for float32 policies the weights themselves, or offloaded."""
        return list(self._masters.values())

    def adapter_weights(self) -> dict[str, Tensor] | None:
        """Returns the whole adapter as `policy.model` names it, or None if the model has it whole."""
        if not self._layers:
            return None
        return {name: _whole(p.detach().to(self.policy.dtype)) for name, p in self._params.items()}

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        """Returns all weights of the base model with the adapter folded in; on ranks other than 0 an empty dict."""
        base: Any = self.policy.model
        base = base.get_base_model() if self.policy.has_adapters else base
        is_first = self.ranks.rank == 0
        found = dict(merged_weights(base, without=self._layers)) if is_first else {}
        for path, module in base.named_modules():
            if module in self._layers:
                module.unshard()
                if is_first:
                    found |= {name: tensor.to("cpu", copy=True) for name, tensor in merged_weights(module, f"{path}.")}
                module.reshard()
        return found

    def state(self) -> dict[str, Any]:
        """Returns masters and moments by name, of this rank's parts. `restore` continues from them bit by bit."""
        moments = {name: dict(self._optimizer.state[master]) for name, master in self._masters.items()}
        if self.ranks.mesh is not None:  # Every rank writes the same names.
            moments = {name: moments[name] or new_moments(master) for name, master in self._masters.items()}
        values = {} if self._values is None else {"values": self._values.state()}
        return {
            "masters": {name: master.detach() for name, master in self._masters.items()},
            "moments": moments,
            **values,
        }

    def new_state(self) -> dict[str, Any]:
        """Returns new tensors like masters and moments, by name, for `torch.distributed.checkpoint` to fill."""
        return {
            "masters": {name: torch.zeros_like(master) for name, master in self._masters.items()},
            "moments": {name: new_moments(master) for name, master in self._masters.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; also takes whole tensors, and the optimiser's state by number.

        Drops an accumulated gradient.
        """
        moments = state.get("moments")
        if moments is None:
            by_number = state["optimizer"]["state"]
            moments = {name: by_number.get(number) for number, name in enumerate(self._masters)}
        found = {}
        with torch.no_grad():
            for number, (name, master) in enumerate(self._masters.items()):
                master.copy_(self._like(state["masters"][name], master))
                if of_master := moments[name]:
                    found[number] = {
                        key: value if key == "step" else self._like(value, master) for key, value in of_master.items()
                    }
        self._optimizer.zero_grad(set_to_none=True)
        self._sums.clear()
        self._prepared = self._next_states = None
        self._contributed = False
        self._copy_masters()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": found})
        self._values = ValueModel.restored(state["values"], self.policy) if "values" in state else None
        self.weights_changed()

    def _like(self, values: Tensor, master: Tensor) -> Tensor:
        """Returns a whole tensor in the parts of its master, and a tensor in parts unchanged."""
        if isinstance(values, DTensor) or not isinstance(master, DTensor):
            return values
        if values.shape != master.shape:
            raise ValueError(f"a weight has the shape {tuple(values.shape)} instead of {tuple(master.shape)}")
        return self._part(values.to(master.dtype), master.placements)

    def weights_changed(self) -> dict[str, float]:
        """Returns 1 for the masters and for the sampler's weights if they changed since the last call, else 0.

        A float32 policy has one copy of the weights, unless it offloads its optimiser or a bug replaces a parameter.
        """
        known: dict[int, Tensor] = {}
        before = self._fingerprints
        self._fingerprints = {
            "weights/learner": fingerprint(self.masters(), self.ranks, known),
            "weights/sampler": fingerprint(list(self.policy.trainable().values()), self.ranks, known),
        }
        return {name: float(now != before.get(name)) for name, now in self._fingerprints.items()}


def _whole(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor that is divided among ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def new_moments(master: Tensor) -> dict[str, Tensor]:
    """Returns the state of AdamW for a master before the first step."""
    moments = {name: torch.zeros_like(master, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=master.device), **moments}


def learning_rate(optimizer: OptimizerConfig, version: int) -> float:
    """Returns the rate of the batch at `version`: linear warm-up, then constant, linear or cosine decay."""
    if version < optimizer.warmup_steps:
        return optimizer.lr * (version + 1) / (optimizer.warmup_steps + 1)
    if optimizer.schedule == "constant":
        return optimizer.lr
    progress = min(1.0, (version - optimizer.warmup_steps) / (optimizer.total_steps - optimizer.warmup_steps))
    shape = 1 - progress if optimizer.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.lr * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * shape)


def _array(values: Tensor) -> NDArray[Any]:
    return values.cpu().numpy()


def _read(recipe: Recipe) -> set[str]:
    """Returns the columns of a forest that a loss gets."""
    return {"weight", "logprob", *(name for name in hooks.declared(recipe, "reads") if not name.startswith("new_"))}


def _count(sums: defaultdict[str, float], metrics: Mapping[str, Tensor], num_not_finite: float) -> None:
    sums[NOT_FINITE] += num_not_finite
    for name, values in metrics.items():
        sums[name] += float(values.detach().sum())


def _with_column(forest: Forest, name: str, values: NDArray[Any]) -> Forest:
    """Returns the forest with a column of any type."""
    return replace(forest, targets={**forest.targets, name: values})
