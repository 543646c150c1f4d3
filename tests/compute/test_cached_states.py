"""Sampling of models with recurrent layers. Pinned here, on every kind of them:

1. log-probabilities are those of the plain model, one row per call, for groups, late repeats and next turns;
2. each token in its context is computed once, while slots suffice, and the states have the sizes of `memory.py`;
3. a state that is evicted, cut out of a prompt in several steps, or of weights that changed is not missed;
4. adapters of one base model sample in one pass, each with its own states;
5. slots have one owner, and are as many as the cache was given;
6. a model whose steps differ from whole rows is sampled row by row, and the log has the layer and the difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute import cache as cache_module
from agentjet.compute import sampler as sampler_module
from agentjet.compute.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.cached_attention import PagedPlan, Spans, paged_inputs
from agentjet.compute.cached_states import StateSlots, StepRecurrence
from agentjet.compute.memory import STATES_PER_COMPLETION, recurrent_layers
from agentjet.compute.model import BaseModel
from agentjet.compute.policy import Policy
from agentjet.compute.sampler import ModelSampler
from agentjet.config import LoraConfig
from agentjet.types import SamplingParams
from tests.compute.conftest import check_same, make_endless, make_policy, model_config, run, tokens, with_random_adapter
from tests.compute.every_architecture import make_any

KINDS = ("lfm2", "qwen3_next", "mamba", "bamba", "falcon_h1", "qwen3_5")
MORE = (
    "mamba2",
    "falcon_mamba",
    "nemotron_h",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "olmo_hybrid",
    "lfm2_moe",
    "lfm3",
)
"""Kinds of `every_architecture`."""
Request = tuple[np.ndarray, SamplingParams]
Found = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def policy_of(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Policy]:
    parent = tmp_path_factory.mktemp("recurrent")

    @cache
    def make(kind: str) -> Policy:
        folder = make_any(parent / kind, "AutoModelForCausalLM", kind) if kind in MORE else folder_of(kind)
        policy = make_endless(folder)
        assert policy.info.shares_prefixes and policy.state_shape
        return policy

    return make


def plain_logprobs(policy: Policy, request: Request, completion: list[int]) -> list[float]:
    """By the model itself, without a cache."""
    prompt = request[0]
    full = torch.from_numpy(np.concatenate([prompt, completion])).long()
    with torch.no_grad(), policy.attention(policy.own_attention):
        logits = cast(Any, policy.model)(input_ids=full[None], use_cache=False).logits[0].float()
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]


def check_plain(policy: Policy, requests: dict[int, Request], found: dict[int, Found], tolerance: float = 1e-5) -> None:
    for id, request in requests.items():
        chosen, logprobs = found[id]
        assert logprobs == pytest.approx(plain_logprobs(policy, request, chosen), abs=tolerance), id


def groups(num_groups: int, repeats: int, *, shared: int = 37, length: int = 60, new: int = 6) -> dict[int, Request]:
    """Prompts with a common beginning, each for some completions."""
    system = tokens(1, shared)
    prompts = [np.concatenate([system, tokens(10 + g, length - shared + g)]) for g in range(num_groups)]
    return {
        100 * g + i: (prompts[g], SamplingParams(max_tokens=new, seed=i))
        for g in range(num_groups)
        for i in range(repeats)
    }


def next_turn(requests: dict[int, Request], found: dict[int, Found]) -> dict[int, Request]:
    """The conversations of all completions, with a few tokens more."""
    return {
        id: (np.concatenate([prompt, np.int32(found[id][0]), tokens(1000 + id, 5)]), params)
        for id, (prompt, params) in requests.items()
    }


def contexts(requests: dict[int, Request], found: dict[int, Found]) -> set[bytes]:
    """Every token in its context that must be computed: all but the last sampled one."""
    rows = [np.concatenate([prompt, np.int32(found[id][0])]) for id, (prompt, _) in requests.items()]
    return {row[: n + 1].tobytes() for row in rows for n in range(len(row) - 1)}


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_conversations_are_exact_and_computed_once(policy_of: Callable[[str], Policy], kind: str) -> None:
    policy = policy_of(kind)
    sampler = ModelSampler(policy, 64, 16384)
    first = groups(3, 4)
    found = run(sampler, first)
    check_plain(policy, first, found)
    computed = contexts(first, found)
    assert sampler.num_computed == len(computed)
    late = {7: (first[0][0], SamplingParams(max_tokens=6, seed=77))}
    second = next_turn(first, found)
    config = policy.config
    assert prod(recurrent_layers(config.to_dict(), config.num_hidden_layers)) == sum(
        prod(size.shape) for size in policy.state_shape.values()
    )
    third = next_turn(second, run(ModelSampler(policy, 64, 16384), second))
    for requests, again in ((late, 1), (second, 0), (third, 0)):  # The last token of a known prompt is computed again.
        before = sampler.num_computed
        found = run(sampler, requests)
        check_plain(policy, requests, found)
        assert sampler.num_computed - before == len(contexts(requests, found) - computed) + again
        computed |= contexts(requests, found)
    for id in (0, 203):
        check_same({id: found[id]}, run(ModelSampler(policy, 1, 1024), {id: requests[id]}), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("max_concurrent", "cache_tokens"), [(2, 16384), (16, 6 * BLOCK), (3, 4 * BLOCK)])
def test_with_few_slots_and_blocks_all_is_exact(
    policy_of: Callable[[str], Policy], kind: str, max_concurrent: int, cache_tokens: int
) -> None:
    policy = policy_of(kind)
    sampler = ModelSampler(policy, max_concurrent, cache_tokens)
    requests = groups(5, 3, shared=50, length=90)
    for _ in range(2):
        found = run(sampler, requests)
        check_plain(policy, requests, found)
        requests = next_turn(requests, found)


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_are_cut_and_their_states_stored_on_the_way(
    policy_of: Callable[[str], Policy], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "PROMPT_TOKENS", 48)
    monkeypatch.setattr(cache_module, "STATE_TOKENS", 64)
    policy = policy_of(kind)
    sampler = ModelSampler(policy, 64, 16384)
    requests = groups(2, 2, shared=3, length=270)
    check_plain(policy, requests, run(sampler, requests))
    part = {5: (np.concatenate([requests[0][0][:200], tokens(8, 3)]), SamplingParams(max_tokens=2))}
    for computed in (200 - 192 + 3 + 1, 3 + 1):  # From the nearest state; the second one from where the two part.
        before = sampler.num_computed
        check_plain(policy, part, run(sampler, part))
        assert sampler.num_computed - before == computed
        part = {5: (np.concatenate([requests[0][0][:200], tokens(9, 3)]), SamplingParams(max_tokens=2))}


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba"])
def test_the_plan_of_cuda_computes_the_same(
    policy_of: Callable[[str], Policy], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, with the tables that CUDA has. New memory has no number, as that of a busy machine may. Only the blocks
    of the cache are 0: here attention reads and masks those that no row has, which CUDA leaves out.
    """

    def paged(spans: Spans, cache: KeyValueCache) -> tuple[Tensor, Tensor, PagedPlan]:
        assert cache.slots is not None
        for row, count in spans:
            cache.extend(row, row.filled + count)
        inputs = paged_inputs(spans, cache)
        inputs[2].recurrence = StepRecurrence(cache.runs(spans), cache.slots, cache.device)
        return inputs

    monkeypatch.setattr(sampler_module, "step_inputs", paged)
    policy = policy_of(kind)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        sampler, requests = ModelSampler(policy, 8, 2048), groups(2, 3)
        for stored in sampler._cache.stored:
            stored.zero_()
        for _ in range(2):
            found = run(sampler, requests)
            check_plain(policy, requests, found)
            requests = next_turn(requests, found)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_template_that_rewrites_the_end_of_a_prompt_costs_few_tokens(policy_of: Callable[[str], Policy]) -> None:
    policy = policy_of("qwen3_next")
    sampler = ModelSampler(policy, 64, 16384)
    request = (tokens(3, 300), SamplingParams(max_tokens=20, seed=1))
    run(sampler, {0: request})
    before = sampler.num_computed
    turn = {1: (np.concatenate([request[0][:-2], tokens(4, 30)]), SamplingParams(max_tokens=1))}
    check_plain(policy, turn, run(sampler, turn))
    assert sampler.num_computed - before <= 30 + cache_module.TAIL_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_states_do_not_outlive_the_weights(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_endless(folder_of(kind))
    sampler, requests = ModelSampler(policy, 8, 8192), groups(2, 3, new=9)
    for id, request in requests.items():
        sampler.submit(id, *request)
    news = [new for _ in range(4) for new in sampler.step()]
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.2)
    sampler.invalidate()
    old = len(news)
    while not sampler.is_idle:
        news += sampler.step()
    assert 0 < old < len(news)
    for id, request in requests.items():
        own = [(at >= old, new) for at, new in enumerate(news) if new.id == id]
        plain = plain_logprobs(policy, request, [new.token for _, new in own])
        for (is_new, new), logprob in zip(own, plain, strict=True):
            assert not is_new or new.logprob == pytest.approx(logprob, abs=1e-5)
    check_plain(policy, requests, run(sampler, requests))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen3_5"])
def test_adapters_mix(folder_of: Callable[[str], Path], kind: str) -> None:
    base = BaseModel(model_config(folder_of(kind)))
    adapters = [with_random_adapter(base.adapted(LoraConfig(rank=2)), seed) for seed in range(3)]
    sampler = ModelSampler(base.policy, 64, 16384)
    params = [SamplingParams(max_tokens=7, seed=seed) for seed in range(6)]
    prompt = tokens(2, 40)
    requests = {i: (prompt, params[i], adapters[i % 3]) for i in range(6)}
    for _ in range(2):
        found = run(sampler, requests)
        for id, (asked, param, policy) in requests.items():
            check_plain(policy, {id: (asked, param)}, found, 1e-4)  # Random adapters make large numbers.
        requests = {
            id: (np.concatenate([asked, np.int32(found[id][0]), tokens(id, 4)]), param, policy)
            for id, (asked, param, policy) in requests.items()
        }


@pytest.mark.parametrize("seed", range(4))
def test_every_slot_has_one_owner(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_slots = 12
    slots = StateSlots(num_slots, torch.device("cpu"))
    cache = KeyValueCache({}, 64 * BLOCK, torch.float32, torch.device("cpu"), slots)
    active: list[CacheRow] = []
    idle: dict[CacheRow, None] = {}
    for step in range(400):
        action = rng.integers(5)
        row: CacheRow | None = None
        if action < 2 and len(active) < num_slots // STATES_PER_COMPLETION:
            prompt = tokens(int(rng.integers(3)), int(rng.integers(40, 900)))
            prompt[int(rng.integers(len(prompt))) :] = step
            if not cache.awaits_prefix(prompt):
                row = cache.acquire(prompt, len(prompt) + 50)
                assert row is not None and (row.filled in row.states or row.filled in (0, row.last_state(row.filled)))
        elif action == 2 and active and len(active) < num_slots // STATES_PER_COMPLETION:
            row = cache.branch(active[int(rng.integers(len(active)))])
            assert row is not None
        if row is not None:
            active.append(row)
            idle.pop(row, None)
        if action == 3:
            for grown in [row for row in active if row.num_missing]:
                count = int(rng.integers(1, grown.num_missing + 1))
                cache.extend(grown, grown.filled + count)
                written = [run.target for run in cache.runs([(grown, count)])]
                assert len({*written}) == len(written) and written[-1] == grown.slot
                cache.advance([(grown, count)])
        if action == 4 and active:
            released = active.pop(int(rng.integers(len(active))))
            cache.release(released)
            idle[released] = None
        if step % 97 == 0:
            cache.clear()
        owned = [slot for row in (*idle, *active) for slot in row.states.values()] + [row.slot for row in active]
        assert len({*owned}) == len(owned) and {*owned} <= {*range(num_slots)}
        assert all(0 < at <= row.filled for row in (*idle, *active) for at in row.states)


def test_a_model_whose_steps_differ_is_sampled_by_rows(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A state that is lost between two steps, as that of a kernel that returns no final state would be."""
    read = StateSlots.read

    def lost(slots: StateSlots, key: tuple[int, str], places: Any) -> Tensor | None:
        found = read(slots, key, places)
        return None if found is None else torch.zeros_like(found)

    monkeypatch.setattr(StateSlots, "read", lost)
    policy = make_policy(folder_of("qwen3_next"))
    assert policy.learns_forests and not policy.info.shares_prefixes
    assert "not in sampling (its steps differ from whole rows by" in caplog.text
    assert "layer 0 is the first that differs, by" in caplog.text
    with caplog.at_level(logging.WARNING, "agentjet"):
        monkeypatch.setattr(StateSlots, "read", lambda *_: 1 / 0)
        make_policy(folder_of("mamba"))
    assert "it does not run in steps: ZeroDivisionError" in caplog.text
