"""The settings of a training job: batches, leases, recipe, optimiser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SerializeAsAny, field_validator, model_validator

from agentjet.errors import did_you_mean
from agentjet.recipes import registry
from agentjet.recipes.recipe import Recipe
from agentjet.section import Int64, Section
from agentjet.types import MAX_NAME, MAX_TEMPERATURE, MIN_TEMPERATURE, SOLE_POLICY

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
    way_out = did_you_mean(name, policies, f"its policies are {', '.join(map(repr, policies))}")
    return f"the run has no policy {name!r}; {way_out}"


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
    min_group_size: Int64 = Field(0, ge=0)
    """Size from which a group that lost episodes is trained; a smaller one is dropped and counted. 0: the smallest one
    that the recipe can train, which is 2 for recipes that compare the episodes of a group, else 1."""
    spare_groups: Int64 = Field(0, ge=0)
    """Extra groups started for each batch. Unused ones end as `surplus`, or go into the next batch if `max_staleness`
    is above 0."""
    spare_episodes: Int64 = Field(0, ge=0)
    """Extra episodes started in each group. When `group_size` of them have finished, the others end as `surplus`."""
    max_staleness: Int64 = Field(0, ge=0)
    """Maximum age of a trained token in policy versions. 0: on-policy. Above 0, episodes continue across batches, and
    `recipe.correction` can correct for the difference. The embedded backend still pauses while a batch is
    learned."""
    task_weights: dict[TaskSetName, Weight] = Field({})
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
    images: Literal["refuse", "omit"] = "refuse"
    """Images, documents, audio and video in requests, which the policy cannot read. `refuse`: the request is refused.
    `omit`: a text replaces each one, and the episode counts the requests."""
    history: Literal["template", "as_sampled"] = "template"
    """Earlier assistant turns in a prompt: as the chat template rewrites them, or exactly as they were sampled."""
    lease_seconds: float = Field(120.0, gt=0)
    """Lease of an episode. Without a call or a heartbeat for this long, the episode ends unscored. A group that
    finished nothing and makes no call for this long keeps no place from other clients."""
    max_episode_seconds: float = Field(1800.0, gt=0)
    """Maximum age of an episode. An older one ends unscored even if it is active."""
    micro_batch_tokens: Int64 = Field(8192, ge=16)
    """Maximum number of forest tokens in one forward pass of the learner."""
    checkpoint_every: Int64 = Field(20, ge=0)
    """Number of batches between checkpoints. 0: checkpoints only when training or the server stops."""
    keep_checkpoints: Int64 = Field(2, ge=1)
    """Number of newest checkpoints to keep. Checkpoints with a tag are kept in addition."""
    keep_best: bool = True
    """Tag the checkpoint with the best held-out score as `best`; save one if that version has none."""
    seed: Int64 = 0
    """Seed of all random numbers on the server."""
    side_calls: tuple[SideCallRule, ...] = Field((), max_length=16)
    """Rules for side calls of agents: a separate role, or no training. The first matching rule applies."""
    sampling: SamplingConfig = SamplingConfig()
    recipe: SerializeAsAny[Recipe] = Field(default_factory=registry.default_recipe)
    """The algorithm: a name, such as `recipe = "gspo"`, or a section with `name` and parameters. `agentjet recipes`
    lists them."""
    optimizer: OptimizerConfig = OptimizerConfig()
    optimizers: dict[PolicyName, OptimizerConfig] = Field({})
    """Optimisers of single policies, such as `{planner = {lr = 1e-5}}`. Others have `[job.optimizer]`."""

    def optimizer_of(self, policy: str) -> OptimizerConfig:
        return self.optimizers.get(policy, self.optimizer)

    def for_demonstrations(self, lr: float | None = None, policy: str = SOLE_POLICY) -> Self:
        """Returns the settings of a batch of demonstrations for a policy.

        With `lr`, the policy has this constant learning rate. Others keep theirs.
        """
        recipe = self.recipe if self.recipe.only_given else registry.make_recipe("sft")
        if lr is None:
            return self.model_copy(update={"recipe": recipe})
        constant = {"lr": lr, "schedule": "constant", "warmup_steps": 0}
        optimizers = {**self.optimizers, policy: self.optimizer_of(policy).model_copy(update=constant)}
        return self.model_copy(update={"recipe": recipe, "optimizers": optimizers})

    @field_validator("recipe", mode="before")
    @classmethod
    def _recipe_is_found(cls, value: object) -> object:
        return registry.make_recipe(value)

    @model_validator(mode="after")
    def _groups_can_teach(self) -> Self:
        if self.group_size < self.recipe.smallest_group:
            raise ValueError(
                f"group_size = {self.group_size}: recipe {self.recipe.name} compares the episodes of a group, so a "
                f"smaller one has no training signal; set group_size to {self.recipe.smallest_group} or more"
            )
        if self.task_weights and self.recipe.chooses_task_sets:
            raise ValueError(
                f"task_weights = {self.task_weights}: recipe {self.recipe.name} decides which task set is sampled; "
                "leave task_weights empty"
            )
        if 0 < self.min_group_size < self.recipe.smallest_group:
            raise ValueError(
                f"min_group_size = {self.min_group_size}: recipe {self.recipe.name} compares the episodes of a group, "
                "so a smaller one has no training signal; "
                f"set min_group_size to 0, or to {self.recipe.smallest_group} or more"
            )
        if self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size = {self.min_group_size} is above group_size = {self.group_size}")
        return self
