"""`GET /health` and `GET /waiting` on HTTP: the bodies, and who may read them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from agentjet.protocol import HealthView, WaitingView
from tests.server.serving import VIEWER, serving

pytestmark = pytest.mark.anyio


async def test_viewers_read_health_and_waiting(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served:
        await served.run.batch()
        begun = await served.begin(task_id="next")
        headers = {"Authorization": f"Bearer {VIEWER}"}
        health = HealthView.model_validate((await served.http.get("/swarm/v1/health", headers=headers)).json())
        waiting = WaitingView.model_validate((await served.http.get("/swarm/v1/waiting", headers=headers)).json())
        assert health.learning.answer == "too_early" and health.learning.num_steps == 1
        assert {"engine", "disk", "groups", "episodes"} <= {rule.name for rule in health.rules}
        assert [cell.episode_id for group in waiting.groups for cell in group.cells] == [begun["episode_id"]]
        assert waiting.text == (await served.http.get("/swarm/v1/status")).json()["waiting_for"]
        async with httpx.AsyncClient(base_url=served.url, trust_env=False) as stranger:
            for path in ("health", "waiting"):
                assert (await stranger.get(f"/swarm/v1/{path}")).status_code == 401
