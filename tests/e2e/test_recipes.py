"""Recipes on a real server that is killed: a replay gives equal weights.

A recipe of another package is installed as a wheel would be: a folder on the path with the module and its entry point.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.server import Server, environment, serve_command
from tests.tiny import make_model

pytestmark = pytest.mark.e2e
PLUGIN = Path(__file__).parents[1] / "plugins" / "median_grpo.py"


def install(folder: Path) -> Path:
    """Installs the plug-in, with the entry point by which servers find it."""
    information = folder / "median_grpo-1.0.dist-info"
    information.mkdir(parents=True)
    shutil.copy(PLUGIN, folder)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: median-grpo\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[agentjet.recipes]\nmedian_grpo = median_grpo:MedianGrpo\n")
    return folder


def test_a_plug_in_trains_and_replays(tmp_path: Path) -> None:
    assert len(PLUGIN.read_text().splitlines()) <= 40
    model, site = make_model(tmp_path / "model"), install(tmp_path / "site")
    settings = {"job__recipe": "median_grpo", "job__recipe__scale": 0.5, "job__optimizer__lr": 1e-2}
    with Server(model, tmp_path / "data", paths=[site], **settings) as server:
        assert server.get("/job")["job"]["recipe"]["scale"] == 0.5
        server.batch()
        server.batch()
        before = load_file(Path(server.post("/exports")["path"]) / "model.safetensors")
        server.kill()
    start = load_file(model / "model.safetensors")
    assert any((before[name] != start[name]).any() for name in before), "it learned nothing"
    with Server(model, tmp_path / "data", paths=[site], **settings) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 2)
        after = load_file(Path(server.post("/exports")["path"]) / "model.safetensors")
        assert all((before[name] == after[name]).all() for name in before)


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
    assert refused.returncode == 1 and "there is no module 'broken': install its package" in refused.stderr
    (site / "broken.py").write_text(BROKEN.replace("EPS = 0", "EPS = 1e-6"))
    with Server(model, tmp_path / "data", paths=[site], **settings) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 1)
        assert server.get("/status")["episodes"]["trained"] == 4


def another(folder: Path) -> Path:
    """The folder of a model with other weights."""
    path = make_model(folder) / "model.safetensors"
    save_file({name: 1.2 * weights for name, weights in load_file(path).items()}, path, {"format": "pt"})
    return folder


def exported(server: Server) -> dict[str, Any]:
    return dict(load_file(Path(server.post("/exports")["path"]) / "model.safetensors"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adaptive_kl", "ppo", "archer", "digirl", "distill"])
def test_state_values_and_teachers_survive_a_kill(tmp_path: Path, name: str) -> None:
    """The checkpoint has the state or the heads; the second batch is learned again from there."""
    model = make_model(tmp_path / "model")
    own = {"adaptive_kl": {"horizon": 1.0, "target": 1e-5}, "distill": {"teacher": another(tmp_path / "teacher")}}
    parameters = {f"job__recipe__{key}": value for key, value in own.get(name, {}).items()}
    settings = {"job__recipe": name, **parameters, "job__optimizer__lr": 1e-2}
    with Server(model, tmp_path / "data", **settings) as server:
        server.batch()
        server.post("/checkpoints")
        first = exported(server)
        server.batch()
        before = exported(server)
        server.kill()
    assert any((before[key] != first[key]).any() for key in before), "it learned nothing"
    with Server(model, tmp_path / "data", **settings) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 2)
        after = exported(server)
        assert all((before[key] == after[key]).all() for key in before)


@pytest.mark.thorough
def test_the_rollouts_that_a_recipe_chose_survive_a_kill(tmp_path: Path) -> None:
    """DART limits turns by earlier successes: 9 before the first, then ceil(1.2 x 1)."""
    model = make_model(tmp_path / "model")
    settings = {"job__recipe": "dart", "job__recipe__max_turns": 9, "job__optimizer__lr": 1e-2}
    with Server(model, tmp_path / "data", **settings) as server:
        server.batch()
        server.batch()
        begun = server.begin(task_id="t0")
        assert (begun["max_turns"], server.begin(task_id="new")["max_turns"]) == (2, 9)
        before = load_file(Path(server.post("/exports")["path"]) / "model.safetensors")
        server.kill()
    with Server(model, tmp_path / "data", **settings) as server:
        server.until(lambda: server.get("/status")["policy_version"] == 2)
        assert server.begin(task_id="t0")["max_turns"] == 2, "it joins its group"
        after = load_file(Path(server.post("/exports")["path"]) / "model.safetensors")
        assert all((before[name] == after[name]).all() for name in before)
