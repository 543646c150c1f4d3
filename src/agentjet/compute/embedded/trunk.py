"""The learner's pass over a forest in pieces, every node computed once however many pieces there are.

A piece that others stand on is *kept*: its keys and values serve the pieces below it, whose gradients gather here, and
it is walked back only when the last of them is done. So a batch costs the same whether it fits one micro-batch or not.

Invariant: pieces are passed in the order `pieces` gives them, each followed by `backward` where gradients are wanted,
then `finish`. Without gradients the same walk keeps keys and values only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.attention import flat_forward
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.tree_attention import ForestPlan, KeyValues
from agentjet.timeline.forest import Forest
from agentjet.timeline.pieces import Piece, unfold

Pair = tuple[Tensor | None, Tensor | None]


@dataclass(slots=True)
class _Visit:
    """A piece's forward pass as long as its backward pass is to come.

    `past` are leaves, so that a piece's backward pass ends at them; their gradients belong to the kept pieces.
    """

    num_given: int
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


class TrunkPass:
    """Every node once; see `passes.Pass`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: list[_Visit] = []
        self._visit: _Visit | None = None
        self._is_kept = False

    def pieces(self, forest: Forest, max_tokens: int) -> list[tuple[Forest, NDArray[np.int64]]]:
        """See `Pass`."""
        return list(unfold(forest, max_tokens))

    def num_computed(self, forest: Forest) -> int:
        """See `Pass`."""
        return forest.num_nodes

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """See `Pass`. A forest that is no piece stands alone."""
        level, num_given, is_kept = 0, 0, False
        if isinstance(forest, Piece):
            level, num_given, is_kept = forest.level, forest.num_given, forest.is_kept
        self._close(level)
        past = self._past(num_given)
        plan = ForestPlan(forest, self._policy.device, past)
        tokens, positions = (self._ids(values) for values in (forest.tokens, forest.depth))
        states = flat_forward(self._policy.decoder, tokens, positions, plan)
        predicting, rows = np.unique(forest.parent[forest.node], return_inverse=True)
        hidden = states.index_select(0, self._ids(predicting))
        self._visit = _Visit(num_given, past, plan.computed if is_kept else {}, hidden)
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
                for owner, count in self._owners(visit.num_given):
                    owner.add(layer, which, leaf.grad[start : start + count])
                    start += count

    def _past(self, num_given: int) -> KeyValues:
        """Keys and values of the first `num_given` nodes of the path that is kept, as leaves."""
        owners = list(self._owners(num_given))
        if not owners:
            return {}
        return {
            layer: (
                _leaf(owner.computed[layer][0][:count] for owner, count in owners),
                _leaf(owner.computed[layer][1][:count] for owner, count in owners),
            )
            for layer in owners[0][0].computed
        }

    def _owners(self, num_given: int) -> Iterator[tuple[_Visit, int]]:
        """Which kept pieces the given path comes from, root first, and how many of its nodes each gives."""
        starts = [visit.num_given for visit in self._kept if visit.num_given < num_given]
        for visit, start, stop in zip(self._kept, starts, [*starts[1:], num_given], strict=False):
            yield visit, stop - start

    def _ids(self, values: NDArray[np.integer[Any]]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._policy.device)


def _leaf(parts: Iterable[Tensor]) -> Tensor:
    tensors = list(parts)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return torch.cat([tensor.detach() for tensor in tensors]).requires_grad_(needs_gradient)
