"""A server whose ranks and replicas are on a Ray cluster of two raylets: it learns, and survives the death of a node.

1. Ranks and replicas are placed by the conductor, the learner learns, and the status has their places.
2. A raylet is killed with its processes: the learner group is placed again, and the next batch is learned once.
3. The end of the server ends every process. The Ray cluster stays.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.e2e.server import Server
from tests.e2e.test_cluster import SETTINGS, ended_by_itself, model, processes, sampler_python  # noqa: F401
from tests.processes.raylets import LocalCluster

pytestmark = [pytest.mark.needs("ray"), pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]


def test_a_server_on_two_raylets(model: Path, sampler_python: Path, tmp_path: Path) -> None:  # noqa: F811
    cluster = LocalCluster(gpus=0)
    try:
        node = cluster.join(gpus=0)
        settings = {**SETTINGS, "compute__sampler_python": sampler_python, "compute__address": cluster.address}
        with Server(model, tmp_path / "run", **settings) as server:
            server.batch()
            server.until(lambda: len(processes(server, "replica")) == 2)
            assert len(processes(server, "rank")) == 2
            pids = [one["pid"] for kind in ("rank", "replica") for one in processes(server, kind)]
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            on_node = [pid for pid in pids if raylet in psutil.Process(pid).parents()]
            assert len(on_node) == 2, f"two processes on each node\n{server.output}"
            raylet.kill()
            server.until(lambda: ended_by_itself(on_node))
            server.batch()
            assert server.get("/status")["policy_version"] == 2
            server.until(lambda: len(processes(server, "replica")) == 2)
            pids = [one["pid"] for kind in ("rank", "replica") for one in processes(server, kind)]
            assert server.interrupt() == 0
        assert ended_by_itself(pids)
    finally:
        cluster.shutdown()
