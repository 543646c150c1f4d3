"""Pins of the steps of single tokens that graphs compute on CUDA. Here they run without graphs, on a CPU.

1. a graph's choice of tokens is that of the host, bit by bit;
2. a step is launched from the tokens of the one before while those are not read, and nothing else changes: tokens,
   log-probabilities, ends, cancels, new weights, other completions, and a cache that is too small;
3. a step that a graph cannot choose for (grammars, `top_p`, routes, rows with several completions) waits;
4. an end is found one step late: its extra token is dropped, and its row is a prefix for later prompts;
5. compiled decoder layers sample the same tokens and routes, within rounding; they see weights that change in place,
   and the model keeps its own layers, and is freed with its policy;
6. where a compiler fails, takes too long or computes something else, a step runs without it, and a log has the reason.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agentjet.compute import cached_attention, decode_graphs
from agentjet.compute.cache import BLOCK
from agentjet.compute.model import BaseModel, decoder_layers
from agentjet.compute.policy import Policy
from agentjet.compute.sampler import ModelSampler, NewToken
from agentjet.compute.token_choice import ChoiceRules, choose_in_graph, sample_tokens
from agentjet.types import SamplingParams
from tests.compute.conftest import (
    Requests,
    check_same,
    complete,
    make_endless,
    make_policy,
    model_config,
    run,
    tokens,
    with_random_adapter,
)


def masked_attention(query: Tensor, keys: Tensor, values: Tensor, *tables: Any) -> Tensor:
    """As `_paged_attention` by row, by a mask: FlexAttention takes 45 ms a step without a compiler."""
    _, _, row, position, owner, start, _, _, _, scale = tables
    at = torch.arange(keys.shape[2])
    seen = (owner[at // BLOCK] == row[:, None]) & (start[at // BLOCK] + at % BLOCK <= position[:, None])
    seen[:, 0] |= ~seen.any(1)  # padding
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None, None], scale=scale)


@pytest.fixture(autouse=True)
def attention_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_attention, "_paged_attention", masked_attention)


def graph_sampler(policy: Policy, max_concurrent: int = 8, cache_tokens: int = 4096) -> ModelSampler:
    """A sampler whose single tokens are computed as on CUDA."""
    sampler = ModelSampler(policy, max_concurrent, cache_tokens, graphs=True)
    for stored in sampler._cache.stored:
        stored.zero_()  # All blocks are read, not only those that were taken.
    return sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_of_a_graph_is_that_of_the_host(dtype: torch.dtype) -> None:
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 300, generator=generator) * 4).to(dtype)
    logits[7] = torch.nan
    temperatures, uniforms = rng.choice([0, 0.7, 1, 1.5], 64).astype(np.float32), rng.random(64)
    uniforms[3] = 1 - 2**-30
    rules = ChoiceRules(np.arange(64), temperatures, np.zeros(64, np.int64), np.ones(64), uniforms, {})
    wanted = sample_tokens(logits, rules)
    found = choose_in_graph(logits, torch.from_numpy(temperatures), torch.from_numpy(uniforms.astype(np.float32)))
    assert found[0].tolist() == wanted.tokens.tolist()
    assert found[1].numpy().tobytes() == wanted.logprobs.tobytes()


def params_of(i: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 3 + 3 * i, "seed": i, "temperature": (1.0, 0.0, 0.7)[i % 3], **changes})


def requests(count: int, **changes: Any) -> Requests:
    return {i: (tokens(i, 5 + 40 * i), params_of(i, **changes)) for i in range(count)}


SHARED = {10 + i: (tokens(9, 140), params_of(i, temperature=1.0)) for i in range(3)}
TRUNCATED = {20 + i: (tokens(20 + i, 9), params_of(4, top_p=0.8, top_k=i)) for i in range(2)}
GRAMMAR = {30: (tokens(30, 9), params_of(3, grammar="start: /[a-z]+/\n", temperature=1.0))}


@pytest.mark.parametrize(
    ("asked", "max_concurrent", "cache_tokens"),
    [
        (requests(7), 8, 4096),
        (requests(7), 3, 4096),  # Others wait for a place.
        (requests(3) | SHARED, 8, 4096),
        (SHARED, 8, 512),  # Two rows only: the third completion waits for blocks.
        (requests(4) | TRUNCATED, 8, 4096),
        (requests(4) | GRAMMAR, 8, 4096),
        (requests(9, max_tokens=1), 4, 4096),
    ],
    ids=["plain", "few places", "shared prompts", "few blocks", "truncated", "a grammar", "one token"],
)
@pytest.mark.parametrize("ends", [False, True])
def test_it_samples_what_it_samples_without_graphs(
    policy: Policy, asked: Requests, max_concurrent: int, cache_tokens: int, ends: bool
) -> None:
    before = policy.end_tokens
    policy.end_tokens = frozenset(range(0, policy.vocabulary, 9)) if ends else frozenset()
    try:
        wanted = run(ModelSampler(policy, max_concurrent, cache_tokens), asked)
        sampler = graph_sampler(policy, max_concurrent, cache_tokens)
        found = run(sampler, asked)
        check_same(found, wanted, 1e-5)
        assert not sampler._running and sampler.is_idle
        check_same(run(sampler, asked), wanted, 1e-5)  # From the prefixes that are cached now.
    finally:
        policy.end_tokens = before


Event = Callable[[ModelSampler, Policy], None]


def submit_more(sampler: ModelSampler, policy: Policy) -> None:
    for id, (prompt, params) in (SHARED | TRUNCATED).items():
        sampler.submit(id, prompt, params, policy)


def new_weights(sampler: ModelSampler, policy: Policy) -> None:
    """As a worker: nothing is sampled between the change of the weights and the publish."""
    sampler.paused.add(policy)
    assert sampler.is_idle
    with torch.no_grad():
        for weight in policy.trainable().values():
            weight.mul_(1.3)
    sampler.invalidate(policy)


def cancel(sampler: ModelSampler, policy: Policy) -> None:
    for id in (1, 3, 4, 99):
        sampler.cancel(id)


@pytest.mark.parametrize("event", [submit_more, new_weights, cancel])
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("rank", [0, 4])
def test_what_happens_between_two_steps(tiny_folder: Path, event: Event, step: int, rank: int) -> None:
    """The events find a step whose tokens are not read."""
    found = []
    for graphs in (False, True):
        policy = make_policy(tiny_folder, rank=rank)
        if rank:
            policy = with_random_adapter(policy, 1)
        sampler = graph_sampler(policy) if graphs else ModelSampler(policy, 8, 4096)
        for id, (prompt, params) in requests(5, max_tokens=12).items():
            sampler.submit(id, prompt, params)
        new: list[NewToken] = []
        while len(new) < 5 * step:
            new += sampler.step()
        assert (sampler._ahead is not None) is (graphs and step > 1)
        event(sampler, policy)
        while not sampler.is_idle:
            new += sampler.step()
        by_id: dict[int, tuple[list[int], list[float]]] = {}
        for one in new:
            of_id = by_id.setdefault(one.id, ([], []))
            of_id[0].append(one.token)
            of_id[1].append(one.logprob)
        found.append(by_id)
        assert not sampler._running and len(sampler._places._free) == 8
    check_same(found[1], found[0], 1e-4)
    check_same(found[0], found[1], 1e-4)


def test_adapters_of_one_base_change_places(tiny_folder: Path) -> None:
    """Steps of one adapter are graphs, those of both are not; a paused one leaves its unread token with the other."""
    found = []
    for graphs in (False, True):
        base = BaseModel(model_config(tiny_folder, rank=4))
        policies = [with_random_adapter(base.policy_of(model_config(tiny_folder, rank=4)), seed) for seed in (1, 2)]
        sampler = graph_sampler(base.policy) if graphs else ModelSampler(base.policy, 8, 4096)
        for id, policy, count in ((0, policies[0], 20), (1, policies[1], 6), (2, policies[0], 9)):
            sampler.submit(id, tokens(id, 30), SamplingParams(max_tokens=count, seed=id), policy)
        new: list[NewToken] = []
        while len(new) < 12:
            new += sampler.step()
        sampler.paused.add(policies[1])
        new += [*sampler.step(), *sampler.step()]
        sampler.invalidate(policies[1])
        while not sampler.is_idle:
            new += sampler.step()
        found.append({id: [(one.token) for one in new if one.id == id] for id in range(3)})
    assert found[0] == found[1] and [len(all) for all in found[0].values()] == [20, 6, 9]


def test_the_extra_token_is_dropped_and_its_row_is_a_prefix(policy: Policy) -> None:
    before = policy.end_tokens
    policy.end_tokens = frozenset()
    try:
        sampler = graph_sampler(policy)
        prompt, params = tokens(1, 20), SamplingParams(max_tokens=30, seed=1)
        free = run(sampler, {0: (prompt, params)})[0][0]
        assert sampler.num_computed == 49  # The last token is not computed: its end by length is known.
        policy.end_tokens = frozenset({free[10]})
        end = free.index(free[10])
        sampler = graph_sampler(policy)
        assert run(sampler, {0: (prompt, params)})[0][0] == free[: end + 1]
        assert sampler.num_computed == 20 + end + 1  # One more than without the step ahead.
        policy.end_tokens = frozenset()
        later = np.concatenate([prompt, free[: end + 1], tokens(2, 3)]).astype(np.int32)
        num_before = sampler.num_computed
        found = run(sampler, {1: (later, params)})
        assert sampler.num_computed - num_before == 3 + 29  # The end token is computed already.
        check_same(found, run(ModelSampler(policy, 8, 4096), {1: (later, params)}), 1e-5)
    finally:
        policy.end_tokens = before


def compile_by(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the decoder layers of later samplers by this backend of `torch.compile`; None for none."""
    monkeypatch.setattr(decode_graphs, "compiler_of", lambda device: compiler)


def seconds_of(sampler: ModelSampler, policy: Policy, num_rows: int = 5) -> float | None:
    """The seconds in which the layers of these steps were compiled."""
    assert sampler._graphs is not None
    graph = sampler._graphs.of(policy, num_rows)
    assert graph is not None
    return graph.compile_seconds


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.thorough, pytest.mark.needs("compiler")])]
)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("tiny", {"activation_checkpointing": True}), ("tiny", {"rank": 4}), ("qwen3_moe", {}), ("qwen3", {})],
    ids=["recomputing", "an adapter", "experts", "norms of queries"],
)
def test_compiled_layers_sample_what_the_model_samples(
    folder_of: Callable[[str], Path],
    kind: str,
    settings: dict[str, Any],
    compiler: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_endless(folder_of(kind), **settings)
    if "rank" in settings:
        with_random_adapter(policy, 1)
    layers = decoder_layers(policy, "")
    forwards = [vars(layer).get("forward") for layer in layers]
    asked = requests(5, routes_from=0 if policy.records_routes else None)
    compiled = found = None
    for weight in (1.0, 1.3):
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.mul_(weight)
        compile_by(None, monkeypatch)
        wanted = complete(sampler := graph_sampler(policy), asked)
        assert seconds_of(sampler, policy) is None
        if compiled is None:
            compile_by(compiler, monkeypatch)
            compiled = graph_sampler(policy)
        compiled.invalidate(policy)
        before, found = found, complete(compiled, asked)
        assert found != before
        for id, new in wanted.items():
            assert [one.token for one in found[id]] == [one.token for one in new]
            assert [one.logprob for one in found[id]] == pytest.approx([one.logprob for one in new], abs=1e-5)
            for ours, theirs in zip(found[id], new, strict=True):
                assert np.array_equal(ours.routes, theirs.routes) and policy.records_routes is (ours.routes is not None)
        assert seconds_of(compiled, policy)
    assert [vars(layer).get("forward") for layer in layers] == forwards
    decoder = weakref.ref(policy.decoder)
    del policy, layers, parameter, sampler, compiled, forwards
    gc.collect()
    assert decoder() is None


def fails(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no compiler here")


def reverses(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler whose layers return their results in another order."""
    return lambda *given: tuple(result.flip(-1) for result in graph.forward(*given))


@pytest.mark.parametrize(
    ("compiler", "seconds", "reason"),
    [(fails, 9.0, "no compiler here"), (reverses, 9.0, "their logits differ by"), ("aot_eager", -1.0, "not all are")],
)
def test_a_step_runs_without_layers_that_cannot_be_compiled(
    policy: Policy,
    compiler: Any,
    seconds: float,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = run(graph_sampler(policy), requests(5))
    compile_by(compiler, monkeypatch)
    monkeypatch.setattr(decode_graphs, "COMPILE_SECONDS", seconds)
    sampler = graph_sampler(policy, max_concurrent=9)
    check_same(run(sampler, requests(5)), wanted, 1e-5)
    assert seconds_of(sampler, policy) is None and seconds_of(sampler, policy, 9) is None, "it is tried once"
    (line,) = (one.getMessage() for one in caplog.records if "not compiled" in one.getMessage())
    assert "its decoder layers are not compiled" in line and reason in line


def test_a_failed_trial_keeps_the_tokens_that_are_not_read(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of nine rows are compiled. As the first row ends, those of eight are tried during the next step."""
    asked = {i: (tokens(i, 9), params_of(i)) for i in range(9)}
    wanted = run(graph_sampler(policy, 9), asked)
    compile_by("aot_eager", monkeypatch)
    differences = iter([0.0, np.inf])
    monkeypatch.setattr(decode_graphs, "distance", lambda found, wanted: next(differences))
    sampler = graph_sampler(policy, 9)
    check_same(run(sampler, asked), wanted, 1e-5)
    assert seconds_of(sampler, policy, 9) and seconds_of(sampler, policy, 8) is None
    assert next(differences, None) is None, "both were tried"
