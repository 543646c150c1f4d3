"""On-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.recipe import Need
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest


class Distill(PolicyGradient):
    """On-policy distillation: the policy samples, and a teacher grades each token. Rewards are not used.

        A_t = log teacher(y_t) - log sampling policy(y_t),  L = clip: the reverse KL of each token, one sample of it

    Source: arXiv 2306.13649 (GKD) with its reverse KL, in the one-sample form of MiniLLM, 2306.08543, with discount 0.
    Confidence: inspired by. Teachers are folders, because an endpoint has other tokens, and does not return the
    log-probability of a given token under the set and temperature of sampling.
    Use: a small model that is to do what a larger or a trained one with the same tokenizer does.
    Cost: one forward pass of the teacher, which the worker holds beside the policy.
    """

    name: str = "distill"
    teacher: str = ""
    """Folder of the teacher, such as one that `agentjet export` wrote. It must not change during the run."""

    smallest_group: ClassVar[int] = 1
    compares_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"teacher"}

    @property
    def teacher_folder(self) -> str:
        return self.teacher

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        return np.asarray(batch.forest["teacher"] - batch.forest["logprob"])

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
        forest, metrics = super().columns(batch, outputs)
        if batch.forest.num_targets:
            gap = batch.forest["logprob"] - batch.forest["teacher"]
            metrics["policy/teacher_kl"] = float(gap.mean(dtype=np.float64))
        return forest, metrics
