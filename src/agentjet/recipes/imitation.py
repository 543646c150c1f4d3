"""Imitation: makes given answers or chosen episodes likelier.

| imitated | recipes |
|---|---|
| given answers | `sft` |
| episodes with a large reward | `rft`; `digirl_curriculum`, larger than the task's earlier ones |

`awr` in `offline` weighs all episodes, `digirl` in `critic` chooses calls, and a teacher of `distillation` grades
tokens. `_ER` are episodes and roles, `_G` the members of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.losses import CrossEntropy, token_weights
from agentjet.recipes.policy_gradient import FloatArray, OwnLoss, PolicyGradient, facts_of
from agentjet.recipes.recipe import Recipe
from agentjet.recipes.rewards import surprises
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest

if TYPE_CHECKING:
    from torch import Tensor

CROSS_ENTROPY = "policy/cross_entropy"


class Sft(Recipe):
    """Supervised fine-tuning: cross-entropy on given answers, the demonstrations of `agentjet sft` and `swarm.sft`.

        L = -log(policy), mean over the tokens of the answers with their end tokens

    Source: standard. Confidence: reproduced.
    Use: a warm start. A run with any other recipe uses this one for demonstrations, so it need not be chosen.
    As the recipe of a run it refuses training episodes: for sampled answers with a good reward there is `rft`.
    Cost: one forward and backward pass; nothing is sampled.
    """

    name: str = "sft"
    aggregation: Literal["token_mean", "sequence_mean"] = Field("token_mean")
    """Mean over the tokens of the batch, or mean over demonstrations of their token means."""

    only_given: ClassVar[bool] = True

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def reports(self) -> tuple[str, ...]:
        return (CROSS_ENTROPY,)

    def weights(self, forest: Forest) -> NDArray[np.float32]:
        return token_weights(self.aggregation, forest["sequence"], forest.num_sequences)

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -logp, {CROSS_ENTROPY: -logp}


class Imitation(PolicyGradient):
    """The base of recipes whose advantages are 1 for episodes that are imitated and 0 for others."""

    loss: OwnLoss = CrossEntropy()

    smallest_group: ClassVar[int] = 1

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without rejected episodes."""
        return np.asarray(advantage != 0)


class Rft(Imitation):
    """Rejection fine-tuning: cross-entropy on the episodes whose reward reaches a threshold.

        L = -log(policy), mean over the tokens of episodes with r_i >= threshold

    Source: standard, also called filtered behaviour cloning. Confidence: reproduced.
    Use: a first phase for models that rarely succeed; groups of one are enough.
    Cost: less than GRPO: failed episodes are not computed.
    """

    name: str = "rft"
    threshold: float = Field(1.0)
    """Smallest reward of an episode that is imitated."""

    no_kl_in_reward: ClassVar[str] = "compares the reward with a threshold"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        return np.where(rewards_G >= self.threshold, 1.0, 0.0)


class DigirlCurriculum(Imitation):
    """DigiRL's instruction-level curriculum: cross-entropy on the most surprising successes.

        L = -log(policy), mean over the tokens of episodes with r_i - v_i > 0 and r_i - v_i >= quantile of the batch
        v_i as in `single_stream`: the mean reward of the task's newest 32 episodes before the group

    Source: github.com/DigiRL-agent/digirl at c74ec34, with task statistics instead of a critic, and the quantile over
    the batch instead of a buffer. Confidence: inspired by. `digirl` has the step level.
    Use: rewards of 0 and 1, and tasks of very different difficulty; a group may have one episode.
    Cost: less than GRPO: the other episodes are not computed.
    """

    name: str = "digirl_curriculum"
    quantile: float = Field(0.9, ge=0, lt=1)
    """Part of the batch's episodes that is less surprising than the trained ones."""

    reads_task_means: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = "compares the reward with those of earlier episodes"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = facts_of(batch)
        surprises_ER = surprises(facts, self.comparisons(facts))
        found = surprises_ER[~np.isnan(surprises_ER)]
        # A surprise of exactly 0 is not imitated, so the bound is the smallest number above 0.
        lowest = max(np.quantile(found, self.quantile), np.nextafter(0, 1)) if len(found) else np.inf
        return np.asarray(np.nan_to_num(surprises_ER, nan=-np.inf) >= lowest, np.float64)
