"""The weights: the `Compute` protocol and the backends that implement it.

* The server's process: `backend` hosts each policy with its `ranks` and its `samplers`, which keep a `fleet`.
* The process of a rank: `rank`, which learns (`learner`, `passes`), perhaps in a `group`, and may sample (`sampler`,
  `cache`). A new kind of attention is a plan in `attention`.
* The process of a replica: `vllm/`.

To add a backend, implement `Compute`, and construct it in `cli.server_process`.
"""

from agentjet.compute.protocol import Compute

__all__ = ["Compute"]
