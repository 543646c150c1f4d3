"""The server's log.

1. A record names its episode or batch without help of the logging code.
2. No line contains a key or a token: not in message, arguments or traceback.
3. The file, and every rotated one, is readable by the owner only.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from agentjet.errors import WorkerDied, redact
from agentjet.server.monitoring import LogFile, batch_context, configure_handler
from tests.server.serving import TOKEN, Keys, serving


@contextmanager
def written() -> Iterator[io.StringIO]:
    """Returns the formatted records of the root logger."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    configure_handler(handler, "%(levelname)s: %(message)s")
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@pytest.mark.anyio
async def test_records_say_what_they_are_about(tmp_path: Path) -> None:
    with written() as stream:
        async with serving(tmp_path / "d") as served:
            served.run.compute.fail_learn = [WorkerDied("out of memory")]
            await served.run.batch()
            begun = await served.begin(mode="eval")
            served.run.gateway.heartbeat = None  # type: ignore[assignment, method-assign]
            own = f"/swarm/v1/episodes/{begun['episode_id']}"
            assert (await served.http.post(f"{own}/heartbeat")).status_code == 500
    found = stream.getvalue().splitlines()
    assert [line for line in found if line.endswith(" batch_id=0")]
    assert len({line.split()[2] for line in found if "finished" in line}) == 4, "each names its episode"
    [broken] = [line for line in found if line.startswith("ERROR: ") and "Exception in ASGI" in line]
    assert f"episode_id={begun['episode_id']}" in broken


def test_a_batch_at_hand_is_named() -> None:
    with written() as stream, batch_context(7):
        logging.getLogger("some.library").warning("careful")
    logging.getLogger("some.library").warning("nobody writes this")
    assert stream.getvalue().splitlines() == ["WARNING: careful batch_id=7"]


def test_secrets_are_in_no_line() -> None:
    key = Keys({"client": TOKEN, "admin": "a" * 20}).sign("ep000001", 1e9)
    with written() as stream:
        log = logging.getLogger("agentjet.test")
        log.error("GET /k/%s/v1/models failed", key)
        log.error("asked with %r", {"Authorization": f"Bearer {TOKEN}", "x": key})
        try:
            raise ValueError(f"wrong key {key}")
        except ValueError:
            log.exception("it broke")
    assert stream.getvalue().count("…") >= 4
    signature = key.rpartition(".")[2]
    for secret in (key, signature, TOKEN):
        assert secret not in stream.getvalue()


@pytest.mark.parametrize(
    "text", ["a bearer of news", "/kit/x", "ajk", "https://host/v1/models", "bearer", "episode ep000001 finished"]
)
def test_the_rest_is_left_alone(text: str) -> None:
    assert redact(text) == text


def test_a_password_in_a_url_is_left_out() -> None:
    assert redact("GET http://me:key@host/v1?mail=a@b") == "GET http://…@host/v1?mail=a@b"


@pytest.mark.anyio
async def test_no_secret_in_what_a_server_logs_and_tells(tmp_path: Path) -> None:
    """Through every route that receives a secret, including failing ones."""
    with written() as stream:
        async with serving(tmp_path / "d") as served:
            begun = await served.begin()
            key = begun["api_key"]
            await served.http.get(f"/k/{key}/v1/models")
            lost = await served.http.get(f"/k/{key}/v1/nowhere")
            wrong = await served.http.post(f"/k/{key}/v2")
            served.run.gateway.calls.answer = None  # type: ignore[method-assign, assignment]
            body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
            broken = await served.http.post(f"/k/{key}/v1/chat/completions", json=body)
            assert (lost.status_code, wrong.status_code, broken.status_code) == (404, 404, 500)
            told = [(await served.http.get(f"/swarm/v1/{path}")).text for path in ("status", "episodes", "job")]
    assert "Traceback" in stream.getvalue()
    for text in (stream.getvalue(), lost.text, wrong.text, broken.text, *told):
        assert key not in text and key.rpartition(".")[2] not in text and TOKEN not in text


def test_the_files_are_their_owners_alone(tmp_path: Path) -> None:
    with closing(LogFile(tmp_path / "server.log", maxBytes=40, backupCount=2)) as file:
        for number in range(4):
            file.emit(logging.makeLogRecord({"msg": f"record {number} of thirty characters"}))
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(["server.log", "server.log.1", "server.log.2"], 0o600)
