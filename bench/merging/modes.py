"""One batch in three layouts: forward, backward and optimiser step of the embedded learner.

The two baselines are as good as rows can be. They share the learner's code, its head (which multiplies out the
vocabulary at sampled positions only), its packing budget and its optimiser with the forest. They differ in the
computed tokens: whole rows, flat and without padding, the longest first. Every group of equal lengths is one causal
attention call without a mask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentjet.compute.embedded.attention import flat_forward
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy
from agentjet.config import JobConfig, ModelConfig
from agentjet.timeline import Forest, Row, build_forest
from agentjet.timeline.forest import select
from bench.merging.workloads import timelines

MODES = ("call", "timeline", "forest")
ENOUGH_SECONDS = 30.0
"""Steps that took so long together are not repeated: their noise is small beside them."""
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Run:
    """The options of a mode: the type of the weights, threads, tokens of a micro-batch, most counted steps."""

    dtype: str = "float32"
    threads: int = 2
    budget: int = 8192
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one mode on one workload: seconds of each counted step, and the tokens and memory of a step."""

    seconds: list[float]
    tokens: int
    peak_mb: float


class CausalRows:
    """The learner's pass (see `compute.embedded.passes.Pass`) over a forest whose trees are plain rows."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, IntArray]]:
        """As many whole rows as the budget holds; a longer one goes alone."""
        starts = np.flatnonzero(forest.parent < 0)
        stops = np.append(starts[1:], forest.num_nodes)
        found: list[tuple[Forest, IntArray]] = []
        begin = 0
        for i, stop in enumerate(stops):
            if i + 1 == len(stops) or stops[i + 1] - begin > max_tokens:
                inside = (forest.node >= begin) & (forest.node < stop)
                found.append((select(forest, inside), np.flatnonzero(inside)))
                begin = int(stop)
        return found

    def num_computed(self, forest: Forest) -> int:
        """See `Pass`."""
        return forest.num_nodes

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """See `Pass`."""
        hidden.backward(gradient)

    def finish(self) -> None:
        """See `Pass`."""

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """See `Pass`."""
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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
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
    groups = [[row] for row in rows] if mode == "call" else timelines(rows)
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
    learner = PolicyLearner(policy)
    if mode != "forest":
        learner._pass = CausalRows(policy)
    return learner


def measure(mode: str, rows: Sequence[Row], folder: Path, run: Run) -> Measured:
    """Steps of one mode in this process, after a small one that makes the optimiser's state.

    A step begins with rows and ends with new weights.
    """
    policy = load_policy(ModelConfig.model_validate({"name": str(folder), "dtype": run.dtype, "threads": run.threads}))
    learner = make_learner(policy, mode)
    job = JobConfig(micro_batch_tokens=run.budget)
    learner.learn(lay_out(mode, _warm_up(rows)), job, 0)
    before = _forget_peak()
    seconds, tokens = [], 0
    for version in range(1, run.steps + 1):
        began = time.perf_counter()
        metrics = learner.learn(lay_out(mode, rows), job, version)
        seconds.append(time.perf_counter() - began)
        tokens = round(metrics["forest/tokens_computed"])
        if sum(seconds) > ENOUGH_SECONDS:
            break
    return Measured(seconds, tokens, _peak_mb() - before)


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
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_mb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return _status("VmHWM")


def _status(name: str) -> float:
    """A line of the kernel's account of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
