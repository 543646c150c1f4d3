"""The cost of one hostile request for all other clients: `python -m bench.hostile`.

A real gateway process receives requests as large as `server.max_body_mb` allows, one after the other: empty objects,
numbers, keys, levels, texts, escapes, schemas. They go to every inference route and to control routes, without a key
and with one. Two figures of each:

* **stall**: the longest stop of the server's event loop, in CPU seconds of its process, so that a busy machine does
  not count;
* **memory**: the growth of the server's memory since its start, as a multiple of the body.

Prints a table, then one JSON object as the last line. The exit code is 1 if a limit is exceeded: 0.05 s without a key,
0.5 s with one, 20 times the body.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from rich.console import Console
from rich.table import Table

from bench.gatewaying.processes import started
from bench.hostility.bodies import CONTROL, ITEMS, SHAPES, Shape, shapes_of

MEGABYTES = 32
LIMITS = {"stall_no_key_s": 0.05, "stall_key_s": 0.5, "memory_ratio": 20.0}
ANSWERED_BEFORE_BODY = ("empty objects", "text")
"""Shapes that are sent without a key: none is looked at."""
TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Attack:
    """One request. `token` is empty without a key."""

    method: str
    path: str
    shape: str
    build: Shape
    token: str = ""
    route: str = ""
    """The route that the shape is made for; empty: `path`."""


@dataclass(frozen=True, slots=True)
class Damage:
    """The cost of one attack."""

    attack: Attack
    status: int
    """0 where the server hung up without an answer."""
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
        return self.ask("GET", "/watched")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A request that is well."""
        headers = {"Authorization": f"Bearer {self._tokens['token']}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self._url + path, data, headers, method=method), timeout=TIMEOUT) as answer:
            return json.load(answer)

    def attacks(self) -> Iterator[Attack]:
        """All attacks. Each attack with a key has a separate episode, which it may end."""
        for path in ITEMS:
            for shape in ANSWERED_BEFORE_BODY:
                yield Attack("POST", path, shape, SHAPES[shape])
                yield Attack("POST", f"/k/no-key{path}", shape, SHAPES[shape], route=path)
            for shape, build in shapes_of(path):
                yield Attack("POST", path, shape, build, self._episode()["api_key"])
        for method, path, who in CONTROL:
            for shape in ANSWERED_BEFORE_BODY:
                yield Attack(method, path.format(episode="ep000001"), shape, SHAPES[shape])
            for shape, build in SHAPES.items():
                episode = self._episode()
                token = {"client": self._tokens["token"], "admin": self._tokens["admin-token"]}
                own = path.format(episode=episode["episode_id"])
                yield Attack(method, own, shape, build, token.get(who, episode["api_key"]))

    def _episode(self) -> Any:
        return self.ask("POST", "/swarm/v1/episodes", {"task_id": "t", "mode": "eval"})

    def suffer(self, attack: Attack) -> Damage:
        """Send it, and see what it did."""
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
    with tempfile.TemporaryDirectory(dir=folder) as made:
        data_dir = Path(made) / "data"
        command = [sys.executable, "-m", "bench.hostility.serve"]
        command += ["--data-dir", str(data_dir), "--megabytes", str(megabytes)]
        with started(command, Path(made) / "serve.log") as url:
            server = Server(url, data_dir, megabytes)
            found = []
            for attack in server.attacks():
                found.append(server.suffer(attack))
                damage = found[-1]
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


def table(found: list[Damage]) -> Table:
    """The worst of each shape."""
    grid = Table("shape", "key", "requests", "answers", "stall", "memory")
    for shape, has_key in dict.fromkeys((d.attack.shape, bool(d.attack.token)) for d in found):
        same = [d for d in found if (d.attack.shape, bool(d.attack.token)) == (shape, has_key)]
        answers = " ".join(str(status) for status in sorted({d.status for d in same}))
        worst = max(d.stall_s for d in same), max(d.memory_ratio for d in same)
        row = (f"{worst[0]:.3f} s", f"{worst[1]:.1f} x")
        grid.add_row(shape, "yes" if has_key else "no", str(len(same)), answers, *row)
    return grid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of a body, and server.max_body_mb")
    parser.add_argument("--folder", type=Path, help="where the journal is written")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(given.megabytes, Path(folder), Console(stderr=True))
    Console(width=110).print(table(found))
    verdict = summarise(found)
    print(
        json.dumps(
            {
                "bench": "hostile",
                **verdict,
                "megabytes": given.megabytes,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            }
        )
    )
    return int(any(verdict[name] > most for name, most in LIMITS.items()) or verdict["let_in_without_key"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
