"""Several runs of one server over HTTP.

1. A run has its own paths, keys, episodes, events and metrics; agents with OpenAI's and Anthropic's SDK need only its
   base URL. Two runs train at once.
2. A token or key of one run is refused on every other, in the shape of the route. The answer is the same for a run that
   exists, for one that was ended, and for a name that no run has.
3. No way to write a path enters a run without its token.
4. The server's admin creates, ends, lists and enters runs. A run that was ended can be opened again with its keys.
5. Nothing about a run is in an answer to others: documents, redirects, errors.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjet.client.threads import LoopThread
from agentjet.front.keys import read_secret
from tests.fakes import recent_episodes
from tests.server.serving import ADMIN, TOKEN, VIEWER, Served, bearer, in_thread, serving

HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
NAMES = ("other", "ended", "none")
"""An open run, a run that was ended, and a name without a run."""


async def create(served: Served, name: str, **settings: Any) -> httpx.Response:
    return await served.http.put(f"/swarm/v1/runs/{name}", json=settings, headers=bearer(ADMIN))


def token_of(served: Served, run: str, file: str = "token") -> str:
    return read_secret(served.run.folder.parent / run / file)


async def begin(served: Served, run: str, token: str = "") -> dict[str, Any]:
    token = token or token_of(served, run)
    answer = await served.http.post(f"/runs/{run}/swarm/v1/episodes", json={"task_id": "t"}, headers=bearer(token))
    assert answer.status_code == 200, answer.text
    begun: dict[str, Any] = answer.json()
    return begun


@dataclass
class Shared:
    """A server with the runs of `NAMES` and `third`."""

    served: Served
    loop: LoopThread
    keys: dict[str, str]
    """Keys of an episode of each run, and of an ended run."""

    def ask(self, method: str, path: str, headers: dict[str, str], **more: Any) -> httpx.Response:
        http = self.served.http

        async def ask() -> httpx.Response:
            request = http.build_request(method, path, **more)
            request.headers.pop("Authorization", None)
            request.headers.update(headers)
            return await http.send(request)

        return self.loop.run(ask())

    def raw(self, target: str, token: str) -> tuple[int, dict[str, Any]]:
        """Status and body of a GET whose target is sent as it is."""

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.served.listener.getsockname()[1])
            head = [f"GET {target} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Authorization: Bearer {token}"]
            writer.write("\r\n".join([*head, "", ""]).encode())
            answer = await reader.read()
            writer.close()
            return answer

        head, _, body = self.loop.run(ask()).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with in_thread(serving(tmp_path_factory.mktemp("runs") / "data")) as (served, loop):

        async def prepare() -> dict[str, str]:
            keys = {"default": (await served.begin())["api_key"]}
            for name in ("other", "ended", "third"):
                assert (await create(served, name)).status_code == 200
                await served.run.runs.get(name).engine.wait_until_up()
                keys[name] = (await begin(served, name))["api_key"]
            ended = await served.http.delete("/swarm/v1/runs/ended", headers=bearer(ADMIN))
            assert (ended.status_code, ended.json()["is_open"]) == (200, False)
            return keys

        yield Shared(served, loop, loop.run(prepare()))


@pytest.mark.anyio
async def test_agents_of_two_runs_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        made = (await create(served, "other", job={"batch_size": 1, "group_size": 2, "max_tokens": 32})).json()
        assert (made["name"], made["path"], made["is_open"]) == ("other", "/runs/other", True)
        other = served.run.of_run("other")
        await other.gateway.engine.wait_until_up()
        token = token_of(served, "other")
        for member in range(2):
            episode = await begin(served, "other")
            assert episode["base_url"] == f"{served.url}/runs/other/v1"
            answer = await served.openai(episode).chat.completions.create(model="tiny", messages=HELLO["messages"])
            assert answer.choices[0].message.content == "hi"
            anthropic = served.anthropic(episode, base_url=episode["base_url"].removesuffix("/v1"))
            message = await anthropic.messages.create(max_tokens=9, **HELLO)
            assert message.content[0].text == "hi"
            in_path = f"{served.url}/runs/other/k/{episode['api_key']}/v1/chat/completions"
            assert (await served.http.post(in_path, json=HELLO)).status_code == 200
            path = f"/runs/other/swarm/v1/episodes/{episode['episode_id']}/finish"
            own = {"reward": float(member)}
            assert (await served.http.post(path, json=own, headers=bearer(token))).json()["num_calls"] == 3
        await served.run.batch()
        await other.until(lambda: other.gateway.swarm.policy_version == 1)
        status = (await served.http.get("/runs/other/swarm/v1/status", headers=bearer(token))).json()
        assert (status["run"], status["batch_size"], status["episodes"]["finished"]) == ("other", 1, 2)
        status = (await served.http.get("/swarm/v1/status")).json()
        assert (status["run"], status["batch_size"], status["episodes"]["finished"]) == ("default", 2, 4)
        scraped = await served.http.get(
            "/runs/other/metrics", headers=bearer(token_of(served, "other", "viewer-token"))
        )
        assert 'agentjet_policy_version{run="other"} 1.0' in scraped.text
        assert 'agentjet_step{metric="reward/mean",run="other"} 0.5' in scraped.text
        assert 'run="' not in (await served.http.get("/metrics")).text
        async with served.http.stream("GET", "/runs/other/swarm/v1/events", headers=bearer(token)) as events:
            lines = [line async for line in _until(events.aiter_lines(), "event: step")]
        assert sum(line == "event: episode" for line in lines) == 4, "two episodes, their begin and their end"


async def _until(lines: Any, last: str) -> Any:
    async for line in lines:
        yield line
        if line == last:
            return


ROUTES = (
    ("GET", "/swarm/v1/status"),
    ("POST", "/swarm/v1/stop"),
    ("GET", "/swarm/v1/nowhere"),
    ("GET", "/swarm/v1/events"),
    ("GET", "/metrics"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
)


@pytest.mark.parametrize("owner", ["", "unknown", "default", "third", "third/admin-token", "key default", "key third"])
def test_a_stranger_learns_nothing_about_a_run(shared: Shared, owner: str) -> None:
    """The same answer whether the run is open, ended or never was; 401 without rights anywhere, else 403."""
    if owner.startswith("key "):
        token = shared.keys[owner.removeprefix("key ")]
    elif owner in ("", "unknown"):
        token = owner
    else:
        run, _, file = owner.partition("/")
        token = TOKEN if run == "default" else token_of(shared.served, run, file or "token")
    for method, path in ROUTES:
        body = {"json": {**HELLO, "max_tokens": 9}} if method == "POST" else {}
        answers = [shared.ask(method, f"/runs/{name}{path}", bearer(token), **body) for name in NAMES]
        seen = {(each.status_code, each.text, *sorted(_told(each))) for each in answers}
        assert len(seen) == 1, (path, seen)
        code = answers[0].json().get("code") or answers[0].json()["error"].get("code", "")
        assert answers[0].status_code == (401 if owner in ("", "unknown") else 403), (path, answers[0].text)
        if "code" in answers[0].json():
            expected = {"": "token_missing", "unknown": "token_invalid"}.get(owner, "not_your_run")
            assert code == expected
        in_path = f"/k/{token or 'x'}/v1/chat/completions"
        answers = [shared.ask("POST", f"/runs/{name}{in_path}", {}, json=HELLO) for name in NAMES]
        assert len({(each.status_code, each.text) for each in answers}) == 1
        assert answers[0].json()["error"]["message"]


def _told(answer: httpx.Response) -> list[str]:
    return [f"{name}: {value}" for name, value in answer.headers.items() if name != "date"]


def test_the_token_of_a_run_opens_nothing_of_the_default_run(shared: Shared) -> None:
    for path in ("/swarm/v1/status", "/swarm/v1/runs", "/metrics", "/runs/default/swarm/v1/status"):
        for file in ("token", "admin-token"):
            refused = shared.ask("GET", path, bearer(token_of(shared.served, "other", file)))
            assert (refused.status_code, refused.json()["code"]) == (403, "not_your_run"), path
    for key in (shared.keys["other"], token_of(shared.served, "other")):
        refused = shared.ask("POST", "/v1/chat/completions", bearer(key), json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_your_run")
        refused = shared.ask("POST", "/v1/messages", {"x-api-key": key}, json={**HELLO, "max_tokens": 9})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    path = f"/swarm/v1/episodes/{recent_episodes(shared.served.run.gateway.swarm, 1)[0].id}/abort"
    assert shared.ask("POST", path, bearer(shared.keys["other"])).json()["code"] == "not_your_run"


def test_a_run_in_its_own_rights(shared: Shared) -> None:
    """Its admin administers this run only; the default run's admin every run. Its client learns that it was ended."""
    served = shared.served
    own = bearer(token_of(served, "other", "admin-token"))
    for headers in (own, bearer(ADMIN)):
        assert shared.ask("GET", "/runs/other/swarm/v1/job", headers).status_code == 200
        job = shared.ask("GET", "/runs/other/swarm/v1/job", headers).json()
        assert shared.ask("PUT", "/runs/other/swarm/v1/job", headers, json=job).status_code == 200
    refused = shared.ask("PUT", "/runs/other/swarm/v1/job", bearer(token_of(served, "other")), json=job)
    assert (refused.status_code, refused.json()["code"]) == (403, "admin_token_needed")
    refused = shared.ask("GET", "/runs/other/swarm/v1/status", bearer(shared.keys["other"]))
    assert (refused.status_code, refused.json()["code"]) == (403, "not_your_episode")
    assert shared.ask("GET", "/runs/default/swarm/v1/status", bearer(VIEWER)).json()["run"] == "default"
    gone = shared.ask("GET", "/runs/ended/swarm/v1/status", bearer(token_of(served, "ended")))
    assert (gone.status_code, gone.json()["code"]) == (404, "run_not_found")
    assert "'ended' is not open" in gone.json()["detail"] and "other" not in gone.json()["detail"]
    gone = shared.ask("POST", "/runs/ended/v1/chat/completions", bearer(shared.keys["ended"]), json=HELLO)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "run_not_found")
    for name in ("ended", "none"):
        unknown = shared.ask("GET", f"/runs/{name}/swarm/v1/status", bearer(ADMIN))
        assert (unknown.status_code, unknown.json()["code"]) == (404, "run_not_found")
        assert f"There is no open run {name!r}; open are: default, other, third" in unknown.json()["detail"]


TRICKS = (
    "/runs/../runs/other",
    "/runs/%2e%2e/other",
    "/runs/..%2fother",
    "/runs/x/../other",
    "/runs/%2e/other",
    "/runs//other",
    "//runs/other",
    "/runs/other/../default",
    "/runs/other%2f..%2fdefault",
    "/runs/other/..",
    "/runs/other/../..",
    "/runs/Other",
    "/runs/OTHER",
    "/runs/other.",
    "/runs/other%20",
    "/runs/other%00",
    "/runs/%00other",
    "/runs/%6fther",
    "/%72uns/other",
    "/runs/other%2f",
    "/runs/other%2fswarm",
    "/runs/%c3%b6ther",
    "/runs/o%cc%88ther",
    "/runs/%ef%bd%8fther",
    "/runs/other%0d%0a",
    "/runs/other;x=1",
    "/runs/other%3f",
    "/runs/-other",
    "/runs/.other",
    "/runs/" + "o" * 64,
    "/runs/" + "o" * 65,
    "/runs/" + "o" * 30_000,
    "/runs/other/runs/other",
    "/runs/third/runs/other",
    "/runs/other/runs/third",
)


@pytest.mark.parametrize("start", TRICKS, ids=lambda start: start[:40])
def test_tricks_with_paths_enter_no_run(shared: Shared, start: str) -> None:
    """With every token: the status that such a path brings is neither that of `other` nor of another run."""
    served = shared.served
    strangers = (TOKEN, token_of(served, "third"), "unknown")
    for token in (*strangers, token_of(served, "other"), ADMIN):
        status, body = shared.raw(f"{start}/swarm/v1/status", token)
        assert status in (400, 401, 403, 404), (token, status, body)
        assert body.get("code") in ("token_invalid", "not_your_run", "run_not_found", "not_found", None), body
        assert token == ADMIN or "third" in start or "third" not in body.get("detail", "")
    if start.startswith(("/runs/", "/%72")) and not start.startswith(("/runs/other/", "/runs/third/")):
        assert shared.raw(f"{start}/swarm/v1/status", "unknown")[0] == 401
        assert shared.raw(f"{start}/swarm/v1/status", TOKEN)[1]["code"] == "not_your_run"
    assert not (served.run.folder.parent / "..").joinpath("run.json").exists()


def test_nothing_about_runs_is_in_documents_and_redirects(shared: Shared) -> None:
    token = token_of(shared.served, "other")
    document = shared.ask("GET", "/runs/other/openapi.json", bearer(token)).json()
    assert document == shared.ask("GET", "/openapi.json", {}).json() and "servers" not in document
    assert not [path for path in document["paths"] if "lease" in path or "prepare" in path or path.endswith("/run")]
    led = shared.ask("GET", "/runs/other/swarm/v1/status/", bearer(token))
    assert led.headers.get("location", f"{shared.served.url}/runs/other/").startswith(
        f"{shared.served.url}/runs/other/"
    )
    probes = {shared.ask("HEAD", f"/runs/{name}/", {}).status_code for name in (*NAMES, "..")}
    assert probes == {200}, "an agent's check of its base URL, the same for all names"
    assert {shared.ask("HEAD", f"/runs/{name}/v1/models", {}).status_code for name in NAMES} == {401}


def test_runs_are_managed_by_the_servers_admin(shared: Shared) -> None:
    def ask(method: str, path: str, token: str = ADMIN, **more: Any) -> tuple[int, str, str]:
        answer = shared.ask(method, path, bearer(token), **more)
        body = answer.json()
        return answer.status_code, body.get("code", ""), body.get("detail", "")

    listed = shared.ask("GET", "/swarm/v1/runs", bearer(ADMIN)).json()["runs"]
    assert [(run["name"], run["path"], run["is_open"]) for run in listed] == [
        ("default", "", True),
        ("ended", "/runs/ended", False),
        ("other", "/runs/other", True),
        ("third", "/runs/third", True),
    ]
    for method, path in (("GET", "/runs"), ("PUT", "/runs/new"), ("DELETE", "/runs/other")):
        body = {"json": {}} if method == "PUT" else {}
        for token, refusal in (("", 401), ("unknown", 401), (VIEWER, 403), (TOKEN, 403)):
            assert ask(method, f"/swarm/v1{path}", token, **body)[0] == refusal
        own = token_of(shared.served, "other", "admin-token")
        assert ask(method, f"/swarm/v1{path}", own, **body)[:2] == (403, "not_your_run")
        assert ask(method, f"/runs/other/swarm/v1{path}", own, **body)[:2] == (404, "not_found")
        assert ask(method, f"/runs/other/swarm/v1{path}", ADMIN, **body)[:2] == (404, "not_found")
    for name in ("Other", "..", "%2e%2e", "a%20b", "-a", "ö", "o" * 65):
        for method in ("PUT", "DELETE"):
            status, code, text = ask(method, f"/swarm/v1/runs/{name}", **({"json": {}} if method == "PUT" else {}))
            assert (status, code) in ((422, "run_name_invalid"), (404, "not_found"), (405, "method_not_allowed")), text
    put = "/swarm/v1/runs/new"
    assert ask("PUT", put, json={"job": {"group_size": 1}})[:2] == (422, "invalid_setting")
    assert ask("PUT", put, json={"policies": {"A": {}}})[:2] == (422, "invalid_setting")
    assert ask("PUT", put, json={"jobs": {}})[:2] == (422, "unknown_parameter")
    assert ask("PUT", "/swarm/v1/runs/default", json={})[:2] == (409, "default_run")
    assert ask("DELETE", "/swarm/v1/runs/default")[:2] == (409, "default_run")
    assert ask("DELETE", "/swarm/v1/runs/none")[:2] == (404, "run_not_found")
    changed = ask("PUT", "/swarm/v1/runs/other", json={"policies": {"planner": {}}})
    assert changed[:2] == (409, "run_policies_changed")
    assert [run["name"] for run in shared.ask("GET", "/swarm/v1/runs", bearer(ADMIN)).json()["runs"]] == [
        "default",
        *("ended", "other", "third"),
    ], "no refused request made a run"


@pytest.mark.anyio
async def test_runs_and_keys_stay_over_ends_and_restarts(tmp_path: Path) -> None:
    """Ended and opened again, and over a restart of the server: the same tokens, keys and episodes."""
    async with serving(tmp_path / "d") as served:
        for name in ("open", "shut"):
            await create(served, name)
            await served.run.runs.get(name).engine.wait_until_up()
        episode = await begin(served, "open")
        tokens = {name: token_of(served, name) for name in ("open", "shut")}
        for _ in range(2):
            assert (await served.http.delete("/swarm/v1/runs/shut", headers=bearer(ADMIN))).json()["is_open"] is False
    async with serving(tmp_path / "d") as served:
        await served.run.runs.get("open").engine.wait_until_up()
        client = served.openai({**episode, "base_url": f"{served.url}/runs/open/v1"})
        assert (await client.chat.completions.create(model="policy", messages=HELLO["messages"])).choices
        path = f"/runs/open/swarm/v1/episodes/{episode['episode_id']}"
        assert (await served.http.get(path, headers=bearer(tokens["open"]))).json()["num_calls"] == 1
        refused = await served.http.get("/runs/shut/swarm/v1/status", headers=bearer(tokens["shut"]))
        assert refused.status_code == 404
        assert (await create(served, "shut")).json()["is_open"] is True
        assert (await served.http.get("/runs/shut/swarm/v1/status", headers=bearer(tokens["shut"]))).status_code == 200
        refused = await served.http.get("/runs/shut/swarm/v1/status", headers=bearer(tokens["open"]))
        assert (refused.status_code, refused.json()["code"]) == (403, "not_your_run")


@pytest.mark.anyio
async def test_a_run_whose_keys_cannot_be_read_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path / "d") as served:
        await create(served, "spoiled")
    (tmp_path / "d" / "runs" / "spoiled" / "token").write_text("x\n")
    async with serving(tmp_path / "d") as served:
        assert "run spoiled cannot be entered" in caplog.text
        refused = await served.http.get("/runs/spoiled/swarm/v1/status", headers=bearer(ADMIN))
        assert (refused.status_code, refused.json()["code"]) == (404, "run_not_found")
        refused = await create(served, "spoiled")
        assert (refused.status_code, refused.json()["code"]) == (409, "run_unusable")
        assert str(tmp_path / "d" / "runs" / "spoiled" / "token") in refused.json()["detail"]
        assert (await served.http.get("/swarm/v1/status")).status_code == 200


@pytest.mark.anyio
async def test_a_removed_run_leaves_no_valid_token(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        await create(served, "other")
        old = token_of(served, "other")
        await served.http.delete("/swarm/v1/runs/other", headers=bearer(ADMIN))
        shutil.rmtree(tmp_path / "d" / "runs" / "other")
        await create(served, "other")
        new = token_of(served, "other")
        answers = [await served.http.get("/runs/other/swarm/v1/status", headers=bearer(t)) for t in (old, new)]
        assert [answer.status_code for answer in answers] == [401, 200]
