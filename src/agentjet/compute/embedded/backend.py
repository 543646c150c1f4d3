"""The gateway's half of the embedded backend: worker processes, and which one has which policy. No torch.

The worker handles requests in order, so the oldest one without an answer is the one that it works on.

The watchdog ends a worker that hangs. Heartbeats could not detect that: a thread sends them while the main loop is
deadlocked, and a main loop sends none for minutes while it computes one long pass. So the watchdog measures from
outside. A worker is busy if it sent a message, used CPU time, or waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from agentjet.compute.channel import SENDING, Channel
from agentjet.compute.protocol import CAPABILITIES, EMBEDDED, Capabilities, LossSpec, Outputs
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, ConfigError, HookHung, PolicyRemoved, WorkerDied, WorkerHung
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import (
    CheckpointStamp,
    ModelInfo,
    Op,
    PolicyId,
    ProcessStatus,
    Sampled,
    SamplerBounds,
    SamplersStatus,
    SamplingParams,
    SlowWork,
    TokenScore,
)

COMPUTE_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment of a process that computes. In a worker the user's own variables take precedence; ranks and replicas
always get these.

Threads sleep while they wait for each other. OpenMP's default spins for 7 ms, which makes everything several times
slower if agents or a second worker need the cores. cuBLAS is deterministic only with a workspace of fixed size.
"""
WORKER_VARIABLES = {
    **COMPUTE_VARIABLES,
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}",
}
"""Environment of a worker. glibc keeps freed memory for the next batch (`policy_host.Heap`): new pages cost a virtual
machine up to a third of a step.
"""

log = logging.getLogger(__name__)

RESUMING = ("publish", "load", "add", "remove")
"""Requests after which no completion of the policy pauses."""

MIN_CPU_SECONDS = 0.02
"""Minimum CPU time that counts as work. The operating system counts in steps of 0.01 s."""
CHECKS_PER_TIMEOUT = 10


class Watchdog:
    """Measures how long a worker with pending requests has not worked."""

    def __init__(self, timeout: float) -> None:
        """`timeout` in seconds."""
        self.interval = timeout / CHECKS_PER_TIMEOUT
        """Seconds between two checks."""
        self._timeout = timeout
        self._silence = 0.0
        self._work = 0.0

    def reset(self) -> None:
        """Call for every message of the worker."""
        self._silence = 0.0

    def hangs(self, elapsed: float, work: Callable[[], float | None], *, has_work: bool) -> bool:
        """Check the worker, `elapsed` seconds after the last check; True if it was idle for `timeout` seconds.

        A late check counts as two intervals at most. A late check means that this process was stopped too, so messages
        of that time may still be unread. `work` returns the CPU seconds so far, or any count that grows with the work;
        None if the process ended or waits for a disk.
        """
        found = work() if has_work else None
        if found is None or abs(found - self._work) >= MIN_CPU_SECONDS:
            self._silence = 0.0
            self._work = found or 0.0
            return False
        self._silence += min(elapsed, 2 * self.interval)
        return self._silence >= self._timeout


def cpu_seconds_of(pid: int) -> float | None:
    """Returns the CPU time of a process and its children; None if the process ended or waits for a disk, and if the
    system does not show it: `psutil` passes an OSError, for example with too many open files.
    """
    try:
        process = psutil.Process(pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        if process.status() == psutil.STATUS_DISK_SLEEP:
            return None
    except (psutil.Error, OSError):
        return None
    return float(sum(time.user + time.system for time in times))


class WorkerProcess:
    """One process from its start to its end."""

    def __init__(self, log_path: Path, timeout: float, hook_timeout: float = math.inf) -> None:
        """`timeout` in seconds is that of the watchdog, `hook_timeout` the limit of one call of a recipe's hook."""
        self._hook_timeout = hook_timeout
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        """Done when the process ended unexpectedly."""
        self._log_path = log_path
        self._timeout = timeout
        self._watchdog = Watchdog(timeout)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._unpublished: set[PolicyId] = set()
        """Policies that were asked for an `optim_step` and not published since: their completions pause."""
        self._end: WorkerDied | None = None
        self._hung = False
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The process id while the process runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def work(self) -> SlowWork | None:
        """Progress of slow work of the process, if it reported any."""
        return self._channel.work if self._channel is not None else None

    @property
    def has_ended(self) -> bool:
        return self._closing or self._end is not None

    async def start(self) -> None:
        """Start the process. Idempotent. Raises `PolicyRemoved` after `close`."""
        async with self._starting:
            if self._closing:
                raise PolicyRemoved("the worker process was ended")
            if self._process is not None:
                return
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log_path.touch(0o600)
            with self._log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    # -P: nothing from the current folder.
                    *(sys.executable, "-P", "-m", "agentjet.compute.embedded", str(self._hook_timeout)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env={**WORKER_VARIABLES, **os.environ},
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            self._channel = Channel(self._process.stdout, self._process.stdin)
            self._tasks = [
                asyncio.create_task(self._read_messages(self._process, self._channel)),
                asyncio.create_task(self._watch(self._process, self._channel)),
            ]

    async def ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """See `Channel.ask`."""
        channel = self._running()
        if op == "optim_step":
            self._unpublished.add(policy)
        return await channel.ask(op, policy, *args)

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        """See `Channel.ask_large`."""
        await self._running().ask_large("load_batch", policy, batch)

    def sample(self, policy: PolicyId, *args: Any) -> AsyncGenerator[Sampled, None]:
        """See `Channel.sample`."""
        return self._running().sample(policy, *args)

    async def close(self) -> None:
        """End the process. Idempotent."""
        self._closing = True
        async with self._starting:
            if self._process is None:
                return
            if self._process.returncode is None:
                self._process.kill()
            reader, watch = self._tasks
            watch.cancel()
            await asyncio.wait([reader, watch])

    def _running(self) -> Channel:
        if self._channel is None:
            raise WorkerDied("the worker process is not running")
        return self._channel

    async def _read_messages(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        """Boundary: a message that cannot be read ends the process."""
        try:
            while True:
                done = await channel.receive()
                self._watchdog.reset()
                if done is not None and done.op in RESUMING:
                    self._unpublished.discard(done.policy)
        except (asyncio.IncompleteReadError, ConnectionError):  # The process ended.
            pass
        except Exception:
            log.exception("the worker process sent a message that cannot be read; it is killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self._end = self._reason(await process.wait(), channel)
        channel.end(self._end)
        if not self._closing:
            self.died.set_result(self._end)

    def _reason(self, code: int, channel: Channel) -> WorkerDied:
        if self._closing:
            return PolicyRemoved("the worker process was ended")
        if isinstance(channel.fatal, HookHung):
            return channel.fatal
        operations = (str(one.policy) for one in channel.pending.values() if one.op not in ("sample", SENDING))
        during = next(operations, "") or self._sampled(channel)
        kind, end = WorkerDied, f"ended with exit code {code}"
        if self._hung:
            kind, end = WorkerHung, f"did no work for {self._timeout:g} s (server.worker_timeout) and was killed"
        return kind(f"the worker process {end}; see {self._log_path}", during=during)

    def _sampled(self, channel: Channel) -> str:
        """Returns a policy of the only run that samples, one that does not pause if possible; '' for several runs."""
        policies = sorted((one.policy for one in channel.pending.values()), key=self._unpublished.__contains__)
        return str(policies[0]) if len({policy.run for policy in policies}) == 1 else ""

    async def _watch(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        """Kill the worker if it hangs."""
        now = asyncio.get_running_loop().time
        self._watchdog.reset()
        while process.returncode is None:
            checked = now()
            await asyncio.sleep(self._watchdog.interval)
            # Paused completions may hold the places of others, so no completion counts meanwhile.
            has_work = any(not self._unpublished or one.op != "sample" for one in channel.pending.values())
            if self._watchdog.hangs(now() - checked, lambda: cpu_seconds_of(process.pid), has_work=has_work):
                self._hung = True
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return


class EmbeddedCompute:
    """Implements `Compute` with worker processes by name. A policy keeps its process until `add` or `remove`."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._workers: dict[str, WorkerProcess] = {}
        """The processes that new policies get, by worker name."""
        self._hosts: dict[PolicyId, WorkerProcess] = {}
        """The process that each policy was added to. It may have died."""

    def pid(self, policy: PolicyId) -> int | None:
        """Returns the process id of a policy's worker while it runs."""
        return self._hosts[policy].pid if policy in self._hosts else None

    def capabilities(self, settings: ComputeConfig) -> Capabilities:
        return CAPABILITIES["embedded"]

    async def add(
        self, policy: PolicyId, model: ModelConfig, *, worker: str = "", settings: ComputeConfig = EMBEDDED
    ) -> ModelInfo:
        process = self._workers.get(worker)
        if process is None or process.has_ended:
            server = self._config.server
            log_path = server.data_dir / "logs" / (f"worker-{worker}.log" if worker else "worker.log")
            process = self._workers[worker] = WorkerProcess(log_path, server.worker_timeout, server.hook_timeout)
        replaced, self._hosts[policy] = self._hosts.get(policy), process
        if replaced is not None and replaced is not process:
            await self._leave(policy, replaced)
        try:
            await process.start()
            info: ModelInfo = await process.ask("add", policy, model, self._config.sampler)
        except AgentJetError:
            await self.remove(policy)
            raise
        return info

    async def remove(self, policy: PolicyId) -> None:
        if (process := self._hosts.pop(policy, None)) is not None:
            await self._leave(policy, process)

    async def _leave(self, policy: PolicyId, process: WorkerProcess) -> None:
        """Free a policy in a worker, or end the worker if it has no other policy."""
        if process in self._hosts.values():
            with contextlib.suppress(ComputeError):  # The worker died, or ends because the removal failed.
                await process.ask("remove", policy)
        else:
            await process.close()

    def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        return self._process(policy).sample(policy, np.asarray(token_ids, np.int32), params)

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        return cast(list[TokenScore], await self._ask("score", policy, np.asarray(token_ids, np.int32), num_likeliest))

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        await self._process(policy).load_batch(policy, batch)

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        return cast(Outputs, await self._ask("forward_backward", op.policy_id, op, batch_id, loss))

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        return cast(dict[str, float], await self._ask("optim_step", op.policy_id, op, optimizer))

    async def publish(
        self, policy: PolicyId, version: int, *, to_samplers: bool = True, in_turns: bool = False
    ) -> Mapping[str, float]:
        await self._ask("publish", policy, version)
        return {}

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return cast(CheckpointStamp, await self._ask("save", policy, path))

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return cast(CheckpointStamp, await self._ask("load", policy, path))

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        await self._ask("export", policy, path, adapter)

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        ended = {self._process(policy).died for policy in policies}
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    def processes(self, policy: PolicyId) -> list[ProcessStatus]:
        process = self._hosts.get(policy)
        if process is None:
            return []
        running = process.pid is not None
        state, place = ("running", f"pid {process.pid}") if running else ("starting or ended", "")
        return [ProcessStatus("worker", "worker", state, place, work=process.work)]

    def samplers(self, policy: PolicyId) -> SamplersStatus | None:
        return None

    async def scale(self, policy: PolicyId, bounds: SamplerBounds) -> None:
        raise ConfigError(
            "compute.backend = 'embedded': one worker process samples and learns, so there are no replicas to scale; "
            "restart the server with compute.backend = 'cluster'"
        )

    async def close(self) -> None:
        processes = {*self._workers.values(), *self._hosts.values()}
        self._workers.clear()
        self._hosts.clear()
        await asyncio.gather(*(process.close() for process in processes))

    def _process(self, policy: PolicyId) -> WorkerProcess:
        """Returns the process of a policy. Raises `PolicyRemoved` for a policy that was not added."""
        if policy not in self._hosts:
            raise PolicyRemoved(f"no worker has the policy {policy}: add it first")
        return self._hosts[policy]

    async def _ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        return await self._process(policy).ask(op, policy, *args)
