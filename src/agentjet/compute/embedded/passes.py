"""The learner's passes: from a forest to the hidden states that predict its targets, and back.

* `PrefixPass` computes each node once, under an attention plan. On CUDA, each micro-batch computes its nodes alone.
* `RowPass` computes one row per timeline, for models that do not share prefixes. A timeline is a root-to-leaf path that
  ends in a target. Each target is computed in exactly one of the rows that contain it.

Loss, weights and optimiser do not depend on the pass. Rows are padded on the right without a mask, because no layer of
a causal model lets a token see a later one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.attention import ForestPlan, KeyValues, flat_forward, forest_plan
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.recurrence import States
from agentjet.timeline.forest import Forest, ForestChunk, chunk_forest, restrict, split

IntArray = NDArray[np.int64]


class Pass(Protocol):
    """One way through the model. Shapes: M targets, U positions that predict a target."""

    def pieces(self, forest: Forest, max_tokens: int) -> Sequence[tuple[Forest, IntArray]]:
        """Cut a forest into micro-batches of at most `max_tokens` computed tokens, with the indices of their targets.

        A longer single path is a micro-batch alone.
        """
        ...

    def num_computed(self, forest: Forest) -> int:
        """Returns the number of tokens that a pass over this piece computes, with padding."""
        return forest.num_nodes

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """Returns hidden states [U, hidden] of the predicting positions, and each target's row [M] among them.

        Pieces must come in the order of `pieces`.
        """
        ...

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """Do the backward pass of the last piece, from the gradient of its `hidden`; None if it has no target."""
        if gradient is not None and hidden.requires_grad:  # An adapter of the head alone ends above the decoder.
            hidden.backward(gradient)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Complete the gradients after the last piece."""
        return

    def forget(self) -> None:
        """Drop what is kept of pieces, after a failure between them."""
        return


def pass_of(policy: Policy, *, keeps: bool = True) -> Pass:
    """Returns the pass for a policy. `keeps` is that of `PrefixPass`."""
    return PrefixPass(policy, keeps=keeps) if policy.learns_forests else RowPass(policy)


class RowPass(Pass):
    """Computes every timeline as a separate row, in batches of similar length."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def pieces(self, forest: Forest, max_tokens: int) -> Sequence[tuple[Forest, IntArray]]:
        """See `Pass`. A piece is the forest of its timelines."""
        leaves, row = _timelines(forest)
        pieces: list[tuple[Forest, IntArray]] = []
        for batch in _batches(forest.depth[leaves] + 1, max_tokens):
            nodes = np.unique(np.concatenate([_path(forest, leaf) for leaf in leaves[batch]]))
            inside = np.isin(row, batch)
            pieces.append((restrict(forest, nodes, inside), np.flatnonzero(inside)))
        return pieces

    def num_computed(self, forest: Forest) -> int:
        leaves, _ = _timelines(forest)
        return len(leaves) * (int(forest.depth[leaves].max(initial=-1)) + 1)

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        leaves, row = _timelines(forest)
        if not len(leaves):  # The filling of a rank without work: one node without a target.
            leaves = np.zeros(1, np.int64)
        width = int(forest.depth[leaves].max()) + 1
        tokens = np.zeros((len(leaves), width), np.int64)
        for i, leaf in enumerate(leaves):
            path = _path(forest, leaf)
            tokens[i, : len(path)] = forest.tokens[path]
        out = cast(Any, self._policy.decoder)(input_ids=_ids(tokens, self._policy.device), use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return _predicting(hidden.flatten(0, 1), row * width + forest.depth[forest.node] - 1)


def _timelines(forest: Forest) -> tuple[IntArray, IntArray]:
    """Returns the leaves of the timelines to compute, and the number [M] of each target's timeline among them.

    A target belongs to the first leaf at or after it in depth-first order, which is its descendant.
    """
    leaves = np.flatnonzero(forest.end == np.arange(forest.num_nodes) + 1)
    used, row = np.unique(np.searchsorted(leaves, forest.node), return_inverse=True)
    return leaves[used], row.astype(np.int64)


def _path(forest: Forest, leaf: int) -> IntArray:
    """Returns the nodes from the root to a leaf: those whose interval of descendants contains the leaf."""
    return np.flatnonzero(forest.end[: leaf + 1] > leaf)


def _batches(lengths: NDArray[np.integer[Any]], max_tokens: int) -> Iterator[IntArray]:
    """Yields rows of similar length whose padded area is within the budget, or a single longer row."""
    order = np.argsort(-lengths, kind="stable")
    at = 0
    while at < len(order):
        count = max(1, max_tokens // int(lengths[order[at]]))
        yield np.sort(order[at : at + count])
        at += count


def _predicting(hidden: Tensor, positions: NDArray[np.integer[Any]]) -> tuple[Tensor, Tensor]:
    """Returns the rows of `hidden` [P, hidden] at the distinct `positions` [M], and each position's index in them."""
    distinct, rows = np.unique(positions, return_inverse=True)
    return hidden.index_select(0, _ids(distinct, hidden.device)), _ids(rows, hidden.device)


def _ids(values: NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


@dataclass(slots=True)
class _ForwardPass:
    """The forward pass of a piece until its backward pass.

    Pieces below read `shared`, which are leaf tensors: their backward passes end there and add up the gradients of
    `computed`, this piece's own keys and values. So do those of `shared_states` and `states`, which recurrent layers
    carry. All are empty if the piece is not kept.
    """

    num_cached: int
    computed: KeyValues
    shared: KeyValues
    states: States
    shared_states: States
    hidden: Tensor
    hidden_gradient: Tensor | None = None

    def backward(self) -> None:
        """Do the backward pass, from the hidden states and from the keys and values that other pieces used."""
        found = [(self.hidden, self.hidden_gradient)]
        for layer, pair in self.computed.items():
            found += [(own, shared.grad) for own, shared in zip(pair, self.shared[layer], strict=True)]
        found += [(own, self.shared_states[key].grad) for key, own in self.states.items()]
        roots = [(tensor, gradient) for tensor, gradient in found if gradient is not None and tensor.requires_grad]
        if roots:
            torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])


class PrefixPass(Pass):
    """Computes every node of a forest once, for any number of pieces.

    A piece with other pieces below it is *kept*: its keys and values serve them and collect their gradients. Its
    backward pass runs when the last of them is done. So a batch costs the same in one micro-batch or in several.

    On CUDA no piece is kept: the path above a piece is computed again.

    Invariant: pieces come in the order of `pieces`, each followed by `backward` if gradients are wanted, then `finish`.
    Without gradients, the same order keeps keys and values only.
    """

    def __init__(self, policy: Policy, *, keeps: bool = True) -> None:
        """Without `keeps`, no piece is kept, as on CUDA."""
        self._policy = policy
        self._keeps = keeps and policy.device.type != "cuda"
        self._kept: list[_ForwardPass] = []
        self._last: _ForwardPass | None = None

    def pieces(self, forest: Forest, max_tokens: int) -> Sequence[tuple[Forest, IntArray]]:
        return chunk_forest(forest, max_tokens) if self._keeps else split(forest, max_tokens)

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """See `Pass`. A forest that is not a `ForestChunk` is computed alone."""
        level, num_cached, is_kept = 0, 0, False
        if isinstance(forest, ForestChunk):
            level, num_cached, is_kept = forest.level, forest.num_cached, forest.is_kept
        self._close(level)
        device = self._policy.device
        carried = self._kept[-1].shared_states if self._kept else {}
        plan = forest_plan(forest, device, self._past(num_cached), carried)
        states = flat_forward(self._policy.decoder, _ids(forest.tokens, device), _ids(forest.depth, device), plan)
        hidden, rows = _predicting(states, forest.parent[forest.node])
        computed = plan.take_computed() if isinstance(plan, ForestPlan) else {}
        computed = computed if is_kept else {}
        shared = {layer: (_leaf(key), _leaf(value)) for layer, (key, value) in computed.items()}
        own = plan.recurrence.take_computed()
        own = own if is_kept else {}
        shared_states = {key: _leaf(state) for key, state in own.items()}
        self._last = _ForwardPass(num_cached, computed, shared, own, shared_states, hidden)
        if is_kept:
            self._kept.append(self._last)
        return hidden, rows

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """Do the backward pass of the last piece, or store its gradient if the piece is kept."""
        last, self._last = self._last, None
        assert last is not None and hidden is last.hidden, "backward must follow the forward pass of the same piece"
        last.hidden_gradient = gradient
        if not (last.shared or last.shared_states):
            last.backward()

    def finish(self) -> None:
        """Do the backward passes of the kept pieces. Gradients are complete only then."""
        self._last = None
        self._close(0)

    def forget(self) -> None:
        self._last = None
        self._kept.clear()

    def _close(self, level: int) -> None:
        while len(self._kept) > level:
            kept = self._kept.pop()
            if torch.is_grad_enabled():
                kept.backward()

    def _past(self, num_cached: int) -> KeyValues:
        """Returns keys and values of the first `num_cached` nodes of the kept path."""
        starts = [kept.num_cached for kept in self._kept if kept.num_cached < num_cached]
        counts = np.diff([*starts, num_cached]).tolist()
        owners = list(zip(self._kept, counts, strict=False))

        def joined(layer: int, which: int) -> Tensor:
            return torch.cat([kept.shared[layer][which][:count] for kept, count in owners])

        return {layer: (joined(layer, 0), joined(layer, 1)) for layer in (owners[0][0].shared if owners else ())}


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled() and tensor.requires_grad)
