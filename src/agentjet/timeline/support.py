"""The sets of tokens that sampled tokens were chosen among, where a grammar, `top_p` or `top_k` left some out.

The learner's distribution is the one sampled from only if both are over the same set, so the set itself travels with
the token, from the sampler through the journal into the forest; nothing is derived again. One set is bytes: none for
the whole vocabulary, else how the ids are written (`_KINDS`), then the gaps between those of its members or of the
tokens it lacks, whichever are fewer.

NumPy only. V is the number of token ids the model knows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

EVERYTHING = b""
"""No restriction."""

_KINDS = {0: (False, "<u2"), 1: (True, "<u2"), 2: (False, "<u4"), 3: (True, "<u4")}
"""First byte: whether the ids are those left out, and the type of a gap."""


def encode_set(members: NDArray[np.bool_]) -> bytes:
    """A set from its members [V]; raises `ValueError` for an empty one, from which nothing can be sampled."""
    count = int(np.count_nonzero(members))
    if count == len(members):
        return EVERYTHING
    if not count:
        raise ValueError("a set without members")
    excludes = 2 * count > len(members)
    gaps = np.diff(np.flatnonzero(~members if excludes else members), prepend=0)
    kind = excludes + 2 * bool(gaps.max() > 0xFFFF)
    return bytes([kind]) + gaps.astype(_KINDS[kind][1]).tobytes()


def decode_set(encoded: bytes, vocabulary: int) -> NDArray[np.bool_]:
    """The members [V] of a set."""
    if encoded == EVERYTHING:
        return np.ones(vocabulary, bool)
    excludes, gap = _KINDS[encoded[0]]
    members = np.full(vocabulary, excludes)
    members[np.frombuffer(encoded, gap, offset=1).cumsum(dtype=np.int64)] = not excludes
    return members


def pack_sets(sets: Sequence[bytes]) -> bytes:
    """Sets of successive tokens, each distinct one once, compressed; empty when none restricts anything."""
    if not any(sets):
        return b""
    number: dict[bytes, int] = {}
    order = [number.setdefault(one, len(number)) for one in sets]
    head = np.array([len(number), *map(len, number), *order], "<u4").tobytes()
    return zlib.compress(head + b"".join(number))


def unpack_sets(packed: bytes, count: int) -> tuple[bytes, ...]:
    """The inverse, for `count` tokens."""
    if not packed:
        return (EVERYTHING,) * count
    content = zlib.decompress(packed)
    (num_distinct,) = np.frombuffer(content, "<u4", 1)
    lengths = np.frombuffer(content, "<u4", num_distinct, offset=4)
    order = np.frombuffer(content, "<u4", count, offset=4 + 4 * num_distinct).tolist()
    stops = (4 * (1 + num_distinct + count) + np.cumsum([0, *lengths])).tolist()
    distinct = [content[start:stop] for start, stop in pairwise(stops)]
    return tuple(distinct[i] for i in order)
