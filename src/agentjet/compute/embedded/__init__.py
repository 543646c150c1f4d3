"""The default backend: one worker process, one device, sampler and learner on the same weights.

Only `backend` and `frames` run in the gateway's process; everything that imports torch runs in the worker's.
"""

from agentjet.compute.embedded.backend import EmbeddedCompute

__all__ = ["EmbeddedCompute"]
