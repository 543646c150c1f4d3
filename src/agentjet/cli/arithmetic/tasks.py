"""The sums: which are trained on, and which are held out.

The split is by unordered pairs, so a + b and b + a are on the same side, and it is the same for every seed of a run: a
model trained with any seed can be scored on what it never saw.
"""

from __future__ import annotations

import itertools
import random

from agentjet.types import Task

OPERANDS = range(40)
NUM_HELD_OUT = 500
SPLIT_SEED = 1234


def training_tasks() -> list[Task]:
    """Every sum that is not held out, both ways round. `payload` is the pair (a, b)."""
    pairs = _pairs()[NUM_HELD_OUT:]
    return [_task(a, b) for a, b in sorted({*pairs, *((b, a) for a, b in pairs)})]


def held_out_tasks(count: int = NUM_HELD_OUT) -> list[Task]:
    """The first `count` of the held-out sums, each one way round."""
    if not 1 <= count <= NUM_HELD_OUT:
        raise ValueError(f"{count} tasks: between 1 and {NUM_HELD_OUT} are held out")
    ways = random.Random(SPLIT_SEED)
    return [_task(*(pair if ways.random() < 0.5 else pair[::-1])) for pair in _pairs()[:count]]


def _pairs() -> list[tuple[int, int]]:
    """All unordered pairs, shuffled."""
    pairs = list(itertools.combinations_with_replacement(OPERANDS, 2))
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs


def _task(a: int, b: int) -> Task:
    return Task(f"{a}+{b}", task_set="addition", payload=(a, b))
