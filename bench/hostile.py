"""The cost of one hostile request for all other clients: `python -m bench.hostile`.

A real gateway process receives requests as large as `server.max_body_mb` allows, one after the other: empty objects,
numbers, keys, levels, texts, escapes, schemas (`cases/hostile.json`). They go to every inference route and to control
routes, without a key and with one. Two figures of each:

* **stall**: the longest stop of the server's event loop, in CPU seconds of its process, so that a busy machine does
  not count;
* **memory**: the growth of the server's memory since its start, as a multiple of the body.

Prints a table, then one JSON object as the last line. The exit code is 1 if a limit is exceeded: 0.05 s without a key,
0.5 s with one, 20 times the body.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import CASES, bounded, missed_bounds, report, started
from bench.scripted import Settings
from bench.wire import TIMEOUT, ask

MEGABYTES = 32
LIMITS = {"stall_no_key_s": 0.05, "stall_key_s": 0.5, "memory_ratio": 20.0, "let_in_without_key": 0}
CASE = json.loads((CASES / "hostile.json").read_text(encoding="utf-8"))
ANSWERED_BEFORE_BODY = ("empty objects", "text")  # Shapes that are sent without a key: none is looked at
CONTEXT_LENGTH = 131_072  # Large enough for long texts
NEAR = 120_000  # Bytes of a schema that stays within the limits: small beside the body, and the more is done with it
MOST_ITEMS, MOST_VALUES = 49_000, 290_000  # Messages, and token ids: nearly as many as the limits allow
START = '{"model": "policy", '
Shape = Callable[[str, int], bytes]  # From a path and a size in bytes to a body


# ---- the bodies ------------------------------------------------------------------------------------------------------


def filled(before: str, unit: str, after: str, size: int) -> bytes:
    """`before`, as many units as fit into `size` bytes in all, `after`; the last unit's comma is left out."""
    one = unit.encode()
    room = size - len(before.encode()) - len(after.encode())
    return before.encode() + (one * (room // len(one))).removesuffix(b",") + after.encode()


def numbered(before: str, unit: str, after: str, size: int) -> bytes:
    """The same of units that have a number in them, each another one."""
    room = size - len(before) - len(after)
    count = room // len(unit % 10**8)
    return (before + "".join(unit % (10**8 + i) for i in range(count)).removesuffix(",") + after).encode()


def of_shape(shape: list[str], path: str, size: int) -> bytes:
    """The body of a shape of `CASE`: its kind, and the texts that it is made of."""
    kind, *texts = shape
    if kind == "items":  # A list of items where the route has one
        return filled(START + CASE["items"].get(path, '"metrics": ') + "[", f"{texts[0]},", "]}", size)
    if kind == "text":  # One long text, in which another one is repeated
        before, after = (START + CASE["message"].get(path, '"task_id": %s') + "}").split("%s")
        return filled(f'{before}"', texts[0], f'"{after}', size)
    if kind == "bytes":
        return b"\xff" * size
    return (numbered if kind == "numbered" else filled)(*texts, size)


def schema(texts: list[str], most: int, path: str, size: int) -> bytes:
    """A small question whose answer is to follow a large schema, of at most so many bytes."""
    start, end = (START + CASE["message"][path] % '"hello"' + ", " + CASE["schema"][path] + "}").split("%s")
    return numbered(start + texts[0], texts[1], texts[2] + end, min(size, most))


def listed(before: str, item: str, after: str, most: int, path: str, size: int) -> bytes:
    """A request with so many items, where they are that small: within every limit, and as much work as that allows."""
    count = min(most, (size - 200) // (len(item) + 5))
    items = ",".join(item % i if "%d" in item else item for i in range(count))
    return f"{START}{before}[{items}]{after}}}".encode()


def shapes_of(path: str) -> Iterator[tuple[str, Shape]]:
    """The bodies that are sent to a route, by name."""
    for name, shape in CASE["shapes"].items():
        yield name, partial(of_shape, shape)
    if path == "/v1/completions":
        yield "most token ids", partial(listed, CASE["items"][path], "7", "", MOST_VALUES)
    elif path in CASE["items"]:
        message = '{"role": "user", "content": "x"}'
        yield "most messages", partial(listed, CASE["items"][path], message, "", MOST_ITEMS)
    if path in CASE["part"]:
        before = CASE["items"][path] + '[{"role": "user", "content": '
        yield "most parts", partial(listed, before, CASE["part"][path], "}]", MOST_ITEMS)
        tools = CASE["message"][path] % '"hello"' + ', "tools": '
        yield "most tools", partial(listed, tools, CASE["tool"][path], "", MOST_ITEMS // 2)
    if path in CASE["schema"]:
        for name, texts in CASE["schemas"].items():
            yield name, partial(schema, texts, 2**40)
            yield f"{name}, {NEAR // 1000} kB", partial(schema, texts, NEAR)


# ---- the attacks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attack:
    """One request. `token` is empty without a key; `route` is what the shape is made for, if another than `path`."""

    method: str
    path: str
    shape: str
    build: Shape
    token: str = ""
    route: str = ""


@dataclass(frozen=True, slots=True)
class Damage:
    """The cost of one attack."""

    attack: Attack
    status: int  # 0 where the server hung up without an answer
    stall_s: float
    memory_ratio: float


class Server:
    """A gateway that is up."""

    def __init__(self, url: str, data_dir: Path, megabytes: int) -> None:
        self._url = url
        self._tokens = {name: (data_dir / name).read_text().strip() for name in ("token", "admin-token")}
        self._size = megabytes * 2**20
        self.watched()
        self._at_start = self.watched()["rss_mb"]

    def watched(self) -> dict[str, float]:
        found: dict[str, float] = ask("GET", f"{self._url}/counters")
        return found

    def attacks(self) -> Iterator[Attack]:
        """All attacks. Each attack with a key has a separate episode, which it may end."""
        early = {name: partial(of_shape, CASE["shapes"][name]) for name in ANSWERED_BEFORE_BODY}
        for path in CASE["items"]:
            for shape, build in early.items():
                yield Attack("POST", path, shape, build)
                yield Attack("POST", f"/k/no-key{path}", shape, build, route=path)
            for shape, build in shapes_of(path):
                yield Attack("POST", path, shape, build, self._episode()["api_key"])
        for method, path, who in CASE["control"]:
            for shape, build in early.items():
                yield Attack(method, path.format(episode="ep000001"), shape, build)
            for shape, build in shapes_of(path):
                episode = self._episode()
                token = {"client": self._tokens["token"], "admin": self._tokens["admin-token"]}
                own = path.format(episode=episode["episode_id"])
                yield Attack(method, own, shape, build, token.get(who, episode["api_key"]))

    def _episode(self) -> Any:
        return ask("POST", f"{self._url}/swarm/v1/episodes", self._tokens["token"], {"task_id": "t", "mode": "eval"})

    def suffer(self, attack: Attack) -> Damage:
        """Sends it, and measures what it did."""
        body = attack.build(attack.route or attack.path, self._size)
        self.watched()
        status = self._send(attack, body)
        watched = self.watched()
        rise = max(0.0, watched["highest_mb"] - self._at_start) * 2**20
        return Damage(attack, status, watched["stall_s"], rise / self._size)

    def _send(self, attack: Attack, body: bytes) -> int:
        host, _, port = self._url.removeprefix("http://").partition(":")
        bearer = f"Authorization: Bearer {attack.token}\r\n" if attack.token else ""
        head = (
            f"{attack.method} {attack.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{bearer}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        answer = b""
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection, suppress(ConnectionError):
            with suppress(ConnectionError):
                connection.sendall(head.encode() + body)
            while b"\r\n\r\n" not in answer and (piece := connection.recv(65536)):
                answer += piece
        return int(answer.split(b" ", 2)[1]) if answer else 0


def measure(megabytes: int, folder: Path, console: Console) -> list[Damage]:
    """Measures every attack on a fresh server."""
    data_dir, found = folder / "data", []
    server = {"max_body_mb": megabytes}
    settings = Settings(
        str(data_dir), context_length=CONTEXT_LENGTH, job={"max_episode_seconds": 7200}, server=server, watches=True
    )
    with started(settings.command(), folder / "serve.log") as url:
        gateway = Server(url, data_dir, megabytes)
        for attack in gateway.attacks():
            found.append(damage := gateway.suffer(attack))
            what = f"{attack.method} {attack.path[:40]} {attack.shape}{'' if attack.token else ', no key'}"
            console.print(f"{damage.status} {damage.stall_s:.3f} s {damage.memory_ratio:5.1f} x  {what}")
    return found


def summarise(found: list[Damage]) -> dict[str, Any]:
    """The worst of each, and where it was."""
    no_key = max((d for d in found if not d.attack.token), key=lambda d: d.stall_s)
    key = max((d for d in found if d.attack.token), key=lambda d: d.stall_s)
    memory = max(found, key=lambda d: d.memory_ratio)
    return {
        "stall_no_key_s": round(no_key.stall_s, 4),
        "stall_key_s": round(key.stall_s, 4),
        "memory_ratio": round(memory.memory_ratio, 2),
        "slowest": f"{key.attack.path} {key.attack.shape}",
        "largest": f"{memory.attack.path} {memory.attack.shape}",
        "requests": len(found),
        "let_in_without_key": sum(d.status != 401 for d in found if not d.attack.token),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of a body, and server.max_body_mb")
    parser.add_argument("--folder", type=Path, help="where the journal is written")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(given.megabytes, Path(folder), Console(stderr=True))
    verdict = summarise(found)
    report("hostile", {**verdict, "megabytes": given.megabytes}, bounded(verdict, {}, LIMITS))
    return int(bool(missed_bounds(verdict, {}, LIMITS)))


if __name__ == "__main__":
    raise SystemExit(main())
