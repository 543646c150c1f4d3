"""Recipes with state, values, teachers, rollouts or a bug on a real server that is killed: the weights are equal.

`test_serve.py` does this with a recipe of another package.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.server import ROOT, Server, are_equal, environment, serve_command
from tests.teacher import Teacher, free_port
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

BROKEN = """
from agentjet.recipes.policy_gradient import PolicyGradient


class Broken(PolicyGradient):
    def group_advantages(self, rewards_G):
        return (rewards_G - rewards_G.mean()) / (rewards_G.std() + EPS)


EPS = 0
"""


def test_a_bad_plug_in_stops_the_run_and_the_mended_one_continues(tmp_path: Path) -> None:
    model, site = make_model(tmp_path / "model"), tmp_path / "site"
    site.mkdir()
    (site / "broken.py").write_text(BROKEN)
    settings = {"job__recipe": "broken:Broken"}
    with Server(model, tmp_path / "data", paths=[site], **settings) as server:
        for member in range(4):
            episode = server.begin(task_id=f"t{member // 2}")
            server.ask(episode, "hello")
            server.post(f"/episodes/{episode['episode_id']}/finish", reward=1.0)
        server.until(lambda: server.get("/status")["state"] == "failed")
        reason = "the recipe 'broken:Broken': `group_advantages` returned [nan, nan] for the rewards [1.0, 1.0]"
        assert reason in server.output and reason in server.get("/status")["waiting_for"]
        server.kill()
    (site / "broken.py").rename(site / "elsewhere.py")
    command, env = serve_command(model, tmp_path / "data", **settings), environment(site)
    refused = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert refused.returncode == 2 and "there is no module 'broken': install its package" in refused.stderr
    (site / "broken.py").write_text(BROKEN.replace("EPS = 0", "EPS = 1e-6"))
    with Server(model, tmp_path / "data", paths=[site], **settings) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 1)
        assert server.get("/status")["episodes"]["trained"] == 4


@pytest.mark.parametrize("way", ["wait", "end", "interrupt"])
def test_a_loss_that_never_ends_holds_its_own_run_only(tmp_path: Path, way: str) -> None:
    """The end of the run, or Ctrl-C, comes while the worker is in the loss."""
    settings = {"server__hook_timeout": 5, "job__optimizer__lr": 1e-2}
    with Server(make_model(tmp_path / "model"), tmp_path / "data", paths=[ROOT], **settings) as server:
        server.batch()
        admin = {"Authorization": f"Bearer {(tmp_path / 'data' / 'admin-token').read_text().strip()}"}
        with httpx.Client(base_url=server.url, headers=admin, timeout=60) as http:

            def slow(path: str, **body: Any) -> Any:
                asked = http.post if body else http.get
                return asked(f"/runs/slow/swarm/v1{path}", **({"json": body} if body else {})).raise_for_status().json()

            def ended() -> bool:
                return not http.delete("/swarm/v1/runs/slow").raise_for_status().json()["is_open"]

            job = {"recipe": "tests.plugins.endless:EndlessLoss", "batch_size": 2, "group_size": 2, "max_tokens": 8}
            http.put("/swarm/v1/runs/slow", json={"job": job}).raise_for_status()
            server.until(lambda: slow("/status")["state"] == "sampling")
            for member in range(4):
                episode = slow("/episodes", task_id=f"t{member // 2}", wait=30)
                server.ask(episode, "hello")
                slow(f"/episodes/{episode['episode_id']}/finish", reward=member % 2)
            server.until(lambda: slow("/status")["state"] == "learning")
            if way == "interrupt":
                assert server.interrupt() == 0
                return
            if way == "end":
                assert ended()
            else:
                server.until(lambda: slow("/status")["state"] == "failed")
                assert "`token_loss` did not return within 5 s" in slow("/status")["waiting_for"]
            server.batch()
            assert way == "end" or (slow("/status")["state"] == "failed" and ended()), "it stays stopped"


def another(folder: Path) -> Path:
    """The folder of a model with other weights."""
    path = make_model(folder) / "model.safetensors"
    save_file({name: 1.2 * weights for name, weights in load_file(path).items()}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["adaptive_kl", "ppo", "archer", "digirl", "distill_top_k", "grpo"])
def test_state_values_teachers_and_references_survive_a_kill(tmp_path: Path, name: str) -> None:
    """The checkpoint has the state, the heads or the reference; the second batch is learned again from there."""
    model = make_model(tmp_path / "model")
    own = {
        "adaptive_kl": {"horizon": 1.0, "target": 1e-5},
        "distill_top_k": {"teacher": another(tmp_path / "teacher")},
        "grpo": {"kl_coef": 0.5, "reference_every": 1, "reference_mix": 0.5},
    }
    parameters = {f"job__recipe__{key}": value for key, value in own.get(name, {}).items()}
    settings = {"job__recipe": name, **parameters, "job__optimizer__lr": 1e-2}
    with Server(model, tmp_path / "data", **settings) as server:
        server.batch()
        server.post("/checkpoints")
        first = server.exported()
        server.batch()
        before = server.exported()
        server.kill()
    assert not are_equal(before, first), "it learned nothing"
    with Server(model, tmp_path / "data", **settings) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 2)
        assert are_equal(server.exported(), before)


def test_the_rollouts_that_a_recipe_chose_survive_a_kill(tmp_path: Path) -> None:
    """DART limits turns by earlier successes: 9 before the first, then ceil(1.2 x 1)."""
    model = make_model(tmp_path / "model")
    settings = {"job__recipe": "dart", "job__recipe__max_turns": 9, "job__optimizer__lr": 1e-2}
    with Server(model, tmp_path / "data", **settings) as server:
        server.batch()
        server.batch()
        begun = server.begin(task_id="t0")
        assert (begun["max_turns"], server.begin(task_id="new")["max_turns"]) == (2, 9)
        before = server.exported()
        server.kill()
    with Server(model, tmp_path / "data", **settings) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 2)
        assert server.begin(task_id="t0")["max_turns"] == 2, "it joins its group"
        assert are_equal(server.exported(), before)


def test_an_endpoint_grades_as_its_folder_and_its_batch_survives_kills(tmp_path: Path) -> None:
    """The teacher is killed before it grades the second batch, and so is the server. The replay needs no teacher."""
    model, folder = make_model(tmp_path / "model"), another(tmp_path / "teacher")
    teacher = Teacher(folder, free_port())
    distill = {"job__recipe": "distill", "job__optimizer__lr": 1e-2}
    settings = {**distill, "job__recipe__teacher": teacher.url, "job__recipe__teacher_model": teacher.NAME}
    gaps = []
    try:
        with Server(model, tmp_path / "folder", **distill, job__recipe__teacher=folder) as server:
            server.batch()
            gaps.append(server.get("/status")["last_step"]["policy/teacher_kl"])
        with Server(model, tmp_path / "data", **settings) as server:
            server.batch()
            gaps.append(server.get("/status")["last_step"]["policy/teacher_kl"])
            server.post("/checkpoints")
            first = server.exported()
            teacher.kill()
            server.fill_batch()
            server.until(lambda: "connection refused, tried 2 times" in server.get("/status")["waiting_for"])
            server.post("/checkpoints")
            server.kill()
        assert abs(gaps[0]) > 1e-4 and gaps[1] == pytest.approx(gaps[0], abs=1e-6)
        with Server(model, tmp_path / "data", **settings) as server:
            server.until(lambda: "does not answer" in server.get("/status")["waiting_for"])
            assert server.get("/status")["policy_version"] == 1
            teacher.start()
            server.until(lambda: server.get("/status")["policy_version"] == 2)
            before = server.exported()
            server.kill()
    finally:
        teacher.kill()
    assert not are_equal(before, first), "it learned nothing"
    with Server(model, tmp_path / "data", **settings) as server:
        server.until(lambda: server.get("/status")["state"] == "sampling")
        assert server.get("/status")["policy_version"] == 2
        assert are_equal(server.exported(), before)
