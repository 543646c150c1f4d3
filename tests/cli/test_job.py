"""`agentjet job`: what it changes, what stays, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentjet.client import Swarm
from agentjet.client.inputs import edited
from agentjet.config import JobConfig
from agentjet.errors import ConfigError, Forbidden, InvalidRequest
from tests.cli.test_commands import at, run
from tests.server.serving import ADMIN, Served, in_thread, serving


def test_one_setting_is_changed_and_the_others_stay(served: Served) -> None:
    admin = ["--url", served.url, "--token", ADMIN]
    before = json.loads(run("job", "show", "--json", *at(served)))
    printed = run("job", "set", "optimizer.lr=1e-5", "job.task_weights={math = 2, code = 1}", *admin)
    assert "job.optimizer.lr: 2e-05 -> 1e-05" in printed and "revision 2" in printed and "survives a restart" in printed
    after = json.loads(run("job", "show", "--json", *at(served)))
    expected = before["job"] | {"task_weights": {"math": 2.0, "code": 1.0}}
    expected["optimizer"] = expected["optimizer"] | {"lr": 1e-5}
    assert after == {"revision": 2, "job": expected}
    assert served.run.gateway.swarm.job.optimizer.lr == 1e-5
    assert "job.optimizer.lr = 1e-05" in run("job", "show", *at(served))
    assert "had its value already" in run("job", "set", "optimizer.lr=0.00001", *admin)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ("batchsize=4", InvalidRequest, r"batchsize = 4 \(request\): there is no .*; did you mean job\.batch_size\?"),
        ("optimizer.lr=-1", InvalidRequest, r"job\.optimizer\.lr = -1 \(request\): input should be greater than 0"),
        ("optimizer.name=adam", InvalidRequest, r"job\.optimizer\.name = 'adam' \(request\): .*'adamw', 'muon'"),
        ("optimizer.name=muon", InvalidRequest, r"job\.optimizer\.name = 'muon': the embedded backend has 'adamw': "),
        ("batch_size=many", InvalidRequest, r"job\.batch_size = 'many' \(request\): "),
        ("optimizer=3", InvalidRequest, r"job\.optimizer = 3 \(request\): this is a section"),
        ("max_tokens=5000", InvalidRequest, r"job\.max_tokens = 5000 leaves no room"),
        ("model.name=x", ConfigError, r"model\.name = 'x': a running server keeps its model\.\* settings"),
        ("batch_size.a=1", ConfigError, r"batch_size\.a = 1: job\.batch_size is a value, 2"),
        ("batch_size", ConfigError, r"'batch_size' is not of the form KEY=VALUE"),
        ("batch_size=2 job.batch_size=4", ConfigError, r"job\.batch_size = 4: job\.batch_size is given twice"),
        ("optimizer.lr=inf", ConfigError, r"job\.optimizer\.lr = inf: it must be a finite number"),
    ],
)
def test_what_is_no_setting_is_refused_with_key_and_value(
    served: Served, settings: str, error: type[Exception], said: str
) -> None:
    """`InvalidRequest` is of the server; other mistakes are refused before anything is sent."""
    with pytest.raises(error, match=said):
        run("job", "set", *settings.split(), "--url", served.url, "--token", ADMIN)
    with pytest.raises(Forbidden if error is InvalidRequest else error, match="admin-token|" + said):
        run("job", "set", *settings.split(), *at(served))
    assert served.run.gateway.swarm.job_revision == 1


def test_python_changes_a_setting_too(tmp_path: Path) -> None:
    with in_thread(serving(tmp_path / "data")) as (served, loop):
        with Swarm(served.url, ADMIN) as swarm:
            assert swarm.change_job({"job.seed": 7}).job["seed"] == 7
        assert served.run.gateway.swarm.job.seed == 7
        loop.run(served.run.batch())
        for steps, is_reached in ((1, True), (2, False), (0, False)):
            printed = run("job", "set", f"max_steps={steps}", "--url", served.url, "--token", ADMIN)
            assert ("job.max_steps = 1 is reached at version 1: raise it" in printed) is is_reached


def test_editing_leaves_the_original_alone() -> None:
    job = {"optimizer": {"lr": 1.0}}
    assert edited(job, {"optimizer.lr": 2.0}) == {"optimizer": {"lr": 2.0}}
    assert job == {"optimizer": {"lr": 1.0}}


def test_another_recipe_begins_with_its_own_defaults() -> None:
    job = JobConfig.model_validate({"recipe": {"kl_coef": 0.1, "loss": {"clip_high": 0.3}}}).model_dump(mode="json")
    for changes in ({"recipe": "gspo", "recipe.kl_coef": 0.2}, {"job.recipe.name": "gspo", "job.recipe.kl_coef": 0.2}):
        changed = JobConfig.model_validate(edited(job, changes)).recipe
        assert changed == JobConfig.model_validate({"recipe": {"name": "gspo", "kl_coef": 0.2}}).recipe
    kept = JobConfig.model_validate(edited(job, {"recipe.loss.clip_low": 0.1})).recipe
    assert kept.model_dump()["loss"] == {"name": "clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 0.0}
    other = edited(job, {"recipe.loss": "cispo", "recipe.loss.clip_high": 5.0})
    assert JobConfig.model_validate(other).recipe.model_dump()["loss"] == {
        "name": "cispo",
        "clip_low": 10.0,
        "clip_high": 5.0,
    }
