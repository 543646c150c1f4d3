"""Requests that are as large as the server allows, and built to cost as much as they can."""

from __future__ import annotations

from collections.abc import Callable, Iterator

Shape = Callable[[str, int], bytes]
"""From a path and a size in bytes to a body."""
ITEMS = {
    "/v1/chat/completions": b'"messages": ',
    "/v1/completions": b'"prompt": ',
    "/v1/responses": b'"input": ',
    "/v1/messages": b'"max_tokens": 8, "messages": ',
    "/v1/messages/count_tokens": b'"messages": ',
}
"""The inference routes, and where the items of each stand."""
CONTROL = (
    ("POST", "/swarm/v1/episodes", "client"),
    ("POST", "/swarm/v1/episodes/{episode}/finish", "episode"),
    ("POST", "/swarm/v1/episodes/{episode}/abort", "client"),
    ("POST", "/swarm/v1/groups/close", "client"),
    ("PUT", "/swarm/v1/job", "admin"),
    ("PUT", "/swarm/v1/runs/bench", "admin"),
)
"""Control routes that take a body, and whose token opens each."""
SCHEMA = {
    "/v1/chat/completions": b'"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": %b}}',
    "/v1/responses": b'"text": {"format": {"type": "json_schema", "name": "x", "schema": %b}}',
    "/v1/messages": b'"output_config": {"format": {"type": "json_schema", "schema": %b}}',
}
MESSAGE = {
    "/v1/chat/completions": b'"messages": [{"role": "user", "content": %b}]',
    "/v1/completions": b'"prompt": %b',
    "/v1/responses": b'"input": %b',
    "/v1/messages": b'"max_tokens": 8, "messages": [{"role": "user", "content": %b}]',
    "/v1/messages/count_tokens": b'"messages": [{"role": "user", "content": %b}]',
}
HELLO = {path: message % b'"hello"' for path, message in MESSAGE.items()}


def filled(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """`before`, as many units as fit into `size` bytes in all, `after`; the last unit's comma is left out."""
    room = size - len(before) - len(after)
    return before + (unit * (room // len(unit))).removesuffix(b",") + after


def numbered(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """The same of units that have a number in them, each another one."""
    room = size - len(before) - len(after)
    length = len(unit % 10**8)
    return before + b"".join(unit % (10**8 + i) for i in range(room // length)).removesuffix(b",") + after


def text(path: str, written: bytes, size: int) -> bytes:
    """A request of one long text, in which `written` is repeated."""
    before, after = (b'{"model": "policy", ' + MESSAGE.get(path, b'"task_id": %b') + b"}").split(b"%b")
    return filled(before + b'"', written, b'"' + after, size)


def items(path: str, item: bytes, size: int) -> bytes:
    """A request with a list of items where the route has one."""
    return filled(b'{"model": "policy", ' + ITEMS.get(path, b'"metrics": ') + b"[", item + b",", b"]}", size)


def schema(path: str, before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """A small question whose answer is to follow a large schema."""
    start, end = (b'{"model": "policy", ' + HELLO[path] + b", " + SCHEMA[path] + b"}").split(b"%b")
    return numbered(start + before, unit, after + end, size)


SHAPES: dict[str, Shape] = {
    "empty objects": lambda path, size: items(path, b"{}", size),
    "empty arrays": lambda path, size: items(path, b"[]", size),
    "objects of one key": lambda path, size: items(path, b'{"a":0}', size),
    "numbers": lambda path, size: items(path, b"7", size),
    "short strings": lambda path, size: items(path, b'"ab"', size),
    "keys": lambda path, size: numbered(b'{"model": "policy", ', b'"%d":0,', b"}", size),
    "levels": lambda path, size: filled(b'{"model": "policy", "x": ', b"[", b"", size),
    "text": lambda path, size: text(path, b"word ", size),
    "text of brackets": lambda path, size: text(path, b",[{", size),
    "wide text": lambda path, size: text(path, "word €😀 ".encode(), size),
    "escapes": lambda path, size: text(path, b"\\u20ac", size),
    "quotes": lambda path, size: text(path, b'\\"', size),
    "not JSON": lambda path, size: b"\xff" * size,
}
SCHEMAS: dict[str, Shape] = {
    "enum": lambda path, size: schema(path, b'{"enum": [', b'"%d",', b"]}", size),
    "properties": lambda path, size: schema(
        path, b'{"type": "object", "properties": {', b'"%d":{"type":"integer"},', b"}}", size
    ),
    "pattern": lambda path, size: schema(path, b'{"type": "string", "pattern": "', b"(a|%d)?", b'"}', size),
}
NEAR = 120_000
"""Bytes of a schema that stays within the limits: small beside the body, and the more is done with it."""
MOST_ITEMS, MOST_VALUES = 49_000, 290_000
"""Nearly as many messages, and token ids, as the limits allow: these are not refused by their number."""
MESSAGE_OF = {path: b'{"role": "user", "content": "x"}' for path in ITEMS if path != "/v1/completions"}
PART = {
    "/v1/chat/completions": b'{"type": "text", "text": "x"}',
    "/v1/responses": b'{"type": "input_text", "text": "x"}',
    "/v1/messages": b'{"type": "text", "text": "x"}',
}
TOOL = {
    "/v1/chat/completions": b'{"type": "function", "function": {"name": "f%d"}}',
    "/v1/responses": b'{"type": "function", "name": "f%d"}',
    "/v1/messages": b'{"name": "f%d", "input_schema": {}}',
}


def most(before: bytes, item: bytes, after: bytes, count: int, size: int) -> bytes:
    """A request with so many items, where they are that small."""
    listed = b",".join(item % i if b"%d" in item else item for i in range(min(count, (size - 200) // (len(item) + 5))))
    return b'{"model": "policy", ' + before + b"[" + listed + b"]" + after + b"}"


def near_limits(path: str) -> Iterator[tuple[str, Shape]]:
    """Requests that are within every limit, and as much work as that allows."""
    if path == "/v1/completions":
        yield "most token ids", lambda path, size: most(ITEMS[path], b"7", b"", MOST_VALUES, size)
    if path in MESSAGE_OF:
        yield "most messages", lambda path, size: most(ITEMS[path], MESSAGE_OF[path], b"", MOST_ITEMS, size)
    if path in PART:
        before = ITEMS.get(path, b"") + b'[{"role": "user", "content": '
        yield "most parts", lambda path, size: most(before, PART[path], b"}]", MOST_ITEMS, size)
        asked = HELLO[path] + b', "tools": '
        yield "most tools", lambda path, size: most(asked, TOOL[path], b"", MOST_ITEMS // 2, size)


def shapes_of(path: str) -> Iterator[tuple[str, Shape]]:
    """The bodies that are sent to a route, by name."""
    yield from SHAPES.items()
    yield from near_limits(path)
    if path in SCHEMA:
        yield from SCHEMAS.items()
        for name, shape in SCHEMAS.items():
            yield f"{name}, {NEAR // 1000} kB", lambda path, size, shape=shape: shape(path, min(size, NEAR))  # type: ignore[misc]
