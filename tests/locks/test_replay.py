"""A recorded journal leads to the same weights again, bit by bit, on every backend: 5 of `tests.locks`.

Rounding depends on the processor and on the version of torch. So a replay is compared with another one of this process;
with the fingerprints of the journal only where they were recorded.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from agentjet.compute.group import RankGroup, Rendezvous, Sharding, join
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.rank import make_deterministic
from agentjet.config import JobConfig, ModelConfig
from agentjet.swarm import Journal, SwarmState
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import JOURNAL, SOLE_POLICY
from bench.scaling.faults import make_sampler_python
from tests.cluster.rank_cases import whole
from tests.compute.direct import learn_directly
from tests.compute.test_locks import machine
from tests.e2e.server import Server, are_equal
from tests.locks.data_dirs import DEMO, MACHINE, unpack
from tests.tiny import make_model

HOST = "127.0.0.1"
Weights = list[str]
"""Digest of the masters after each batch."""


@dataclass(frozen=True)
class Recorded:
    """A run without a checkpoint."""

    model: ModelConfig
    batches: list[tuple[TrainingBatch, JobConfig]]
    fingerprints: list[int]
    """After each batch."""
    machine: str
    """The machine that learned them, as `test_locks` names it."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    data_dir = unpack(DEMO, tmp_path_factory.mktemp(DEMO))
    with closing(Journal.open(data_dir / "runs" / "default" / JOURNAL)) as journal:
        held = journal.job_settings()
        assert held is not None
        swarm = SwarmState(journal, held.given)
        batches = swarm.batches.from_version(0)
        training = [(swarm.batches.training_batches(batch)[SOLE_POLICY], batch.job) for batch in batches]
        fingerprints = [journal.fingerprints(batch.id)[SOLE_POLICY] for batch in batches]
    model = ModelConfig(name=str(data_dir / "model"), device="cpu", dtype="float32", threads=1)
    return Recorded(model, training, fingerprints, (data_dir / MACHINE).read_text().strip())


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """The group of one rank."""
    rendezvous = Rendezvous(HOST)
    join(0, 1, rendezvous.address, rendezvous, HOST)
    yield RankGroup(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def learn(learner: PolicyLearner, run: Recorded) -> tuple[Weights, list[int]]:
    """Learns the batches; returns digest and fingerprint of the weights after each."""
    weights, fingerprints = [], []
    for batch, job in run.batches:
        learn_directly(learner, batch.forest, job, batch.id, batch.facts)
        learner.weights_changed()
        fingerprints.append(learner.fingerprint)
        found = hashlib.sha256()
        for master in learner.masters():
            found.update(whole(master).numpy().tobytes())
        weights.append(found.hexdigest())
    return weights, fingerprints


def test_both_backends_replay_a_journal_bit_by_bit(run: Recorded, group: RankGroup) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make_deterministic()
    try:
        weights, fingerprints = learn(PolicyLearner(load_policy(run.model)), run)
        assert len(set(weights)) == len(weights) == 6, "each batch changes the weights"
        assert learn(PolicyLearner(load_policy(run.model)), run) == (weights, fingerprints)
        for sharding in get_args(Sharding):
            learner = PolicyLearner(load_policy(run.model), group, sharding)
            assert learn(learner, run) == (weights, fingerprints), sharding
        if machine() == run.machine:
            assert fingerprints == run.fingerprints
    finally:
        torch.set_num_threads(threads)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.thorough
def test_servers_of_both_backends_replay_a_run(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", layers=1, hidden=16)
    with Server(model, tmp_path / "embedded") as server:
        for _ in range(3):
            server.batch()
        server.kill()
    shutil.copytree(tmp_path / "embedded", tmp_path / "cluster")
    cluster = {"compute__backend": "cluster", "compute__ranks": 1, "compute__samplers": 1}
    cluster["compute__sampler_python"] = make_sampler_python(tmp_path)
    weights = []
    for name, settings in (("embedded", {}), ("cluster", cluster)):
        with Server(model, tmp_path / name, **settings) as server:
            status = server.get("/status")
            assert status["policy_version"] == 3 and status["workers_started"] == 1
            weights.append(server.exported())
    assert are_equal(*weights)
