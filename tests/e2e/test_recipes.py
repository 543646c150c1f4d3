"""A recipe of another package trains on a real server, and a replay after a kill gives equal weights.

The package is installed as a wheel would be: a folder on the path with the module and its entry point.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.e2e.server import Server
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
