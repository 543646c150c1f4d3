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
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agentjet.compute.cluster import checkpoint as cluster_checkpoint
from agentjet.compute.cluster.group import Group, Rendezvous, join
from agentjet.compute.cluster.learner import RankLearner
from agentjet.compute.embedded import checkpoint
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.worker import make_deterministic
from agentjet.config import JobConfig, LoraConfig, ModelConfig
from agentjet.swarm import Journal, SwarmState
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import JOURNAL, SOLE_POLICY
from bench.scaling.faults import make_sampler_python
from tests import recorded_data_dir
from tests.cluster.rank_cases import whole
from tests.compute.test_locks import machine
from tests.e2e.server import Server, are_equal
from tests.locks.data_dirs import DEMO, EARLIER, MACHINE, unpack
from tests.tiny import make_model

HOST = "127.0.0.1"
Weights = list[str]
"""Digest of the masters after each batch."""


@dataclass(frozen=True)
class Recorded:
    """A run that was killed, with all batches since a checkpoint, or since its first weights."""

    model: ModelConfig
    checkpoint: Path | None
    batches: list[tuple[TrainingBatch, JobConfig]]
    fingerprints: list[int | None]
    """After each batch; None for the batch that was pending."""
    machine: str
    """The machine that learned them, as `test_locks` names it; empty if it is not known."""


@pytest.fixture(scope="module", params=[DEMO, EARLIER])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    place = tmp_path_factory.mktemp(request.param)
    data_dir = unpack(request.param, place)
    earlier = request.param == EARLIER
    folder = data_dir / "runs" / "default"
    with closing(Journal.open(folder / JOURNAL)) as journal:
        held = journal.job_settings()
        assert held is not None
        swarm = SwarmState(journal, held.given)
        batches = swarm.batches.from_version(2 if earlier else 0)
        training = [(swarm.batches.training_batches(batch)[SOLE_POLICY], batch.job) for batch in batches]
        known = [journal.fingerprints(batch.id).get(SOLE_POLICY) for batch in batches]
    model = data_dir.parent / recorded_data_dir.MODEL if earlier else data_dir / recorded_data_dir.MODEL
    rank = recorded_data_dir.SETTINGS["model__lora__rank"] if earlier else 0
    settings = ModelConfig(name=str(model), device="cpu", dtype="float32", threads=1, lora=LoraConfig(rank=rank))
    start = folder / "checkpoints" / "step_000002" if earlier else None
    return Recorded(settings, start, training, known, "" if earlier else (data_dir / MACHINE).read_text().strip())


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """The group of one rank."""
    rendezvous = Rendezvous(HOST)
    join(0, 1, rendezvous.address, rendezvous, HOST)
    yield Group(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def learn(learner: PolicyLearner, run: Recorded) -> tuple[Weights, list[int]]:
    """Learns the batches; returns digest and fingerprint of the weights after each."""
    weights, fingerprints = [], []
    for batch, job in run.batches:
        learner.learn(batch.forest, job, batch.id, batch.facts)
        learner.weights_changed()
        fingerprints.append(learner.fingerprint)
        found = hashlib.sha256()
        for master in learner.masters():
            found.update(whole(master).numpy().tobytes())
        weights.append(found.hexdigest())
    return weights, fingerprints


def embedded(run: Recorded) -> PolicyLearner:
    policy = load_policy(run.model)
    learner = PolicyLearner(policy)
    if run.checkpoint is not None:
        checkpoint.load(run.checkpoint, policy, learner)
    return learner


def one_rank(run: Recorded, group: Group, sharding: str) -> PolicyLearner:
    learner = RankLearner(load_policy(run.model), group, sharding)  # type: ignore[arg-type]
    if run.checkpoint is not None:
        cluster_checkpoint.load(run.checkpoint, learner, group)
    return learner


def test_both_backends_replay_a_journal_bit_by_bit(run: Recorded, group: Group) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make_deterministic()
    try:
        weights, fingerprints = learn(embedded(run), run)
        assert len(weights) > 1 and all(before != after for before, after in pairwise(weights)), "weights changed"
        assert learn(embedded(run), run) == (weights, fingerprints)
        for sharding in ("gathered", "sharded"):
            assert learn(one_rank(run, group, sharding), run)[0] == weights, sharding
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
