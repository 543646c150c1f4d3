"""The lease of a whole server.

1. While the server is leased, only requests with its epoch start episodes, change the job, start and stop.
   Everybody can read.
2. A lease is renewed with its epoch, expires, and can be ended by an admin. Epochs rise, also across restarts; an old
   epoch opens nothing.
3. Runs are switched under a lease only. A server of one gateway has no other run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjet.errors import ConfigError, Conflict
from agentjet.protocol import LeaseRequest
from agentjet.server.server_lease import ServerLease, SingleRun
from tests.fakes import Clock
from tests.server.serving import ADMIN, TOKEN, VIEWER, Served, serving

pytestmark = pytest.mark.anyio


async def ask(
    served: Served, method: str, path: str, token: str = ADMIN, *, epoch: int | None = None, **body: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}", **({} if epoch is None else {"AgentJet-Lease": str(epoch)})}
    return await served.http.request(method, f"/swarm/v1{path}", headers=headers, json=body or None)


def said(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("code", "")


async def test_only_the_holder_gets_in(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        assert said(await ask(served, "PUT", "/lease", TOKEN, holder="me")) == (403, "admin_token_needed")
        taken = await ask(served, "PUT", "/lease", holder="study 7", seconds=30)
        assert (taken.status_code, taken.json()["epoch"], taken.json()["run"]) == (200, 1, "")
        for epoch in (None, 0, 2):
            refused = await ask(served, "POST", "/episodes", TOKEN, epoch=epoch, task_id="t")
            assert said(refused) == (409, "leased") and "'study 7' for another 30 s" in refused.json()["detail"]
        assert said(await ask(served, "PUT", "/job", revision=1, job={})) == (409, "leased")
        assert said(await ask(served, "POST", "/start")) == (409, "leased")
        assert said(await ask(served, "POST", "/stop")) == (409, "leased")
        evaluation = {"policy_version": 0, "score": 0.9, "num_tasks": 1, "num_episodes": 1}
        for method, path, body in (
            ("POST", "/checkpoints", {}),
            ("POST", "/exports", {}),
            ("POST", "/evaluations", evaluation),
            ("PUT", "/tags/mine", {"policy_version": 0}),
            ("DELETE", "/tags/mine", {}),
        ):
            assert said(await ask(served, method, path, TOKEN, **body)) == (409, "leased"), path
        assert (await ask(served, "POST", "/episodes", TOKEN, epoch=1, task_id="t")).status_code == 200
        assert (await ask(served, "PUT", "/job", epoch=1, revision=1, job={})).status_code == 200
        assert (await ask(served, "GET", "/status", VIEWER)).status_code == 200
        seen = (await ask(served, "GET", "/lease", VIEWER)).json()
        assert (seen["holder"], seen["epoch"], seen["seconds_left"]) == ("study 7", 1, 30.0)
        assert (await ask(served, "DELETE", "/lease")).json()["holder"] == ""
        assert (await ask(served, "POST", "/episodes", TOKEN, task_id="t")).status_code == 200
        assert said(await ask(served, "POST", "/episodes", TOKEN, epoch=1, task_id="t")) == (409, "lease_over")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"holder": 1}'])
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"lease\.json is damaged .*: remove it"):
        ServerLease(path, Clock())


async def test_runs_need_a_lease(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        assert said(await ask(served, "PUT", "/run", name="r")) == (409, "no_lease")
        assert said(await ask(served, "PUT", "/run", epoch=1, name="r")) == (409, "lease_over")
        await ask(served, "PUT", "/lease", holder="me")
        assert said(await ask(served, "PUT", "/run", epoch=2, name="r")) == (409, "leased")
        assert said(await ask(served, "PUT", "/run", epoch=1, name="../r")) == (422, "invalid_value")
        wrong = await ask(served, "PUT", "/run", epoch=1, name="r", job={"group_size": 1})
        assert said(wrong) == (422, "invalid_setting")
        assert said(await ask(served, "PUT", "/run", epoch=1, name="r")) == (409, "one_run")


async def test_a_run_that_was_begun_with_other_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def enter(*_: object) -> None:
        raise ConfigError("server.data_dir = 'd/runs/r' was begun with model.lora.rank = 4, not with 8")

    async with serving(tmp_path / "d") as served:
        await ask(served, "PUT", "/lease", holder="me")
        monkeypatch.setattr(SingleRun, "enter", enter)
        refused = await ask(served, "PUT", "/run", epoch=1, name="r")
        assert said(refused) == (409, "run_refused")
        assert "Run 'r' cannot be served here: server.data_dir = 'd/runs/r' was begun with" in refused.json()["detail"]
        monkeypatch.undo()


async def test_epochs_rise_across_takers_and_restarts(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "lease.json"
    lease = ServerLease(path, clock)
    lease.take(LeaseRequest(holder="a", seconds=10))
    clock.advance(9)
    lease.take(LeaseRequest(holder="a", seconds=10, epoch=1))
    clock.advance(9)
    with pytest.raises(Conflict, match="leased to 'a' for another 1 s"):
        lease.take(LeaseRequest(holder="b"))
    clock.advance(1)
    with pytest.raises(Conflict, match="epoch 1 has ended"):
        lease.take(LeaseRequest(holder="a", epoch=1))
    lease.take(LeaseRequest(holder="b", seconds=10))
    again = ServerLease(path, clock)
    assert (again.holder, again.epoch, again.seconds_left) == ("b", 2, 10.0)
    with pytest.raises(Conflict) as refused:
        again.check(1)
    assert refused.value.code == "leased"
    again.check(2)
    again.end()
    again.check(None)
    again.take(LeaseRequest(holder="a"))
    assert again.epoch == 3
