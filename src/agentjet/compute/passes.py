"""The learner's passes: from a forest to the hidden states that predict its targets, to their distributions, and back.

* `PrefixPass` computes each node once, under an attention plan. On CUDA, each micro-batch computes its nodes alone.
* `RowPass` computes one row per timeline, for models that do not share prefixes. A timeline is a root-to-leaf path that
  ends in a target. Each target is computed in exactly one of the rows that contain it.

Loss, weights and optimiser do not depend on the pass. Rows are padded on the right without a mask, because no layer of
a causal model lets a token see a later one.

The distributions are those of a policy or a `Teacher`; value heads predict beside them.

* Logits over the vocabulary exist only for positions that predict a target, `HEAD_ROWS` at a time.
* If a token was chosen from a set (a grammar, `top_p`, `top_k`), its distribution is restricted to that set. So are
  entropy and KL terms. A token without an alternative has log-probability 0 and no gradient, and counts.

Shapes: M targets, U positions that predict a target, D distributions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.attention import Carried, flat_forward, forest_plan
from agentjet.compute.model import load_policy
from agentjet.compute.policy import Policy
from agentjet.compute.routes import RoutePass, routing
from agentjet.config import ModelConfig
from agentjet.processes.progress import PROGRESS
from agentjet.recipes.recipe import ValueHeads
from agentjet.timeline.forest import (
    Forest,
    ForestChunk,
    Row,
    ancestors,
    build_forest,
    chunk_forest,
    decode_set,
    restrict,
    split,
)
from agentjet.timeline.routes import Choices
from agentjet.types import TokenScore

IntArray = NDArray[np.int64]


class Pass(Protocol):
    """One way through the model. Shapes: M targets, U positions that predict a target."""

    repeats_routes: bool = True
    """True if the routers of the policy repeat the choices that a forest has."""
    routes: RoutePass | None = None
    """Those of the last piece."""

    def pieces(self, forest: Forest, max_tokens: int) -> Sequence[tuple[Forest, IntArray]]:
        """Cut a forest into micro-batches of at most `max_tokens` computed tokens, with the indices of their targets.

        A longer single path is a micro-batch alone.
        """

    def num_computed(self, forest: Forest) -> int:
        """Returns the number of tokens that a pass over this piece computes, with padding."""
        return forest.num_nodes

    def hidden(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """Returns hidden states [U, hidden] of the predicting positions, and each target's row [M] among them.

        Pieces must come in the order of `pieces`.
        """

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

    def _routing(self, choices: Choices | None, policy: Policy) -> AbstractContextManager[None]:
        """Context of a forward pass whose tokens have these routes [N, L, K]."""
        self.routes = None
        if choices is not None and self.repeats_routes and policy.info.routes is not None:
            self.routes = RoutePass(torch.from_numpy(choices).to(policy.device).long())
        return routing(self.routes)


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
        nodes = np.full((len(leaves), width), -1)
        for i, leaf in enumerate(leaves):
            path = _path(forest, leaf)
            nodes[i, : len(path)] = path
        tokens = np.where(nodes < 0, 0, forest.tokens[nodes])
        routes = None
        if forest.routes is not None:
            routes = forest.routes[nodes.ravel()]
            routes[nodes.ravel() < 0] = -1
        with self._routing(routes, self._policy):
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
    """Returns the nodes from the root to a leaf."""
    return np.append(ancestors(forest, leaf), leaf)


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
    `computed`, what this piece's own nodes carry. Both are empty if the piece is not kept.
    """

    num_cached: int
    is_kept: bool
    computed: Carried
    shared: Carried
    hidden: Tensor
    hidden_gradient: Tensor | None = None

    def backward(self) -> None:
        """Do the backward pass, from the hidden states and from the keys and values that other pieces used."""
        shared = [leaf.grad for leaf in self.shared.tensors()]
        found = [(self.hidden, self.hidden_gradient), *zip(self.computed.tensors(), shared, strict=True)]
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
        plan = forest_plan(forest, device, self._past(num_cached))
        with self._routing(forest.routes, self._policy):
            states = flat_forward(self._policy.decoder, _ids(forest.tokens, device), _ids(forest.depth, device), plan)
        hidden, rows = _predicting(states, forest.parent[forest.node])
        computed = plan.take_computed()
        computed = computed if is_kept else Carried()
        self._last = _ForwardPass(num_cached, is_kept, computed, computed.leaves(), hidden)
        if is_kept:
            self._kept.append(self._last)
        return hidden, rows

    def backward(self, hidden: Tensor, gradient: Tensor | None) -> None:
        """Do the backward pass of the last piece, or store its gradient if the piece is kept."""
        last, self._last = self._last, None
        assert last is not None and hidden is last.hidden, "backward must follow the forward pass of the same piece"
        last.hidden_gradient = gradient
        if not last.is_kept:
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

    def _past(self, num_cached: int) -> Carried:
        """Returns what the first `num_cached` nodes of the kept path carry: all but the last, which pieces repeat."""
        starts = [kept.num_cached for kept in self._kept if kept.num_cached < num_cached]
        counts = np.diff([*starts, num_cached]).tolist()
        owners = list(zip(self._kept, counts, strict=False))

        def joined(layer: int, which: int) -> Tensor:
            return torch.cat([kept.shared.keys[layer][which][:count] for kept, count in owners])

        keys = {layer: (joined(layer, 0), joined(layer, 1)) for layer in (owners[0][0].shared.keys if owners else ())}
        return Carried(keys, self._kept[-1].shared.states if self._kept else {})


# ---- distributions ---------------------------------------------------------------------------------------------------

HEAD_ROWS = 512
"""Number of distributions whose logits over the vocabulary exist at the same time."""
BIAS = 0.1
"""Size of the constant feature."""


class ValueModel:
    """Linear heads that predict values from a policy's last hidden states, and their optimiser.

        V(s) = w f(s) + BIAS b,  f(s) = h(s) / (|h(s)| sqrt(width))

    The absolute values of `f` add up to at most 1 for any model, so an Adam step moves a value by about the rate at
    most. All heads begin at 0: the first advantages are those of a value 0. Heads are float32, and float64 for a
    float64 policy. They are saved with the trainer's state of the policy. Shapes: U positions, K heads.

    Hidden states of a model share a large constant part (82 % of their norm in SmolLM2-135M). So the difference of two
    values moves about ten times more slowly than the values, which is why `ValueHeads.lr` is much larger than rates of
    other weights.
    """

    def __init__(self, heads: ValueHeads, policy: Policy) -> None:
        self.heads = heads
        dtype = torch.promote_types(policy.dtype, torch.float32)
        size = len(heads.names), int(policy.config.hidden_size) + 1
        self.weights = torch.zeros(size, dtype=dtype, device=policy.device, requires_grad=True)
        """Weights and bias [K, width + 1]."""
        self.num_batches = 0
        """Batches of the warm-up that were learned."""
        self._optimizer = torch.optim.AdamW([self.weights], lr=heads.lr, betas=(0.9, 0.99), weight_decay=0.0)

    def values(self, hidden: Tensor) -> dict[str, Tensor]:
        """Returns the values [U] of each head, from hidden states [U, width]. Gradients reach the body scaled."""
        if hidden.requires_grad:
            hidden = hidden * 1.0 if self.heads.body_coef else hidden.detach()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * self.heads.body_coef)  # type: ignore[no-untyped-call]
        wide = hidden.to(self.weights.dtype)
        features = torch.nn.functional.normalize(wide, dim=-1) / math.sqrt(wide.shape[-1])
        found = features @ self.weights[:, :-1].T + BIAS * self.weights[:, -1]
        return dict(zip(self.heads.names, found.unbind(-1), strict=True))

    @property
    def warms_up(self) -> bool:
        """True if only the heads learn from the next batch."""
        return self.num_batches < self.heads.warm_up

    @property
    def has_finite_gradient(self) -> bool:
        """True if the gradient is finite or missing."""
        return self.weights.grad is None or bool(self.weights.grad.isfinite().all())

    def step(self) -> None:
        """Apply the gradient, if there is one, and drop it."""
        self._optimizer.param_groups[0]["lr"] = self.heads.lr
        self._optimizer.step()
        self.drop_gradient()

    def drop_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Returns names, weights and moments. `restored` continues from them bit by bit."""
        return {
            "names": list(self.heads.names),
            "weights": self.weights.detach(),
            "num_batches": self.num_batches,
            "optimizer": self._optimizer.state_dict(),
        }

    @classmethod
    def restored(cls, state: dict[str, Any], policy: Policy) -> Self:
        """The inverse of `state`. The next batch brings the other parameters."""
        found = cls(ValueHeads(tuple(state["names"]), 0.0, 0.0), policy)
        with torch.no_grad():
            found.weights.copy_(state["weights"])
        found.num_batches = state.get("num_batches", 0)
        found._optimizer.load_state_dict(state["optimizer"])
        return found


EXCLUDED = -100.0
"""Log-probability in `top` of a token that the set of its target excludes. Its probability is 0 in float32."""


def chunks(
    policy: Policy, hidden: Tensor, rows: Tensor, forest: Forest, names: Sequence[str] = (), top_k: int = 0
) -> Iterator[tuple[IntArray, dict[str, Tensor]]]:
    """Yields some of the targets [T] and their numbers, from hidden states [U, hidden] and each target's row [M] among
    them. The numbers have gradient to the hidden states.

    `proximal` [T]: log-probabilities. By `names`, also `entropy` [T] of the distributions, and the log-probabilities
    `top` [T, K] of the tokens `top_ids`. With `top_k`, also the likeliest tokens `likely_ids` [T, top_k], and their
    log-probabilities `likely`. Targets of the same position, temperature and set share one distribution.
    """
    device = hidden.device
    for first, targets, owner in _distinct(forest, rows.cpu().numpy(), HEAD_ROWS):
        temperature = to_device(forest["temperature"][first], device)
        of, wanted = (torch.from_numpy(x).to(device) for x in (owner, forest.tokens[forest.node[targets]]))
        position = rows[torch.from_numpy(first).to(device)]
        logits = policy.head(hidden.index_select(0, position)) / temperature[:, None]  # at least float32
        outside = _outside(forest, first, logits.shape[-1])
        if outside is not None:
            outside = outside.to(device)
            assert not outside[of, wanted].any(), "a sampled token is not in its set"
            logits = logits.masked_fill(outside, -torch.inf)
        logps = logits.log_softmax(-1)
        own = {"proximal": logps[of, wanted]}
        if "entropy" in names:
            own["entropy"] = torch.special.entr(logps.exp()).sum(-1)[of]
        if "top" in names:
            ids = to_device(forest["top_ids"][targets], device).long()
            own["top"] = logps[of[:, None], ids].clamp(min=EXCLUDED)
        if top_k:
            likely, likely_ids = logps.topk(top_k, -1)
            own |= {"likely": likely.clamp(min=EXCLUDED)[of], "likely_ids": likely_ids[of]}
        yield targets, own
        PROGRESS.mark()


@torch.no_grad()
def measured(
    policy: Policy,
    own_pass: Pass,
    forest: Forest,
    names: Sequence[str],
    values: ValueModel | None = None,
    top_k: int = 0,
) -> dict[str, Tensor]:
    """Returns numbers of the targets under the present weights: those of `chunks`.

    Other names are those of value heads.
    """
    return numbers(policy, *own_pass.hidden(forest), forest, names, values, top_k)


@torch.no_grad()
def numbers(
    policy: Policy,
    hidden: Tensor,
    rows: Tensor,
    forest: Forest,
    names: Sequence[str],
    values: ValueModel | None = None,
    top_k: int = 0,
) -> dict[str, Tensor]:
    """Returns the same from hidden states and rows, as `Pass.hidden` gives them."""
    found = list(chunks(policy, hidden, rows, forest, names, top_k))
    if not found:
        return {name: torch.zeros(0, device=hidden.device) for name in names}
    order = torch.from_numpy(np.argsort(np.concatenate([targets for targets, _ in found]))).to(hidden.device)
    known = {name: torch.cat([own[name] for _, own in found])[order] for name in found[0][1]}
    if values is not None:
        known |= {name: value[rows] for name, value in values.values(hidden).items()}
    return {name: known[name] for name in names}


class Teacher:
    """A frozen model beside a policy, whose log-probabilities a recipe reads.

    The model of a folder, on the device and in the type of the policy. It is loaded with the first batch.
    """

    def __init__(self, folder: str, policy: Policy) -> None:
        """Raises `ConfigError` if the model cannot be loaded."""
        self.folder = folder
        settings = {"name": folder, "device": policy.device.type, "dtype": policy.info.dtype}
        self.policy = load_policy(ModelConfig.model_validate(settings))
        self.policy.model.requires_grad_(False)
        self.own_pass = pass_of(self.policy)
        self.own_pass.repeats_routes = False  # They are those of the learning policy.


def _distinct(
    forest: Forest, rows: NDArray[np.int64], count: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Yields the distinct distributions that predict the targets [M], `count` at a time.

    Each item is: one target of each distribution [D], all targets of them [T], and the distribution of each target [T].
    `rows` [M] are the targets' positions.
    """
    keys = np.stack([rows, forest["temperature"].view(np.int32), forest["support"]], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    for at in range(0, len(first), count):
        targets = order[slice(*np.searchsorted(inverse[order], [at, at + count]).tolist())]
        yield first[at : at + count], targets, inverse[targets] - at


def _outside(forest: Forest, first: NDArray[np.int64], vocabulary: int) -> Tensor | None:
    """Returns the tokens [D, V] outside the sets of D distributions, given by one target each; None without any."""
    numbers = forest["support"][first]
    if (numbers < 0).all():
        return None
    outside = np.zeros((len(first), vocabulary), bool)
    for number in np.unique(numbers[numbers >= 0]).tolist():
        outside[numbers == number] = ~decode_set(forest.sets[number], vocabulary)
    return torch.from_numpy(outside)


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


HEAD_POSITIONS = 128
"""Positions whose logits over the vocabulary exist at the same time."""


@torch.inference_mode()
def score(policy: Policy, tokens: NDArray[np.int32], num_likeliest: int) -> list[TokenScore]:
    """Returns T - 1 scores: of each token of `tokens` [T] except the first, given those before it, at temperature 1."""
    if len(tokens) == 1:
        return []
    hidden, _ = pass_of(policy).hidden(build_forest([Row(tokens, slice(1, None), {})]))
    targets = torch.from_numpy(tokens[1:].astype(np.int64)).to(policy.device)
    scores = []
    for start in range(0, len(targets), HEAD_POSITIONS):
        logprobs = policy.head(hidden[start : start + HEAD_POSITIONS]).float().log_softmax(-1)
        own = logprobs.gather(-1, targets[start : start + HEAD_POSITIONS, None])[:, 0].tolist()
        best, ids = logprobs.topk(min(num_likeliest, logprobs.shape[-1]), -1)
        for logprob, values, which in zip(own, best.tolist(), ids.tolist(), strict=True):
            scores.append(TokenScore(logprob, tuple(zip(which, values, strict=True))))
    return scores
