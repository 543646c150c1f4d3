"""Sessions of the page: a token gives a code, the code gives a key once, the key reads.

1. A code opens one session, within a minute; a session ends after twelve hours, or with the secret of the keys.
2. A session may do what its role may, and at most what the token of its request may. It opens no other session.
3. A session of a run opens that run only. A session key is no episode key.
4. The page and its files have the headers that confine it; an old file name is refused.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import Unauthorized
from agentjet.front.keys import (
    CODE_SECONDS,
    MAX_CODES,
    SECRET_FILES,
    SESSION_SECONDS,
    Bearer,
    Keys,
    SessionCodes,
    replace_secret,
)
from tests.fakes import Clock
from tests.server.serving import ADMIN, TOKEN, VIEWER, Served, serving

EXCHANGE = "/swarm/v1/sessions/exchange"


async def ask(served: Served, method: str, path: str, token: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
    """Returns the status and the body of an answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {"Authorization": ""}
    answer = await served.http.request(method, path, headers=headers, json=body or None)
    return answer.status_code, answer.json()


async def session(served: Served, token: str, role: str = "viewer", run: str = "") -> str:
    """Opens a session and returns its key."""
    made, body = await ask(served, "POST", f"{run}/swarm/v1/sessions", token, role=role)
    assert made == 200, body
    given, view = await ask(served, "POST", EXCHANGE, code=body["code"])
    assert given == 200 and view["role"] == role, view
    key: str = view["key"]
    return key


@pytest.mark.anyio
async def test_a_code_opens_one_session_within_a_minute(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served:
        codes = [(await ask(served, "POST", "/swarm/v1/sessions", VIEWER))[1]["code"] for _ in range(2)]
        assert (await ask(served, "POST", EXCHANGE, code=codes[0]))[0] == 200
        served.run.clock.advance(CODE_SECONDS)
        for refused in (codes[0], codes[1], "x"):
            status, body = await ask(served, "POST", EXCHANGE, code=refused)
            assert (status, body["code"]) == (401, "code_invalid") and "agentjet open" in body["detail"]


@pytest.mark.anyio
async def test_a_stranger_sends_no_large_body(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"code": "x"}'

    async with serving(tmp_path / "data") as served:
        served.http.headers["Authorization"] = ""
        large = await served.http.post(EXCHANGE, json={"code": "x" * 5000})
        unknown = await served.http.post(EXCHANGE, content=pieces())
        assert (large.status_code, unknown.status_code) == (413, 413)
        assert "send at most 4096 bytes" in large.json()["detail"]


@pytest.mark.anyio
async def test_a_session_ends(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served:
        key = await session(served, VIEWER)
        assert (await ask(served, "GET", "/swarm/v1/status", key))[0] == 200
        served.run.clock.advance(SESSION_SECONDS)
        status, body = await ask(served, "GET", "/swarm/v1/status", key)
        assert (status, body["code"]) == (401, "session_expired") and "agentjet open" in body["detail"]


def test_a_session_ends_with_the_secret_of_the_keys(tmp_path: Path) -> None:
    keys = Keys.open(tmp_path)
    key, _ = keys.sign_session("client")
    replace_secret(tmp_path / SECRET_FILES["client"])
    assert keys.control(key, "client") == "client"
    replace_secret(tmp_path / SECRET_FILES["keys"])
    with pytest.raises(Unauthorized) as refused:
        keys.control(key)
    assert refused.value.code == "session_invalid"


@pytest.mark.anyio
async def test_a_session_may_at_most_what_its_token_may(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served:
        for token, role in ((VIEWER, "client"), (VIEWER, "admin"), (TOKEN, "admin")):
            status, body = await ask(served, "POST", "/swarm/v1/sessions", token, role=role)
            assert (status, body["code"]) == (403, f"{role}_token_needed")
        viewer, client, admin = [await session(served, ADMIN, role) for role in ("viewer", "client", "admin")]
        assert (await ask(served, "POST", "/swarm/v1/episodes", viewer, task_id="t"))[0] == 403
        assert (await ask(served, "POST", "/swarm/v1/episodes", client, task_id="t"))[0] == 200
        job = (await ask(served, "GET", "/swarm/v1/job", viewer))[1]
        assert (await ask(served, "PUT", "/swarm/v1/job", client, **job))[0] == 403
        assert (await ask(served, "PUT", "/swarm/v1/job", admin, **job))[0] == 200
        status, body = await ask(served, "POST", "/swarm/v1/sessions", admin)
        assert (status, body["code"]) == (403, "token_needed")
        status, body = await ask(served, "POST", "/v1/chat/completions", client, messages=[])
        assert status == 403 and "episode" in str(body)
        assert (await ask(served, "POST", "/swarm/v1/sessions", viewer[:-1]))[0] == 401


@pytest.mark.anyio
async def test_a_session_of_a_run_opens_that_run_only(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served:
        await ask(served, "PUT", "/swarm/v1/runs/other", ADMIN, job={})
        folder = served.run.folder.parent.parent / "runs" / "other"
        key = await session(served, (folder / "viewer-token").read_text().strip(), run="/runs/other")
        assert (await ask(served, "GET", "/runs/other/swarm/v1/status", key))[0] == 200
        status, body = await ask(served, "GET", "/swarm/v1/status", key)
        assert (status, body["code"]) == (403, "not_your_run")
        admin = await session(served, ADMIN, "admin")
        assert (await ask(served, "GET", "/runs/other/swarm/v1/status", admin))[0] == 200
        viewer = await session(served, ADMIN)
        assert (await ask(served, "GET", "/runs/other/swarm/v1/status", viewer))[0] == 403


def test_codes_are_bounded() -> None:
    codes = SessionCodes(Clock())
    first, *_, last = [codes.create("default", "viewer") for _ in range(MAX_CODES + 1)]
    assert codes.redeem(last) == ("default", "viewer")
    with pytest.raises(Unauthorized):
        codes.redeem(first)


@pytest.mark.parametrize("own", [("default", "admin"), ("default", "client"), ("other", "viewer")])
def test_codes_of_one_role_push_out_no_others(own: tuple[str, Bearer]) -> None:
    codes = SessionCodes(Clock())
    code = codes.create(*own)
    for _ in range(MAX_CODES + 1):
        codes.create("default", "viewer")
    assert codes.redeem(code) == own


@pytest.mark.anyio
async def test_the_page_and_its_headers(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served:
        page = await served.http.get("/", headers={"Authorization": ""})
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        names = re.findall(r'(?:href|src)="(ui/[^"]+)"', page.text)
        assert {Path(name).name for name in names} >= {"app.js", "ui.js", "overview.js", "style.css"}
        for name in names:
            file = await served.http.get(f"/{name}", headers={"Authorization": ""})
            assert file.status_code == 200 and "immutable" in file.headers["cache-control"], name
            assert "default-src 'self'" in file.headers["content-security-policy"]
            assert "require-trusted-types-for 'script'" in file.headers["content-security-policy"]
        again = await served.http.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304
        for path in ("/ui/0000/app.js", "/".join(["", *names[0].split("/")[:2], "nothing.js"]), "/ui/x/../../auth.py"):
            assert (await served.http.get(path)).status_code == 404
