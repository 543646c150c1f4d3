"""The memory of a rank and of a replica, from a model's `config.json`, before anything loads. No torch.

`agentjet doctor` prints it. The rules are those of `learner.py`: weights, gradients in float32, and masters and
moments (12 bytes for each trained parameter with AdamW, and 4 with a reference that moves) that the ranks divide.
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentjet.config import SamplerConfig, SamplerLimits
from agentjet.errors import ConfigError

USABLE = 0.6
"""Part of a device's memory for weights, gradients and moments. The rest is for activations and fragmentation."""
DEFAULT_CONTEXT = 8192
"""Context length of recurrent models, which have no limit, if the settings name none."""
REPLICA_USABLE = 0.9
"""Part of a GPU that vLLM takes."""
MAX_HEADER = 100_000_000
"""Bytes of a safetensors header, as in its library."""
REPLICA_EXTRA = 2 * 2**30
"""Bytes of a replica on CUDA beside weights and cache: context, graphs, workspace. An estimate."""

STATES_PER_COMPLETION = 2
"""States of recurrent layers for each of `sampler.max_concurrent` completions: its own, and a stored prefix."""
ROW_TOKENS = 1024
"""Least tokens of the cache for each completion sampled at a time, where `auto` chooses either number."""
FEWEST_ROWS, MOST_ROWS = 8, 512
"""Bounds of completions sampled at a time, where `auto` chooses."""
REPLICA_ROWS = 256
"""Completions sampled at a time by a replica that shares no GPU, where `auto` chooses and the memory holds them."""
BLOCK_TOKENS = 32
"""Tokens of a block of a replica's cache. The CPU's attention needs a multiple of 32."""
MLA_BLOCK_TOKENS = 128
"""vLLM's least tokens of a block for a model with MLA and states."""
EXTRA_REQUESTS = 2
"""Places of a replica beside those of completions: one request scores tokens, one scores the probe."""
SHARED_BYTES = 160 * 2**20
"""Shared memory of a replica with `tensor_parallel`: the messages between vLLM's processes."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The sizes of a model that the cache of a replica depends on.

    vLLM plans blocks in these bytes, and pads as this class counts: all blocks have one size, a layer with a window
    takes as many as one without, and a block has room for a state. Estimated: states are counted in float32, which is
    vLLM's largest type, and all layers of a kind have keys of one size.
    """

    full_layers: int
    """Layers with keys of all tokens."""
    window_layers: int
    """Layers with keys of a window or a chunk."""
    recurrent_layers: int
    kv_heads: int
    """Heads of keys; 1 with MLA, whose latent vectors every GPU holds whole."""
    head_values: int
    """Numbers of a head for each token and layer."""
    window_kv_heads: int
    window_head_values: int
    """The same of layers with windows."""
    state_values: int
    """Numbers in the state of one recurrent layer for each sequence."""
    is_mla: bool = False

    @property
    def token_values(self) -> int:
        """Numbers of all layers for each token."""
        full = self.full_layers * self.kv_heads * self.head_values
        return full + self.window_layers * self.window_kv_heads * self.window_head_values

    def bytes(self, limits: SamplerLimits, *, tensor_parallel: int = 1, value_bytes: int = 2) -> int:
        """Returns the bytes of a GPU for `cache_tokens` tokens, and for the states of `max_concurrent` completions."""
        of_full = max(1, self.kv_heads // tensor_parallel) * self.head_values * value_bytes
        of_window = max(1, self.window_kv_heads // tensor_parallel) * self.window_head_values * value_bytes
        token = max(of_full if self.full_layers else 0, of_window if self.window_layers else 0)
        state = 4 * self.state_values // tensor_parallel if self.recurrent_layers else 0
        tokens, page = BLOCK_TOKENS, BLOCK_TOKENS * token
        if state and token:  # vLLM makes a block of keys as large as a state.
            step = MLA_BLOCK_TOKENS if self.is_mla else BLOCK_TOKENS
            tokens = step * -(-state // (step * token))
            page = tokens * token
        page = page or state
        # Layers of a kind are cut into groups of one size, with their own blocks. See `get_kv_cache_groups` of vLLM.
        kinds = (self.full_layers, self.window_layers, self.recurrent_layers)
        present = [count for count in kinds if count]
        if not present:
            return 0
        group = max(present) if max(present) < 1.5 * min(present) else min(present)
        full, window, recurrent = (-(-count // group) for count in kinds)
        # Blocks of smaller keys hold more tokens, if a whole number of them fits.
        in_full, in_window = (
            -(-limits.cache_tokens // (tokens * (1 if not own or token % own else token // own)))
            for own in (of_full, of_window)
        )
        states = STATES_PER_COMPLETION * (limits.max_concurrent + EXTRA_REQUESTS)
        # A window may begin within a block. One block is always empty.
        blocks = full * in_full + window * (in_window + 1) + recurrent * states + 1
        return blocks * group * page


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that memory depends on."""

    num_parameters: int
    layer_parameters: int
    """Those of the decoder's layers, which sharded ranks divide."""
    unused_parameters: int
    """Those of the experts that a token does not choose."""
    num_layers: int
    cache_values: int
    """Numbers in the key-value cache of the embedded backend for each token."""
    hidden: int
    """Numbers between two layers for each token."""
    activations: int
    """Numbers that all layers keep of each token for the backward pass."""
    state_values: int
    """Numbers in the states of all recurrent layers for each sequence, in float32."""
    replica_cache: CacheSize
    is_exact: bool
    """False if counted from the config: within a few percent for dense decoders."""


@dataclass(frozen=True, slots=True)
class Learning:
    """The parts of the settings that change the memory of a learner."""

    value_bytes: int = 2
    """Bytes of a weight: 2 in bfloat16, 4 in float32."""
    trained: int = 0
    """Parameters that learn, such as an adapter's. 0: all of the model."""
    offload: bool = False
    """`model.offload_optimizer` on a GPU: what the ranks divide is in the CPU's memory, with 4 bytes of gradients."""
    optimizer_bytes: float = 12
    """Bytes of the master and the moments of a trained parameter."""
    reference: bool = False
    """True if the reference moves: it is kept in float32, and divided like masters."""

    @property
    def divided_bytes(self) -> float:
        """Bytes for each trained parameter that the ranks divide: masters, moments, and a reference that moves."""
        return self.optimizer_bytes + 4 * self.reference


ALL_WEIGHTS = Learning()
"""All weights learn in bfloat16, on the device."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one process, before activations, see `activation_bytes`."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    extra: int = 0
    host: int = 0
    """Bytes in the CPU's memory, which are not in the total."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.cache + self.extra


def model_size(folder: Path) -> ModelSize:
    """Returns the sizes of the model in a Hugging Face folder. Raises `ConfigError`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        counted = size_from_config(config)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'} has no readable sizes: {error!r}") from None
    if files := sorted(folder.glob("*.safetensors")):
        total = sum(map(parameters_in, files))
        layers = max(0, total - (counted.num_parameters - counted.layer_parameters))
        return replace(counted, num_parameters=total, layer_parameters=layers, is_exact=True)
    return counted


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configs: Qwen, Mixtral and gpt-oss, DeepSeek and GLM, Ernie."""
WINDOWS = ("sliding_attention", "chunked_attention")
"""Names in configs of layers that see a window or a chunk."""


def size_from_config(config: dict[str, Any]) -> ModelSize:
    """Counts the parameters of a decoder with gated MLPs and grouped attention or MLA. Raises `KeyError`, `TypeError`.

    The parameters of recurrent layers are counted as attention.
    """
    config = config.get("text_config") or config
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    cache = cache_size(config)
    attention = 2 * hidden * heads * width + 2 * hidden * kv_heads * width
    projected, stored = (heads + 2 * kv_heads) * width, 2 * kv_heads * width
    if latent := config.get("kv_lora_rank"):
        rope, key = config["qk_rope_head_dim"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        stored = heads * (key + config["v_head_dim"])
        projected = stored + heads * key
        query = config.get("q_lora_rank")
        attention = query * (hidden + heads * key) if query else hidden * heads * key
        attention += hidden * (latent + rope) + heads * latent * (stored // heads - rope)
        attention += heads * config["v_head_dim"] * hidden
    experts = next((config[name] for name in EXPERTS if config.get(name)), 1)
    dense_inner = config.get("intermediate_size")
    inner = (config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"]
    shared = (config.get("n_shared_experts") or 0) * inner or config.get("shared_expert_intermediate_size") or 0
    active = (config.get("num_experts_per_tok") or 1) if experts > 1 else 1
    dense = (config.get("first_k_dense_replace") or 0) if experts > 1 else 0
    layer = attention + 2 * hidden + 3 * hidden * inner * experts
    layer += hidden * experts + 3 * hidden * shared if experts > 1 else 0
    in_layers = (layers - dense) * layer
    in_layers += dense * (attention + 2 * hidden + 3 * hidden * (dense_inner or inner))
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        num_parameters=in_layers + embeddings + hidden,
        layer_parameters=in_layers,
        unused_parameters=(layers - dense) * 3 * hidden * inner * (experts - active),
        num_layers=layers,
        cache_values=(cache.full_layers + cache.window_layers) * stored,
        state_values=cache.recurrent_layers * cache.state_values,
        hidden=hidden,
        activations=layers * (7 * hidden + projected + 4 * (inner * active + shared)),
        replica_cache=cache,
        is_exact=False,
    )


def cache_size(config: dict[str, Any]) -> CacheSize:
    """Returns the sizes of a replica's cache, also for a model without attention. Raises `KeyError`, `TypeError`."""
    config = config.get("text_config") or config
    layers = config["num_hidden_layers"]
    recurrent, state = recurrent_layers(config, layers)
    with_keys = layers - recurrent
    if config.get("model_type") == "falcon_h1":  # Each layer has both.
        with_keys = layers
    elif pattern := config.get("hybrid_override_pattern"):  # Other layers are MLPs.
        with_keys = pattern.count("*")
    with_keys -= config.get("num_kv_shared_layers") or 0
    windows = 0
    if kinds := config.get("layer_types"):
        windows = sum(kind in WINDOWS for kind in kinds[: layers - (config.get("num_kv_shared_layers") or 0)])
    elif every := config.get("sliding_window_pattern"):
        windows = with_keys - with_keys // every
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        windows = with_keys
    kv_heads, values, is_mla = 0, 0, False
    of_full: dict[str, Any] = {}
    if with_keys:
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads)
        values = 2 * (config.get("head_dim") or config["hidden_size"] // heads)
        # Gemma 4 has other heads in layers without windows: in the hub's names, and in those of transformers.
        of_full = {"head_dim": config.get("global_head_dim"), "kv": config.get("num_global_key_value_heads")}
        for changes in (config.get("per_layer_config") or {}).values():
            of_full = {"head_dim": changes.get("head_dim"), "kv": changes.get("num_key_value_heads")}
        if config.get("kv_lora_rank") and config.get("model_type") != "minicpm3":  # vLLM stores its heads apart.
            kv_heads, values, is_mla = 1, config["kv_lora_rank"] + config["qk_rope_head_dim"], True
    return CacheSize(
        full_layers=with_keys - windows,
        window_layers=windows,
        recurrent_layers=recurrent,
        kv_heads=of_full.get("kv") or kv_heads,
        head_values=2 * (of_full.get("head_dim") or 0) or values,
        window_kv_heads=kv_heads,
        window_head_values=values,
        state_values=state,
        is_mla=is_mla,
    )


RECURRENT = ("linear_attention", "conv", "mamba", "hybrid")
"""Names of recurrent layers in configs."""


def recurrent_layers(config: dict[str, Any], layers: int) -> tuple[int, int]:
    """Returns the number of recurrent layers, and the numbers in the state of one, with the inputs of its convolution.

    The names are those of Qwen3-Next, Kimi Linear, LFM2, Mamba-2 (also in hybrids) and Mamba.
    """

    def first(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    kinds = config.get("layer_types") or config.get("layers_block_type")
    attention = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    if interval := first("full_attention_interval", "attn_layer_period"):
        attention = attention or range(layers // interval)
    pattern = config.get("hybrid_override_pattern")
    count = layers - len(attention) if attention else pattern.count("M") if pattern else layers
    count = sum(kind in RECURRENT for kind in kinds) if kinds else count
    inner = first("mamba_d_ssm", "d_inner") or (first("mamba_expand", "expand") or 2) * int(config["hidden_size"])
    size = first("mamba_d_state", "ssm_state_size", "state_size")
    convolution = (first("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache") or 4) - 1
    if heads := first("linear_num_value_heads"):
        key, value = first("linear_key_head_dim"), first("linear_value_head_dim")
        return count, heads * key * value + convolution * (2 * first("linear_num_key_heads") * key + heads * value)
    if heads := first("linear_num_heads"):
        return count, heads * first("linear_head_dim") * (first("linear_head_dim") + 3 * convolution)
    if size and (heads := first("mamba_n_heads", "mamba_num_heads", "num_heads")):
        inner = heads * (first("mamba_d_head", "mamba_head_dim", "head_dim") or inner // heads)
        return count, inner * size + convolution * (inner + 2 * first("mamba_n_groups", "n_groups") * size)
    if size:
        return count, inner * (size + convolution)
    return (count, convolution * int(config["hidden_size"])) if first("conv_L_cache") else (0, 0)


def states_need(size: ModelSize, max_concurrent: int) -> int:
    """Returns the bytes of the states of recurrent layers in the embedded sampler."""
    return 4 * size.state_values * STATES_PER_COMPLETION * max_concurrent


@dataclass(frozen=True, slots=True)
class SamplerRoom:
    """The memory for the cache of the embedded sampler, in bytes."""

    left: int
    """Left beside the model and its learner."""
    kept: int
    """Part of `left` for activations, logits and fragmentation."""
    by_token: int
    """Keys and values of a token; 0 for a model without."""
    by_row: int
    """States of recurrent layers for a completion."""
    context: int
    """Longest sequence, in tokens."""

    @property
    def chosen(self) -> int:
        """Part of `left` that `auto` takes: all but `kept`. It takes what the usual numbers need if half is left."""
        rows, cache = SamplerConfig().limits
        return max(0, self.left - self.kept, min(self.left // 2, rows * self.by_row + cache * self.by_token))

    def limits(self, settings: SamplerConfig, *, on_cuda: bool) -> SamplerLimits:
        """Returns the numbers of the settings. On CUDA, `auto` is what the memory holds.

        Raises `ConfigError` for a number of the settings that does not fit into `left`.
        """
        rows, cache = settings.max_concurrent, settings.cache_tokens
        by_row, taken = self.by_row + ROW_TOKENS * self.by_token, 0
        if cache != "auto":
            self._check("cache_tokens", cache, self.by_token)
            by_row, taken = self.by_row, cache * self.by_token
        if rows != "auto":
            self._check("max_concurrent", rows, by_row, taken)
        if not (on_cuda and (self.by_token or self.by_row)):
            return settings.limits
        if rows == "auto":
            most = MOST_ROWS if cache == "auto" else min(MOST_ROWS, cache // ROW_TOKENS)
            fitting = min(most, (self.chosen - taken) // by_row) if by_row else most
            rows = 1 << max(FEWEST_ROWS, fitting).bit_length() - 1  # The sizes of graphs are powers of two.
        if cache != "auto":
            return SamplerLimits(rows, cache)
        fitting = (self.chosen - rows * self.by_row) // self.by_token if self.by_token else rows * self.context
        return SamplerLimits(rows, max(rows * ROW_TOKENS, min(fitting, rows * self.context)))

    def _check(self, setting: str, value: int, size: int, taken: int = 0) -> None:
        if value * size > self.left - taken and self.left > 0:  # Else the learner does not fit, which is another error.
            largest = max(0, self.chosen - taken) // size
            raise ConfigError(
                f"sampler.{setting} = {value} does not fit the memory beside the model and its learner, which holds "
                f"{largest}: lower it, or set it to 'auto'"
            )


def parameters_in(file: Path) -> int:
    """Returns the number of values in a safetensors file, from its header. Raises `ConfigError`."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(stream.read(length))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file} has no readable header ({error}): download the model again") from None


def optimizer_bytes(name: str, size: ModelSize, *, adapter: bool = False) -> float:
    """Returns the bytes of the master and the moments of a trained parameter, a mean. See `optimizer.py`."""
    saved = {"muon": 4, "adamw_8bit": 6}.get(name, 0)
    return 12 - saved * (1 if adapter else size.layer_parameters / size.num_parameters)


def rank_need(
    size: ModelSize, learning: Learning = ALL_WEIGHTS, *, ranks: int, sharding: Literal["gathered", "sharded"]
) -> Need:
    """Returns the bytes of a learner rank.

    Sharded ranks divide layers, with masters in float32; one gathered layer comes on top. Embeddings stay whole.
    """
    if sharding == "gathered":
        return gathered_need(size.num_parameters, learning, ranks=ranks)
    trained = learning.trained
    learned = trained or size.num_parameters
    rest = size.num_parameters - size.layer_parameters
    gathered = (rest + size.layer_parameters // max(1, size.num_layers)) * learning.value_bytes
    frozen = size.layer_parameters * learning.value_bytes // ranks if trained else 0
    if learning.offload:
        return Need(gathered, 4 * (trained or rest), host=frozen + int((4 + learning.divided_bytes) * learned) // ranks)
    return Need(
        weights=gathered + frozen,
        gradients=4 * trained or 4 * rest + 4 * size.layer_parameters // ranks,
        optimizer=int(learning.divided_bytes * learned) // ranks,
    )


def activation_bytes(size: ModelSize, *, tokens: int, value_bytes: int = 2, recomputed: bool = False) -> int:
    """Returns the bytes that a micro-batch of `tokens` keeps for its backward pass, without logits.

    A longer single conversation is a micro-batch alone. `recomputed`: with `model.activation_checkpointing`, which
    keeps the input of each layer, and all of one layer at a time. Measured in float32; norms keep more in 16 bits.
    """
    kept = (
        size.hidden * size.num_layers + size.activations // max(1, size.num_layers) if recomputed else size.activations
    )
    return tokens * kept * value_bytes


def gathered_need(num_parameters: int, learning: Learning, *, ranks: int) -> Need:
    """Returns the bytes of a rank with all weights."""
    weights, learned = num_parameters * learning.value_bytes, learning.trained or num_parameters
    if learning.offload:
        return Need(weights, 4 * learned, host=int((4 + learning.divided_bytes) * learned) // ranks)
    return Need(weights, 4 * learned, int(learning.divided_bytes * learned) // ranks)


def embedded_need(num_parameters: int, learning: Learning) -> Need:
    """Returns the bytes of the worker of the embedded backend, without the sampler's cache."""
    need = gathered_need(num_parameters, learning, ranks=1)
    if learning.offload:  # Gradients move after each micro-batch: the device has them in the weights' type.
        return replace(need, gradients=need.gradients * learning.value_bytes // 4)
    if learning.value_bytes == 4:  # The weights are their own masters: moments only.
        return replace(need, optimizer=need.optimizer - 4 * (learning.trained or num_parameters))
    return need


def replica_need(size: ModelSize, limits: SamplerLimits, *, tensor_parallel: int = 1, value_bytes: int = 2) -> Need:
    """Returns the bytes of one GPU of a replica. Its cache gets as many: see `engine_settings`."""
    weights = size.num_parameters * value_bytes // tensor_parallel
    cache = size.replica_cache.bytes(limits, tensor_parallel=tensor_parallel, value_bytes=value_bytes)
    return Need(weights, cache=cache, extra=REPLICA_EXTRA)


def replica_limits(
    settings: SamplerConfig, size: ModelSize, *, memory: int, tensor_parallel: int = 1, value_bytes: int = 2
) -> SamplerLimits:
    """Returns the numbers of a replica that shares no GPU; `memory` is the number of bytes of each.

    `auto` is `REPLICA_ROWS` completions with `ROW_TOKENS` each, or fewer if the memory does not hold their cache and
    states.
    """

    def left(rows: int, tokens: int) -> int:
        limits = SamplerLimits(rows, tokens)
        need = replica_need(size, limits, tensor_parallel=tensor_parallel, value_bytes=value_bytes)
        return int(REPLICA_USABLE * memory) - need.total

    rows, cache = settings.limits
    wanted = REPLICA_ROWS if settings.max_concurrent == "auto" else rows
    if settings.max_concurrent == "auto" and size.state_values:
        least = 0 if settings.cache_tokens != "auto" else ROW_TOKENS
        while wanted > FEWEST_ROWS and left(wanted, max(cache, wanted * least)) < 0:
            wanted -= 1
    if settings.cache_tokens == "auto":
        fitting = bisect_right(range(wanted * ROW_TOKENS + 1), 0, key=lambda tokens: -left(wanted, tokens)) - 1
        cache = max(cache, fitting)
    if settings.max_concurrent == "auto":
        rows = max(FEWEST_ROWS, min(wanted, cache // ROW_TOKENS))
    return SamplerLimits(rows, cache)


def fewest_ranks(
    size: ModelSize, memory: int, learning: Learning = ALL_WEIGHTS, *, sharding: Literal["gathered", "sharded"]
) -> int | None:
    """Returns the fewest ranks whose devices of `memory` bytes hold the model; None if 1,024 do not.

    Sharded ranks are at least 2.
    """
    for power in range(1 if sharding == "sharded" else 0, 11):
        if rank_need(size, learning, ranks=2**power, sharding=sharding).total <= USABLE * memory:
            return int(2**power)
    return None


def sampling_rate(
    need: Need, size: ModelSize, *, bandwidth: float, arithmetic: float, concurrent: int, context: int
) -> float:
    """Returns an estimate of a replica's tokens per second: a GPU at the lower one of two limits.

    `bandwidth` in bytes per second: each step reads the weights once, and the cached `context` of every completion.
    `arithmetic` in operations per second: a token takes 2 for each of its parameters (Kaplan et al. 2020, section 2.1).
    """
    cache = 2 * size.replica_cache.token_values * concurrent * context
    operations = 2 * (size.num_parameters - size.unused_parameters)
    return min(concurrent * bandwidth / (need.weights + cache), arithmetic / operations)


def adapter_parameters(size: ModelSize, config: dict[str, Any], rank: int) -> int:
    """Returns the parameters of a LoRA adapter on all linear layers: rank x (inputs + outputs) of each."""
    config = config.get("text_config") or config
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    inner = config["intermediate_size"]
    sides = 2 * (hidden + heads * width) + 2 * (hidden + kv_heads * width) + 3 * (hidden + inner)
    return int(size.num_layers * rank * sides)
