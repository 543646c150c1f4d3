"""Learning on a forest: log-probabilities of the targets, gradients of a loss, optimiser steps.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.passes import pass_of
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.protocol import LossSpec, Outputs, StepMetrics, merged_metrics
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.errors import ComputeError
from agentjet.recipes.losses import kl_k3
from agentjet.recipes.recipe import MISMATCH, Recipe, recipe_of
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, select
from agentjet.timeline.support import decode_set

HEAD_ROWS = 512
"""Number of distributions whose logits over the vocabulary exist at the same time."""


@dataclass(slots=True)
class _MicroBatch:
    """A piece of a mini-batch's forest, the weights [M] of its targets, and computed columns [M] of the loss."""

    forest: Forest
    weight: NDArray[np.float32]
    computed: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PreparedBatch:
    """A batch with its columns, as the first `forward_backward` on it made it."""

    batch_id: int
    loss: LossSpec
    forest: Forest
    metrics: Mapping[str, float]

    @property
    def steps_per_epoch(self) -> int:
        return max(1, min(self.loss.algorithm.mini_batches, self.forest.num_sequences))

    @property
    def num_steps(self) -> int:
        return self.loss.algorithm.epochs * self.steps_per_epoch

    def mini_batch(self, step: int) -> Forest:
        """Returns the whole sequences of one optimiser step. Each epoch deals them at random."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self.steps_per_epoch == 1:
            return self.forest
        sequences = np.unique(self.forest["sequence"])
        np.random.default_rng([abs(s) for s in (self.loss.seed, self.batch_id, epoch)]).shuffle(sequences)
        chosen = np.array_split(sequences, self.steps_per_epoch)[number]
        return select(self.forest, np.isin(self.forest["sequence"], chosen))


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
        self._prepared: _PreparedBatch | None = None
        """The batch between its first and its last step."""

    def forward_backward(self, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        """Add the gradient of one mini-batch to the accumulated gradient; returns its metrics.

        Raises `ComputeError` if a later step of a batch comes without its first step.
        """
        recipe = recipe_of(loss.algorithm)
        if loss.step == 0:
            self._prepared = self._prepare(batch, loss, recipe)
        prepared = self._prepared
        if prepared is None or (prepared.batch_id, prepared.loss) != (batch.id, replace(loss, step=0)):
            raise ComputeError(f"step {loss.step} of batch {batch.id} came without step 0 of the same batch and loss")
        if loss.step >= prepared.num_steps:
            raise ComputeError(f"step {loss.step} of batch {batch.id} is not one of its {prepared.num_steps} steps")
        if loss.step == prepared.num_steps - 1:
            self._prepared = None
        metrics = self._add_gradient(prepared.mini_batch(loss.step), recipe, loss)
        if loss.step == 0:
            metrics |= prepared.metrics
        else:  # Only before the first optimiser step the learner has the weights that sampled.
            metrics.pop(MISMATCH, None)
        return Outputs(metrics, num_steps=prepared.num_steps)

    def optim_step(self, optimizer: OptimizerConfig, version: int) -> dict[str, float]:
        """Apply the accumulated gradient; returns metrics. `version` is the policy version, for the schedule."""
        self._configure(optimizer, version)
        norm = self._apply(optimizer)
        return {
            "optim/grad_norm": norm,
            "optim/skipped_steps": float(not math.isfinite(norm)),
            "optim/lr": self._optimizer.param_groups[0]["lr"],
            "optim/steps": 1.0,
            "weights/finite": float(math.isfinite(torch.nn.utils.get_total_norm(self.masters()))),
        }

    @property
    def has_gradient(self) -> bool:
        """True between a `forward_backward` and the next `optim_step`."""
        return any(master.grad is not None for master in self.masters())

    def learn(self, forest: Forest, job: JobConfig, version: int, facts: Facts | None = None) -> dict[str, float]:
        """Train on a batch; returns metrics. The same steps as `protocol.learn`, without a worker process."""
        batch, num_steps = TrainingBatch(version, forest, facts), 1
        steps: list[StepMetrics] = []
        while len(steps) < num_steps:
            outputs = self.forward_backward(batch, LossSpec.of(job, len(steps)))
            steps.append((outputs.metrics, self.optim_step(job.optimizer, version)))
            num_steps = outputs.num_steps
        return merged_metrics(steps)

    def _prepare(self, batch: TrainingBatch, loss: LossSpec, recipe: Recipe) -> _PreparedBatch:
        missing = recipe.required(batch) - batch.forest.targets.keys()
        if missing:
            raise ComputeError(f"batch {batch.id} lacks the columns {', '.join(sorted(missing))}, which its loss needs")
        outputs = {}
        if "logprob" in recipe.needs and batch.forest.num_targets:
            outputs["logprob"] = self.batch_logprobs(batch.forest, loss.micro_batch_tokens)
        columns = recipe.columns(batch, outputs)
        forest = batch.forest.with_columns(**columns.values)
        if columns.counts is not None and not columns.counts.all():
            forest = select(forest, columns.counts)
        return _PreparedBatch(batch.id, loss, forest, columns.metrics)

    def _add_gradient(self, forest: Forest, recipe: Recipe, loss: LossSpec) -> dict[str, float]:
        micro_batches = self._micro_batches(forest, recipe, loss.micro_batch_tokens)
        if "sequence_log_ratio" in recipe.reads:
            self._compute_sequence_ratios(micro_batches)
        if "reference" in recipe.needs:
            for micro_batch in micro_batches:
                micro_batch.computed["reference"] = self._reference_logprobs(micro_batch.forest)
        means = _TokenMeans(forest, micro_batches)
        for micro_batch in micro_batches:
            self._accumulate(micro_batch, recipe, means)
        self._pass.finish()
        self._gather_gradients()
        num_computed = sum(self._pass.num_computed(micro_batch.forest) for micro_batch in micro_batches)
        return {**means.values, "forest/tokens_computed": float(num_computed)}

    def _micro_batches(self, forest: Forest, recipe: Recipe, max_tokens: int) -> list[_MicroBatch]:
        """Returns the targets that contribute to the loss in micro-batches, with weights that count every target."""
        contributing = recipe.contributing(forest)
        if not contributing.any():
            return []
        weight = recipe.weights(forest)[contributing]
        pieces = self._pass.pieces(select(forest, contributing), max_tokens)
        return [_MicroBatch(piece, weight[targets]) for piece, targets in pieces]

    def _compute_sequence_ratios(self, micro_batches: list[_MicroBatch]) -> None:
        """Compute the sequence means of logp - old, over the tokens of all micro-batches."""
        sums: Counter[int] = Counter()
        counts: Counter[int] = Counter()
        for micro_batch in micro_batches:
            forest = micro_batch.forest
            ratios = self.logprobs(forest).double().cpu().numpy() - forest["logprob"]
            for sequence, ratio in zip(forest["sequence"].tolist(), ratios.tolist(), strict=True):
                sums[sequence] += ratio
                counts[sequence] += 1
        for micro_batch in micro_batches:
            means = [sums[sequence] / counts[sequence] for sequence in micro_batch.forest["sequence"].tolist()]
            micro_batch.computed["sequence_log_ratio"] = _to(np.array(means), self.policy.device)

    def batch_logprobs(self, forest: Forest, max_tokens: int, *, reference: bool = False) -> NDArray[np.float32]:
        """Returns the log-probabilities [M] of the targets of a whole batch, micro-batch by micro-batch."""
        compute = self._reference_logprobs if reference else self.logprobs
        found = np.zeros(forest.num_targets, np.float32)
        for piece, targets in self._pass.pieces(forest, max_tokens):
            found[targets] = compute(piece).float().cpu().numpy()
        return found

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
            temperature = _to(forest["temperature"][first], device)
            of, wanted = (torch.from_numpy(x).to(device) for x in (owner, forest.tokens[forest.node[targets]]))
            position = rows[torch.from_numpy(first).to(device)]
            logits = self.policy.head(hidden.index_select(0, position)) / temperature[:, None]  # at least float32
            outside = _outside(forest, first, logits.shape[-1])
            if outside is not None:
                outside = outside.to(device)
                assert not outside[of, wanted].any(), "a sampled token is not in its set"
                logits = logits.masked_fill(outside, -torch.inf)
            yield targets, logits.log_softmax(-1)[of, wanted]

    def _accumulate(self, micro_batch: _MicroBatch, recipe: Recipe, means: _TokenMeans) -> None:
        """Forward, loss and backward of one micro-batch. The pass may postpone a part of the backward."""
        forest, device = micro_batch.forest, self.policy.device
        hidden, rows = self._pass.hidden(forest)
        cut = hidden.detach().requires_grad_()
        # The head's graph lives for one chunk only. The body's backward runs once, from the summed gradient.
        for chunk, logp in self._heads(cut, rows, forest):
            here = torch.from_numpy(chunk).to(device)
            columns = {
                name: micro_batch.computed[name][here].to(logp.dtype)
                if name in micro_batch.computed
                else _to(forest[name][chunk], device)
                for name in recipe.reads
            }
            terms = recipe.token_loss(logp, columns)
            (terms.loss * _to(micro_batch.weight[chunk], device)).sum().backward()  # type: ignore[no-untyped-call]
            for name, values in terms.metrics.items():
                means.add(name, values)
            if "logprob" in forest.targets:
                means.add_mismatch(_to(forest["logprob"][chunk], device), logp)
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
        """The inverse of `state`. Drops an accumulated gradient."""
        self._optimizer.zero_grad(set_to_none=True)
        self._prepared = None
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


class _TokenMeans:
    """Means of per-token metrics over a mini-batch.

    The means are over every target of the mini-batch. A skipped token has advantage 0 and is never clipped. With a KL
    term no token is skipped. The mismatch needs log-probabilities, so its mean is over computed tokens only.
    """

    def __init__(self, forest: Forest, micro_batches: Sequence[_MicroBatch]) -> None:
        self._num_targets = forest.num_targets
        self._num_computed = sum(micro_batch.forest.num_targets for micro_batch in micro_batches)
        self.values: dict[str, float] = {"policy/clip_fraction": 0.0} if self._num_targets else {}

    def add(self, name: str, values: Tensor) -> None:
        self.values[name] = self.values.get(name, 0.0) + float(values.detach().sum()) / self._num_targets

    def add_mismatch(self, old: Tensor, logp: Tensor) -> None:
        """Compare the learner with the sampler."""
        total = float(kl_k3(old, logp.detach()).sum()) / self._num_computed
        self.values[MISMATCH] = self.values.get(MISMATCH, 0.0) + total


def _distributions(
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


def _to(values: NDArray[np.floating[Any]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
