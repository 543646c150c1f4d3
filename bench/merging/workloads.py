"""The batches of `bench.merge`, as the rows the server would hand to the learner. Random tokens; the same seed, the
same rows.

A row is one call. Its `sequence` is its episode; the repeats of a task share the task's prompt and nothing else.
Invariant: the token counts are those of the figures in `docs/benchmarks.md`; `tests/bench/test_merge.py` holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentjet.timeline import Row, build_forest, call_row
from agentjet.timeline.forest import IntArray

VOCABULARY = 49_152 * 4 // 30
"""SmolLM2's 49,152 tokens, cut like its layers (4 of 30), so that the head weighs what it weighs in the whole model.

Four layers under the whole vocabulary would spend nearly half a forest's arithmetic in the head, which no layout
changes.
"""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the system and task prompt, and per turn those that are new and those that are sampled."""

    prompt: int
    context: int
    sampled: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the workloads: lengths are divided by `shrink`, which keeps their ratios."""

    vocabulary: int = VOCABULARY
    shrink: int = 1

    def of(self, lengths: Lengths) -> Lengths:
        return Lengths(*(value // self.shrink for value in (lengths.prompt, lengths.context, lengths.sampled)))


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens of each baseline over the distinct tokens-in-context: the speed-up that counting alone would give."""

    calls: float
    timelines: float


def turns(
    lengths: Lengths, num_turns: int, *, repeats: int = 8, tasks: int = 1, vocabulary: int = VOCABULARY, seed: int = 0
) -> list[Row]:
    """Agents that send their whole history back every turn."""
    draw = _Draw(vocabulary, seed)
    rows: list[Row] = []
    for task in range(tasks):
        prompt = draw.tokens(lengths.prompt)
        for repeat in range(repeats):
            history = prompt
            for _ in range(num_turns):
                history = np.concatenate([history, draw.tokens(lengths.context + lengths.sampled)])
                rows.append(draw.row(history, lengths.sampled, task * repeats + repeat))
    return rows


def subagents(
    lengths: Lengths,
    *,
    branches: int = 4,
    levels: int = 3,
    repeats: int = 2,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> list[Row]:
    """An agent whose every answer starts `branches` sub-agents that inherit its context, `levels` deep."""
    draw = _Draw(vocabulary, seed)
    rows: list[Row] = []
    shared = draw.tokens(lengths.prompt)
    for repeat in range(repeats):
        parents = [shared]
        for _ in range(levels):
            parents = [
                np.concatenate([parent, draw.tokens(lengths.context + lengths.sampled)])
                for parent in parents
                for _ in range(branches)
            ]
            rows += [draw.row(tokens, lengths.sampled, repeat) for tokens in parents]
    return rows


def timelines(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows as one group per timeline: an episode's calls that each begin the next, longest last.

    A call that several timelines contain is in the first of them only: every sampled token is trained once.
    """
    found: list[list[Row]] = []
    for sequence in sorted({row["sequence"] for row in rows}):
        own = sorted((row for row in rows if row["sequence"] == sequence), key=lambda row: -len(row.tokens))
        groups: list[list[Row]] = []
        for row in own:
            home = next((group for group in groups if _begins(row, group[-1])), None)
            if home is None:
                groups.append([row])
            else:
                home.insert(0, row)
        found += groups
    return found


def limits(rows: Sequence[Row]) -> Limits:
    """The ratios of token counts alone."""
    distinct = build_forest(rows).num_nodes
    return Limits(
        calls=sum(len(row.tokens) for row in rows) / distinct,
        timelines=sum(len(group[-1].tokens) for group in timelines(rows)) / distinct,
    )


def _begins(row: Row, longer: Row) -> bool:
    return bool(np.array_equal(longer.tokens[: len(row.tokens)], row.tokens))


class _Draw:
    """Random tokens, and rows of them."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocabulary = vocabulary

    def tokens(self, count: int) -> IntArray:
        return self._rng.integers(20, self._vocabulary, count).astype(np.int32)

    def row(self, tokens: IntArray, num_sampled: int, sequence: int) -> Row:
        """Log-probabilities near those of a random model, so that no ratio is clipped away."""
        return call_row(
            tokens=tokens,
            logprobs=np.full(num_sampled, -math.log(self._vocabulary), np.float32),
            versions=np.zeros(num_sampled, np.int32),
            advantage=float(self._rng.choice([-1.0, 1.0]) * self._rng.uniform(0.5, 1.5)),
            temperature=1.0,
            sequence=sequence,
        )


SHORT = Lengths(prompt=120, context=30, sampled=20)
LONG = Lengths(prompt=1000, context=200, sampled=60)
SYNTHETIC: dict[str, Callable[[Shape], list[Row]]] = {
    "turns12": lambda shape: turns(shape.of(SHORT), 12, vocabulary=shape.vocabulary),
    "turns40": lambda shape: turns(shape.of(SHORT), 40, vocabulary=shape.vocabulary),
    "shared_prompt": lambda shape: turns(shape.of(Lengths(1000, 0, 60)), 1, tasks=4, vocabulary=shape.vocabulary),
    "subagents": lambda shape: subagents(shape.of(Lengths(1000, 100, 40)), vocabulary=shape.vocabulary),
    "turns12_long": lambda shape: turns(shape.of(LONG), 12, vocabulary=shape.vocabulary),
    "turns40_long": lambda shape: turns(shape.of(LONG), 40, vocabulary=shape.vocabulary),
}
"""By name. `shared_prompt` has four prompts, so that the optimiser, the same for all, is a small part of a step."""
REAL = "real"
