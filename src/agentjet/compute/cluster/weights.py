"""Publications: the weights of one version, as replicas fetch them. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Publication:
    """The weights of a policy version, and the probe that a replica must reproduce with them."""

    version: int
    address: str
    """`HOST:PORT` that serves the file, after the handshake of `link.dial`."""
    path: str
    """The safetensors file on the machine of rank 0."""
    num_bytes: int
    digest: str
    """SHA-256 of the file."""
    dtype: str
    """Type of the weights, such as `float32`."""
    probe_tokens: tuple[int, ...]
    probe_logprobs: tuple[float, ...]
    """Log-probability of each probe token except the first, at temperature 1, by the learner."""
