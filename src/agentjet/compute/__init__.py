"""The weights: the `Compute` protocol and the backends that implement it.

To add a backend, implement `Compute` in a package beside `embedded`, and construct it in `cli.server_process`.
`operations.OperationLog` keeps order and repetition of operations. `cli.checkpoints` reads checkpoints of `embedded`.
"""

from agentjet.compute.protocol import Compute

__all__ = ["Compute"]
