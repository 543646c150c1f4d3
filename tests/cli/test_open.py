"""`agentjet open`: an address that opens one session, a browser where there is one, else the command for a tunnel."""

from __future__ import annotations

import re
import webbrowser
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from typer.testing import CliRunner

import agentjet
from agentjet.cli.look import VIEWS, has_browser
from agentjet.cli.main import app
from agentjet.errors import ConfigError, Forbidden
from tests.server.serving import TOKEN, VIEWER, Served


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
