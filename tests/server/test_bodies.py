"""Request bodies: access is checked before they are read, and their size is limited.

1. Without a key, or with a key for something else, every route answers 401 or 403 without reading the body.
2. A body is counted before it is parsed: too many values, keys or levels are refused with the number.
3. Only the first wrong item of a list is reported.
4. Large requests run in a thread, which calls the event loop for its data.
5. Headers that are too large, too slow or have two hosts are refused. A body after its answer, and a connection above
   the limit, are closed.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentjet.errors import InvalidRequest, TooLarge
from agentjet.front.concurrency import LARGE, from_thread, offload
from agentjet.front.dialects.completions import ChatBody
from agentjet.front.dialects.messages import MessagesBody
from agentjet.front.http import RequestLimits, count_values, parse_body
from agentjet.front.prompts import prepare_prompt
from tests.server.serving import TOKEN, VIEWER, Served, bearer, serving

pytestmark = pytest.mark.anyio


async def answer_without_a_body(app: Any, method: str, path: str, token: str = "") -> tuple[int, dict[str, Any]]:
    """Returns status and body of the answer to a request whose body must not be read."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError(f"{method} {path} asked for its body")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"1000")]
    headers += [(b"authorization", f"Bearer {token}".encode())] if token else []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
    }
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


async def test_no_body_is_asked_for_without_a_key(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", server={"episode_may_finish": False}) as served:
        key = (await served.begin())["api_key"]
        asked = [
            (method.upper(), path, how)
            for path, ways in served.app.openapi()["paths"].items()
            for method, how in ways.items()
            if "requestBody" in how and not path.endswith("/exchange")  # A code needs no key.
        ]
        assert len(asked) > 15
        for method, path, _ in asked:
            path = path.replace("{key}", "no-key").replace("{episode_id}", "ep000001")
            assert (await answer_without_a_body(served.app, method, path))[0] == 401, path
            tokens = [VIEWER, key] if path.startswith("/swarm/") else [TOKEN]
            if path.endswith("/abort"):
                tokens = [VIEWER]
            if path.endswith("/sessions"):
                tokens = [key]
            if path.startswith("/k/"):
                path = path.replace("no-key", TOKEN)
            for token in tokens:
                assert (await answer_without_a_body(served.app, method, path, token))[0] == 403, (path, token)


async def test_an_agent_cannot_score_itself_where_that_is_forbidden(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", server={"episode_may_finish": False}) as served:
        episode = await served.begin()
        own = f"/swarm/v1/episodes/{episode['episode_id']}"
        headers = {"Authorization": f"Bearer {episode['api_key']}"}
        refused = await served.http.post(f"{own}/finish", json={"reward": 1}, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "not_your_reward")
        assert "server.episode_may_finish" in refused.json()["detail"]
        assert (await served.http.post(f"{own}/heartbeat", headers=headers)).status_code == 200
        assert (await served.http.post(f"{own}/finish", json={"reward": 1})).status_code == 200


JSON = st.recursive(
    st.none() | st.integers() | st.sampled_from(["", ",[{", '"', "\\", '\\"', "\\\\", "€"]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["a", ",", '"\\', "[{"]), inner),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int]:
    """Counts values and containers by walking."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    below = [counted(item) for item in inner]
    return 1 + sum(v for v, _ in below), isinstance(value, dict | list) + sum(c for _, c in below)


@given(value=JSON, ascii_only=st.booleans())
def test_counts_are_those_of_the_value(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    num_values, num_containers = count_values(text, 10_000)
    values, containers = counted(value)
    assert num_containers == containers and values <= num_values <= values + containers


MANY = {
    "empty messages": ('"messages": [' + ",".join(["{}"] * 200_000) + "]", 413, "200002 arrays and objects"),
    "numbers": ('"prompt": [' + ",".join("7" for _ in range(500_000)) + "]", 413, "500003 values"),
    "keys": ('"metadata": {' + ",".join(f'"{i}": "x"' for i in range(20_000)) + "}", 413, "20000 keys"),
    "keys at the top": (",".join(f'"x{i}": 1' for i in range(20_000)), 413, "20001 keys"),
    "levels": ('"metadata": ' + "[" * 300 + "]" * 300, 400, "more than 200 levels"),
    "wrong items": ('"messages": [' + ",".join(["{}"] * 20_000) + "]", 400, "messages.0"),
}


@pytest.mark.parametrize("what", MANY)
async def test_too_many_of_anything_is_told_with_the_number(tmp_path: Path, what: str) -> None:
    body, status, said = MANY[what]
    async with serving(tmp_path / "d") as served:
        headers = {
            "Authorization": f"Bearer {(await served.begin())['api_key']}",
            "Content-Type": "application/json",
        }
        for path in ("/v1/chat/completions", "/v1/messages") if what != "numbers" else ("/v1/completions",):
            answer = await served.http.post(path, content=f'{{"model": "policy", {body}}}', headers=headers)
            assert answer.status_code == status and said in answer.text, answer.text[:500]


def test_millions_of_strings_are_counted_without_splitting_them() -> None:
    text = b'["a"' + b',"a"' * 1_000_000 + b"]"
    tracemalloc.start()
    num_values, _ = count_values(text, 300_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_values > 300_000 and peak < 2 * len(text)


@pytest.mark.parametrize("model", [ChatBody, MessagesBody])
def test_one_wrong_item_is_enough(model: Any) -> None:
    wrong: list[Any] = [{}, *[{"type": "text", "text": 1}] * 1000]
    nested: list[Any] = [{"type": "tool_result", "content": wrong}]
    for content in (wrong, nested) if model is MessagesBody else (wrong,):
        body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}] * 1000}
        with pytest.raises(ValidationError) as refused:
            model.model_validate(body)
        assert refused.value.error_count() < 5


async def test_a_key_with_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        body = b'{"\\ud800": ' + b"[" * 300 + b"]" * 300 + b"}"
        for path in ("/v1/chat/completions", "/v1/messages"):
            headers = {"Authorization": f"Bearer {episode['api_key']}", "Content-Type": "application/json"}
            refused = await served.http.post(path, content=body, headers=headers)
            assert refused.status_code == 400 and "\\ud800 nests its JSON" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([[]], None),
        ([{}], None),
        ({"a": 1}, None),
        ({"tools": [[1]]}, "tools"),
        ({"tools": {"a": 1, "b": 2}}, "tools"),
        ("[" * 40_000 + "]" * 40_000, None),
    ],
)
def test_a_refusal_of_the_whole_body_names_no_field(body: Any, param: str | None) -> None:
    limits = RequestLimits(body_bytes=1, connections=1, depth=1 + isinstance(body, dict), keys=1 - (body == {"a": 1}))
    with pytest.raises((InvalidRequest, TooLarge)) as refused:
        parse_body((body if isinstance(body, str) else json.dumps(body)).encode(), TypeAdapter(Any), limits)
    assert refused.value.param == param
    assert refused.value.message.startswith(param or "the body"), refused.value.message


async def test_large_work_is_done_in_a_thread() -> None:
    here = threading.get_ident()
    assert await offload(LARGE - 1, threading.get_ident) == here
    assert await offload(LARGE, threading.get_ident) != here
    assert await offload(LARGE, from_thread(threading.get_ident)) == here


async def test_bodies_and_prompts_of_large_requests_are_prepared_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: (threads.update({name: threading.get_ident()}), function(*args, **named))[1]

    monkeypatch.setattr("agentjet.front.concurrency.LARGE", 1)
    monkeypatch.setattr("agentjet.front.http.parse_body", noting("body", parse_body))
    monkeypatch.setattr("agentjet.front.calls.prepare_prompt", noting("prompt", prepare_prompt))
    async with serving(tmp_path / "d", job={"max_tokens": 8}) as served:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "response_format": form}
        key = (await served.begin())["api_key"]
        headers = {"Authorization": f"Bearer {key}"}
        await served.http.post("/v1/chat/completions", json=body, headers=headers)
    assert threads.keys() == {"body", "prompt"} and threading.get_ident() not in threads.values()


async def test_a_large_request_knows_the_past(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job={"max_tokens": 8}) as served:
        client = served.openai(await served.begin())
        first = await client.responses.create(model="policy", input="hello")
        large = {"metadata": {f"k{i}": "x" * 500 for i in range(2 * LARGE // 500)}}
        again = await client.responses.create(
            model="policy", input="again", previous_response_id=first.id, extra_body=large
        )
        assert again.output_text == first.output_text


async def exchange(served: Served, sent: bytes, more: bytes = b"") -> bytes:
    """Returns the server's bytes until it closes the connection, while `more` is sent without end."""
    reader, writer = await asyncio.open_connection(*served.listener.getsockname()[:2])
    answer = b""
    try:
        writer.write(sent)
        async with asyncio.timeout(5):
            while True:
                if more:
                    writer.write(more)
                    await writer.drain()
                try:
                    piece = await asyncio.wait_for(reader.read(65536), 0.01)
                except TimeoutError:
                    continue
                if not piece:
                    return answer
                answer += piece
    except ConnectionError:
        return answer
    finally:
        writer.close()


def limit(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    made = RequestLimits(**{"body_bytes": 2**20, "connections": 100, **limits})
    monkeypatch.setattr(RequestLimits, "of", classmethod(lambda cls, server: made))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def test_headers_without_end_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        for line in (b"x: " + b"y" * 70_000, b"x: y\r\n" * 20_000):
            assert b" 431 " in await exchange(served, HEAD + line)
        assert b" 431 " in await exchange(served, b"GET /" + b"y" * 70_000)


async def test_two_hosts_are_none(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        answer = await exchange(
            served, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 400 ") and b"host_not_allowed" in answer


async def test_what_other_clients_send(tmp_path: Path) -> None:
    """Java's client asks for HTTP/2 with its first request, others for a WebSocket, compress, or send nothing."""
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}'
    packed, chunks = gzip.compress(body), b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with serving(tmp_path / "d") as served:
        key = f"Authorization: Bearer {(await served.begin())['api_key']}\r\n".encode()
        h2c = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
        websocket = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        close = b"Connection: close\r\n"
        get = b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n"
        for sent, status, text in (
            (HEAD + h2c + key + b"Content-Length: %d\r\n\r\n" % len(body) + body, 200, b"chat.completion"),
            (HEAD + key + h2c.lower() + b"Content-Length: %d\r\n\r\n" % len(body) + body, 200, b"chat.completion"),
            (HEAD + h2c + key + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, 200, b"chat.completion"),
            (get + key + websocket + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", 405, b"with POST"),
            (HEAD + close + key + b"Content-Length: %d\r\n\r\n" % len(packed) + packed, 400, b"compressed with gzip"),
            (HEAD + close + key + b"\r\n", 400, b"has no body"),
        ):
            answer = await exchange(served, sent)
            assert answer.startswith(b"HTTP/1.1 %d " % status) and text in answer, answer


async def test_silent_and_slow_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, header_seconds=0.05)
    async with serving(tmp_path / "d") as served:
        assert await exchange(served, b"") == b""
        assert await exchange(served, HEAD) == b""
        assert await exchange(served, HEAD, more=b"x: y\r\n") == b""
        healthy = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await exchange(served, healthy + HEAD)).count(b"alive") == 1


async def test_a_server_that_is_late_itself_reads_a_body_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn of the event loop takes long, and a body of many reads as many turns."""
    monkeypatch.setattr("agentjet.front.http.MIN_BODY_RATE", 2**40)
    limit(monkeypatch, header_seconds=0.05)
    async with serving(tmp_path / "d") as served:
        key, loop, is_busy = (await served.begin())["api_key"], asyncio.get_running_loop(), True

        def be_busy() -> None:
            time.sleep(0.04)
            if is_busy:
                loop.call_soon(be_busy)

        def ask() -> httpx.Response:
            content = (
                '{"model": "policy", "messages": [{"role": "user", "content": "hello"}]' + " " * (2**20 - 100) + "}"
            )
            headers = {**bearer(key), "Content-Type": "application/json"}
            return httpx.post(f"{served.url}/v1/chat/completions", content=content, headers=headers, timeout=60)

        be_busy()
        answer = await asyncio.to_thread(ask)
        is_busy = False
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("key", [True, False])
async def test_a_body_behind_its_answer_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bool) -> None:
    limit(monkeypatch, linger_seconds=0.1)
    async with serving(tmp_path / "d") as served:
        bearer = f"Authorization: Bearer {(await served.begin())['api_key']}\r\n".encode() if key else b""
        head = HEAD + bearer + b"Transfer-Encoding: chunked\r\n\r\n"
        answer = await exchange(served, head, more=b"10000\r\n" + b" " * 2**16 + b"\r\n")
        assert re.match(rb"HTTP/1.1 413 " if key else rb"HTTP/1.1 401 ", answer)
        answer = await exchange(served, head + b"1\r\n \r\n0\r\n", more=b"trailer: " + b"x" * 2**16)
        assert answer.count(b"HTTP/1.1") <= 1


async def test_one_connection_too_many_is_closed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, connections=2)
    async with serving(tmp_path / "d") as served:
        silent = [await asyncio.open_connection(*served.listener.getsockname()[:2]) for _ in range(2)]
        await served.run.until(lambda: True)
        assert await exchange(served, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        for _, writer in silent:
            writer.close()


async def test_a_body_that_says_its_size_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", server={"max_body_mb": 1}) as served:
        bearer = f"Authorization: Bearer {(await served.begin())['api_key']}\r\n".encode()
        reader, writer = await asyncio.open_connection(*served.listener.getsockname()[:2])
        writer.write(HEAD + bearer + b"Content-Length: 2000000\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
