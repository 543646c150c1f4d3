"""Every setting there is, with its meaning. Unknown keys are refused; cross-checks run at load."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from agentjet.types import MAX_TEMPERATURE, MIN_TEMPERATURE


def _fits(number: int) -> int:
    """Raises `ValueError` for what neither the journal nor the wire to the worker holds."""
    if not -(2**63) <= number < 2**63:
        raise ValueError("a whole number has 64 bits at most")
    return number


Int64 = Annotated[int, AfterValidator(_fits)]
TaskSetName = Annotated[str, Field(min_length=1, max_length=256)]
Weight = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, field docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class LoraConfig(Section):
    """Low-rank adapters. `rank = 0` trains all weights. A data dir keeps those it was begun with."""

    rank: Int64 = Field(0, ge=0, le=1024)
    """Rank of the adapters; 0 trains every weight of the model."""
    alpha: Int64 = Field(32, ge=1)
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    target_modules: str = "all-linear"
    """Which modules get an adapter: `all-linear`, or a comma-separated list of module names."""


class ModelConfig(Section):
    """Which model is trained, and on what. A data dir keeps the `name` and the `dtype` it was begun with."""

    name: str = "smollm2-135m"
    """A Hugging Face id, a local folder, or the bundled name `smollm2-135m`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the weights live; `auto` takes CUDA when there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the weights; `auto` times bfloat16 on the device and falls back to float32, once in a data dir. Masters
    are always float32.
    """
    context_length: Int64 = Field(0, ge=0)
    """Longest prompt + completion in tokens; 0 takes the model's own."""
    threads: Int64 = Field(0, ge=0)
    """CPU threads of the worker; 0 takes all cores. Part of what makes a replay bit-equal."""
    lora: LoraConfig = LoraConfig()


class SamplerConfig(Section):
    """How much is sampled at once."""

    max_concurrent: Int64 = Field(64, ge=1, le=4096)
    """Completions sampled at the same time; more wait in line."""
    cache_tokens: Int64 = Field(65536, ge=256)
    """Tokens whose keys and values are kept, over all sequences, in blocks of 128. CUDA reserves their memory at the
    start, a CPU as it is used.
    """


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(2e-5, gt=0)
    """Peak learning rate."""
    warmup_steps: Int64 = Field(0, ge=0)
    """Batches over which the rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up; `linear` and `cosine` reach `min_lr_ratio` at `total_steps`."""
    total_steps: Int64 = Field(0, ge=0)
    """Batches the schedule spans; needed for `linear` and `cosine`."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The rate at the end of the schedule, as a share of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled to at most this norm; 0 switches clipping off."""

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
    """The clip bounds and the aggregation that a loss was published with."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token_mean"


LOSS_DEFAULTS = {
    "clip": LossDefaults(),
    "gspo": LossDefaults(3e-4, 4e-4, "sequence_mean"),  # arXiv 2507.18071, section 5.1: a mean ratio stays near 1
    "cispo": LossDefaults(),
}
"""By `job.algorithm.loss`."""


class AlgorithmConfig(Section):
    """GRPO and its options; formulas in `recipes/`."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """`grpo` divides by the group's standard deviation, `dr_grpo` does not, `rloo` leaves the episode itself out of
    the mean.
    """
    loss: Literal["clip", "gspo", "cispo"] = "clip"
    """The policy loss: PPO's clipped ratio, GSPO's sequence ratio, or CISPO."""
    clip_low: float = Field(0.0, ge=0)
    """Lower clip: ratios below 1 - clip_low stop mattering for negative advantages. 0 takes the loss's own: 0.2, for
    `gspo` 3e-4.
    """
    clip_high: float = Field(0.0, ge=0)
    """Upper clip: ratios above 1 + clip_high stop mattering for positive advantages. 0 takes the loss's own: 0.2, for
    `gspo` 4e-4.
    """
    dual_clip: float = Field(0.0, ge=0)
    """Cap of the ratio for negative advantages (PPO dual clip, above 1); 0 switches it off."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the k3 penalty against the reference (the weights at version 0); 0 needs no reference."""
    aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = "auto"
    """How token losses become one number: mean over the batch's tokens, mean over sequences of their token means, or
    sum / constant. `auto` takes the loss's own: `token_mean`, for `gspo` `sequence_mean`.
    """
    constant: float = Field(0.0, ge=0)
    """Divisor of `aggregation = "constant"` (Dr. GRPO), times the number of sequences, so that batch size does not
    matter.
    """
    correction: Literal["none", "tis", "icepop", "mis"] = "none"
    """What is done about tokens sampled by older weights: nothing, truncated importance weights, or weights with
    outliers at 0 that count in the denominators (`icepop`) or do not (`mis`).
    """
    correction_low: float = Field(0.5, ge=0)
    """Ratios below are outliers, for `icepop` and `mis`."""
    correction_high: float = Field(2.0, gt=0)
    """Ratios above are cut down to it (`tis`), or are outliers."""
    epochs: Int64 = Field(1, ge=1)
    """Passes over a batch."""
    mini_batches: Int64 = Field(1, ge=1)
    """Optimiser steps a pass."""
    by_role: bool = False
    """Compare each agent role only over the episodes of the group in which it spoke (Dr. MAS), instead of over all."""
    drop_zero_variance: bool = False
    """Dynamic sampling: groups whose rewards are all equal are dropped and refilled."""
    max_dropped_groups: Int64 = Field(0, ge=0)
    """Most groups dropped for one batch, after which they are kept; 0 means ten times `batch_size`."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The lower and the upper clip in force."""
        own = LOSS_DEFAULTS[self.loss]
        return self.clip_low or own.clip_low, self.clip_high or own.clip_high

    @property
    def loss_aggregation(self) -> Aggregation:
        """The aggregation in force."""
        return LOSS_DEFAULTS[self.loss].aggregation if self.aggregation == "auto" else self.aggregation

    def with_defaults(self) -> Self:
        """The same settings with the loss's own values written out."""
        low, high = self.clip_bounds
        return self.model_copy(update={"clip_low": low, "clip_high": high, "aggregation": self.loss_aggregation})

    @model_validator(mode="after")
    def _constant_is_given(self) -> Self:
        if self.aggregation == "constant" and self.constant <= 0:
            raise ValueError("aggregation = 'constant' needs constant > 0: the longest completion is the usual choice")
        return self

    @model_validator(mode="after")
    def _correction_allows_one(self) -> Self:
        if not self.correction_low < 1 < self.correction_high:
            raise ValueError(
                f"correction_low = {self.correction_low} and correction_high = {self.correction_high} must lie on "
                "either side of 1: equal weights have the ratio 1"
            )
        return self


Overridable = Literal["temperature", "top_p", "top_k", "max_tokens", "seed"]


class SamplingConfig(Section):
    """How training episodes are sampled where agents ask for something else."""

    override: tuple[Overridable, ...] = ()
    """Settings of requests that are ignored in training episodes, and counted on the episode: `temperature` and
    `max_tokens` become the job's, `top_p` and `top_k` truncate nothing, a `seed` is drawn for each call.
    """


class SideCallRule(Section):
    """A rule for calls beside the agent's work: titles, summaries, sub-agents. A call follows the first rule that it
    meets all conditions of. `*` in a pattern stands for any text, `?` for one character.
    """

    name: str = Field(min_length=1, max_length=64)
    """Name of the rule: episodes count the calls that followed it."""
    system: str = Field("", max_length=2000)
    """Condition: pattern of the whole system prompt, such as `You are a title generator*`; empty: any."""
    model: str = Field("", max_length=256)
    """Condition: pattern of the model's name in the request, such as `*haiku*`; empty: any."""
    tools: Literal["any", "none", "some"] = "any"
    """Condition: whether the call offers tools."""
    role: str = Field("", max_length=128)
    """Agent role of such calls, unless the request names one; empty: as the request says."""
    train: bool = True
    """Whether such calls are trained with the episode's reward."""

    @model_validator(mode="after")
    def _rule_does_something(self) -> Self:
        if not (self.system or self.model or self.tools != "any"):
            raise ValueError("a rule without a condition meets every call: set system, model or tools")
        if self.train and not self.role:
            raise ValueError("the rule has no effect: set role, or train = false")
        if (self.system + self.model).count("*") > 16:
            raise ValueError("the patterns have more than 16 `*`")
        return self


class JobConfig(Section):
    """What is trained how: the part of the settings that a client may read and an admin may replace."""

    batch_size: Int64 = Field(8, ge=1)
    """Groups in a batch."""
    group_size: Int64 = Field(8, ge=1)
    """Episodes in a group."""
    min_group_size: Int64 = Field(2, ge=1)
    """A group that lost members and is not refilled trains when at least this many finished; else it is dropped and
    counted.
    """
    spare_groups: Int64 = Field(0, ge=0)
    """Groups begun beyond `batch_size`: a batch closes early, without its slowest groups. On-policy those end as
    surplus, with `max_staleness` they go into the next batch.
    """
    spare_episodes: Int64 = Field(0, ge=0)
    """Episodes begun beyond `group_size` in each group: once enough have finished, the slowest end as surplus."""
    max_staleness: Int64 = Field(0, ge=0)
    """How many versions old a token may be when it is learned. 0 is on-policy; above, episodes begin and live on across
    batches, although nothing is sampled during one, and `algorithm.correction` makes up for it.
    """
    task_weights: dict[TaskSetName, Weight] = {}
    """Parts of every batch by task set, such as `{math = 2, code = 1}`; `"*"` is the weight of each set not named,
    without which such sets are refused. Empty: first come, first served.
    """
    mix_code_versions: bool = False
    """Let a group hold episodes of several versions of the agent's code."""
    max_steps: Int64 = Field(0, ge=0)
    """Stop training at this policy version; 0 goes on for ever."""
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Sampling temperature where the agent names none."""
    max_tokens: Int64 = Field(256, ge=1)
    """Longest completion where the agent names none."""
    history: Literal["template", "as_sampled"] = "template"
    """Earlier assistant turns: as the chat template rewrites them, or exactly as they were sampled."""
    lease_seconds: float = Field(120.0, gt=0)
    """An episode that shows no life for this long is reclaimed."""
    max_episode_seconds: float = Field(1800.0, gt=0)
    """An episode older than this is reclaimed however busy it is."""
    micro_batch_tokens: Int64 = Field(8192, ge=16)
    """Most forest tokens in one forward pass of the learner."""
    checkpoint_every: Int64 = Field(20, ge=0)
    """Batches between checkpoints; 0 saves at the end only."""
    keep_checkpoints: Int64 = Field(2, ge=1)
    """Newest checkpoints kept. Those with a tag are kept besides."""
    keep_best: bool = True
    """Keep the checkpoint of the best recorded evaluation under the tag `best`, and save it if there is none yet."""
    seed: Int64 = 0
    """Seed of everything random on the server."""
    side_calls: tuple[SideCallRule, ...] = Field((), max_length=16)
    """Rules for calls beside the agent's work: a role of their own, or no training. The first that fits holds."""
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    def with_defaults(self) -> Self:
        """The same settings with defaults that depend on other settings written out."""
        return self.model_copy(update={"algorithm": self.algorithm.with_defaults()})

    @model_validator(mode="after")
    def _groups_can_teach(self) -> Self:
        if self.group_size < 2:
            raise ValueError(
                f"group_size = {self.group_size}: {self.algorithm.advantage} compares the episodes of a group, "
                "so a group of one teaches nothing; set group_size to 2 or more"
            )
        if self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size = {self.min_group_size} is above group_size = {self.group_size}")
        return self


class ServerConfig(Section):
    """Where the server listens and keeps its files."""

    tls_cert: str = ""
    """File with the certificate chain (PEM) to serve HTTPS with; needs `tls_key`."""
    tls_key: str = ""
    """File with the certificate's private key (PEM, without a passphrase)."""
    insecure: bool = False
    """Serve plain HTTP on an address that is no loopback one, where everybody on the way can read the tokens."""
    host: str = "127.0.0.1"
    """Address to bind; one that is no loopback address needs `tls_cert` and `tls_key`, or `insecure`."""
    port: Int64 = Field(8400, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    data_dir: Path = Path("agentjet-data")
    """Folder of the journal, the checkpoints, the tokens and the logs."""
    allowed_hosts: str = ""
    """Names besides `host`, `localhost` and the loopback addresses that requests may have in their `Host` header (that
    of a tunnel or a proxy), comma-separated, without ports; requests for any other are refused.
    """
    model_aliases: str = ""
    """Names besides its own and `policy` that the model answers to, comma-separated, with `*` for anything: those that
    agents have written down, such as `gpt-4o*, claude-*`; requests for any other are refused.
    """
    call_timeout: float = Field(600.0, gt=0)
    """Seconds a call is held while the worker learns or restarts, before 503."""
    worker_timeout: float = Field(120.0, gt=0)
    """Seconds after which a worker that has something to do, sends nothing, uses no CPU time and waits for no disk is
    killed and replaced. A worker that computes is never killed, however long it takes.
    """
    max_body_mb: Int64 = Field(8, ge=1, le=4096)
    """Largest request body, in MiB; above, 413."""
    keep_exports: Int64 = Field(8, ge=1)
    """Newest folders kept under `exports/` in the data dir; a new export removes older ones."""
    max_connections: Int64 = Field(4096, ge=16)
    """Connections at the same time; above, new ones are closed at once. The process's limit of open files may allow
    fewer.
    """
    episode_may_finish: bool = True
    """Let an episode's own key finish it with a reward. With `false` that takes the client token, which agents do not
    have.
    """
    max_episodes_per_client: Int64 = Field(1024, ge=1)
    """Live episodes of one `client_id`; above, 429."""
    max_calls_per_episode: Int64 = Field(256, ge=1)
    """Calls of one episode at the same time, held ones included; above, 429."""
    max_calls_per_client: Int64 = Field(4096, ge=1)
    """Calls of all episodes of one `client_id` at the same time; above, 429."""
    log_format: Literal["text", "json"] = "text"
    """How `logs/server.log` is written: lines for people, or one JSON object a line."""
    trace_endpoint: str = ""
    """Where OpenTelemetry spans of calls and steps are sent (OTLP over HTTP, such as
    `http://127.0.0.1:4318/v1/traces`); empty: nowhere. Needs the extra `otel`.
    """

    @field_validator("host")
    @classmethod
    def _host_is_safe(cls, host: str, known: ValidationInfo) -> str:
        is_private = host == "localhost" or _is_loopback(host)
        if not (is_private or known.data.get("tls_cert") or known.data.get("insecure")):
            raise ValueError(
                "non-loopback addresses require TLS: set server.tls_cert and server.tls_key, or "
                "server.insecure = true (--insecure) for plain text, or use 127.0.0.1 and a tunnel"
            )
        return host

    @field_validator("trace_endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, endpoint: str) -> str:
        if endpoint and not re.match(r"https?://[^/]", endpoint):
            raise ValueError("this is no address: give one such as 'http://127.0.0.1:4318/v1/traces'")
        return endpoint

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, hosts: str) -> str:
        if wrong := [name for name in hosts.split(",") if not re.fullmatch(r"\s*([\w.-]*|\[[\da-fA-F:]+\])\s*", name)]:
            raise ValueError(f"{wrong[0]!r} is no host's name: give it without scheme and port, such as 'box.example'")
        return hosts

    @model_validator(mode="after")
    def _certificate_has_a_key(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(f"{given} = {getattr(self, given)!r} needs {missing}, too")
        return self


class ServeConfig(Section):
    """Root of the settings file of `agentjet serve`."""

    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    server: ServerConfig = ServerConfig()
    job: JobConfig = JobConfig()

    @model_validator(mode="after")
    def _completions_fit(self) -> Self:
        if self.model.context_length and self.job.max_tokens >= self.model.context_length:
            raise ValueError(
                f"job.max_tokens = {self.job.max_tokens} leaves no room for a prompt "
                f"in model.context_length = {self.model.context_length}"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
