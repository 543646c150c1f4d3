"""A data dir is taken up again under the base weights it was begun with, or not at all: the same policy version is the
same weights. A real process, killed before a checkpoint was made. Settings: `tests/swarm/test_origin.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.test_serve import refused
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]


def test_other_base_weights_are_refused(tmp_path: Path) -> None:
    model, data_dir = make_model(tmp_path / "tiny"), tmp_path / "run"
    with Server(model, data_dir) as server:
        server.batch()
        weights = server.get("/status")["model_weights"]
        server.kill()  # One batch, no checkpoint, as a power cut leaves it.
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
