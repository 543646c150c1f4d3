"""The probe: whether a replica really has the published weights.

After each adoption it scores fixed tokens, and the learner scored them, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentjet.compute.cluster.weights import Publication

FLOAT32_ERROR, MEAN_ERROR_16_BIT = 5e-4, 0.05
"""Largest difference of a probe's log-probability in float32, and the mean one in types of 16 bits."""


def probe_failure(publication: Publication, logprobs: Sequence[float]) -> str:
    """Returns the reason why a replica with these log-probabilities does not have the published weights, or ''."""
    expected = publication.probe_logprobs
    if len(logprobs) != len(expected):
        return f"it scored {len(logprobs)} tokens instead of {len(expected)}"
    error = probe_error(publication, logprobs)
    if publication.dtype == "float32":
        limit, kind = FLOAT32_ERROR, "largest"
    else:
        error = sum(_errors(publication, logprobs)) / max(1, len(expected))
        limit, kind = MEAN_ERROR_16_BIT, "mean"
    return "" if error <= limit else f"the {kind} error of its log-probabilities is {error:.2g} (limit {limit:g})"


def probe_error(publication: Publication, logprobs: Sequence[float]) -> float:
    """Returns the largest difference to the learner's log-probabilities; infinite if only one is finite."""
    return max(_errors(publication, logprobs), default=0.0)


def _errors(publication: Publication, logprobs: Sequence[float]) -> list[float]:
    """Returns the differences; 0 where neither value is finite, because the policy has diverged at both ends."""
    errors = []
    for ours, theirs in zip(logprobs, publication.probe_logprobs, strict=False):
        if math.isfinite(ours) and math.isfinite(theirs):
            errors.append(abs(ours - theirs))
        else:
            errors.append(math.inf if math.isfinite(ours) or math.isfinite(theirs) else 0.0)
    return errors
