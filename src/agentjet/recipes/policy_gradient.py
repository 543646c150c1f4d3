"""`PolicyGradient`: the base of GRPO and its relatives. An advantage per token, a policy loss, corrections, a KL term.

A new estimator overrides one of three methods: `group_advantages` from the rewards of a group, `sequence_advantages`
from the facts of the batch, or `token_advantages`. Shapes, here and in the chapters: E episodes, R roles, G members of
a group, C calls, M targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from agentjet.recipes import hooks, registry
from agentjet.recipes.losses import (
    KL_ESTIMATES,
    Clip,
    Level,
    PolicyLoss,
    corrected,
    find_loss,
    importance_ratio,
    kl_k3,
    token_weights,
    vetoed,
)
from agentjet.recipes.recipe import FinishedGroup, Need, Recipe, ReferenceMoves
from agentjet.section import Int64
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, select

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float64]
Outputs = Mapping[str, NDArray[np.float32]]
"""Numbers [M] that the learner computed, by the names of `needs` and value heads."""
OwnLoss = Annotated[SerializeAsAny[PolicyLoss], Field(description="The policy loss.")]
"""The field `loss` of a recipe with another default."""
EPS = 1e-6
"""Limits advantages at tiny standard deviations. verl uses the same value."""
MISMATCH = "policy/mismatch_kl"
PRESENT_ENTROPY = "policy/present_entropy"
LEARNED_COLUMNS = frozenset(
    {"advantage", "call", "logprob", "new_entropy", "reference", "sequence", "temperature", "version"}
)
"""Columns that every policy loss may read."""


class Comparison(NamedTuple):
    """Episodes [G] that are compared with each other for one role, and their rewards [G]."""

    episodes: NDArray[np.intp]
    role: int
    rewards: FloatArray


class PolicyGradient(Recipe):
    """The parameters and the arithmetic that policy gradients with group baselines share."""

    loss: SerializeAsAny[PolicyLoss] = Clip()
    """The policy loss: `clip`, the name of a recipe, whose loss is taken, or a section with `name` and parameters."""
    aggregation: Literal["auto", "token_mean", "sequence_mean", "sequence_sum", "constant"] = "auto"
    """Reduction of the token losses: mean over the batch's tokens, mean over sequences of their token means or of
    their sums, or sum / `constant`. `auto`: that of the loss."""
    constant: float = Field(0.0, ge=0)
    """For `aggregation = "constant"`: divisor of the summed loss, besides the number of sequences."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty against the reference: the weights of version 0, unless it moves. 0: no penalty."""
    reference_every: Int64 = Field(0, ge=0)
    """Batches after which the reference moves to the present weights. 0: it does not move."""
    reference_mix: float = Field(1.0, gt=0, le=1)
    """Share of the present weights in a reference that moves. 1: they replace it; less: a moving average."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL penalty: the loss of each token, or the reward, from which its sum over the tokens of each
    episode and role is subtracted."""
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """Estimate of the KL divergence from the log-ratio x: `k1` is x, `k2` is x^2 / 2, `k3` is exp(-x) + x - 1. `auto`:
    `k3` in the loss, `k1` in the reward."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the entropy of each present distribution is subtracted from the token's loss. 0: no
    bonus. Negative values lower the entropy."""
    correction: Literal["none", "tis", "icepop", "mis"] = "none"
    """Correction for tokens sampled by older weights. `tis`: truncated importance weights. `icepop`, `mis`: importance
    weights with outliers set to 0; `icepop` counts outliers in the denominators, `mis` does not."""
    correction_low: float = Field(0.5, ge=0)
    """Ratios below this bound are outliers (`icepop`, `mis`)."""
    correction_high: float = Field(2.0, gt=0)
    """Ratios above this bound are reduced to it (`tis`) or are outliers (`icepop`, `mis`). With `icepop` it is 5 unless
    it is set, as published."""
    correction_level: Level = "token"
    """The ratio that is corrected: that of the token, or the product or the geometric mean over the token's sequence.
    Geometric means are close to 1 and need narrow bounds."""
    correction_veto: float = Field(0.0, ge=0, lt=1)
    """Sequences with a token whose ratio is below this bound are left out. 0: none."""
    by_role: bool = False
    """Compute the advantages of each role only over the episodes in which the role has calls (Dr. MAS)."""
    drop_zero_variance: bool = False
    """Dynamic sampling: drop groups whose rewards are all equal, and sample others instead."""

    drop_truncated: bool = False
    """Overlong filtering (DAPO): leave out the tokens of an episode and role with an answer that was cut at its token
    limit. Its reward is compared with the others nevertheless."""

    smallest_group: ClassVar[int] = 2
    compares_rewards: ClassVar[bool] = True
    """False if the advantages do not come from `comparisons`. `by_role` and `kl_in = "reward"` are then refused."""
    equal_rewards_teach: ClassVar[bool] = False
    """True if groups with equal rewards teach, too. `drop_zero_variance` is then refused, as for groups of one."""
    no_kl_in_reward: ClassVar[str] = ""
    """Verb and object that say why `kl_in = "reward"` is refused although rewards are compared; '' if it is not."""

    # ---- advantages ----------------------------------------------------------------------------------------

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        """Returns the advantages [G] of episodes that are compared with each other."""
        return centred(rewards_G)

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        """Returns the advantage [E, R] of each episode and role."""
        facts = facts_of(batch)
        advantages_ER = np.zeros(facts.spoke.shape)
        for episodes, role, rewards_G in self.comparisons(facts):
            advantages_G = self.group_advantages(rewards_G)
            hooks.check_group(self, advantages_G, rewards_G)
            advantages_ER[episodes, role] = advantages_G
        return advantages_ER

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        """Returns the advantage [M] of each target."""
        facts, advantages_ER = facts_of(batch), self.sequence_advantages(batch)
        hooks.check_shape(self, "sequence_advantages", advantages_ER, facts.spoke.shape, "each episode and role")
        return facts.of_tokens(advantages_ER, batch.forest).astype(np.float32)

    def comparisons(self, facts: Facts) -> Iterator[Comparison]:
        """Yields the episodes that are compared, for each group and role.

        If any member names a reward for the role, the members that do are compared by it. Otherwise all are compared by
        the episode's reward. A member that is not compared has advantage 0.

        With `by_role` only members in which the role spoke are compared (Dr. MAS, github.com/langfengQ/DrMAS). Each
        member counts once, while Dr. MAS counts calls.
        """
        rewards_ER = compared_rewards(facts)
        for group in np.unique(facts.groups):
            members = np.flatnonzero(facts.groups == group)
            for role in np.flatnonzero(facts.spoke[members].any(0)).tolist():
                rewards_G = rewards_ER[members, role]
                compared_G = ~np.isnan(rewards_G) & (facts.spoke[members, role] | (not self.by_role))
                if compared_G.any():
                    yield Comparison(members[compared_G], role, rewards_G[compared_G])

    def compared(self, facts: Facts) -> NDArray[np.bool_]:
        """Returns True [E, R] for the episodes and roles that are compared."""
        compared_ER = np.zeros(facts.spoke.shape, bool)
        for episodes, role, _ in self.comparisons(facts):
            compared_ER[episodes, role] = True
        return compared_ER

    def compared_tokens(self, batch: TrainingBatch) -> NDArray[np.bool_]:
        """Returns True [M] for the targets of episodes and roles that are compared; without facts, for all."""
        if batch.facts is None:
            return np.full(batch.forest.num_targets, True)
        return batch.facts.of_tokens(self.compared(batch.facts).astype(np.float64), batch.forest) > 0

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Returns True [M] for the targets that count; others are in no denominator. Default: all."""
        return np.full(batch.forest.num_targets, True)

    def loss_columns(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Returns further columns [M] that the recipe's loss reads, besides those of the learner. Default: none."""
        return {}

    # ---- hooks ---------------------------------------------------------------------------------------------

    @property
    def needs(self) -> frozenset[Need]:
        of_correction: set[Need] = set() if self.correction == "none" else {"proximal"}
        of_reward: set[Need] = {"reference"} if self.kl_coef and self.kl_in == "reward" else set()
        return frozenset(of_correction | of_reward)

    @property
    def reads(self) -> tuple[str, ...]:
        reference = ("reference",) if self.kl_coef and self.kl_in == "loss" else ()
        return (*self.loss.reads, *reference, *(("new_entropy",) if self.entropy_coef else ()))

    @property
    def reference_moves(self) -> ReferenceMoves | None:
        moves = self.reference_every and self._reads_reference
        return ReferenceMoves(self.reference_every, self.reference_mix) if moves else None

    @property
    def _reads_reference(self) -> bool:
        teaching = self.teaching
        return "reference" in {*self.needs, *self.reads} or (
            teaching is not None and teaching.sources == ("reference",)
        )

    @property
    def reports(self) -> tuple[str, ...]:
        return self.loss.reports

    def accept(self, group: FinishedGroup) -> str:
        return "zero_variance" if self.drop_zero_variance and group.is_uniform else ""

    def reward_advantages(self, batch: TrainingBatch) -> FloatArray | None:
        of_tokens = type(self).token_advantages is not PolicyGradient.token_advantages
        own_columns = type(self).columns is not PolicyGradient.columns
        if (
            of_tokens
            or own_columns
            or self.by_role
            or not self.compares_rewards
            or (self.kl_coef and self.kl_in == "reward")
        ):
            return None
        return self.sequence_advantages(batch)

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        """Adds advantages. With a correction, the log-probabilities of the present weights become the old ones, and the
        correction scales the advantages.
        """
        behaviour = batch.forest["logprob"]
        # The entropy is unbiased, over every sampled token, and needs no forward pass.
        metrics = {"policy/entropy": -float(behaviour.mean(dtype=np.float64))} if len(behaviour) else {}
        if self.kl_coef and self.kl_in == "reward":
            batch, metrics["policy/kl"] = self._less_kl(batch, outputs["reference"])
        advantage = batch.forest["advantage"] if batch.facts is None else self.token_advantages(batch)
        forest = batch.forest.with_columns(advantage=advantage, **self.loss_columns(batch, advantage))
        if not forest.num_targets:
            return forest, {}
        counting = self._counting(batch, advantage)
        if self.correction == "none":
            return forest if counting.all() else select(forest, counting), metrics
        import torch

        proximal = outputs["proximal"]
        ratio = importance_ratio(proximal, behaviour, forest["sequence"], self.correction_level)
        weight, counts = corrected(self.correction, ratio, self.correction_low, self.correction_high)
        if self.correction_veto:
            out = vetoed(importance_ratio(proximal, behaviour), forest["sequence"], self.correction_veto)
            weight, counts = np.where(out, np.float32(0), weight), counts & ~out
        metrics |= {
            MISMATCH: float(kl_k3(torch.from_numpy(behaviour.copy()), torch.from_numpy(proximal)).mean()),
            "policy/correction_mean": float(weight.mean()),
            "policy/correction_dropped": float((weight == 0).mean()),
        }
        forest = forest.with_columns(advantage=advantage * weight, logprob=proximal)
        counts &= counting
        return forest if counts.all() else select(forest, counts), metrics

    def _counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Returns `counting` [M], without truncated episodes if they are dropped."""
        counting = self.counting(batch, advantage)
        if not self.drop_truncated or batch.facts is None:
            return counting
        whole_ER = np.ones(batch.facts.spoke.shape)
        np.multiply.at(whole_ER, (batch.facts.call_episode, batch.facts.call_role), ~batch.facts.call_truncated)
        return np.asarray(counting & (batch.facts.of_tokens(whole_ER, batch.forest) > 0))

    def _less_kl(self, batch: TrainingBatch, reference: NDArray[np.float32]) -> tuple[TrainingBatch, float]:
        """Returns the batch with the KL penalty in its rewards, and the mean of the estimates."""
        import torch

        logp = torch.from_numpy(batch.forest["logprob"].astype(np.float64))
        kl = self.kl(logp, torch.from_numpy(reference.astype(np.float64))).numpy()
        penalties_ER = sums(batch, self.kl_coef * kl)
        return penalised(batch, penalties_ER), float(kl.mean()) if len(kl) else 0.0

    def kl(self, logp: Tensor, reference: Tensor) -> Tensor:
        """Returns the estimate [M] of the KL divergence from the reference."""
        name = {"loss": "k3", "reward": "k1"}[self.kl_in] if self.kl_estimator == "auto" else self.kl_estimator
        return KL_ESTIMATES[name](logp, reference)

    def weights(self, forest: Forest) -> NDArray[np.float32]:
        name = self.loss.aggregation if self.aggregation == "auto" else self.aggregation
        return token_weights(name, forest["sequence"], forest.num_sequences, self.constant)

    def contributing(self, forest: Forest) -> NDArray[np.bool_]:
        """Without another term, a token with advantage 0 adds nothing to a loss that is linear in the advantage. A loss
        over sequences needs every token of a sequence that has any advantage.
        """
        if {"reference", "new_entropy"} & {*self.reads} or not self.loss.is_linear:
            return np.full(forest.num_targets, True)
        contributes: NDArray[np.bool_] = forest["advantage"] != 0
        if self.loss.takes_batch:
            contributes = np.isin(forest["sequence"], forest["sequence"][contributes])
        return contributes

    @property
    def takes_batch(self) -> bool:
        return self.loss.takes_batch

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.loss.token_loss(logp, columns)
        return self.with_terms(loss, metrics, logp, columns)

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.loss.batch_loss(logp, columns)
        return self.with_terms(loss, metrics, logp, columns)

    def with_terms(
        self, loss: Tensor, metrics: dict[str, Tensor], logp: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses [M] with the further terms of the recipe, such as a KL penalty, and their metrics [M].

        A column `kl_coef` or `entropy_coef` has the place of the parameter, for weights that are state.
        """
        if self.kl_coef and self.kl_in == "loss":
            metrics["policy/kl"] = kl = self.kl(logp, columns["reference"])
            loss = loss + columns.get("kl_coef", self.kl_coef) * kl
        if "new_entropy" in columns:
            metrics[PRESENT_ENTROPY] = entropy = columns["new_entropy"]
            loss = loss - columns.get("entropy_coef", self.entropy_coef) * entropy
        return loss, metrics

    # ---- checks --------------------------------------------------------------------------------------------

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_is_found(cls, value: object) -> object:
        if isinstance(value, PolicyLoss):
            return value
        own: PolicyLoss = cls.model_fields["loss"].default
        given = registry.as_table(value, "loss")
        name = given.get("name") or own.name
        if name == own.name:  # The recipe may have other defaults than the loss.
            return type(own).model_validate({**own.model_dump(), **given, "name": name})
        loss, changed = find_loss(name)
        unknown = set(loss.reads) - set(own.reads) - LEARNED_COLUMNS
        if unknown:
            raise ValueError(
                f"loss = {name!r}: the recipe {cls.model_fields['name'].default!r} does not make the column "
                f"{min(unknown)!r} that this loss reads; set recipe = {name!r}, which makes it"
            )
        return loss.model_validate({**changed, **given, "name": name})

    @model_validator(mode="after")
    def _groups_are_compared(self) -> Self:
        if self.drop_zero_variance and (self.smallest_group == 1 or self.equal_rewards_teach):
            learns = "learn from the reward alone" if self.equal_rewards_teach else "compare the episodes of a group"
            raise ValueError(
                f"drop_zero_variance = True: the recipe {self.name!r} does not {learns}, so groups with equal rewards "
                "teach, too; set it to False"
            )
        if self.drop_zero_variance and self.kl_coef and self.kl_in == "reward":
            raise ValueError(
                "drop_zero_variance = True: the penalty of kl_in = 'reward' makes the rewards of a group differ, so "
                f"groups with equal rewards teach, too; set drop_zero_variance of {self.name!r} to False"
            )
        if self.by_role and not self.compares_rewards:
            raise ValueError(
                f"by_role = True: the recipe {self.name!r} does not compare rewards of episodes; set it to False"
            )
        return self

    @model_validator(mode="after")
    def _constant_is_given(self) -> Self:
        if self.aggregation == "constant" and self.constant <= 0:
            raise ValueError("aggregation = 'constant' needs constant > 0, usually the maximum completion length")
        return self

    @model_validator(mode="after")
    def _kl_fits(self) -> Self:
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator = 'k1' in the loss has a gradient that is 0 on average; set it to 'k2' or 'k3', or set "
                "kl_in = 'reward'"
            )
        reason = self.no_kl_in_reward if self.compares_rewards else "does not compare rewards of episodes"
        if self.kl_in == "reward" and reason:
            raise ValueError(f"kl_in = 'reward': the recipe {self.name!r} {reason}; set kl_in to 'loss'")
        return self

    @model_validator(mode="after")
    def _reference_is_read(self) -> Self:
        is_set = self.reference_every != type(self).model_fields["reference_every"].default
        if is_set and self.reference_every and not self._reads_reference:
            raise ValueError(
                f"reference_every = {self.reference_every}: the recipe {self.name!r} reads no reference; set kl_coef "
                "above 0, or reference_every to 0"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _icepop_as_published(cls, values: Any) -> Any:
        """IcePop keeps ratios from 0.5 to 5 (2510.18855)."""
        is_icepop = isinstance(values, dict) and values.get("correction") == "icepop"
        return {"correction_high": 5.0, **values} if is_icepop else values

    @model_validator(mode="after")
    def _correction_fits(self) -> Self:
        if self.correction_veto and self.correction == "none":
            raise ValueError(
                f"correction_veto = {self.correction_veto} needs a correction; set correction, for instance to 'tis'"
            )
        is_at_most_one = self.correction == "tis" and self.correction_high == 1  # DART's truncation
        if not self.correction_low < 1 < self.correction_high and not (is_at_most_one and self.correction_low < 1):
            raise ValueError(
                f"correction_low = {self.correction_low} and correction_high = {self.correction_high} must lie on "
                "either side of 1, the ratio of unchanged weights"
            )
        if self.correction != "none" and not self.loss.is_linear:
            raise ValueError(
                f"correction = {self.correction!r}: the loss {self.loss.name!r} is not linear in the advantage, so an "
                "importance weight cannot scale it; set correction to 'none'"
            )
        return self


def facts_of(batch: TrainingBatch) -> Facts:
    """Returns the facts of a batch whose advantages are computed here. Other batches bring their advantages."""
    assert batch.facts is not None
    return batch.facts


def centred(rewards_G: FloatArray) -> FloatArray:
    """Returns `r - mean` [G]: exactly 0 for equal rewards, because rounding of the mean would give other values."""
    rewards_G = np.asarray(rewards_G, np.float64)
    return np.zeros_like(rewards_G) if np.all(rewards_G == rewards_G[0]) else rewards_G - rewards_G.mean()


def lengths(batch: TrainingBatch) -> FloatArray:
    """Returns the number [E, R] of targets of each episode and role."""
    return sums(batch, np.ones(batch.forest.num_targets))


def sums(batch: TrainingBatch, values: FloatArray) -> FloatArray:
    """Returns the sum [E, R] of a value per target [M] over each episode and role."""
    facts, calls = facts_of(batch), batch.forest["call"]
    sums_ER = np.zeros(facts.spoke.shape)
    np.add.at(sums_ER, (facts.call_episode[calls], facts.call_role[calls]), values)
    return sums_ER


def penalised(batch: TrainingBatch, penalties_ER: FloatArray) -> TrainingBatch:
    """Returns the batch with the penalty [E, R] subtracted from each reward that `comparisons` compares."""
    facts = facts_of(batch)
    return replace(batch, facts=replace(facts, role_rewards=compared_rewards(facts) - penalties_ER))


def compared_rewards(facts: Facts) -> FloatArray:
    """Returns the rewards [E, R] that `comparisons` compares; NaN for a role without a named reward in a group with
    named rewards for that role.
    """
    _, group_E = np.unique(facts.groups, return_inverse=True)
    is_named_ER = ~np.isnan(facts.role_rewards)
    is_named_GR = np.zeros((int(group_E.max(initial=-1)) + 1, len(facts.roles)), bool)
    np.logical_or.at(is_named_GR, group_E, is_named_ER)
    unnamed_ER = np.where(is_named_GR[group_E], np.nan, facts.rewards[:, None])
    return np.where(is_named_ER, facts.role_rewards, unnamed_ER)
