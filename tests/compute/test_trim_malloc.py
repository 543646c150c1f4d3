"""Freed memory that glibc keeps, because a block above it is in use, returns to the system."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from agentjet.compute.embedded.policy_host import trim_malloc

MB = 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_holes_in_the_heap_are_given_back() -> None:
    blocks = [b"x" * 100_000 for _ in range(1_000)]
    kept = blocks[::10]
    del blocks
    full = resident()
    trim_malloc()
    assert full - resident() > 70 * MB
    assert all(block == b"x" * 100_000 for block in kept)
