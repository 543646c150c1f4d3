"""The weights: the `Compute` protocol and the backends that implement it.

To add a backend:

1. Implement `Compute` (a `Sampler`, a `Learner` and the life of their workers) in a package beside `embedded`, and
   declare its `Capabilities`. `operations.OperationLog` keeps order and repetition of operations.
2. Construct it in `cli.server_process`. Rollback and branches in `cli.checkpoints` read checkpoints of `embedded`.
"""

from agentjet.compute.protocol import Compute

__all__ = ["Compute"]
