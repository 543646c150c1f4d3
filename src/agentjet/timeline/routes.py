"""Routes on their way from the sampler to the forest: which experts computed each token. NumPy only.

A sampler reports the routes of the tokens that it computed, also of the prompt, with the version of its weights. The
last token of a completion is not computed, so it has a route only if a later call continues it. A choice takes one
byte, or two if there are more than 256 experts.

A conversation's prefix has one route: that of the call that computed it first. Calls that share it may have found it
in a cache, or have computed it again and chosen otherwise. `build_forest` does the same with the prefixes that episodes
share, and counts the choices that differ.

Shapes: T tokens, L routers, K choices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentjet.errors import ComputeError
from agentjet.types import RouteShape

Choices = NDArray[np.integer[Any]]
"""Experts [T, L, K]; -1 where a route is not known. int8 if there are no more than 128 experts, else int16."""
_HEAD = struct.Struct("<IIHHBq")
"""First position, T, L, K, bytes of a choice, version."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of successive tokens of a prompt + completion."""

    first: int
    """Position of the first token."""
    version: int
    """Version of the weights that chose."""
    choices: Choices

    @property
    def stop(self) -> int:
        return self.first + len(self.choices)

    def pack(self, experts: int) -> bytes:
        """Returns the packed routes of a model with so many experts. All of them must be known."""
        assert self.choices.min(initial=0) >= 0, "a route is not known"
        width = 1 if experts <= 256 else 2
        head = _HEAD.pack(self.first, *self.choices.shape, width, self.version)
        return head + self.choices.astype(f"<u{width}").tobytes()


def unpack(packed: bytes) -> Iterator[Routes]:
    """Yields the routes of any number of packed ones, one after the other."""
    start = 0
    while start < len(packed):
        first, length, layers, choices, width, version = _HEAD.unpack_from(packed, start)
        start += _HEAD.size
        count = length * layers * choices
        yield Routes(first, version, np.frombuffer(packed, f"<u{width}", count, start).reshape(length, layers, choices))
        start += count * width


def checked(packed: bytes, version: int, first: int, shape: RouteShape) -> int:
    """Returns the position after packed routes, which came beside tokens of this version.

    Raises `ComputeError` for routes of another version, of another model, or of tokens that have one.
    """
    for routes in unpack(packed):
        wanted = len(shape.layers), shape.choices
        if routes.version != version:
            raise ComputeError(f"routes of version {routes.version} beside tokens of version {version}")
        if routes.choices.shape[1:] != wanted or routes.choices.max(initial=0) >= shape.experts:
            found = f"{routes.choices.shape[1:]} choices up to expert {routes.choices.max(initial=0)}"
            raise ComputeError(f"routes with {found} for a token; the model makes {wanted} of {shape.experts} experts")
        if routes.first < first:
            raise ComputeError(f"routes from position {routes.first}, which are known up to {first}")
        first = routes.stop
    return first


def joined(packed: Sequence[bytes], stop: int, experts: int) -> bytes:
    """Returns the packed routes of the tokens before `stop`, as few stretches as possible."""
    found: list[list[Routes]] = []
    for routes in unpack(b"".join(packed)):
        part = replace(routes, choices=routes.choices[: max(0, stop - routes.first)])
        if found and found[-1][-1].stop == part.first and found[-1][-1].version == part.version:
            found[-1].append(part)
        else:
            found.append([part])
    whole = (replace(parts[0], choices=np.concatenate([part.choices for part in parts])) for parts in found)
    return b"".join(routes.pack(experts) for routes in whole if len(routes.choices))


def of_path(segments: Sequence[tuple[str, int]], packed: Mapping[str, bytes]) -> Choices | None:
    """Returns the routes of all tokens of a path; None without any.

    `segments` are the calls on it, root first, each with the end of its part of the path. The first route of a token
    holds.
    """
    parts = [(routes, stop) for call_id, stop in segments for routes in unpack(packed.get(call_id, b""))]
    if not parts:
        return None
    largest = max(int(routes.choices.max(initial=0)) for routes, _ in parts)
    shape = segments[-1][1], *parts[0][0].choices.shape[1:]
    found = np.full(shape, -1, np.int8 if largest < 128 else np.int16)
    for routes, stop in parts:
        fill(found[routes.first : stop], routes.choices[: max(0, stop - routes.first)])
    return found


def fill(choices: Choices, others: Choices) -> tuple[int, int]:
    """Adds the routes that `choices` does not have, in place.

    Returns how many choices of routes that both have differ, and the number of these choices.
    """
    own = choices[: len(others)]
    is_new, both = own[:, 0, 0] < 0, (own[:, 0, 0] >= 0) & (others[:, 0, 0] >= 0)
    changed = np.flatnonzero(both & (own != others).any((1, 2)))
    differing = (own[changed][..., None] != others[changed][..., None, :]).all(-1)
    own[is_new] = others[is_new]
    return int(differing.sum()), int(both.sum()) * others[0].size if len(others) else 0
