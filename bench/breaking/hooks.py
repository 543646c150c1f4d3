"""Faults inside the server's process: where it dies, the errors of its disk, and jumps of its clock.

The hooks are set from outside on the objects of a new gateway: `src/` does not contain them.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from agentjet.compute.backend import ProcessCompute
from agentjet.compute.protocol import LossSpec, Outputs
from agentjet.config import ModelConfig, OptimizerConfig, ServeConfig
from agentjet.swarm import Journal
from agentjet.types import CheckpointStamp, ModelInfo, Op, PolicyId, Sampled, SamplingParams
from bench.breaking.plan import TRANSITIONS

Say = Callable[..., None]  # Sends a fact to the bench at once
NO_PAGE_LIMIT = 2**30
SMALL_FILE = 4096  # Bytes that a file may have while writes are refused: every file of a run is longer


def die() -> None:
    """Ends the process as a power cut does: nothing is flushed or reported."""
    os.kill(os.getpid(), signal.SIGKILL)


class Trap:
    """Kills this process when the journal passes a certain point."""

    def __init__(self, journal: Journal, folder: Path, say: Say) -> None:
        """`folder` gets the log of the journal before a commit that is torn."""
        self._journal = journal
        self._folder = folder
        self._say = say
        self._at = self._when = ""
        self._skip = 0
        self._tears = False
        self._sprung = False  # The row is written: the commit that has it on disk is the end
        self._changes = journal.file.db.total_changes  # As of the last commit: some have nothing to write
        for name in TRANSITIONS:
            setattr(journal, name, self._guarded(name, getattr(journal, name)))
        self._commit = journal.file.commit
        journal.file.commit = self._committing  # type: ignore[method-assign]

    def arm(self, at: str = "", when: str = "", skip: int = 0, tears: bool = False) -> None:
        """Be ready to die at that point, after passing it `skip` times. Without arguments: be ready no longer."""
        self._at, self._when, self._skip, self._tears, self._sprung = at, when, skip, tears, False

    def _reached(self, name: str) -> bool:
        if name != self._at:
            return False
        self._skip -= 1
        return self._skip < 0

    def _guarded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def guarded(*arguments: Any, **named: Any) -> Any:
            is_it = self._reached(name)
            if is_it and self._when == "before":
                self._end()
            result = original(*arguments, **named)
            if is_it and self._when == "after":
                self._end()
            self._sprung = self._sprung or is_it
            return result

        return guarded

    def _committing(self) -> None:
        changes = self._journal.file.db.total_changes
        is_it = changes > self._changes and (self._sprung or self._reached("commit"))
        self._changes = changes
        if is_it and self._when == "before":
            self._end()
        if is_it and self._tears:
            self._keep_wal()
        self._commit()
        if is_it:
            self._end()

    def _keep_wal(self) -> None:
        """Keeps the log as it was before the commit that is never reported. SQLite must not checkpoint the log during
        that time."""
        self._journal.file.db.execute("PRAGMA wal_autocheckpoint = 0")
        shutil.copyfile(f"{self._journal.path}-wal", self._folder / "wal-before")

    def _end(self) -> None:
        self._say(killed="gateway", at=self._at, when=self._when, journal=str(self._journal.path))
        die()


class MortalCompute(ProcessCompute):
    """The workers. One is killed a moment after it was given something to do."""

    say: Say

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self._verb = self._run = ""
        self._delay = 0.0
        self._times = 0
        self._signal = signal.SIGKILL
        self._newest: Counter[str] = Counter()  # The newest batch of each run, counted from 1
        self._saves_fail = False

    def arm(self, verb: str = "", delay: float = 0.0, times: int = 1, hangs: bool = False, run: str = "") -> None:
        """Kill the worker `delay` seconds after it is given `verb`, the next `times` times; stop it if it `hangs`.

        `run` limits this to the policies of a run.
        `learn newest` is the `forward_backward` of a batch that was never learned before. `accumulated` is the moment
        between a `forward_backward` and its `optim_step`; it has no delay.
        """
        self._verb, self._delay, self._times, self._run = verb, delay, times, run
        self._signal = signal.SIGSTOP if hangs else signal.SIGKILL

    def refuse_a_save(self) -> None:
        """The next checkpoint finds the disk full."""
        self._saves_fail = True

    def _strike(self, verb: str, policy: PolicyId) -> None:
        if verb == self._verb and self._times and self._run in ("", policy.run):
            self._times -= 1
            asyncio.get_running_loop().call_later(self._delay, self._kill, verb, policy)

    def _kill(self, verb: str, policy: PolicyId) -> None:
        """Waits while the worker is not started, or still works on a request of another policy."""
        pid = self.pid(policy)
        if pid is None or (verb not in ("start", "sample", "accumulated") and self._has_others_first(policy)):
            asyncio.get_running_loop().call_later(0.002, self._kill, verb, policy)
            return
        self.say(killed="worker", pid=pid, at=verb)
        os.kill(pid, self._signal)

    def pid(self, policy: PolicyId) -> int | None:
        """Returns the process id of a policy's worker while it runs."""
        return next((int(one.place.split()[-1]) for one in self.processes(policy) if one.place), None)

    def _has_others_first(self, policy: PolicyId) -> bool:
        pending = [one for peer in self._policies[policy].ranks._peers for one in peer.pending.values()]
        waiting = [one.policy for one in pending if one.op != "sample"]
        return policy in waiting and waiting[0] != policy

    async def add(self, policy: PolicyId, model: ModelConfig, **named: Any) -> ModelInfo:
        self._strike("start", policy)
        info = await super().add(policy, model, **named)
        self.say(worker=self.pid(policy))
        return info

    def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        self._strike("sample", policy)
        return super().sample(policy, token_ids, params)

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        self._strike("forward_backward", op.policy_id)
        if batch_id + 1 >= self._newest[op.run]:
            self._newest[op.run] = batch_id + 1
            self._strike("learn newest", op.policy_id)
        outputs = await super().forward_backward(op, batch_id, loss)
        if self._verb == "accumulated" and self._times:  # The gradient exists, and its `optim_step` was not sent.
            self._times -= 1
            self._kill("accumulated", op.policy_id)
        return outputs

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        self._strike("optim_step", op.policy_id)
        return await super().optim_step(op, optimizer)

    async def publish(self, policy: PolicyId, version: int, **named: bool) -> Mapping[str, float]:
        self._strike("publish", policy)
        return await super().publish(policy, version, **named)

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        self._strike("save", policy)
        if not self._saves_fail or (pid := self.pid(policy)) is None:
            return await super().save(policy, path)
        self._saves_fail = False
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALL_FILE, resource.RLIM_INFINITY))
        try:
            return await super().save(policy, path)
        finally:
            if self.pid(policy) == pid:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
            self.say(disk="checkpoint full")


class Disk:
    """The disk of all journals: full, or refusing writes, for some seconds."""

    def __init__(self, say: Say) -> None:
        self.journals: list[Journal] = []
        self._say = say

    def full(self, seconds: float) -> None:
        """Not one page more: SQLite itself reports a full disk."""
        for journal in self.journals:
            journal.file.db.execute("PRAGMA max_page_count = 1")  # Means: as it is now.
        self._later(seconds, self._room)

    def refuse(self, seconds: float) -> None:
        """This process can lengthen no file: the operating system refuses in the middle of a write."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, resource.RLIM_INFINITY))
        self._later(seconds, self._accept)

    def _later(self, seconds: float, end: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, end)

    def _room(self) -> None:
        for journal in self.journals:
            journal.file.db.execute(f"PRAGMA max_page_count = {NO_PAGE_LIMIT}")
        self._say(disk="journal full")

    def _accept(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self._say(disk="writes refused")


class JumpingClock:
    """The time of day plus an offset in a file: a clock that jumped keeps its offset after a restart."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.offset = float(json.loads(file.read_text())) if file.exists() else 0.0

    def __call__(self) -> float:
        return time.time() + self.offset

    def jump(self, seconds: float) -> None:
        self.offset += seconds
        self._file.write_text(json.dumps(self.offset))
