"""Pins of the sampler:

1. what it reports is what it sampled from: log-probabilities equal a plain forward pass, temperature included;
2. requests do not disturb each other: seeds, cancels, refusals, lengths, a full cache;
3. the prefix cache changes nothing but speed, and never outlives the weights that filled it;
4. rows that are truncated together have the sets and tokens of each row alone;
5. random numbers are those of the seed, also after an eviction;
6. long prompts share the time with other completions, which are sampled in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from agentjet.compute import sampler as sampler_module
from agentjet.compute.policy import Policy
from agentjet.compute.sampler import ModelSampler
from agentjet.compute.token_choice import restrict, truncate
from agentjet.errors import OutOfCache
from agentjet.timeline.forest import EVERYTHING, decode_set, encode_set
from agentjet.types import SamplingParams
from tests.compute.conftest import check_same, choose, make_endless, make_policy, run, sampler_of, tokens

STATEFUL = ("mamba", "lfm2", "qwen3_next", "bamba")
"""Models with recurrent layers."""


def reference_logprobs(policy: Policy, prompt: np.ndarray, completion: list[int], temperature: float) -> list[float]:
    """By `transformers` itself, with its own attention and no cache."""
    full = torch.from_numpy(np.concatenate([prompt, completion])).long()
    with torch.no_grad(), policy.attention("eager"):
        logits = cast(Any, policy.model)(input_ids=full[None], use_cache=False).logits[0].float() / temperature
    logp = logits.log_softmax(-1)
    return [float(logp[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_reported_logprobs_are_those_of_the_distribution_sampled_from(policy: Policy, temperature: float) -> None:
    sampler = ModelSampler(policy, max_concurrent=8, cache_tokens=8192)
    lengths = (3, 400, 17, 4, 400, 38)  # Long and short ones side by side.
    requests = {
        i: (tokens(i, length), SamplingParams(max_tokens=9, temperature=temperature, seed=i))
        for i, length in enumerate(lengths)
    }
    out = run(sampler, requests)
    for i, (prompt, _) in requests.items():
        expected = reference_logprobs(policy, prompt, out[i][0], temperature)
        assert out[i][1] == pytest.approx(expected, abs=1e-4)


def test_sampled_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    params = SamplingParams(max_tokens=1, temperature=0.5)
    draws = [choose(logits, [0], [params], [b""], [u])[0][0] for u in np.linspace(0, 1, 4001)[:-1]]
    expected = (logits[0] / 0.5).softmax(-1)
    assert np.bincount(draws, minlength=4) / len(draws) == pytest.approx(expected.numpy(), abs=1e-3)


def test_truncation_keeps_the_right_tokens_and_renormalises() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    rows = truncate(logits.expand(5, -1), np.array([2, 0, 0, 0, 0]), np.array([1.0, 0.79, 0.81, 0.2, 1.0]))
    assert rows.isfinite().sum(-1).tolist() == [2, 2, 3, 1, 4]
    assert rows[:2].softmax(-1).tolist() == [pytest.approx([0.625, 0.375, 0, 0])] * 2
    tied = truncate(torch.zeros(2, 8), np.array([3, 0]), np.array([1.0, 0.5]))
    assert (tied == 0).tolist() == [[True] * 8, [True] * 4 + [False] * 4]
    chosen, logprobs, sets = choose(logits[None], [0], [SamplingParams(max_tokens=1, top_k=2)], [b""], [0.99])
    assert decode_set(sets[0], 4).tolist() == [True, True, False, False]
    assert chosen == [1] and logprobs[0] == pytest.approx(np.log(0.375), abs=1e-6)


def one_by_one(logits: torch.Tensor, params: SamplingParams, mask: bytes, uniform: float) -> tuple[int, float, bytes]:
    """The choice from a row [V], by a sort of the whole vocabulary."""
    own = logits / params.temperature
    if mask:
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(own), bitorder="little")
        own = own.masked_fill(torch.from_numpy(allowed == 0), -torch.inf)
    ordered, order = own.sort(descending=True, stable=True)
    if params.top_k:
        ordered = ordered.masked_fill(ordered < ordered[min(params.top_k, len(own)) - 1], -torch.inf)
    probabilities = ordered.softmax(-1)
    if params.top_p < 1:
        ordered = ordered.masked_fill(probabilities.cumsum(-1) - probabilities >= params.top_p, -torch.inf)
    own = own.scatter(0, order, ordered)
    cumulative = own.softmax(-1).cumsum(-1)
    token = int(torch.searchsorted(cumulative, torch.tensor([uniform]) * cumulative[-1:], right=True))
    return token, float(own.log_softmax(-1)[token]), encode_set((own != -torch.inf).numpy())


@pytest.mark.parametrize("vocabulary", [40, 3000, 70_000])
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_rows_truncated_together_are_those_truncated_alone(vocabulary: int, spread: float) -> None:
    """Flat rows, whose set is larger than the list of likeliest tokens, lie beside others."""
    generator, rng = torch.Generator().manual_seed(vocabulary), np.random.default_rng(vocabulary)
    logits = torch.randn(24, vocabulary, generator=generator) * spread
    logits[5] = logits[5].round()  # Many are equally likely.
    rules = [{}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 7}, {"top_k": 300}, {"top_k": 50, "top_p": 0.8}]
    params, masks = [], []
    for i in range(len(logits)):
        rule = {"top_k": 3} if i == 5 else rules[i % len(rules)]  # The ties of the third stay, in any order.
        params.append(SamplingParams(max_tokens=1, temperature=(1.0, 0.7)[i % 2], **cast(Any, rule)))
        allowed = rng.random(vocabulary) < (0.01 if i % 5 else 0.5)
        allowed[:30:7] = True
        masks.append(np.packbits(allowed, bitorder="little").tobytes() if i % 4 == 3 else b"")
    uniforms = rng.random(len(logits)).tolist()
    found = choose(logits, range(len(logits)), params, masks, uniforms)
    wanted = [one_by_one(*each) for each in zip(logits, params, masks, uniforms, strict=True)]
    assert found[2] == [members for *_, members in wanted]
    assert found[0] == [token for token, *_ in wanted]
    assert found[1] == pytest.approx([logprob for _, logprob, _ in wanted], abs=1e-5)
    for i in (1, 5, 7, 23):  # Neighbours do not change a row by one bit.
        assert [column[i] for column in found] == [
            column[0] for column in choose(logits[i : i + 1], [0], [params[i]], [masks[i]], [uniforms[i]])
        ]
    tempered = logits / torch.tensor([[one.temperature] for one in params])
    top_ks, top_ps = (np.array([getattr(one, name) for one in params]) for name in ("top_k", "top_p"))
    assert restrict(tempered, top_ks, top_ps, masks) == found[2], "those of vLLM's rows"
    assert [decode_set(members, vocabulary).tolist() for members in found[2]] == tempered.isfinite().tolist()


def test_completions_of_a_row_share_its_distribution() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)) * 4
    params = [SamplingParams(max_tokens=1, top_p=p, temperature=t) for p, t in [(0.8, 1), (1, 1), (0.8, 1), (0.8, 0)]]
    together = choose(logits, [1, 0, 1, 1], params, [b""] * 4, [0.1, 0.5, 0.9, 0.5])
    for i, (row, uniform) in enumerate([(1, 0.1), (0, 0.5), (1, 0.9), (1, 0.5)]):
        alone = choose(logits[row : row + 1], [0], [params[i]], [b""], [uniform])
        assert [column[i] for column in together] == [column[0] for column in alone]


def test_a_uniform_that_rounds_to_1_chooses_a_token_of_the_set() -> None:
    params = SamplingParams(max_tokens=1, top_k=5)
    [chosen], [logprob], _ = choose(torch.tensor([[0.0] * 5 + [-9.0] * 3]), [0], [params], [b""], [1 - 2**-27])
    assert chosen == 4 and logprob == pytest.approx(np.log(0.2))


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-30])
def test_the_likeliest_token_is_kept_however_little_is_asked_for(top_p: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    params = SamplingParams(max_tokens=1, top_p=top_p, top_k=3)
    [chosen], [logprob], [members] = choose(logits, [0], [params], [b""], [0.7])
    assert (chosen, logprob) == (1, 0.0) and decode_set(members, 3).tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [{}, {"top_p": 0.5}, {"top_k": 2}, {"temperature": 0.0}])
def test_a_row_that_is_no_distribution_says_so_and_a_neighbour_does_not_notice(
    bad: float, shape: dict[str, Any]
) -> None:
    good = [0.0, 2.0, 1.0]
    params = SamplingParams(max_tokens=1, **shape)
    for mask in (b"", bytes([0b011])):
        alone = choose(torch.tensor([good]), [0], [params], [mask], [0.5])
        both = choose(torch.tensor([[bad] * 3, good]), [0, 1], [params] * 2, [mask] * 2, [0.5] * 2)
        assert not math.isfinite(both[1][0])
        assert [found[1] for found in both] == [found[0] for found in alone]


def test_a_diverged_policy_fails_its_completions_and_the_sampler_lives(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    sampler = sampler_of(policy)
    requests = {i: (tokens(i, 8), SamplingParams(max_tokens=4, top_p=1 - i / 10)) for i in range(3)}
    before = {name: weight.clone() for name, weight in policy.trainable().items()}
    for weight in policy.trainable().values():
        weight.data.fill_(torch.nan)
    for id, (prompt, params) in requests.items():
        sampler.submit(id, prompt, params)
    failed = sampler.step()
    assert sorted(new.id for new in failed) == [0, 1, 2] and sampler.is_idle
    assert all("not finite" in str(new.error) and new.finish_reason is None for new in failed)
    for name, weight in policy.trainable().items():
        weight.data.copy_(before[name])
    sampler.invalidate()
    assert all(np.isfinite(logprobs).all() for _, logprobs in run(sampler, requests).values())


def test_greedy_takes_the_most_likely_and_a_neighbour_does_not_notice() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    greedy, warm, cold = (SamplingParams(max_tokens=1, temperature=t) for t in (0.0, 1.0, 0.5))
    chosen, logprobs, sets = choose(logits, [0, 0, 0], [greedy, warm, cold], [b""] * 3, [0.0, 0.0, 0.0])
    assert sets == [EVERYTHING] * 3
    assert chosen == [1, 0, 0]
    assert logprobs[1] == pytest.approx(float(logits[0].log_softmax(-1)[0]), abs=1e-6)
    assert logprobs[2] == pytest.approx(float((logits[0] / 0.5).log_softmax(-1)[0]), abs=1e-6)


def test_shared_prefixes_and_continuations_change_nothing(policy: Policy) -> None:
    sampler = ModelSampler(policy, 8, 8192)
    prompt = tokens(3, 40)
    first = run(sampler, {i: (prompt, SamplingParams(max_tokens=8, seed=i)) for i in range(6)})
    turn = np.concatenate([prompt, np.array(first[2][0], np.int32), tokens(4, 9)])
    second = run(sampler, {9: (turn, SamplingParams(max_tokens=8, seed=1))})
    fresh = run(ModelSampler(policy, 8, 8192), {9: (turn, SamplingParams(max_tokens=8, seed=1))})
    assert second[9][0] == fresh[9][0]
    assert second[9][1] == pytest.approx(fresh[9][1], abs=1e-5)
    assert first[0][1] == pytest.approx(reference_logprobs(policy, prompt, first[0][0], 1.0), abs=1e-4)


def test_a_step_with_room_for_one_token_of_a_prompt_is_exact(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "PROMPT_TOKENS", 48)
    requests = {i: (tokens(i, 47 - i), SamplingParams(max_tokens=4, seed=i)) for i in range(3)}
    for id, (chosen, logprobs) in run(ModelSampler(policy, 8, 8192), requests).items():
        assert logprobs == pytest.approx(reference_logprobs(policy, requests[id][0], chosen, 1.0), abs=1e-4)


def test_completions_that_part_without_room_wait_for_it(policy: Policy) -> None:
    policy.end_tokens = frozenset()
    crowded = ModelSampler(policy, 64, 384)  # three rows for eight completions that part at once
    requests = {i: (tokens(7, 30), SamplingParams(max_tokens=9, temperature=2.0, seed=i)) for i in range(8)}
    out = run(crowded, requests)
    roomy = run(ModelSampler(policy, 64, 16384), requests)
    check_same(out, roomy, 1e-4)


def test_random_numbers_are_those_of_the_seed_also_after_an_eviction(policy: Policy) -> None:
    places, count = sampler_module._Running(3), 2 * sampler_module.UNIFORMS + 5
    wanted = [np.random.default_rng(seed).random(count) for seed in range(3)]
    completions = [
        sampler_module.RunningCompletion(i, tokens(0, 3), 3, SamplingParams(max_tokens=count, seed=i), None, policy)
        for i in range(3)
    ]
    found: list[list[float]] = [[], [], []]
    for step in range(count):
        for c in completions[: 1 + step]:  # They start one after the other.
            if c.place < 0 and len(found[c.id]) < count:
                places.enter(c)
        running = [c for c in completions if c.place >= 0]
        at = np.array([c.place for c in running])
        for c, uniform in zip(running, places.rules(at, at, {}).uniforms.tolist(), strict=True):
            found[c.id].append(uniform)
        if step % 31 == 30:  # An eviction: it enters again at any place.
            for c in running[::-1]:
                places.leave(c)
    assert [len(one) for one in found] == [count, count - 1, count - 2]
    for one, all_of_seed in zip(found, wanted, strict=True):
        assert one == all_of_seed[: len(one)].tolist()


@pytest.mark.parametrize(("num_running", "num_long", "share"), [(4, 1, 0.4), (1, 4, 0.8)])
def test_long_prompts_share_the_time_with_other_completions(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, num_running: int, num_long: int, share: float
) -> None:
    """A clock that counts tokens stands for the time."""
    policy.end_tokens = frozenset()
    sampler = ModelSampler(policy, 8, 16_384)
    monkeypatch.setattr(sampler_module, "PROMPT_TOKENS", 64)
    monkeypatch.setattr(sampler_module, "CHUNK_TOKENS", 32)
    monkeypatch.setattr(sampler_module, "time", SimpleNamespace(perf_counter=lambda: float(sampler.num_computed)))
    short = {i: (tokens(i, 9), SamplingParams(max_tokens=400, seed=i)) for i in range(num_running)}
    long = {9 + i: (tokens(9 + i, 300), SamplingParams(max_tokens=2, seed=9)) for i in range(num_long)}
    for id, request in short.items():
        sampler.submit(id, *request)
    sampler.step()
    for id, request in long.items():
        sampler.submit(id, *request)
    before, num_sampled, found = sampler.num_computed, 0, set[int]()
    while not found:
        new = sampler.step()
        num_sampled += len(short)
        assert {*short} <= {*new.ids}, "a running completion waits"
        found = {*new.ids} - {*short}
    num_long_tokens = sampler.num_computed - before - num_sampled
    assert num_long_tokens >= 300
    assert num_long_tokens / (sampler.num_computed - before) == pytest.approx(share, abs=0.06)


def test_completions_beside_a_long_prompt_are_those_alone(policy: Policy) -> None:
    policy.end_tokens = frozenset()
    short = {i: (tokens(i, 9), SamplingParams(max_tokens=20, top_p=0.9, seed=i)) for i in range(4)}
    long = {9: (tokens(9, 1500), SamplingParams(max_tokens=4, seed=9))}
    found = run(ModelSampler(policy, 8, 8192), short | long)
    for alone in (short, long):
        check_same(found, run(ModelSampler(policy, 8, 8192), alone), 1e-4)


@pytest.mark.parametrize("kind", ["tiny", "lfm2"])
def test_a_seed_gives_the_same_tokens_whatever_else_runs(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_endless(folder_of(kind))
    prompt = tokens(1, 20)
    wanted, other = ((prompt, SamplingParams(max_tokens=12, seed=seed)) for seed in (7, 8))
    alone = ModelSampler(policy, 8, 8192)
    chosen, logprobs = run(alone, {0: wanted})[0]
    assert alone.num_computed == 20 + 11
    crowd = {
        i: (tokens(50 + i, 5 * i + 2), SamplingParams(max_tokens=3 + i, temperature=0.5 + 0.1 * i, seed=i))
        for i in range(1, 8)
    }
    narrow = ModelSampler(policy, 4, 256)  # Room for two rows of one block: the others wait.
    found = run(narrow, {**crowd, 0: wanted})
    assert found[0][0] == chosen and found[0][1] == pytest.approx(logprobs, abs=1e-5)
    assert [len(found[i][0]) for i in crowd] == [3 + i for i in crowd]
    assert run(ModelSampler(policy, 8, 8192), {0: other})[0][0] != chosen


@pytest.mark.parametrize("kind", ["tiny", *STATEFUL])
def test_each_token_in_context_is_computed_once_between_repeats_too(
    folder_of: Callable[[str], Path], kind: str
) -> None:
    """Repeats share the state of their prompt until they sample different tokens; groups share a part of theirs."""
    policy = make_endless(folder_of(kind))
    sampler = ModelSampler(policy, 64, 16384)
    shared = 20 if policy.info.shares_prefixes else 0
    prompts = [np.concatenate([tokens(1, shared), tokens(g, 30 - shared)]) for g in range(2)]
    requests = {
        8 * g + i: (prompts[g], SamplingParams(max_tokens=7, temperature=0.1, seed=i))
        for g in range(2)
        for i in range(5)
    }
    out = run(sampler, requests)
    # The last sampled token is never computed: nothing follows it.
    contexts = {
        tuple(np.concatenate([prompt, out[id][0]])[: n + 1]) for id, (prompt, _) in requests.items() for n in range(36)
    }
    assert sampler.num_computed == len(contexts) < 0.5 * 36 * len(requests)
    for id, request in requests.items():
        check_same({id: out[id]}, run(ModelSampler(policy, 1, 4096), {id: request}), 1e-4)


@pytest.mark.parametrize("kind", ["tiny", "lfm2"])
def test_requests_end_are_cancelled_and_are_refused(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_endless(folder_of(kind))
    sampler = ModelSampler(policy, 2, 1024)
    with pytest.raises(OutOfCache, match="2000 prompt tokens"):
        sampler.submit(9, tokens(0, 2000), SamplingParams(max_tokens=4))
    for i in range(4):
        sampler.submit(i, tokens(i, 10), SamplingParams(max_tokens=3, seed=i))
    assert {new.id for new in sampler.step()} == {0, 1}
    for gone in (0, 3, 77):  # running, waiting, unknown
        sampler.cancel(gone)
    rest = []
    while not sampler.is_idle:
        rest += sampler.step()
    assert [(new.id, new.finish_reason) for new in rest] == [
        *((1, None), (2, None), (1, "length"), (2, None), (2, "length"))
    ]
    policy.end_tokens = frozenset(range(policy.vocabulary))
    sampler.submit(1, tokens(0, 4), SamplingParams(max_tokens=50))
    (new,) = sampler.step()
    assert new.finish_reason == "stop" and sampler.is_idle


@pytest.mark.parametrize("invalidates", [True, False])
@pytest.mark.parametrize("kind", ["tiny", "gemma3_window", *STATEFUL[:-1]])
def test_the_cache_never_outlives_the_weights_that_filled_it(
    folder_of: Callable[[str], Path], kind: str, invalidates: bool
) -> None:
    """Without `invalidate` the stale cache shows."""
    policy = make_endless(folder_of(kind))
    sampler, prompt = ModelSampler(policy, 4, 8192), tokens(5, 60)
    short = (prompt, SamplingParams(max_tokens=4, seed=1))
    run(sampler, {1: short})
    sampler.submit(2, prompt, SamplingParams(max_tokens=12, seed=2))
    found = [sampler.step()[0] for _ in range(5)]
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.5)
    if invalidates:
        sampler.invalidate()
    while not sampler.is_idle:
        found += sampler.step()
    again = run(sampler, {3: short})[3]
    fresh = reference_logprobs(policy, prompt, [new.token for new in found], 1.0)
    logprobs = [new.logprob for new in found]
    assert logprobs[:5] != pytest.approx(fresh[:5], abs=1e-2), "the weights did not change enough"
    if invalidates:
        assert logprobs[5:] == pytest.approx(fresh[5:], abs=1e-4)
        assert again[1] == pytest.approx(reference_logprobs(policy, prompt, again[0], 1.0), abs=1e-4)
    else:
        assert logprobs[6:] != pytest.approx(fresh[6:], abs=1e-3)
