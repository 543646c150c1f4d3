"""`Recipe`: the algorithm of a run. Its fields are its parameters, and its methods are the hooks.

The gateway and the learner call the hooks:

| hook | called by | returns |
|---|---|---|
| `rollout` | gateway, before each training group | number of episodes, temperature, turn limit; or to skip the task |
| `accept` | gateway, for each finished group | '' to train the group, else the reason to drop it |
| `teacher_context` | gateway, for each episode and role of a batch | the text that only the teacher sees |
| `needs` | learner, once a batch | what must be computed before `columns` |
| `columns` | learner, once a batch | the forest with one number per token and column |
| `weights`, `contributing` | learner, once a mini-batch | the share of each token in the loss |
| `token_loss` | learner, for each micro-batch | the loss of each token |
| `batch_loss` | learner, once a mini-batch, instead of `token_loss` | the same, from all its tokens together |
| `next_state` | learner, after the last step of a batch | the numbers that `columns` and `rollout` get next |

The gateway calls those of a plug-in in a thread: `rollout` and `accept` one at a time, `reward_advantages` perhaps at
the same time.

A recipe is immutable. Its state, if it has any, is a table of numbers that the learner keeps with the weights and saves
in their checkpoint. So a replay of the journal with the same code gives the same weights. Shapes: M targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from agentjet.errors import did_you_mean
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.section import Int64, Section

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from agentjet.timeline.batch import TrainingBatch
    from agentjet.timeline.forest import Forest

Need = Literal["proximal", "reference", "teacher", "entropy"]
"""`proximal`: log-probabilities of the weights before the batch. `reference`: of the reference, the weights of version
0 unless `Recipe.reference_moves`. `teacher`: of the teacher that `Recipe.teaching` names; NaN for targets that it does
not grade. `entropy`: entropies of the distributions that the weights before the batch give, each over the set of its
token."""


Given = Literal["", "alone", "scored", "compared"]
"""Given answers without rewards, each with a reward, or in groups with different rewards. Empty: none, because given
answers lack the probabilities of a sampling policy."""


class ValueHeads(NamedTuple):
    """Linear heads on the policy's last hidden states. Each predicts a value before each target is sampled."""

    names: tuple[str, ...]
    lr: float
    """Learning rate of the heads. A step moves a value by about this at most."""
    body_coef: float
    """Factor of the gradient that reaches the weights of the policy. 0: only the heads learn."""
    warm_up: int = 0
    """First batches with these heads from which only the heads learn: the weights of the policy stay."""


class ReferenceMoves(NamedTuple):
    """When the reference moves: after each batch that ends a multiple of `every` batches of the policy."""

    every: int
    mix: float
    """Share of the present weights in the new reference, above 0. 1: they replace it. Else the old one keeps the rest,
    a moving average."""

    def problem(self) -> str:
        """Returns a sentence about values that cannot be used, or ''."""
        if not isinstance(self.every, int) or self.every < 1:
            return f"`every` is {self.every!r} instead of a number of batches, 1 or more"
        return "" if 0 < self.mix <= 1 else f"`mix` is {self.mix!r} instead of a share above 0, at most 1"


class Teaching(NamedTuple):
    """The teacher of a recipe, whose log-probabilities of the targets are the column `teacher` [M]; NaN where it has
    none. They are at the temperature and over the set of sampling.
    """

    sources: tuple[str, ...] = ()
    """Either the folder of a model, or `policy`: the weights before the batch, or `reference`: the weights of the
    reference, or the URLs of endpoints that serve one model. Without the need `teacher`: none, for the likely tokens of
    the policy alone.
    """
    model: str = ""
    """Name of the model at the endpoints."""
    top_k: int = 0
    """Likely tokens of each target: their ids are the column `top_ids` [M, top_k], the teacher's log-probabilities of
    them `teacher_top`. A loss that reads `new_top` gets the present ones, with gradient. Tokens outside the set of the
    target have -100."""
    top_of: Literal["teacher", "policy"] = "teacher"
    """The distribution that the likely tokens are of: the teacher's, or that of the weights before the batch, whose
    log-probabilities of them are then the column `old_top`."""
    has_context: bool = False
    """True if the teacher sees the text of `Recipe.teacher_context`."""

    def problem(self) -> str:
        """Returns a sentence about values that cannot be used, or ''."""
        if not isinstance(self.sources, tuple) or not all(isinstance(source, str) for source in self.sources):
            return f"`sources` is {self.sources!r} instead of a tuple of texts, such as ('reference',)"
        if not isinstance(self.top_k, int) or self.top_k < 0:
            return f"`top_k` is {self.top_k!r} instead of a number of tokens; 0: none"
        return "" if self.top_of in ("teacher", "policy") else f"`top_of` is {self.top_of!r}: 'teacher' or 'policy'"

    @property
    def is_endpoint(self) -> bool:
        return any(source.startswith(("http://", "https://")) for source in self.sources)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An episode of a batch and one of its roles, for `Recipe.teacher_context`."""

    task_id: str
    task_set: str
    reward: float
    """The reward of the policy."""
    text: str
    """The text that came with the reward."""
    metrics: Mapping[str, float]
    """The metrics that came with the reward."""
    answer: str
    """The text of the role's last trained answer."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The G episodes of a group whose members have all finished, for `Recipe.accept`."""

    task_id: str
    task_set: str
    rewards: Sequence[float]
    """The reward [G] of each episode."""
    metrics: Sequence[Mapping[str, float]]
    """The metrics [G] that clients sent with the rewards."""
    num_tokens: Sequence[int]
    """Sampled tokens [G] of each episode."""
    is_uniform: bool
    """True if all rewards are equal: those of the episodes and of roles, and those of each role's turns if the recipe
    has `needs_call_rewards`."""


class Component(Section):
    """A recipe or a part of one, chosen by name. Unknown parameters are refused with the nearest name."""

    name: str = ""
    """The name or import path by which it was chosen."""

    @classmethod
    def parameters(cls) -> Iterator[tuple[str, FieldInfo]]:
        """Returns the parameters by name, without those of inner parts."""
        return ((name, field) for name, field in cls.model_fields.items() if name != "name")

    @classmethod
    def paths(cls) -> Iterator[str]:
        """Returns the names of the parameters. Those of inner parts, such as a loss, have its name in front."""
        for name, field in cls.parameters():
            yield name
            if isinstance(field.default, Component):
                yield from (f"{name}.{inner}" for inner in field.default.paths())

    @model_validator(mode="before")
    @classmethod
    def _parameters_are_known(cls, values: Any) -> Any:
        unknown = [key for key in values if key not in cls.model_fields] if isinstance(values, dict) else []
        if not unknown:
            return values
        of = values.get("name") or cls.model_fields["name"].default or cls.__name__
        errors: list[InitErrorDetails] = []
        for key in unknown:
            known = ", ".join(name for name, _ in cls.parameters()) or "none"
            way_out = did_you_mean(str(key), cls.paths(), f"it has {known}", separator=".")
            message = f"{of!r} has no parameter {key!r}; {way_out}"
            kind = PydanticCustomError("unknown_parameter", "{message}", {"message": message})
            errors.append({"type": kind, "loc": (key,), "input": values[key]})
        raise ValidationError.from_exception_data(cls.__name__, errors)


class Recipe(Component):
    """The algorithm of the run. These parameters exist in every recipe; docs/recipes.md has the others of each one."""

    name: str = "grpo"
    """Name, or import path `package.module:Class`. `recipe = "gspo"` is short for a section with this name."""
    epochs: Int64 = Field(1, ge=1)
    """Passes over each batch."""
    mini_batches: Int64 = Field(1, ge=1)
    """Optimiser steps in each pass."""
    max_dropped_groups: Int64 = Field(0, ge=0)
    """Maximum number of groups that the recipe drops for one batch; further ones are trained. 0: ten times
    `batch_size`."""

    needs_call_rewards: ClassVar[bool] = False
    """True if episodes that end without rewards of calls (`by_turn`, `by_call`) are refused."""
    only_given: ClassVar[bool] = False
    """True if it learns from given answers only (demonstrations): training episodes are refused."""
    takes_given: ClassVar[Given] = ""
    """The given answers (demonstrations) that it learns from if a request names it."""
    smallest_group: ClassVar[int] = 1
    """Smallest `job.group_size` that has a training signal."""
    chooses_task_sets: ClassVar[bool] = False
    """True if `rollout` decides which task set is sampled. `job.task_weights` is then refused."""
    reads_task_means: ClassVar[bool] = False
    """True if it compares rewards with `Facts.task_means`, which are of episodes. It is refused in runs with named
    policies, whose rewards may have another scale."""

    @property
    def needs(self) -> frozenset[Need]:
        """Columns that the learner computes for `columns`, once a batch, over all targets. One pass computes
        `proximal` and `entropy`.
        """
        return frozenset()

    @property
    def value_heads(self) -> ValueHeads | None:
        """Heads whose values [M] `columns` gets by name, as the heads of the batch's start give them."""
        return None

    @property
    def teaching(self) -> Teaching | None:
        """The teacher of the need `teacher`, and the likely tokens."""
        return None

    @property
    def reference_moves(self) -> ReferenceMoves | None:
        """When the reference moves. None: it stays as it is."""
        return None

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the loss reads. The learner computes these:

        * `reference` [M], if it is missing: log-probabilities of the reference.
        * `new_entropy` [M]: entropies of the present distributions, with gradient.
        * `new_top` [M, K]: present log-probabilities of the likely tokens of `teaching`, with gradient.
        * With value heads, also their present values [M] with gradient, as `new_` and the name of the head.
        """
        return ("logprob",)

    @property
    def reports(self) -> tuple[str, ...]:
        """Metrics of `token_loss` that are 0 for a token that is not computed."""
        return ()

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        """Returns how the next group of a task is sampled: `default`, or `replace(default, ...)` with other values.

        `default` has the settings of the job. `version` is the present policy version. Raises `InvalidRequest` for a
        task that the recipe cannot place, such as one of an unknown task set: the client gets the refusal.
        """
        return default

    def accept(self, group: FinishedGroup) -> str:
        """Returns '' to train a finished group, or the reason to drop it: a short name of letters a-z and `_`, by which
        drops are counted.
        """
        return ""

    def teacher_context(self, attempt: Attempt, others: Sequence[Attempt]) -> str | None:
        """Returns a text that only the teacher sees, below the first message of the user in each call of an attempt:
        a demonstration, or words about the attempt. '' for none; None if the attempt is not to be graded.

        `others` are the other attempts of the group, of the same role. For recipes whose `teaching` has a context.
        """
        return ""

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
        """Returns the forest of the targets that count, with the columns that the loss reads, and metrics.

        `outputs` has the numbers [M] of each of `needs` and value heads. So has the forest of the batch, as columns.
        """
        return batch.forest, {}

    def reward_advantages(self, batch: TrainingBatch) -> NDArray[np.float64] | None:
        """Returns the advantage [E, R] of each episode and role, for people, or None if tokens or calls decide it.

        Only facts about episodes may be read: the forest and facts about calls raise errors.
        """
        return None

    def next_state(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Returns `batch.state` of the next batch: finite numbers by name. Default: unchanged. They are also metrics
        of this batch with `state/` in front, which `rollout` finds in `task.last_step`.

        `metrics` are those of the batch, of `columns` and `token_loss`: means over its steps. The state is empty before
        the first batch of a recipe with this name. Not called for a batch with a metric that is not finite.
        """
        return state

    def weights(self, forest: Forest) -> NDArray[np.float32]:
        """Returns the weight [M] of each token in the loss of a mini-batch. Default: 1 / M, the mean."""
        import numpy as np

        return np.full(forest.num_targets, 1 / max(1, forest.num_targets), np.float32)

    def contributing(self, forest: Forest) -> NDArray[np.bool_]:
        """Returns True [M] for targets that must be computed. Others have no gradient. Default: all."""
        import numpy as np

        return np.full(forest.num_targets, True)

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses [M] of tokens, with gradient, and metrics [M] whose means are reported.

        `logp` [M] are their log-probabilities, with gradient.
        """
        raise NotImplementedError

    @property
    def takes_batch(self) -> bool:
        """True if the loss is `batch_loss`."""
        return type(self).batch_loss is not Recipe.batch_loss

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses [M] of all tokens of a mini-batch, or its whole loss as one number, and metrics [M].

        For losses that compare tokens with each other: the ratio of a sequence, pairs, quantiles. A recipe that has it
        has no `token_loss`. Columns of whole numbers, such as `sequence` and `call`, are int64. Any differentiable
        function of `logp` and of the columns with gradient is exact, for any micro-batches and ranks: the learner
        takes its derivative by these numbers, and then their gradients with this derivative as weights. For that it
        computes them twice, unless the mini-batch is one micro-batch.
        """
        raise NotImplementedError
