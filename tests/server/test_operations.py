"""The server as its operator sees it.

1. `/healthz` answers without a token in every state of the engine; `/readyz` is 200 if calls are answered.
2. `/metrics` is in Prometheus' format, accepts every token of the server, and agrees with the status.
3. A viewer can read everything, and every change is refused with a stable code.
4. A request that the engine's state does not allow gets a 409 with the state and the legal ones. If waiting helps, 503.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentjet import database
from tests.server.serving import ADMIN, VIEWER, Served, bearer, serving
from tests.swarm.world import refused_commits

pytestmark = pytest.mark.anyio


async def samples(served: Served) -> dict[str, float]:
    """Returns every sample of `/metrics` by its name and label value."""
    response = await served.http.get("/metrics", headers=bearer(VIEWER))
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_alive_and_ready(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "d", prepare=lambda compute: compute.may_start.clear(), wait_ready=False) as served,
        httpx.AsyncClient(base_url=served.url, verify=False) as stranger,
    ):
        loading = await stranger.get("/readyz")
        assert (loading.status_code, loading.json()) == (503, {"ready": False, "state": "loading"})
        assert (await stranger.get("/healthz")).json() == {"status": "alive"}
        served.run.compute.may_start.set()
        await served.run.gateway.engine.wait_until_up()
        assert (await stranger.get("/readyz")).json() == {"ready": True, "state": "sampling"}
        assert (await served.http.post("/swarm/v1/stop", headers=bearer(ADMIN))).status_code == 200
        assert (await stranger.get("/readyz")).json() == {"ready": False, "state": "offline"}
        assert (await stranger.get("/healthz")).status_code == 200
        refused = await stranger.get("/metrics")
        assert (refused.status_code, refused.json()["code"]) == (401, "token_missing")
        assert {"200", "503"} <= served.app.openapi()["paths"]["/readyz"]["get"]["responses"].keys()


async def test_a_full_disk_is_told_once_and_over_when_it_takes_a_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path / "d") as served:
        with refused_commits(served.run.gateway.swarm.journal):
            for _ in range(3):
                refused = await served.http.post("/swarm/v1/episodes", json={"task_id": "t"})
                assert (refused.status_code, refused.json()["code"]) == (503, "journal_unavailable")
            path = str(served.run.folder / "journal.sqlite")
            assert path in refused.json()["detail"] and "free some space" in refused.json()["detail"]
            waiting = (await served.http.get("/swarm/v1/status")).json()["waiting_for"]
            assert waiting == f"the disk. {refused.json()['detail']}"
            ready = await served.http.get("/readyz")
            assert (ready.status_code, ready.json()) == (503, {"ready": False, "state": "sampling"})
            assert [record.levelname for record in caplog.records if path in record.message] == ["ERROR"]
        await served.run.until(lambda: not served.run.gateway.swarm.file.refusal)  # by itself: nothing is asked
        assert (await served.http.get("/readyz")).status_code == 200
        assert (await served.http.get("/swarm/v1/status")).json()["waiting_for"].startswith("clients")
        assert [record.levelname for record in caplog.records if path in record.message] == ["ERROR", "WARNING"]
        await served.begin()


async def test_metrics(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        before = await samples(served)
        assert before["agentjet_policy_version"] == 0 and before["agentjet_state/sampling"] == 1
        await served.run.batch()
        await served.begin(mode="eval")
        now = await samples(served)
        assert now["agentjet_policy_version"] == 1
        assert now["agentjet_episodes_total/finished"] == now["agentjet_episodes_total/trained"] == 4
        assert (now["agentjet_episodes/live"], now["agentjet_episodes/waiting"]) == (1, 0)
        assert now["agentjet_step/reward/mean"] == 0.5
        assert sum(value for name, value in now.items() if name.startswith("agentjet_state/")) == 1
        assert now["agentjet_journal_bytes"] > 0 and now["agentjet_state_seconds"] >= 0
        assert (now["agentjet_workers_started_total"], now["agentjet_workers_hung_total"]) == (1, 0)
        assert now["agentjet_unusable_checkpoints"] == 0
        assert now["agentjet_calls_active"] == 0 and now["agentjet_clients"] >= 1


async def test_labels_hold_no_control_characters(tmp_path: Path) -> None:
    """Clients name metrics, and terminals show them."""
    async with serving(tmp_path / "d") as served:
        await served.run.batch(metrics={"\x1b[2Jspeed é": 1.0})
        text = (await served.http.get("/metrics")).text
        assert "\\\\x1b[2Jspeed é" in text and "\x1b" not in text


async def test_episodes_are_looked_up_apart_from_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path / "d") as served:
        used: set[int] = set()
        await served.run.batch()
        live = (await served.begin(mode="eval"))["episode_id"]
        connect = database.connect
        monkeypatch.setattr(database, "connect", lambda *place: (used.add(threading.get_ident()), connect(*place))[1])
        found = (await served.http.get("/swarm/v1/episodes", params={"status": "finished"})).json()["episodes"]
        assert len(found) == 4 and {episode["status"] for episode in found} == {"finished"}
        assert (await served.http.get("/swarm/v1/episodes")).json()["episodes"][0]["episode_id"] == live
        opened = (await served.http.get(f"/swarm/v1/episodes/{found[0]['episode_id']}")).json()
        assert [call["role"] for call in opened["calls"]] == [""] and opened["calls"][0]["texts"]
        assert used and threading.get_ident() not in used


async def test_a_viewer_reads_only(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = (await served.begin())["episode_id"]
        own = f"/swarm/v1/episodes/{episode}"
        for path in ("status", "episodes", f"episodes/{episode}", "job", "checkpoints"):
            answer = await served.http.get(f"/swarm/v1/{path}", headers=bearer(VIEWER))
            assert answer.status_code == 200, path
        async with served.http.stream("GET", "/swarm/v1/events", headers=bearer(VIEWER)) as events:
            assert events.status_code == 200
        for path in ("/swarm/v1/episodes", "/swarm/v1/checkpoints", "/swarm/v1/exports", f"{own}/heartbeat"):
            refused = await served.http.post(path, headers=bearer(VIEWER), json={})
            assert (refused.status_code, refused.json()["code"]) == (403, "client_token_needed"), path
        for path, body in ((f"{own}/finish", {"reward": 1}), (f"{own}/abort", {})):
            refused = await served.http.post(path, headers=bearer(VIEWER), json=body)
            assert (refused.status_code, refused.json()["code"]) == (403, "client_token_needed"), path
        for method, path in (("POST", "/swarm/v1/start"), ("POST", "/swarm/v1/stop"), ("PUT", "/swarm/v1/job")):
            refused = await served.http.request(
                method, path, headers=bearer(VIEWER), json={"revision": 1, "job": {}} if method == "PUT" else None
            )
            assert (refused.status_code, refused.json()["code"]) == (403, "admin_token_needed"), path
        refused = await served.http.get("/v1/models", headers=bearer(VIEWER))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "episode_key_needed")
        assert served.run.gateway.swarm.episode(episode).status == "live"


async def test_what_the_state_does_not_allow(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        await served.run.batch()
        served.run.compute.may_sample.clear()
        episode = await served.begin(mode="eval")
        asking = asyncio.create_task(served.run.say(episode["episode_id"]))
        await served.run.until(lambda: served.run.compute.asked[-1].finished is False)
        stopping = asyncio.create_task(served.http.post("/swarm/v1/stop", headers=bearer(ADMIN)))
        await served.run.until(lambda: served.run.gateway.phase.state == "draining")
        wait = await served.http.post("/swarm/v1/start", headers=bearer(ADMIN))
        assert (wait.status_code, wait.json()["code"]) == (503, "engine_stopping") and wait.headers["Retry-After"]
        refused = (await served.http.post("/swarm/v1/checkpoints")).json()
        assert refused["code"] == "illegal_in_state" and "is draining" in refused["detail"]
        served.run.compute.may_sample.set()
        assert (await stopping).json()["state"] == "offline"
        await asyncio.gather(asking, return_exceptions=True)
        for path in ("/swarm/v1/checkpoints", "/swarm/v1/exports"):
            refused = await served.http.post(path)
            assert refused.status_code == 409 and refused.headers["content-type"] == "application/problem+json"
            body = refused.json()
            assert body["code"] == "illegal_in_state" and "is offline" in body["detail"]
        # Begins and calls of a stopped engine are worth another try: a restart looks like this from outside.
        later = await served.http.post("/swarm/v1/episodes", json={"task_id": "t"})
        assert (later.status_code, later.json()["code"]) == (503, "engine_stopped")
