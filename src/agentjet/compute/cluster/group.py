"""The meeting of the ranks that learn one policy together: it makes the process group of `torch.distributed`."""

from __future__ import annotations

import os
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentjet.compute.cluster.handshake import host_and_port, listen

TIMEOUT = timedelta(hours=12)
"""Limit of one collective. The gateway detects ranks that died; this ends only a group that it forgot."""
JOIN_TIMEOUT = timedelta(minutes=10)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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
