"""Support sets: the tokens that a sampled token was chosen from, if a grammar, `top_p` or `top_k` excluded others.

The learner must normalise over the same set as the sampler. So the set stays with the token from the sampler to the
journal and the forest. It is never computed again.

A set is encoded as bytes. No bytes mean the whole vocabulary. Otherwise the first byte is the kind of encoding (see
`_KINDS`). Then follow the gaps between the ids of its members, or of the excluded tokens if they are fewer.

NumPy only. V is the size of the vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

EVERYTHING = b""
"""The whole vocabulary."""

_KINDS = {0: (False, "<u2"), 1: (True, "<u2"), 2: (False, "<u4"), 3: (True, "<u4")}
"""By first byte: True if the ids are those of excluded tokens, and the type of a gap."""


def encode_set(members: NDArray[np.bool_]) -> bytes:
    """Returns the encoding of a set from its members [V]. Raises `ValueError` for an empty set."""
    count = int(np.count_nonzero(members))
    if count == len(members):
        return EVERYTHING
    if not count:
        raise ValueError("an empty support set")
    excludes = 2 * count > len(members)
    gaps = np.diff(np.flatnonzero(~members if excludes else members), prepend=0)
    kind = excludes + 2 * bool(gaps.max() > 0xFFFF)
    return bytes([kind]) + gaps.astype(_KINDS[kind][1]).tobytes()


def num_members(encoded: bytes) -> int | None:
    """Returns the size of a set that has at most half of the vocabulary, else None."""
    if encoded == EVERYTHING or _KINDS[encoded[0]][0]:
        return None
    return (len(encoded) - 1) // np.dtype(_KINDS[encoded[0]][1]).itemsize


def decode_set(encoded: bytes, vocabulary: int) -> NDArray[np.bool_]:
    """Returns the members [V] of a set."""
    if encoded == EVERYTHING:
        return np.ones(vocabulary, bool)
    excludes, gap = _KINDS[encoded[0]]
    members = np.full(vocabulary, excludes)
    members[np.frombuffer(encoded, gap, offset=1).cumsum(dtype=np.int64)] = not excludes
    return members


def pack_sets(sets: Sequence[bytes]) -> bytes:
    """Returns the compressed sets of successive tokens, each distinct set once; empty if all are `EVERYTHING`."""
    if not any(sets):
        return b""
    number: dict[bytes, int] = {}
    order = [number.setdefault(one, len(number)) for one in sets]
    head = np.array([len(number), *map(len, number), *order], "<u4").tobytes()
    return zlib.compress(head + b"".join(number))


def unpack_sets(packed: bytes, count: int) -> tuple[bytes, ...]:
    """Returns the sets of `count` tokens from their packed form."""
    if not packed:
        return (EVERYTHING,) * count
    content = zlib.decompress(packed)
    (num_distinct,) = np.frombuffer(content, "<u4", 1)
    lengths = np.frombuffer(content, "<u4", num_distinct, offset=4)
    order = np.frombuffer(content, "<u4", count, offset=4 + 4 * num_distinct).tolist()
    stops = (4 * (1 + num_distinct + count) + np.cumsum([0, *lengths])).tolist()
    distinct = [content[start:stop] for start, stop in pairwise(stops)]
    return tuple(distinct[i] for i in order)
