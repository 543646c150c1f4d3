"""What several end-to-end tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.research.models import Subject
from tests.e2e.researching import make_subject


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """What the studies train, in `tmp_path`."""
    return make_subject(tmp_path)
