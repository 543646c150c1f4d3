"""Kinds of damage that a disk, a copy, or an operator does to checkpoints, and starts of a gateway on them.

A function of damage gets the folder `checkpoints/` of a server that has stopped, with two checkpoints or more. Gateway
and engine are the real ones; the worker is a real one in this process.
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from agentjet.compute.backend import Hosted, ProcessCompute
from agentjet.compute.checkpoint import STATE_FILE, seal
from agentjet.compute.protocol import OperationLog
from agentjet.compute.rank import Rank
from agentjet.config import ModelConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, WorkerDied
from agentjet.server.gateway import Gateway
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import DEFAULT_RUN, ModelInfo, PolicyId, Sampled, SamplingParams
from tests.fakes import ScriptedCompute

WEIGHTS = "policy/model.safetensors"
CONFIG = "policy/config.json"
TRAINER = "trainer.pt"
EXPORTED = "model.safetensors"
Damage = Callable[[Path], None]


def ordered(checkpoints: Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    return sorted(path for path in checkpoints.glob("step_*") if path.is_dir())


def _newest(checkpoints: Path) -> Path:
    return ordered(checkpoints)[-1]


def _flip(file: str, place: float, checkpoints: Path) -> None:
    """Flip one bit; `place` is a fraction of the file's length."""
    path = _newest(checkpoints) / file
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x04
    path.write_bytes(content)


def _truncate(file: str, checkpoints: Path) -> None:
    path = _newest(checkpoints) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zero(file: str, checkpoints: Path) -> None:
    """As a file system leaves a file that was never flushed: as long as it was, without its content."""
    path = _newest(checkpoints) / file
    path.write_bytes(bytes(path.stat().st_size))


def _empty(file: str, checkpoints: Path) -> None:
    (_newest(checkpoints) / file).write_bytes(b"")


def _delete(file: str, checkpoints: Path) -> None:
    (_newest(checkpoints) / file).unlink()


def _edit(checkpoints: Path, **changes: object) -> None:
    """Change the state and leave its digest; a value of None takes the key away."""
    path = _newest(checkpoints) / STATE_FILE
    state = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))


def _off_by(versions: int, checkpoints: Path) -> None:
    _edit(
        checkpoints,
        policy_version=json.loads((_newest(checkpoints) / STATE_FILE).read_text())["policy_version"] + versions,
    )


def _sealed_again(folder: Path, policy_version: int) -> None:
    """Gives a checkpoint another version and digests that match: only the journal shows the difference."""
    state = json.loads((folder / STATE_FILE).read_text())
    (folder / STATE_FILE).unlink()
    seal(folder, {**_bare(state), "policy_version": policy_version})


def _bare(state: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in state.items() if key not in ("format", "files", "digest")}


def _older_one_renamed(checkpoints: Path) -> None:
    older, newest = ordered(checkpoints)[-2:]
    shutil.rmtree(newest)
    shutil.copytree(older, newest)


def _of_another_run(checkpoints: Path) -> None:
    newest = _newest(checkpoints)
    _older_one_renamed(checkpoints)
    _sealed_again(newest, int(newest.name.removeprefix("step_")))


def _of_the_future(checkpoints: Path) -> None:
    newest = _newest(checkpoints)
    version = int(newest.name.removeprefix("step_")) + 5
    shutil.copytree(newest, newest.with_name(f"step_{version:06d}"))
    _sealed_again(newest.with_name(f"step_{version:06d}"), version)


def _without_files(checkpoints: Path) -> None:
    newest = _newest(checkpoints)
    shutil.rmtree(newest)
    newest.mkdir()


def _half_written(checkpoints: Path) -> None:
    """Adds leftovers of a crash beside the newest checkpoint: one with a temporary name, one with a checkpoint's."""
    newest = _newest(checkpoints)
    later = f"step_{int(newest.name.removeprefix('step_')) + 1:06d}"
    for name in (f".{later}.new", f"..{later}.new.partial", later):
        shutil.copytree(newest / "policy", checkpoints / name / "policy")


def _every(damage: Damage, checkpoints: Path) -> None:
    """The same to every checkpoint, oldest first."""
    aside = checkpoints.with_name("aside")
    aside.mkdir()
    for path in ordered(checkpoints):
        path.rename(aside / path.name)
    for path in ordered(aside):
        path.rename(checkpoints / path.name)
        damage(checkpoints)
    aside.rmdir()


def _gone(checkpoints: Path) -> None:
    shutil.rmtree(_newest(checkpoints))


NEWEST: dict[str, Damage] = {
    "a bit of the weights": partial(_flip, WEIGHTS, 0.7),
    "a bit of the weights' header": partial(_flip, WEIGHTS, 0.001),
    "a bit of the model's config": partial(_flip, CONFIG, 0.5),
    "a bit of the optimiser's tensors": partial(_flip, TRAINER, 0.2),
    "a bit of the optimiser's pickle": partial(_flip, TRAINER, 0.0005),
    "a bit of the optimiser's index": partial(_flip, TRAINER, 0.9995),
    "a bit of the state": partial(_flip, STATE_FILE, 0.1),
    "a bit of the state's digest": partial(_flip, STATE_FILE, 0.99),
    "weights cut": partial(_truncate, WEIGHTS),
    "optimiser cut": partial(_truncate, TRAINER),
    "state cut": partial(_truncate, STATE_FILE),
    "weights zeroed": partial(_zero, WEIGHTS),
    "optimiser zeroed": partial(_zero, TRAINER),
    "state zeroed": partial(_zero, STATE_FILE),
    "optimiser empty": partial(_empty, TRAINER),
    "weights gone": partial(_delete, WEIGHTS),
    "optimiser gone": partial(_delete, TRAINER),
    "state gone": partial(_delete, STATE_FILE),
    "version too low": partial(_off_by, -1),
    "version too high": partial(_off_by, 1),
    "state without a version": partial(_edit, policy_version=None),
    "state without digests": partial(_edit, files=None, digest=None),
    "another format": partial(_edit, format=9),
    "an older one under its name": _older_one_renamed,
    "one of another run": _of_another_run,
    "folder empty": _without_files,
    "folder gone": _gone,
    "later ones half written": _half_written,
}
"""Done to the newest checkpoint: the one before must lead to the same weights."""
REFUSED: dict[str, Damage] = {
    "a bit of every optimiser": partial(_every, partial(_flip, TRAINER, 0.5)),
    "every state gone": partial(_every, partial(_delete, STATE_FILE)),
    "every folder gone": partial(_every, _gone),
    "one of another run with a later version": _of_the_future,
}
"""Done to every checkpoint, or as if the journal had lost its end: the start must be refused."""


# ---- starts on a damaged data dir ------------------------------------------------------------------------------------


class LocalWorker(ProcessCompute):
    """A backend whose worker is an object in this process. It loads the model of a policy once.

    It learns with the real worker. The completions are those of a script.
    """

    def __init__(self, config: ServeConfig, words: ScriptedCompute) -> None:
        super().__init__(config)
        self.words = words
        self.worker = Rank(lambda message: None)
        self.num_starts: Counter[PolicyId] = Counter()
        self._first: dict[PolicyId, tuple[ModelInfo, Any]] = {}
        """Each policy's model, and its learner's state of version 0."""

    async def add(self, policy: PolicyId, model: ModelConfig, **named: Any) -> ModelInfo:
        """Load the policy, or give it its first weights back."""
        self.num_starts[policy] += 1
        if policy not in self._first:
            info = self.worker.handle("add", policy, model, self._config.sampler)
            self._first[policy] = info, copy.deepcopy(self.worker.policies[policy].learner.state())
        info, state = self._first[policy]
        hosted = self.worker.policies[policy]
        hosted.learner.restore(copy.deepcopy(state))
        hosted._operations = OperationLog()
        hosted._change_version(0)
        return info

    async def remove(self, policy: PolicyId) -> None:
        """The policy stays, for the next start."""

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled]:
        """The words of a script."""
        self.words.policies[policy].version = self.worker.policies[policy].version
        async for piece in self.words.sample(policy, token_ids, params):
            yield piece

    async def close(self) -> None:
        """Nothing to end."""

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        """Never."""
        return await asyncio.Future()

    def _hosted(self, policy: PolicyId) -> Hosted:
        return cast(Hosted, SimpleNamespace(ranks=self, samplers=None))

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        """Load a batch that needs no sending."""
        await self.ask("load_batch", policy, batch)

    async def ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """As the loop of a worker process, which turns foreign errors into a `ComputeError`."""
        try:
            return self.worker.handle(op, policy, *args)
        except AgentJetError:
            raise
        except Exception as error:
            raise ComputeError(f"{op} failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A run of a server that has stopped, before anything is damaged."""

    config: ServeConfig
    policy_version: int
    weights: bytes

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[ServeConfig]:
        """The settings of a server on a damaged copy of the data dir."""
        server = self.config.server
        with tempfile.TemporaryDirectory() as made:
            copied = Path(made) / "data"
            shutil.copytree(server.data_dir, copied, ignore=shutil.ignore_patterns("exports", "*.lock", "logs"))
            damage(copied / "runs" / DEFAULT_RUN / "checkpoints")
            yield self.config.model_copy(update={"server": server.model_copy(update={"data_dir": copied})})


async def start(config: ServeConfig, compute: LocalWorker) -> tuple[int, bytes]:
    """Starts the gateway, has it write a checkpoint, and stops it. Returns the policy's version and weights."""
    compute.num_starts.clear()
    gateway = Gateway(config, compute, run=DEFAULT_RUN)
    try:
        await gateway.start()
        await asyncio.wait_for(gateway.engine.wait_until_up(), 60)
        await gateway.versions.save()
        exported = config.server.data_dir / "exported"
        await compute.export(PolicyId(), exported)
        return gateway.swarm.policy_version, (exported / EXPORTED).read_bytes()
    finally:
        await gateway.close()
        assert max(compute.num_starts.values(), default=0) <= 2, "one recovery adds a policy twice at most"
