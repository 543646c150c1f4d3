"""A learner rank: a process that connects to the gateway and learns one policy together with the other ranks.

The server sends every request to every rank (`compute.ranks`). Ranks handle requests one after another, because each
needs the others. A failure that is not an `AgentJetError` ends the process: the other ranks may wait for it.

    rendezvous() -> "HOST:PORT" (rank 0)      join(rank, num_ranks, address)
    add(model, compute) -> ModelInfo          forward_backward, optim_step, save, load, export: see `Learner`
    publish(version, wanted) -> Publication, or None without `wanted`
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentjet.compute.cluster.memory import USABLE, Learning, gathered_need
from agentjet.compute.cluster.weights import (
    PROBE_TOKENS,
    Publication,
    WeightsServer,
    publishes_adapter,
    write_adapter,
)
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy, probe_tokens, resolve_device
from agentjet.compute.embedded.policy_host import PolicyHost
from agentjet.compute.embedded.rank_group import RankGroup, Sharding
from agentjet.compute.embedded.worker import end_overdue, make_deterministic
from agentjet.config import ComputeConfig, ModelConfig
from agentjet.processes.rpc import Link, ProcessRequest, host_and_port, listen
from agentjet.timeline.forest import Row, build_forest
from agentjet.types import ModelInfo

log = logging.getLogger(__name__)

TIMEOUT = timedelta(hours=12)
"""Limit of one collective. The gateway detects ranks that died; this ends only a group that it forgot."""
JOIN_TIMEOUT = timedelta(minutes=10)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def publish(learner: PolicyLearner, server: WeightsServer | None, version: int, *, is_hot: bool) -> Publication | None:
    """Write the weights of a version for the replicas, with all ranks; returns the publication on rank 0.

    `server` is that of rank 0, which writes the weights of all ranks. `is_hot` is the result of `publishes_adapter`.
    Raises `ComputeError` for a file that cannot be written.
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
        path, digest = server.write(version, num_bytes, save)
        return Publication(
            version,
            server.address,
            str(path),
            path.stat().st_size,
            digest,
            policy.info.dtype,
            tuple(tokens.tolist()),
            tuple(logprobs.tolist()),
            adapter,
        )

    return learner.ranks.agreed(write)


def write_weights(policy: Policy, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write all weights of a base model to one safetensors file, with the names of the model's own files."""
    base: Any = policy.model
    base = base.get_base_model() if policy.has_adapters else base
    folder = path.with_suffix("")
    base.save_pretrained(folder, state_dict=weights, max_shard_size=1 << 62)
    (folder / "model.safetensors").rename(path)
    shutil.rmtree(folder)


class Rank:
    """The state of the process: its place in the group, and the policy after `add`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._rendezvous: Rendezvous | None = None
        self.present: ProcessRequest | None = None
        """The request that this rank works on."""
        self._place: tuple[int, int] | None = None
        self._server: WeightsServer | None = None
        self._policy: PolicyHost | None = None

    def handle(self, request: ProcessRequest) -> Any:
        """Handle one request; returns its result."""
        self.present = request
        own: dict[str, Callable[..., Any]] = {"rendezvous": self._meet, "join": self._join, "add": self._add}
        handle = own.get(request.op) or getattr(self._policy, request.op)
        return handle(*request.args)

    def close(self) -> None:
        """Remove the files of this rank. Idempotent."""
        if self._server is not None:
            self._server.close()

    def _meet(self) -> str:
        self._rendezvous = Rendezvous(self._link.local_host)
        return self._rendezvous.address

    def _join(self, rank: int, num_ranks: int, address: str) -> None:
        join(rank, num_ranks, address, self._rendezvous, self._link.local_host)
        self._place = rank, num_ranks
        if rank == 0:
            self._server = WeightsServer(self._link.local_host, self._link.secret)

    def _add(self, model: ModelConfig, compute: ComputeConfig) -> ModelInfo:
        assert self._place is not None, "a rank joins the others first"
        rank, num_ranks = self._place
        device = resolve_device(model.device)
        if (device.type == "cpu" or model.offload_optimizer) and not model.threads:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))  # The ranks share this machine.
        group = RankGroup(rank, num_ranks, device)
        policy = group.agreed(lambda: load_policy(model))
        sharding = chosen_sharding(compute.sharding, policy, group)
        log.info("rank %d of %d learns %s, %s", rank, num_ranks, model.name, sharding)
        learner = group.agreed(lambda: PolicyLearner(policy, group, sharding))
        is_hot = publishes_adapter(model.lora, policy.config.architectures)

        def write(version: int) -> Publication | None:
            found = publish(learner, self._server, version, is_hot=is_hot)
            if compute.colocated:
                torch.cuda.empty_cache()  # The replicas need the memory now.
            return found

        self._policy = PolicyHost(learner, write=write)
        return policy.info


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


def main() -> None:
    """Serve the server until it closes the connection. A failure exits without the collectives of an orderly end."""
    link = Link.of_program()
    make_deterministic()
    rank = Rank(link)
    link.before_exit = rank.close
    end_overdue(float(sys.argv[1]), lambda: rank.present, link.send)
    try:
        link.serve(rank.handle)
    finally:
        link.exit(1)


if __name__ == "__main__":
    main()
