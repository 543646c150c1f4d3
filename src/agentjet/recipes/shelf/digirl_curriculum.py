"""DigiRL's instruction-level curriculum."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient
from agentjet.recipes.shelf.rft import CrossEntropy
from agentjet.timeline.batch import TrainingBatch


class DigirlCurriculum(PolicyGradient):
    """DigiRL's instruction-level curriculum: cross-entropy on the most surprising successes.

        L = -log(policy), mean over the episodes with r_i - v_i > 0 and r_i - v_i >= quantile of it in the batch
        v_i = mean reward of the task's newest 32 episodes before the group; before the first group the batch's mean

    Source: github.com/DigiRL-agent/digirl at c74ec34, with task statistics instead of a critic, and the quantile over
    the batch instead of a buffer. Confidence: inspired by. `digirl` has the step level.
    Use: rewards of 0 and 1, and tasks of very different difficulty; a group may have one episode.
    Cost: less than GRPO: the other episodes are not computed.
    """

    name: str = "digirl_curriculum"
    loss: SerializeAsAny[PolicyLoss] = CrossEntropy()
    """The policy loss."""
    quantile: float = Field(0.9, ge=0, lt=1)
    """Part of the batch's episodes that is less surprising than the trained ones."""

    smallest_group: ClassVar[int] = 1
    takes_kl_in_reward: ClassVar[bool] = False

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = batch.facts
        assert facts is not None
        means_E = np.full(len(facts.rewards), np.nan) if facts.task_means is None else facts.task_means
        values_E = np.where(np.isnan(means_E), facts.rewards.mean(), means_E)
        surprise_E = facts.rewards - values_E
        kept_E = (surprise_E > 0) & (surprise_E >= np.quantile(surprise_E, self.quantile))
        return np.where(self.compared(facts), kept_E[:, None], False).astype(np.float64)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without rejected episodes."""
        return np.asarray(advantage != 0)
