"""A model that reasons and calls tools."""

from pathlib import Path

import pytest

from agentjet.types import ModelInfo
from tests.server.speaking import tool_card


@pytest.fixture
def card(tmp_path: Path) -> ModelInfo:
    return tool_card(tmp_path)
