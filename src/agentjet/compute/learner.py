"""Learning on a forest: log-probabilities of the targets, gradients of a loss, optimiser steps.

* bfloat16 weights have masters and moments in float32.
* Masters, moments and gradients are on the weights' device, or on the CPU if the policy offloads its optimiser.
* `passes` gives log-probabilities, of the learning policy, the old policy and the reference alike.
* The state of the recipe changes with an optimiser step, and is saved with the weights. So does a reference that moves:
  it is like the masters.
* Teachers grade the batch before the first step: the model of a folder, the policy, or the reference. Each rank
  computes its part.
* Deterministic: equal weights, optimiser state and batch give equal weights, bit by bit, on one number of threads or
  ranks.

With several ranks, every rank receives the whole batch. Advantages, loss weights and mini-batches are computed on the
whole batch. Then each rank computes its part of the forest (`part_of`), and gradients are summed. So any number
of ranks gives the gradient of one within rounding.

`group` has the two modes, *gathered* and *sharded*. All ranks call the same methods in the same order.

Invariant: gathered weights are equal on all ranks, bit by bit. `weights_changed` checks it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_

from agentjet.compute.group import RankGroup, Sharding, fingerprint, shard_layers
from agentjet.compute.optimizer import Optimizer, learning_rate, new_moments
from agentjet.compute.passes import Pass, Teacher, ValueModel, chunks, measured, numbers, pass_of, to_device
from agentjet.compute.policy import Policy, merged_weights
from agentjet.compute.protocol import LossSpec, Outputs, means
from agentjet.compute.routes import OWN_ROUTES_KL, ROUTE_MISMATCH
from agentjet.config import OptimizerConfig
from agentjet.errors import ComputeError, ConfigError
from agentjet.processes.progress import PROGRESS
from agentjet.recipes import hooks
from agentjet.recipes.losses import kl_k3
from agentjet.recipes.policy_gradient import MISMATCH
from agentjet.recipes.recipe import Recipe, Teaching
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, part_of, restrict, select

log = logging.getLogger(__name__)

TOKENS_COMPUTED = "forest/tokens_computed"
SLOPE = "slope of "
"""Beginning of the names of columns with derivatives of a `batch_loss`."""
NOT_FINITE = "recipe/not_finite"
"""Sum over the tokens of a mini-batch; not a metric."""
STATE = "state/"
"""Beginning of the metrics of a recipe's state after the batch."""
REPEATED = "moe/repeated"
"""Number of repeated choices; not a metric."""
ROUTES_MEASURED = 2
"""Number of first batches with routes that are also computed without them, to see what repeating them changes."""


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
    """Owns the masters and the optimiser of one policy, or a rank's part of them.

    All ranks call the same methods in the same order.
    """

    def __init__(self, policy: Policy, ranks: RankGroup | None = None, sharding: Sharding = "gathered") -> None:
        """Divides the layers of `policy` in place if `sharded`. Raises `ConfigError` for a model that cannot be."""
        self.policy = policy
        self.ranks = ranks or RankGroup()
        self._layers = shard_layers(policy, self.ranks) if sharding == "sharded" else []
        self._pass = self._make_pass()
        self._float = np.float64 if policy.dtype == torch.float64 else np.float32
        self._params = policy.trainable()
        self._sums: dict[str, Tensor] = {}
        """Gradients of this process since the last reduction, by name, in the type of the masters."""
        self._masters = {name: self._make_master(p) for name, p in self._params.items()}
        self._optimizer = Optimizer("adamw", policy, self._masters)
        self.recipe_states: dict[str, Mapping[str, float]] = {}
        """States of recipes by name, without empty ones."""
        self._next_state: tuple[str, Mapping[str, float]] | None = None
        """Recipe and state after the batch. The optimiser step after its last `forward_backward` adopts it."""
        self._values: ValueModel | None = None
        """The heads of the last recipe that had some."""
        self._only_values = False
        """True if only the heads learn from the present batch."""
        self._teacher: Teacher | None = None
        self._num_measured = 0
        """Batches that were computed without their routes."""
        self._reference: dict[str, Tensor] | None = None
        """Weights of version 0, read from disk for the first reference of a policy without adapters."""
        self._moved_reference: dict[str, Tensor] | None = None
        """Tensors like the masters; None until the reference moves."""
        self._next_mix = 0.0
        """Share of the weights in the reference after the batch, or 0. The same optimiser step applies it."""
        self._prepared: _PreparedBatch | None = None
        """The batch between its first and its last step."""
        self._contributed = False
        """True if a target contributed to the loss since the last optimiser step."""
        self._has_computed = False
        """True after the first micro-batch."""
        self._fingerprints: dict[str, int] = {}
        self.weights_changed()
        if self._layers:
            # FSDP notes at its first pass which weights learn. That must not be a pass of the reference, because an
            # adapter that is switched off counts as frozen.
            self.logprobs(build_forest([Row(np.zeros(1, np.int32), slice(0), {})]))

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
            metrics.pop(ROUTE_MISMATCH, None)
        steps = [*prepared.steps, metrics]
        if loss.step == prepared.num_steps - 1:
            state = hooks.next_state(loss.recipe, self._state_of(loss.recipe), means(steps))
            self._next_state = loss.recipe.name, state
            self._next_mix = _reference_mix(loss.recipe, batch.id)
            self._prepared = None
        prepared.steps.append(metrics)
        return Outputs(metrics, num_steps=prepared.num_steps)

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Context of a `forward_backward`. After a failure the gradient is that of the operations before it."""
        before = (self._prepared, self._next_state, self._next_mix, self._contributed, self._values, self._only_values)
        heads = None if self._values is None else self._values.heads
        accumulated = self._take_gradients()
        try:
            yield
        except BaseException:
            self._take_gradients()
            self._pass.forget()
            self._prepared, self._next_state, self._next_mix, self._contributed, self._values, self._only_values = (
                before
            )
            if self._values is not None and heads is not None:
                self._values.heads = heads
            raise
        finally:
            for tensor, gradient in accumulated:
                tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)

    def _take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Remove the gradients of masters, weights and value heads; returns them beside their tensors."""
        self._sums.clear()
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
        skips the step. The metrics show both, with the norm before clipping. An optimiser by another name than that of
        the last step begins without moments. Raises `ConfigError` for one that cannot train this policy. In a warm-up
        of value heads, only these change.
        """
        masters = self.masters()
        contributed = self._contributed
        norm = self._change_masters(masters, optimizer, version) if contributed else 0.0
        self._contributed = False
        is_finite = math.isfinite(norm)
        of_recipe: dict[str, float] = {}
        if self._next_state is not None:
            of_recipe = self._end_batch(*self._next_state, is_learned=is_finite)
        if self._next_mix:
            self._move_reference(self._next_mix)
        self._next_mix = 0.0
        self._optimizer.zero_grad()
        return {
            "optim/grad_norm": norm,
            "optim/skipped_steps": float(not is_finite),
            "optim/lr": learning_rate(optimizer, version),
            "optim/steps": float(contributed),
            "weights/finite": float(math.isfinite(self._norm(masters))),
            **of_recipe,
        }

    def _end_batch(self, recipe: str, state: Mapping[str, float], *, is_learned: bool) -> dict[str, float]:
        """Adopt the state of a recipe after the last step of a batch, unless it was skipped; returns it as metrics."""
        self._next_state = None
        if is_learned:
            states = {**self.recipe_states, recipe: state}
            self.recipe_states = {name: values for name, values in states.items() if values}
            if self._only_values and self._values is not None:
                self._values.num_batches += 1
        return {f"{STATE}{name}": value for name, value in self.recipe_states.get(recipe, {}).items()}

    def _change_masters(self, masters: Sequence[Tensor], optimizer: OptimizerConfig, version: int) -> float:
        """Make a step of the optimiser; returns the norm of the gradient before clipping.

        A norm that is not finite changes nothing, and neither does a gradient of the value heads that is not finite.
        """
        chosen = self._optimizer
        if optimizer.name != chosen.name:
            chosen = Optimizer(optimizer.name, self.policy, self._masters)
        for master in masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        total_norm = self._norm([cast(Tensor, master.grad) for master in masters])
        clip_grads_with_norm_(masters, optimizer.max_grad_norm or math.inf, total_norm)
        norm = float(total_norm)
        if self._values is not None and not self._values.has_finite_gradient:
            norm = math.nan
        if math.isfinite(norm) and not self._only_values:
            if chosen is not self._optimizer:
                message = "%s: job.optimizer.name is %r instead of %r from policy version %d on: new moments"
                log.info(message, self.policy.info.name, chosen.name, self._optimizer.name, version)
            self._optimizer = chosen
            chosen.step(optimizer, learning_rate(optimizer, version))
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

    def _prepare(self, batch: TrainingBatch, loss: LossSpec) -> _PreparedBatch:
        heads = hooks.declared(loss.recipe, "value_heads")
        if heads is not None:
            if self._values is None or self._values.heads.names != heads.names:
                self._values = ValueModel(heads, self.policy)
            self._values.heads = heads
        self._only_values = heads is not None and self._values is not None and self._values.warms_up
        self._check_routes(batch.forest)
        outputs = self._outputs(batch, loss.recipe, loss.micro_batch_tokens)
        forest = batch.forest.with_columns(**outputs)
        batch = replace(batch, forest=forest, state=self._state_of(loss.recipe))
        prepared, metrics = hooks.columns(loss.recipe, batch, outputs)
        return _PreparedBatch(batch.id, loss, prepared, {**metrics, **self._without_routes(forest, loss)})

    def _check_routes(self, forest: Forest) -> None:
        shape = self.policy.info.routes
        if forest.routes is None or shape is None:
            return
        found, wanted = forest.routes.shape[1:], (len(shape.layers), shape.choices)
        if found != wanted or forest.routes.max(initial=-1) >= shape.experts:
            raise ComputeError(
                f"the batch has routes of {found} routers and choices, the model {wanted} of {shape.experts} experts: "
                "they were recorded with another model; set model.expert_routes = 'off'"
            )

    def _without_routes(self, forest: Forest, loss: LossSpec) -> dict[str, float]:
        """Returns the mismatch of the first batches if their routes are not repeated."""
        if forest.routes is None or self.policy.info.routes is None or self._num_measured >= ROUTES_MEASURED:
            return {}
        self._num_measured += 1
        plain = replace(forest, routes=None)
        logp = self._of_batch(plain, ["proximal"], loss.micro_batch_tokens)["proximal"]
        return {OWN_ROUTES_KL: float(kl_k3(*(torch.from_numpy(x) for x in (forest["logprob"], logp))).mean())}

    def _state_of(self, recipe: Recipe) -> Mapping[str, float]:
        return self.recipe_states.get(recipe.name, {})

    def _outputs(self, batch: TrainingBatch, recipe: Recipe, max_tokens: int) -> dict[str, NDArray[Any]]:
        """Returns the numbers [M] of each of the recipe's `needs` and value heads, and its likely tokens [M, K]."""
        needs, heads = hooks.declared(recipe, "needs"), hooks.declared(recipe, "value_heads")
        teaching: Teaching | None = hooks.declared(recipe, "teaching")
        if teaching is not None and teaching.top_k > self.policy.vocabulary:
            raise ConfigError(
                f"job.recipe.top_k = {teaching.top_k}: {self.policy.info.name!r} has {self.policy.vocabulary} tokens: "
                "lower it"
            )
        forest, is_graded = batch.forest, "teacher" in batch.forest.targets  # An endpoint has graded them.
        own: list[str] = sorted(needs - {"reference", "teacher"})
        own += heads.names if heads is not None else ()
        top_k = teaching.top_k if teaching is not None and teaching.top_of == "policy" else 0
        outputs: dict[str, NDArray[Any]] = self._of_batch(forest, own, max_tokens, top_k) if own or top_k else {}
        if top_k:
            outputs["top_ids"], outputs["old_top"] = outputs.pop("likely_ids").astype(np.int32), outputs.pop("likely")
        if "reference" in needs:
            with self._reference_weights():
                outputs["reference"] = self._of_batch(forest, ["proximal"], max_tokens)["proximal"]
        if "teacher" in needs and is_graded:
            given = ("teacher", "top_ids", "teacher_top")
            outputs |= {name: forest[name] for name in given if name in forest.targets}
        elif "teacher" in needs and teaching is not None:
            if any("://" in source for source in teaching.sources):  # The endpoint has graded nothing.
                batch, teaching = replace(batch, taught=None), teaching._replace(sources=("policy",), has_context=True)
            with self._teacher_of(teaching.sources[0]) as teacher:
                outputs |= self._grades(batch, teaching, outputs.get("top_ids"), max_tokens, teacher)
        return outputs

    @contextmanager
    def _teacher_of(self, source: str) -> Iterator[Teacher | None]:
        """Context with a teacher in the learner: a model beside the policy, or None for weights of the policy."""
        if source == "reference":
            with self._reference_weights():
                yield None
            return
        if source != "policy" and (self._teacher is None or self._teacher.folder != source):
            self._teacher = None  # Frees the memory of another one.
            with PROGRESS.long_step():
                self._teacher = self.ranks.agreed(lambda: Teacher(source, self.policy))
        yield None if source == "policy" else self._teacher

    def _grades(
        self,
        batch: TrainingBatch,
        teaching: Teaching,
        top_ids: NDArray[np.int32] | None,
        max_tokens: int,
        teacher: Teacher | None,
    ) -> dict[str, NDArray[Any]]:
        """Returns the grades of all targets, in the context that the teacher sees: NaN for those without one."""
        forest, number = batch.forest, np.arange(batch.forest.num_targets)
        if teaching.has_context:
            forest = build_forest([]) if batch.taught is None else batch.taught
            number = forest["target"] if forest.num_targets else number[:0]
        if top_ids is None:
            found = self._of_batch(forest, ["proximal"], max_tokens, teaching.top_k, teacher)
        else:
            found = self._of_batch(
                forest.with_columns(top_ids=top_ids[number]), ["proximal", "top"], max_tokens, teacher=teacher
            )
        grades: dict[str, NDArray[Any]] = {}
        for name, values in found.items():
            grades[name] = np.full((batch.forest.num_targets, *values.shape[1:]), np.nan, self._float)
            grades[name][number] = values
        outputs = {"teacher": grades["proximal"]}
        if teaching.top_k:
            outputs["teacher_top"] = grades["top" if top_ids is not None else "likely"]
        if "likely_ids" in grades:
            outputs["top_ids"] = np.nan_to_num(grades["likely_ids"]).astype(np.int32)
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
        if "reference" in reads and "reference" not in weighted.targets:
            with self._reference_weights():
                found = self._of_batch(weighted, ["proximal"], loss.micro_batch_tokens)
            weighted = _with_column(weighted, "reference", found["proximal"])
        sums = defaultdict[str, float](float, dict.fromkeys((NOT_FINITE, *reports), 0.0))
        pieces = [piece for piece, _ in self._pieces(weighted, loss.micro_batch_tokens, self._pass)]
        if hooks.loss_hook(recipe) == "batch_loss" and (len(pieces) > 1 or self.ranks.num_ranks > 1):
            names = self._numbers(recipe)
            found = {name: weighted[name] for name in names if loss.step == 0 and name in weighted.targets}
            if found.keys() != {*names}:
                found = self._of_batch(weighted, names, loss.micro_batch_tokens)
            present = {name: to_device(values, self.policy.device) for name, values in found.items()}
            weighted = self._with_slopes(weighted, recipe, present, sums)
            pieces = [piece for piece, _ in self._pieces(weighted, loss.micro_batch_tokens, self._pass)]
        for piece in pieces:
            with self._micro_batch():
                self._accumulate(piece, recipe, sums)
        with self._micro_batch():
            self._pass.finish()
        self._reduce_gradients()
        sums[TOKENS_COMPUTED] = float(sum(map(self._pass.num_computed, pieces)))
        totals: Counter[str] = Counter()
        for of_rank in self.ranks.gather(dict(sums)):
            totals.update(of_rank)
        counts = {
            MISMATCH: weighted.num_targets,
            TOKENS_COMPUTED: 1,
            ROUTE_MISMATCH: max(1.0, totals.pop(REPEATED, 0.0)),
        }
        hooks.check_loss(recipe, totals.pop(NOT_FINITE, 0.0), weighted)
        if np.isnan(weighted["logprob"]).all():  # Given answers: nothing sampled them.
            del totals[MISMATCH]
        return {name: total / counts.get(name, forest.num_targets) for name, total in totals.items()}

    def _of_batch(
        self,
        forest: Forest,
        names: Sequence[str],
        max_tokens: int,
        top_k: int = 0,
        teacher: Teacher | None = None,
    ) -> dict[str, NDArray[np.floating[Any]]]:
        """Returns values [M] of the targets of a whole batch, micro-batch by micro-batch: those of the policy, or of a
        teacher. `top_k` adds the likely tokens [M, top_k], whose ids are exact as floating numbers.
        """
        policy, own_pass, heads = self.policy, self._pass, self._values
        if teacher is not None:
            policy, own_pass, heads = teacher.policy, teacher.own_pass, None
        names = [*names, *(("likely", "likely_ids") if top_k else ())]
        widths = {"likely": (top_k,), "likely_ids": (top_k,)}
        widths |= {"top": forest["top_ids"].shape[1:]} if "top" in names else {}
        found: dict[str, NDArray[np.floating[Any]]] = {
            name: np.zeros((forest.num_targets, *widths.get(name, ())), self._float) for name in names
        }
        for piece, targets in self._pieces(forest, max_tokens, own_pass):
            with self._micro_batch():
                for name, values in measured(policy, own_pass, piece, names, heads, top_k).items():
                    if len(targets):
                        found[name][targets] = _array(values.float() if self._float is np.float32 else values)
        return {name: self.ranks.sum(values) for name, values in found.items()}

    def logprobs(self, forest: Forest) -> Tensor:
        """Returns the log-probabilities [M] of the forest's targets, without gradient."""
        with PROGRESS.counted(), self._micro_batch():
            return measured(self.policy, self._pass, forest, ["proximal"])["proximal"]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Compute with the weights of the reference inside the context. It chooses its experts itself."""
        self._pass.repeats_routes = False
        try:
            with self._exchanged_weights():
                yield
        finally:
            self._pass.repeats_routes = True

    @contextmanager
    def _exchanged_weights(self) -> Iterator[None]:
        if self._moved_reference is not None:
            reference = {name: self._as_weight(p, self._moved_reference[name]) for name, p in self._params.items()}
        elif self.policy.has_adapters:
            with cast(Any, self.policy.model).disable_adapter():
                yield
            return
        else:
            reference = self._weights_of_version_0()
        self._exchange_reference(reference)
        try:
            yield
        finally:
            self._exchange_reference(reference)

    def _weights_of_version_0(self) -> dict[str, Tensor]:
        if self._reference is None:
            with PROGRESS.long_step():
                self._reference = self.policy.original_weights()
        return self._reference

    @torch.no_grad()
    def _move_reference(self, mix: float) -> None:
        """Mix the masters into the reference, which is like them: in float32, and divided among the ranks."""
        if self._moved_reference is None:
            first: Mapping[str, Tensor] = self._masters
            if not self.policy.has_adapters:
                first = self._weights_of_version_0()
            self._moved_reference = {
                # An adapter of version 0 changes nothing, because one of its two matrices is 0.
                name: torch.zeros_like(master, requires_grad=False)
                if self.policy.has_adapters and ("lora_B" in name or "lora_embedding_A" in name)
                else self._copy_like(first[name], master)
                for name, master in self._masters.items()
            }
            self._reference = None
        for name, master in self._masters.items():
            self._moved_reference[name].lerp_(master.detach(), mix)

    @contextmanager
    def _micro_batch(self) -> Iterator[None]:
        """Context of a step of progress. On a CPU it may take minutes, and the first one compiles kernels."""
        with PROGRESS.long_step(self.policy.device.type == "cpu" or not self._has_computed):
            yield
        self._has_computed = True

    def _accumulate(self, forest: Forest, recipe: Recipe, sums: defaultdict[str, float]) -> None:
        """Forward, loss and backward of one micro-batch. The pass may postpone a part of the backward."""
        hidden, rows = self._pass.hidden(forest)
        if self._pass.routes is not None:
            differing, repeated = self._pass.routes.counts
            sums[ROUTE_MISMATCH] += differing
            sums[REPEATED] += repeated
        hook, names = hooks.loss_hook(recipe), self._numbers(recipe)
        if hook == "batch_loss" and SLOPE + names[0] not in forest.targets:  # It is the whole mini-batch.
            with torch.no_grad():
                forest = self._with_slopes(
                    forest, recipe, numbers(self.policy, hidden, rows, forest, names, self._values), sums
                )
        cut = hidden.detach().requires_grad_()
        # The head's graph lives for one chunk only. The body's backward runs once, from the summed gradient.
        for chunk, new in chunks(self.policy, cut, rows, forest, names):
            logp = new["proximal"]
            if self._values is not None:
                new |= self._values.values(cut.index_select(0, rows[to_device(chunk, cut.device)]))
            if hook == "batch_loss":
                old = to_device(forest["logprob"][chunk], cut.device)
                slopes = [to_device(forest[SLOPE + name][chunk], cut.device) for name in names]
                torch.autograd.backward([new[name] for name in names], slopes)
            else:
                columns = {name: to_device(forest[name][chunk], cut.device).to(logp.dtype) for name in _read(recipe)}
                old = columns["logprob"]
                columns |= {f"new_{name}": new[name] for name in names[1:]}
                loss, metrics = hooks.loss(recipe, logp, columns)
                _count(sums, metrics, hooks.num_not_finite(loss, logp, columns))
                with hooks.running(recipe.name, hook):  # A loss may have a backward pass of its own.
                    (loss * columns["weight"]).sum().backward()  # type: ignore[no-untyped-call]
            sums[MISMATCH] += float(kl_k3(old.to(logp.dtype), logp.detach()).sum())
        # Of a sharded model, the other ranks wait for a backward pass of every piece.
        self._pass.backward(hidden, torch.zeros_like(cut) if cut.grad is None and self._layers else cut.grad)
        self._gather_gradients()

    def _numbers(self, recipe: Recipe) -> list[str]:
        """Returns the names in `measured` of the numbers with gradient of a loss, the log-probabilities first."""
        heads = hooks.declared(recipe, "value_heads")
        reads = hooks.declared(recipe, "reads")
        own = [name for name in ("entropy", "top") if f"new_{name}" in reads]
        return ["proximal", *own, *(heads.names if heads is not None else ())]

    def _with_slopes(
        self, forest: Forest, recipe: Recipe, present: Mapping[str, Tensor], sums: defaultdict[str, float]
    ) -> Forest:
        """Returns a whole mini-batch with the derivatives [M] of its `batch_loss` by the numbers with gradient, or
        [M, K] by the likely tokens.

        By the chain rule, the gradient of the loss is the sum of the numbers' gradients, each times its derivative. So
        micro-batches can be computed one after the other.
        """
        device = self.policy.device
        columns = {name: to_device(forest[name], device) for name in _read(recipe)}
        dtype = next(iter(present.values())).dtype
        columns = {
            name: values.to(dtype if values.is_floating_point() else torch.int64) for name, values in columns.items()
        }
        leaves = {name: values.detach().clone().requires_grad_() for name, values in present.items()}
        logp = leaves["proximal"]
        columns |= {f"new_{name}": values for name, values in leaves.items() if name != "proximal"}
        with torch.enable_grad():
            loss, metrics = hooks.loss(recipe, logp, columns)
        if self.ranks.rank == 0:
            _count(sums, metrics, hooks.num_not_finite(loss, logp, columns))
        with torch.enable_grad(), hooks.running(recipe.name, "batch_loss"):
            (loss * columns["weight"] if loss.shape else loss).sum().backward()  # type: ignore[no-untyped-call]
        for name, values in leaves.items():
            slopes = torch.zeros_like(values) if values.grad is None else values.grad
            forest = _with_column(forest, SLOPE + name, _array(slopes))
        return forest

    def _make_pass(self) -> Pass:
        return pass_of(self.policy, keeps=not self._layers)

    def _make_master(self, p: nn.Parameter) -> Tensor:
        """Returns the tensor that the optimiser changes instead of a weight; with several ranks this rank's rows."""
        if isinstance(p, DTensor):  # FSDP's weights of a sharded layer are masters already.
            return p
        values = p.detach().to(torch.promote_types(p.dtype, torch.float32))
        if self.ranks.mesh is not None:
            return self._part(values, [Shard(0) if p.dim() else Replicate()]).requires_grad_()
        if self.policy.offloads_optimizer:
            return values.to("cpu", copy=True).requires_grad_()
        return p if values.dtype == p.dtype else values.requires_grad_()

    def _part(self, values: Tensor, placements: Sequence[Any]) -> DTensor:
        """Returns a copy of this rank's part of a tensor that all ranks have, where masters are."""
        mesh = self.ranks.mesh
        whole = distribute_tensor(values, mesh, placements, src_data_rank=None)
        part = DTensor.from_local(
            whole.to_local().clone(), mesh, placements, shape=values.shape, stride=values.stride()
        )
        return cast(DTensor, part.cpu()) if self.policy.offloads_optimizer else part

    @PROGRESS.long_step()  # A core cuts a million tokens in two seconds.
    def _pieces(self, forest: Forest, max_tokens: int, own_pass: Pass) -> Sequence[tuple[Forest, NDArray[np.int64]]]:
        """Returns the micro-batches that this process computes, with the indices of their targets."""
        if self.ranks.num_ranks == 1:
            return own_pass.pieces(forest, max_tokens)
        part, targets = part_of(forest, self.ranks.rank, self.ranks.num_ranks)
        found = own_pass.pieces(part, max_tokens) if part.num_targets else ()
        pieces: list[tuple[Forest, NDArray[np.int64]]] = [(piece, targets[of]) for piece, of in found]
        if self._layers and forest.num_nodes:
            missing = max(self.ranks.gather(len(pieces))) - len(pieces)
            filling = restrict(forest, np.zeros(1, np.int64), np.zeros(forest.num_targets, bool))
            pieces += [(filling, np.zeros(0, np.int64))] * missing
        return pieces

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return _whole(torch.nn.utils.get_total_norm(tensors))

    def _gather_gradients(self) -> None:
        """Add the weights' gradients to the sums in the masters' type, unless autograd adds them up in that type.

        Sums are on the masters' device, but with several ranks on that of the weights, where they are reduced.
        """
        has_ranks = self.ranks.mesh is not None
        for name, p in self._params.items():
            master = self._masters[name]
            if p.grad is None or master is p or (has_ranks and p.dtype == master.dtype):
                continue
            own = p.grad.to(p.device if has_ranks else master.device).to(master.dtype)
            self._sums[name] = self._sums[name].add_(own) if name in self._sums else own
            p.grad = None

    def _reduce_gradients(self) -> None:
        """Give the masters their gradients after the last micro-batch, summed over all ranks.

        FSDP has added up those of its layers.
        """
        self._gather_gradients()
        for name, p in self._params.items():
            master = self._masters[name]
            if master is p:
                continue
            total = self._sums.pop(name, p.grad)
            if isinstance(master, DTensor):
                own = torch.zeros_like(p, dtype=master.dtype) if total is None else total
                partial = DTensor.from_local(own, self.ranks.mesh, [Partial()], run_check=False)
                total = partial.redistribute(placements=master.placements).to(master.device)
            master.grad, p.grad = total, None
            self._mark_finished()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, p in self._params.items():
            if (master := self._masters[name]) is not p:
                p.copy_(_whole(master.to(p.device, p.dtype)) if isinstance(master, DTensor) else master)
                self._mark_finished()

    def _mark_finished(self) -> None:
        """Count a step of progress that other ranks took part in: a large tensor takes seconds on a slow network."""
        if self.ranks.mesh is not None and self.policy.device.type == "cuda":
            torch.cuda.synchronize()
        PROGRESS.mark()

    @property
    def fingerprint(self) -> int:
        """52 bits that depend on all bits of the masters, as `weights_changed` found them."""
        return self._fingerprints["weights/learner"] % 2**52

    def _as_weight(self, p: nn.Parameter, tensor: Tensor) -> Tensor:
        """Returns the weight of a tensor like its master. A part of a sharded layer is one itself."""
        return tensor if isinstance(p, DTensor) else _whole(tensor.to(p.device, p.dtype))

    def _exchange_reference(self, reference: dict[str, Tensor]) -> None:
        """Exchange the weights with those of the reference."""
        parts: dict[str, DTensor] = {}
        for name, p in self._params.items():
            if isinstance(tensor := cast(Tensor, p), DTensor):
                parts[name] = tensor
            else:
                p.data, reference[name] = reference[name], p.data
        if parts and self.policy.offloads_optimizer and self.policy.device.type == "cuda":
            torch.cuda.synchronize()  # The last pass may still copy layers from the CPU's memory.
        for name, part in parts.items():  # FSDP gathers a layer from this very tensor.
            if not isinstance(reference[name], DTensor):
                reference[name] = self._part(reference[name].to(part.dtype), part.placements)
            own, other = (cast(DTensor, tensor).to_local().detach() for tensor in (part, reference[name]))
            present = own.clone()
            own.copy_(other)
            other.copy_(present)

    def masters(self) -> list[Tensor]:
        """Returns the tensors that the optimiser changes: for float32 policies the weights themselves, or offloaded."""
        return list(self._masters.values())

    def adapter_weights(self) -> dict[str, Tensor] | None:
        """Returns the whole adapter as `policy.model` names it, or None if the model has it whole."""
        if not self._layers:
            return None
        return {name: _whole(p.detach().to(self.policy.dtype)) for name, p in self._params.items()}

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        """Returns all weights of the base model with the adapter folded in; on ranks other than 0 an empty dict."""
        base: Any = self.policy.model
        base = base.get_base_model() if self.policy.has_adapters else base
        is_first = self.ranks.rank == 0
        found = dict(merged_weights(base, without=self._layers)) if is_first else {}
        for path, module in base.named_modules():
            if module not in self._layers:
                continue
            with PROGRESS.counted():
                module.unshard()
                if is_first:
                    found |= {name: tensor.to("cpu", copy=True) for name, tensor in merged_weights(module, f"{path}.")}
                module.reshard()
        return found

    def state(self) -> dict[str, Any]:
        """Returns masters and moments by name, of this rank's parts. `restore` continues from them bit by bit."""
        moments: dict[str, dict[str, Any]] = self._optimizer.moments()
        if self.ranks.mesh is not None:  # Every rank writes the same names.
            moments = {name: moments[name] or new_moments(master) for name, master in self._masters.items()}
        more: dict[str, Any] = {} if self._values is None else {"values": self._values.state()}
        if self._optimizer.name != "adamw":
            more["optimizer_name"] = self._optimizer.name
        if self._moved_reference is not None:
            more["reference"] = self._moved_reference
        return {
            "masters": {name: master.detach() for name, master in self._masters.items()},
            "moments": moments,
            **more,
        }

    @property
    def reference_moved(self) -> bool:
        """True if the reference is no longer that of version 0."""
        return self._moved_reference is not None

    def new_state(self, *, reference: bool = False) -> dict[str, Any]:
        """Returns new tensors like masters and moments, by name, for `torch.distributed.checkpoint` to fill; with
        `reference` also those of a reference that has moved.
        """
        new = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        more = {"reference": {name: torch.zeros_like(tensor) for name, tensor in new.items()}} if reference else {}
        return {
            "masters": new,
            "moments": {name: new_moments(master) for name, master in self._masters.items()},
            **more,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; also takes whole tensors, and the optimiser's state by number.

        Drops an accumulated gradient. Raises `ConfigError` if the optimiser of the state cannot train this policy.
        """
        optimizer = Optimizer(state.get("optimizer_name", "adamw"), self.policy, self._masters)
        moments = state.get("moments")
        if moments is None:
            by_number = state["optimizer"]["state"]
            moments = {name: by_number.get(number) for number, name in enumerate(self._masters)}
        found: dict[str, dict[str, Any] | None] = dict.fromkeys(self._masters)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(self._like(state["masters"][name], master))
                if of_master := moments[name]:
                    found[name] = {
                        key: value if key == "step" else self._like(value, master) for key, value in of_master.items()
                    }
        self._optimizer.zero_grad()
        self._sums.clear()
        self._prepared = self._next_state = None
        self._contributed = self._only_values = False
        self._next_mix = 0.0
        self._copy_masters()
        optimizer.load(found)
        self._optimizer = optimizer
        self._values = ValueModel.restored(state["values"], self.policy) if "values" in state else None
        saved = state.get("reference")
        self._moved_reference = None
        if saved is not None:
            self._moved_reference = {name: self._copy_like(saved[name], m) for name, m in self._masters.items()}
        self.weights_changed()

    def _like(self, values: Tensor, master: Tensor) -> Tensor:
        """Returns a whole tensor in the parts of its master, and a tensor in parts unchanged."""
        if isinstance(values, DTensor) or not isinstance(master, DTensor):
            return values
        if values.shape != master.shape:
            raise ValueError(f"a weight has the shape {tuple(values.shape)} instead of {tuple(master.shape)}")
        return self._part(values.to(master.dtype), master.placements)

    def _copy_like(self, values: Tensor, master: Tensor) -> Tensor:
        """Returns a copy of a tensor in the parts, type and place of a master, without gradient."""
        with torch.no_grad():
            return torch.zeros_like(master, requires_grad=False).copy_(self._like(values, master))

    def weights_changed(self) -> dict[str, float]:
        """Returns 1 for the masters and for the sampler's weights if they changed since the last call, else 0.

        A float32 policy has one copy of the weights, unless it offloads its optimiser or a bug replaces a parameter.
        """
        known: dict[int, Tensor] = {}
        before = self._fingerprints
        self._fingerprints = {
            "weights/learner": fingerprint(self.masters(), self.ranks, known),
            "weights/sampler": fingerprint(list(self.policy.trainable().values()), self.ranks, known),
        }
        return {name: float(now != before.get(name)) for name, now in self._fingerprints.items()}


def _whole(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor that is divided among ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _reference_mix(recipe: Recipe, batch_id: int) -> float:
    """Returns the share of the weights in the reference after a batch; 0 if it stays."""
    moves = hooks.declared(recipe, "reference_moves")
    return moves.mix if moves is not None and moves.every and (batch_id + 1) % moves.every == 0 else 0.0


def _array(values: Tensor) -> NDArray[Any]:
    return values.cpu().numpy()


def _read(recipe: Recipe) -> set[str]:
    """Returns the columns of a forest that a loss gets."""
    return {"weight", "logprob", *(name for name in hooks.declared(recipe, "reads") if not name.startswith("new_"))}


def _count(sums: defaultdict[str, float], metrics: Mapping[str, Tensor], num_not_finite: float) -> None:
    sums[NOT_FINITE] += num_not_finite
    for name, values in metrics.items():
        sums[name] += float(values.detach().sum())


def _with_column(forest: Forest, name: str, values: NDArray[Any]) -> Forest:
    """Returns the forest with a column of any type."""
    return replace(forest, targets={**forest.targets, name: values})
