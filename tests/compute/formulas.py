"""The built-in policy losses, written out by hand: no code of `recipes/`.

`test_gradients` and `test_recipe_gradients` compare their gradients with those of the learner, and
`recipes/test_references` names the references that they equal. Arguments: the log-probabilities [M] of sampled tokens,
with gradient; columns [M] of numbers, of which `logprob` is that at sampling, `sequence` numbers the (episode, role),
and `mean_log_ratio` is the mean of logp - logprob over the tokens of the sequence, without gradient; the parameters of
the loss.
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


def gmpo(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """-A times the geometric mean of the ratios of the sequence, whose logarithms end at the bound."""
    advantage, ratio = columns["advantage"], logp - columns["logprob"]
    bounded = torch.where(advantage > 0, ratio.clamp(max=chosen.clip), ratio.clamp(min=-chosen.clip))
    mean = of_sequence(bounded, columns) / of_sequence(torch.ones_like(ratio), columns)
    return -advantage * mean.exp()


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


def aepo(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """PPO's loss with dual clip; above the upper bound and for A > 0 its gradient is that of the bound."""
    bound, ratio = 1 + chosen.clip_high, (logp - columns["logprob"]).exp()
    kept = -bound * columns["advantage"] * (1 + logp - logp.detach())
    return torch.where((columns["advantage"] > 0) & (ratio > bound), kept, clip(logp, columns, chosen))


def dppo(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """-sg(min(r, cap)) A log p, without tokens whose probability moved too far in the direction of A."""
    advantage, ratio = columns["advantage"], (logp.detach() - columns["logprob"]).exp()
    new, old = logp.detach().exp(), columns["logprob"].exp()
    moved = (new - old) * advantage.sign()
    if chosen.divergence == "kl":
        kl = old * (columns["logprob"] - logp.detach()) + (1 - old) * ((1 - old) / (1 - new)).log()
        moved = torch.where(moved > 0, kl, moved)
    bound = torch.where(advantage > 0, torch.tensor(chosen.clip_high), torch.tensor(chosen.clip_low))
    return torch.where(moved <= bound, -ratio.clamp(max=chosen.max_ratio) * advantage * logp, 0 * logp)


def covariance(logp: Tensor, columns: Columns) -> list[float]:
    """(A - mean) (log p - mean) of each token."""
    logs, advantages = logp.tolist(), columns["advantage"].tolist()
    means = sum(logs) / len(logs), sum(advantages) / len(logs)
    return [(a - means[1]) * (x - means[0]) for x, a in zip(logs, advantages, strict=True)]


def clip_cov(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """PPO's loss without some tokens of high covariance: at equal distances among those that are not clipped."""
    ratio, advantage = (logp - columns["logprob"]).exp().tolist(), columns["advantage"].tolist()
    is_clipped = [
        (a > 0 and r > 1 + chosen.clip_high) or (a < 0 and r < 1 - chosen.clip_low)
        for r, a in zip(ratio, advantage, strict=True)
    ]
    found = [
        token
        for token, value in enumerate(covariance(logp, columns))
        if chosen.lowest < value < chosen.highest and not is_clipped[token]
    ]
    number = min(len(found), max(1, int(chosen.share * len(logp))))
    left_out = {found[place * len(found) // number] for place in range(number)}
    kept = torch.tensor([float(token not in left_out) for token in range(len(logp))], dtype=logp.dtype)
    return clip(logp, columns, chosen) * kept


def kl_cov(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """-r A, and the absolute log-ratio of the tokens of the highest covariance."""
    values = covariance(logp, columns)
    highest = sorted(values)[-max(1, int(chosen.share * len(values)))]
    penalised = torch.tensor([float(value >= highest) for value in values], dtype=logp.dtype)
    gap = logp - columns["logprob"]
    return -gap.exp() * columns["advantage"] + chosen.coef * penalised * gap.abs()


def direct_advantage(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """(A / beta - log-ratio of the sequence)^2 / 2, shared by its tokens."""
    wanted = (columns["advantage"] / chosen.beta).clamp(-chosen.max_log_ratio, chosen.max_log_ratio)
    gap = wanted - of_sequence(logp - columns["logprob"], columns)
    return gap.square() / 2 / of_sequence(torch.ones_like(gap), columns)


def etr(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """PPO's loss with a bound per token."""
    advantage, ratio = columns["advantage"], (logp - columns["logprob"]).exp()
    bounded = torch.maximum(torch.minimum(ratio, 1 + columns["bound"]), 1 - columns["bound"])
    return -torch.minimum(advantage * ratio, advantage * bounded)


def hapo(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """PPO's loss with bounds c (1 - min(h, 0)) and c (1 + max(h, 0)), and A (1 + h) for certain tokens near ratio 1 and
    uncertain tokens far from it.
    """
    h, ratio = columns["relative_entropy"], (logp - columns["logprob"]).exp()
    low = chosen.clip * torch.where(h < 0, 1 - chosen.clip_alpha * h, torch.ones_like(h))
    high = chosen.clip * torch.where(h > 0, 1 + chosen.clip_alpha * h, torch.ones_like(h))
    is_near = (ratio > 1 - low / 2) & (ratio < 1 + high / 2)
    changes = torch.where(h > 0, ~is_near, is_near)
    advantage = columns["advantage"] * torch.where(changes, 1 + chosen.adv_beta * h, torch.ones_like(h))
    bounded = torch.maximum(torch.minimum(ratio, 1 + high), 1 - low)
    loss = -torch.minimum(advantage * ratio, advantage * bounded)
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * chosen.dual_clip), loss)


def oapl(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """(beta x log-ratio of the sequence - A)^2, shared by its tokens."""
    gap = chosen.beta * of_sequence(logp - columns["logprob"], columns) - columns["advantage"]
    return gap.square() / of_sequence(torch.ones_like(gap), columns)


def sapo(logp: Tensor, columns: Columns, chosen: Any) -> Tensor:
    """-A 4 / s sigmoid(s (r - 1)), s by the sign of A."""
    advantage, ratio = columns["advantage"], (logp - columns["logprob"]).exp()
    positive = -advantage * 4 / chosen.positive / (1 + (-chosen.positive * (ratio - 1)).exp())
    negative = -advantage * 4 / chosen.negative / (1 + (-chosen.negative * (ratio - 1)).exp())
    return torch.where(advantage > 0, positive, negative)


def of_sequence(values: Tensor, columns: Columns) -> Tensor:
    """Returns for each token the sum of the values of its sequence."""
    _, place = columns["sequence"].unique(return_inverse=True)
    return torch.zeros_like(values).index_add(0, place, values)[place]


FORMULAS: Mapping[str, Formula] = {
    "aepo": aepo,
    "awr": awr,
    "cispo": cispo,
    "clip": clip,
    "clip_cov": clip_cov,
    "direct_advantage": direct_advantage,
    "dppo": dppo,
    "dro": dro,
    "etr": etr,
    "gmpo": gmpo,
    "gspo": gspo,
    "gspo_token": gspo,
    "hapo": hapo,
    "kl_cov": kl_cov,
    "loop": loop,
    "oapl": oapl,
    "reinforce": cross_entropy,
    "rft": cross_entropy,
    "sapo": sapo,
}
"""By the name of the loss."""
