"""The batches of `bench.merge`, and one batch in three layouts: by the embedded learner's own code.

The batches are the rows the server would hand to the learner, of random tokens; the same seed, the same rows. A row is
one call. Its `sequence` is its episode; the repeats of a task share the task's prompt and nothing else.

The two baselines are as good as rows can be. They share the learner's code, its head (which multiplies out the
vocabulary at sampled positions only), its packing budget and its optimiser with the forest. They differ in the
computed tokens: whole rows, flat and without padding, the longest first. Every group of equal lengths is one causal
attention call without a mask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentjet.compute.attention import LayerCall, flat_forward
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.passes import Pass
from agentjet.compute.policy import Policy
from agentjet.config import JobConfig, ModelConfig
from agentjet.timeline import Forest, Row, build_forest, call_row
from agentjet.timeline.forest import IntArray, select
from bench.machine import forget_peak, memory_mb, require_fast_path
from tests.compute.direct import learn_directly

# ---- the batches -----------------------------------------------------------------------------------------------------

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

    def shrunk(self, times: int) -> Lengths:
        """Lengths with the same ratios."""
        return Lengths(self.prompt // times, self.context // times, self.sampled // times)


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


def limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Tokens of rows per call and per timeline over the distinct tokens-in-context: the speed-up of counting alone."""
    distinct = build_forest(rows).num_nodes
    longest = sum(len(group[-1].tokens) for group in timelines(rows))
    return sum(len(row.tokens) for row in rows) / distinct, longest / distinct


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
WORKLOADS: dict[str, Callable[[int, int], list[Row]]] = {
    "turns12": lambda vocabulary, shrink: turns(SHORT.shrunk(shrink), 12, vocabulary=vocabulary),
    "turns40": lambda vocabulary, shrink: turns(SHORT.shrunk(shrink), 40, vocabulary=vocabulary),
    "shared_prompt": lambda vocabulary, shrink: turns(
        Lengths(1000, 0, 60).shrunk(shrink), 1, tasks=4, vocabulary=vocabulary
    ),
    "subagents": lambda vocabulary, shrink: subagents(Lengths(1000, 100, 40).shrunk(shrink), vocabulary=vocabulary),
    "turns12_long": lambda vocabulary, shrink: turns(LONG.shrunk(shrink), 12, vocabulary=vocabulary),
    "turns40_long": lambda vocabulary, shrink: turns(LONG.shrunk(shrink), 40, vocabulary=vocabulary),
    "turns8_large": lambda vocabulary, shrink: turns(
        Lengths(500, 200, 150).shrunk(shrink), 8, tasks=2, vocabulary=vocabulary
    ),
    "turns20_large": lambda vocabulary, shrink: turns(
        Lengths(1000, 300, 100).shrunk(shrink), 20, vocabulary=vocabulary
    ),
    "shared_prompt_large": lambda vocabulary, shrink: turns(
        Lengths(1500, 20, 300).shrunk(shrink), 1, tasks=4, vocabulary=vocabulary
    ),
}
"""By name, of a vocabulary and a divisor of all lengths. `shared_prompt` has four prompts, so that the optimiser, the
same for all, is a small part of a step. Those for GPUs are `_large`.
"""


# ---- the layouts -----------------------------------------------------------------------------------------------------

MODES = ("call", "timeline", "forest")
OWN = "call by the model"  # One row per call by the model's own layers, padded: for layers that no `RowPlan` computes
ENOUGH_SECONDS = 30.0  # Steps that took so long together are not repeated: their noise is small beside them
LongArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Run:
    """The options of a mode: the type of the weights, threads, tokens of a micro-batch, most counted steps."""

    dtype: str = "float32"
    threads: int = 2
    budget: int = 8192
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one mode on one workload: both times of each counted step, and the tokens and memory of a step."""

    seconds: list[float]
    cpu_seconds: list[float]
    tokens: int
    peak_mb: float


class CausalRows(Pass):
    """A pass over a forest whose trees are plain rows."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, LongArray]]:
        """As many whole rows as the budget holds; a longer one goes alone."""
        starts = np.flatnonzero(forest.parent < 0)
        stops = np.append(starts[1:], forest.num_nodes)
        found: list[tuple[Forest, LongArray]] = []
        begin = 0
        for i, stop in enumerate(stops):
            if i + 1 == len(stops) or stops[i + 1] - begin > max_tokens:
                inside = (forest.node >= begin) & (forest.node < stop)
                found.append((select(forest, inside), np.flatnonzero(inside)))
                begin = int(stop)
        return found

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        arrays = (forest.tokens, forest.depth, forest.parent[forest.node])
        tokens, positions, rows = (torch.from_numpy(x.astype(np.int64)).to(self._policy.device) for x in arrays)
        return flat_forward(self._policy.decoder, tokens, positions, RowPlan(forest)), rows


class RowPlan:
    """Causal attention within rows: one call for all neighbours of one length."""

    def __init__(self, forest: Forest) -> None:
        starts = np.flatnonzero(forest.parent < 0)
        lengths = np.diff(np.append(starts, forest.num_nodes))
        groups = np.split(np.arange(len(starts)), np.flatnonzero(np.diff(lengths)) + 1)
        self._groups = [(int(starts[g[0]]), len(g), int(lengths[g[0]])) for g in groups]

    def attend(self, call: LayerCall) -> Tensor:
        query, key, value, scale = call.query, call.key, call.value, call.scale
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        outs = []
        for start, count, length in self._groups:
            rows = [x[start : start + count * length].unflatten(0, (count, length)) for x in (query, key, value)]
            q, k, v = (x.transpose(1, 2) for x in rows)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)


def lay_out(mode: str, rows: Sequence[Row]) -> Forest:
    """The batch as `mode` sees it: one forest, or many trees of one row each."""
    if mode == "forest":
        return build_forest(rows)
    groups = timelines(rows) if mode == "timeline" else [[row] for row in rows]
    return side_by_side([build_forest(group) for group in sorted(groups, key=lambda g: -len(g[-1].tokens))])


def side_by_side(trees: Sequence[Forest]) -> Forest:
    """One forest of trees that share nothing, even if their first tokens are equal."""
    offsets = np.cumsum([0, *(tree.num_nodes for tree in trees)])[:-1].tolist()

    def joined(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.concatenate([getattr(tree, name) for tree in trees])

    def shifted(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.concatenate([getattr(tree, name) + at for tree, at in zip(trees, offsets, strict=True)]).astype("i4")

    return Forest(
        tokens=joined("tokens"),
        parent=np.where(joined("parent") < 0, -1, shifted("parent")).astype(np.int32),
        end=shifted("end"),
        depth=joined("depth"),
        node=shifted("node"),
        targets=(targets := {name: np.concatenate([tree[name] for tree in trees]) for name in trees[0].targets}),
        sets=(),
        num_sequences=len(np.unique(targets["sequence"])),
        num_row_tokens=sum(tree.num_row_tokens for tree in trees),
    )


def make_learner(policy: Policy, mode: str) -> PolicyLearner:
    """The embedded backend's learner, with the pass of the mode."""
    if mode == OWN:
        policy.decoder.config._attn_implementation = policy.own_attention  # type: ignore[union-attr]
        policy.learns_forests = False
    learner = PolicyLearner(policy)
    if mode in ("call", "timeline"):
        learner._pass = CausalRows(policy)
    return learner


def measure(mode: str, rows: Sequence[Row], folder: Path, run: Run) -> Measured:
    """Steps of one mode in this process, after a small one that makes the optimiser's state.

    A step begins with rows and ends with new weights.
    """
    policy = load_policy(ModelConfig.model_validate({"name": str(folder), "dtype": run.dtype, "threads": run.threads}))
    if mode == "forest":
        require_fast_path(policy)
    learner = make_learner(policy, mode)
    job = JobConfig(micro_batch_tokens=run.budget)
    learn_directly(learner, lay_out(mode, _warm_up(rows)), job, 0)
    before = _forget_peak()
    seconds, cpu, tokens = [], [], 0
    for version in range(1, run.steps + 1):
        began, used = time.perf_counter(), time.process_time()
        metrics = learn_directly(learner, lay_out(mode, rows), job, version)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
        tokens = round(metrics["forest/tokens_computed"])
        if sum(seconds) > ENOUGH_SECONDS:
            break
    return Measured(seconds, cpu, tokens, _peak_mb() - before)


def _warm_up(rows: Sequence[Row]) -> list[Row]:
    """The shortest rows of the batch, a thousand tokens or so."""
    chosen: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.tokens)):
        if sum(len(other.tokens) for other in chosen) > 1000:
            break
        chosen.append(row)
    return chosen


def _forget_peak() -> float:
    """Memory in use now, in MB; its peak is counted from here. With CUDA the device's, else the resident."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    forget_peak()
    return memory_mb()


def _peak_mb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return memory_mb("VmHWM")
