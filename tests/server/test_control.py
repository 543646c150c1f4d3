"""The control routes over HTTP: access, errors, repeated requests.

1. The three kinds of callers: client token, admin token, the key of an episode.
2. Errors are problem+json with a stable code. Temporary errors have `Retry-After`.
3. A second finish, or a retry with an Idempotency-Key, has one effect.
4. A client that disconnects while it waits for room gets no episode.
5. Events stream, and resume after `Last-Event-ID`.
6. `/openapi.json` declares the errors of every route.
7. Requests with a foreign `Host` are refused, which prevents DNS rebinding.
8. HEAD is answered as GET, without the body. 405 has all methods of the path in `Allow`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjet.config import ServerConfig
from agentjet.errors import CheckpointError
from agentjet.front.http import METHODS, allowed_hosts
from agentjet.server.app import create_app
from tests.fakes import running
from tests.server.serving import ADMIN, bearer, serving

pytestmark = pytest.mark.anyio


async def test_an_episode_from_begin_to_finish(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        begun = await served.begin(task_set="s", group="g", client_id="me")
        assert begun["base_url"] == served.url + "/v1" and begun["model"] == "tiny" and begun["policy_version"] == 0
        assert begun["expires_at"] == served.run.clock() + begun["lease_seconds"]
        path = f"/swarm/v1/episodes/{begun['episode_id']}"
        assert (await served.http.post(path + "/heartbeat")).json()["status"] == "live"
        finished = await served.http.post(path + "/finish", json={"reward": 0.5, "metrics": {"a": 1}})
        assert (finished.status_code, finished.json()["reward"]) == (200, 0.5)
        assert (await served.http.get(path)).json() == {**finished.json(), "kept": "journal", "calls": []}
        assert finished.json()["group"] == "g" and finished.json()["client_id"] == "me"
        for status, listed in (("finished", [finished.json()]), ("live", []), ("", [finished.json()])):
            asked = {"status": status} if status else {}
            assert (await served.http.get("/swarm/v1/episodes", params=asked)).json()["episodes"] == listed
        assert (await served.http.get("/swarm/v1/episodes", params={"status": "gone"})).status_code == 422


async def test_finishing_twice_gives_the_same_answer_twice(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        path = f"/swarm/v1/episodes/{(await served.begin())['episode_id']}"
        first = await served.http.post(path + "/finish", json={"reward": 1})
        second = await served.http.post(path + "/finish", json={"reward": 1})
        assert (first.status_code, first.json()) == (second.status_code, second.json())
        other = await served.http.post(path + "/finish", json={"reward": 0})
        assert (other.status_code, other.json()["code"]) == (409, "episode_finished")
        late = await served.http.post(path + "/abort")
        assert (late.status_code, late.json()["code"]) == (409, "episode_finished")


async def test_a_retried_begin_is_one_episode(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        headers = {"Idempotency-Key": "k1"}
        answers = [
            await served.http.post("/swarm/v1/episodes", json={"task_id": "t"}, headers=headers) for _ in range(2)
        ]
        assert answers[0].json() == answers[1].json()
        assert served.run.gateway.status().episodes["live"] == 1
        reused = await served.http.post("/swarm/v1/episodes", json={"task_id": "u"}, headers=headers)
        assert (reused.status_code, reused.json()["code"]) == (409, "idempotency_key_reused")


NO_REWARDS = {
    '{"reward": NaN}': "reward",
    '{"reward": Infinity}': "reward",
    '{"reward": -1e308}': "reward",
    '{"reward": 1, "metrics": {"a": 1.7e308}}': "metrics.a",
    '{"reward": 1e999}': "reward",
    '{"reward": "good"}': "reward",
    '{"reward": 1, "metrics": {"a": NaN}}': "metrics.a",
    '{"reward": 1, "metrics": {"": 1}}': "metrics",
    '{"reward": 1, "rewards": 2}': "rewards",
    "{}": "reward",
}


async def test_rewards_that_are_no_numbers(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode, headers = (await served.begin())["episode_id"], {"Content-Type": "application/json"}
        for body, param in NO_REWARDS.items():
            response = await served.http.post(f"/swarm/v1/episodes/{episode}/finish", content=body, headers=headers)
            assert response.headers["content-type"] == "application/problem+json"
            assert (response.status_code, response.json()["param"]) == (422, param), body
            if any(word in body for word in ("NaN", "Infinity", "1e999")):
                assert "NaN and infinity are not finite numbers" in response.json()["detail"]
        assert served.run.gateway.swarm.episode(episode).status == "live"


async def test_who_may_do_what(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        mine, other = await served.begin(), await served.begin()
        job = (await served.http.get("/swarm/v1/job")).json()

        async def code(method: str, path: str, token: str, body: Any = None) -> str:
            async with httpx.AsyncClient(
                verify=False, base_url=served.url, headers=bearer(token) if token else {}
            ) as http:
                response = await http.request(method, "/swarm/v1" + path, json=body)
            problem = {} if response.is_success else response.json()
            assert problem.get("status", response.status_code) == response.status_code
            assert response.headers.get("WWW-Authenticate", "") == ("Bearer" if response.status_code == 401 else "")
            return f"{response.status_code} {problem.get('code', '')}".strip()

        client = served.http.headers["Authorization"].removeprefix("Bearer ")
        for path in ("/status", "/job", "/checkpoints", f"/episodes/{mine['episode_id']}"):
            assert await code("GET", path, "") == "401 token_missing"
            assert await code("GET", path, "wrong") == "401 token_invalid"
            assert await code("GET", path, client) == "200"
            assert await code("GET", path, ADMIN) == "200"
        for method, path, body in (("PUT", "/job", job), ("POST", "/start", None), ("POST", "/stop", None)):
            assert await code(method, path, "", body) == "401 token_missing"
            assert await code(method, path, client, body) == "403 admin_token_needed"
            assert await code(method, path, mine["api_key"], body) == "403 not_your_episode"
        shown = f"/episodes/{mine['episode_id']}"
        assert await code("GET", shown, mine["api_key"]) == "200"
        assert await code("GET", shown, other["api_key"]) == "403 not_your_episode"
        own = f"{shown}/heartbeat"
        assert await code("POST", own, mine["api_key"]) == "200"
        assert await code("POST", own, other["api_key"]) == "403 not_your_episode"
        assert await code("POST", own, mine["api_key"] + "x") == "401 key_invalid"
        assert await code("GET", "/status", mine["api_key"]) == "403 not_your_episode"
        served.run.clock.advance(100)
        assert await code("POST", own, mine["api_key"]) == "200"
        served.run.clock.advance(100_000)
        assert await code("POST", own, mine["api_key"]) == "401 key_expired"
        longer = {**job, "job": {**job["job"], "max_episode_seconds": 1e6}}
        assert await code("PUT", "/job", ADMIN, longer) == "200"
        assert await code("POST", own, mine["api_key"]) == "409 episode_expired"
        assert await code("POST", own, client) == "409 episode_expired"


async def test_what_is_not_there(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        for method, path, status, code in (
            ("GET", "/swarm/v1/episodes/nope", 404, "episode_not_found"),
            ("GET", "/swarm/v1/nope", 404, "not_found"),
            ("POST", "/v1beta/models/policy:streamGenerateContent", 404, "not_found"),
            ("DELETE", "/swarm/v1/status", 405, "method_not_allowed"),
        ):
            response = await served.http.request(method, path)
            assert (response.status_code, response.json()["code"]) == (status, code)
            assert response.headers["content-type"] == "application/problem+json"
        inference = await served.http.post("/v1/embeddings", json={})
        assert (inference.status_code, inference.json()["error"]["code"]) == (404, "unknown_route")
        for path, right, way_out in (
            ("/chat/completions", "/v1/chat/completions", "add /v1 to the base URL"),
            ("/k/a-key/responses", "/v1/responses", "add /v1 to the base URL"),
            ("/models", "/v1/models", "add /v1 to the base URL"),
            ("/messages", "/v1/messages", "add /v1 to the base URL"),
            ("/messages/count_tokens", "/v1/messages/count_tokens", "add /v1 to the base URL"),
            ("/v1/v1/messages", "/v1/messages", "leave /v1 out of the base URL"),
            ("/k/a-key/v1/v1/chat/completions", "/v1/chat/completions", "leave /v1 out of the base URL"),
            ("/v1/inference/v1/generate", "/inference/v1/generate", "leave /v1 out of the base URL"),
            ("/v1/chat/completions/", "/v1/chat/completions", "leave out the slash"),
            ("/v1//responses", "/v1/responses", "leave out the slash"),
            ("//v1/messages", "/v1/messages", "POST //v1/messages: Not Found"),
        ):
            wrong = await served.http.post(served.url + path, json={})
            dialects_own = await served.http.post(f"{right}/nothing", json={})
            assert wrong.status_code == 404 and way_out in wrong.json()["error"]["message"]
            assert wrong.json()["error"].keys() == dialects_own.json()["error"].keys(), "the shape of its dialect"
        for path in ("/f1/v1/chat/completions", "/f0/v1/messages", "/f1/runs/other/v1/responses", "/f1/v1/models"):
            of_front = await served.http.post(path, json={})
            dialects_own = await served.http.post(f"{path[3:].removeprefix('/runs/other')}/nothing", json={})
            error = of_front.json()["error"]
            assert (
                of_front.status_code == 403 and f"no fronts (server.fronts = 0): leave {path[:3]}" in error["message"]
            )
            assert error.keys() == dialects_own.json()["error"].keys(), "the shape of its dialect"
        for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
            got = await served.http.get(path)
            assert (got.status_code, "takes requests with POST" in got.text) == (405, True)


async def test_every_path_answers_head_and_names_its_methods(tmp_path: Path) -> None:
    """Below `/runs/NAME` as well. The stream of events must end, or the next request of its connection would wait."""
    async with serving(tmp_path / "d") as served:
        key = (await served.begin())["api_key"]
        ways = {path: {way.upper() for way in ways} for path, ways in served.app.openapi()["paths"].items()}
        ways |= {path: {"GET"} for path in ("/", "/openapi.json", "/ui/x/app.js")}
        patterns = {path: re.sub(r"{\w+}", "[^/]+", path) for path in ways}
        for path in ways:
            asked = re.sub(r"{\w+}", "x", path.replace("{key}", key))
            methods = {way for one, pattern in patterns.items() if re.fullmatch(pattern, asked) for way in ways[one]}
            allowed = ", ".join(way for way in ("GET", "HEAD", *METHODS[1:]) if way.replace("HEAD", "GET") in methods)
            for url in (asked, f"/runs/default{asked}"):
                for method in set(METHODS) - methods:
                    refused = await served.http.request(method, url)
                    assert (refused.status_code, refused.headers.get("Allow")) == (405, allowed), (method, url)
                    assert ("error" if "/v1/" in path.replace("/swarm/", "") else "code") in refused.json(), url
                head, text = await served.http.head(url), ""
                if path != "/swarm/v1/events":
                    got = await served.http.get(url)
                    probes = path == "/"
                    assert head.status_code == got.status_code, url
                    assert probes or head.headers["Content-Type"] == got.headers["Content-Type"], url
                    text = got.headers["Content-Length"]
                assert (head.content, bool(head.headers.get("Content-Length"))) == (b"", bool(text)), url


async def test_a_full_batch_refuses_and_says_when_to_come_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        for task in ("a", "b"):
            await served.begin(task_id=task)
        refused = await served.http.post("/swarm/v1/episodes", json={"task_id": "c"})
        assert (refused.status_code, refused.json()["code"]) == (429, "batch_full")
        assert "2 groups (job.batch_size): wait" in refused.json()["detail"]
        assert int(refused.headers["Retry-After"]) >= 1 and refused.json()["retry_after"] > 0
        await served.http.post("/swarm/v1/episodes", json={"task_id": "c", "client_id": "poller"})
        assert "poller" in (await served.http.get("/swarm/v1/status")).json()["clients"]
        waiting = asyncio.create_task(served.begin(task_id="a2", group="a", wait=10))
        second = await asyncio.wait_for(waiting, 5)
        full = asyncio.create_task(served.begin(task_id="a3", group="a", wait=10))
        await asyncio.sleep(0.05)
        assert not full.done()
        await served.http.post(f"/swarm/v1/episodes/{second['episode_id']}/abort", json={"reason": "crashed"})
        assert (await full)["episode_id"] != second["episode_id"]


async def test_a_client_that_leaves_while_it_waits_gets_no_episode(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        first = await served.begin(task_id="a")
        await served.begin(task_id="b")
        async with httpx.AsyncClient(verify=False, base_url=served.url, headers=served.http.headers) as gone:
            waiting = asyncio.create_task(gone.post("/swarm/v1/episodes", json={"task_id": "c", "wait": 30}))
            await served.run.until(lambda: served.run.gateway.waiters.num_waiting == 1)
            waiting.cancel()
            await asyncio.wait([waiting])
        await served.run.until(lambda: not served.run.gateway.waiters.num_waiting)
        await served.http.post(f"/swarm/v1/episodes/{first['episode_id']}/abort")
        await asyncio.sleep(0.05)
        assert served.run.gateway.status().episodes["live"] == 1


async def test_a_stopped_engine(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        await served.run.batch()
        episode = (await served.begin())["episode_id"]
        stopped = await served.http.post("/swarm/v1/stop", headers=bearer(ADMIN))
        assert stopped.json()["state"] == "offline" and not served.run.compute.running
        refused = await served.http.post("/swarm/v1/episodes", json={"task_id": "t"})
        assert (refused.status_code, refused.json()["code"]) == (503, "engine_stopped")
        assert int(refused.headers["Retry-After"]) >= 1
        ended = await served.http.post(f"/swarm/v1/episodes/{episode}/finish", json={"reward": 1})
        assert ended.status_code == 200, "a reward is never refused for a stopped engine"
        assert (await served.http.post("/swarm/v1/start", headers=bearer(ADMIN))).status_code == 200
        await served.run.gateway.engine.wait_until_up()
        assert (await served.http.get("/swarm/v1/status")).json()["state"] == "sampling"
        again = await served.begin(mode="eval")
        assert served.run.compute.version == 1 == (await served.run.say(again["episode_id"])).versions[0]


async def test_the_job_is_compared_and_set(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        read = (await served.http.get("/swarm/v1/job")).json()
        assert read["job"]["batch_size"] == 2

        async def put(**changes: Any) -> httpx.Response:
            body = {"revision": read["revision"], "job": {**read["job"], **changes}}
            return await served.http.put("/swarm/v1/job", json=body, headers=bearer(ADMIN))

        wrong = await put(bach_size=3)
        assert wrong.status_code == 422 and "job.batch_size" in wrong.json()["detail"]
        assert (await put(group_size=1)).json()["code"] == "invalid_setting"
        huge = await put(seed=2**70)
        assert huge.status_code == 422 and "job.seed = 1180591620717411303424" in huge.json()["detail"]
        for revision in (2**63, 10**400):
            body = {"revision": revision, "job": read["job"]}
            refused = await served.http.put("/swarm/v1/job", json=body, headers=bearer(ADMIN))
            assert (refused.status_code, refused.json()["param"]) == (422, "revision")
        assert (await put(batch_size=3)).json()["revision"] == read["revision"] + 1
        assert served.run.gateway.swarm.job.batch_size == 3
        late = await put(batch_size=4)
        assert (late.status_code, late.json()["code"]) == (409, "job_revision_changed")
        read["revision"] += 1
        too_long = await put(max_tokens=100_000)
        assert too_long.status_code == 422 and "leaves no room for a prompt" in too_long.json()["detail"]


async def test_checkpoints(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", server={"keep_exports": 1}) as served:
        assert (await served.http.get("/swarm/v1/checkpoints")).json() == []
        made = (await served.http.post("/swarm/v1/checkpoints")).json()
        assert made["policy_version"] == 0
        assert (await served.http.get("/swarm/v1/checkpoints")).json() == [made]
        exported = (await served.http.post("/swarm/v1/exports")).json()
        assert (Path(exported["path"]) / "model.txt").read_text() == served.run.compute.weights
        for path in ("/swarm/v1/checkpoints", "/swarm/v1/exports"):
            refused = await served.http.post(path, json={"path": "/elsewhere"})
            assert (refused.status_code, refused.json()["param"]) == (422, "path")
            assert (await served.http.post(path, json={})).is_success
        others = [Path(exported["path"]).with_name(name) for name in ("mine", "step_000000.old")]
        for other in others:
            other.mkdir()
        await served.run.batch()
        os.utime(exported["path"], (2e9, 2e9))  # The version decides, not the time of a copy.
        newer = (await served.http.post("/swarm/v1/exports")).json()
        assert [Path(newer["path"]).exists(), Path(exported["path"]).exists()] == [True, False]
        assert all(other.exists() for other in others)
        shutil.rmtree(Path(newer["path"]).parent)
        Path(newer["path"]).parent.write_text("a file in place of the folder")
        failed = await served.http.post("/swarm/v1/exports")
        assert (failed.status_code, failed.json()["code"]) == (507, "checkpoint_failed")
        served.run.compute.fail_save = [CheckpointError("No space left on device")]
        failed = await served.http.post("/swarm/v1/checkpoints")
        assert (failed.status_code, failed.json()["code"]) == (507, "checkpoint_failed")
        assert (await served.http.get("/swarm/v1/checkpoints")).json() == [made]


async def test_events_stream_and_resume(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = (await served.begin())["episode_id"]

        async def read(count: int, **headers: str) -> list[dict[str, Any]]:
            events: list[dict[str, Any]] = []
            async with served.http.stream("GET", "/swarm/v1/events", headers=headers) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        events.append(json.loads(line.removeprefix("data: ")))
                        if len(events) == count:
                            break
            return events

        first = await read(3)
        assert [event["seq"] for event in first] == [1, 2, 3]
        last = (await served.http.get("/swarm/v1/status")).json()["last_event"]
        coming = asyncio.create_task(read(1, **{"Last-Event-ID": str(last)}))
        await asyncio.sleep(0.05)
        await served.http.post(f"/swarm/v1/episodes/{episode}/finish", json={"reward": 1})
        [event] = await coming
        assert event["seq"] == last + 1 and event["kind"] == "episode"


async def test_draining_ends_event_streams(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served, served.http.stream("GET", "/swarm/v1/events") as response:
        reading = asyncio.create_task(response.aread())
        await asyncio.sleep(0.01)
        await served.run.gateway.drain()
        await asyncio.wait_for(reading, 5)


async def test_bodies_that_are_no_bodies(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        headers = {"Content-Type": "application/json"}
        broken = await served.http.post("/swarm/v1/episodes", content=b"{", headers=headers)
        assert (broken.status_code, broken.json()["code"]) == (400, "invalid_json")
        unmarked = await served.http.post("/swarm/v1/episodes", content=b'{"task_id": "x"}')
        assert (unmarked.status_code, unmarked.json()["code"]) == (422, "not_json")
        assert "Content-Type: application/json" in unmarked.json()["detail"]
        huge = await served.http.post("/swarm/v1/episodes", content=b" " * (33 * 2**20), headers=headers)
        assert (huge.status_code, huge.json()["code"]) == (413, "too_large")


async def test_a_name_that_was_rebound_to_loopback_is_refused(tmp_path: Path) -> None:
    allowed = ("localhost", "127.0.0.1", "127.0.0.1:8400", "[::1]:1", "LOCALHOST:80", "box.example:1")
    foreign = ("evil.example", "evil.example:8400", "localhost.evil.example", "[", "10.0.0.1", "", "a@127.0.0.1")
    async with serving(tmp_path / "d", server={"allowed_hosts": "other.example, box.example"}) as served:
        for host in allowed:
            assert (await served.http.get("/swarm/v1/status", headers={"Host": host})).status_code == 200, host
        for host in (*foreign, r"evil\@127.0.0.1", "127.0.0.1:80:90"):
            control = await served.http.get("/swarm/v1/status", headers={"Host": host})
            assert (control.status_code, control.json()["code"]) == (400, "host_not_allowed"), host
            assert "server.allowed_hosts" in control.json()["detail"]
            inference = await served.http.post("/v1/chat/completions", json={}, headers={"Host": host})
            assert (inference.status_code, inference.json()["error"]["code"]) == (400, "host_not_allowed")


def test_what_hosts_a_setting_allows() -> None:
    assert allowed_hosts(ServerConfig(host="127.0.0.2")) == {"127.0.0.2"}
    assert allowed_hosts(ServerConfig(allowed_hosts=" Box.example ,[fd00::1]")) == {
        "127.0.0.1",
        "box.example",
        "fd00::1",
    }
    outward = ServerConfig().model_copy(update={"host": "0.0.0.0"})
    assert allowed_hosts(outward) is None
    assert allowed_hosts(outward.model_copy(update={"allowed_hosts": "box.example"})) == {"0.0.0.0", "box.example"}


async def test_a_bug_is_a_500_in_the_right_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path / "d") as served:

        def broken() -> None:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(served.run.gateway, "status", broken)
        response = await served.http.get("/swarm/v1/status")
        assert (response.status_code, response.json()["code"]) == (500, "internal_error")
        assert "secret detail" not in response.text


async def test_openapi_is_complete(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        from tests.server.serving import TOKEN, Keys

        schema = create_app(run.runs, Keys({"client": TOKEN, "admin": ADMIN})).openapi()
    operations = {
        f"{method.upper()} {path}": operation
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    }
    assert {"POST /swarm/v1/episodes", "GET /swarm/v1/events", "PUT /swarm/v1/job", "POST /v1/chat/completions"} <= (
        operations.keys()
    )
    for name, operation in operations.items():
        responses = operation["responses"]
        assert operation.get("description"), f"{name} is not described"
        if name in ("GET /healthz", "GET /readyz"):  # For whoever watches the process; they tell nothing else.
            continue
        assert {"401", "403"} <= responses.keys(), name
        if name == "POST /swarm/v1/sessions/exchange":  # The code in the body is the key.
            continue
        assert operation.get("security") or "{key}" in name, f"{name} does not say what it wants for a key"
        dialect = "AnthropicError" if "/v1/messages" in name else "OpenAIError"
        shape = "Problem" if "/swarm/" in name or name == "GET /metrics" else dialect
        for status, response in responses.items():
            if status == "default" or int(status) >= 400:
                assert shape in json.dumps(response["content"]), (name, status)
            if status in ("429", "503") and "/swarm/" in name:
                assert "Retry-After" in response["headers"], (name, status)


async def test_status_shows_who_holds_what(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        for client in ("a", "a", "b"):
            await served.begin(mode="eval", client_id=client)
        status = (await served.http.get("/swarm/v1/status")).json()
        assert status["holding"] == {"a": 2, "b": 1} and set(status["clients"]) == {"a", "b"}
