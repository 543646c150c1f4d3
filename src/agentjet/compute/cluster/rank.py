"""A learner rank: a process that connects to the gateway and learns one policy together with the other ranks.

The gateway sends every request to every rank. The answer of rank 0 counts, and an error of any. Ranks handle requests
one after another, because each needs the others. A failure that is not an `AgentJetError` ends the process: the other
ranks may wait for it, and the gateway then ends them all.

    rendezvous() -> "HOST:PORT" (rank 0)      join(rank, num_ranks, address, interval, hook_timeout)
    add(model, compute) -> ModelInfo          forward_backward, optim_step, save, load, export: see `Learner`
    publish(version, wanted) -> Publication, or None without `wanted`

From `join` on, a rank sends a sign of work after each `interval` seconds in which it worked.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch

from agentjet.compute.channel import Answer, WorkerRequest
from agentjet.compute.cluster.group import Rendezvous, join
from agentjet.compute.cluster.hub import Link
from agentjet.compute.cluster.memory import USABLE, Learning, gathered_need
from agentjet.compute.cluster.weights import (
    PROBE_TOKENS,
    Publication,
    WeightsServer,
    publishes_adapter,
    write_adapter,
)
from agentjet.compute.embedded.backend import MIN_CPU_SECONDS
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy, probe_tokens, resolve_device
from agentjet.compute.embedded.policy_host import PolicyHost
from agentjet.compute.embedded.rank_group import RankGroup, Sharding
from agentjet.compute.embedded.worker import make_deterministic
from agentjet.compute.hook_limit import end_overdue
from agentjet.config import ComputeConfig, ModelConfig
from agentjet.errors import AgentJetError, ComputeError
from agentjet.timeline.forest import Row, build_forest
from agentjet.types import ModelInfo

log = logging.getLogger(__name__)

SIGN_OF_WORK = Answer(0)
"""The answer to no request. The gateway counts it as a message."""


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
        self._inbox: queue.SimpleQueue[WorkerRequest] = queue.SimpleQueue()
        self._rendezvous: Rendezvous | None = None
        self._present: WorkerRequest | None = None
        """The request that this rank works on."""
        self._place: tuple[int, int] | None = None
        self._server: WeightsServer | None = None
        self._policy: PolicyHost | None = None

    def run(self) -> None:
        """The main loop. Raises the first failure that is not an `AgentJetError`."""
        self._link.before_exit = self.close
        self._link.read_forever(self._inbox.put)
        while True:
            request = self._present = self._inbox.get()
            try:
                result = self.handle(request.op, *request.args)
            except AgentJetError as error:
                self._link.send(Answer(request.id, error=error))
            except Exception as error:
                failure = ComputeError(f"{request.op} failed: {type(error).__name__}: {error}")
                self._link.send(Answer(request.id, error=failure, ends=True))
                raise
            else:
                self._link.send(Answer(request.id, result))

    def handle(self, op: str, *args: Any) -> Any:
        """Handle one request; returns its result."""
        own: dict[str, Callable[..., Any]] = {"rendezvous": self._meet, "join": self._join, "add": self._add}
        if op in own:
            return own[op](*args)
        return getattr(self._policy, op)(*args)

    def close(self) -> None:
        """Remove the files of this rank. Idempotent."""
        if self._server is not None:
            self._server.close()

    def _meet(self) -> str:
        self._rendezvous = Rendezvous(self._link.local_host)
        return self._rendezvous.address

    def _join(self, rank: int, num_ranks: int, address: str, interval: float, hook_timeout: float) -> None:
        if hook_timeout < math.inf:
            end_overdue(hook_timeout, lambda: self._present, self._link.send)
        threading.Thread(target=show_work, args=[self._link.send, interval], daemon=True).start()
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


def show_work(send: Callable[[Answer], object], interval: float) -> None:
    """Send a sign of work after each interval in which this process used CPU time or waited for a disk.

    The time of this thread does not count, so a rank that waits for another one is silent.
    """
    process, before = psutil.Process(), 0.0
    while True:
        time.sleep(interval)
        used = time.process_time() - time.thread_time()
        if used - before >= MIN_CPU_SECONDS or _may_wait_for_disk(process):
            send(SIGN_OF_WORK)
        before = used


def _may_wait_for_disk(process: psutil.Process) -> bool:
    """True also if the system does not show it: a rank whose signs end would be killed."""
    try:
        return bool(process.status() == psutil.STATUS_DISK_SLEEP)
    except (psutil.Error, OSError):
        return True


def main() -> None:
    """Serve the gateway until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the gateway decides.
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    make_deterministic()
    rank = Rank(Link.from_environment())
    try:
        rank.run()
    except Exception:  # Boundary: exit without the collectives that an orderly end would wait for.
        traceback.print_exc()
        rank.close()
        os._exit(1)


if __name__ == "__main__":
    main()
