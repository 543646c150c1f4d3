"""The group of ranks that learn one policy together, as one of them sees it: `torch.distributed`.

Tensors of the model travel over NCCL on CUDA and over gloo elsewhere. Arrays and errors travel over gloo. Every method
must be called by all ranks in the same order.

Never run: NCCL. There was no machine with several GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentjet.errors import AgentJetError
from agentjet.processes.rpc import host_and_port, listen

TIMEOUT = timedelta(hours=12)
"""Limit of one collective. The gateway detects ranks that died; this ends only a group that it forgot."""
JOIN_TIMEOUT = timedelta(minutes=10)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Result = TypeVar("Result")
Number = TypeVar("Number", bound=np.generic)


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


class RankGroup:
    """The ranks that learn together. `mesh` has one dimension."""

    def __init__(self, rank: int, num_ranks: int, device: torch.device) -> None:
        """The process group of `torch.distributed` must exist."""
        self.rank = rank
        self.num_ranks = num_ranks
        self.mesh: DeviceMesh = init_device_mesh(device.type, (num_ranks,))

    def sum(self, values: NDArray[Number]) -> NDArray[Number]:
        """Returns the sum of equally shaped arrays of all ranks."""
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total)
        return total.numpy()

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank. They must be small."""
        values: list[Any] = [None] * self.num_ranks
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
