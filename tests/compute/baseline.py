"""Gradients computed twice: by the learner, and independently of it.

The independent way computes one row per call through the model's own `eager` attention. Every formula is written out
in `formulas`, and autograd runs over the whole loss at once. It uses neither `recipes/` nor passes nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, Row, call_row, decode_set, encode_set
from tests.compute.conftest import tokens
from tests.compute.formulas import FORMULAS

Weights = dict[str, Tensor]


class Double(TorchFunctionMode):
    """Keeps float64 everywhere, also where models convert to float32 (norms, softmaxes).

    Rotary angles are computed in float32 from whole numbers, on both sides alike.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def in_double(policy: Policy) -> None:
    """Float64, with experts computed one by one, because the grouped kernel does not support float64."""
    policy.model.double()
    policy.config._experts_implementation = "eager"


def policy_gradient(parameters: Mapping[str, object] | None = None) -> PolicyGradient:
    """GRPO with other parameters."""
    recipe = make_recipe(parameters or {})
    assert isinstance(recipe, PolicyGradient)
    return recipe


def learner_gradient(
    policy: Policy, forest: Forest, recipe: PolicyGradient, reference: Weights, micro_batch_tokens: int = 100_000
) -> Tensor:
    """The flat gradient of one mini-batch, as the learner computes it."""
    learner = PolicyLearner(policy)
    learner._reference = reference
    loss = LossSpec.of(JobConfig(recipe=recipe, micro_batch_tokens=micro_batch_tokens))
    learner.forward_backward(TrainingBatch(0, forest), loss)
    gradient = _flat(torch.zeros_like(m) if m.grad is None else m.grad for m in learner.masters())
    learner._optimizer.zero_grad()
    return gradient


class Baseline:
    """The same mini-batch, one row per call; `together` in one padded batch, as trainers do.

    The log-probabilities and their graph are computed once, for any number of recipes.
    """

    def __init__(self, policy: Policy, rows: Sequence[Row], reference: Weights, *, together: bool = False) -> None:
        self._parameters = list(policy.trainable().values())
        self._rows = rows

        def logprobs(weights: Weights | None) -> list[Tensor]:
            if together:
                return batch_logprobs(policy, rows, weights)
            return [row_logprobs(policy, row, weights) for row in rows]

        self._logps = logprobs(None)
        self.logprobs = torch.cat(self._logps).detach()
        """Of all targets, in the order of the forest of these rows."""
        with torch.no_grad():
            self._references = logprobs(reference)

    def gradient(self, recipe: PolicyGradient) -> Tensor:
        """The flat gradient of the whole loss."""
        weights = _weights(self._rows, recipe)
        total = torch.zeros((), dtype=self._logps[0].dtype)
        for row, logp, reference in zip(self._rows, self._logps, self._references, strict=True):
            columns = {
                "logprob": torch.from_numpy(row["logprob"]),
                "advantage": torch.full_like(logp, row["advantage"], requires_grad=False),
                "mean_log_ratio": self._sequence_mean(row["sequence"]),
            }
            loss = FORMULAS[recipe.loss.name](logp, columns, recipe.loss)
            if recipe.kl_coef:
                gap = reference - logp
                loss = loss + recipe.kl_coef * (gap.exp() - gap - 1)
            total = total + weights[row["sequence"]] * loss.sum()
        return _flat(torch.autograd.grad(total, self._parameters, retain_graph=True, materialize_grads=True))

    def _sequence_mean(self, sequence: int) -> Tensor:
        """Returns the mean log-ratio of all tokens of a sequence, over all its calls."""
        ratios = [
            logp.detach() - torch.from_numpy(row["logprob"])
            for row, logp in zip(self._rows, self._logps, strict=True)
            if row["sequence"] == sequence
        ]
        return torch.cat(ratios).mean()


def row_logprobs(policy: Policy, row: Row, weights: Weights | None = None) -> Tensor:
    """Log-probabilities of a call's completion by `transformers` alone, with its plain attention."""
    ids = torch.from_numpy(row.tokens.astype(np.int64))
    with policy.attention("eager"):
        logits = _logits(policy, ids[None], weights)[0]
    return _of_completion(logits, row)


def row_distributions(policy: Policy, row: Row, weights: Weights | None = None) -> Tensor:
    """Log-probabilities of all tokens at each place of a call's completion, over the whole vocabulary."""
    ids = torch.from_numpy(row.tokens.astype(np.int64))
    with policy.attention("eager"):
        logits = _logits(policy, ids[None], weights)[0]
    first = len(row.tokens) - len(row["logprob"])
    return (logits[first - 1 : -1] / float(np.float32(row["temperature"]))).log_softmax(-1)


def row_entropies(policy: Policy, row: Row) -> Tensor:
    """Entropies of the distributions of a call's completion, over the whole vocabulary."""
    logps = row_distributions(policy, row)
    return -(logps.exp() * logps).sum(-1)


def batch_logprobs(policy: Policy, rows: Sequence[Row], weights: Weights | None = None) -> list[Tensor]:
    """Returns the same for all calls as one batch, padded on the right, by the attention of a loaded model."""
    ids = torch.zeros(len(rows), max(len(row.tokens) for row in rows), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.from_numpy(row.tokens)
    with policy.attention(policy.own_attention):
        logits = _logits(policy, ids, weights)
    return [_of_completion(logits[i, : len(row.tokens)], row) for i, row in enumerate(rows)]


def _logits(policy: Policy, ids: Tensor, weights: Weights | None) -> Tensor:
    """Returns logits of `transformers` without a cache, optionally with other weights."""
    arguments = {"input_ids": ids, "use_cache": False}
    model = cast(Any, policy.model)
    out = model(**arguments) if weights is None else torch.func.functional_call(model, weights, (), arguments)
    logits: Tensor = out.logits
    return logits


def _of_completion(logits: Tensor, row: Row) -> Tensor:
    """Returns the log-probability of each sampled token, over the tokens of its set."""
    first = len(row.tokens) - len(row["logprob"])
    tempered = logits[first - 1 : -1] / float(np.float32(row["temperature"]))
    sampled = row.tokens[first:].tolist()
    if not row.support:
        return tempered.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]
    logps = []
    for line, token, encoded in zip(tempered, sampled, row.support, strict=True):
        ids = np.flatnonzero(decode_set(encoded, len(line))).tolist()
        logps.append(line[ids].log_softmax(-1)[ids.index(token)])
    return torch.stack(logps)


def _weights(rows: Sequence[Row], recipe: PolicyGradient) -> dict[int, float]:
    """Weight of every token of a sequence, rounded as weights are stored."""
    sizes: dict[int, int] = {}
    for row in rows:
        sizes[row["sequence"]] = sizes.get(row["sequence"], 0) + len(row["logprob"])
    exact = {
        "token_mean": {s: 1 / sum(sizes.values()) for s in sizes},
        "sequence_mean": {s: 1 / (n * len(sizes)) for s, n in sizes.items()},
        "constant": {s: 1 / (max(recipe.constant, 1) * len(sizes)) for s in sizes},
    }[recipe.loss.aggregation if recipe.aggregation == "auto" else recipe.aggregation]
    return {s: float(np.float32(w)) for s, w in exact.items()}


def _flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def another_reference(policy: Policy) -> Weights:
    """Weights for the KL term that differ from the policy's own."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: (p.detach() + 0.02 * torch.randn(p.shape, generator=generator)).to(p.dtype)
        for name, p in policy.trainable().items()
    }


def relative(ours: Tensor, baseline: Tensor) -> float:
    return float((ours.double() - baseline.double()).norm() / baseline.double().norm())


def episodes(policy: Policy, *, temperature: float = 0.9, seed: int = 0, restricted: bool = False) -> list[Row]:
    """Calls of two groups of three episodes, two roles, two turns: shared prompts, edited histories, and duplicates.

    `restricted` lets two calls in three choose some of their tokens among sets, of one token, few, or nearly all.
    Old log-probabilities are the policy's own with noise, so that every clip has tokens on both of its sides.
    """
    rng = np.random.default_rng(seed)
    system = tokens(99, 6)
    rows: list[Row] = []

    def call(prompt: np.ndarray, completion: np.ndarray, sequence: int) -> np.ndarray:
        full = np.concatenate([prompt, completion])
        support = _sets(completion, policy.vocabulary, rng) if restricted and len(rows) % 3 else ()
        nothing = np.zeros(len(completion), np.float32)
        blank = call_row(full, nothing, np.zeros(0, np.int32), 0.0, temperature, sequence, support)
        with torch.no_grad():
            old = row_logprobs(policy, blank).double().numpy() + 0.3 * rng.normal(size=len(completion))
        versions = np.zeros(len(completion), np.int32)
        rows.append(
            call_row(full, old.astype(np.float32), versions, advantages[sequence], temperature, sequence, support)
        )
        return full

    advantages = [float(np.float32(a)) for a in rng.normal(size=12)]
    for group in range(2):
        prompt = np.concatenate([system, tokens(group, 7 + group)])
        for repeat in range(3):
            number = 3 * group + repeat
            # The first two repeats sample the same first turn: two targets on each of its nodes.
            first = call(prompt, tokens(100 + group + 10 * (repeat // 2), 5), number)
            edited = np.delete(first, slice(len(prompt), len(prompt) + 2)) if repeat == 2 else first
            call(np.concatenate([edited, tokens(300 + number, 4)]), tokens(400 + number, 5 + repeat), number)
            call(np.concatenate([system, tokens(500 + group, 9)]), tokens(600 + number, 4), 6 + number)
    return rows


def _sets(completion: np.ndarray, vocabulary: int, rng: np.random.Generator) -> tuple[bytes, ...]:
    """A set for each token: in turns itself alone, few, nearly all, and all tokens."""
    sets = []
    for i, token in enumerate(completion.tolist()):
        members = rng.random(vocabulary) < (0.0, 0.05, 0.9, 1.0)[i % 4]
        members[token] = True
        sets.append(encode_set(members))
    return tuple(sets)
