"""A Ray cluster of several raylets on this machine."""

from __future__ import annotations

import os
from typing import Any


class LocalCluster:
    """Raylets of this machine that believe in GPUs."""

    def __init__(self, gpus: int = 1) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's own 15 starves ranks beside other tests.
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": gpus})
        self.address = str(self.cluster.address)

    def join(self, gpus: int = 2) -> Any:
        node = self.cluster.add_node(num_cpus=1, num_gpus=gpus)
        self.cluster.wait_for_nodes()
        return node

    def shutdown(self) -> None:
        self.cluster.shutdown()
