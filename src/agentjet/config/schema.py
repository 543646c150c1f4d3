"""The schema of every setting. Unknown keys are refused; settings that depend on each other are checked at load.

The docstring of a field is its description in `docs/settings.md`, which `make docs` generates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agentjet.errors import did_you_mean
from agentjet.recipes import registry
from agentjet.recipes.hooks import HOOK_SECONDS
from agentjet.recipes.recipe import Recipe
from agentjet.section import Int64, Section
from agentjet.types import MAX_NAME, MAX_TEMPERATURE, MIN_TEMPERATURE, SOLE_POLICY, SamplerBounds

# ---- the job ---------------------------------------------------------------------------------------------------------

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
    """The optimiser and its learning-rate schedule."""

    name: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    """`adamw`. `muon`: Muon for the matrices of the decoder's layers, AdamW for other weights; not for adapters.
    `adamw_8bit`: AdamW with moments of 8 bits, except for embeddings; needs the extra `bitsandbytes`. The cluster
    backend has `adamw` only. A change begins with new moments at the next batch, also in a replay."""
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
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay rate of the first moment."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW: decay rate of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW: epsilon."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon: decay rate of the momentum, of Nesterov's kind. Updates have the size of AdamW's at the same `lr`."""
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
    max_turns: int = Field(0, ge=0, le=1_000_000)
    """Maximum turns of an episode, which are its trained answers. Agents end at `episode.max_turns`. 0: no limit."""
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
    """Seed of all random numbers on the server. Replicas use seeds only for requests and episodes that name one;
    their other answers are random."""
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

    def for_demonstrations(
        self, lr: float | None = None, policy: str = SOLE_POLICY, recipe: str | Mapping[str, Any] = ""
    ) -> Self:
        """Returns the settings of a batch of demonstrations for a policy.

        With `lr`, the policy has this constant learning rate. Others keep theirs. `recipe` is that of the request: see
        `SftRequest`. Raises `ValueError` if it cannot learn from given answers.
        """
        chosen = self._of_demonstrations(recipe)
        if lr is None:
            return self.model_copy(update={"recipe": chosen})
        constant = {"lr": lr, "schedule": "constant", "warmup_steps": 0}
        optimizers = {**self.optimizers, policy: self.optimizer_of(policy).model_copy(update=constant)}
        return self.model_copy(update={"recipe": chosen, "optimizers": optimizers})

    def _of_demonstrations(self, given: str | Mapping[str, Any]) -> Recipe:
        if not given or given == self.recipe.name:
            recipe = self.recipe if given or self.recipe.only_given else registry.make_recipe("sft")
        else:
            recipe = registry.make_recipe(given)
        if not recipe.takes_given and not recipe.only_given:
            raise ValueError(
                f"recipe = {recipe.name!r}: it learns from sampled answers, and demonstrations are given ones; "
                "use sft, dpo or kto"
            )
        return recipe

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


# ---- the server and its parts ----------------------------------------------------------------------------------------

SamplerCount = Annotated[SamplerBounds, BeforeValidator(SamplerBounds.parse), PlainSerializer(str)]


class LoraConfig(Section):
    """LoRA adapters. With `rank = 0`, all weights are trained. These settings cannot change within a data dir."""

    rank: Int64 = Field(0, ge=0, le=1024)
    """Rank of the adapters. 0: no adapters, all weights are trained."""
    alpha: Int64 = Field(32, ge=1)
    """Scale of the adapters: the product of their two matrices is multiplied by alpha / rank."""
    target_modules: str = "all-linear"
    """Modules that get an adapter: `all-linear`, or a comma-separated list of module names."""


def bfloat16_is_faster(facts: Path = Path("/proc/cpuinfo")) -> bool:
    """True for a CPU whose bfloat16 matrix products are faster than those in float32.

    A rule, not a measurement: a busy machine would choose another type. Intel's AVX512-BF16 takes twice as long as
    float32 (`docs/log.md`).
    """
    words = set(facts.read_text(encoding="utf-8").split()) if facts.exists() else set()
    return "amx_bf16" in words or {"AuthenticAMD", "avx512_bf16"} <= words


class ModelConfig(Section):
    """The base model and its device. `name` and `dtype` cannot change within a data dir."""

    name: str = "smollm2-135m"
    """A Hugging Face id, a local folder, the bundled model `smollm2-135m`, or `RUN@VERSION`: the policy of another run
    of the same data dir at a checkpoint, as in `default@40`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the weights. `auto`: CUDA if available, else the CPU."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the weights. `auto`: the faster one, which is bfloat16 on CUDA, on CPUs with AMX and on AMD's with
    AVX512-BF16, else float32. The optimiser's copy of the weights is always float32.
    """
    context_length: Int64 = Field(0, ge=0)
    """Maximum length of a prompt and its completion together, in tokens. 0: the maximum of the model."""
    tool_format: str = "auto"
    """Syntax of tool calls, such as `hermes`: docs/models.md lists them. `auto`: the one that reads the calls that the
    chat template writes, found by a trial at load."""
    activation_checkpointing: bool = False
    """Compute the activations of each layer again in the backward pass instead of keeping them. Long conversations need
    much less memory, and learning takes about a third longer. The gradients are the same."""
    offload_optimizer: bool = False
    """Keep the optimiser's masters and moments, 12 bytes a trained parameter with AdamW, in the CPU's memory instead of
    the GPU's. Updates take longer, and may differ from those of a GPU by rounding. Sharded ranks keep their parts of
    the layers there, too, and copy them in every pass. Without a GPU, weights are the same, and no memory is saved."""
    expert_routes: Literal["auto", "on", "off"] = "auto"
    """Routing replay for models with experts: sampling records the chosen experts of each token, and learning repeats
    the choice. `auto`: on, until two batches have shown that the learner chooses otherwise in at most 0.1 % of cases;
    off with replicas. If the routes of a model cannot be recorded, the log has the reason."""
    threads: Int64 = Field(0, ge=0, le=1024)
    """CPU threads of the worker. 0: all cores. Replays are bit-equal only with the same number of threads."""
    lora: LoraConfig = LoraConfig()


class ComputeConfig(Section):
    """Where a policy is computed. `embedded`: one worker process, one device. `cluster`: separate processes of
    learner ranks and vLLM replicas, on this machine or on a Ray cluster. These may change between two starts.
    """

    backend: Literal["embedded", "cluster"] = "embedded"
    """`embedded`, or `cluster`, which needs an environment with vLLM. The settings below are for `cluster`."""
    ranks: Int64 = Field(1, ge=1, le=4096)
    """Processes that learn together, each with one GPU if there are any. Replays are bit-equal only with the same
    number of ranks."""
    sharding: Literal["auto", "gathered", "sharded"] = "auto"
    """`gathered`: each rank holds all weights and a part of the optimiser's state. `sharded`: each rank holds a part of
    the layers, too. `auto`: `gathered` if that fits the memory of a rank."""
    samplers: SamplerCount = SamplerBounds(1, 1)
    """Replicas that sample: a number, or a range such as `"2..8"`. In a range, there is one for each
    `sampler.max_concurrent` completions; their number rises after 10 s of more completions and falls after 5 minutes of
    fewer."""
    tensor_parallel: Int64 = Field(1, ge=1, le=64)
    """GPUs of each replica."""
    colocated: bool = False
    """Ranks and replicas share GPUs. While a batch is learned, the replicas free their memory and calls wait. Without
    `address` only."""
    address: str = ""
    """Ray cluster, as in `ray start --address`, or `auto`. Empty: processes of this machine, without Ray."""
    host: str = "127.0.0.1"
    """Address of this machine at which ranks and replicas reach the gateway. With several machines, that of a private
    network: tokens and weights travel on it unencrypted."""
    sampler_python: str = ""
    """Interpreter of the environment with vLLM. Empty: the folder `sampler-venv` of the cache."""
    weight_transfer: Literal["file", "ipc", "nccl"] = "file"
    """The way of whole weights to replicas; an adapter is always a file. `file`: each machine fetches a file. `ipc`:
    the replica reads the memory of the GPU that it shares with the rank. `nccl`: rank 0 sends them from its GPU to
    those of each replica. `ipc` needs `colocated` with one rank and one sampler, `nccl` excludes it. Both have never
    run on a GPU."""

    @field_validator("host")
    @classmethod
    def _host_is_an_address(cls, host: str) -> str:
        if host in ("", "0.0.0.0", "::", "[::]"):
            raise ValueError("other machines cannot reach this address: give that of this machine in a private network")
        return host

    @model_validator(mode="after")
    def _ranks_can_share(self) -> Self:
        if self.sharding == "sharded" and self.ranks == 1:
            raise ValueError(
                "sharding = 'sharded' with ranks = 1: one rank holds all layers; raise ranks, or set sharding to "
                "'gathered'"
            )
        return self

    @model_validator(mode="after")
    def _shared_gpus_are_of_this_machine(self) -> Self:
        if self.colocated and self.address:
            raise ValueError(
                "colocated = true with an address: Ray gives each process its own GPUs; leave address empty, or set "
                "colocated to false"
            )
        if self.colocated and self.samplers.most > self.samplers.least:
            raise ValueError(
                f"colocated = true with samplers = '{self.samplers}': replicas share the GPUs of the ranks, so their "
                "number is fixed; give one number"
            )
        return self

    @model_validator(mode="after")
    def _weights_can_travel(self) -> Self:
        if self.weight_transfer == "nccl" and self.colocated:
            raise ValueError(
                "weight_transfer = 'nccl' with colocated = true: NCCL connects no two processes of one GPU; set "
                "weight_transfer to 'file' or 'ipc'"
            )
        shares_one = self.ranks == self.tensor_parallel == self.samplers.most == 1 and self.colocated
        if self.weight_transfer == "ipc" and not shares_one:
            raise ValueError(
                f"weight_transfer = 'ipc' with colocated = {str(self.colocated).lower()}, ranks = {self.ranks}, "
                f"samplers = {self.samplers} and tensor_parallel = {self.tensor_parallel}: the replica reads the "
                "memory of the rank on one GPU; set colocated to true and the numbers to 1, or weight_transfer to "
                "'file'"
            )
        return self


class PolicyConfig(Section):
    """A policy of the run. Agents choose it with `model = "NAME"` in their requests. A run without such a section has
    one policy, which trains `[model]`. The policies of a run cannot change.
    """

    model: str = ""
    """Base model, as in `model.name`. Empty: `model.name`."""
    lora: LoraConfig | None = None
    """Adapter of this policy, such as `{rank = 8}`. Not given: `[model.lora]`."""
    compute: ComputeConfig | None = None
    """Where this policy is computed. Not given: `[compute]`."""
    worker: str = Field("", pattern=r"^[a-z0-9_-]{0,64}$")
    """Name of the worker process. Policies with the same name share a process, and their adapters share one copy of the
    base model; those of other runs, too."""


class SamplerLimits(NamedTuple):
    """The settings of `SamplerConfig` as numbers."""

    max_concurrent: int
    cache_tokens: int


class SamplerConfig(Section):
    """Limits on concurrent sampling."""

    max_concurrent: Annotated[Int64, Field(ge=1, le=4096)] | Literal["auto"] = "auto"
    """Completions sampled at the same time. Further calls wait in a queue. `auto`: 64; up to 512 with the embedded
    backend on CUDA, by the memory that is left beside the model and its learner; up to 256 in a replica with a GPU that
    it does not share, by its memory."""
    cache_tokens: Annotated[Int64, Field(ge=256)] | Literal["auto"] = "auto"
    """Size of the KV cache over all conversations, in tokens. On CUDA its memory is reserved at the start. Recurrent
    layers have 2 states for each of `max_concurrent` completions, and this size does not change their number. `auto`:
    65536; with the embedded backend on CUDA, by the memory that is left; up to 262144 in a replica with a GPU that it
    does not share."""

    @property
    def limits(self) -> SamplerLimits:
        """These numbers, with those for CPUs and shared GPUs in place of `auto`."""
        return SamplerLimits(
            64 if self.max_concurrent == "auto" else self.max_concurrent,
            65536 if self.cache_tokens == "auto" else self.cache_tokens,
        )


class ServerConfig(Section):
    """Address, files and limits of the server."""

    tls_cert: str = ""
    """File with the certificate chain (PEM) for HTTPS. Needs `tls_key`."""
    tls_key: str = ""
    """File with the private key of the certificate (PEM, without a passphrase)."""
    insecure: bool = False
    """Allow plain HTTP on non-loopback addresses. Anyone on the network path can then read the tokens."""
    host: str = "127.0.0.1"
    """Address to bind. A non-loopback address needs `tls_cert` and `tls_key`, or `insecure`."""
    port: Int64 = Field(8400, ge=0, le=65535)
    """Port to bind. 0: any free port."""
    fronts: Int64 = Field(0, ge=0, le=8)
    """Number of processes that answer the agents' model calls, on the ports after `port`; 0: the server does. Each one
    uses a core. Needs `compute.backend = "cluster"`."""
    front_url: str = ""
    """Base URL of a front as agents reach it, with `{front}` for its number from 0, such as
    `https://agents.example/f{front}`. Empty: the server's host, as the client reaches it, and the port of the front."""
    data_dir: Path = Path("agentjet-data")
    """Folder for the journal, checkpoints, tokens and logs."""
    allowed_hosts: str = ""
    """Further names allowed in the `Host` header of requests, such as that of a tunnel or a proxy: comma-separated,
    without ports. `host`, `localhost` and loopback addresses are always allowed; other requests are refused.
    While this is empty, a server at an address other than loopback allows every name."""
    model_aliases: str = ""
    """Further model names accepted in requests, for agents with a fixed model name: comma-separated, `*` matches any
    text, such as `gpt-4o*, claude-*`. The model's own name and `policy` are always accepted; others are refused."""
    call_timeout: float = Field(600.0, gt=0)
    """Seconds that a call waits while the worker learns or restarts; then the answer is 503."""
    worker_timeout: float = Field(120.0, gt=0)
    """Seconds without progress after which the worker is killed and replaced. Progress is a message or a step, such as
    a decoding step or a micro-batch. While it loads, compiles, writes files or computes on a CPU, CPU time is, too.
    Time in which it waits for a core does not count, on Linux and on the server's machine; after ten times these
    seconds, it is killed anyway."""
    hook_timeout: float = Field(HOOK_SECONDS, gt=0)
    """Seconds that one call of a recipe's hook may take, without those in which it waits for a core; then the run stops
    with the name of the hook. Next to the weights the compute process is started again for other runs. In the gateway
    the thread of the hook is abandoned. Raise it for hooks that compile kernels."""
    max_body_mb: Int64 = Field(8, ge=1, le=4096)
    """Maximum size of a request body in MiB. Larger bodies are refused with 413."""
    keep_exports: Int64 = Field(8, ge=1)
    """Number of newest exports to keep in `exports/` of the data dir. A new export removes older ones."""
    keep_transcripts: Int64 = Field(200, ge=0, le=1_000_000)
    """Maximum size in MB of the calls that the journal of each run keeps for people when no replay needs them: of a
    few episodes of each batch, of failed episodes and of evaluations. 0: none are kept."""
    max_connections: Int64 = Field(4096, ge=16)
    """Maximum number of open connections; further ones are closed. The process's limit on open files can lower it."""
    episode_may_finish: bool = True
    """Allow an episode to be finished with its own key. `false`: a reward needs the client token."""
    max_episodes_per_client: Int64 = Field(1024, ge=1)
    """Maximum number of live episodes of one `client_id`; above it, 429."""
    max_calls_per_episode: Int64 = Field(256, ge=1)
    """Maximum number of concurrent calls of one episode, waiting calls included; above it, 429."""
    max_calls_per_client: Int64 = Field(4096, ge=1)
    """Maximum number of concurrent calls of one `client_id` over all its episodes; above it, 429. Each front counts
    those of its episodes."""
    trace_endpoint: str = ""
    """URL that receives OpenTelemetry spans of calls and steps (OTLP over HTTP), such as
    `http://127.0.0.1:4318/v1/traces`. Empty: no tracing. Needs the extra `otel`."""

    @field_validator("host")
    @classmethod
    def _host_is_safe(cls, host: str, known: ValidationInfo) -> str:
        if not (is_loopback(host) or known.data.get("tls_cert") or known.data.get("insecure")):
            raise ValueError(
                "non-loopback addresses require TLS: set server.tls_cert and server.tls_key, or "
                "server.insecure = true (--insecure) for plain text, or use 127.0.0.1 and a tunnel"
            )
        return host

    @field_validator("front_url")
    @classmethod
    def _front_url_has_a_number(cls, url: str) -> str:
        plain = url.replace("{front}", "0", 1)
        if url and (
            plain == url or not re.fullmatch(r"https?://[^/\s{}?#@]+(/[^\s{}?#]*)?(?<!/v1)", plain.rstrip("/"))
        ):
            raise ValueError(
                "not a URL with {front}, which stands for the number of the front: use one such as "
                "'https://agents.example/f{front}', without user, query and /v1"
            )
        return url

    @field_validator("trace_endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, endpoint: str) -> str:
        if endpoint and not re.match(r"https?://[^/]", endpoint):
            raise ValueError("not a URL: use one such as 'http://127.0.0.1:4318/v1/traces'")
        return endpoint

    @field_validator("data_dir", mode="before")
    @classmethod
    def _data_dir_has_a_name(cls, folder: object) -> object:
        if folder == "":
            raise ValueError("give the name of a folder, such as 'agentjet-data', or '.' for the present one")
        return folder

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, hosts: str) -> str:
        if wrong := [name for name in hosts.split(",") if not re.fullmatch(r"\s*([\w.-]*|\[[\da-fA-F:]+\])\s*", name)]:
            raise ValueError(f"{wrong[0]!r} is not a host name: give it without scheme and port, such as 'box.example'")
        return hosts

    @model_validator(mode="after")
    def _certificate_has_a_key(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(f"{given} = {getattr(self, given)!r} needs {missing} as well")
        return self


class ServeConfig(Section):
    """The settings file of `agentjet serve`."""

    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    compute: ComputeConfig = ComputeConfig()
    server: ServerConfig = ServerConfig()
    policies: dict[PolicyName, PolicyConfig] = Field({})
    job: JobConfig = Field(default_factory=JobConfig)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The policies of the run. Without `[policies]`, the one policy `policy`."""
        return tuple(self.policies) or (SOLE_POLICY,)

    def model_of(self, policy: str) -> ModelConfig:
        own = self.policies.get(policy, PolicyConfig())
        return self.model.model_copy(
            update={"name": own.model or self.model.name, "lora": self.model.lora if own.lora is None else own.lora}
        )

    def compute_of(self, policy: str) -> ComputeConfig:
        return self.policies.get(policy, PolicyConfig()).compute or self.compute

    def worker_of(self, policy: str) -> str:
        return self.policies[policy].worker if policy in self.policies else ""

    def host_of(self, policy: str) -> tuple[str, str]:
        """Returns the same value for policies that share a process. In the cluster, each policy has its own."""
        is_alone = self.compute_of(policy).backend == "cluster"
        return ("policy", policy) if is_alone else ("worker", self.worker_of(policy))

    @model_validator(mode="after")
    def _policies_have_names(self) -> Self:
        if SOLE_POLICY in self.policies:
            raise ValueError(
                f"policies.{SOLE_POLICY}: {SOLE_POLICY!r} is the policy of a run without [policies]: choose another "
                "name, or omit [policies]"
            )
        for name in self.job.optimizers:
            if name not in self.policy_names:
                raise ValueError(f"job.optimizers.{name}: {unknown_policy(name, self.policy_names)}")
        return self

    @model_validator(mode="after")
    def _fronts_reach_samplers(self) -> Self:
        embedded = [name for name in self.policy_names if self.compute_of(name).backend == "embedded"]
        if self.server.fronts and embedded:
            own = self.policies.get(embedded[0], PolicyConfig()).compute is not None
            key = f"policies.{embedded[0]}.compute.backend" if own else "compute.backend"
            raise ValueError(
                f"server.fronts = {self.server.fronts} needs samplers beside the learner of each policy: set {key} = "
                "'cluster', or fronts to 0"
            )
        if self.server.front_url and not self.server.fronts:
            raise ValueError(
                f"server.front_url = {self.server.front_url!r} needs fronts: set server.fronts, or omit it"
            )
        if self.server.fronts and 0 < self.server.port > 65535 - self.server.fronts:
            message = f"server.port = {self.server.port} leaves no ports for {self.server.fronts} fronts: lower it"
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _task_means_are_of_the_policy(self) -> Self:
        if self.policies and self.job.recipe.reads_task_means:
            raise ValueError(
                f"job.recipe = {self.job.recipe.name!r} compares rewards with those of earlier episodes of the task, "
                "and these are not of single policies: choose another recipe, or omit [policies]"
            )
        return self

    def base_models(self) -> dict[str, tuple[str, str]]:
        """The base model of the adapters in each embedded worker: a policy that has it, and its name.

        Raises `ValueError` if the adapters of a worker have several.
        """
        bases: dict[str, tuple[str, str]] = {}
        for policy in self.policy_names:
            model, worker = self.model_of(policy), self.worker_of(policy)
            if not model.lora.rank or self.compute_of(policy).backend != "embedded":
                continue
            other, base = bases.setdefault(worker, (policy, model.name))
            if base != model.name:
                raise ValueError(
                    f"policies.{policy}.model = {model.name!r} and policies.{other}.model = {base!r}: the adapters of "
                    f"one worker share one base model; set policies.{policy}.worker to another name"
                )
        return bases

    @model_validator(mode="after")
    def _adapters_share_a_base(self) -> Self:
        self.base_models()
        return self

    @model_validator(mode="after")
    def _clusters_have_no_workers(self) -> Self:
        for policy in self.policy_names:
            if (worker := self.worker_of(policy)) and self.compute_of(policy).backend == "cluster":
                raise ValueError(
                    f'policies.{policy}.worker = {worker!r}: with compute.backend = "cluster" each policy has its own '
                    "processes; omit it"
                )
        return self

    @model_validator(mode="after")
    def _completions_fit(self) -> Self:
        if self.model.context_length and self.job.max_tokens >= self.model.context_length:
            raise ValueError(
                f"job.max_tokens = {self.job.max_tokens} leaves no room for a prompt "
                f"in model.context_length = {self.model.context_length}"
            )
        return self


@lru_cache(64)
def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
