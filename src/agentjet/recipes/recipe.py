"""`Recipe`: the algorithm of a run. Its fields are its parameters, and its methods are the hooks.

The gateway and the learner call the hooks:

| hook | called by | returns |
|---|---|---|
| `rollout` | gateway, before each training group | number of episodes, temperature, turn limit; or to skip the task |
| `accept` | gateway, for each finished group | '' to train the group, else the reason to drop it |
| `needs` | learner, once a batch | what must be computed before `columns` |
| `columns` | learner, once a batch | the forest with one number per token and column |
| `weights`, `contributing` | learner, once a mini-batch | the share of each token in the loss |
| `token_loss` | learner, for each micro-batch | the loss of each token |

A recipe is immutable and has no state, so a replay of the journal with the same code gives the same weights. Shapes: M
targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.section import Int64, Section

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from agentjet.timeline.batch import TrainingBatch
    from agentjet.timeline.forest import Forest

Need = Literal["proximal", "reference"]
"""`proximal`: log-probabilities of the weights before the batch. `reference`: of the weights of version 0."""


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

    @model_validator(mode="before")
    @classmethod
    def _parameters_are_known(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                known = [name for name, _ in cls.parameters()]
                nearest = get_close_matches(str(key), known, 1)
                way_out = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known) or 'none'}"
                name = values.get("name") or cls.model_fields["name"].default or cls.__name__
                raise ValueError(f"{name!r} has no parameter {key!r}; {way_out}")
        return values


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
    smallest_group: ClassVar[int] = 1
    """Smallest `job.group_size` that has a training signal."""
    chooses_task_sets: ClassVar[bool] = False
    """True if `rollout` decides which task set is sampled. `job.task_weights` is then refused."""

    @property
    def needs(self) -> frozenset[Need]:
        """Log-probabilities that the learner computes for `columns`, once a batch, over all targets."""
        return frozenset()

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that `token_loss` reads. The learner computes `reference` and `sequence_log_ratio` if missing.

        `reference` [M]: log-probabilities of the weights of version 0. `sequence_log_ratio` [M]: mean of
        logp - logprob over the token's sequence, without gradient.
        """
        return ("logprob",)

    @property
    def reports(self) -> tuple[str, ...]:
        """Metrics of `token_loss` that are 0 for a token that is not computed."""
        return ()

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        """Returns how the next group of a task is sampled: `default`, or `replace(default, ...)` with other values.

        `default` has the settings of the job. `version` is the present policy version.
        """
        return default

    def accept(self, group: FinishedGroup) -> str:
        """Returns '' to train a finished group, or the reason to drop it: a short name of letters a-z and `_`, by which
        drops are counted.
        """
        return ""

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
        """Returns the forest of the targets that count, with the columns that the loss reads, and metrics.

        `outputs` has the log-probabilities [M] of each of `needs`.
        """
        return batch.forest, {}

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
