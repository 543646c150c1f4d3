"""DigiRL's instruction-level curriculum."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient
from agentjet.recipes.shelf.rft import CrossEntropy
from agentjet.recipes.shelf.single_stream import surprises
from agentjet.timeline.batch import TrainingBatch


class DigirlCurriculum(PolicyGradient):
    """DigiRL's instruction-level curriculum: cross-entropy on the most surprising successes.

        L = -log(policy), mean over the tokens of episodes with r_i - v_i > 0 and r_i - v_i >= quantile of the batch
        v_i as in `single_stream`: the mean reward of the task's newest 32 episodes before the group

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
    reads_task_means: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = "compares the reward with those of earlier episodes"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = batch.facts
        assert facts is not None
        surprises_ER = surprises(facts, self.comparisons(facts))
        found = surprises_ER[~np.isnan(surprises_ER)]
        lowest = max(np.quantile(found, self.quantile), np.nextafter(0, 1)) if len(found) else np.inf
        return np.asarray(np.nan_to_num(surprises_ER, nan=-np.inf) >= lowest, np.float64)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without rejected episodes."""
        return np.asarray(advantage != 0)
