"""Memory that is freed goes back to the system.

glibc keeps it: it takes blocks of up to 32 MB from a heap whose holes stay resident, and those of a learner, of another
size in every batch, add up. Twelve batches of long conversations left 8 GB of holes.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
