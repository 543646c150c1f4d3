"""The policy losses of the shelf, written out by hand: no code of `recipes/`.

`test_gradients` and `test_shelf_gradients` compare their gradients with those of the learner. Arguments: the
log-probabilities [M] of sampled tokens, with gradient; columns [M] of numbers, of which `logprob` is that at sampling,
`sequence` numbers the (episode, role), and `mean_log_ratio` is the mean of logp - logprob over the tokens of the
sequence, without gradient; the parameters of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Columns = Mapping[str, Tensor]
Formula = Callable[[Tensor, Columns, Any], Tensor]


def clip(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """PPO: -min(r A, clip(r) A), for negative advantages at most -c A (dual clip)."""
    advantage, ratio = columns["advantage"], (logp - columns["logprob"]).exp()
    loss = -torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - chosen.clip_low, 1 + chosen.clip_high))
    if chosen.dual_clip:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * chosen.dual_clip), loss)
    return loss


def gspo(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """PPO's loss of s = exp(mean log-ratio of the sequence), whose gradient is that of the token."""
    advantage, ratio = columns["advantage"], (columns["mean_log_ratio"] + logp - logp.detach()).exp()
    return -torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - chosen.clip_low, 1 + chosen.clip_high))


def cispo(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """-sg(clip(r)) A log p."""
    weight = (logp.detach() - columns["logprob"]).exp().clamp(1 - chosen.clip_low, 1 + chosen.clip_high)
    return -weight * columns["advantage"] * logp


def dro(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """-A log p + beta / 2 (log p - log q)^2."""
    return -columns["advantage"] * logp + chosen.beta / 2 * (logp - columns["logprob"]).square()


def awr(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """-min(exp(A / beta), cap) log p."""
    return -(columns["advantage"] / chosen.beta).exp().clamp(max=chosen.max_weight) * logp


def loop(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """PPO's loss with the bounds 1 / (1 + c) and 1 + c."""
    advantage, ratio = columns["advantage"], (logp - columns["logprob"]).exp()
    return -torch.minimum(advantage * ratio, advantage * ratio.clamp(1 / (1 + chosen.clip), 1 + chosen.clip))


def cross_entropy(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """-A log p."""
    return -columns["advantage"] * logp


FORMULAS: Mapping[str, Formula] = {
    "awr": awr,
    "cispo": cispo,
    "clip": clip,
    "dro": dro,
    "gspo": gspo,
    "loop": loop,
    "rft": cross_entropy,
}
"""By the name of the loss."""
