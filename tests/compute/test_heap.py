"""Freed memory is kept for the next batch, and returns to the system once gaps add up or others may need it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentjet.compute import rank
from agentjet.compute.rank import Heap


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_holes_in_the_heap_are_given_back() -> None:
    heap = Heap()
    heap.settle()
    blocks = [b"x" * 100_000 for _ in range(1 + resident() * 2 // 100_000)]
    kept = blocks[::10]
    del blocks
    full = resident()
    heap.settle()
    assert full - resident() > 0.4 * full
    assert all(block == b"x" * 100_000 for block in kept)


def test_what_is_kept_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SimpleNamespace(rss=100, available=1000)
    process = SimpleNamespace(memory_info=lambda: sizes)
    monkeypatch.setattr(rank, "psutil", SimpleNamespace(Process=lambda: process, virtual_memory=lambda: sizes))
    trimmed = []
    heap = Heap()
    monkeypatch.setattr(heap, "trim", lambda: trimmed.append((sizes.rss, sizes.available)))
    for sizes.rss, sizes.available in [(100, 1000), (120, 1000), (126, 1000), (90, 1000), (100, 199)]:
        heap.settle()
    assert trimmed == [(126, 1000), (100, 199)]
