"""Start after damage: does a data dir with damaged checkpoints come back to the same weights?

`python -m bench.breaking.recovery SETTINGS EXPORTS [NUMBER]` damages copies of the data dir of a server that stopped,
in every way or in `NUMBER` of each list, and starts twice on each. EXPORTS is a JSON object: by run, the folders of the
policies that the server ended with. The last line is JSON. Gateway and engine are the real ones; the worker is a real
one in this process, without sampling.
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from agentjet.compute.backend import Hosted, ProcessCompute
from agentjet.compute.embedded.worker import Worker
from agentjet.compute.operations import OperationLog
from agentjet.config import ModelConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, WorkerDied
from agentjet.gateway import Gateway
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import DEFAULT_RUN, ModelInfo, PolicyId, Sampled, SamplingParams
from bench.breaking.damage import NEWEST, REFUSED, TEAM_NEWEST, Damage, ordered
from bench.breaking.plan import RUNS, TEAM
from bench.breaking.reference import WEIGHTS

SECONDS = 60.0
"""For a start to come to an end of either kind."""
MAX_STARTS = 2
"""Times that one recovery may add a policy."""


class LocalWorker(ProcessCompute):
    """A backend whose worker is an object in this process. It loads the model of a policy once, and does not sample."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self.worker = Worker(lambda message: None)
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
        """Refused."""
        raise ComputeError("this worker does not sample")
        yield

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
class Start:
    """A start on a data dir, come to an end."""

    end: str
    """`recovered`, `refused` or `stuck`."""
    policy_version: int = -1
    weights: bytes = b""
    why: str = ""


async def start(config: ServeConfig, run: str, compute: LocalWorker) -> Start:
    """Start the gateway of a run, have it write a checkpoint, stop it."""
    compute.num_starts.clear()
    gateway = Gateway(config, compute, run=run)

    def is_stuck() -> bool:
        return max(compute.num_starts.values(), default=0) > MAX_STARTS

    try:
        await gateway.start()
        await asyncio.wait_for(gateway.engine.wait_until_up(), SECONDS)
        if is_stuck():
            return Start("stuck", why=f"a policy was added more than {MAX_STARTS} times")
        await gateway.versions.save()
        exports = {policy: config.server.data_dir / "exported" / policy for policy in config.policy_names}
        for policy, folder in exports.items():
            await compute.export(PolicyId(run, policy), folder)
        return Start("recovered", gateway.swarm.policy_version, weights_of(exports))
    except TimeoutError:
        return Start("stuck", why=gateway.status().waiting_for)
    except AgentJetError as error:
        return Start("stuck" if is_stuck() else "refused", why=f"{type(error).__name__}: {error}")
    finally:
        await gateway.close()


def weights_of(exports: Mapping[str, Path]) -> bytes:
    """The weights of all policies, from the folder of each."""
    return b"".join((exports[policy] / WEIGHTS).read_bytes() for policy in sorted(exports))


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
    """A run of a server that has stopped, before anything is damaged."""

    config: ServeConfig
    policy_version: int
    weights: bytes
    run: str = DEFAULT_RUN


def checkpoints_of(data_dir: Path, run: str) -> Path:
    return data_dir / "runs" / run / "checkpoints"


async def judge(kind: str, damage: Damage, undisturbed: Undisturbed, compute: LocalWorker) -> Verdict:
    """Damage a copy of the data dir, then start on it twice. The second start takes what the first one left."""
    config, run = undisturbed.config, undisturbed.run
    with tempfile.TemporaryDirectory() as made:
        copied = Path(made) / "data"
        shutil.copytree(config.server.data_dir, copied, ignore=shutil.ignore_patterns("exports", "*.lock", "logs"))
        damage(checkpoints_of(copied, run))
        server = config.server.model_copy(update={"data_dir": copied})
        starts = [await start(config.model_copy(update={"server": server}), run, compute) for _ in range(2)]
    first, second = starts
    expected = (undisturbed.policy_version, undisturbed.weights)
    silent = any(one.end == "recovered" and (one.policy_version, one.weights) != expected for one in starts)
    end = first.end if first.end == second.end else "stuck"
    return Verdict(kind, end, silent, first.why or second.why)


async def judge_all(undisturbed: Undisturbed, kinds: Mapping[str, Damage]) -> list[Verdict]:
    """Every kind of damage to the checkpoints of a run."""
    compute = LocalWorker(undisturbed.config)
    without = await judge("none", lambda checkpoints: None, undisturbed, compute)
    assert (without.end, without.silent) == ("recovered", False), without
    return [await judge(kind, damage, undisturbed, compute) for kind, damage in kinds.items()]


def undisturbed_run(settings: dict[str, Any], run: str, exports: Mapping[str, Path]) -> Undisturbed:
    """A run as its server left it."""
    data_dir = Path(settings["server"]["data_dir"])
    record = data_dir / "runs" / run / "run.json"
    own = json.loads(record.read_text()) if run != DEFAULT_RUN else {}
    config = ServeConfig.model_validate({**settings, **{key: own[key] for key in ("policies", "job") if key in own}})
    version = int(ordered(checkpoints_of(data_dir, run))[-1].name.removeprefix("step_"))
    return Undisturbed(config, version, weights_of(exports), run)


def main() -> int:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    settings = json.loads(Path(sys.argv[1]).read_text())
    exports = json.loads(sys.argv[2])
    number = int(sys.argv[3]) if len(sys.argv) > 3 else None
    kinds = {
        DEFAULT_RUN: dict([*list(NEWEST.items())[:number], *list(REFUSED.items())[:number]]),
        TEAM: dict(list(TEAM_NEWEST.items())[:number]),
    }
    verdicts: list[Verdict] = []
    for run in RUNS:
        folders = {policy: Path(folder) for policy, folder in exports[run].items()}
        verdicts += asyncio.run(judge_all(undisturbed_run(settings, run, folders), kinds[run]))
    print(json.dumps([asdict(verdict) for verdict in verdicts]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
