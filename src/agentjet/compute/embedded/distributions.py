"""The distributions that predict a forest's targets, of a policy and of a `Teacher`; and values beside them.

* Logits over the vocabulary exist only for positions that predict a target, `HEAD_ROWS` at a time.
* If a token was chosen from a set (a grammar, `top_p`, `top_k`), its distribution is restricted to that set. So are
  entropy and KL terms. A token without an alternative has log-probability 0 and no gradient, and counts.

Shapes: M targets, U positions that predict a target, D distributions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.passes import Pass, pass_of
from agentjet.compute.embedded.policy import Policy
from agentjet.config import ModelConfig
from agentjet.recipes.recipe import ValueHeads
from agentjet.timeline.forest import Forest, Row, build_forest, decode_set
from agentjet.types import TokenScore

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
    """

    def __init__(self, heads: ValueHeads, policy: Policy) -> None:
        self.heads = heads
        dtype = torch.promote_types(policy.dtype, torch.float32)
        size = len(heads.names), int(policy.config.hidden_size) + 1
        self.weights = torch.zeros(size, dtype=dtype, device=policy.device, requires_grad=True)
        """Weights and bias [K, width + 1]."""
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
            "optimizer": self._optimizer.state_dict(),
        }

    @classmethod
    def restored(cls, state: dict[str, Any], policy: Policy) -> Self:
        """The inverse of `state`. The next batch brings the other parameters."""
        found = cls(ValueHeads(tuple(state["names"]), 0.0, 0.0), policy)
        with torch.no_grad():
            found.weights.copy_(state["weights"])
        found._optimizer.load_state_dict(state["optimizer"])
        return found


class Chunk(NamedTuple):
    """Some of the targets [T]."""

    targets: NDArray[np.int64]
    """Their indices."""
    logp: Tensor
    """Their log-probabilities, with gradient to the hidden states."""
    entropy: Tensor
    """Entropies of their distributions; empty if not asked for."""


def chunks(policy: Policy, hidden: Tensor, rows: Tensor, forest: Forest, *, entropy: bool = False) -> Iterator[Chunk]:
    """Yields the targets in chunks, from hidden states [U, hidden] and each target's row [M] among them.

    Targets of the same position, temperature and set share one distribution.
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
        entropies = torch.special.entr(logps.exp()).sum(-1)[of] if entropy else logps.new_zeros(0)
        yield Chunk(targets, logps[of, wanted], entropies)


@torch.no_grad()
def measured(
    policy: Policy, own_pass: Pass, forest: Forest, names: Sequence[str], values: ValueModel | None = None
) -> dict[str, Tensor]:
    """Returns numbers [M] of the targets under the present weights: `proximal` are log-probabilities, `entropy`.

    Other names are those of value heads.
    """
    hidden, rows = own_pass.hidden(forest)
    found = list(chunks(policy, hidden, rows, forest, entropy="entropy" in names))
    if not found:
        return {name: torch.zeros(0, device=hidden.device) for name in names}
    order = torch.from_numpy(np.argsort(np.concatenate([chunk.targets for chunk in found]))).to(hidden.device)
    numbers = {
        "proximal": torch.cat([chunk.logp for chunk in found])[order],
        "entropy": torch.cat([chunk.entropy for chunk in found])[order] if "entropy" in names else hidden.new_zeros(0),
    }
    if values is not None:
        numbers |= {name: value[rows] for name, value in values.values(hidden).items()}
    return {name: numbers[name] for name in names}


class Teacher:
    """A frozen model beside a policy, whose log-probabilities a recipe reads.

    The model of a folder, on the device and in the type of the policy. It is loaded with the first batch.
    """

    def __init__(self, folder: str, policy: Policy) -> None:
        """Raises `ConfigError` if the model cannot be loaded."""
        self.folder = folder
        settings = {"name": folder, "device": policy.device.type, "dtype": policy.info.dtype}
        self._policy = load_policy(ModelConfig.model_validate(settings))
        self._policy.model.requires_grad_(False)
        self._pass = pass_of(self._policy)

    def logprobs(self, forest: Forest, max_tokens: int) -> NDArray[np.float32]:
        """Returns the log-probabilities [M] of the targets, over the sets and at the temperatures of sampling."""
        found = np.zeros(forest.num_targets, np.float32)
        for piece, targets in self._pass.pieces(forest, max_tokens):
            logp = measured(self._policy, self._pass, piece, ["proximal"])["proximal"]
            found[targets] = logp.float().cpu().numpy()
        return found


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
