"""Checkpoints of a tiny policy, damaged. Pinned here:

1. after each kind of damage to the newest checkpoint, the one before and the journal give the same weights;
2. after damage to all of them every start is refused, because their batches were pruned;
3. a checkpoint of another format, as of AgentJet 0.1, is refused;
4. the umask decides who can read the files.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentjet.compute import checkpoint
from agentjet.compute.checkpoint import atomic_folder
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.config import ServeConfig
from agentjet.errors import CheckpointError, ConfigError
from agentjet.server.runs import Runs
from agentjet.types import PolicyId
from tests.compute.checkpoint_damage import EXPORTED, NEWEST, REFUSED, Damage, LocalWorker, Undisturbed, start
from tests.fakes import Clock, Running, ScriptedCompute, saying
from tests.tiny import make_model_info

NUM_BATCHES = 3


Ended = tuple[Undisturbed, LocalWorker]


@pytest.fixture(scope="module")
def ended(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    data_dir = tmp_path_factory.mktemp("run") / "data"
    config = ServeConfig.model_validate(
        {
            "model": {"name": str(tiny_folder), "device": "cpu", "dtype": "float32", "threads": 1},
            "sampler": {"cache_tokens": 256},
            "server": {"data_dir": data_dir},
            "job": {
                "batch_size": 1,
                "group_size": 2,
                "max_tokens": 8,
                "checkpoint_every": 1,
                "optimizer": {"lr": 1e-3},
            },
        }
    )

    async def run() -> LocalWorker:
        words = ScriptedCompute(make_model_info(data_dir.parent / "tokenizer"), saying(lambda prompt: "hi"))
        compute = LocalWorker(config, words)
        await words.add(PolicyId(), config.model)
        runs = Runs(config, compute)
        try:
            await runs.start()
            await runs.default.engine.wait_until_up()
            running = Running(runs, runs.default, words, Clock(), Clock())
            for _ in range(NUM_BATCHES):
                await running.batch()
            await compute.export(PolicyId(), data_dir / "exports" / "last")
        finally:
            await runs.close()
        return compute

    compute = asyncio.run(run())
    return Undisturbed(config, NUM_BATCHES, (data_dir / "exports" / "last" / EXPORTED).read_bytes()), compute


@pytest.mark.parametrize("damage", NEWEST.values(), ids=NEWEST)
def test_damage_to_the_newest_checkpoint_changes_nothing(ended: Ended, damage: Damage) -> None:
    """The second start takes what the first one left."""
    run, compute = ended
    with run.damaged(damage) as config:
        for _ in range(2):
            assert asyncio.run(start(config, compute)) == (run.policy_version, run.weights)


@pytest.mark.parametrize("damage", REFUSED.values(), ids=REFUSED)
def test_damage_that_leaves_no_way_to_the_same_weights_is_refused(ended: Ended, damage: Damage) -> None:
    run, compute = ended
    with run.damaged(damage) as config:
        for _ in range(2):
            with pytest.raises((CheckpointError, ConfigError), match="Restore "):
                asyncio.run(start(config, compute))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 1, "policy_version": 1, "adapters": false}'])
def test_a_checkpoint_of_another_format_is_refused(policy: Policy, tmp_path: Path, text: str) -> None:
    good, learner = tmp_path / "step_000001", PolicyLearner(policy)
    checkpoint.save(good, learner, {"policy_version": 1, "metrics": {}})
    (good / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(good, learner)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_counts(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "step_000001") as folder:
            save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
            (folder / "config.json").write_text("{}")
    finally:
        os.umask(before)
    files = sorted((tmp_path / "step_000001").iterdir())
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert [file.stat().st_mode & 0o777 for file in files] == [mode, mode]
