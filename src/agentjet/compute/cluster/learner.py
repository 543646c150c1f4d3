"""Learning with several ranks: the learner of `embedded`, with the work, the optimiser and the layers divided.

Every rank receives the whole batch. Advantages, loss weights and mini-batches are computed on the whole batch. Then
each rank computes its part of the forest (`timeline.deal`), and gradients are summed. So any number of ranks gives the
gradient of one within rounding, and the same number gives the same bits.

* *gathered*: each rank has all weights and its own gradients. Masters and moments are divided among the ranks.
  Ranks meet once a mini-batch, so any pass works, with any number of micro-batches.
* *sharded*: the decoder's layers are divided, too (FSDP2). They are gathered for each pass and freed after it. So ranks
  do equal numbers of passes: a rank with fewer micro-batches fills in passes over one node without a target. Prefixes
  are not kept between micro-batches. Embeddings, norms and head stay gathered, because tied weights have two users.

With `model.offload_optimizer`, masters, their gradients and moments are in the CPU's memory, FSDP's included. Their
mesh stays that of the device, as with FSDP. So collectives of these tensors are those of gloo.

Invariant: gathered weights are equal on all ranks, bit by bit. `weights_changed` checks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from agentjet.compute.cluster.group import RankGroup
from agentjet.compute.cluster.memory import USABLE, Learning, gathered_need
from agentjet.compute.embedded.learner import Number, PolicyLearner, new_moments
from agentjet.compute.embedded.model import decoder_layers
from agentjet.compute.embedded.passes import Pass, PrefixPass, RowPass
from agentjet.compute.embedded.policy import Policy, fingerprint, merged_weights
from agentjet.errors import ConfigError
from agentjet.timeline.deal import part_of
from agentjet.timeline.forest import Forest, Row, build_forest, restrict

Sharding = Literal["gathered", "sharded"]


class RankLearner(PolicyLearner):
    """One rank's part of a policy's learner. All ranks call the same methods in the same order."""

    def __init__(self, policy: Policy, group: RankGroup, sharding: Sharding) -> None:
        """Divides the layers of `policy` in place if `sharded`. Raises `ConfigError` for a model that cannot be."""
        self._group = group
        self._layers = shard_layers(policy, group) if sharding == "sharded" else []
        self._sums: dict[str, Tensor] = {}
        """Gradients of gathered bfloat16 weights on this rank, in float32, until all ranks add them up."""
        super().__init__(policy)
        for master in self.masters():
            self._optimizer.state[master] = new_moments(master)
        if self._layers:
            # FSDP notes at its first pass which weights learn. That must not be a pass of the reference, because an
            # adapter that is switched off counts as frozen.
            self.logprobs(build_forest([Row(np.zeros(1, np.int32), slice(0), {})]))

    def _make_pass(self) -> Pass:
        if not self.policy.info.shares_prefixes:
            return RowPass(self.policy)
        return PrefixPass(self.policy, keeps=not self._layers)

    def _make_master(self, p: nn.Parameter) -> Tensor:
        """Returns this rank's rows of a weight as a `DTensor`. The weights of a sharded layer are masters already."""
        if isinstance(p, DTensor):
            return p
        values = p.detach().float() if p.dtype == torch.bfloat16 else p.detach()
        return self._part(values, [Shard(0) if p.dim() else Replicate()]).requires_grad_()

    def _part(self, values: Tensor, placements: Sequence[Any]) -> DTensor:
        """Returns a copy of this rank's part of a tensor that all ranks have, where masters are."""
        whole = distribute_tensor(values, self._group.mesh, placements, src_data_rank=None)
        part = DTensor.from_local(
            whole.to_local().clone(), self._group.mesh, placements, shape=values.shape, stride=values.stride()
        )
        return cast(DTensor, part.cpu()) if self.policy.offloads_optimizer else part

    def _pieces(self, forest: Forest, max_tokens: int) -> Sequence[tuple[Forest, NDArray[np.int64]]]:
        part, targets = part_of(forest, self._group.rank, self._group.num_ranks)
        found = self._pass.pieces(part, max_tokens) if part.num_targets else ()
        pieces: list[tuple[Forest, NDArray[np.int64]]] = [(piece, targets[of]) for piece, of in found]
        if self._layers:
            missing = max(self._group.gather(len(pieces))) - len(pieces)
            filling = restrict(forest, np.zeros(1, np.int64), np.zeros(forest.num_targets, bool))
            pieces += [(filling, np.zeros(0, np.int64))] * missing
        return pieces

    def _hidden_gradient(self, hidden: Tensor) -> Tensor | None:
        if hidden.grad is None and self._layers:  # The other ranks wait for a backward pass.
            return torch.zeros_like(hidden)
        return hidden.grad

    def _sum(self, values: NDArray[Number]) -> NDArray[Number]:
        return self._group.sum(values)

    def _totals(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        total: Counter[str] = Counter()
        for other in self._group.gather(dict(sums)):
            total.update(other)
        return cast(Mapping[str, float], total)

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return cast(DTensor, super()._norm(tensors)).full_tensor()

    def _gather_gradients(self) -> None:
        for name, p in self._params.items():
            if p.grad is None or p.dtype != torch.bfloat16 or isinstance(p, DTensor):
                continue
            self._sums[name] = self._sums[name].add_(p.grad) if name in self._sums else p.grad.float()
            p.grad = None

    def _take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        self._sums.clear()
        return super()._take_gradients()

    def _reduce_gradients(self) -> None:
        """Add up the gradients of gathered weights. FSDP has added up those of its layers."""
        for name, p in self._params.items():
            master = self._masters[name]
            if master is p:
                continue
            own = self._sums.pop(name, None) if p.grad is None else p.grad
            own = torch.zeros_like(p, dtype=master.dtype) if own is None else own
            partial = DTensor.from_local(own, self._group.mesh, [Partial()], run_check=False)
            total = partial.redistribute(placements=cast(DTensor, master).placements).to(master.device)
            master.grad = total if master.grad is None else master.grad.add_(total)
            p.grad = None

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, p in self._params.items():
            if self._masters[name] is not p:
                p.copy_(cast(DTensor, self._masters[name].to(p.device, p.dtype)).full_tensor())

    def _exchange_reference(self, reference: dict[str, Tensor]) -> None:
        gathered = {name: p for name, p in self._params.items() if not isinstance(p, DTensor)}
        for name, p in gathered.items():
            p.data, reference[name] = reference[name], p.data
        if self._layers and self.policy.offloads_optimizer and self.policy.device.type == "cuda":
            torch.cuda.synchronize()  # The last pass may still copy layers from the CPU's memory.
        for name, p in self._params.items():
            if isinstance(p, DTensor):  # FSDP gathers a layer from this very tensor.
                if not isinstance(reference[name], DTensor):
                    reference[name] = self._part(reference[name].to(p.dtype), p.placements)
                own, other = _own_part(p), _own_part(reference[name])
                present = own.clone()
                own.copy_(other)
                other.copy_(present)

    def _fingerprint(self, weights: Sequence[Tensor], known: dict[int, Tensor]) -> int:
        """Returns one number for the weights of all ranks. Raises `RuntimeError` if gathered ones differ."""
        parts = [part for w in weights if isinstance(w, DTensor) and (part := _own_part(w)).numel()]
        whole = [w for w in weights if not isinstance(w, DTensor)]
        numbers = [fingerprint(found, {}) if found else 0 for found in (parts, whole)]
        of_ranks = self._group.gather(numbers)
        if len({number for _, number in of_ranks}) > 1:
            raise RuntimeError("the weights of the ranks differ, which would train another policy on each")
        return hash((sum(number for number, _ in of_ranks), numbers[1]))

    def state_by_name(self) -> dict[str, Any]:
        """Returns this rank's parts of masters and moments, by name."""
        return {
            "masters": {name: master.detach() for name, master in self._masters.items()},
            "moments": {name: dict(self._optimizer.state[master]) for name, master in self._masters.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See `PolicyLearner`. Takes whole tensors, too, which every rank has."""
        if "moments" not in state:
            found = state["optimizer"]["state"]
            moments = {name: found.get(number) for number, name in enumerate(self._masters)}
            state = {"masters": state["masters"], "moments": moments}
        with torch.no_grad():
            state = {
                "masters": {name: self._like(state["masters"][name], m) for name, m in self._masters.items()},
                "moments": {
                    name: {
                        key: value if key == "step" else self._like(value, m)
                        for key, value in (state["moments"][name] or new_moments(m)).items()
                    }
                    for name, m in self._masters.items()
                },
            }
        self._sums.clear()
        super().restore(state)

    def _like(self, values: Tensor, master: Tensor) -> Tensor:
        """Returns a whole tensor in the parts of its master, and a tensor in parts unchanged."""
        if isinstance(values, DTensor):
            return values
        if values.shape != master.shape:
            raise ValueError(f"a weight has the shape {tuple(values.shape)} instead of {tuple(master.shape)}")
        return self._part(values.to(master.dtype), cast(DTensor, master).placements)

    def adapter_weights(self) -> dict[str, Tensor] | None:
        """Returns the whole adapter as `policy.model` names it, or None if the model has it whole."""
        if not self._layers:
            return None
        return {
            name: cast(DTensor, p.detach().to(self.policy.dtype)).full_tensor()
            if isinstance(p, DTensor)
            else p.detach()
            for name, p in self._params.items()
        }

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        """Returns all weights of the base model with the adapter folded in; on ranks other than 0 an empty dict."""
        base: Any = self.policy.model
        base = base.get_base_model() if self.policy.has_adapters else base
        is_first = self._group.rank == 0
        found = dict(merged_weights(base, without=self._layers)) if is_first else {}
        for path, module in base.named_modules():
            if module in self._layers:
                module.unshard()
                if is_first:
                    found |= {name: tensor.to("cpu", copy=True) for name, tensor in merged_weights(module, f"{path}.")}
                module.reshard()
        return found


def shard_layers(policy: Policy, group: RankGroup) -> list[nn.Module]:
    """Divide the weights of the decoder's layers among the ranks; returns the layers.

    Trained bfloat16 weights become float32 masters, from which FSDP makes the bfloat16 weights of a pass.
    """
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
            mesh=group.mesh,
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
        mesh=group.mesh,
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


def _own_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a `DTensor`."""
    return cast(DTensor, tensor).to_local().detach()
