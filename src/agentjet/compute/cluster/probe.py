"""The probe: whether a replica really has the published weights.

After each adoption it scores fixed tokens, and the learner scored them, too. In float32 both agree to a few digits. In
16 bits rounding is larger than what one batch changes, so a replica must also not be much nearer to the version before:
an engine may report success and keep old weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentjet.compute.cluster.weights import Publication

FLOAT32_ERROR = 5e-4
"""Largest difference of a probe's log-probability in float32."""
ROUNDING = 2**-6
"""Largest mean difference in 16 bits, as a part of the mean log-probability: four times the rounding of bfloat16.

SmolLM2-135M in bfloat16 has 0.07 at a mean of -14.8: the tokens are drawn from the vocabulary, so they are improbable.
"""
MEAN_ERROR = 0.05
"""Mean difference in 16 bits that is never too large."""
NEARER = 1.5
"""Ratio of the differences to the published version and to the one before at which a replica has the one before. On
SmolLM2-135M it was at most 1 with the new weights, and 1.6 or more with old ones that differ by 1 % (one deviation).
"""
WAY_OUT = (
    "If the replicas compute this model otherwise than the learner, set model.dtype = 'float32', with a new "
    "server.data_dir, or compute.backend = 'embedded'"
)


def probe_failure(publication: Publication, logprobs: Sequence[float], before: Publication | None = None) -> str:
    """Returns the reason why a replica with these log-probabilities does not have the published weights, or ''.

    `before` is the publication that it had.
    """
    expected = publication.probe_logprobs
    if len(logprobs) != len(expected):
        return f"it scored {len(logprobs)} tokens instead of {len(expected)}"
    if publication.dtype == "float32":
        error, limit, kind = probe_error(publication, logprobs), FLOAT32_ERROR, "largest"
    else:
        error, kind = _mean_error(publication, logprobs), "mean"
        limit = max(MEAN_ERROR, ROUNDING * _mean([abs(value) for value in expected if math.isfinite(value)]))
    if error > limit:
        return f"the {kind} error of its log-probabilities is {error:.2g} (limit {limit:.2g})"
    if before is not None and kind == "mean" and error > max(MEAN_ERROR, NEARER * _mean_error(before, logprobs)):
        return f"its log-probabilities are nearer to those of version {before.version}"
    return ""


def probe_error(publication: Publication, logprobs: Sequence[float]) -> float:
    """Returns the largest difference to the learner's log-probabilities; infinite if only one is finite."""
    return max(_errors(publication, logprobs), default=0.0)


def _mean_error(publication: Publication, logprobs: Sequence[float]) -> float:
    return _mean(_errors(publication, logprobs))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _errors(publication: Publication, logprobs: Sequence[float]) -> list[float]:
    """Returns the differences; 0 where neither value is finite, because the policy has diverged at both ends."""
    errors = []
    for ours, theirs in zip(logprobs, publication.probe_logprobs, strict=False):
        if math.isfinite(ours) and math.isfinite(theirs):
            errors.append(abs(ours - theirs))
        else:
            errors.append(math.inf if math.isfinite(ours) or math.isfinite(theirs) else 0.0)
    return errors
