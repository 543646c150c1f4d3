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
    ("setting", "said"),
    [
        ("batchsize=4", r"job\.batchsize = 4 \(request\): there is no such setting; did you mean job\.batch_size\?"),
        ("optimizer.lr=-1", r"job\.optimizer\.lr = -1 \(request\): input should be greater than 0"),
        ("batch_size=many", r"job\.batch_size = 'many' \(request\): "),
        ("optimizer=3", r"job\.optimizer = 3 \(request\): this is a section"),
        ("max_tokens=5000", r"job\.max_tokens = 5000 leaves no room"),
    ],
)
def test_the_server_refuses_with_key_and_value(served: Served, setting: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        run("job", "set", setting, "--url", served.url, "--token", ADMIN)
    assert served.run.gateway.swarm.job_revision == 1


def test_what_is_no_job_setting_is_refused_before_anything_is_sent(served: Served) -> None:
    with pytest.raises(ConfigError, match=r"model\.name = 'x': a running server keeps its model\.\* settings"):
        run("job", "set", "model.name=x", "--url", served.url, "--token", ADMIN)
    with pytest.raises(ConfigError, match=r"batch_size\.a = 1: job\.batch_size is a value, 2"):
        run("job", "set", "batch_size.a=1", "--url", served.url, "--token", ADMIN)
    with pytest.raises(ConfigError, match=r"'batch_size' is not of the form KEY=VALUE"):
        run("job", "set", "batch_size", *at(served))
    with pytest.raises(Forbidden, match="admin-token"):
        run("job", "set", "batch_size=3", *at(served))


def test_a_key_has_one_finite_value(served: Served) -> None:
    admin = ["--url", served.url, "--token", ADMIN]
    with pytest.raises(ConfigError, match=r"job\.batch_size = 4: job\.batch_size is given twice"):
        run("job", "set", "batch_size=2", "job.batch_size=4", *admin)
    with pytest.raises(ConfigError, match=r"job\.optimizer\.lr = inf: it must be a finite number"):
        run("job", "set", "optimizer.lr=inf", *admin)
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
