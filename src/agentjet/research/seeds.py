"""Seeds, derived from the study so that a re-run draws the same, and so that no confirming seed was ever explored."""

from __future__ import annotations

import hashlib

from agentjet.research.models import Phase, Study, canonical


def seed_of(study: Study, phase: Phase, number: int) -> int:
    """31 bits. Arms share the seeds of a phase: what is random in the tasks is then the same for both sides."""
    name = canonical([study.id, phase, number])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
