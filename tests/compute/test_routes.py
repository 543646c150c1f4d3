"""Routes of experts. Pinned here:

1. a repeated choice has the output and the gradients of a forward pass with that choice, whose weights come from the
   dense scores of the present router: also if groups of experts were chosen otherwise;
2. the sampler reports the routes of every computed token once: prompts, cached and copied prefixes, branches, rows;
3. trees, rows and micro-batches of any size, with activations computed again or not, repeat the same choices;
4. in bfloat16 the learner makes other choices, and none with repeated ones: after a checkpoint and an export, too;
5. the reference chooses its experts itself, and a batch of another model's routes is refused;
6. a mixture keeps its trees in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import BaseModel, load_policy
from agentjet.compute.passes import Pass, PrefixPass, RowPass
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.compute.rank import PolicyHost
from agentjet.compute.routes import OWN_ROUTES_KL, ROUTE_MISMATCH, RoutePass, install, routing
from agentjet.compute.sampler import ModelSampler
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.errors import ComputeError
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, select
from agentjet.types import Op, RouteShape, SamplingParams
from bench import routes as bench
from tests.compute.architectures import make_architecture
from tests.compute.baseline import Double, policy_gradient
from tests.compute.conftest import complete, make_endless, make_policy, model_config, tokens, with_random_adapter
from tests.compute.every_architecture import make_any
from tests.tiny import make_tokenizer, tokenizer

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 0}
NAMED = {"num_experts": 8, "num_experts_per_tok": 3}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "qwen3_moe": NAMED,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "llama4": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_next": NAMED,
    "deepseek_v2": {**LATENT, **GROUPED, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": {**LATENT, **GROUPED, "routed_scaling_factor": 1.5},
}


def make_mixture(folder: Path, kind: str) -> Path:
    if not kind.startswith("deepseek"):
        return make_architecture(folder, kind, **KINDS[kind])
    import transformers

    name = f"DeepseekV{kind[-1]}"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=tokenizer().get_vocab_size(), **sizes, **heads, **KINDS[kind]
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(make_tokenizer(folder))
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_mixture(tmp_path_factory.mktemp("mixtures") / kind, kind)
        return made[kind]

    return folder


def double(policy: Policy) -> Policy:
    policy.model.double()
    cast(Any, policy.decoder).config._experts_implementation = "eager"  # Others have no float64.
    return policy


# ---- the choice of one router ----------------------------------------------------------------------------------------


def weights_of(kind: str, config: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights of chosen experts, as each architecture writes them."""
    if kind == "gpt_oss":
        return logits.gather(-1, chosen).softmax(-1)
    if kind == "deepseek_v3":
        found = logits.sigmoid().gather(-1, chosen)
        return found / (found.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    found = logits.softmax(-1).gather(-1, chosen)
    if kind == "deepseek_v2":
        return found * config.routed_scaling_factor
    is_normal = kind == "mixtral" or config.norm_topk_prob
    return found / found.sum(-1, keepdim=True) if is_normal else found


def force(kind: str, policy: Policy, choices: Tensor) -> None:
    """Replace what the routers return: their own logits, these choices, and weights by the formula."""
    for number, router in enumerate(install(policy.decoder).values()):

        def forced(module: nn.Module, args: object, out: Any, chosen: Tensor = choices[:, number]) -> Any:
            if kind == "llama4":
                scores = torch.full_like(out[1], -torch.inf).scatter(1, chosen, out[1].gather(1, chosen))
                return scores.sigmoid(), out[1]
            return out[0], weights_of(kind, policy.config, out[0], chosen), chosen

        router.register_forward_hook(forced)


def hidden_and_gradients(policy: Policy, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    policy.model.zero_grad()
    with policy.attention("eager"):
        hidden = cast(Any, policy.decoder)(input_ids=ids, use_cache=False).last_hidden_state[0]
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_choice_has_the_gradients_of_a_forward_pass_with_it(
    kind: str, mixture: Callable[[str], Path]
) -> None:
    policy = double(make_policy(mixture(kind)))
    ids = torch.from_numpy(tokens(3, 24)).long()[None]
    with Double(), torch.no_grad(), policy.attention("eager"), routing(recorded := RoutePass()):
        cast(Any, policy.decoder)(input_ids=ids, use_cache=False)
    other = recorded.chosen.roll(1, 0)  # Other tokens' choices keep the rule of the groups.
    assert (other != recorded.chosen).any()
    with Double():
        with routing(repeated := RoutePass(other)):
            hidden, gradients = hidden_and_gradients(policy, ids)
        force(kind, policy, other)
        expected, wanted = hidden_and_gradients(policy, ids)
    assert torch.allclose(hidden, expected, rtol=0, atol=1e-12)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-9, atol=1e-10), name
    routers = [name for name in gradients if "gate.weight" in name or "router" in name]
    assert routers and all(gradients[name].abs().max() > 1e-6 for name in routers)
    differing, repeats = repeated.counts
    assert repeats == other.numel() and 0 < differing < repeats


def test_the_sizes_of_routes_are_known_and_off_switches_them_off(
    mixture: Callable[[str], Path], tmp_path: Path
) -> None:
    assert make_policy(mixture("qwen3_moe")).info.routes == RouteShape((0, 1), 3, 8)
    assert make_policy(mixture("llama4")).info.routes == RouteShape((0, 1), 2, 8)
    off = make_policy(mixture("qwen3_moe"), expert_routes="off")
    assert off.info.routes is None and not off.records_routes


def test_a_model_whose_routers_are_unknown_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = make_policy(make_any(tmp_path / "model", "AutoModelForCausalLM", "phimoe"), expert_routes="on")
    assert policy.info.routes is None
    assert "the routes of its experts are not recorded (no router calls topk)" in caplog.text


# ---- sampling --------------------------------------------------------------------------------------------------------


def routes_of(policy: Policy, sequence: np.ndarray) -> np.ndarray:
    """The choices of a pass over a row by the model itself."""
    ids = torch.from_numpy(sequence).long()[None]
    with torch.no_grad(), policy.attention(policy.own_attention), routing(recorded := RoutePass()):
        cast(Any, policy.decoder)(input_ids=ids, use_cache=False)
    return np.sort(recorded.chosen.numpy(), -1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_reports_every_computed_token_once(kind: str, mixture: Callable[[str], Path]) -> None:
    policy = make_endless(mixture(kind))
    sampler = ModelSampler(policy, 8, 4096)
    prompts = [tokens(1, 40), tokens(1, 40), np.concatenate([tokens(1, 40), tokens(2, 9)])]
    for first in (0, 0, 30):  # Again with the prefix in the cache, and only the end of the prompt reported.
        params = [SamplingParams(max_tokens=7, seed=i, routes_from=first) for i in range(3)]
        found = complete(sampler, dict(enumerate(zip(prompts, params, strict=True))))
        for prompt, new in zip(prompts, found.values(), strict=True):
            sequence = np.concatenate([prompt, [one.token for one in new]]).astype(np.int32)
            assert [len(one.routes) for one in new if one.routes is not None] == [len(prompt) - first, *[1] * 6]
            routes = np.sort(np.concatenate([one.routes for one in new if one.routes is not None]), -1)
            assert np.array_equal(routes, routes_of(policy, sequence)[first:-1])


def test_routes_are_reported_only_where_they_are_asked_for(mixture: Callable[[str], Path]) -> None:
    policy = make_endless(mixture("mixtral"))
    sampler, prompt = ModelSampler(policy, 8, 4096), tokens(1, 12)
    asked, unasked = SamplingParams(max_tokens=3, routes_from=0), SamplingParams(max_tokens=3)
    found = complete(sampler, {1: (prompt, asked), 2: (prompt, unasked)})
    assert all(one.routes is not None for one in found[1]) and all(one.routes is None for one in found[2])
    policy.records_routes = False
    assert all(one.routes is None for one in complete(sampler, {3: (prompt, asked)})[3])


def test_tokens_of_other_weights_keep_the_routes_of_their_own(mixture: Callable[[str], Path]) -> None:
    """The weights change in the middle. Routes that were reported stay, later ones are those of the new weights."""
    policy = make_endless(mixture("mixtral"))
    sampler, prompt = ModelSampler(policy, 8, 4096), tokens(1, 12)
    sampler.submit(1, prompt, SamplingParams(max_tokens=6, routes_from=0))
    new = [one for _ in range(3) for one in sampler.step()]
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    sampler.invalidate(policy)
    while not sampler.is_idle:
        new += sampler.step()
    assert [len(cast(np.ndarray, one.routes)) for one in new] == [12, 1, 1, 1, 1, 1]
    sequence = np.concatenate([prompt, [one.token for one in new]]).astype(np.int32)
    late = np.sort(np.concatenate([cast(np.ndarray, one.routes) for one in new[3:]]), -1)
    assert np.array_equal(late, routes_of(policy, sequence)[14:-1])


# ---- learning --------------------------------------------------------------------------------------------------------


def forest_with_routes(policy: Policy) -> Forest:
    """A forest of several turns whose routes are those of other nodes; some are not known."""
    trunk, rows = tokens(7, 30), []
    for i in range(4):
        rows.append(np.concatenate([trunk, tokens(10 + i, 20)]))
        rows.append(np.concatenate([rows[-1], tokens(20 + i, 15)]))
    made = [
        bench.call_row(row, np.zeros(8, np.float32), np.zeros(8, np.int32), 1.0, 1.0, i) for i, row in enumerate(rows)
    ]
    forest = build_forest(made)
    shape = policy.info.routes
    assert shape is not None
    own = np.concatenate([routes_of(policy, forest.tokens[at : at + 30]) for at in range(0, forest.num_nodes, 30)])
    routes = np.random.default_rng(0).permutation(own).astype(np.int16)
    routes[::7] = -1
    return dataclasses.replace(forest, routes=routes)


def hidden_of(policy: Policy, own_pass: Pass, forest: Forest, max_tokens: int) -> tuple[Tensor, Tensor]:
    """The hidden states [M, ...] before the targets, and the flat gradient of a sum over them."""
    policy.model.zero_grad()
    found: dict[int, Tensor] = {}
    for piece, targets in own_pass.pieces(forest, max_tokens):
        hidden, rows = own_pass.hidden(piece)
        found |= dict(zip(targets.tolist(), hidden[rows].detach(), strict=True))
        weight = torch.zeros(len(hidden), dtype=hidden.dtype).index_add_(0, rows, torch.ones(len(rows)).to(hidden))
        own_pass.backward(hidden, weight[:, None] * torch.linspace(-1, 1, hidden.shape[1]).to(hidden))
    own_pass.finish()
    gradient = torch.cat([p.grad.flatten() for p in policy.trainable().values() if p.grad is not None])
    return torch.stack([found[i] for i in sorted(found)]), gradient


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_next", "deepseek_v2"])
def test_trees_and_rows_repeat_the_same_choices(kind: str, recomputed: bool, mixture: Callable[[str], Path]) -> None:
    policy = make_policy(mixture(kind), activation_checkpointing=recomputed)
    assert policy.learns_forests
    forest = forest_with_routes(policy)
    double(policy)
    if recomputed:  # A mode of this thread does not reach into a backward pass.
        policy.model.float()
    exact = (1e-4, 1e-4) if recomputed else (1e-10, 1e-7)
    with nullcontext() if recomputed else Double():
        with policy.attention("eager"):
            expected, wanted = hidden_of(policy, RowPass(policy), forest, 10_000)
            plain, _ = hidden_of(policy, RowPass(policy), dataclasses.replace(forest, routes=None), 10_000)
        assert (plain - expected).abs().max() > 1e-3
        for max_tokens in (10_000, 60, 25):
            for own_pass in (PrefixPass(policy), PrefixPass(policy, keeps=False)):
                hidden, gradient = hidden_of(policy, own_pass, forest, max_tokens)
                assert torch.allclose(hidden, expected, rtol=0, atol=exact[0])
                assert (gradient - wanted).norm() <= exact[1] * wanted.norm()


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_rounding_in_routers_does_not_cost_the_trees(kind: str, tmp_path: Path) -> None:
    assert bench.load(bench.make_mixture(tmp_path / "model", kind), "bfloat16").learns_forests


LOSS = LossSpec.of(JobConfig(recipe=policy_gradient()))


@pytest.fixture(scope="module")
def sampled(mixture: Callable[[str], Path]) -> tuple[Path, Forest]:
    """A mixture in bfloat16, and what it sampled."""
    folder = mixture("qwen3_moe")
    policy = load_policy(model_config(folder, dtype="bfloat16"))
    policy.end_tokens = frozenset()
    return folder, bench.sampled_forest(policy, vocabulary=200)


def test_in_bfloat16_choices_differ_unless_they_are_repeated(sampled: tuple[Path, Forest]) -> None:
    folder, forest = sampled
    policy = make_policy(folder, dtype="bfloat16")
    found = bench.differences(policy, forest)
    assert found["mismatch_without"] > 0 == found["mismatch_with"]
    metrics = PolicyLearner(policy).forward_backward(TrainingBatch(0, forest), LOSS).metrics
    assert 0 < metrics[ROUTE_MISMATCH] < 0.1
    assert metrics["policy/mismatch_kl"] == pytest.approx(found["kl_with"], rel=1e-3)
    assert metrics[OWN_ROUTES_KL] == pytest.approx(found["kl_without"], rel=1e-3)


def test_a_checkpoint_and_an_export_repeat_the_same(tmp_path: Path, sampled: tuple[Path, Forest]) -> None:
    folder, forest = sampled
    host = PolicyHost(PolicyLearner(make_policy(folder, dtype="bfloat16")))
    host.load_batch(TrainingBatch(0, forest))
    host.forward_backward(Op("default", "policy", 0), 0, LOSS)
    host.optim_step(Op("default", "policy", 1), OptimizerConfig(lr=1e-3))
    host.publish(1)
    host.save(tmp_path / "checkpoint")
    host.export(tmp_path / "export", False)
    restarted = PolicyHost(PolicyLearner(make_policy(folder, dtype="bfloat16")))
    restarted.load(tmp_path / "checkpoint")
    exported = PolicyLearner(make_policy(tmp_path / "export", dtype="bfloat16"))
    logprobs = [one.logprobs(forest) for one in (host.learner, restarted.learner, exported)]
    assert torch.equal(logprobs[0], logprobs[1]) and torch.equal(logprobs[0], logprobs[2])
    assert bench.differences(exported.policy, forest)["mismatch_with"] == 0


def test_routes_that_make_no_difference_are_recorded_no_longer(mixture: Callable[[str], Path]) -> None:
    """In float32 on a CPU, two batches decide so; `on` goes on."""
    forests = []
    for setting, goes_on in (("auto", False), ("on", True)):
        policy = make_endless(mixture("qwen3_moe"), expert_routes=setting)
        forests.append(bench.sampled_forest(policy, vocabulary=200))
        host = PolicyHost(PolicyLearner(policy), ModelSampler(policy, 8, 4096))
        for number in range(2):
            assert policy.records_routes
            host.load_batch(TrainingBatch(number, forests[0]))
            outputs = host.forward_backward(Op("default", "policy", 2 * number), number, LOSS)
            assert outputs.metrics[ROUTE_MISMATCH] == 0
            host.optim_step(Op("default", "policy", 2 * number + 1), OptimizerConfig(lr=1e-9))
            host.publish(number + 1)
        assert policy.records_routes is goes_on


def test_an_adapter_records_and_repeats(mixture: Callable[[str], Path]) -> None:
    """Two adapters in one pass report the routes of their own tokens, and their learners repeat them."""
    base = BaseModel(model_config(mixture("mixtral"), rank=2))
    policies = [with_random_adapter(base.policy_of(model_config(mixture("mixtral"), rank=2)), seed) for seed in (1, 2)]
    sampler, prompt = ModelSampler(base.policy, 8, 4096), tokens(1, 12)
    params = SamplingParams(max_tokens=6, seed=3, routes_from=0)
    found = complete(sampler, {i: (prompt, params, policy) for i, policy in enumerate(policies)})
    for policy, new in zip(policies, found.values(), strict=True):
        sequence = np.concatenate([prompt, [one.token for one in new]]).astype(np.int32)
        routes = np.concatenate([one.routes for one in new if one.routes is not None])
        assert np.array_equal(np.sort(routes, -1), routes_of(policy, sequence)[:-1])
        row = Row(sequence, slice(12, None), {}, routes=np.concatenate([routes, routes[-1:]])[::-1].copy())
        learner, forest = PolicyLearner(policy), build_forest([row])
        repeated = learner.logprobs(forest)
        assert not torch.equal(repeated, learner.logprobs(dataclasses.replace(forest, routes=None)))


def test_the_reference_chooses_its_experts_itself(mixture: Callable[[str], Path]) -> None:
    """At version 0 it has the weights of the policy, so their choices are the only difference."""
    policy = make_policy(mixture("mixtral"))
    forest, learner = forest_with_routes(policy), PolicyLearner(policy)
    loss = LossSpec.of(JobConfig(recipe=policy_gradient({"kl_coef": 0.1})))
    plain = TrainingBatch(0, dataclasses.replace(forest, routes=None))
    assert learner.forward_backward(plain, loss).metrics["policy/kl"] == pytest.approx(0, abs=1e-9)
    assert learner.forward_backward(TrainingBatch(0, forest), loss).metrics["policy/kl"] > 1e-4


def test_routes_of_another_model_are_refused(mixture: Callable[[str], Path]) -> None:
    policy = make_policy(mixture("mixtral"))
    forest = forest_with_routes(policy)
    routes = cast(np.ndarray, forest.routes)
    for wrong in (routes[:, :1], routes[:, :, :2], np.where(routes == 7, 8, routes)):
        batch = TrainingBatch(0, dataclasses.replace(forest, routes=wrong))
        with pytest.raises(ComputeError, match=r"recorded with another model; set model.expert_routes = 'off'"):
            PolicyLearner(policy).forward_backward(batch, LOSS)
    off = make_policy(mixture("mixtral"), expert_routes="off")
    assert ROUTE_MISMATCH not in PolicyLearner(off).forward_backward(batch, LOSS).metrics
    assert select(forest, np.zeros(forest.num_targets, bool)).routes is not None
