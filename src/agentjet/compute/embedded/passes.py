"""The learner's ways from a forest to the hidden states that its targets are predicted from, and back.

`PrefixPass` (`trunk.py`) computes each node once, however many micro-batches a batch makes, `ChunkPass` once in each
micro-batch that needs it, both under an attention plan. `RowPass`, for models whose state cannot branch, computes
the same forest as one row per timeline: every root-to-leaf path that ends in a target, each target in exactly one of
the rows that hold it. Only this differs between them; loss, weights and optimiser know nothing of it.

Rows are padded on the right and no mask says so: no layer of a causal model lets a token see a later one, be it
attention, convolution or recurrence.

The learner's pass over a forest in pieces, every node computed once however many pieces there are.

A piece that others stand on is *kept*: its keys and values serve the pieces below it, whose gradients gather here, and
it is walked back only when the last of them is done. So a batch costs the same whether it fits one micro-batch or not.

Invariant: pieces are passed in the order `pieces` gives them, each followed by `backward` where gradients are wanted,
then `finish`. Without gradients the same walk keeps keys and values only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.attention import AttentionPlan, flat_forward
from agentjet.compute.embedded.forest_attention import FlexPlan, ForestPlan, KeyValues
from agentjet.compute.embedded.policy import Policy
from agentjet.timeline.forest import Forest, ForestChunk, chunk_forest, split

IntArray = NDArray[np.int64]


class Pass(Protocol):
    """One way through the model. Shapes: M targets, U positions that predict one."""

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, IntArray]]:
        """Cut a forest into micro-batches that compute at most `max_tokens` tokens each, with the indices of their
        targets. A single path that is longer goes alone.
        """
        ...

    def num_computed(self, forest: Forest) -> int:
        """Tokens that one pass over this piece computes, padding included."""
        ...

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """Hidden states [U, hidden] of the positions that predict a target, and each target's [M] row among them.

        Pieces are passed in the order of `pieces`.
        """
        ...

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """Walk back the piece that `hidden` was just computed for; None where it has no target."""
        ...

    def finish(self) -> None:
        """After the last piece: gradients are complete now."""
        ...


def pass_of(policy: Policy) -> Pass:
    """The way this policy can go."""
    if not policy.card.shares_prefixes:
        return RowPass(policy)
    return ChunkPass(policy) if policy.device.type == "cuda" else PrefixPass(policy)


def forest_plan(forest: Forest, device: torch.device) -> AttentionPlan:
    """The attention plan of a forest on this device."""
    return FlexPlan(forest, device) if device.type == "cuda" else ForestPlan(forest, device)


class _Alone:
    """Pieces that need nothing of each other."""

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """See `Pass`."""
        if gradient is not None:
            hidden.backward(gradient)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """See `Pass`."""


class ChunkPass(_Alone):
    """Every node once, but for the path above a piece, which each piece computes again. The way on CUDA."""

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


class RowPass(_Alone):
    """Every timeline a row of its own, in batches of rows of similar length."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, IntArray]]:
        """See `Pass`. A piece is a forest of rows that share nothing any more."""
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
        """A target belongs to the first leaf at or after it in depth-first order, which is a descendant of it."""
        leaves = np.flatnonzero(forest.end == np.arange(forest.num_nodes) + 1)
        used, row = np.unique(np.searchsorted(leaves, forest.node), return_inverse=True)
        wanted = set(used.tolist())
        return cls([path for i, path in enumerate(_paths(forest, leaves)) if i in wanted], row.astype(np.int64))

    @property
    def lengths(self) -> IntArray:
        return np.array([len(path) for path in self.paths], np.int64)


def _paths(forest: Forest, leaves: IntArray) -> Iterator[IntArray]:
    """The nodes from root to leaf, for each leaf. Between one leaf and the next stands what the next one adds."""
    path = np.zeros(0, np.int64)
    start = 0
    for leaf in leaves.tolist():
        path = np.concatenate([path[: forest.depth[start]], np.arange(start, leaf + 1)])
        start = leaf + 1
        yield path


def _batches(lengths: IntArray, max_tokens: int) -> Iterator[IntArray]:
    """Rows grouped by length, each group's padded area within the budget where a single row is."""
    order = np.argsort(-lengths, kind="stable")
    at = 0
    while at < len(order):
        count = max(1, max_tokens // int(lengths[order[at]]))
        yield np.sort(order[at : at + count])
        at += count


def _chains(forest: Forest, rows: _Rows, batch: IntArray, targets: IntArray) -> Forest:
    """A forest of the rows in `batch`, ascending, each a tree of one branch, with the targets computed in them."""
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
        advantage=forest.advantage[targets],
        logprob=forest.logprob[targets],
        temperature=forest.temperature[targets],
        version=forest.version[targets],
        sequence=forest.sequence[targets],
        support=forest.support[targets],
        sets=forest.sets,
        num_sequences=len(np.unique(forest.sequence[targets])),
        num_row_tokens=forest.num_row_tokens,
    )


def _predicting(hidden: Tensor, positions: NDArray[np.integer[Any]]) -> tuple[Tensor, Tensor]:
    """The rows of `hidden` [P, hidden] at the distinct `positions` [M], and where among them each position is."""
    distinct, rows = np.unique(positions, return_inverse=True)
    return hidden.index_select(0, _ids(distinct, hidden.device)), _ids(rows, hidden.device)


def _ids(values: NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


Pair = tuple[Tensor | None, Tensor | None]


@dataclass(slots=True)
class _Visit:
    """A piece's forward pass as long as its backward pass is to come.

    `past` are leaves, so that a piece's backward pass ends at them; their gradients belong to the kept pieces.
    """

    num_cached: int
    past: KeyValues
    computed: KeyValues
    hidden: Tensor | None = None
    hidden_gradient: Tensor | None = None
    gradients: dict[int, Pair] = field(default_factory=dict)
    """By layer, what the pieces below add to the gradients of this piece's keys and values [P, K, D]."""

    def walk_back(self) -> None:
        """The backward pass, from the hidden states and from the keys and values that others used."""
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
        """Gradient of the first of this piece's keys (`which` 0) or values (1) in a layer."""
        pair = list(self.gradients.get(layer, (None, None)))
        total = pair[which]
        if total is None:
            total = torch.zeros_like(self.computed[layer][which])
        total[: len(gradient)] += gradient
        pair[which] = total
        self.gradients[layer] = pair[0], pair[1]


class PrefixPass:
    """Every node once; see `passes.Pass`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: list[_Visit] = []
        self._visit: _Visit | None = None
        self._is_kept = False

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, NDArray[np.int64]]]:
        """See `Pass`."""
        return list(chunk_forest(forest, max_tokens))

    def num_computed(self, forest: Forest) -> int:
        """See `Pass`."""
        return forest.num_nodes

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """See `Pass`. A forest that is no piece stands alone."""
        level, num_cached, is_kept = 0, 0, False
        if isinstance(forest, ForestChunk):
            level, num_cached, is_kept = forest.level, forest.num_cached, forest.is_kept
        self._close(level)
        past = self._past(num_cached)
        plan = ForestPlan(forest, self._policy.device, past)
        tokens, positions = (self._ids(values) for values in (forest.tokens, forest.depth))
        states = flat_forward(self._policy.decoder, tokens, positions, plan)
        predicting, rows = np.unique(forest.parent[forest.node], return_inverse=True)
        hidden = states.index_select(0, self._ids(predicting))
        self._visit = _Visit(num_cached, past, plan.computed if is_kept else {}, hidden)
        self._is_kept = is_kept
        if is_kept:
            self._kept.append(self._visit)
        return hidden, self._ids(rows)

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """Walk back the piece whose `hidden` this is, or remember its gradient if other pieces stand on it."""
        assert self._visit is not None and hidden is self._visit.hidden, "backward follows its own forward pass"
        self._visit.hidden_gradient = gradient
        if not self._is_kept:
            self._walk_back(self._visit)
        self._visit = None

    def finish(self) -> None:
        """Walk back what is still kept. Gradients are complete only then."""
        self._visit = None
        self._close(0)

    def _close(self, level: int) -> None:
        while len(self._kept) > level:
            visit = self._kept.pop()
            if torch.is_grad_enabled():
                self._walk_back(visit)

    def _walk_back(self, visit: _Visit) -> None:
        visit.walk_back()
        for layer, pair in visit.past.items():
            for which, leaf in enumerate(pair):
                if leaf.grad is None:
                    continue
                start = 0
                for owner, count in self._owners(visit.num_cached):
                    owner.add(layer, which, leaf.grad[start : start + count])
                    start += count

    def _past(self, num_cached: int) -> KeyValues:
        """Keys and values of the first `num_cached` nodes of the path that is kept, as leaves."""
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

    def _owners(self, num_cached: int) -> Iterator[tuple[_Visit, int]]:
        """Which kept pieces the given path comes from, root first, and how many of its nodes each gives."""
        starts = [visit.num_cached for visit in self._kept if visit.num_cached < num_cached]
        for visit, start, stop in zip(self._kept, starts, [*starts[1:], num_cached], strict=False):
            yield visit, stop - start

    def _ids(self, values: NDArray[np.integer[Any]]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._policy.device)


def _leaf(parts: Iterable[Tensor]) -> Tensor:
    tensors = list(parts)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return torch.cat([tensor.detach() for tensor in tensors]).requires_grad_(needs_gradient)
