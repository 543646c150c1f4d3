"""Pins the arithmetic of mixing, for any weights:

1. over many batches the groups are dealt by weight, to within a few groups at any length;
2. a longer deal begins with the shorter one, and limits, places taken and sets that are away are respected;
3. what is carried over sums to nothing and is bounded.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.swarm.places import MAX_CARRY, carried, deal, needs, quotas

SETS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 20), min_size=1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(weights=SETS, size=st.integers(1, 9))
def test_many_batches_are_shared_as_the_weights_say(weights: dict[str, float], size: int) -> None:
    carry: dict[str, float] = {}
    had: Counter[str] = Counter()
    for batch in range(1, 200):
        limits = quotas(weights, carry, {}, size)
        needed = needs(weights, carry, limits, size)
        assert needed == limits and sum(limits.values()) == size
        had.update(needed)
        carry = carried(weights, carry, needed)
        assert sum(carry.values()) == pytest.approx(0, abs=1e-9)
        for name, weight in weights.items():
            assert abs(had[name] - batch * size * weight / sum(weights.values())) < MAX_CARRY


@settings(max_examples=60, deadline=None, derandomize=True)
@given(weights=SETS, size=st.integers(1, 9), more=st.integers(0, 9))
def test_what_is_begun_ahead_is_what_the_batch_needs(weights: dict[str, float], size: int, more: int) -> None:
    limits = quotas(weights, {}, {}, size + more)
    needed = needs(weights, {}, limits, size)
    assert needed is not None and Counter(needed) == Counter(islice(deal(weights, {}), size))
    assert all(needed[name] <= limits[name] for name in weights)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(weights=SETS, held=st.dictionaries(st.sampled_from("abcxyz"), st.integers(0, 6)), places=st.integers(1, 12))
def test_places_that_are_taken_are_not_given_back(weights: dict[str, float], held: dict[str, int], places: int) -> None:
    given_out = quotas(weights, {}, held, places)
    assert all(given_out[name] >= held.get(name, 0) for name in weights)
    away = sum(number for name, number in held.items() if name not in weights)
    assert sum(given_out.values()) + away == max(places, sum(held.values()))


def test_small_weights_get_their_turn() -> None:
    dealt = list(islice(deal({"big": 9, "small": 1}, {}), 20))
    assert (dealt.count("big"), dealt.count("small")) == (18, 2) and dealt[:10].count("small") == 1


def test_nobody_has_places_when_nobody_is_there() -> None:
    assert quotas({}, {}, {"a": 1}, 4) == {} and needs({}, {}, {}, 2) is None and needs({}, {}, {}, 0) == {}


def test_what_came_of_joining_late_is_not_made_up_for_at_length() -> None:
    assert carried({"a": 1, "b": 1}, {}, {"a": 20}) == {"a": -MAX_CARRY, "b": MAX_CARRY}
