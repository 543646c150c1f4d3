"""A run that begins from a checkpoint of another one: `model = "RUN@VERSION"`.

1. The checkpoint becomes version 0 of the new run, once: later starts need neither the other run nor its checkpoints.
2. A run, policy or version that does not exist is refused by name, with those that do.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentjet.cli.checkpoints import branch
from agentjet.errors import Conflict
from agentjet.gateway.run_policies import whole_model
from agentjet.protocol import RunSettings
from agentjet.types import PolicyId
from tests.fakes import running

pytestmark = pytest.mark.anyio


async def test_a_checkpoint_becomes_the_first_version(tmp_path: Path) -> None:
    study = PolicyId("study", "p")
    async with running(tmp_path / "d") as run:
        await run.batch()
        weights = run.compute.weights
        await run.gateway.versions.save()
        run.gateway.versions.tag("good", 1)
        await run.runs.put("study", RunSettings(policies={"p": {"model": "default@good"}}))
        await run.until(lambda: run.runs.get("study").phase.state == "sampling")
        start = run.runs.get("study").folder / "start" / "default@good"
        assert (start / "model.txt").read_text() == weights
        assert run.compute.policies[study].version == 0
        await run.of_run("study").batch()
        shutil.rmtree(run.folder / "checkpoints")
        await run.runs.end("study")
        await run.runs.put("study", RunSettings())
        await run.until(lambda: run.runs.get("study").phase.state == "sampling")
        assert run.compute.policies[study].version == 1
        await run.of_run("study").gateway.versions.save()
    branch(tmp_path / "d", "1", tmp_path / "b", "study")
    async with running(tmp_path / "b", policies={"p": {"model": "default@good"}}) as run:
        assert run.compute.policies[PolicyId(policy="p")].version == 1


def test_names_of_checkpoints_do_not_share_a_folder(tmp_path: Path) -> None:
    assert whole_model(tmp_path, "study/planner@40") != whole_model(tmp_path, "study-planner@40")


async def test_wrong_names_are_refused_with_the_right_ones(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await run.batch()
        await run.gateway.versions.save()
        for name, why in (
            ("other@1", "this data dir has no other run 'other'; others are default"),
            ("study@1", "no other run 'study'"),
            ("default@7", "has no checkpoint '7'; it has versions 1 and tags none"),
            ("default/coder@1", "has no such policy; give default@1"),
        ):
            with pytest.raises(Conflict, match=why):
                await run.runs.put("study", RunSettings(policies={"p": {"model": name}}))
