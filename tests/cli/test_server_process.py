"""A server that changes its run. Pinned here:

1. An error while the left run's worker ends is raised to the caller. The requested run is up all the same, and the
   left run can be entered again.
2. A client of the left run is refused: neither its key nor its token reaches an episode of the other run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjet.cli import server_process
from agentjet.config import JobConfig, ServeConfig
from agentjet.protocol import BeginRequest
from agentjet.server import Keys, create_app
from tests.fakes import Clock, ScriptedCompute, make_model_info, saying

pytestmark = pytest.mark.anyio


class Stubborn(ScriptedCompute):
    """A worker whose end fails once."""

    ends = 0

    async def close(self) -> None:
        await super().close()
        self.ends += 1
        if self.ends == 1:
            raise OSError("the worker would not end")


async def test_a_run_is_up_although_the_one_before_would_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = make_model_info(tmp_path / "tokenizer")
    monkeypatch.setattr(server_process, "EmbeddedCompute", lambda config: Stubborn(card, saying(lambda prompt: "hi")))
    config = ServeConfig.model_validate({"model": {"name": card.name}, "server": {"data_dir": tmp_path / "d"}})
    served = server_process.GatewaySwitcher(config, Clock())
    await served.gateway.start()
    await served.gateway.ready()
    with pytest.raises(OSError, match="would not end"):
        await served.enter("a", JobConfig())
    await served.enter("a", JobConfig())
    await served.gateway.ready()
    assert (served.name, served.gateway.status().state) == ("a", "sampling")
    with pytest.raises(OSError, match="would not end"):
        await served.enter("", None)
    await served.gateway.ready()
    assert (served.name, served.gateway.status().state) == ("", "sampling")
    with pytest.raises(OSError, match="would not end"):
        await served.close()


async def test_runs_of_one_server_do_not_touch_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = make_model_info(tmp_path / "tokenizer")
    monkeypatch.setattr(
        server_process, "EmbeddedCompute", lambda config: ScriptedCompute(card, saying(lambda prompt: "hi"))
    )
    config = ServeConfig.model_validate({"model": {"name": card.name}, "server": {"data_dir": tmp_path / "d"}})
    clock = Clock()
    served = server_process.GatewaySwitcher(config, clock)
    keys = Keys(token="c" * 20, admin_token="a" * 20, clock=clock)
    await served.gateway.start()
    transport = httpx.ASGITransport(create_app(served, keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

        async def ask(method: str, path: str, bearer: str, **more: Any) -> httpx.Response:
            return await http.request(method, path, headers={"Authorization": f"Bearer {bearer}"}, **more)

        own = (await ask("POST", "/swarm/v1/episodes", "c" * 20, json={"task_id": "t"})).json()
        await served.enter("study", JobConfig())
        await served.gateway.ready()
        other = await served.gateway.begin(BeginRequest(task_id="t"))
        path = f"/swarm/v1/episodes/{own['episode_id']}"
        for bearer in ("c" * 20, own["api_key"]):
            for verb, body in (("heartbeat", None), ("finish", {"reward": 1.0}), ("abort", {})):
                refused = await ask("POST", f"{path}/{verb}", bearer, json=body)
                assert (refused.status_code, refused.json()["code"]) == (404, "episode_not_found")
                assert "in the run that this server serves now" in refused.json()["detail"]
        message = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        assert (await ask("POST", "/v1/chat/completions", own["api_key"], json=message)).status_code == 404
        assert served.gateway.swarm.episode(other.id) == other, "the other run's episode is as it was"
        await served.enter("", None)
        await served.gateway.ready()
        back = await ask("POST", f"{path}/finish", own["api_key"], json={"reward": 1.0})
        assert (back.status_code, back.json()["reward"]) == (200, 1.0)
    await served.close()
