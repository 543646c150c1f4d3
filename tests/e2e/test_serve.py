"""`agentjet serve` from the outside: real processes, a real (tiny) model, OpenAI's SDK, signals.

Pinned here:
1. it prints its address, where its tokens are and what to type next; it answers and learns; its files are its owner's;
2. Ctrl-C saves a checkpoint and leaves no process behind; the same command resumes at that version;
3. killed outright, it replays the journal to the same weights, bit by bit, also with the recipe of a plug-in, and a
   live episode goes on with its key;
4. (thorough) a worker that is killed is replaced, and the agents notice nothing;
5. an agent that does not read its answer delays no stop, and what it was not handed is marked in the journal;
6. what cannot work is refused before the model is loaded, in a sentence that names the setting: a taken port, a data
   dir in use or of another model (`tests/config` has the settings).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from agentjet import Swarm
from tests.e2e.server import Server, are_equal, environment, is_running, serve_command
from tests.tiny import make_model, make_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PLUGIN = Path(__file__).parents[1] / "plugins" / "median_grpo.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def install(folder: Path) -> Path:
    """A recipe of another package, installed as a wheel would be: its module, and the entry point of its name."""
    assert len(PLUGIN.read_text().splitlines()) <= 40
    information = folder / "median_grpo-1.0.dist-info"
    information.mkdir(parents=True)
    shutil.copy(PLUGIN, folder)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: median-grpo\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[agentjet.recipes]\nmedian_grpo = median_grpo:MedianGrpo\n")
    return folder


def test_learned_stopped_resumed_killed_and_resumed(model: Path, tmp_path: Path) -> None:
    """With an adapter and the recipe of a plug-in."""
    data_dir, site = tmp_path / "run", install(tmp_path / "site")
    data_dir.mkdir(0o755)
    settings = {"job__recipe": "median_grpo", "job__recipe__scale": 0.5, "model__lora__rank": 4}
    with Server(model, data_dir, paths=[site], **settings) as server:
        assert str(data_dir / "token") in server.output
        kept = [data_dir / "token", server.folder / "journal.sqlite", *(data_dir / "logs").iterdir()]
        assert {path.name for path in kept} >= {"server.log", "worker.log"}
        assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
        assert server.get("/job")["job"]["recipe"]["scale"] == 0.5
        episode = server.begin(mode="eval")
        plain = server.ask(episode, "hello", temperature=0, logprobs=True)
        assert plain.usage.completion_tokens == len(plain.choices[0].logprobs.content) > 0
        with server.agent(episode) as client:
            stream = client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hello"}], temperature=0, stream=True
            )
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert streamed == plain.choices[0].message.content
        server.batch()
        assert "in use by another server" in refused(model, data_dir)
        [worker] = server.workers()
        assert server.interrupt() == 0
        assert not is_running(worker)
        assert "Checkpoint of policy version 1" in server.output
    folder = server.folder / "checkpoints" / "step_000001"
    assert (folder / "policy").is_dir() and (folder / "state.json").exists()
    other = make_tokenizer(tmp_path / "other")
    shutil.copy(model / "config.json", other)
    said = refused(other, data_dir)
    assert str(data_dir) in said and str(model) in said and str(other) in said

    with Server(model, data_dir, paths=[site], **settings) as server:
        assert server.get("/status")["policy_version"] == 1
        first = server.exported()
        server.batch()
        server.until(lambda: '"step": 2' in (server.folder / "metrics.jsonl").read_text())  # written after the journal
        before = server.exported()
        assert not are_equal(before, first) and not are_equal(first, load_file(model / "model.safetensors"))
        episode = server.begin()
        answer = server.ask(episode, "hello")
        [worker] = server.workers()
        server.kill()

    with Server(model, data_dir, paths=[site], **settings) as server:
        assert not is_running(worker), "the worker ended with its gateway"
        assert server.get("/status")["policy_version"] == 2
        assert are_equal(server.exported(), before)
        goes_on(server, episode, answer)


def goes_on(server: Server, episode: dict[str, Any], first: Any) -> None:
    """Check that an episode of an earlier server goes on: the port is another one, the key is the same."""
    history: list[Any] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and now?"},
    ]
    with server.agent({**episode, "base_url": server.url + "/v1"}) as client:
        second = client.chat.completions.create(model="policy", messages=history)
    # Of its first answer not a token is read again differently.
    grown = second.usage.prompt_tokens - first.usage.prompt_tokens - first.usage.completion_tokens
    assert 0 < grown < 30
    assert server.post(f"/episodes/{episode['episode_id']}/finish", reward=1)["num_calls"] == 2


@pytest.mark.thorough
def test_all_weights_are_replayed_from_the_journal_alone(model: Path, tmp_path: Path) -> None:
    """Each batch with the optimiser of its time."""
    with Server(model, tmp_path / "run") as server:
        server.batch()
        with Swarm(server.url, (tmp_path / "run" / "admin-token").read_text().strip()) as swarm:
            swarm.change_job({"optimizer.name": "muon"})
        server.batch()
        assert "job.optimizer.name is 'muon' instead of 'adamw'" in (tmp_path / "run/logs/worker.log").read_text()
        before = server.exported()
        server.kill()
    with Server(model, tmp_path / "run") as server:
        assert server.get("/status")["policy_version"] == 2
        assert are_equal(server.exported(), before)


@pytest.mark.thorough
def test_a_worker_that_is_killed_is_replaced(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path / "run") as server:
        server.batch()
        episode = server.begin(mode="eval")
        [worker] = server.workers()
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(server.ask(episode, "hello", max_tokens=500, n=8)))
        asking.start()
        server.until(lambda: server.get("/status")["calls_active"] == 1)
        os.kill(worker, signal.SIGKILL)
        asking.join(60)
        assert answers and answers[0].system_fingerprint == "policy-1"
        assert server.workers() != [worker]
        assert server.get("/status")["policy_version"] == 1
        server.batch()


def refused(model: Path | str, data_dir: Path, *options: str, **settings: Any) -> str:
    """What a server that cannot begin says before it ends with exit code 2."""
    done = subprocess.run(
        serve_command(model, data_dir, *options, **settings), capture_output=True, env=environment(), timeout=120
    )
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 2, said
    assert "Traceback" not in said
    return said


@pytest.mark.thorough
def test_a_stalled_reader_delays_no_stop(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path / "run", sampler__cache_tokens=16384) as server, socket.socket() as reader:
        episode = server.begin()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # Keeps the server's buffer small, too.
        reader.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "logprobs": True}
        body = json.dumps({**asked, "stream": True, "n": 8, "max_tokens": 500}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {episode['api_key']}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader.sendall(head.encode() + body)
        server.until(lambda: len(server.get(f"/episodes/{episode['episode_id']}")["calls"]) == 8)
        assert server.get("/status")["calls_active"] == 1
        assert server.interrupt() == 0
        assert "Traceback" not in server.output and "timeout graceful shutdown exceeded" not in server.output
    with closing(sqlite3.connect(server.folder / "journal.sqlite")) as journal:
        assert journal.execute("SELECT count(*) FROM calls WHERE undelivered").fetchone() == (8,)


def test_a_port_in_use(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(model, tmp_path / "run", "--port", str(port))
    assert f"server.port = {port}" in said and "--port 0" in said


@pytest.mark.thorough
def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    said = refused(tmp_path / "nowhere", tmp_path / "run")
    assert said.count("model.name") == 1 and "nowhere" in said
