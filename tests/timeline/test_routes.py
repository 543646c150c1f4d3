"""Routes from the sampler to the forest. Pinned here:

1. packed routes are read as they were, of any size and in any number;
2. routes of another version, of another model, or of tokens that have some are refused;
3. a path has the first route of each of its tokens, and so has a node that several timelines share.
"""

from __future__ import annotations

import numpy as np
import pytest

from agentjet.errors import ComputeError
from agentjet.timeline.forest import ForestChunk, Row, build_forest, chunk_forest, part_of, restrict, split
from agentjet.timeline.routes import Choices, Routes, checked, fill, joined, of_path, unpack
from agentjet.types import RouteShape


def choices(length: int, *, experts: int = 8, seed: int = 0) -> Choices:
    """Distinct experts [length, 3 routers, 2 choices]."""
    rng = np.random.default_rng(seed)
    drawn = [rng.permutation(experts)[:2] for _ in range(3 * length)]
    return np.array(drawn, np.int16).reshape(length, 3, 2)


@pytest.mark.parametrize(("experts", "width"), [(8, 1), (256, 1), (257, 2), (4096, 2)])
def test_packed_routes_are_read_as_they_were(experts: int, width: int) -> None:
    one, other = Routes(3, 7, choices(5, experts=experts)), Routes(8, 9, choices(2, experts=experts, seed=1))
    packed = one.pack(experts) + other.pack(experts)
    assert len(packed) == 2 * len(Routes(0, 0, choices(0)).pack(experts)) + 7 * 6 * width
    found = list(unpack(packed))
    assert [(routes.first, routes.stop, routes.version) for routes in found] == [(3, 8, 7), (8, 10, 9)]
    assert np.array_equal(found[0].choices, one.choices) and np.array_equal(found[1].choices, other.choices)
    assert list(unpack(b"")) == []


def test_joined_routes_end_with_the_completion() -> None:
    """A stop string ends a completion before its last tokens. Versions stay apart, and so do gaps."""
    whole = choices(12)
    parts = [
        Routes(at, version, whole[at:stop]) for at, stop, version in ((0, 4, 1), (4, 6, 1), (6, 9, 2), (10, 12, 2))
    ]
    found = list(unpack(joined([part.pack(8) for part in parts], 11, 8)))
    assert [(one.first, one.stop, one.version) for one in found] == [(0, 6, 1), (6, 9, 2), (10, 11, 2)]
    assert all(np.array_equal(one.choices, whole[one.first : one.stop]) for one in found)
    assert joined([], 5, 8) == b"" == joined([parts[3].pack(8)], 10, 8)


SHAPE = RouteShape((0, 1, 2), 2, 8)
REFUSED = {
    "routes of version 3 beside tokens of version 4": (Routes(5, 3, choices(2)), 5),
    "routes from position 4, which are known up to 5": (Routes(4, 4, choices(2)), 5),
    r"routes with \(2, 2\) choices up to expert \d for a token; the model makes \(3, 2\) of 8": (
        Routes(5, 4, choices(2)[:, :2]),
        5,
    ),
    r"choices up to expert 8 for a token": (Routes(5, 4, np.full((2, 3, 2), 8, np.int16)), 5),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_routes_are_refused(message: str) -> None:
    routes, first = REFUSED[message]
    with pytest.raises(ComputeError, match=message):
        checked(routes.pack(16), 4, first, SHAPE)


def test_right_routes_continue() -> None:
    assert checked(Routes(5, 4, choices(2)).pack(8) + Routes(7, 4, choices(3)).pack(8), 4, 5, SHAPE) == 10
    assert checked(b"", 4, 5, SHAPE) == 5


def test_a_path_has_the_first_route_of_each_token() -> None:
    first, second, third = choices(9, seed=1), choices(6, seed=2), choices(4, seed=3)
    packed = {"a": Routes(0, 0, first).pack(8), "b": Routes(6, 0, second).pack(8), "d": Routes(12, 0, third).pack(8)}
    # `b` continues `a` at 7, `c` has no routes, `d` ends with a token that is not computed.
    found = of_path([("a", 7), ("b", 11), ("c", 13), ("d", 17)], packed)
    assert found is not None and found.shape == (17, 3, 2)
    assert np.array_equal(found[:7], first[:7])
    assert np.array_equal(found[7:11], second[1:5]) and (found[11:12] == -1).all()
    assert np.array_equal(found[12:16], third) and (found[16] == -1).all()
    assert found.dtype == np.int8 and of_path([("c", 4)], packed) is None
    wide = of_path([("a", 9)], {"a": Routes(0, 0, first + 248).pack(256)})
    assert wide is not None and wide.dtype == np.int16 and np.array_equal(wide, first + 248)


def test_a_shared_node_has_the_first_route_and_conflicts_are_counted() -> None:
    one, other = np.arange(10, 20, dtype=np.int32), np.arange(10, 22, dtype=np.int32)
    other[6:] += 50
    routes, others = choices(10, seed=1), choices(12, seed=1)
    routes[4:] = -1
    others[2] = (others[2] + 1) % 8
    others[3] = others[3][:, ::-1]  # The order does not matter.
    rows = [Row(one, slice(5, 10), {}, routes=routes), Row(other, slice(5, 12), {}, routes=others)]
    rows += [Row(np.arange(90, 95, dtype=np.int32), slice(1, 5), {})]
    forest = build_forest(rows)
    assert forest.routes is not None and forest.num_nodes == 6 + 4 + 6 + 5
    path = np.flatnonzero(np.isin(forest.tokens, one))
    assert np.array_equal(forest.routes[path[:4]], routes[:4]), "the first row's"
    assert np.array_equal(forest.routes[path[4:6]], others[4:6]), "what only the second one knows"
    assert (forest.routes[path[6:]] == -1).all()
    differing = int((routes[2][..., None] != others[2][..., None, :]).all(-1).sum())
    assert forest.route_conflicts == pytest.approx(differing / (4 * 6)) and differing
    assert build_forest(rows[2:]).routes is None


def test_parts_of_a_forest_keep_the_routes_of_their_nodes() -> None:
    trunk = np.arange(5, 45, dtype=np.int32)
    paths = [np.concatenate([trunk, np.arange(100 * i, 100 * i + 30)]).astype(np.int32) for i in range(1, 5)]
    forest = build_forest([Row(path, slice(60, 70), {}, routes=choices(70, seed=i)) for i, path in enumerate(paths)])
    of_token = dict(zip(forest.tokens.tolist(), forest.routes if forest.routes is not None else (), strict=True))
    pieces = [piece for piece, _ in split(forest, 60)] + [part_of(forest, part, 2)[0] for part in range(2)]
    chunks: list[ForestChunk] = [chunk for chunk, _ in chunk_forest(forest, 60)]
    for piece in [*pieces, *chunks, restrict(forest, np.arange(3), np.zeros(40, bool))]:
        assert piece.routes is not None and piece.num_nodes
        for token, route in zip(piece.tokens.tolist(), piece.routes, strict=True):
            assert np.array_equal(route, of_token[token])


def test_filling_nothing_changes_nothing() -> None:
    known = choices(4)
    assert fill(known, known[:0]) == (0, 0) and fill(known, known.copy()) == (0, 24)
