"""Distillation: the policy samples, and a teacher grades each token of its answers.

| learns | recipes |
|---|---|
| the sampled tokens that the teacher finds likelier | `distill`; `kdrl`, beside rewards |
| the teacher's distribution over likely tokens | `distill_top_k` |
| the same, from itself with a text that only the teacher sees | `opsd`, `sdft`: a solution; `sdpo`: a success or why |

A teacher is another model, or the policy itself. Tokens that it does not grade are left out. Shapes: M targets, K
likely tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from agentjet.recipes.baselines import Grpo
from agentjet.recipes.losses import KL_ESTIMATES, PolicyLoss, log_ratio
from agentjet.recipes.policy_gradient import Outputs, OwnLoss, PolicyGradient
from agentjet.recipes.recipe import Attempt, Need, Teaching
from agentjet.section import Int64
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest

if TYPE_CHECKING:
    from torch import Tensor

DIVERGENCE = "policy/teacher_divergence"
GRADED = "teacher/graded"
MOST_LIKELY = -1e-7
"""Largest logarithm of the probability of the likely tokens, so that the tail keeps a logarithm. SDPO's number."""


def _with_field(field: str) -> AfterValidator:
    def check(template: str) -> str:
        if template and field not in template:
            raise ValueError(f"the template has no {field}, the place of the text; add it, or set '' to show nothing")
        return template

    return AfterValidator(check)


TextTemplate = Annotated[str, _with_field("{text}")]
"""A text with `{text}`, the place of the text that came with the reward. '': none."""
AnswerTemplate = Annotated[str, _with_field("{answer}")]
"""A text with `{answer}`, the place of an answer of another attempt. '': none."""


class Taught(PolicyGradient):
    """The base of recipes with a teacher."""

    teacher: str | tuple[str, ...] = ""
    """The folder of a model with the same tokenizer, such as one that `agentjet export` wrote, which must not change
    during the run; or `policy`, the weights before the batch; or `reference`, the reference; or the URL of an endpoint,
    or a list of URLs that serve one model."""
    teacher_model: str = ""
    """Name of the model at the endpoints."""

    @property
    def has_context(self) -> bool:
        """True if the teacher sees the text of `teacher_context`."""
        return False

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"teacher"}

    @property
    def teaching(self) -> Teaching:
        sources = (self.teacher,) if isinstance(self.teacher, str) else self.teacher
        return Teaching(sources, self.teacher_model, has_context=self.has_context)

    def graded(self, batch: TrainingBatch) -> NDArray[np.bool_]:
        """Returns True [M] for the targets that the teacher grades."""
        is_graded: NDArray[np.bool_] = ~np.isnan(batch.forest["teacher"])
        top = batch.forest.targets.get("teacher_top")
        return is_graded if top is None else is_graded & ~np.isnan(top).any(-1)

    def gap(self, batch: TrainingBatch) -> NDArray[np.float32]:
        """Returns log teacher - log sampling policy [M]; 0 without a grade."""
        gap = np.asarray(batch.forest["teacher"] - batch.forest["logprob"])
        return np.where(self.graded(batch), gap, np.float32(0))

    def columns(self, batch: TrainingBatch, outputs: Outputs) -> tuple[Forest, dict[str, float]]:
        forest, metrics = super().columns(batch, outputs)
        if batch.forest.num_targets:
            is_graded = self.graded(batch)
            metrics[GRADED] = float(is_graded.mean())
            if is_graded.any():
                metrics["policy/teacher_kl"] = -float(self.gap(batch)[is_graded].mean(dtype=np.float64))
        return forest, metrics

    @model_validator(mode="after")
    def _teacher_fits(self) -> Self:
        sources = self.teaching.sources
        if len(sources) != 1 and not (sources and all("://" in source for source in sources)):
            raise ValueError(
                f"teacher = {list(sources)}: give one folder, 'policy' or 'reference', or a list of URLs of endpoints"
            )
        if any("@" in source.partition("://")[2].partition("/")[0] for source in sources):
            raise ValueError(
                "teacher has a user or password in its URL, which would be stored with the job: leave them out, and "
                "give the server a key in AGENTJET_TEACHER_KEY"
            )
        if sources == ("policy",) and not self.has_context:
            raise ValueError(
                f"teacher = 'policy': {self.name!r} shows it what the policy sees, so it teaches nothing; set another "
                "teacher, or choose a recipe with a context, such as 'sdpo'"
            )
        return self


class Distillation(Taught):
    """The base of recipes that learn from the teacher alone: each token that it grades."""

    smallest_group: ClassVar[int] = 1
    compares_rewards: ClassVar[bool] = False

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        return self.gap(batch)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        return self.graded(batch)


class Distill(Distillation):
    """On-policy distillation: the policy samples, and a teacher grades each token. Rewards are not used.

        A_t = log teacher(y_t) - log sampling policy(y_t),  L = clip: the reverse KL of each token, one sample of it

    Source: arXiv 2306.13649 (GKD) with its reverse KL, in the one-sample form of MiniLLM, 2306.08543, with discount 0.
    Confidence: after.
    Use: a small model that is to do what a larger or a trained one with the same tokenizer does.
    Cost: one forward pass of the teacher. The worker holds the model of a folder beside the policy.
    """

    name: str = "distill"


class Kdrl(Taught, Grpo):
    """KDRL: GRPO with a pull of each token towards a teacher.

        L = L_GRPO + beta x,  x = (log policy - log teacher)^2 / 2: its gradient is that of the reverse KL

    Source: arXiv 2506.02208. Confidence: after; rewards do not choose the graded tokens.
    Use: a teacher that is better than the policy, and rewards by which the policy may pass it.
    Cost: as GRPO, and one forward pass of the teacher; every graded token is computed.
    """

    name: str = "kdrl"
    beta: float = Field(2e-3, ge=0)
    """Weight of the pull."""
    beta_step: float = Field(0.0, ge=0)
    """Decrease of the weight after each batch of the run. The paper: 5e-5, from 5e-3."""
    smallest_beta: float = Field(1e-3, ge=0)
    """Smallest weight, if it decreases."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimate of the KL divergence: see `kl_estimator`. `k1` is subtracted from the advantage of the token."""

    def coefficients(self, batch: TrainingBatch) -> NDArray[np.float32]:
        """Returns the weight of the pull [M]; 0 without a grade."""
        beta = max(self.smallest_beta, self.beta - self.beta_step * batch.id) if self.beta_step else self.beta
        return np.where(self.graded(batch), np.float32(beta), np.float32(0))

    @property
    def reads(self) -> tuple[str, ...]:
        return super().reads if self.estimator == "k1" else (*super().reads, "teacher", "teacher_coef")

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        advantages = super().token_advantages(batch)
        if self.estimator == "k1":
            advantages = advantages + self.coefficients(batch) * self.gap(batch)
        return advantages

    def loss_columns(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        columns = super().loss_columns(batch, advantage)
        if self.estimator != "k1":
            columns |= {"teacher": np.nan_to_num(batch.forest["teacher"]), "teacher_coef": self.coefficients(batch)}
        return columns

    def contributing(self, forest: Forest) -> NDArray[np.bool_]:
        contributes = super().contributing(forest)
        return contributes if self.estimator == "k1" else contributes | (forest["teacher_coef"] != 0)

    def with_terms(
        self, loss: Tensor, metrics: dict[str, Tensor], logp: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().with_terms(loss, metrics, logp, columns)
        if self.estimator != "k1":
            loss = loss + columns["teacher_coef"] * KL_ESTIMATES[self.estimator](logp, columns["teacher"])
        return loss, metrics


# ---- distributions ---------------------------------------------------------------------------------------------------


class TopDivergence(PolicyLoss):
    """The divergence of policy and teacher over the likely tokens and the tail: all other tokens as one."""

    name: str = "distill_top_k"
    beta: float = Field(0.5, ge=0, le=1)
    """0: the forward KL(teacher || policy). 1: the reverse KL(policy || teacher). Between: the generalised
    Jensen-Shannon divergence, in which the teacher has the weight beta."""
    token_clip: float = Field(0.0, ge=0)
    """Largest share of a token of the vocabulary in the divergence of a target. 0: no limit."""
    max_ratio: float = Field(0.0, ge=0)
    """Largest importance weight, policy / sampling policy of the sampled token. 0: no weights."""

    reads: ClassVar[tuple[str, ...]] = ("logprob", "new_top", "teacher_top")
    reports: ClassVar[tuple[str, ...]] = (DIVERGENCE,)

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        shares = divergence_shares(with_tail(columns["new_top"]), with_tail(columns["teacher_top"]), self.beta)
        if self.token_clip:
            shares = shares.clamp(max=self.token_clip)
        loss = divergence = shares.sum(-1)
        if self.max_ratio:
            loss = divergence * log_ratio(logp, columns["logprob"]).exp().detach().clamp(max=self.max_ratio)
        return loss, {DIVERGENCE: divergence}


def with_tail(top: Tensor) -> Tensor:
    """Returns the log-probabilities [M, K + 1] of likely tokens [M, K], and of all other tokens together."""
    import torch

    inside = top.logsumexp(-1, keepdim=True).clamp(max=MOST_LIKELY)
    return torch.cat([top, (-inside.expm1()).log()], -1)


def divergence_shares(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Returns the share of each token [M, V] in the generalised Jensen-Shannon divergence of log-probabilities.

    `beta KL(teacher || m) + (1 - beta) KL(policy || m)` with `m = beta teacher + (1 - beta) policy`; 0 and 1 are the
    limits divided by beta (1 - beta), the forward and the reverse KL. Source: arXiv 2306.13649, as TRL and SDPO.
    """
    if beta == 0:
        return teacher.exp() * (teacher - policy)
    if beta == 1:
        return policy.exp() * (policy - teacher)
    mixture = (teacher + math.log(beta)).logaddexp(policy + math.log(1 - beta))
    return beta * teacher.exp() * (teacher - mixture) + (1 - beta) * policy.exp() * (policy - mixture)


class DistillTopK(Distillation):
    """Distillation of distributions: the divergence from the teacher over its likeliest tokens. Rewards are not used.

        L = D(policy, teacher) over `top_k` tokens and a tail, the sum of all others; D: see `loss.beta`

    Source: arXiv 2306.13649 (GKD), over tokens and a tail as github.com/lasgroup/SDPO computes it. Confidence: after a
    public copy of SDPO's loss.
    Use: the same as `distill`; a target teaches more than one token, so fewer samples are enough.
    Cost: as `distill`; every graded token is computed.
    """

    name: str = "distill_top_k"
    loss: OwnLoss = TopDivergence()
    top_k: Int64 = Field(64, ge=1)
    """Likely tokens of each target."""
    top_of: Literal["teacher", "policy"] = "teacher"
    """The likeliest tokens: those of the teacher, or of the policy before the batch. Endpoints have their own."""

    @property
    def teaching(self) -> Teaching:
        return super().teaching._replace(top_k=self.top_k, top_of=self.top_of)

    @model_validator(mode="after")
    def _endpoints_have_their_own_tokens(self) -> Self:
        if self.top_of == "policy" and any("://" in source for source in self.teaching.sources):
            raise ValueError("top_of = 'policy': an endpoint returns its own likely tokens only; set it to 'teacher'")
        return self


class Shown(DistillTopK):
    """The base of recipes whose teacher sees the text that came with the reward. Without one it does not grade."""

    template: TextTemplate = "{text}"
    """The text that only the teacher sees, below the first message of the user; '': none."""

    @property
    def has_context(self) -> bool:
        return bool(self.template)

    def teacher_context(self, attempt: Attempt, others: Sequence[Attempt]) -> str | None:
        return self.template.replace("{text}", attempt.text) if attempt.text else None


class Opsd(Shown):
    """OPSD: the policy learns from its own first version, which sees the solution. Rewards are not used.

        L = sum of min(token_clip, share in KL(teacher(. | solution) || policy)), over likely tokens and a tail

    Source: arXiv 2601.18734 and github.com/siyan-zhao/OPSD, over likely tokens instead of the vocabulary. Confidence:
    after.
    Use: tasks with known solutions and a model that understands them. The agent sends the solution as the text of the
    reward: `Reward(..., text=solution)`.
    Cost: one forward pass of the reference, with the longer prompt; every graded token is computed.
    """

    name: str = "opsd"
    loss: OwnLoss = TopDivergence(beta=0.0, token_clip=0.05)
    teacher: str | tuple[str, ...] = "reference"
    """As in `distill`. OPSD: the weights of version 0."""
    template: TextTemplate = (
        "Here is a reference solution to this problem:\n\n{text}\n\n"
        "Understand it, then solve the problem in your own words."
    )
    """The text that only the teacher sees, below the first message of the user; '': none."""


class Sdft(Shown):
    """SDFT: the policy learns from its moving average, which sees a demonstration. Rewards are not used.

        L = KL(policy || teacher(. | demonstration)), over likely tokens and a tail; teacher += mix (policy - teacher)

    Source: arXiv 2601.19897, over likely tokens instead of the vocabulary; the average moves once a batch. Confidence:
    after.
    Use: a new skill from demonstrations, without forgetting others. The agent sends the demonstration as the text of
    the reward.
    Cost: as `opsd`, and the moving average in float32.
    """

    name: str = "sdft"
    loss: OwnLoss = TopDivergence(beta=1.0)
    teacher: str | tuple[str, ...] = "reference"
    """As in `distill`. SDFT: the moving average of the policy."""
    reference_every: Int64 = Field(1, ge=0)
    """Batches after which the reference moves to the present weights. 0: it does not move."""
    reference_mix: float = Field(0.01, gt=0, le=1)
    """Share of the present weights in a reference that moves. 1: they replace it; less: a moving average."""
    template: TextTemplate = (
        "This is an example of a response to the question:\n\n{text}\n\nNow answer with a response of your own."
    )
    """The text that only the teacher sees, below the first message of the user; '': none."""


class Sdpo(DistillTopK):
    """SDPO: the policy learns from its moving average, which sees a success of the group and feedback on the attempt.

        L = min(2, policy / sampling policy) JS(policy, teacher(. | success, feedback)), over likely tokens and a tail

    Source: arXiv 2601.20802 and github.com/lasgroup/SDPO. Confidence: after a public copy of its loss; likely tokens
    are those before the batch, and the average moves once a batch. An attempt with neither is not graded.
    Use: rewards with a reason as their text: errors of a compiler, failed tests, a judge's words; or only rewards, of
    which some reach `success`.
    Cost: as `sdft`.
    """

    name: str = "sdpo"
    loss: OwnLoss = TopDivergence(beta=0.5, max_ratio=2.0)
    teacher: str | tuple[str, ...] = "reference"
    """As in `distill`. SDPO: the moving average of the policy, or `policy`."""
    reference_every: Int64 = Field(1, ge=0)
    """Batches after which the reference moves to the present weights. 0: it does not move."""
    reference_mix: float = Field(0.05, gt=0, le=1)
    """Share of the present weights in a reference that moves. 1: they replace it; less: a moving average."""
    top_k: Int64 = Field(100, ge=1)
    """Likely tokens of each target."""
    top_of: Literal["teacher", "policy"] = "policy"
    """The likeliest tokens: those of the teacher, or of the policy before the batch. Endpoints have their own."""
    success: float = 1.0
    """Smallest reward of a success."""
    solution_template: AnswerTemplate = "Correct solution:\n\n{answer}"
    """The text about another attempt of the group that succeeded; '': none."""
    feedback_template: TextTemplate = "The following is feedback from your unsuccessful earlier attempt:\n\n{text}"
    """The text about an attempt without success; '': none."""
    instruction: str = "Correctly solve the original question."
    """The end of what only the teacher sees."""

    @property
    def has_context(self) -> bool:
        return bool(self.solution_template or self.feedback_template)

    def teacher_context(self, attempt: Attempt, others: Sequence[Attempt]) -> str | None:
        success = next((other for other in others if other.reward >= self.success), None)
        parts = []
        if success is not None and self.solution_template:
            parts.append(self.solution_template.replace("{answer}", success.answer))
        if attempt.text and attempt.reward < self.success and self.feedback_template:
            parts.append(self.feedback_template.replace("{text}", attempt.text))
        return "\n\n".join([*parts, self.instruction]).rstrip() if parts else None
