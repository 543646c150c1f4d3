"""Several runs of one server: where each client's requests go, and what of a run's name and settings is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentjet.client import AsyncSwarm, Swarm
from agentjet.client.command import environment
from agentjet.errors import ConfigError, InvalidRequest
from agentjet.types import Task

pytestmark = pytest.mark.anyio

SERVER = "http://127.0.0.1:8400"


class FakeRuns:
    """Answers requests about runs and the beginning of episodes. `requests` are method, path, token and body."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, Any]] = []

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path, token = request.url.path, request.headers["Authorization"].removeprefix("Bearer ")
        self.requests.append((request.method, path, token, json.loads(request.content or b"null")))
        if path.endswith("/events"):
            event = b'data: {"seq": 1, "kind": "step", "time": 0, "body": {}}\n\n'
            return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=event)
        if path.endswith("/episodes"):
            base_url = f"{SERVER}{path.partition('/swarm')[0]}/v1"
            begun = {"episode_id": "e", "base_url": base_url, "api_key": "k", "model": "tiny", "policy_version": 0}
            return httpx.Response(200, json={**begun, "lease_seconds": 60, "expires_at": 0})
        if request.method == "GET":
            return httpx.Response(200, json={"runs": [view("default"), view("study")]})
        return httpx.Response(200, json=view(path.rpartition("/")[2]))


def view(name: str) -> dict[str, Any]:
    return {"name": name, "path": "" if name == "default" else f"/runs/{name}", "policies": [], "is_open": True}


@pytest.fixture
def server() -> FakeRuns:
    return FakeRuns()


def connect(server: FakeRuns, url: str = SERVER) -> AsyncSwarm:
    return AsyncSwarm(url, "t", client_id="c", transport=server.transport())


@pytest.mark.parametrize("url", [SERVER, f"{SERVER}/runs/other", f"{SERVER}/runs/other/"])
async def test_runs_are_listed_started_and_ended_at_the_server(server: FakeRuns, url: str) -> None:
    swarm = connect(server, url)
    assert [run.name for run in await swarm.runs()] == ["default", "study"]
    started = await swarm.start_run("study", job={"optimizer.lr": 1.0}, policies={"planner": {"lora": {"rank": 4}}})
    assert (started.path, (await swarm.end_run("study")).name) == ("/runs/study", "study")
    await swarm.start_run("study")
    settings = {"job": {"optimizer": {"lr": 1.0}}, "policies": {"planner": {"lora": {"rank": 4}}}}
    assert server.requests == [
        ("GET", "/swarm/v1/runs", "t", None),
        ("PUT", "/swarm/v1/runs/study", "t", settings),
        ("DELETE", "/swarm/v1/runs/study", "t", None),
        ("PUT", "/swarm/v1/runs/study", "t", {"job": None, "policies": {}}),
    ]


async def test_the_client_of_a_run_stays_below_its_path(server: FakeRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTJET_URL", SERVER)
    for swarm in (connect(server).of_run("study"), connect(server, f"{SERVER}/runs/study")):
        assert swarm.url == f"{SERVER}/runs/study"
        episode = await swarm.begin("t")
        assert episode.anthropic_base_url == f"{SERVER}/runs/study"
        given = environment(Task("t"), episode)
        assert {given[name] for name in ("AGENTJET_URL", "ANTHROPIC_BASE_URL")} == {f"{SERVER}/runs/study"}
        assert given["OPENAI_BASE_URL"] == f"{SERVER}/runs/study/v1"
        assert (await anext(swarm.events())).seq == 1
    paths = {path for _, path, _, _ in server.requests}
    assert paths == {"/runs/study/swarm/v1/episodes", "/runs/study/swarm/v1/events"}
    clients = {body["client_id"] for _, _, _, body in server.requests if body}
    assert clients == {"c"}


def test_from_run_to_run(server: FakeRuns) -> None:
    study = connect(server).of_run("study", "token of the study")
    assert study.of_run("other").url == f"{SERVER}/runs/other"
    assert study.of_run("default").url == SERVER
    with Swarm(SERVER, "t", transport=server.transport()) as swarm, swarm.of_run("study", "s") as of_study:
        of_study.begin("t")
        swarm.runs()
    assert [(path, token) for _, path, token, _ in server.requests] == [
        ("/runs/study/swarm/v1/episodes", "s"),
        ("/swarm/v1/runs", "t"),
    ]


@pytest.mark.parametrize("name", ["", "..", "../default", "a/b", "a%2fb", ".hidden", "Upper", "x" * 65, "a b"])
def test_names_that_a_run_cannot_have(server: FakeRuns, name: str) -> None:
    swarm = connect(server)
    for refused in (swarm.start_run(name), swarm.end_run(name)):
        with pytest.raises(InvalidRequest, match="is not the name of a run") as raised:
            asyncio.run(refused)
        assert raised.value.code == "run_name_invalid"
    with pytest.raises(InvalidRequest, match="is not the name of a run"):
        swarm.of_run(name)
    assert not server.requests


def test_settings_that_json_cannot_carry(server: FakeRuns) -> None:
    policies = {"planner": {"lora": {"alpha": float("nan")}}}
    for settings, key in (
        ({"job": {"optimizer": {"lr": float("inf")}}}, r"job\.optimizer\.lr = inf: it must be a finite number"),
        ({"job": {"temperature": float("nan")}}, r"job\.temperature = nan"),
        ({"policies": policies}, r"policies\.planner\.lora\.alpha = nan"),
        ({"policies": 3}, "policies = 3: it is a section of settings"),
    ):
        with pytest.raises(ConfigError, match=key):
            asyncio.run(connect(server).start_run("study", **settings))  # type: ignore[arg-type]
    assert not server.requests
