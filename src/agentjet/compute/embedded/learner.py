"""Learning on a forest: log-probabilities of the targets, the loss, one optimiser step a mini-batch.

* bfloat16 weights have masters and moments in float32.
* Logits over the vocabulary exist only for positions that predict a target, `HEAD_ROWS` at a time.
* If a token was chosen from a set (a grammar, `top_p`, `top_k`), all its distributions are restricted to that set: the
  learning policy's, the old policy's and the reference's. So are entropy and KL terms. A token without an alternative
  has log-probability 0 and no gradient, and counts.
* Deterministic: equal weights, optimiser state and batch give equal weights, bit by bit, on one number of threads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.passes import pass_of
from agentjet.compute.embedded.policy import Policy
from agentjet.config import AlgorithmConfig, JobConfig, OptimizerConfig
from agentjet.recipes.losses import correction_weights, kl_k3, policy_loss, weights
from agentjet.timeline.forest import Forest, select
from agentjet.timeline.support import decode_set

HEAD_ROWS = 512
"""Number of distributions whose logits over the vocabulary exist at the same time."""
MISMATCH = "policy/mismatch_kl"


@dataclass(slots=True)
class _Part:
    """One micro-batch: a piece of the mini-batch's forest, and the loss inputs of its targets [M]."""

    forest: Forest
    weight: NDArray[np.float32]
    sequence_log_ratio: NDArray[np.float64] | None = None
    reference: Tensor | None = None


class PolicyLearner:
    """Owns the masters and the optimiser of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._pass = pass_of(policy)
        self._params = policy.trainable()
        self._masters = {
            name: p.detach().float().requires_grad_() if p.dtype == torch.bfloat16 else p
            for name, p in self._params.items()
        }
        self._optimizer = torch.optim.AdamW(self.masters(), lr=0.0, fused=True)
        self._reference: dict[str, Tensor] | None = None

    def learn(self, forest: Forest, job: JobConfig, version: int) -> dict[str, float]:
        """Learn one batch with `epochs` x `mini_batches` optimiser steps; returns metrics.

        `version` is the policy version before the batch.
        """
        algorithm = job.algorithm
        self._configure(job.optimizer, version)
        measured: dict[str, float] = {}
        if forest.num_targets:  # unbiased, over every sampled token, without a forward pass
            measured["policy/entropy"] = -float(forest.logprob.mean(dtype=np.float64))
        if algorithm.correction != "none" and forest.num_targets:
            forest, corrected = self._corrected(forest, job)
            measured |= corrected
        totals = _Totals()
        num_steps = 0
        for epoch in range(algorithm.epochs):
            for mini_batch in self._mini_batches(forest, algorithm, seed=(job.seed, version, epoch)):
                self._step(mini_batch, job, totals)
                num_steps += 1
        return {
            **totals.metrics(),
            **measured,
            "forest/tokens_computed": float(totals.num_computed),
            "optim/lr": self._optimizer.param_groups[0]["lr"],
            "optim/steps": float(num_steps),
            "weights/finite": float(math.isfinite(torch.nn.utils.get_total_norm(self.masters()))),
        }

    def _corrected(self, forest: Forest, job: JobConfig) -> tuple[Forest, dict[str, float]]:
        """Replace the old log-probabilities by those of the present weights; scale advantages by the correction.

        Every loss is linear in the advantage.
        """
        proximal = np.zeros(forest.num_targets, np.float32)
        for piece, targets in self._pass.pieces(forest, job.micro_batch_tokens):
            proximal[targets] = self.logprobs(piece).float().cpu().numpy()
        weight, counts = correction_weights(proximal, forest.logprob, job.algorithm)
        mismatch = kl_k3(torch.from_numpy(forest.logprob.copy()), torch.from_numpy(proximal)).mean()
        metrics = {
            MISMATCH: float(mismatch),
            "policy/correction_mean": float(weight.mean()),
            "policy/correction_dropped": float((weight == 0).mean()),
        }
        corrected = replace(forest, logprob=proximal, advantage=forest.advantage * weight)
        return corrected if counts.all() else select(corrected, counts), metrics

    def _mini_batches(self, forest: Forest, algorithm: AlgorithmConfig, seed: tuple[int, ...]) -> Iterator[Forest]:
        """Yields random groups of whole sequences, one for each optimiser step."""
        count = min(algorithm.mini_batches, forest.num_sequences)
        if count <= 1:
            yield forest
            return
        sequences = np.unique(forest.sequence)
        np.random.default_rng([abs(s) for s in seed]).shuffle(sequences)
        for chosen in np.array_split(sequences, count):
            yield select(forest, np.isin(forest.sequence, chosen))

    def _step(self, forest: Forest, job: JobConfig, totals: _Totals) -> None:
        algorithm = job.algorithm
        parts = self._parts(forest, job)
        if algorithm.loss == "gspo":
            self._add_sequence_ratios(parts)
        if algorithm.kl_coef:
            for part in parts:
                part.reference = self._reference_logprobs(part.forest)
        totals.begin_step(forest, parts)
        for part in parts:
            self._accumulate(part, algorithm, totals)
        self._pass.finish()
        self._gather_gradients()
        totals.num_computed += sum(self._pass.num_computed(part.forest) for part in parts)
        totals.grad_norms.append(self._apply(job.optimizer))

    def _parts(self, forest: Forest, job: JobConfig) -> list[_Part]:
        """Returns micro-batches within the token budget, each token with its weight in the mini-batch's loss.

        Without a KL term, a token with advantage 0 adds nothing to the loss and is not computed. Weights still count
        every token. GSPO's sequence means need every token of a sequence that has any advantage.
        """
        matters = np.full(forest.num_targets, True) if job.algorithm.kl_coef else forest.advantage != 0
        if job.algorithm.loss == "gspo":
            matters = np.isin(forest.sequence, forest.sequence[matters])
        if not matters.any():
            return []
        weight = weights(forest.sequence, forest.num_sequences, job.algorithm)[matters]
        forest = select(forest, matters)
        return [_Part(piece, weight[targets]) for piece, targets in self._pass.pieces(forest, job.micro_batch_tokens)]

    def _add_sequence_ratios(self, parts: list[_Part]) -> None:
        """Set GSPO's sequence means of logp - old, over the tokens of all micro-batches."""
        sums: Counter[int] = Counter()
        counts: Counter[int] = Counter()
        for part in parts:
            ratios = self.logprobs(part.forest).double().cpu().numpy() - part.forest.logprob
            for sequence, ratio in zip(part.forest.sequence.tolist(), ratios.tolist(), strict=True):
                sums[sequence] += ratio
                counts[sequence] += 1
        for part in parts:
            means = [sums[sequence] / counts[sequence] for sequence in part.forest.sequence.tolist()]
            part.sequence_log_ratio = np.array(means)

    def logprobs(self, forest: Forest) -> Tensor:
        """Returns the log-probabilities [M] of the forest's targets, without gradient."""
        with torch.no_grad():
            hidden, positions = self._pass.hidden(forest)
            chunks = [(targets, logp) for targets, logp in self._heads(hidden, positions, forest)]
            if not chunks:
                return hidden.new_zeros(0)
            order = torch.from_numpy(np.concatenate([targets for targets, _ in chunks])).to(hidden.device)
            found = torch.cat([logp for _, logp in chunks])
            return torch.empty_like(found).index_copy_(0, order, found)

    def _reference_logprobs(self, forest: Forest) -> Tensor:
        if self.policy.has_adapters:
            with self.policy.adapters_off():
                return self.logprobs(forest)
        if self._reference is None:
            self._reference = self.policy.original_weights()
        swapped = {name: p.data for name, p in self._params.items()}
        for name, p in self._params.items():
            p.data = self._reference[name]
        try:
            return self.logprobs(forest)
        finally:
            for name, p in self._params.items():
                p.data = swapped[name]

    def _heads(self, hidden: Tensor, rows: Tensor, forest: Forest) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Yields the indices and log-probabilities of chunks of targets, with gradient to `hidden`.

        Targets of the same position, temperature and set share one distribution.
        """
        device = hidden.device
        for first, targets, owner in _distributions(forest, rows.cpu().numpy(), HEAD_ROWS):
            temperature = _to(forest.temperature[first], device)
            of, wanted = (torch.from_numpy(x).to(device) for x in (owner, forest.tokens[forest.node[targets]]))
            position = rows[torch.from_numpy(first).to(device)]
            logits = self.policy.head(hidden.index_select(0, position)) / temperature[:, None]  # at least float32
            outside = _outside(forest, first, logits.shape[-1])
            if outside is not None:
                outside = outside.to(device)
                assert not outside[of, wanted].any(), "a sampled token is not in its set"
                logits = logits.masked_fill(outside, -torch.inf)
            yield targets, logits.log_softmax(-1)[of, wanted]

    def _accumulate(self, part: _Part, algorithm: AlgorithmConfig, totals: _Totals) -> None:
        """Forward, loss and backward of one micro-batch. The pass may postpone a part of the backward."""
        forest, device = part.forest, self.policy.device
        hidden, rows = self._pass.hidden(forest)
        cut = hidden.detach().requires_grad_()
        # The head's graph lives for one chunk only. The body's backward runs once, from the summed gradient.
        for chunk, logp in self._heads(cut, rows, forest):
            old = _to(forest.logprob[chunk], device)
            advantage = _to(forest.advantage[chunk], device)
            mean_ratio = None
            if part.sequence_log_ratio is not None:
                mean_ratio = _to(part.sequence_log_ratio[chunk], device).to(logp.dtype)
            loss, clipped = policy_loss(logp, old, mean_ratio, advantage, algorithm)
            if part.reference is not None:
                kl = kl_k3(logp, part.reference[torch.from_numpy(chunk).to(device)])
                loss = loss + algorithm.kl_coef * kl
                totals.add("policy/kl", kl)
            (loss * _to(part.weight[chunk], device)).sum().backward()  # type: ignore[no-untyped-call]
            totals.add("policy/clip_fraction", clipped)
            totals.add_mismatch(old, logp)
        self._pass.backward(hidden, cut.grad)
        self._gather_gradients()

    def _gather_gradients(self) -> None:
        """Move the weights' gradients to the masters, in float32."""
        for name, p in self._params.items():
            master = self._masters[name]
            if p.grad is None or master is p:
                continue
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

    def _apply(self, optimizer: OptimizerConfig) -> float:
        """Clip, step, copy the masters into the weights; returns the gradient norm before clipping.

        A norm that is not finite skips the step. The metrics show that.
        """
        masters = self.masters()
        limit = optimizer.max_grad_norm or math.inf
        for master in masters:  # without any gradient the step still applies momentum, as with zeros
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        norm = float(torch.nn.utils.clip_grad_norm_(masters, limit))
        if math.isfinite(norm):
            self._optimizer.step()
            with torch.no_grad():
                for name, p in self._params.items():
                    if self._masters[name] is not p:
                        p.copy_(self._masters[name])
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _configure(self, optimizer: OptimizerConfig, version: int) -> None:
        for group in self._optimizer.param_groups:
            group.update(
                lr=learning_rate(optimizer, version),
                betas=(optimizer.beta1, optimizer.beta2),
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
            )

    def masters(self) -> list[Tensor]:
        """Returns the tensors that the optimiser changes: for float32 policies the weights themselves."""
        return list(self._masters.values())

    def state(self) -> dict[str, Any]:
        """Returns masters and moments as tensors. `restore` continues from them bit by bit."""
        return {
            "masters": {name: m.detach() for name, m in self._masters.items()},
            "optimizer": self._optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["masters"][name])
                self._params[name].copy_(master)
        self._optimizer.load_state_dict(state["optimizer"])


def learning_rate(optimizer: OptimizerConfig, version: int) -> float:
    """Returns the rate of the batch at `version`: linear warm-up, then constant, linear or cosine decay."""
    if version < optimizer.warmup_steps:
        return optimizer.lr * (version + 1) / (optimizer.warmup_steps + 1)
    if optimizer.schedule == "constant":
        return optimizer.lr
    progress = min(1.0, (version - optimizer.warmup_steps) / (optimizer.total_steps - optimizer.warmup_steps))
    shape = 1 - progress if optimizer.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.lr * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * shape)


class _Totals:
    """Sums of per-token metrics over a batch, reported as means over tokens and optimiser steps.

    The means are over every sampled token of a mini-batch. A skipped token has advantage 0 and is never clipped. With a
    KL term no token is skipped. The mismatch needs log-probabilities, so its mean is over computed tokens only.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._sampled = 0
        self._computed = 0
        self.grad_norms: list[float] = []
        self.num_computed = 0

    def begin_step(self, forest: Forest, parts: Sequence[_Part]) -> None:
        """Start an optimiser step with its mini-batch and the computed parts of it."""
        self._sampled = forest.num_targets
        self._computed = sum(part.forest.num_targets for part in parts)
        if self._sampled:
            self._sums.setdefault("policy/clip_fraction", 0.0)

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.detach().sum()) / self._sampled

    def add_mismatch(self, old: Tensor, logp: Tensor) -> None:
        """Compare the sampler with the learner, before the first optimiser step: only then their weights are equal."""
        if not self.grad_norms:
            total = float(kl_k3(old, logp.detach()).sum()) / self._computed
            self._sums[MISMATCH] = self._sums.get(MISMATCH, 0.0) + total

    def metrics(self) -> dict[str, float]:
        steps = max(1, len(self.grad_norms))
        means = {name: total if name == MISMATCH else total / steps for name, total in self._sums.items()}
        finite = [norm for norm in self.grad_norms if math.isfinite(norm)]
        return {
            **means,
            "optim/grad_norm": sum(finite) / max(1, len(finite)),
            "optim/skipped_steps": float(len(self.grad_norms) - len(finite)),
        }


def _distributions(
    forest: Forest, rows: NDArray[np.int64], count: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Yields the distinct distributions that predict the targets [M], `count` at a time.

    Each item is: one target of each distribution [D], all targets of them [T], and the distribution of each target [T].
    `rows` [M] are the targets' positions.
    """
    keys = np.stack([rows, forest.temperature.view(np.int32), forest.support], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    for at in range(0, len(first), count):
        targets = order[slice(*np.searchsorted(inverse[order], [at, at + count]).tolist())]
        yield first[at : at + count], targets, inverse[targets] - at


def _outside(forest: Forest, first: NDArray[np.int64], vocabulary: int) -> Tensor | None:
    """Returns the tokens [D, V] outside the sets of D distributions, given by one target each; None without any."""
    numbers = forest.support[first]
    if (numbers < 0).all():
        return None
    outside = np.zeros((len(first), vocabulary), bool)
    for number in np.unique(numbers[numbers >= 0]).tolist():
        outside[numbers == number] = ~decode_set(forest.sets[number], vocabulary)
    return torch.from_numpy(outside)


def _to(values: NDArray[np.floating[Any]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
