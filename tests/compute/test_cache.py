"""The sampler's cache. Pinned here:

1. idle rows never delay a request, and a row takes no more blocks than its tokens need;
2. requests that wait for blocks start in order of arrival, and cost nothing while they wait;
3. no block has two owners, and a row always gets the blocks that it has reserved;
4. blocks read in place, gathered or merged give the same attention, with any earlier content.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentjet.compute.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.policy import KeySizes, Policy
from agentjet.compute.sampler import ModelSampler
from agentjet.types import SamplingParams
from tests.compute.conftest import check_same, make_endless, run, tokens


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> Policy:
    return make_endless(tiny_folder)


def make_cache(num_blocks: int) -> KeyValueCache:
    return KeyValueCache({0: KeySizes(1, 4, 4)}, num_blocks * BLOCK, torch.float32, torch.device("cpu"))


def sampled_first(sampler: ModelSampler, steps: int = 200) -> list[int]:
    """Ids in the order of their first tokens, after at most so many steps."""
    order: dict[int, None] = {}
    for _ in range(steps):
        if sampler.is_idle:
            break
        order.update((new.id, None) for new in sampler.step())
    return list(order)


def test_a_long_prompt_starts_beside_a_short_call_in_an_idle_cache(policy: Policy) -> None:
    sampler = ModelSampler(policy, max_concurrent=64, cache_tokens=65_536)
    run(sampler, {i: (tokens(i, 10), SamplingParams(max_tokens=2, seed=i)) for i in range(256)})
    sampler.submit(1000, tokens(1000, 10), SamplingParams(max_tokens=200))
    sampler.step()
    sampler.submit(1001, tokens(1001, 500), SamplingParams(max_tokens=4))
    assert 1001 in {new.id for new in sampler.step()}


def test_a_row_reserves_what_its_tokens_need() -> None:
    cache = make_cache(num_blocks=64)
    rows = [cache.acquire(tokens(i, 1000), 1025) for i in range(8)]
    assert all(row is not None for row in rows[:7]) and rows[7] is None
    assert cache.acquire(tokens(9, 10), BLOCK) is not None


def test_idle_rows_go_one_by_one_the_longest_unused_first() -> None:
    cache = make_cache(num_blocks=4)
    prompts = [tokens(i, 100) for i in range(4)]
    for prompt in prompts:
        row = cache.acquire(prompt, 101)
        assert row is not None
        cache.extend(row, 100)
        row.filled = 100
        cache.release(row)
    used = cache.acquire(np.append(prompts[0], np.int32(7)), 102)
    assert used is not None and used.filled == 100
    cache.release(used)
    new = cache.acquire(tokens(9, 200), 200)
    assert new is not None and new.filled == 0
    cache.extend(new, 200)
    found = [cache._longest_prefix(prompt)[1] for prompt in prompts]
    assert found == [100, 0, 0, 100]


@pytest.mark.parametrize("seed", range(4))
def test_every_block_has_one_owner_and_reservations_hold(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = make_cache(num_blocks=24)
    active: list[CacheRow] = []
    for step in range(400):
        action = rng.integers(6)
        if action < 2:
            prompt = tokens(int(rng.integers(3)), int(rng.integers(1, 900)))
            prompt[int(rng.integers(len(prompt))) :] = step
            row = cache.acquire(prompt, len(prompt) + int(rng.integers(1, 300)))
        elif action == 2 and active:
            row = cache.branch(active[int(rng.integers(len(active)))])
        else:
            row = None
        if row is not None:
            active.append(row)
        if action == 3 and active:
            grown = active[int(rng.integers(len(active)))]
            grown.length = grown.filled = int(rng.integers(grown.filled, grown.capacity + 1))
            cache.extend(grown, grown.length)
        if action == 4 and active:
            cache.release(active.pop(int(rng.integers(len(active)))))
        if action == 5 and step % 50 == 0:
            cache.clear()
        owned = [block for row in (*cache._idle, *cache._active) for block in row.blocks]
        assert sorted([*owned, *cache._free]) == list(range(24))
        assert all(row.filled <= len(row.blocks) * BLOCK for row in active)
        placed = [row for row in active if row.place >= 0]
        assert len({row.place for row in placed} | {*cache._free_places}) == len(cache.table)
        assert all(row.place < 0 for row in cache._idle)
        for row in placed:
            assert cache.table[row.place, : len(row.blocks)].tolist() == row.blocks
        reserved = sum(-(-row.capacity // BLOCK) for row in active)
        assert set(cache._active) == set(active) and 24 - cache.num_unreserved == reserved <= 24
    for row in active:
        cache.extend(row, row.capacity)


def test_a_prefix_gives_way_where_it_and_its_continuation_do_not_both_fit(policy: Policy) -> None:
    sampler = ModelSampler(policy, max_concurrent=4, cache_tokens=1024)
    prompt = tokens(1, 600)
    run(sampler, {0: (prompt, SamplingParams(max_tokens=4))})
    other = np.concatenate([prompt[:500], tokens(2, 400)])
    params = SamplingParams(max_tokens=4, seed=3)
    sampler.submit(1, other, params)
    assert sampled_first(sampler, steps=10) == [1]
    assert sampler.num_computed == 603 + 400 + 3
    alone = run(ModelSampler(policy, 4, 1024), {2: (other, params)})[2]
    assert run(sampler, {3: (other, params)})[3][1] == pytest.approx(alone[1], abs=1e-5)


def test_none_overtakes_a_request_that_waits_for_room(policy: Policy) -> None:
    sampler = ModelSampler(policy, max_concurrent=8, cache_tokens=4 * BLOCK)
    sampler.submit(0, tokens(0, 10), SamplingParams(max_tokens=5))
    sampler.submit(1, tokens(1, 3 * BLOCK + 1), SamplingParams(max_tokens=2))
    for i in range(2, 6):
        sampler.submit(i, tokens(i, 10), SamplingParams(max_tokens=5))
    assert sampled_first(sampler) == [0, 1, 2, 3, 4, 5]


def test_who_waits_for_room_is_not_looked_at_in_every_step(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ModelSampler(policy, max_concurrent=64, cache_tokens=2 * BLOCK)
    sampler.submit(0, tokens(0, 10), SamplingParams(max_tokens=150))
    for i in range(1, 40):
        sampler.submit(i, tokens(i, 10), SamplingParams(max_tokens=150))
    asked: list[int] = []
    acquire = KeyValueCache.acquire

    def counted(cache: KeyValueCache, prompt: np.ndarray, length: int, owner: object) -> object:
        asked.append(length)
        return acquire(cache, prompt, length, owner)

    monkeypatch.setattr(KeyValueCache, "acquire", counted)
    for _ in range(100):
        assert [new.id for new in sampler.step()] == [0]
    assert len(asked) == 2


@pytest.mark.parametrize("blocks", ["used before", "in no order"])
def test_where_a_row_lies_and_what_a_block_held_before_does_not_show(policy: Policy, blocks: str) -> None:
    requests = {i: (tokens(i, 130 * i + 5), SamplingParams(max_tokens=5, seed=i)) for i in range(5)}
    expected = run(ModelSampler(policy, 8, 8192), requests)
    sampler = ModelSampler(policy, 8, 8192)
    if blocks == "in no order":
        sampler._cache._free = sampler._cache._free[::2]  # a heap still
    else:
        for stored in sampler._cache.stored:
            stored.fill_(torch.nan)
    for _ in range(2):
        check_same(run(sampler, requests), expected, 1e-5)
