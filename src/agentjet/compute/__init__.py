"""The weights' side: the `Compute` protocol and the backends that fulfil it."""

from agentjet.compute.protocol import Compute

__all__ = ["Compute"]
