"""The weights: the `Compute` protocol and the backends that implement it."""

from agentjet.compute.protocol import Compute

__all__ = ["Compute"]
