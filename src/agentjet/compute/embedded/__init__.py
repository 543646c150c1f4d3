"""The default backend: one worker process, one device, sampler and learner on the same weights.

Only `backend` runs in the gateway's process. All modules that import torch run in the worker.
"""

from agentjet.compute.embedded.backend import EmbeddedCompute

__all__ = ["EmbeddedCompute"]
