"""The ranks that learn one policy together: where they meet, what they exchange, and how they divide the weights.

* *gathered*: each rank has all weights and its own gradients. Masters and moments are divided among the ranks.
  Ranks meet once a mini-batch, so any pass works, with any number of micro-batches.
* *sharded*: the decoder's layers are divided, too (FSDP2). They are gathered for each pass and freed after it. So ranks
  do equal numbers of passes: a rank with fewer micro-batches fills in passes over one node without a target. Prefixes
  are not kept between micro-batches. Embeddings, norms and head stay gathered, because tied weights have two users.

Tensors of the model travel over NCCL on CUDA and over gloo elsewhere, arrays and errors over gloo. Collectives of
offloaded tensors are those of gloo, because their mesh stays that of the device. Never run: NCCL. There was no machine
with several GPUs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from agentjet.compute.memory import USABLE, Learning, gathered_need
from agentjet.compute.model import decoder_layers
from agentjet.compute.policy import Policy, summed
from agentjet.errors import AgentJetError, ConfigError
from agentjet.processes.rpc import host_and_port, listen

Result = TypeVar("Result")
Number = TypeVar("Number", bound=np.generic)
Sharding = Literal["gathered", "sharded"]

TIMEOUT = timedelta(hours=12)
"""Limit of one collective of gloo. A rank waits there while another one writes a file. The server detects ranks that
hang; this ends only a group that it forgot."""
JOIN_TIMEOUT = timedelta(minutes=10)
NCCL_FACTOR = 10
"""Limit of one collective of NCCL, in times of `server.worker_timeout`, and at least `JOIN_TIMEOUT`. A rank waits there
for another one with more to compute. The server finds ranks that hang in a step; this finds them while they load."""
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


def join(
    rank: int, num_ranks: int, address: str, rendezvous: Rendezvous | None, host: str, timeout: float = 120.0
) -> None:
    """Meet the other ranks at the address of rank 0's rendezvous. `host` is the address of this machine.

    `timeout`: seconds without progress after which the server ends a rank, for the watchdog of NCCL.
    """
    variables = nccl_variables(timeout)
    if interface := interface_of(host):
        variables |= dict.fromkeys(INTERFACES, interface)
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)
    if rendezvous is not None:
        store = rendezvous.store
    else:
        store = TCPStore(*host_and_port(address), is_master=False, timeout=JOIN_TIMEOUT)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    if torch.cuda.is_available():
        nccl: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
        nccl._set_default_timeout(max(JOIN_TIMEOUT, timedelta(seconds=NCCL_FACTOR * timeout)))


def nccl_variables(timeout: float) -> dict[str, str]:
    """Returns the settings of torch's watchdog of NCCL. A variable of the user takes precedence.

    A rank whose collective fails or takes too long ends, and so does one whose watchdog itself is stuck in CUDA for
    `timeout` seconds. A process that ends writes no traces, because a dump of a hung GPU may hang.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # End the process without cleaning up, which may hang, too.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(math.ceil(timeout)),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }


def interface_of(host: str) -> str:
    """Returns the network interface that has an address; empty if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    return ""
