"""A run of a real server begins from an adapter's checkpoint of another run, as a whole model."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load_file

from tests.e2e.server import Server
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def test_a_run_begins_from_an_adapter(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    settings = {"model__lora__rank": 2, "job__optimizer__lr": 0.05}
    with Server(model, tmp_path / "data", **settings) as server:
        server.batch()
        server.post("/checkpoints")
        trained = load_file(Path(server.post("/exports")["path"]) / "model.safetensors")
        admin = {"Authorization": f"Bearer {(tmp_path / 'data' / 'admin-token').read_text().strip()}"}
        body = {"policies": {"p": {"model": "default@1", "worker": "own", "lora": {"rank": 0}}}}
        with httpx.Client(base_url=server.url, headers=admin, timeout=60, trust_env=False) as http:
            assert http.put("/swarm/v1/runs/study", json=body).status_code == 200
            server.until(lambda: http.get("/runs/study/swarm/v1/status").json()["state"] == "sampling")
            exported = http.post("/runs/study/swarm/v1/exports", json={"policy": "p"}).json()
        first = load_file(Path(exported["path"]) / "model.safetensors")
    start = load_file(model / "model.safetensors")
    assert all((first[name] == trained[name]).all() for name in trained)
    assert any((first[name] != start[name]).any() for name in first), "the adapter is merged"
