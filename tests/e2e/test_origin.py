"""A data dir is taken up again under the settings and the base weights it was begun with, or not at all: the same
policy version is the same weights. Real processes, killed before a checkpoint was made.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.test_serve import refused
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]


def learn_and_kill(model: Path, data_dir: Path) -> str:
    """One batch, no checkpoint, as a power cut leaves it; returns the fingerprint of the base weights."""
    with Server(model, data_dir) as server:
        server.batch()
        weights = str(server.get("/status")["model_weights"])
        server.kill()
    return weights


def test_other_adapters_are_refused(tmp_path: Path) -> None:
    model, data_dir = make_model(tmp_path / "tiny"), tmp_path / "run"
    learn_and_kill(model, data_dir)
    said = refused(model, data_dir, model__lora__rank=4)
    assert str(data_dir) in said
    assert "model.lora.rank = 0" in said and "4 would change" in said
    assert "listens on" not in said and "Ready" not in said
    with Server(model, data_dir) as server:
        assert server.get("/status")["policy_version"] == 1, "under its own settings it goes on"


def test_other_base_weights_are_refused(tmp_path: Path) -> None:
    model, data_dir = make_model(tmp_path / "tiny"), tmp_path / "run"
    weights = learn_and_kill(model, data_dir)
    kept = model.rename(tmp_path / "kept")
    make_model(model, seed=1)
    said = refused(model, data_dir)
    assert f"model_weights = '{weights}'" in said and "model.name" in said
    assert "Ready" not in said
    started = (data_dir / "logs" / "server.log").read_text().count("the worker failed")
    assert not started, "another worker would find the same weights"
    shutil.rmtree(model)
    kept.rename(model)
    with Server(model, data_dir) as server:
        assert server.get("/status")["policy_version"] == 1
