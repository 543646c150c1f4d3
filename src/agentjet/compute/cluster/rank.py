"""A learner rank: a process that connects to the gateway and learns one policy together with the other ranks.

The server sends every request to every rank (`compute.ranks`). Ranks handle requests one after another, because each
needs the others. A failure that is not an `AgentJetError` ends the process: the other ranks may wait for it.

    rendezvous() -> "HOST:PORT" (rank 0)      join(rank, num_ranks, address)
    add(model, compute) -> ModelInfo          forward_backward, optim_step, save, load, export: see `Learner`
    publish(version, wanted) -> Publication, or None without `wanted`
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentjet.compute.cluster import checkpoint
from agentjet.compute.cluster.group import RankGroup, Rendezvous, join
from agentjet.compute.cluster.learner import RankLearner, chosen_sharding
from agentjet.compute.cluster.weights import (
    PROBE_TOKENS,
    Publication,
    WeightsServer,
    publishes_adapter,
    write_adapter,
)
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy, probe_tokens, resolve_device
from agentjet.compute.embedded.policy_host import PolicyHost
from agentjet.compute.embedded.worker import make_deterministic
from agentjet.compute.hook_limit import end_overdue
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig
from agentjet.processes.rpc import Link, Request
from agentjet.timeline.forest import Row, build_forest
from agentjet.types import ModelInfo

log = logging.getLogger(__name__)


class RankPolicyHost(PolicyHost[RankLearner]):
    """A policy on one rank. All ranks apply the same requests."""

    def __init__(
        self,
        learner: RankLearner,
        group: RankGroup,
        server: WeightsServer | None,
        *,
        has_hot_adapter: bool,
        is_colocated: bool = False,
    ) -> None:
        """`server` is that of rank 0, which writes the weights of all ranks.

        `has_hot_adapter` is the result of `publishes_adapter`.
        """
        super().__init__(learner)
        self._group = group
        self._server = server
        self._has_hot_adapter = has_hot_adapter
        self._is_colocated = is_colocated
        self._publication: Publication | None = None

    def publish(self, version: int, wanted: bool = True) -> Publication | None:
        """Give the present weights this version; returns their publication on rank 0, if one is `wanted`. Idempotent.

        Raises `ComputeError` for a file that cannot be written.
        """
        if not self._is_published or version != self.version:
            self._change_version(version)
        if not wanted:
            return None
        if not all(self._group.gather(self._server is None or self._publication is not None)):
            self._publication = self._published(version)
        if self._is_colocated:
            torch.cuda.empty_cache()  # The replicas need the memory now.
        return self._publication

    def export(self, path: Path, adapter: bool) -> None:
        checkpoint.export(path, self.learner, self._group, adapter=adapter)

    def _update(self, optimizer: OptimizerConfig) -> dict[str, float]:
        return {**super()._update(optimizer), "learner/ranks": float(self._group.num_ranks)}

    def _change_version(self, version: int) -> None:
        super()._change_version(version)
        self._publication = None

    def _save(self, path: Path, state: dict[str, Any]) -> str:
        return checkpoint.save(path, self.learner, self._group, state)

    def _load(self, path: Path) -> dict[str, Any]:
        return checkpoint.load(path, self.learner, self._group)

    def _published(self, version: int) -> Publication | None:
        tokens = probe_tokens(self.policy, PROBE_TOKENS).cpu().numpy().astype(np.int32)
        logprobs = self.learner.logprobs(build_forest([Row(tokens, slice(1, None), {})])).double().cpu()
        is_hot, policy = self._has_hot_adapter, self.policy
        weights = self.learner.adapter_weights() if is_hot else self.learner.whole_weights()
        adapter = ""

        def save(path: Path) -> None:
            nonlocal adapter
            if is_hot:
                adapter = write_adapter(policy.model, weights, path)
            else:
                write_weights(policy, weights or {}, path)

        def write() -> Publication | None:
            if self._server is None:
                return None
            sent = policy.trainable() if is_hot else weights or {}
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
            path, digest = self._server.write(version, num_bytes, save)
            return Publication(
                version,
                self._server.address,
                str(path),
                path.stat().st_size,
                digest,
                self.policy.info.dtype,
                tuple(tokens.tolist()),
                tuple(logprobs.tolist()),
                adapter,
            )

        return self._group.agreed(write)


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
        self.present: Request | None = None
        """The request that this rank works on."""
        self._place: tuple[int, int] | None = None
        self._server: WeightsServer | None = None
        self._policy: RankPolicyHost | None = None

    def handle(self, request: Request) -> Any:
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
        learner = group.agreed(lambda: RankLearner(policy, group, sharding))
        is_hot = publishes_adapter(model.lora, policy.config.architectures)
        self._policy = RankPolicyHost(
            learner, group, self._server, has_hot_adapter=is_hot, is_colocated=compute.colocated
        )
        return policy.info


def main() -> None:
    """Serve the server until it closes the connection. A failure exits without the collectives of an orderly end."""
    link = Link.of_program()
    make_deterministic()
    rank = Rank(link)
    link.before_exit = rank.close
    if (limit := float(sys.argv[1])) < math.inf:
        end_overdue(limit, lambda: rank.present, link.send)
    try:
        link.serve(rank.handle)
    finally:
        link.exit(1)


if __name__ == "__main__":
    main()
