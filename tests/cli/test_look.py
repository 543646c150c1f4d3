"""`agentjet look` and `agentjet open` without a browser. Pins:

1. the read routes over a folder answer as the gateway of the run, during the run and after it; the folder is unchanged;
2. nothing is answered without the code of the link, and nothing can be changed;
3. places: data dirs, folders of runs, of studies, folders of these, servers; each wrong place is refused by name;
4. a journal of a newer AgentJet is refused, or listed with its error beside readable ones;
5. comparisons: figures of `agentjet compare`, and only the settings that differ;
6. a run of another server is forwarded; its refusals and its silence are answers;
7. `open`: an address that opens one session, a browser where there is one, else the command for a tunnel.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sqlite3
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from typer.testing import CliRunner

import agentjet
from agentjet.cli.look import VIEWS, RemoteRun, RunsAndStudies, has_browser
from agentjet.cli.main import app
from agentjet.cli.runs import read_runs
from agentjet.config import ServerConfig
from agentjet.errors import ConfigError, Forbidden, Later
from agentjet.protocol import EvaluationRequest
from agentjet.server.app import OfflineViewer, create_look_app
from agentjet.server.collection import Collection
from agentjet.swarm.journal_file import SCHEMA_VERSION
from tests.cli.test_commands import run
from tests.fakes import running
from tests.server.serving import TOKEN, VIEWER, Served, serving

pytestmark = pytest.mark.anyio

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
LIVE_ONLY = {
    "state",
    "waiting_for",
    "clients",
    "workers_started",
    "uptime",
    "model",
    "last_event",
    "version",
    "run",
} | {"loop"}
"""Fields of the status that a stopped run has not, or has another way."""


@asynccontextmanager
async def looking(found: RunsAndStudies) -> AsyncIterator[tuple[httpx.AsyncClient, OfflineViewer]]:
    """A client of the application, with the key of a session."""
    collection = Collection(found.runs, found.studies)
    look = OfflineViewer(collection, found.forwards, ServerConfig())
    transport = httpx.ASGITransport(create_look_app(look, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        opened = await http.post("/swarm/v1/sessions/exchange", json={"code": look.code})
        http.headers["Authorization"] = f"Bearer {opened.json()['key']}"
        yield http, look
    await collection.close()


def found_at(*places: object, token: str = "") -> RunsAndStudies:
    found = RunsAndStudies(token)
    for place in places:
        found.add(str(place))
    return found


async def read(http: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    response = await http.get(path)
    assert response.status_code == status, response.text
    return response.json()


async def trained(data_dir: Path, *, lr: float = 1e-5, batches: int = 1) -> None:
    async with running(data_dir, job={"optimizer": {"lr": lr}}) as up:
        for _ in range(batches):
            await up.batch()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_run_is_read_while_it_is_written_and_after(tmp_path: Path) -> None:
    async def check() -> None:
        data = tmp_path / "data"
        async with running(data) as up:
            await up.batch()
            await up.gateway.versions.record_evaluation(
                EvaluationRequest(policy_version=1, score=0.5, num_tasks=1, num_episodes=1)
            )
            await up.until(lambda: any(name.endswith("tags.json") for name in names(data)))  # the best one is kept
            before = names(data)
            async with looking(found_at(data)) as (http, _):
                told = await read(http, "/swarm/v1/status")
                live = up.gateway.status().model_dump(mode="json")
                assert {key for key in told if told[key] != live[key]} <= LIVE_ONLY
                assert told["episodes"]["trained"] == 4 and told["state"] == "offline"
                steps = await read(http, "/swarm/v1/steps")
                assert steps["versions"] == [1]
                assert (await read(http, "/swarm/v1/job"))["job"]["batch_size"] == 2
                assert [one["score"] for one in await read(http, "/swarm/v1/evaluations")] == [0.5]
                assert (await read(http, "/swarm/v1/health"))["learning"]["answer"] == "too_early"
                assert (await read(http, "/swarm/v1/waiting"))["needed"] == 2
                assert (await read(http, "/runs/data/swarm/v1/steps")) == steps
            assert names(data) == before
        await read_after(data, steps)

    async def read_after(data: Path, steps: Any) -> None:
        before = names(data)
        async with looking(found_at(data / "runs" / "default")) as (http, _):
            assert await read(http, "/swarm/v1/steps") == steps
            assert "read from its folder" in (await read(http, "/swarm/v1/status"))["waiting_for"]
            assert [one["policy_version"] for one in await read(http, "/swarm/v1/checkpoints")] != []
        assert names(data) == before

    asyncio.run(check())


async def test_nothing_without_the_code_and_no_change_with_it(tmp_path: Path) -> None:
    await trained(tmp_path / "data")
    async with looking(found_at(tmp_path / "data")) as (http, look):
        key = http.headers.pop("Authorization")
        for path in (
            "/swarm/v1/status",
            "/runs/data/swarm/v1/steps",
            "/swarm/v1/look",
            "/runs/none/swarm/v1/steps",
        ):
            assert (await read(http, path, 401))["code"] == "token_missing"
        wrong = await http.post("/swarm/v1/sessions/exchange", json={"code": look.code[:-1]})
        assert (wrong.status_code, wrong.json()["code"]) == (401, "code_invalid")
        assert "open the one it printed" in wrong.json()["detail"]
        assert (await http.post("/swarm/v1/sessions", json={"role": "viewer"})).json()["code"] == "no_tokens"
        assert (await http.get("/", headers={"Host": "evil.example"})).json()["code"] == "host_not_allowed"
        assert (await http.get("/")).status_code == 200, "the page itself has no data"
        http.headers["Authorization"] = key
        opened = await http.post("/swarm/v1/sessions/exchange", json={"code": look.code})
        assert opened.json() | {"key": "", "expires": 0} == {
            "key": "", "role": "viewer", "run": "data", "expires": 0, "live": False
        }  # fmt: skip
        assert (await http.put("/swarm/v1/job", json={})).status_code == 405
        assert (await http.post("/swarm/v1/checkpoints")).status_code == 405
        assert "there are: data" in (await read(http, "/runs/none/swarm/v1/steps", 404))["detail"]


async def test_lists_and_comparisons(tmp_path: Path) -> None:
    await trained(tmp_path / "all" / "a b", lr=1e-5, batches=2)
    await trained(tmp_path / "all" / "A-b", lr=2e-5)
    async with looking(found_at(tmp_path / "all", STUDIES)) as (http, _):
        listed = await read(http, "/swarm/v1/look")
        assert [one["name"] for one in listed["runs"]] == ["a-b", "a-b-2"]
        assert {one["steps"] for one in listed["runs"]} == {1, 2}
        assert [one["name"] for one in listed["studies"]] == [
            "dialogue-size",
            "digits",
            "division",
            "hackable",
            "positives",
            "rate-and-steps",
            "turns",
        ]
        assert listed["studies"][3]["summary"]["verdicts"] == {"refuted": 1}
        found = await read(http, "/swarm/v1/compare?runs=a-b,a-b-2")
        assert list(found["settings"]) == ["job.optimizer.lr"]
        printed = await asyncio.to_thread(read_runs, [Path(one["title"]) for one in found["runs"]])
        assert [one["figures"] for one in found["runs"]] == [one.figures for one in printed.runs]
        study = await read(http, "/swarm/v1/studies/digits")
        assert study["study"]["findings"][0]["verdict"] == "supported"
        assert study == await read(http, "/swarm/v1/studies/digits"), "it is read again only if it grew"
        assert "there are: dialogue-size, digits" in (await read(http, "/swarm/v1/studies/none", 404))["detail"]
        assert "there are: a-b" in (await read(http, "/swarm/v1/compare?runs=none", 404))["detail"]
        assert (await read(http, "/swarm/v1/compare", 422))["param"] == "runs"
        many = ",".join(f"a-{number}" for number in range(9))
        assert "at most 8" in (await read(http, f"/swarm/v1/compare?runs={many}", 400))["detail"]


async def test_studies_alone(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "study.json").write_text("{")
    async with looking(found_at(STUDIES / "digits", tmp_path)) as (http, _):
        studies = (await read(http, "/swarm/v1/look"))["studies"]
        assert [one["name"] for one in studies] == ["digits", "broken"]
        assert "study.json is not valid JSON" in studies[1]["error"]
        assert "is not valid JSON" in (await read(http, "/swarm/v1/studies/broken", 500))["detail"]
        assert "no run" in (await read(http, "/swarm/v1/status", 404))["detail"]


async def test_a_journal_of_a_newer_version(tmp_path: Path) -> None:
    await trained(tmp_path / "new")
    await trained(tmp_path / "old")
    with closing(sqlite3.connect(tmp_path / "new" / "runs" / "default" / "journal.sqlite")) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (SCHEMA_VERSION + 1,))
    refusal = (
        rf"journal schema {SCHEMA_VERSION + 1}, this AgentJet reads {SCHEMA_VERSION}: use the AgentJet that wrote it"
    )
    with pytest.raises(ConfigError, match=refusal):
        found_at(tmp_path / "new")
    async with looking(found_at(tmp_path)) as (http, _):
        runs = (await read(http, "/swarm/v1/look"))["runs"]
        assert [(one["name"], bool(one["error"])) for one in runs] == [("new", True), ("old", False)]
        assert (await read(http, "/runs/new/swarm/v1/steps", 500))["code"] == "journal_unreadable"


def test_wrong_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*/none' is not a folder: name a data dir"):
        found_at(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no run and no study: name a data dir"):
        found_at(tmp_path)
    (tmp_path / "journal.sqlite").write_text("not a database, but long enough to be read as one" * 100)
    with pytest.raises(ConfigError, match="cannot be read as a journal"):
        found_at(tmp_path)
    with pytest.raises(ConfigError, match=r"--token-file .*: No such file"):
        run("look", str(STUDIES), "--token-file", str(tmp_path / "token"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: 127.0.0.1:{port} is not available"):
            run("look", str(STUDIES), "--port", str(port))


def test_no_run_is_called_as_the_default_run_of_a_server(tmp_path: Path) -> None:
    asyncio.run(trained(tmp_path / "default"))
    assert list(found_at(tmp_path / "default").runs) == ["default-2"]


async def test_a_run_of_another_server(tmp_path: Path) -> None:
    await trained(tmp_path / "local", lr=3e-5)
    async with serving(tmp_path / "served") as served:
        await served.run.batch()
        found = found_at(served.url, tmp_path / "local", token=VIEWER)
        name = next(iter(found.runs))
        async with looking(found) as (http, _):
            live = json.loads(served.run.gateway.status().model_dump_json())
            changing = {"uptime": 0, "last_event": 0, "loop": None}
            assert await read(http, f"/runs/{name}/swarm/v1/status") | changing == live | changing
            steps = await read(http, f"/runs/{name}/swarm/v1/steps?limit=1&after=0")
            assert steps["versions"] == [1]
            assert (await read(http, f"/runs/{name}/swarm/v1/episodes/none", 404))["code"] == "episode_not_found"
            listed = (await read(http, "/swarm/v1/look"))["runs"]
            assert {one["name"]: one["is_served"] for one in listed} == {"local": False, name: True}
            compared = await read(http, f"/swarm/v1/compare?runs=local,{name}")
            assert compared["settings"] == {"job.optimizer.lr": [3e-5, 2e-5]}
            refused = await http.post(f"/runs/{name}/swarm/v1/checkpoints")
            assert (refused.status_code, "only reads" in refused.json()["detail"]) == (405, True)
            checked = await http.head(f"/runs/{name}/swarm/v1/status")
            assert (checked.status_code, checked.content, refused.headers["Allow"]) == (200, b"", "GET, HEAD")
            for path in ("/events", "/%2e%2e/%2e%2e/metrics"):
                assert (await read(http, f"/runs/{name}/swarm/v1{path}", 404))["code"] == "not_found"
            del http.headers["Authorization"]
            await read(http, f"/runs/{name}/swarm/v1/status", 401)
        async with looking(found_at(served.url, token="wrong")) as (http, _):
            refusal = await read(http, "/swarm/v1/status", 502)
            assert refusal["code"] == "token_refused" and "AGENTJET_TOKEN" in refusal["detail"]
            assert "AGENTJET_TOKEN" in (await read(http, "/swarm/v1/look"))["runs"][0]["error"]
    async with looking(found_at(served.url, token=VIEWER)) as (http, _):
        assert (await read(http, "/swarm/v1/status", 503))["code"] == "server_unreachable"
        compared = await read(http, f"/swarm/v1/compare?runs={name}", 503)
        assert compared["code"] == "server_unreachable" and "start a server" in compared["detail"]
    stranger = httpx.MockTransport(lambda _: httpx.Response(200, html="<script>alert(1)</script>"))
    with pytest.raises(Later, match="which an AgentJet server does not send"):
        await RemoteRun(served.url, VIEWER, transport=stranger).read("/status")
    with pytest.raises(Later, match="no answer from"):
        await RemoteRun(served.url, VIEWER).status()


# ---- open ------------------------------------------------------------------------------------------------------------


def opened(served: Served, *arguments: str, token: str = VIEWER) -> str:
    done = CliRunner().invoke(app, ["open", *arguments, "--url", served.url, "--token", token])
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.output


def exchanged(address: str) -> dict[str, object]:
    code = parse_qs(urlsplit(address).fragment)["code"][0]
    root = address.partition("#")[0]
    answer = httpx.post(f"{root}swarm/v1/sessions/exchange", json={"code": code}, trust_env=False)
    session: dict[str, object] = answer.json()
    return session


def test_an_address_that_opens_one_session(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "1")
    address, explanation, tunnel = opened(served, "batches/3").splitlines()
    assert parse_qs(urlsplit(address).fragment)["to"] == ["/batches/3"] and "60 seconds" in explanation
    port = urlsplit(served.url).port
    assert f"ssh -L {port}:127.0.0.1:{port} " in tunnel
    assert exchanged(address)["role"] == "viewer"
    assert exchanged(address)["code"] == "code_invalid"


def test_a_browser_is_opened_where_its_user_sees_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(webbrowser, "open", found.append)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    address = opened(served, "--role", "client", token=TOKEN).splitlines()[0]
    assert found == [address] and exchanged(address)["role"] == "client"
    opened(served, "--print")
    assert len(found) == 1
    assert not has_browser({"DISPLAY": ":0", "SSH_CONNECTION": "1"})


def test_a_view_that_the_page_lacks_is_refused(served: Served) -> None:
    with pytest.raises(ConfigError, match="'nosuchview' is not a view: give one of episodes, groups"):
        opened(served, "nosuchview")
    routes = Path(agentjet.__file__).with_name("page").joinpath("route.js").read_text(encoding="utf-8")
    assert set(VIEWS) == set(re.findall(r'^  \["/(\w+)', routes, re.MULTILINE))


def test_a_role_above_that_of_the_token_is_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="role = 'admin'"):
        opened(served, "--role", "admin", token=TOKEN)
