"""The distributions that predict a forest's targets: log-probabilities, entropies; of a policy, and of a `Teacher`.

* Logits over the vocabulary exist only for positions that predict a target, `HEAD_ROWS` at a time.
* If a token was chosen from a set (a grammar, `top_p`, `top_k`), its distribution is restricted to that set. So are
  entropy and KL terms. A token without an alternative has log-probability 0 and no gradient, and counts.

Shapes: M targets, U positions that predict a target, D distributions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.passes import Pass, pass_of
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.value_model import ValueModel
from agentjet.config import ModelConfig
from agentjet.timeline.forest import Forest
from agentjet.timeline.support import decode_set

HEAD_ROWS = 512
"""Number of distributions whose logits over the vocabulary exist at the same time."""


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
