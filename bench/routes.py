"""Routes of experts: the choices in which learning differs from sampling, with and without routing replay.

Tiny mixtures with random weights sample two-turn episodes. The learner computes the same tokens under its own plan, in
the same process. Printed for each: the share of differing choices and the k3 estimate between the log-probabilities of
sampler and learner, both without and with repeated choices; then the same after a checkpoint and after an export. The
choices are those that the modules of the experts receive. `conflicts` is the share of choices in which calls differ
that share a node and were computed apart; the route of the first one is repeated for all.

    python -m bench.routes              # bfloat16, as `figures` gives it
    python -m bench.routes float32

The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from agentjet.compute import checkpoint
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.policy import BUNDLED, Policy, copy_tokenizer_files, locate_model
from agentjet.compute.sampler import ModelSampler
from agentjet.config import ModelConfig
from agentjet.recipes.losses import kl_k3
from agentjet.timeline.forest import Forest, Row, build_forest, call_row
from agentjet.timeline.routes import Choices, fill
from agentjet.types import SamplingParams

VOCABULARY = 49152
COMMON = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
SIZES = {**COMMON, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "intermediate_size": 64}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
GROUPED = {**LATENT, "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2}
ROUTED = {"num_experts_per_tok": 4, "moe_intermediate_size": 32}
MIXTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **ROUTED, "num_experts": 32}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", {**SIZES, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}),
    "deepseek_v3": ("DeepseekV3", {**SIZES, **ROUTED, **GROUPED, "n_routed_experts": 32}),
}
"""Class and settings of each model."""
GROUPS, REPEATS, TURNS = 4, 4, 2


def make_mixture(folder: Path, kind: str) -> Path:
    """Writes a random mixture whose routers are far from a tie, with SmolLM2's tokenizer."""
    name, settings = MIXTURES[kind]
    config = getattr(transformers, f"{name}Config")(**settings, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    copy_tokenizer_files(str(locate_model(BUNDLED)), folder)
    return folder


def load(folder: Path, dtype: str) -> Policy:
    transformers.utils.logging.disable_progress_bar()
    return load_policy(ModelConfig.model_validate({"name": str(folder), "device": "cpu", "dtype": dtype}))


def sampled_forest(policy: Policy, vocabulary: int = VOCABULARY, *, apart: bool = False) -> Forest:
    """Episodes of several turns that share the prompt of their group, with the routes of all computed tokens.

    `apart`: each request is computed alone, its prompt cut at another place, as on replicas that share no cache.
    """
    sampler, draw = ModelSampler(policy, GROUPS * REPEATS, 16_384), np.random.default_rng(0)
    prompts = [draw.integers(5, vocabulary, 150).astype(np.int32) for _ in range(GROUPS)]
    histories = [prompt for prompt in prompts for _ in range(REPEATS)]
    known: list[Choices | None] = [None] * len(histories)
    rows: list[Row] = []
    for turn in range(TURNS):
        answers: list[list[Any]] = [[] for _ in histories]
        for id, history in enumerate(histories):
            if apart:
                sampler.invalidate(policy)
                sampler.submit(-1, history[: 30 + 20 * (id % REPEATS)], SamplingParams(max_tokens=1))
                sampler.step()
            sampler.submit(id, history, SamplingParams(max_tokens=40, seed=100 * turn + id, routes_from=0))
            while not sampler.is_idle and (apart or id == len(histories) - 1):
                for new in sampler.step():
                    answers[new.id].append(new)
        for id, answer in enumerate(answers):
            full = np.concatenate([histories[id], np.array([new.token for new in answer], np.int32)])
            own = np.concatenate([new.routes for new in answer])
            routes = np.full((len(full), *own.shape[1:]), -1, np.int16)
            for choices in (known[id], own):
                if choices is not None:
                    fill(routes[: len(choices)], choices)
            logprobs = np.array([new.logprob for new in answer], np.float32)
            rows.append(call_row(full, logprobs, np.zeros(len(answer), np.int32), 1.0, 1.0, id, routes=routes))
            histories[id], known[id] = np.concatenate([full, draw.integers(5, vocabulary, 20, np.int32)]), routes
    return build_forest(rows)


@contextmanager
def received(policy: Policy) -> Iterator[list[Tensor]]:
    """Context that collects the choices that the modules of the experts receive, in the order of the layers."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        found.append(next(x for x in given if isinstance(x, Tensor) and not x.is_floating_point()))

    experts = [part for name, part in policy.decoder.named_modules() if name.endswith(".experts")]
    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in experts]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def differences(policy: Policy, forest: Forest, learner: PolicyLearner | None = None) -> dict[str, float]:
    """Returns the share of choices that differ from the recorded ones, and the mismatch, as `without` and `with`."""
    learner, figures = learner or PolicyLearner(policy), {}
    assert forest.routes is not None and policy.learns_forests
    for name, piece in (("without", replace(forest, routes=None)), ("with", forest)):
        with received(policy) as choices:
            logp = learner.logprobs(piece).float().cpu()
        found = torch.stack(choices, 1).numpy()
        is_known = forest.routes[:, 0, 0] >= 0
        other = (forest.routes[is_known][..., None] != found[is_known][..., None, :]).all(-1)
        figures[f"mismatch_{name}"] = float(other.mean())
        figures[f"tokens_{name}"] = float(other.any((1, 2)).mean())
        figures[f"kl_{name}"] = float(kl_k3(torch.from_numpy(forest["logprob"]), logp).mean())
    return figures


def measure(kind: str, dtype: str = "bfloat16") -> dict[str, float]:
    """Returns the figures of a mixture. `mismatch_later` is that with replay after a checkpoint or an export."""
    with tempfile.TemporaryDirectory() as place:
        folder = make_mixture(Path(place, "model"), kind)
        policy = load(folder, dtype)
        forest, learner = sampled_forest(policy), PolicyLearner(policy)
        found = differences(policy, forest, learner)
        checkpoint.save(Path(place, "checkpoint"), learner, {"policy_version": 0, "operation": 0})
        checkpoint.export(Path(place, "export"), learner)
        restarted = load(folder, dtype)
        checkpoint.load(Path(place, "checkpoint"), again := PolicyLearner(restarted))
        later = [differences(restarted, forest, again), differences(load(Path(place, "export"), dtype), forest)]
    found["mismatch_later"] = max(one["mismatch_with"] for one in later)
    forest = sampled_forest(policy, apart=True)
    found["conflicts"] = forest.route_conflicts
    found |= {f"{name}_apart": differences(policy, forest)[name] for name in ("kl_without", "kl_with")}
    return found


def figures(dtype: str = "bfloat16") -> dict[str, float]:
    """Returns the worst of all mixtures: `route_mismatch` with replay and without, and the mismatch of both."""
    found = {kind: measure(kind, dtype) for kind in MIXTURES}
    for kind, one in found.items():
        print(f"{kind:12} " + "  ".join(f"{name} {value:.3g}" for name, value in one.items()), flush=True)
    return {
        "route_mismatch": max(max(one["mismatch_with"], one["mismatch_later"]) for one in found.values()),
        "route_mismatch_without": max(one["mismatch_without"] for one in found.values()),
        "kl_without": max(one["kl_without"] for one in found.values()),
        "kl_with": max(one["kl_with"] for one in found.values()),
    }


if __name__ == "__main__":
    print(json.dumps(figures(*sys.argv[1:])))
