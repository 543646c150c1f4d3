"""`examples/cluster/one_machine.toml` with its three fronts: a real server, a tiny model, fake replicas, real agents.

1. Every dialect, plain and streamed, with the key in the header and in the path, is answered by the episode's front.
2. Another front and the server's own port refuse the episode, with the right URL. A further run has the same fronts.
3. A front that is killed during a call is replaced, and the SDK's repeated call is answered and recorded once.
4. With one front, and with none, the same data dir opens: earlier calls are read, and live episodes go on.
5. `nginx.conf` serves the server and its fronts at one address with TLS.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI

from agentjet.client import Swarm
from agentjet.fronts.supervision import COMMAND
from agentjet.server.read import RunReader
from bench.machine import free_port
from bench.scaling.faults import make_sampler_python
from tests.e2e.server import PATIENCE, ROOT, Server
from tests.needs import need
from tests.server.speaking import SPEECHES, Speech
from tests.server.test_tls import make_certificate
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]

EXAMPLE = ROOT / "examples" / "cluster"
FRONTS = 3
SETTINGS: dict[str, Any] = {"compute__ranks": 1, "compute__samplers": 1, "job__max_tokens": 100}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, a data dir, and the interpreter of replicas."""
    folder = tmp_path_factory.mktemp("fronts")
    return make_model(folder / "tiny"), folder / "run", make_sampler_python(folder)


@contextmanager
def serving(world: tuple[Path, Path, Path], **settings: Any) -> Iterator[Server]:
    model, data_dir, python = world
    options = ["--config", str(EXAMPLE / "one_machine.toml")]
    if port := settings.pop("server__port", 0):
        options += ["--port", str(port)]
    with Server(model, data_dir, *options, **SETTINGS, compute__sampler_python=python, **settings) as server:
        yield server
        assert server.interrupt() == 0


def request(url: str, key: str, speech: Speech = SPEECHES[0], **keys: Any) -> httpx.Response:
    """One request of a dialect. `url` is a base URL with or without its `/v1`."""
    body = speech.body(**{speech.length: 16, **keys})
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url.removesuffix("/v1") + speech.path, json=body, headers=headers, timeout=PATIENCE)


def front_of(server: Server, episode: dict[str, Any]) -> int:
    """The number of an episode's front, by the URL that another process answers with."""
    said = re.search(r"belongs to front (\d)", request(server.url, episode["api_key"]).text)
    assert said is not None
    return int(said[1])


def url_of(server: Server, episode: dict[str, Any]) -> str:
    """The present base URL of an episode, from the refusal of the server's own port."""
    found = re.search(r"its own base URL, (\S+/v1)\.", request(server.url, episode["api_key"]).text)
    assert found is not None
    return found[1]


def calls(server: Server, episode: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get(f"/episodes/{episode['episode_id']}")["calls"]
    return found


def pid_at(url: str) -> int:
    """The process of the front that listens at a URL."""
    port = httpx.URL(url).port
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == list(COMMAND) and any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in process.net_connections()
        ):
            return int(process.pid)
    raise AssertionError(f"no front listens at {url}")


def test_fronts(world: tuple[Path, Path, Path]) -> None:
    with serving(world) as server:
        server.until(lambda: [one["ready"] for one in server.get("/status")["fronts"]] == [True] * FRONTS)
        spoken, live = every_dialect(server), server.begin(mode="eval")  # Others become stale.
        assert request(live["base_url"], live["api_key"]).status_code == 200
        wrong_addresses(server, live)
        another_run(server)
        killed = kill_during_a_call(server)
        server.batch()
        num_live = len(calls(server, live))
    with serving(world, server__fronts=1) as server:
        assert len(calls(server, spoken)) == 3 * len(SPEECHES) and len(calls(server, killed)) == 1
        assert request(url_of(server, live), live["api_key"]).status_code == 200
        assert len(calls(server, live)) == num_live + 1
        server.batch()
    with serving(world, server__fronts=0) as server:
        assert server.get("/status")["fronts"] == [] and len(calls(server, spoken)) == 3 * len(SPEECHES)
        assert request(server.url, live["api_key"]).status_code == 200
        assert len(calls(server, live)) == num_live + 2
        server.post(f"/episodes/{live['episode_id']}/finish", reward=1)
        server.batch()
    reader = RunReader.at(world[1] / "runs" / "default")
    read = json.loads(asyncio.run(reader.episode(live["episode_id"])))
    assert len(read["calls"]) == num_live + 2, "as `agentjet look` reads them"


def every_dialect(server: Server) -> dict[str, Any]:
    episode = server.begin(mode="eval")
    url, key = episode["base_url"], episode["api_key"]
    for speech in SPEECHES:
        assert request(url, key, speech).status_code == 200, speech
        assert request(f"{url.removesuffix('/v1')}/k/{key}/v1", "", speech).status_code == 200, speech
        streamed = request(url, key, speech, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream") and streamed.text.count("data:") > 1
    assert httpx.head(url.removesuffix("v1")).status_code == 200, "some agents ask so first"
    listed = httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"}).json()
    assert episode["model"] in [model["id"] for model in listed["data"]]
    server.post(f"/episodes/{episode['episode_id']}/finish", reward=1)
    assert len(calls(server, episode)) == 3 * len(SPEECHES)
    return episode


def wrong_addresses(server: Server, episode: dict[str, Any]) -> None:
    own, key = front_of(server, episode), episode["api_key"]
    others = {server.begin(task_id=f"other {i}", mode="eval")["base_url"] for i in range(12)} - {episode["base_url"]}
    assert others, "the episodes have several fronts"
    for url in (*others, server.url):
        answer = request(url, key)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "other_front"
        assert f"belongs to front {own}" in answer.text and episode["base_url"].removesuffix("/v1") in answer.text
    for url in (server.url, episode["base_url"].removesuffix("/v1")):
        answer = request(f"{url}/f7/v1", key)
        assert answer.status_code == 403 and "There is no front 7: the server has fronts 0 to" in answer.text
    assert request(f"{episode['base_url'].removesuffix('/v1')}/f{own}/v1", key).status_code == 200
    assert request(f"{server.url}/f{own}/v1", key).status_code == 403


def another_run(server: Server) -> None:
    with Swarm(server.url, (server.data_dir / "admin-token").read_text().strip()) as swarm:
        swarm.start_run("other")
        token = (server.data_dir / "runs" / "other" / "token").read_text().strip()
        url = f"{server.url}/runs/other/swarm/v1"
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE) as http:
            server.until(lambda: http.get("/status").json()["state"] == "sampling")
            episode = http.post("/episodes", json={"task_id": "t", "mode": "eval"}).raise_for_status().json()
            assert episode["base_url"].endswith("/runs/other/v1")
            key = episode["api_key"]
            assert request(episode["base_url"], key).status_code == 200
            assert request(episode["base_url"].replace("/runs/other", ""), key).status_code in (401, 403)
            assert len(http.get(f"/episodes/{episode['episode_id']}").json()["calls"]) == 1
        swarm.end_run("other")


def kill_during_a_call(server: Server) -> dict[str, Any]:
    episode = server.begin(mode="eval", task_id="killed")
    front, answers = front_of(server, episode), list[Any]()
    hello: list[Any] = [{"role": "user", "content": "hello"}]

    def ask() -> None:
        with OpenAI(base_url=episode["base_url"], api_key=episode["api_key"], max_retries=10) as agent:
            answers.append(agent.chat.completions.create(model="policy", messages=hello))

    asking = threading.Thread(target=ask)
    asking.start()
    server.until(lambda: server.get("/status")["fronts"][front]["calls"] == 1)
    os.kill(pid_at(episode["base_url"]), signal.SIGKILL)
    asking.join(PATIENCE)
    assert answers and answers[0].choices[0].message.content
    server.until(lambda: server.get("/status")["fronts"][front]["starts"] == 2)
    server.post(f"/episodes/{episode['episode_id']}/finish", reward=1)
    assert len(calls(server, episode)) == 1
    return episode


def test_behind_nginx(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    need("nginx")
    cert, key = make_certificate(tmp_path / "tls")
    public, port = free_port(), free_port()
    url = f"https://127.0.0.1:{public}"
    settings = {"server__front_url": f"{url}/f{{front}}", "server__port": port}
    with serving(world, **settings) as server, nginx(tmp_path, public, port, cert, key):
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), timeout=PATIENCE) as http:
            server.until(lambda: answers(http, f"{url}/healthz"))
            episode = server.begin(mode="eval")
            assert re.fullmatch(rf"{url}/f\d/v1", episode["base_url"])
            front = int(episode["base_url"].removesuffix("/v1")[-1])
            http.headers["Authorization"] = f"Bearer {episode['api_key']}"
            body = SPEECHES[0].body(max_tokens=48, stream=True)
            with http.stream("POST", f"{episode['base_url']}/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                arrived = [time.monotonic() for _ in answer.iter_raw()]
            assert len(arrived) > 1, "the answer arrives in pieces"
            for other, said in (((front + 1) % FRONTS, f"belongs to front {front}"), (7, "There is no front 7")):
                wrong = http.post(f"{url}/f{other}/v1/chat/completions", json=body)
                assert wrong.status_code == 403 and said in wrong.text
        assert len(calls(server, episode)) == 1


def answers(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def nginx(folder: Path, public: int, port: int, cert: Path, key: Path) -> Iterator[None]:
    """nginx with the example's file: `public` is its port, and `port` that of the server."""
    text = (EXAMPLE / "nginx.conf").read_text()
    for front in range(FRONTS, -1, -1):
        text = text.replace(f" {8400 + front};", f" {port + front};")
    text = text.replace("listen 443", f"listen 127.0.0.1:{public}").replace("cert.pem", str(cert))
    text = text.replace("key.pem", str(key)).replace("http {", f"http {{ access_log off; {temporary(folder)}")
    path = folder / "nginx.conf"
    path.write_text(f"daemon off; pid {folder}/nginx.pid; error_log stderr;\n{text}")
    process = subprocess.Popen(["nginx", "-p", str(folder), "-e", "stderr", "-c", str(path)])
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def temporary(folder: Path) -> str:
    """Folders of nginx for bodies, which only root may write elsewhere."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
