"""The models of the exactness tests, made once."""

from __future__ import annotations

import pytest

from tests.timeline.models import TEMPLATES, Model, make_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder, name) for name in TEMPLATES}
