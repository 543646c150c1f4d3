"""The settings of a training job: batches, leases, algorithm, optimiser. Also `Section`, the base of every section."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from agentjet.types import MAX_NAME, MAX_TEMPERATURE, MIN_TEMPERATURE


def _check_int64(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise ValueError("a whole number has 64 bits at most")
    return number


Int64 = Annotated[int, AfterValidator(_check_int64)]
"""An integer that fits the journal and the messages to the worker."""
TaskSetName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Weight = Annotated[float, Field(gt=0)]


def _check_policy_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", name):
        raise ValueError("a policy's name is a lower-case letter, then up to 63 of a-z, 0-9, _ and -")
    return name


PolicyName = Annotated[str, AfterValidator(_check_policy_name)]
"""Agents give it as `model`; metrics and folders of checkpoints have it in front."""


def unknown_policy(name: str, policies: Sequence[str]) -> str:
    """Returns the message about a policy that the run does not have. `policies` are those of the run."""
    nearest = get_close_matches(name, policies, 1)
    way_out = f"did you mean {nearest[0]!r}?" if nearest else f"its policies are {', '.join(map(repr, policies))}"
    return f"the run has no policy {name!r}; {way_out}"


class Section(BaseModel):
    """Base of every section: immutable, refuses unknown keys, takes field descriptions from docstrings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: object, field: ValidationInfo) -> object:
        assert field.field_name is not None
        if isinstance(value, bool) and cls.model_fields[field.field_name].annotation is not bool:
            raise ValueError("true and false are not values of this setting")
        return value


class OptimizerConfig(Section):
    """The AdamW optimiser and its learning-rate schedule."""

    lr: float = Field(2e-5, gt=0)
    """Peak learning rate."""
    warmup_steps: Int64 = Field(0, ge=0)
    """Number of batches over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to `min_lr_ratio` at `total_steps`."""
    total_steps: Int64 = Field(0, ge=0)
    """Length of the schedule in batches, warm-up included. Required for `linear` and `cosine`."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of the schedule, as a fraction of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (AdamW)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay rate of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to at most this norm. 0: no clipping."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Self:
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps = {self.total_steps} leaves no room after warmup_steps = {self.warmup_steps}: "
                f"schedule = {self.schedule!r} needs total_steps above it, or schedule = 'constant'"
            )
        return self


Aggregation = Literal["token_mean", "sequence_mean", "constant"]


class LossDefaults(NamedTuple):
    """Clip bounds and aggregation from the publication of a loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token_mean"


LOSS_DEFAULTS = {
    "clip": LossDefaults(),
    "gspo": LossDefaults(3e-4, 4e-4, "sequence_mean"),  # arXiv 2507.18071, section 5.1
    "cispo": LossDefaults(),
}
"""Keys are the values of `job.algorithm.loss`."""


class AlgorithmConfig(Section):
    """Advantages, loss and off-policy correction. The formulas are in `src/agentjet/recipes/`."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Advantage of an episode: its reward minus the mean of its group. `grpo` divides by the group's standard
    deviation, `dr_grpo` does not, `rloo` excludes the episode itself from the mean."""
    loss: Literal["clip", "gspo", "cispo"] = "clip"
    """Policy loss: PPO's clipped token ratio, GSPO's clipped sequence ratio, or CISPO's clipped weight."""
    clip_low: float = Field(0.0, ge=0)
    """With a negative advantage, ratios below 1 - clip_low have no gradient. 0: 0.2, for `gspo` 3e-4."""
    clip_high: float = Field(0.0, ge=0)
    """With a positive advantage, ratios above 1 + clip_high have no gradient. 0: 0.2, for `gspo` 4e-4."""
    dual_clip: float = Field(0.0, ge=0)
    """Maximum ratio for negative advantages (dual-clip PPO); use a value above 1. 0: no maximum."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty (k3 estimator) against the reference, the weights of version 0. 0: no penalty."""
    aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = "auto"
    """Reduction of the token losses: mean over the batch's tokens, mean over sequences of their token means, or
    sum / `constant`. `auto`: `token_mean`, for `gspo` `sequence_mean`."""
    constant: float = Field(0.0, ge=0)
    """For `aggregation = "constant"` (Dr. GRPO): divisor of the summed loss, besides the number of sequences."""
    correction: Literal["none", "tis", "icepop", "mis"] = "none"
    """Correction for tokens sampled by older weights. `tis`: truncated importance weights. `icepop`, `mis`: importance
    weights with outliers set to 0; `icepop` counts outliers in the denominators, `mis` does not."""
    correction_low: float = Field(0.5, ge=0)
    """Ratios below this bound are outliers (`icepop`, `mis`)."""
    correction_high: float = Field(2.0, gt=0)
    """Ratios above this bound are reduced to it (`tis`) or are outliers (`icepop`, `mis`)."""
    epochs: Int64 = Field(1, ge=1)
    """Passes over each batch."""
    mini_batches: Int64 = Field(1, ge=1)
    """Optimiser steps in each pass."""
    by_role: bool = False
    """Compute the advantages of each role only over the episodes in which the role has calls (Dr. MAS)."""
    drop_zero_variance: bool = False
    """Dynamic sampling: drop groups whose rewards are all equal, and sample others instead."""
    max_dropped_groups: Int64 = Field(0, ge=0)
    """Maximum number of groups dropped for one batch; further ones are kept. 0: ten times `batch_size`."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        own = LOSS_DEFAULTS[self.loss]
        return self.clip_low or own.clip_low, self.clip_high or own.clip_high

    @property
    def loss_aggregation(self) -> Aggregation:
        return LOSS_DEFAULTS[self.loss].aggregation if self.aggregation == "auto" else self.aggregation

    def with_defaults(self) -> Self:
        """A copy in which the defaults of the loss are written out."""
        low, high = self.clip_bounds
        return self.model_copy(update={"clip_low": low, "clip_high": high, "aggregation": self.loss_aggregation})

    @model_validator(mode="after")
    def _constant_is_given(self) -> Self:
        if self.aggregation == "constant" and self.constant <= 0:
            raise ValueError("aggregation = 'constant' needs constant > 0, usually the maximum completion length")
        return self

    @model_validator(mode="after")
    def _correction_allows_one(self) -> Self:
        if not self.correction_low < 1 < self.correction_high:
            raise ValueError(
                f"correction_low = {self.correction_low} and correction_high = {self.correction_high} must lie on "
                "either side of 1, the ratio of unchanged weights"
            )
        return self


Overridable = Literal["temperature", "top_p", "top_k", "max_tokens", "seed"]


class SamplingConfig(Section):
    """Sampling settings that agents cannot change in training episodes."""

    override: tuple[Overridable, ...] = ()
    """Request parameters that training episodes ignore; the episode counts them. `temperature` and `max_tokens` take
    the values of the job. `top_p` and `top_k` do not truncate. Each call gets its own `seed`."""


class SideCallRule(Section):
    """A rule for side calls of an agent, such as titles, summaries and sub-agents. The first rule whose conditions
    are all met applies to a call. In a pattern, `*` matches any text and `?` one character.
    """

    name: str = Field(min_length=1, max_length=64)
    """Name of the rule. Episodes count the calls of each rule."""
    system: str = Field("", max_length=2000)
    """Condition: pattern for the whole system prompt, such as `You are a title generator*`. Empty: any prompt."""
    model: str = Field("", max_length=256)
    """Condition: pattern for the model name in the request, such as `*haiku*`; in a run with named policies, which are
    the only names there, such as `planner` or `*@title`. Empty: any name."""
    tools: Literal["any", "none", "some"] = "any"
    """Condition: the call offers tools (`some`), offers no tools (`none`), or either (`any`)."""
    role: str = Field("", max_length=128)
    """Role of these calls if the request does not name one. Empty: the role stays as requested."""
    train: bool = True
    """Train these calls with the reward of the episode."""

    @model_validator(mode="after")
    def _rule_does_something(self) -> Self:
        if not (self.system or self.model or self.tools != "any"):
            raise ValueError("a rule without a condition applies to every call: set system, model or tools")
        if self.train and not self.role:
            raise ValueError("the rule has no effect: set role, or train = false")
        if (self.system + self.model).count("*") > 16:
            raise ValueError("the patterns have more than 16 `*`")
        return self


class JobConfig(Section):
    """The training job: batches, sampling, leases and checkpoints. Clients can read these settings; an admin can
    change them while the server runs.
    """

    batch_size: Int64 = Field(8, ge=1)
    """Number of groups in a batch."""
    group_size: Int64 = Field(8, ge=1)
    """Number of episodes in a group."""
    min_group_size: Int64 = Field(2, ge=1)
    """Size from which a group that lost episodes is trained; a smaller one is dropped and counted."""
    spare_groups: Int64 = Field(0, ge=0)
    """Extra groups started for each batch. Unused ones end as `surplus`, or go into the next batch if `max_staleness`
    is above 0."""
    spare_episodes: Int64 = Field(0, ge=0)
    """Extra episodes started in each group. When `group_size` of them have finished, the others end as `surplus`."""
    max_staleness: Int64 = Field(0, ge=0)
    """Maximum age of a trained token in policy versions. 0: on-policy. Above 0, episodes continue across batches, and
    `algorithm.correction` can correct for the difference; sampling still pauses while a batch is learned."""
    task_weights: dict[TaskSetName, Weight] = {}
    """Mixture of task sets in every batch, such as `{math = 2, code = 1}`. `"*"` is the weight of each task set that is
    not named; without it, such task sets are refused. Empty: first come, first served."""
    mix_code_versions: bool = False
    """Allow episodes of different agent code versions in one group."""
    max_steps: Int64 = Field(0, ge=0)
    """Policy version at which training stops. 0: no limit."""
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Sampling temperature of calls that do not set one."""
    max_tokens: Int64 = Field(256, ge=1)
    """Maximum completion length, in tokens, of calls that do not set one."""
    history: Literal["template", "as_sampled"] = "template"
    """Earlier assistant turns in a prompt: as the chat template rewrites them, or exactly as they were sampled."""
    lease_seconds: float = Field(120.0, gt=0)
    """Lease of an episode. Without a call or a heartbeat for this long, the episode ends unscored."""
    max_episode_seconds: float = Field(1800.0, gt=0)
    """Maximum age of an episode. An older one ends unscored even if it is active."""
    micro_batch_tokens: Int64 = Field(8192, ge=16)
    """Maximum number of forest tokens in one forward pass of the learner."""
    checkpoint_every: Int64 = Field(20, ge=0)
    """Number of batches between checkpoints. 0: checkpoints only when training or the server stops."""
    keep_checkpoints: Int64 = Field(2, ge=1)
    """Number of newest checkpoints to keep. Checkpoints with a tag are kept in addition."""
    keep_best: bool = True
    """Tag the checkpoint with the best recorded evaluation as `best`; save one if that version has none."""
    seed: Int64 = 0
    """Seed of all random numbers on the server."""
    side_calls: tuple[SideCallRule, ...] = Field((), max_length=16)
    """Rules for side calls of agents: a separate role, or no training. The first matching rule applies."""
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    optimizers: dict[PolicyName, OptimizerConfig] = {}
    """Optimisers of single policies, such as `{planner = {lr = 1e-5}}`. Others have `[job.optimizer]`."""

    def optimizer_of(self, policy: str) -> OptimizerConfig:
        return self.optimizers.get(policy, self.optimizer)

    def with_defaults(self) -> Self:
        """A copy in which defaults that depend on other settings are written out."""
        return self.model_copy(update={"algorithm": self.algorithm.with_defaults()})

    @model_validator(mode="after")
    def _groups_can_teach(self) -> Self:
        if self.group_size < 2:
            raise ValueError(
                f"group_size = {self.group_size}: {self.algorithm.advantage} compares the episodes of a group, "
                "so a group of one has no training signal; set group_size to 2 or more"
            )
        if self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size = {self.min_group_size} is above group_size = {self.group_size}")
        return self
