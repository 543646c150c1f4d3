"""Learning on a forest: log-probabilities of the targets, gradients of a loss, optimiser steps.

* bfloat16 weights have masters and moments in float32.
* Masters, moments and gradients are on the weights' device, or on the CPU if the policy offloads its optimiser.
* `distributions` gives log-probabilities, of the learning policy, the old policy and the reference alike.
* The state of the recipe changes with an optimiser step, and is saved with the weights.
* Deterministic: equal weights, optimiser state and batch give equal weights, bit by bit, on one number of threads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from agentjet.compute.embedded.distributions import Teacher, chunks, measured, to_device
from agentjet.compute.embedded.passes import Pass, pass_of
from agentjet.compute.embedded.policy import Policy, fingerprint
from agentjet.compute.embedded.value_model import ValueModel
from agentjet.compute.operations import means, merged_metrics
from agentjet.compute.protocol import LossSpec, Outputs
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.errors import ComputeError
from agentjet.recipes import hooks
from agentjet.recipes.losses import kl_k3
from agentjet.recipes.policy_gradient import MISMATCH
from agentjet.recipes.recipe import Recipe
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, select

TOKENS_COMPUTED = "forest/tokens_computed"
NOT_FINITE = "recipe/not_finite"
"""Sum over the tokens of a mini-batch; not a metric."""
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class _PreparedBatch:
    """A batch with its columns, as the first `forward_backward` on it made it."""

    batch_id: int
    loss: LossSpec
    forest: Forest
    metrics: Mapping[str, float]
    steps: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of the steps so far."""

    @property
    def steps_per_epoch(self) -> int:
        return max(1, min(self.loss.recipe.mini_batches, self.forest.num_sequences))

    @property
    def num_steps(self) -> int:
        return self.loss.recipe.epochs * self.steps_per_epoch

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
    """Owns the masters and the optimiser of one policy.

    `cluster.learner` overrides the methods that differ if several processes learn together: the part of a forest that
    this process computes, sums over all parts, and the masters.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._pass = self._make_pass()
        self._params = policy.trainable()
        self._masters = {name: self._make_master(p) for name, p in self._params.items()}
        self._optimizer = torch.optim.AdamW(self.masters(), lr=0.0, fused=True)
        self.recipe_states: dict[str, Mapping[str, float]] = {}
        """States of recipes by name, without empty ones."""
        self._next_states: dict[str, Mapping[str, float]] | None = None
        """The same after the batch. The optimiser step after its last `forward_backward` adopts them."""
        self._values: ValueModel | None = None
        """The heads of the last recipe that had some."""
        self._teacher: Teacher | None = None
        self._reference: dict[str, Tensor] | None = None
        self._prepared: _PreparedBatch | None = None
        """The batch between its first and its last step."""
        self._contributed = False
        """True if a target contributed to the loss since the last optimiser step."""
        self._fingerprints: dict[str, int] = {}
        self.weights_changed()

    def forward_backward(self, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        """Add the gradient of one mini-batch to the accumulated gradient; returns its metrics.

        A failure changes nothing. Raises `ComputeError` if a later step of a batch comes without its first step.
        """
        with self._undone_on_failure():
            return self._forward_backward(batch, loss)

    def _forward_backward(self, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        if loss.step == 0:
            self._prepared = self._prepare(batch, loss)
        prepared = self._prepared
        if prepared is None or (prepared.batch_id, prepared.loss) != (batch.id, replace(loss, step=0)):
            raise ComputeError(f"step {loss.step} of batch {batch.id} came without step 0 of the same batch and loss")
        if loss.step >= prepared.num_steps:
            raise ComputeError(f"step {loss.step} of batch {batch.id} is not one of its {prepared.num_steps} steps")
        metrics = self._add_gradient(prepared.mini_batch(loss.step), loss.recipe, loss)
        if loss.step == 0:
            metrics |= prepared.metrics
        else:  # Only before the first optimiser step the learner has the weights that sampled.
            metrics.pop(MISMATCH, None)
        steps = [*prepared.steps, metrics]
        if loss.step == prepared.num_steps - 1:
            state = hooks.next_state(loss.recipe, self._state_of(loss.recipe), means(steps))
            states = {**self.recipe_states, loss.recipe.name: state}
            self._next_states = {name: values for name, values in states.items() if values}
            self._prepared = None
        prepared.steps.append(metrics)
        return Outputs(metrics, num_steps=prepared.num_steps)

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Context of a `forward_backward`. After a failure the gradient is that of the operations before it."""
        before = self._prepared, self._next_states, self._contributed, self._values
        heads = None if self._values is None else self._values.heads
        accumulated = self._take_gradients()
        try:
            yield
        except BaseException:
            self._take_gradients()
            self._pass.forget()
            self._prepared, self._next_states, self._contributed, self._values = before
            if self._values is not None and heads is not None:
                self._values.heads = heads
            raise
        finally:
            for tensor, gradient in accumulated:
                tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)

    def _take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Remove the gradients of masters, weights and value heads; returns them beside their tensors."""
        tensors = [*self.masters(), *self._params.values()]
        tensors += [] if self._values is None else [self._values.weights]
        taken: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:  # Some masters are the weights themselves.
            if tensor.grad is not None:
                taken.append((tensor, tensor.grad))
                tensor.grad = None
        return taken

    def optim_step(self, optimizer: OptimizerConfig, version: int) -> dict[str, float]:
        """Apply the accumulated gradient; returns metrics. `version` is the policy version, for the schedule.

        If no target contributed since the last step, no weight changes, not even by momentum. A norm that is not finite
        skips the step. The metrics show both, with the norm before clipping.
        """
        masters = self.masters()
        contributed, self._contributed = self._contributed, False
        norm = self._change_masters(masters, optimizer, version) if contributed else 0.0
        is_finite = math.isfinite(norm)
        if is_finite and self._next_states is not None:
            self.recipe_states = self._next_states
        self._next_states = None
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "optim/grad_norm": norm,
            "optim/skipped_steps": float(not is_finite),
            "optim/lr": learning_rate(optimizer, version),
            "optim/steps": float(contributed),
            "weights/finite": float(math.isfinite(self._norm(masters))),
        }

    def _change_masters(self, masters: Sequence[Tensor], optimizer: OptimizerConfig, version: int) -> float:
        """Make a step of the optimiser; returns the norm of the gradient before clipping.

        A norm that is not finite changes nothing, and neither does a gradient of the value heads that is not finite.
        """
        betas, rate = (optimizer.beta1, optimizer.beta2), learning_rate(optimizer, version)
        for group in self._optimizer.param_groups:
            group.update(lr=rate, betas=betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)
        for master in masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        total_norm = self._norm([cast(Tensor, master.grad) for master in masters])
        clip_grads_with_norm_(masters, optimizer.max_grad_norm or math.inf, total_norm)
        norm = float(total_norm)
        if self._values is not None and not self._values.has_finite_gradient:
            norm = math.nan
        if math.isfinite(norm):
            self._optimizer.step()
            self._copy_masters()
        if self._values is not None:
            if math.isfinite(norm):
                self._values.step()
            self._values.drop_gradient()
        return norm

    @property
    def has_gradient(self) -> bool:
        """True between a `forward_backward` and the next `optim_step`."""
        return any(master.grad is not None for master in self.masters())

    def learn(self, forest: Forest, job: JobConfig, version: int, facts: Facts | None = None) -> dict[str, float]:
        """Train on a batch; returns metrics. The same steps as `operations.learn`, without a worker process."""
        batch, num_steps = TrainingBatch(version, forest, facts), 1
        steps: list[Mapping[str, float]] = []
        while len(steps) < num_steps:
            outputs = self.forward_backward(batch, LossSpec.of(job, len(steps)))
            steps.append({**outputs.metrics, **self.optim_step(job.optimizer, version)})
            num_steps = outputs.num_steps
        return merged_metrics(steps)

    def _prepare(self, batch: TrainingBatch, loss: LossSpec) -> _PreparedBatch:
        heads = hooks.declared(loss.recipe, "value_heads")
        if heads is not None:
            if self._values is None or self._values.heads.names != heads.names:
                self._values = ValueModel(heads, self.policy)
            self._values.heads = heads
        outputs = self._outputs(batch.forest, loss.recipe, loss.micro_batch_tokens)
        forest = batch.forest.with_columns(**outputs)
        batch = replace(batch, forest=forest, state=self._state_of(loss.recipe))
        return _PreparedBatch(batch.id, loss, *hooks.columns(loss.recipe, batch, outputs))

    def _state_of(self, recipe: Recipe) -> Mapping[str, float]:
        return self.recipe_states.get(recipe.name, {})

    def _outputs(self, forest: Forest, recipe: Recipe, max_tokens: int) -> dict[str, NDArray[np.float32]]:
        """Returns the numbers [M] of each of the recipe's `needs` and value heads."""
        needs, heads = hooks.declared(recipe, "needs"), hooks.declared(recipe, "value_heads")
        own: list[str] = sorted(needs - {"reference", "teacher"})
        own += heads.names if heads is not None else ()
        outputs = self._of_batch(forest, own, max_tokens) if own else {}
        if "reference" in needs:
            with self._reference_weights():
                outputs["reference"] = self._of_batch(forest, ["proximal"], max_tokens)["proximal"]
        if "teacher" in needs:
            folder = hooks.declared(recipe, "teacher_folder")
            if self._teacher is None or self._teacher.folder != folder:
                self._teacher = None  # Frees the memory of another one.
                self._teacher = Teacher(folder, self.policy)
            outputs["teacher"] = self._teacher.logprobs(forest, max_tokens)
        return outputs

    def _add_gradient(self, forest: Forest, recipe: Recipe, loss: LossSpec) -> dict[str, float]:
        """Add the gradient of a mini-batch, micro-batch by micro-batch; returns means over its targets.

        Only targets that contribute to the loss are computed. Their weights count every target. The mismatch is a mean
        over computed targets. A skipped target is never clipped, and with a KL term no target is skipped.
        """
        contributing = hooks.contributing(recipe, forest)
        reads, reports = hooks.declared(recipe, "reads"), hooks.declared(recipe, "reports")
        if not contributing.any():
            return {**dict.fromkeys(reports if forest.num_targets else (), 0.0), TOKENS_COMPUTED: 0.0}
        self._contributed = True
        weighted = select(forest.with_columns(weight=hooks.weights(recipe, forest)), contributing)
        pieces = [piece for piece, _ in self._pieces(weighted, loss.micro_batch_tokens)]
        if "sequence_log_ratio" in reads:
            pieces = self._with_sequence_ratios(pieces, int(weighted["sequence"].max()) + 1)
        if "reference" in reads and "reference" not in weighted.targets:
            with self._reference_weights():
                pieces = [_with_column(piece, "reference", _array(self.logprobs(piece))) for piece in pieces]
        sums = defaultdict[str, float](float, dict.fromkeys((NOT_FINITE, *reports), 0.0))
        for piece in pieces:
            self._accumulate(piece, recipe, sums)
        self._pass.finish()
        self._gather_gradients()
        self._reduce_gradients()
        sums[TOKENS_COMPUTED] = float(sum(map(self._pass.num_computed, pieces)))
        counts = {MISMATCH: weighted.num_targets, TOKENS_COMPUTED: 1}
        totals = dict(self._totals(sums))
        hooks.check_loss(recipe, totals.pop(NOT_FINITE, 0.0), weighted)
        return {name: total / counts.get(name, forest.num_targets) for name, total in totals.items()}

    def _with_sequence_ratios(self, pieces: list[Forest], num_sequences: int) -> list[Forest]:
        """Add the sequence means of logp - old, over the tokens of all micro-batches."""
        sums = np.zeros((2, num_sequences))
        sequences = np.concatenate([np.zeros(0, np.int32), *(piece["sequence"] for piece in pieces)])
        ratios = [_array(self.logprobs(piece).double()) - piece["logprob"] for piece in pieces]
        sums[0] = np.bincount(sequences, np.concatenate([np.zeros(0), *ratios]), num_sequences)
        sums[1] = np.bincount(sequences, minlength=num_sequences)
        ratio_sums, counts = self._sum(sums)
        means = ratio_sums / np.maximum(1, counts)
        return [_with_column(piece, "sequence_log_ratio", means[piece["sequence"]]) for piece in pieces]

    def _of_batch(self, forest: Forest, names: Sequence[str], max_tokens: int) -> dict[str, NDArray[np.float32]]:
        """Returns values [M] of the targets of a whole batch, micro-batch by micro-batch."""
        found = {name: np.zeros(forest.num_targets, np.float32) for name in names}
        for piece, targets in self._pieces(forest, max_tokens):
            for name, values in measured(self.policy, self._pass, piece, names, self._values).items():
                found[name][targets] = _array(values.float())
        return {name: self._sum(values) for name, values in found.items()}

    def logprobs(self, forest: Forest) -> Tensor:
        """Returns the log-probabilities [M] of the forest's targets, without gradient."""
        return measured(self.policy, self._pass, forest, ["proximal"])["proximal"]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Compute with the weights of version 0 inside the context."""
        if self.policy.has_adapters:
            with cast(Any, self.policy.model).disable_adapter():
                yield
            return
        if self._reference is None:
            self._reference = self.policy.original_weights()
        self._exchange_reference(self._reference)
        try:
            yield
        finally:
            self._exchange_reference(self._reference)

    def _accumulate(self, forest: Forest, recipe: Recipe, sums: defaultdict[str, float]) -> None:
        """Forward, loss and backward of one micro-batch. The pass may postpone a part of the backward."""
        hidden, rows = self._pass.hidden(forest)
        reads, heads = hooks.declared(recipe, "reads"), hooks.declared(recipe, "value_heads")
        cut = hidden.detach().requires_grad_()
        # The head's graph lives for one chunk only. The body's backward runs once, from the summed gradient.
        for chunk, logp, _ in chunks(self.policy, cut, rows, forest):
            names = ("weight", "logprob", *reads)
            columns = {name: to_device(forest[name][chunk], cut.device).to(logp.dtype) for name in names}
            if heads is not None and self._values is not None:
                new = self._values.values(cut.index_select(0, rows[to_device(chunk, cut.device)]))
                columns |= {f"new_{name}": value for name, value in new.items()}
            loss, metrics = hooks.token_loss(recipe, logp, columns)
            sums[NOT_FINITE] += hooks.num_not_finite(loss, logp, columns)
            with hooks.running(recipe.name, "token_loss"):  # A loss may have a backward pass of its own.
                (loss * columns["weight"]).sum().backward()  # type: ignore[no-untyped-call]
            sums[MISMATCH] += float(kl_k3(columns["logprob"], logp.detach()).sum())
            for name, values in metrics.items():
                sums[name] += float(values.detach().sum())
        self._pass.backward(hidden, self._hidden_gradient(cut))
        self._gather_gradients()

    def _make_pass(self) -> Pass:
        return pass_of(self.policy)

    def _make_master(self, p: nn.Parameter) -> Tensor:
        """Returns the tensor that the optimiser changes instead of a weight."""
        if self.policy.offloads_optimizer:
            return p.detach().to("cpu", torch.promote_types(p.dtype, torch.float32), copy=True).requires_grad_()
        return p.detach().float().requires_grad_() if p.dtype == torch.bfloat16 else p

    def _pieces(self, forest: Forest, max_tokens: int) -> Sequence[tuple[Forest, NDArray[np.int64]]]:
        """Returns the micro-batches that this process computes, with the indices of their targets."""
        return self._pass.pieces(forest, max_tokens)

    def _hidden_gradient(self, hidden: Tensor) -> Tensor | None:
        """Returns the gradient of the hidden states of a piece; None if it has no target."""
        return hidden.grad

    def _sum(self, values: NDArray[Number]) -> NDArray[Number]:
        """Returns the sum of an array over the processes that learn together."""
        return values

    def _totals(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Returns the sums of named numbers over the processes that learn together."""
        return sums

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(tensors)

    def _gather_gradients(self) -> None:
        """Move the weights' gradients to the masters, in the masters' type and on their device."""
        for name, p in self._params.items():
            master = self._masters[name]
            if p.grad is None or master is p:
                continue
            grad = p.grad.to(master.device)
            master.grad = grad.to(master.dtype) if master.grad is None else master.grad.add_(grad)
            p.grad = None

    def _reduce_gradients(self) -> None:
        """Add up the gradients of the processes that learn together, after the last micro-batch."""

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, p in self._params.items():
            if self._masters[name] is not p:
                p.copy_(self._masters[name])

    @property
    def fingerprint(self) -> int:
        """52 bits that depend on all bits of the masters, as `weights_changed` found them."""
        return self._fingerprints["weights/learner"] % 2**52

    def _fingerprint(self, weights: Sequence[Tensor], known: dict[int, Tensor]) -> int:
        return fingerprint(weights, known)

    def _exchange_reference(self, reference: dict[str, Tensor]) -> None:
        """Exchange the weights with those of the reference."""
        for name, p in self._params.items():
            p.data, reference[name] = reference[name], p.data

    def masters(self) -> list[Tensor]:
        """Returns the tensors that the optimiser changes: for float32 policies the weights themselves, or offloaded."""
        return list(self._masters.values())

    def state(self) -> dict[str, Any]:
        """Returns masters and moments as tensors. `restore` continues from them bit by bit."""
        masters = {name: master.detach() for name, master in self._masters.items()}
        values = {} if self._values is None else {"values": self._values.state()}
        return {"masters": masters, "optimizer": self._optimizer.state_dict(), **values}

    def new_state(self) -> dict[str, Any]:
        """Returns new tensors like masters and moments, by name, for `torch.distributed.checkpoint` to fill."""
        return {
            "masters": {name: torch.zeros_like(master) for name, master in self._masters.items()},
            "moments": {name: new_moments(master) for name, master in self._masters.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; also takes moments by name. Drops an accumulated gradient."""
        if "moments" in state:
            moments = {number: state["moments"][name] for number, name in enumerate(self._masters)}
            state = {**state, "optimizer": {**self._optimizer.state_dict(), "state": moments}}
        self._optimizer.zero_grad(set_to_none=True)
        self._prepared = self._next_states = None
        self._contributed = False
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["masters"][name])
        self._copy_masters()
        self._optimizer.load_state_dict(state["optimizer"])
        self._values = ValueModel.restored(state["values"], self.policy) if "values" in state else None
        self.weights_changed()

    def weights_changed(self) -> dict[str, float]:
        """Returns 1 for the masters and for the sampler's weights if they changed since the last call, else 0.

        A float32 policy has one copy of the weights, unless it offloads its optimiser or a bug replaces a parameter.
        """
        known: dict[int, Tensor] = {}
        before = self._fingerprints
        self._fingerprints = {
            "weights/learner": self._fingerprint(self.masters(), known),
            "weights/sampler": self._fingerprint(list(self.policy.trainable().values()), known),
        }
        return {name: float(now != before.get(name)) for name, now in self._fingerprints.items()}


def new_moments(master: Tensor) -> dict[str, Tensor]:
    """Returns the state of AdamW for a master before the first step."""
    moments = {name: torch.zeros_like(master, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=master.device), **moments}


def learning_rate(optimizer: OptimizerConfig, version: int) -> float:
    """Returns the rate of the batch at `version`: linear warm-up, then constant, linear or cosine decay."""
    if version < optimizer.warmup_steps:
        return optimizer.lr * (version + 1) / (optimizer.warmup_steps + 1)
    if optimizer.schedule == "constant":
        return optimizer.lr
    progress = min(1.0, (version - optimizer.warmup_steps) / (optimizer.total_steps - optimizer.warmup_steps))
    shape = 1 - progress if optimizer.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.lr * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * shape)


def _array(values: Tensor) -> NDArray[Any]:
    return values.cpu().numpy()


def _with_column(forest: Forest, name: str, values: NDArray[Any]) -> Forest:
    """Returns the forest with a column of any type."""
    return replace(forest, targets={**forest.targets, name: values})
