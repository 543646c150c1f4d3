"""Pinned here: any set is decoded unchanged; repeated sets are stored once; the whole vocabulary takes no byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.timeline.support import EVERYTHING, decode_set, encode_set, pack_sets, unpack_sets

VOCABULARIES = st.sampled_from([1, 2, 300, 49_152, 200_000])


@given(VOCABULARIES, st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_a_set_comes_back(vocabulary: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    members = rng.random(vocabulary) < share**4
    members[rng.integers(vocabulary)] = True
    for one in (members, ~members) if not members.all() else (members,):
        encoded = encode_set(one)
        assert (encoded == EVERYTHING) == bool(one.all())
        assert (decode_set(encoded, vocabulary) == one).all()


def test_gaps_wider_than_two_bytes() -> None:
    members = np.zeros(200_000, bool)
    members[[0, 70_000, 199_999]] = True
    for one in (members, ~members):
        assert (decode_set(encode_set(one), 200_000) == one).all()


def test_nothing_can_be_sampled_from_nothing() -> None:
    with pytest.raises(ValueError, match="an empty support set"):
        encode_set(np.zeros(3, bool))


@given(st.lists(st.sampled_from([EVERYTHING, b"\0\1\0", b"\1\5\0\6\0", b"\0"])))
def test_sets_come_back_in_their_order(sets: list[bytes]) -> None:
    packed = pack_sets(sets)
    assert unpack_sets(packed, len(sets)) == tuple(sets)
    assert bool(packed) == any(sets)


def test_what_repeats_is_stored_once() -> None:
    rng = np.random.default_rng(0)
    sets = [encode_set(rng.random(49_152) < 0.1) for _ in range(2)]
    once, often = pack_sets(sets), pack_sets(sets * 200)
    assert len(once) > 5000 and len(often) < len(once) + 200
