"""A server with the cluster backend: two real ranks on a tiny model, fake replicas, a real client, and SIGKILL.

Pinned here:
1. it learns; its processes show in the status; Ctrl-C saves a checkpoint and leaves no process behind;
2. a rank that is killed, also while a batch is learned, stops no call: with `max_staleness`, replicas go on sampling,
   and the batch is learned once;
3. a gateway that is killed leaves no process behind; the next one continues at the same version.

`test_cluster_faults.py` has the kills of replicas, and checks every token.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.scaling.faults import make_sampler_python
from tests.e2e.server import Server, is_running
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]

SETTINGS: dict[str, Any] = {
    "compute__backend": "cluster",
    "compute__ranks": 2,
    "compute__samplers": 2,
    "job__max_staleness": 1,
    "job__checkpoint_every": 2,
    "job__max_tokens": 48,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def sampler_python(tmp_path: Path) -> Path:
    """An "interpreter" that runs the fake replica, whatever it is asked to run."""
    return make_sampler_python(tmp_path)


def processes(server: Server, kind: str) -> list[dict[str, Any]]:
    """The processes of a kind whose process id is known."""
    found: list[dict[str, Any]] = server.get("/cluster")["processes"]
    return [{**one, "pid": pid} for one in found if one["kind"] == kind and (pid := pid_of(one))]


def pid_of(process: dict[str, Any]) -> int:
    found = re.search(r"process (\d+)", process["place"])
    return int(found[1]) if found else 0


def kill(process: dict[str, Any]) -> None:
    os.kill(process["pid"], signal.SIGKILL)


def is_learning(status: dict[str, Any], version: int) -> bool:
    """True while the next batch is learned, and afterwards."""
    return status["state"] == "learning" or status["policy_version"] > version


def ended_by_itself(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


def test_a_cluster_learns_and_survives_kills(model: Path, sampler_python: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "compute__sampler_python": sampler_python}
    with Server(model, tmp_path / "run", **settings) as server:
        server.batch()
        server.until(lambda: len(processes(server, "replica")) == 2)
        assert len(processes(server, "rank")) == 2

        # A rank dies while nothing is learned: calls go on during the recovery.
        kill(processes(server, "rank")[1])
        server.until(lambda: server.get("/status")["state"] == "loading")
        episode = server.begin(mode="eval")
        server.ask(episode, "hello")
        assert server.get("/status")["state"] == "loading", "the answer did not wait for the learner"
        server.until(lambda: server.get("/status")["state"] == "sampling")
        server.batch()

        # A rank dies while a batch is learned: it is learned once.
        version = server.get("/status")["policy_version"]
        for member in range(4):
            episode = server.begin(task_id=f"t{member // 2}")
            server.ask(episode, f"hello {member // 2}")
            server.post(f"/episodes/{episode['episode_id']}/finish", reward=member % 2)
        server.until(lambda: is_learning(server.get("/status"), version))
        kill(processes(server, "rank")[0])
        server.until(lambda: server.get("/status")["policy_version"] == version + 1)
        server.batch()

        status = server.get("/status")
        assert status["policy_version"] == 4 and status["workers_started"] >= 3
        assert status["episodes"]["trained"] == 16 and status["episodes"]["dropped"] == 0
        server.until(lambda: '"step": 4' in (server.folder / "metrics.jsonl").read_text())  # After the journal.
        steps = [json.loads(line) for line in (server.folder / "metrics.jsonl").read_text().splitlines()]
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        assert steps[-1]["learner/ranks"] == 2 and steps[-1]["sampler/replicas"] >= 1
        assert {"sampler/overlap", "sampler/idle", "learner/idle", "sampler/publish_seconds"} <= steps[-1].keys()
        pids = [one["pid"] for kind in ("rank", "replica") for one in processes(server, kind)]
        server.kill()
    assert len(pids) >= 3
    server.process.wait()
    with Server(model, tmp_path / "run", **settings) as server:
        assert ended_by_itself(pids)
        assert server.get("/status")["policy_version"] == 4
        server.batch()
        server.until(lambda: len(processes(server, "replica")) == 2)
        pids = [one["pid"] for kind in ("rank", "replica") for one in processes(server, kind)]
        assert server.interrupt() == 0
    assert ended_by_itself(pids)
