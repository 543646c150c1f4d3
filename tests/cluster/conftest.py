"""The process that forks fake replicas, and retries without long waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentjet.compute import fleet, samplers
from tests.cluster.nursery import ForkServer, fork_server


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as found:
        yield found


@pytest.fixture
def retries_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(samplers, "LOSS_SECONDS", 0.05)
