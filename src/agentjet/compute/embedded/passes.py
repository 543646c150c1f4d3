"""The learner's passes: from a forest to the hidden states that predict its targets, and back.

* `PrefixPass` computes each node once, for any number of micro-batches. CPU, under an attention plan.
* `ChunkPass` computes each node once in each micro-batch that needs it. CUDA, under an attention plan.
* `RowPass` computes one row per timeline, for models that do not share prefixes. A timeline is a root-to-leaf path that
  ends in a target. Each target is computed in exactly one of the rows that contain it.

Loss, weights and optimiser do not depend on the pass. Rows are padded on the right without a mask, because no layer of
a causal model lets a token see a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.attention import flat_forward
from agentjet.compute.embedded.forest_attention import ForestPlan, KeyValues, forest_plan
from agentjet.compute.embedded.policy import Policy
from agentjet.timeline.forest import Forest, ForestChunk, chunk_forest, split

IntArray = NDArray[np.int64]


class Pass(Protocol):
    """One way through the model. Shapes: M targets, U positions that predict a target."""

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, IntArray]]:
        """Cut a forest into micro-batches of at most `max_tokens` computed tokens, with the indices of their targets.

        A longer single path is a micro-batch alone.
        """
        ...

    def num_computed(self, forest: Forest) -> int:
        """Returns the number of tokens that a pass over this piece computes, with padding."""
        ...

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """Returns hidden states [U, hidden] of the predicting positions, and each target's row [M] among them.

        Pieces must come in the order of `pieces`.
        """
        ...

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """Do the backward pass of the last piece, from the gradient of its `hidden`; None if it has no target."""
        if gradient is not None:
            hidden.backward(gradient)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Complete the gradients after the last piece."""
        return


def pass_of(policy: Policy) -> Pass:
    """Returns the pass for a policy, by its model and its device."""
    if not policy.info.shares_prefixes:
        return RowPass(policy)
    return ChunkPass(policy) if policy.device.type == "cuda" else PrefixPass(policy)


class ChunkPass(Pass):
    """Computes every node once, except the path above a piece, which each piece computes again."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, IntArray]]:
        """See `Pass`."""
        return split(forest, max_tokens)

    def num_computed(self, forest: Forest) -> int:
        """See `Pass`."""
        return forest.num_nodes

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """See `Pass`."""
        device = self._policy.device
        hidden = flat_forward(
            self._policy.decoder,
            _ids(forest.tokens, device),
            _ids(forest.depth, device),
            forest_plan(forest, device),
        )
        return _predicting(hidden, forest.parent[forest.node])


class RowPass(Pass):
    """Computes every timeline as a separate row, in batches of similar length."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, IntArray]]:
        """See `Pass`. A piece is a forest of unbranched rows."""
        rows = _Rows.of(forest)
        found: list[tuple[Forest, IntArray]] = []
        for batch in _batches(rows.lengths, max_tokens):
            targets = np.flatnonzero(np.isin(rows.row, batch))
            found.append((_chains(forest, rows, batch, targets), targets))
        return found

    def num_computed(self, forest: Forest) -> int:
        """See `Pass`."""
        lengths = _Rows.of(forest).lengths
        return len(lengths) * int(lengths.max(initial=0))

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """See `Pass`."""
        rows = _Rows.of(forest)
        width = int(rows.lengths.max())
        tokens = np.zeros((len(rows.paths), width), np.int64)
        for i, path in enumerate(rows.paths):
            tokens[i, : len(path)] = forest.tokens[path]
        out = cast(Any, self._policy.decoder)(input_ids=_ids(tokens, self._policy.device), use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return _predicting(hidden.flatten(0, 1), rows.row * width + forest.depth[forest.node] - 1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The timelines of a forest: the nodes of each, and the row [M] in which each target is computed."""

    paths: list[IntArray]
    row: IntArray

    @classmethod
    def of(cls, forest: Forest) -> _Rows:
        """A target belongs to the first leaf at or after it in depth-first order, which is its descendant."""
        leaves = np.flatnonzero(forest.end == np.arange(forest.num_nodes) + 1)
        used, row = np.unique(np.searchsorted(leaves, forest.node), return_inverse=True)
        wanted = set(used.tolist())
        return cls([path for i, path in enumerate(_paths(forest, leaves)) if i in wanted], row.astype(np.int64))

    @property
    def lengths(self) -> IntArray:
        return np.array([len(path) for path in self.paths], np.int64)


def _paths(forest: Forest, leaves: IntArray) -> Iterator[IntArray]:
    """Yields the nodes from the root to each leaf. The nodes between two leaves belong to the second one."""
    path = np.zeros(0, np.int64)
    start = 0
    for leaf in leaves.tolist():
        path = np.concatenate([path[: forest.depth[start]], np.arange(start, leaf + 1)])
        start = leaf + 1
        yield path


def _batches(lengths: IntArray, max_tokens: int) -> Iterator[IntArray]:
    """Yields rows of similar length whose padded area is within the budget, or a single longer row."""
    order = np.argsort(-lengths, kind="stable")
    at = 0
    while at < len(order):
        count = max(1, max_tokens // int(lengths[order[at]]))
        yield np.sort(order[at : at + count])
        at += count


def _chains(forest: Forest, rows: _Rows, batch: IntArray, targets: IntArray) -> Forest:
    """Returns a forest of the rows in `batch`, ascending, each an unbranched tree, with their targets."""
    paths = [rows.paths[i] for i in batch]
    stops = np.cumsum([len(path) for path in paths])
    starts = np.concatenate([[0], stops[:-1]])
    parent = np.arange(-1, stops[-1] - 1)
    parent[starts] = -1
    nodes = np.concatenate(paths)
    place = np.searchsorted(batch, rows.row[targets])
    return Forest(
        tokens=forest.tokens[nodes],
        parent=parent.astype(np.int32),
        end=np.repeat(stops, [len(path) for path in paths]).astype(np.int32),
        depth=forest.depth[nodes],
        node=(starts[place] + forest.depth[forest.node[targets]]).astype(np.int32),
        targets=(columns := {name: values[targets] for name, values in forest.targets.items()}),
        sets=forest.sets,
        num_sequences=len(np.unique(columns["sequence"])),
        num_row_tokens=forest.num_row_tokens,
    )


def _predicting(hidden: Tensor, positions: NDArray[np.integer[Any]]) -> tuple[Tensor, Tensor]:
    """Returns the rows of `hidden` [P, hidden] at the distinct `positions` [M], and each position's index in them."""
    distinct, rows = np.unique(positions, return_inverse=True)
    return hidden.index_select(0, _ids(distinct, hidden.device)), _ids(rows, hidden.device)


def _ids(values: NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


Pair = tuple[Tensor | None, Tensor | None]


@dataclass(slots=True)
class _ForwardPass:
    """The forward pass of a piece until its backward pass.

    `past` are leaf tensors, so a piece's backward pass ends there. Their gradients belong to the kept pieces.
    """

    num_cached: int
    past: KeyValues
    computed: KeyValues
    hidden: Tensor | None = None
    hidden_gradient: Tensor | None = None
    gradients: dict[int, Pair] = field(default_factory=dict)
    """Gradients of this piece's keys and values [P, K, D] from the pieces below, by layer."""

    def backward(self) -> None:
        """Do the backward pass, from the hidden states and from the keys and values that other pieces used."""
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        if self.hidden is not None and self.hidden_gradient is not None:
            roots, gradients = [self.hidden], [self.hidden_gradient]
        for layer, pair in self.gradients.items():
            for tensor, gradient in zip(self.computed[layer], pair, strict=True):
                if gradient is not None:
                    roots.append(tensor)
                    gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)

    def add(self, layer: int, which: int, gradient: Tensor) -> None:
        """Add a gradient of this piece's first keys (`which` 0) or values (1) in a layer."""
        pair = list(self.gradients.get(layer, (None, None)))
        total = pair[which]
        if total is None:
            total = torch.zeros_like(self.computed[layer][which])
        total[: len(gradient)] += gradient
        pair[which] = total
        self.gradients[layer] = pair[0], pair[1]


class PrefixPass(Pass):
    """Computes every node of a forest once, for any number of pieces.

    A piece with other pieces below it is *kept*: its keys and values serve them and collect their gradients. Its
    backward pass runs when the last of them is done. So a batch costs the same in one micro-batch or in several.

    Invariant: pieces come in the order of `pieces`, each followed by `backward` if gradients are wanted, then `finish`.
    Without gradients, the same order keeps keys and values only.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: list[_ForwardPass] = []
        self._last: _ForwardPass | None = None
        self._is_kept = False

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, NDArray[np.int64]]]:
        """See `Pass`."""
        return list(chunk_forest(forest, max_tokens))

    def num_computed(self, forest: Forest) -> int:
        """See `Pass`."""
        return forest.num_nodes

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """See `Pass`. A forest that is not a `ForestChunk` is computed alone."""
        level, num_cached, is_kept = 0, 0, False
        if isinstance(forest, ForestChunk):
            level, num_cached, is_kept = forest.level, forest.num_cached, forest.is_kept
        self._close(level)
        past = self._past(num_cached)
        plan = ForestPlan(forest, past)
        tokens, positions = (self._ids(values) for values in (forest.tokens, forest.depth))
        states = flat_forward(self._policy.decoder, tokens, positions, plan)
        predicting, rows = np.unique(forest.parent[forest.node], return_inverse=True)
        hidden = states.index_select(0, self._ids(predicting))
        self._last = _ForwardPass(num_cached, past, plan.computed if is_kept else {}, hidden)
        self._is_kept = is_kept
        if is_kept:
            self._kept.append(self._last)
        return hidden, self._ids(rows)

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """Do the backward pass of the last piece, or store its gradient if the piece is kept."""
        assert self._last is not None and hidden is self._last.hidden, (
            "backward must follow the forward pass of the same piece"
        )
        self._last.hidden_gradient = gradient
        if not self._is_kept:
            self._backward_of(self._last)
        self._last = None

    def finish(self) -> None:
        """Do the backward passes of the kept pieces. Gradients are complete only then."""
        self._last = None
        self._close(0)

    def _close(self, level: int) -> None:
        while len(self._kept) > level:
            kept = self._kept.pop()
            if torch.is_grad_enabled():
                self._backward_of(kept)

    def _backward_of(self, kept: _ForwardPass) -> None:
        kept.backward()
        for layer, pair in kept.past.items():
            for which, leaf in enumerate(pair):
                if leaf.grad is None:
                    continue
                start = 0
                for owner, count in self._owners(kept.num_cached):
                    owner.add(layer, which, leaf.grad[start : start + count])
                    start += count

    def _past(self, num_cached: int) -> KeyValues:
        """Returns keys and values of the first `num_cached` nodes of the kept path, as leaf tensors."""
        owners = list(self._owners(num_cached))
        if not owners:
            return {}
        return {
            layer: (
                _leaf(owner.computed[layer][0][:count] for owner, count in owners),
                _leaf(owner.computed[layer][1][:count] for owner, count in owners),
            )
            for layer in owners[0][0].computed
        }

    def _owners(self, num_cached: int) -> Iterator[tuple[_ForwardPass, int]]:
        """Yields the kept pieces of the given path, root first, and the number of nodes from each."""
        starts = [kept.num_cached for kept in self._kept if kept.num_cached < num_cached]
        for kept, start, stop in zip(self._kept, starts, [*starts[1:], num_cached], strict=False):
            yield kept, stop - start

    def _ids(self, values: NDArray[np.integer[Any]]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._policy.device)


def _leaf(parts: Iterable[Tensor]) -> Tensor:
    tensors = list(parts)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return torch.cat([tensor.detach() for tensor in tensors]).requires_grad_(needs_gradient)
