"""Recipes that fail.

A hook that fails stops the run with its message, and nothing is lost: it continues with the mended recipe.

A teacher that cannot grade the tokens of a policy is refused before the first episode.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from agentjet.config import JobConfig
from agentjet.errors import ConfigError, InvalidRequest, Later, RecipeError
from agentjet.protocol import BeginRequest, FinishRequest, status_of
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.recipe import FinishedGroup
from agentjet.recipes.registry import make_recipe
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.server.run_policies import check_model
from tests.fakes import Running, running
from tests.tiny import make_model_info

pytestmark = pytest.mark.anyio


# ---- hooks that fail -------------------------------------------------------------------------------------------------


class Fragile(Grpo):
    """Fails until it is mended."""

    mended: ClassVar[bool] = False

    def accept(self, group: FinishedGroup) -> str:
        return "" if Fragile.mended else str(1 / 0)


class FragileRollout(Fragile):
    def accept(self, group: FinishedGroup) -> str:
        return ""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        return default if Fragile.mended else Rollout(1 // 0, 1.0)


async def failed(run: Running) -> str:
    await run.until(lambda: run.gateway.phase.state == "failed")
    with pytest.raises(Later) as refusal:
        await run.gateway.begin(BeginRequest(task_id="t"))
    assert (status_of(refusal.value), refusal.value.code) == (503, "engine_failed")
    return run.gateway.phase.reason


async def test_a_failure_while_a_batch_is_learned(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        run.compute.fail_learn = [RecipeError("the recipe 'x': `columns` failed")]
        ended = await run.fill_batch()
        assert "the recipe 'x': `columns` failed" in await failed(run)
        run.gateway.engine.start()
        await run.until(lambda: run.gateway.swarm.policy_version == 1)
        assert run.compute.learned == [0], "not quarantined"
        assert all(run.gateway.swarm.episode(id).status == "finished" for id in ended)


async def test_a_failure_of_accept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "d", job={"recipe": f"{__name__}:Fragile", "batch_size": 1}) as run:
        await run.episode(0.0)
        last = await run.gateway.begin(BeginRequest(task_id="t", client_id="c"))
        await run.say(last.id)
        assert (await run.gateway.finish(last.id, FinishRequest(reward=1.0))).status == "finished"
        reason = await failed(run)
        assert "`accept` failed at " in reason and "ZeroDivisionError" in reason
        assert [group.state for group in run.gateway.swarm.queries.groups] == ["closing"]
        monkeypatch.setattr(Fragile, "mended", True)
        run.gateway.engine.start()
        await run.until(lambda: run.gateway.swarm.policy_version == 1)


async def test_a_failure_of_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "d", job={"recipe": f"{__name__}:FragileRollout"}) as run:
        with pytest.raises(Later, match=r"`rollout` failed at .*test_recipe_errors.py:\d+: ZeroDivisionError"):
            await run.gateway.begin(BeginRequest(task_id="t"))
        assert "ZeroDivisionError" in await failed(run)
        monkeypatch.setattr(Fragile, "mended", True)
        run.gateway.engine.start()
        await run.gateway.engine.wait_until_up()
        await run.batch()


async def test_a_wrong_task_set_is_an_error_of_the_client_and_stops_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"recipe": "staged"}) as run:
        with pytest.raises(
            InvalidRequest, match="task_set = 'x' is not one of the stages easy, medium, hard"
        ) as refusal:
            await run.gateway.begin(BeginRequest(task_id="t", task_set="x"))
        assert (status_of(refusal.value), refusal.value.param) == (400, "task_set")
        assert (await run.gateway.begin(BeginRequest(task_id="t", task_set="easy"))).status == "live"
        assert run.gateway.phase.state == "sampling"


# ---- teachers --------------------------------------------------------------------------------------------------------


def job_of(teacher: Path | str) -> JobConfig:
    return JobConfig(recipe=make_recipe({"name": "distill", "teacher": str(teacher)}))


def test_a_teacher_is_a_folder_with_the_tokenizer_of_the_policy(tmp_path: Path) -> None:
    info = make_model_info(tmp_path / "tokenizer")
    for missing in ("", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="is not the folder of a model on this machine"):
            check_model(job_of(missing), info)
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing or damaged \(FileNotFoundError"):
        check_model(job_of(teacher), info)
    with pytest.raises(ConfigError, match="is missing or damaged"):  # Both folders lack it.
        check_model(job_of(teacher), replace(info, tokenizer_path=str(teacher)))
    for damaged in (b'{"model": ', b"\xff", b"[]", b'{"model": {}, "added_tokens": []}'):
        (teacher / "tokenizer.json").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is missing or damaged"):
            check_model(job_of(teacher), info)
    tokenizer = json.loads((Path(info.tokenizer_path) / "tokenizer.json").read_text())
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_model(job_of(teacher), info)
    tokenizer["added_tokens"][0]["id"] += 1
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another tokenizer"):
        check_model(job_of(teacher), info)
