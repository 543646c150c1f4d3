"""Start after damage: does a data dir with damaged checkpoints come back to the same weights?

`python -m bench.breaking.recovery SETTINGS EXPORT [NUMBER]` damages copies of the data dir of a server that stopped, in
every way or in `NUMBER` of each list, and starts twice on each. EXPORT is the policy that the server ended with. The
last line is JSON. Gateway and engine are the real ones; the worker is a real one in this process, without sampling.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentjet.compute.embedded import EmbeddedCompute
from agentjet.compute.embedded.worker import Worker
from agentjet.compute.operations import OperationLog
from agentjet.config import ModelConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, WorkerDied
from agentjet.gateway import Gateway
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import ModelInfo, PolicyId, Sampled, SamplingParams
from bench.breaking.damage import NEWEST, REFUSED, Damage, ordered
from bench.breaking.reference import WEIGHTS

SECONDS = 60.0
"""For a start to come to an end of either kind."""
CHECKPOINTS = Path("runs/default/checkpoints")
MAX_STARTS = 2
"""Workers that one recovery may take."""


class LocalWorker(EmbeddedCompute):
    """A backend whose worker is an object in this process, which loads its model once. It does not sample."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self._worker = Worker(io.BytesIO())
        model, sampler = (section.model_dump(mode="json") for section in (config.model, config.sampler))
        self._info = ModelInfo(**self._worker.handle("add", PolicyId(), model=model, dtype="", sampler=sampler))
        self.hosted = self._worker.policies[PolicyId()]
        self._first = copy.deepcopy(self.hosted.learner.state())
        self.num_starts = 0

    async def add(self, policy: PolicyId, model: ModelConfig, *, worker: str = "", dtype: str = "") -> ModelInfo:
        """Give the policy its first weights back."""
        self.num_starts += 1
        self.hosted.learner.restore(copy.deepcopy(self._first))
        self.hosted._operations = OperationLog()
        self.hosted._change_version(0)
        return self._info

    async def remove(self, policy: PolicyId) -> None:
        """The policy stays, for the next start."""

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled]:
        """Refused."""
        raise ComputeError("this worker does not sample")
        yield

    async def close(self) -> None:
        """Nothing to end."""

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        """Never."""
        return await asyncio.Future()

    async def _ask(self, op: str, policy: PolicyId, **arguments: Any) -> Any:
        """As the loop of a worker process, which turns foreign errors into a `ComputeError`."""
        try:
            if isinstance(batch := arguments.get("batch"), TrainingBatch):
                arguments["batch"] = batch.to_wire()
            return self._worker.handle(op, policy, **arguments)
        except AgentJetError:
            raise
        except Exception as error:
            raise ComputeError(f"{op} failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Start:
    """A start on a data dir, come to an end."""

    end: str
    """`recovered`, `refused` or `stuck`."""
    policy_version: int = -1
    weights: bytes = b""
    why: str = ""


async def start(config: ServeConfig, compute: LocalWorker) -> Start:
    """Start a gateway, have it write a checkpoint, stop it."""
    compute.num_starts = 0
    gateway = Gateway(config, compute)
    try:
        await gateway.start()
        await asyncio.wait_for(gateway.ready(), SECONDS)
        if compute.num_starts > MAX_STARTS:
            return Start("stuck", why=f"{compute.num_starts} workers")
        await gateway.versions.save()
        exported = config.server.data_dir / "exported"
        await compute.export(PolicyId(), exported)
        return Start("recovered", gateway.swarm.policy_version, (exported / WEIGHTS).read_bytes())
    except TimeoutError:
        return Start("stuck", why=gateway.status().waiting_for)
    except AgentJetError as error:
        return Start("stuck" if compute.num_starts > MAX_STARTS else "refused", why=f"{type(error).__name__}: {error}")
    finally:
        await gateway.close()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one kind of damage."""

    kind: str
    end: str
    silent: bool
    """Another policy than the undisturbed one was served, or an end that a second start does not repeat."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A server that has stopped, before anything is damaged."""

    config: ServeConfig
    policy_version: int
    weights: bytes


async def judge(kind: str, damage: Damage, undisturbed: Undisturbed, compute: LocalWorker) -> Verdict:
    """Damage a copy of the data dir, then start on it twice. The second start takes what the first one left."""
    config = undisturbed.config
    with tempfile.TemporaryDirectory() as made:
        copied = Path(made) / "data"
        shutil.copytree(config.server.data_dir, copied, ignore=shutil.ignore_patterns("exports", "*.lock", "logs"))
        damage(copied / CHECKPOINTS)
        server = config.server.model_copy(update={"data_dir": copied})
        starts = [await start(config.model_copy(update={"server": server}), compute) for _ in range(2)]
    first, second = starts
    expected = (undisturbed.policy_version, undisturbed.weights)
    silent = any(one.end == "recovered" and (one.policy_version, one.weights) != expected for one in starts)
    end = first.end if first.end == second.end else "stuck"
    return Verdict(kind, end, silent, first.why or second.why)


async def judge_all(undisturbed: Undisturbed, number: int | None = None) -> list[Verdict]:
    """Every kind of damage, or the first `number` of each list."""
    compute = LocalWorker(undisturbed.config)
    without = await judge("none", lambda checkpoints: None, undisturbed, compute)
    assert (without.end, without.silent) == ("recovered", False), without
    kinds = [*list(NEWEST.items())[:number], *list(REFUSED.items())[:number]]
    return [await judge(kind, damage, undisturbed, compute) for kind, damage in kinds]


def main() -> int:
    import torch

    settings, exported = map(Path, sys.argv[1:3])
    number = int(sys.argv[3]) if len(sys.argv) > 3 else None
    torch.use_deterministic_algorithms(True, warn_only=True)
    config = ServeConfig.model_validate_json(settings.read_text())
    version = int(ordered(config.server.data_dir / CHECKPOINTS)[-1].name.removeprefix("step_"))
    undisturbed = Undisturbed(config, version, (exported / WEIGHTS).read_bytes())
    print(json.dumps([asdict(verdict) for verdict in asyncio.run(judge_all(undisturbed, number))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
