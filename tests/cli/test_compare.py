"""`agentjet compare`: figures worked out by hand, settings that differ, and refusals that name the file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentjet.cli.checkpoints import roll_back
from agentjet.cli.runs import read_run
from agentjet.errors import ConfigError
from agentjet.gateway.collection import differing_settings, figures
from agentjet.protocol import EvaluationRequest
from tests.cli.test_commands import run
from tests.fakes import running


def step(reward: float) -> dict[str, float]:
    sizes = {"batch/episodes": 4.0, "batch/sampled_tokens": 100.0}
    return {"reward/mean": reward, **sizes, "time/sample": 30.0, "time/wait": 10.0, "time/learn": 20.0}


def test_figures_of_steps(tmp_path: Path) -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 0.9, 0.4]
    found = figures(7, {version: step(reward) for version, reward in enumerate(rewards, 1)}, [])
    assert (found["policy_version"], found["batches"], found["episodes"]) == (7, 7, 28)
    assert (found["sampled_tokens"], found["minutes"]) == (700, 7.0)
    assert (found["reward_first_5"], found["reward_last_5"]) == (pytest.approx(0.2), pytest.approx(0.44))
    assert (found["reward_best"], found["reward_best_version"]) == (0.9, 6)
    assert (found["evaluations"], found["score_best"]) == (0, None)
    asyncio.run(trained(tmp_path / "a", 1e-5, ()))
    printed = run("compare", str(tmp_path / "a"), str(tmp_path / "a"))
    assert ["reward", "best", "0.500", "0.500"] in [line.split() for line in printed.splitlines()]
    assert ["score", "best", "-", "-"] in [line.split() for line in printed.splitlines()]


async def trained(data_dir: Path, lr: float, scores: tuple[float, ...]) -> None:
    async with running(data_dir, job={"optimizer": {"lr": lr}}) as up:
        await up.batch()
        for score in scores:
            await up.gateway.versions.record_evaluation(
                EvaluationRequest(policy_version=1, score=score, num_tasks=1, num_episodes=1)
            )
        reads_only(data_dir)  # while the server runs


def reads_only(data_dir: Path) -> None:
    files = sorted(path.name for path in data_dir.iterdir())
    read_run(data_dir)
    assert sorted(path.name for path in data_dir.iterdir()) == files


def test_data_dirs_have_evaluations_and_settings(tmp_path: Path) -> None:
    asyncio.run(trained(tmp_path / "a", 1e-5, (0.5, 0.75)))
    asyncio.run(trained(tmp_path / "b", 2e-5, ()))
    reads_only(tmp_path / "a")
    compared = json.loads(run("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"))
    assert compared["settings"] == {"job.optimizer.lr": [1e-5, 2e-5]}
    first, second = compared["runs"]
    assert (first["evaluations"], first["score_first"], first["score_best"], first["batches"]) == (2, 0.5, 0.75, 1)
    assert (second["evaluations"], second["score_best"]) == (0, None)
    assert first["reward_best"] == 0.5 and first["episodes"] == 4
    folders = [str(tmp_path / name / "runs" / "default") for name in "ab"]
    by_folder = json.loads(run("compare", *folders, "--json"))
    assert by_folder["settings"] == compared["settings"], "the folder of a run stands for it"
    printed = run("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "settings that differ" in printed and "job.optimizer.lr" in printed


def test_batches_that_were_undone_do_not_count(tmp_path: Path) -> None:
    async def scenario() -> None:
        for _ in range(2):
            async with running(tmp_path / "a", job={"checkpoint_every": 1, "keep_checkpoints": 9}) as up:
                await up.batch()
                await up.batch()
                score = up.gateway.swarm.policy_version / 10
                await up.gateway.versions.record_evaluation(
                    EvaluationRequest(policy_version=round(10 * score), score=score, num_tasks=1, num_episodes=1)
                )
            if up.gateway.swarm.policy_version == 2:
                roll_back(tmp_path / "a", "1")

    asyncio.run(scenario())
    found, _ = read_run(tmp_path / "a")
    assert (found["policy_version"], found["batches"], found["episodes"]) == (5, 3, 12)
    assert found["reward_best_version"] == 1, "not 2, which was undone"
    assert (found["evaluations"], found["score_first"], found["score_best_version"]) == (1, 0.5, 5)


def test_settings_that_differ() -> None:
    assert differing_settings([{"a": 1, "b": 2}, {"a": 1, "c": 3}]) == {"b": [2, None], "c": [None, 3]}


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only one run, .*: name two or more"):
        run("compare", str(tmp_path))
    with pytest.raises(ConfigError, match="is not a data dir of AgentJet"):
        run("compare", str(tmp_path), str(tmp_path))
    asyncio.run(untrained(tmp_path / "new"))
    with pytest.raises(ConfigError, match="new' has no batch: name a data dir"):
        run("compare", str(tmp_path / "new"), str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="has no run 'other'"):
        run("compare", str(tmp_path / "new"), str(tmp_path / "new"), "--run", "other")


async def untrained(data_dir: Path) -> None:
    async with running(data_dir):
        pass
