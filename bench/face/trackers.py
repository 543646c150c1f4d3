"""`tracked_once`: the share of steps that a tracker has exactly once after 20 SIGKILLs of `agentjet track`.

A real process follows a server on a real socket. The server kills it after a random answer, and has more steps at each
start. Then the file is read back. `python -m bench.face.trackers` prints one JSON object.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KILLS, STEPS, METRICS, PAGE = 20, 500, 60, 5
LONGEST_LIFE = 14
"""Answers after which a process is killed, at most. Each process gets five answers before it writes."""
Points = list[tuple[int, str, float]]
"""Step, metric and value."""


class Server(ThreadingHTTPServer):
    """Answers as an AgentJet server does, with few steps at a time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ready = 0
        self.victim = 0
        """Process to kill after `answers_left` answers; 0 for none."""
        self.answers_left = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def body(self, path: str, query: dict[str, list[str]]) -> dict[str, Any]:
        if path.endswith("/job"):
            return {"revision": 1, "job": {"optimizer": {"lr": 1e-6}}}
        if path.endswith("/steps"):
            first = int(query["after"][0]) + 1
            versions = list(range(first, min(first + min(PAGE, int(query["limit"][0])), self.ready + 1)))
            names = [f"metric/{number}" for number in range(METRICS)]
            return {
                "versions": versions,
                "times": [1.7e9 + version for version in versions],
                "metrics": {name: [value(version, name) for version in versions] for name in names},
            }
        counts = dict.fromkeys(("policy_version", "batch_size", "group_size", "groups_complete", "groups_open"), 1)
        text = {"version": "0", "state": "sampling", "waiting_for": "", "model": "none"}
        rest = {"episodes": {}, "last_step": {}, "clients": {}, "calls_active": 0, "uptime": 1.0}
        return {**counts, **text, **rest, "policy_version": self.ready, "max_steps": STEPS}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A killed process resets its connection."""

    def answered(self) -> None:
        self.answers_left -= 1
        if self.victim and self.answers_left == 0:
            os.kill(self.victim, signal.SIGKILL)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        body = json.dumps(self.server.body(address.path, parse_qs(address.query))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.answered()

    def log_message(self, *arguments: Any) -> None: ...


def value(version: int, name: str) -> float:
    return version / 7 + len(name)


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def read_jsonl(path: Path) -> Points:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["step"], name, x) for row in rows for name, x in row.items() if name not in ("step", "time")]


def read_csv(path: Path) -> Points:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(int(row["step"]), n, float(x)) for row in rows for n, x in row.items() if n not in ("step", "time")]


def read_tensorboard(folder: Path) -> Points:
    from agentjet.trackers.sinks import tensorboard_events

    found = [event for file in folder.glob("*.tfevents.*") for event in tensorboard_events(file)]
    scalars = [(event.step, one) for event in found for one in event.summary.value if not one.HasField("tensor")]
    return [(step, one.tag, one.simple_value) for step, one in scalars]


def as_float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


READERS: dict[str, Callable[[Path], Points]] = {
    "jsonl": read_jsonl,
    "csv": read_csv,
    **({"tensorboard": read_tensorboard} if importlib.util.find_spec("tensorboardX") else {}),
}


def share_once(kind: str, folder: Path) -> float:
    """The share of steps that are there exactly once, with equal values. A surplus point counts as a missing step."""
    target, dice = folder / kind, random.Random(kind)
    command = [sys.executable, "-P", "-m", "agentjet.cli", "track"]
    with serving() as server:
        for kill in range(1, KILLS + 2):
            is_last = kill > KILLS
            server.ready = min(STEPS, STEPS * kill // KILLS)
            server.victim, server.answers_left = 0, 0 if is_last else dice.randint(1, LONGEST_LIFE)
            process = subprocess.Popen(
                [*command, server.url, "--to", f"{kind}:{target}", "--every", "0.1"], stdout=subprocess.DEVNULL
            )
            server.victim = 0 if is_last else process.pid
            code = process.wait()
            assert code == (0 if is_last else -signal.SIGKILL), f"{kind}: start {kill} ended with {code}"
    exact = as_float32 if kind == "tensorboard" else float
    wanted = {(step, f"metric/{n}") for step in range(1, STEPS + 1) for n in range(METRICS)}
    found = READERS[kind](target)
    times = Counter((step, name) for step, name, _ in found)
    right = {(step, name) for step, name, x in found if x == exact(value(step, name)) and times[step, name] == 1}
    wrong = {step for step, _ in wanted ^ right} | {step for (step, _), count in times.items() if count > 1}
    return 1 - len(wrong) / STEPS


def tracked_once() -> dict[str, Any]:
    """The smallest share of the kinds of sink that need no server, and the share of each."""
    with tempfile.TemporaryDirectory() as folder:
        found = {kind: share_once(kind, Path(folder)) for kind in READERS}
    return {"tracked_once": min(found.values()), "tracked_once_of": found}


if __name__ == "__main__":
    print(json.dumps(tracked_once()))
