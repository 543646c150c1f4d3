"""Loading of a policy: the model on its device, its adapters, its `ModelInfo`, and the test for prefix sharing.

A model shares prefixes if one prefix can be computed once for several continuations. Both conditions must hold:

* By its config, every layer is of a known kind. A window that is not shorter than the context counts as full attention.
* A forward pass over a small forest under an attention plan gives the same result as the model row by row. The pass
  finds what a config does not show: soft caps, sinks, biases, convolutions, unusual key and value sizes. With recurrent
  layers, the steps of the sampler over the same tokens give this result, too.

Any other model samples and learns one row per timeline with its own attention. The result is the same, the cost higher.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import functools
import hashlib
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from agentjet.compute import routes
from agentjet.compute.attention import (
    ATTENTION,
    PLAIN,
    AttentionKind,
    FlexPlan,
    ForestPlan,
    LayerCall,
    flat_forward,
    forest_plan,
)
from agentjet.compute.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.cached_attention import difference_beyond, step_inputs
from agentjet.compute.cached_states import StateSlots
from agentjet.compute.memory import DEFAULT_CONTEXT
from agentjet.compute.policy import (
    KeySizes,
    Policy,
    cached_folder,
    distance,
    find_logit_transform,
    first_line,
    load_pretrained,
    locate_model,
    model_fingerprint,
    probe_tokens,
    resolve_device,
    resolve_dtype,
    text_decoder,
    tolerance,
    why_not_loaded,
)
from agentjet.compute.recurrence import install
from agentjet.config import LoraConfig, ModelConfig
from agentjet.errors import AgentJetError, ConfigError
from agentjet.processes.progress import PROGRESS
from agentjet.rendering import check_tool_format, template_for
from agentjet.rendering.formats import TOOL_FORMATS
from agentjet.timeline.forest import Row, build_forest
from agentjet.types import ModelInfo, SlowWork

log = logging.getLogger(__name__)

ADAPTER_SEED = 0
"""Seed of the random weights of every adapter, because a replay must begin with equal weights."""


class BaseModel:
    """A loaded model: a policy that trains all of its weights, or the base of any number of adapters."""

    def __init__(self, config: ModelConfig) -> None:
        """Load the configured model on its device; raises `ConfigError` naming what is wrong and the way out."""
        self._config = config
        check_tool_format(config.tool_format)
        if config.threads:
            torch.set_num_threads(config.threads)
        device = resolve_device(config.device)
        folder = locate_model(config.name)
        try:
            hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.name = {config.name!r}: {why_not_loaded(error)}") from error
        dtype = resolve_dtype(config.dtype, device)
        with _refusing(f"model.name = {config.name!r} ({hf_config.model_type}) cannot be trained", "use another model"):
            model = load_pretrained(config.name, folder, hf_config, dtype).to(device).eval()
            _freeze_towers(model)
            self._folder = folder
            self.policy = Policy(model, make_model_info(config, folder, model), folder)
            """The model without adapters."""
            self.policy.logit_transform = find_logit_transform(self.policy)
        self._find_routes()
        learning, sampling = prefix_sharing_obstacles(self.policy, install(self.policy.decoder))
        if learning is None:
            cast(Any, self.policy.decoder.config)._attn_implementation = ATTENTION
            self.policy.learns_forests = True
            self.policy.info = dataclasses.replace(self.policy.info, shares_prefixes=sampling is None)
        if learning is not None:
            log.warning("%s: prefixes are not shared (%s): one row per timeline", config.name, learning)
        elif sampling is not None:
            log.warning("%s: prefixes are shared in learning, not in sampling (%s)", config.name, sampling)

    def _find_routes(self) -> None:
        """Find the routers of the model, and the sizes of its routes."""
        policy = self.policy
        routers = routes.install(policy.decoder)
        if not routers and not any(name.endswith("experts") for name, _ in policy.decoder.named_modules()):
            return
        shape = routes.route_shape(policy, routers) if routers else "no router calls topk"
        if isinstance(shape, str):
            log.warning("%s: the routes of its experts are not recorded (%s)", self._config.name, shape)
        else:
            policy.info = dataclasses.replace(policy.info, routes=shape)

    def policy_of(self, config: ModelConfig) -> Policy:
        """Returns the policy of these settings: a new adapter, or all weights of this model. Raises `ConfigError`."""
        policy = self.adapted(config.lora) if config.lora.rank else self.policy
        if config.expert_routes == "off":
            policy.info = dataclasses.replace(policy.info, routes=None)
        policy.records_routes = policy.info.routes is not None
        policy.measures_routes = config.expert_routes == "auto"
        if config.activation_checkpointing:
            recompute_activations(policy)
        if policy.device.type == "cuda":
            count_layers(policy)
        policy.offloads_optimizer = config.offload_optimizer
        return policy

    def adapted(self, lora: LoraConfig) -> Policy:
        """Returns a new policy: an adapter over the weights of this model. Raises `ConfigError`.

        The policy has separate modules and shares the weights below them. So adapters do not depend on each other. Each
        starts with the same random weights.
        """
        modules = copied_modules(self.policy.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(ADAPTER_SEED)
            policy = Policy(_with_adapters(modules, lora), self.policy.info, self._folder)
        policy.logit_transform = self.policy.logit_transform
        policy.own_attention, policy.learns_forests = self.policy.own_attention, self.policy.learns_forests
        policy.cache_shape, policy.state_shape = self.policy.cache_shape, self.policy.state_shape
        with (
            _refusing(f"model.lora.target_modules = {lora.target_modules!r}: an adapter there fails", OTHER_MODULES),
            policy.attention(policy.own_attention),
        ):
            _try_adapter(policy, lora.target_modules)
        policy.mixable_layers = mixable_layers(policy)
        return policy

    def difference(self, config: ModelConfig) -> str:
        """Returns why this model is not the base of an adapter with these settings; empty if it is."""
        for key in ("name", "dtype", "device", "context_length"):
            theirs, ours = getattr(config, key), getattr(self._config, key)
            if key == "dtype":  # A type of `auto` is that of the loaded model.
                theirs, ours = (self.policy.info.dtype if one == "auto" else one for one in (theirs, ours))
            if theirs != ours:
                return f"model.{key} = {theirs!r} differs from the {ours!r}"
        return ""


@contextmanager
def _refusing(what: str, way_out: str) -> Iterator[None]:
    """Raises `ConfigError` for an error of a model's code inside the context.

    Boundary: a model's code raises any error for an input that it does not expect, such as text without an image.
    """
    try:
        yield
    except (AgentJetError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {why_not_loaded(error)}; {way_out}") from error


OTHER_MODULES = "use 'all-linear', or name other modules"


def _try_adapter(policy: Policy, modules: str) -> None:
    """Run a new adapter forward and backward once. Raises `ConfigError` if the model computes none of its weights."""
    hidden = cast(Any, policy.decoder)(input_ids=probe_tokens(policy, PROBE_TRUNK)[None], use_cache=False)
    total = policy.head(hidden.last_hidden_state[0]).float().logsumexp(-1).sum()
    weights = list(policy.trainable().values())
    if not total.requires_grad or not any(
        x is not None for x in torch.autograd.grad(total, weights, allow_unused=True)
    ):
        raise ConfigError(
            f"model.lora.target_modules = {modules!r}: the model does not compute an adapter there; {OTHER_MODULES}"
        )


def copied_modules(model: nn.Module) -> Any:
    """Returns a copy of the modules that shares all weights and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, cast(Any, shared))


def mixable_layers(policy: Policy) -> dict[str, Any]:
    """Returns the layers of a policy's adapter by their path in the decoder; empty if a mixture cannot compute them.

    A mixture needs layers that see all tokens in order. A routed expert sees some of them.
    """
    from peft.tuners.lora import Linear, LoraLayer

    num_layers = sum(isinstance(layer, LoraLayer) for layer in policy.model.modules())
    found = {path: layer for path, layer in policy.decoder.named_modules() if type(layer) is Linear}
    return found if len(found) == num_layers and not any("experts" in path.split(".") for path in found) else {}


def load_policy(config: ModelConfig) -> Policy:
    """Load the configured model with its adapter, if any; raises `ConfigError`."""
    return BaseModel(config).policy_of(config)


def decoder_layers(policy: Policy, setting: str) -> list[nn.Module]:
    """Returns the decoder's layers. Raises `ConfigError`, which names the setting, if it has no list of them."""
    count = policy.config.num_hidden_layers
    for module in policy.decoder.modules():  # The decoder's list comes before those of its layers, such as experts.
        if isinstance(module, nn.ModuleList) and len(module) >= count:
            return list(module)
    raise ConfigError(f"{setting}: {policy.info.name!r} has no list of {count} layers: use another value or model")


def count_layers(policy: Policy) -> None:
    """Count each layer of a forward and of a backward pass as a step of progress.

    A pass through a large model takes minutes for one long conversation. A model without a list of layers counts none.
    """

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        PROGRESS.mark()
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: PROGRESS.mark())  # type: ignore[no-untyped-call]

    with suppress(ConfigError):
        for layer in decoder_layers(policy, "progress"):
            layer.register_forward_hook(count)


def recompute_activations(policy: Policy) -> None:
    """Make each layer keep its input only for the backward pass, in which it computes its activations again."""
    for layer in decoder_layers(policy, "model.activation_checkpointing = true"):
        cast(Any, layer).forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The backward pass calls it again, perhaps in a thread of its own.
        bound = functools.partial(contextvars.copy_context().run, forward)
        return checkpoint(bound, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputing


WITHOUT_OUT_PROJ = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types whose kernels read `out_proj.weight` directly and would skip an adapter; peft refuses one there."""


def _freeze_towers(model: Any) -> None:
    """Freeze the vision and audio parts of a wrapper: only the language model learns."""
    learns = {id(p) for part in (text_decoder(model), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in learns)


def _with_adapters(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    """Add an adapter to every linear layer of the language model, or to those that the settings name."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    targets: str | list[str] = "all-linear"
    excluded: list[str] = []
    if lora.target_modules == targets:
        linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        # Llama 4's router is a linear layer that returns a tuple.
        plain = {part for part in text_decoder(model).modules() if type(part).forward is nn.Linear.forward}
        excluded = [name for name, part in linear.items() if part not in plain]
        excluded += ["out_proj"] * (model.config.model_type in WITHOUT_OUT_PROJ)
    else:
        targets = [m.strip() for m in lora.target_modules.split(",")]
    try:
        adapted = get_peft_model(
            model,
            PeftConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                target_modules=targets,
                exclude_modules=excluded or None,
                task_type="CAUSAL_LM",
            ),
            autocast_adapter_dtype=False,
        )
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules = {lora.target_modules!r}: {first_line(error)}") from error
    _refuse_tied(adapted, lora)
    if experts := _experts_without_adapters(adapted):
        log.warning("routed experts get no adapter, their weights stay as they are: %s", ", ".join(experts))
    return cast(nn.Module, adapted.eval())


def _refuse_tied(adapted: Any, lora: LoraConfig) -> None:
    """Raises `ConfigError` if an adapter changes one end of a matrix that input and output embeddings share.

    Merged weights would be two matrices, for which neither the config of an export nor a replica has a place.
    """
    base = adapted.get_base_model()
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    weights = [getattr(end, "base_layer", end).weight for end in ends]
    if weights[0] is not weights[1] or not any(hasattr(end, "base_layer") for end in ends):
        return
    names = " and ".join(name.rpartition(".")[2] for name, part in base.named_modules() if part in ends)
    raise ConfigError(
        f"model.lora.target_modules = {lora.target_modules!r}: {names} share one matrix in this model "
        "(tie_word_embeddings), so an adapter of one of them would change the other: leave them out"
    )


def _experts_without_adapters(adapted: nn.Module) -> list[str]:
    """Returns the modules that hold all experts in one tensor, where peft adds no adapter."""
    return [
        name.removeprefix("base_model.model.")
        for name, part in adapted.named_modules()
        if name.endswith("experts") and any(p.ndim == 3 for p in part.parameters(recurse=False))
    ]


def make_model_info(config: ModelConfig, folder: str, model: PreTrainedModel) -> ModelInfo:
    """Returns the info of a loaded model, with `shares_prefixes` False.

    Raises `ConfigError` if chats cannot be rendered.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name = {config.name!r} has no tokenizer: {why_not_loaded(error)}") from error
    template, tool_format = template_for(config.name, tokenizer.chat_template or "", config.tool_format)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = context if context and context > 0 else None  # XLNet has -1.
    if context and config.context_length > context:
        raise ConfigError(
            f"model.context_length = {config.context_length} is above the {context} that {config.name!r} was made for"
        )
    return ModelInfo(
        name=config.name,
        tokenizer_path=_tokenizer_folder(folder, tokenizer),
        chat_template=template,
        context_length=config.context_length or context or DEFAULT_CONTEXT,
        end_tokens=_end_tokens(model, tokenizer, tool_format),
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        shares_prefixes=False,
        num_parameters=model.num_parameters(),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        tool_format=tool_format,
        weights=model_fingerprint(model),
        machine=machine_kind(model.device),
    )


def machine_kind(device: torch.device, cpu_facts: Path = Path("/proc/cpuinfo")) -> str:
    """Returns a text that is equal on machines of equal speed: the GPU and the number of them that this process sees;
    or the CPU, and how many of its cores are used.
    """
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    text = cpu_facts.read_text(encoding="utf-8", errors="replace") if cpu_facts.exists() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine()
    return f"{torch.get_num_threads()} of {os.cpu_count()} cores of {name}"


def _tokenizer_folder(folder: str, tokenizer: Any) -> str:
    """Returns a local folder with the `tokenizer.json` that `transformers` uses.

    Some tokenizer classes (Llama's) rebuild the pipeline, so it may differ from the file in the model's folder.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"{folder}: its tokenizer {type(tokenizer).__name__} is not backed by the tokenizers library: "
            "add a tokenizer.json to the model's folder"
        )
    text = backend.to_str()
    name = f"tokenizer-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return str(cached_folder(name, tokenizer.save_pretrained))


def _end_tokens(model: PreTrainedModel, tokenizer: Any, tool_format: str) -> tuple[int, ...]:
    """Returns the end tokens of a model, and the control tokens that end its turns with calls."""
    added = tokenizer.get_added_vocab()
    ends = {added[end] for end in (TOOL_FORMATS[tool_format].ends if tool_format else ()) if end in added}
    for source in (model.generation_config, model.config, model.config.get_text_config(), tokenizer):
        found = getattr(source, "eos_token_id", None)
        ends.update([] if found is None else found if isinstance(found, list | tuple) else [found])
    return tuple(sorted(int(token) for token in ends))


FULL = "full_attention"
RECURRENT = {"linear_attention", "conv", "hybrid", "dummy"}
"""Kinds of layers that carry a state or none; a hybrid layer has attention, too."""
WINDOW_SETTING = re.compile(r"window_(size|len)|index_topk")
"""Settings of layers with a limited view, in configs that do not list their layers."""
PROBE_TRUNK, PROBE_BRANCH = 8, 5


def prefix_sharing_obstacles(policy: Policy, num_recurrent: int = 0) -> tuple[str | None, str | None]:
    """Returns the reasons why a model does not share prefixes in learning, and in sampling; None if it does.

    `num_recurrent` is the number of its layers that `recurrence` computes. Boundary: any exception of the model's code
    under an attention plan becomes a reason.
    """
    try:
        kinds = _kinds_by_config(policy.config, num_recurrent)
        learning, sampling = (kinds, kinds) if isinstance(kinds, str) else _by_trial(policy, kinds, num_recurrent)
    except Exception as error:
        learning = sampling = f"it does not run under an attention plan: {type(error).__name__}: {first_line(error)}"
    return learning, sampling


def _kinds_by_config(config: Any, num_recurrent: int) -> list[AttentionKind] | str:
    """Returns the kind of attention of each layer, or the reason why a plan does not compute one of them."""
    kinds, unknown, sharing = list[AttentionKind](), set[str](), getattr(config, "kv_sharing_modes", None)
    for kind, arguments in zip(*get_layer_types_and_kwargs(config), strict=True):
        window = arguments.get("sliding_window") or 0
        if kind in ("sliding_attention", "hybrid_sliding"):
            kinds.append(AttentionKind(window=window))
        elif kind == "chunked_attention":
            kinds.append(AttentionKind(chunk=window))
        elif kind == FULL or (num_recurrent and kind in RECURRENT):
            kinds.append(PLAIN)
        elif kind == "dummy" and sharing and sharing[len(kinds)] == "reuse":  # It attends to the keys of a lower layer.
            kinds.append(kinds[config.layer_types.index(config.layer_types[len(kinds)])])
        else:
            unknown.add(kind)
    if unknown:
        return f"layers of kind {', '.join(sorted(unknown))}"
    short = sorted(key for key, value in config.to_dict().items() if value and WINDOW_SETTING.search(key))
    return f"its config has {', '.join(short)}" if short else kinds


@torch.inference_mode()
def _by_trial(policy: Policy, kinds: list[AttentionKind], num_recurrent: int) -> tuple[str | None, str | None]:
    """Compare two rows with a common prefix: as one forest under a plan, and row by row by the model itself.

    The rows are shorter than any window. So the windows that the layers ask for are compared with the config's.
    """

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(policy.device)

    tokens = probe_tokens(policy, PROBE_TRUNK + 2 * PROBE_BRANCH).cpu().numpy().astype(np.int32)
    rows = [
        tokens[: PROBE_TRUNK + PROBE_BRANCH],
        np.concatenate([tokens[:PROBE_TRUNK], tokens[PROBE_TRUNK + PROBE_BRANCH :]]),
    ]
    forest = build_forest([Row(row, slice(0), {}) for row in rows])
    assert forest.num_nodes == len(tokens), "the vocabulary is smaller than the probe"
    plan = _RecordingPlan(forest_plan(forest, policy.device))
    with policy.attention(ATTENTION), routes.routing(recorded := routes.RoutePass()):
        hidden = flat_forward(policy.decoder, on_device(forest.tokens), on_device(forest.depth), plan)
    chosen = None if policy.info.routes is None else recorded.chosen
    layers = sorted(call.layer for call in plan.calls)
    if layers != (sorted(set(layers)) if num_recurrent else list(range(len(kinds)))):
        reason = f"its {len(kinds)} layers do not attend once each: {layers}"
        return reason, reason
    last = policy.info.context_length - 1
    for call in plan.calls:
        asked, listed = (dataclasses.replace(kind.within(last), cap=0.0) for kind in (call.kind, kinds[call.layer]))
        if asked != listed:
            reason = f"layer {call.layer} computes {asked}, and its config lists {listed}"
            return reason, reason
    ours = policy.head(hidden).float().log_softmax(-1)
    for row in rows:
        branch = on_device(np.flatnonzero(np.isin(forest.tokens, row)))
        # Rounding in bfloat16 would change the choice of experts, and a logit by far more than the tolerance.
        with routes.routing(None if chosen is None else routes.RoutePass(chosen[branch])):
            logits = cast(Any, policy.model)(input_ids=on_device(row)[None], use_cache=False).logits[0].float()
        difference = distance(ours[branch], logits.log_softmax(-1))
        if not difference <= tolerance(policy.dtype, logits):
            reason = f"its attention differs from plain attention by {difference:.3f} in log-probability"
            return reason, reason
    slots = StateSlots(2 * len(rows) + 1, policy.device) if num_recurrent else None
    return None, _sampling_obstacle(policy, plan.calls) or _stepwise_obstacle(policy, rows, slots)


def _sampling_obstacle(policy: Policy, calls: list[LayerCall]) -> str | None:
    """Returns the reason why a step does not compute the attention of a layer beyond its window or chunk.

    Boundary: any exception of a plan becomes a reason.
    """
    policy.cache_shape = {call.layer: _sizes(call) for call in calls}
    tried, last = set[Any](), policy.info.context_length - 1
    for call in calls:
        kind = call.kind.within(last)
        if (kind.window or kind.chunk) and (key := (kind, _sizes(call), call.query.shape[1])) not in tried:
            tried.add(key)
            try:
                difference = difference_beyond(call, kind, policy.dtype)
            except Exception as error:
                return f"layer {call.layer} with {kind}: {type(error).__name__}: {first_line(error)}"
            if not difference <= tolerance(policy.dtype, torch.zeros(2)):
                return f"layer {call.layer} with {kind}: beyond it, a step's attention differs by {difference:.3f}"
    return None


def _sizes(call: LayerCall) -> KeySizes:
    _, kv_heads, key_dim = call.key.shape
    return KeySizes(kv_heads, key_dim, call.value.shape[-1])


def _stepwise_obstacle(policy: Policy, rows: Sequence[np.ndarray], slots: StateSlots | None) -> str | None:
    """Compare rows with a common prefix: by the steps of the sampler, and row by row by the model itself.

    The model repeats the choices of experts of the steps, as in `_by_trial`.
    Boundary: any exception of the model's code in a step becomes a reason.
    """
    try:
        found = _by_steps(policy, rows, slots)
        policy.state_shape = slots.shape if slots else {}
        for row, (hidden, choices) in zip(rows, found, strict=True):
            ids = torch.from_numpy(row).long().to(policy.device)[None]
            with routes.routing(choices):
                logits = cast(Any, policy.model)(input_ids=ids, use_cache=False).logits[0].float()
            difference = distance(policy.head(hidden).float().log_softmax(-1), logits.log_softmax(-1))
            if not difference <= tolerance(policy.dtype, logits):
                with _recorded_layers(policy) as theirs, routes.routing(choices):
                    cast(Any, policy.decoder)(input_ids=ids, use_cache=False)
                with _recorded_layers(policy) as ours:
                    _by_steps(policy, [row], slots)
                where = _first_difference(policy, ours, theirs)
                return f"its steps differ from whole rows by {difference:.3f} in log-probability{where}"
    except Exception as error:
        return f"it does not run in steps: {type(error).__name__}: {first_line(error)}"
    return None


def _first_difference(policy: Policy, ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> str:
    for layer, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        whole = torch.cat(expected)
        difference = distance(torch.cat(found), whole)
        if not difference <= tolerance(policy.dtype, whole):
            return f"; layer {layer} is the first that differs, by {difference:.3f}"
    return ""


def _by_steps(
    policy: Policy, rows: Sequence[np.ndarray], slots: StateSlots | None
) -> list[tuple[Tensor, routes.RoutePass | None]]:
    """Returns hidden states [T, hidden] of rows that begin with `PROBE_TRUNK` common tokens, and their choices.

    These are a prompt whose state is stored on the way. Then the rows branch: single tokens, then the rest at once.
    """
    cache = KeyValueCache(policy.cache_shape, BLOCK * len(rows), policy.dtype, policy.device, slots)

    def computed(spans: list[tuple[CacheRow, int]]) -> list[tuple[Tensor, Tensor]]:
        with policy.attention(ATTENTION), routes.routing(recorded := routes.RoutePass()):
            hidden = flat_forward(policy.decoder, *step_inputs(spans, cache))
        cache.advance(spans)
        chosen = hidden if policy.info.routes is None else recorded.chosen
        counts = [count for _, count in spans]
        return list(zip(torch.split(hidden, counts), torch.split(chosen, counts), strict=True))

    trunk = cache.acquire(rows[0][:PROBE_TRUNK], len(rows[0]))
    assert trunk is not None
    trunk.stops = {PROBE_TRUNK // 2: True}
    found = [computed([(trunk, PROBE_TRUNK)]) * len(rows)]
    active = [trunk, *(cache.branch(trunk) for _ in rows[1:])]
    for row, tokens in zip(active, rows, strict=True):
        assert row is not None
        row.tokens[:], row.length = tokens, len(tokens)
    while (left := trunk.num_missing) > 0:
        found.append(computed([(row, 1 if left > 2 else left) for row in active if row]))
    whole = [[torch.cat(parts) for parts in zip(*steps, strict=True)] for steps in zip(*found, strict=True)]
    return [(hidden, None if policy.info.routes is None else routes.RoutePass(chosen)) for hidden, chosen in whole]


@contextmanager
def _recorded_layers(policy: Policy) -> Iterator[list[list[Tensor]]]:
    """Context that yields the outputs [tokens, hidden] of each of the decoder's layers, one for each pass."""
    layers = decoder_layers(policy, "model.name")
    outputs: list[list[Tensor]] = [[] for _ in layers]

    def record(kept: list[Tensor]) -> Callable[..., None]:
        return lambda module, args, out: kept.append((out[0] if isinstance(out, tuple) else out).flatten(0, -2).float())

    handles = [layer.register_forward_hook(record(kept)) for layer, kept in zip(layers, outputs, strict=True)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class _RecordingPlan:
    """Delegates to a plan and records the calls of the layers."""

    def __init__(self, plan: FlexPlan | ForestPlan) -> None:
        self._plan = plan
        self.recurrence = plan.recurrence
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> Tensor:
        self.calls.append(call)
        return self._plan.attend(call)


LOOK_SECONDS = 1.0
INFO_SECONDS = 5.0
"""Limit of the request for the sizes of a model's files."""
SILENT_SECONDS = 10.0
"""Time without a first byte after which the hub is named."""
MEGABYTE = 1e6


@contextmanager
def reported_download(name: str, report: Callable[[SlowWork], object]) -> Iterator[None]:
    """Context in which a download of the model `name` is reported each second. `report` is called in a thread.

    Nothing is reported for a local folder, and while a cache with files does not grow.
    """
    if Path(name).is_dir() or name.count("/") != 1:
        yield
        return
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
    meter, ended = DownloadMeter(name, folder, time.monotonic), threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            if (work := meter.look(lambda: size_of_weights(name))) is not None:
                report(work)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class DownloadMeter:
    """Measures how much the cache of the Hugging Face Hub has grown: the libraries download the files themselves."""

    def __init__(self, name: str, folder: Path, clock: Callable[[], float]) -> None:
        self._text = f"downloading the model {name}"
        self._folder = folder
        self._clock = clock
        self._begun = clock()
        self._before = self._size = size_of(folder)
        self._total: float | None = None

    def look(self, total: Callable[[], float]) -> SlowWork | None:
        """The progress, if the folder has grown since the last look. `total` is called once, when it first grows."""
        before, self._size = self._size, size_of(self._folder)
        seconds = self._clock() - self._begun
        if self._size <= before:
            if self._size or seconds < SILENT_SECONDS:
                return None
            return SlowWork(f"{self._text} (the hub has sent nothing yet)", 0.0, 0.0, "MB", seconds)
        if self._total is None:
            self._total = total()
        grown, left = self._size - self._before, self._total - self._before
        total_mb = max(left, grown) / MEGABYTE if left > 0 else 0.0
        return SlowWork(self._text, grown / MEGABYTE, total_mb, "MB", seconds)


def size_of(folder: Path) -> int:
    """Bytes of the files of a folder; 0 without the folder. Files may vanish while they are counted."""
    total = 0
    try:
        for path in folder.iterdir():
            total += path.stat().st_size
    except OSError:
        return total
    return total


def size_of_weights(name: str) -> float:
    """Bytes of the files that loading downloads, as the Hub lists them; 0 if the Hub does not answer."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=INFO_SECONDS).siblings or []
    except Exception as error:  # The boundary: the size is only shown, and loading reports its own errors.
        log.info("the size of %s is not known: %s", name, error)
        return 0.0
    sizes = {file.rfilename: file.size or 0 for file in files if "/" not in file.rfilename}
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    weights = weights or {name: size for name, size in sizes.items() if name.endswith(".bin")}
    return float(sum(weights.values()) + sum(size for name, size in sizes.items() if name.endswith(".json")))
