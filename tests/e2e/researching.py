"""A study of a tiny model, and `agentjet research run` as a process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agentjet.research.models import Arm, Hypothesis, Study, Subject
from tests.e2e.server import PATIENCE, Server, environment
from tests.tiny import make_model

AGENT = """
import zlib
import httpx
from agentjet import Task

HTTP = httpx.Client(timeout=60, trust_env=False)

def agent(task, episode):
    body = {"model": episode.model, "messages": [{"role": "user", "content": task.id}]}
    key = {"Authorization": f"Bearer {episode.api_key}"}
    answer = HTTP.post(f"{episode.base_url}/chat/completions", json=body, headers=key).raise_for_status().json()
    text = answer["choices"][0]["message"]["content"] or ""
    return len(text) % 5 + zlib.crc32(f"{text}{task.id}".encode()) / 2**40  # no two score alike: each step learns

def broken(task, episode):
    raise OSError("the game's server is gone")

def tasks():
    return [Task(f"t{number}") for number in range(4)]

def held_out():
    return [Task(f"h{number}") for number in range(4)]
"""
STEPS = 3
LONG = 3 * PATIENCE


def make_subject(folder: Path) -> Subject:
    make_model(folder / "model")
    code = folder / "agent.py"
    code.write_text(AGENT)
    named = Subject(
        model=str(folder / "model"),
        agent=f"{code}:agent",
        tasks=f"{code}:tasks",
        held_out=f"{code}:held_out",
        settings={
            "model.device": "cpu",
            "model.dtype": "float32",
            "job.batch_size": 2,
            "job.group_size": 2,
            "job.max_tokens": 6,
            "job.checkpoint_every": 1,
            "sampler.cache_tokens": 4096,
        },
        steps=STEPS,
        evaluations=STEPS,
        concurrency=4,
    )
    return named.with_hashes()


def study_of(subject: Subject) -> Study:
    return Study(
        topic="does the rate matter?",
        metric="length of the answer modulo 5",
        sesoi=0.5,
        arms=(Arm("small", {"job.optimizer.lr": 1e-5}), Arm("large", {"job.optimizer.lr": 1e-2})),
        hypotheses=(Hypothesis("the large rate scores higher", "large", "small"),),
        budget=8.0,
        looks=(4,),
        subject=subject,
    )


class Researcher:
    """`agentjet research run` as a process."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.log_file = folder.with_suffix(".log")
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agentjet.cli", "research", "run", str(folder), *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def until(self, predicate: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not predicate():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def servers(self) -> list[int]:
        """Process ids of the servers it has."""
        return [pid for pid in children(self.process.pid) if "serve" in command_line(pid)]

    def is_training(self) -> bool:
        """Whether some run is in its middle: with a step, and without its last score."""
        return any(2 <= len(scores) <= STEPS for scores in map(scores_of, self.folder.glob("runs/*/record.json")))


def children(pid: int) -> list[int]:
    """Of any of its threads, and theirs."""
    found = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def scores_of(record: Path) -> dict[str, float]:
    scores: dict[str, float] = json.loads(record.read_text(encoding="utf-8"))["scorings"]
    return scores


def admin_of(server: Server) -> str:
    return (server.data_dir / "admin-token").read_text().strip()


def server_options(server: Server) -> tuple[str, ...]:
    return "--server", server.url, "--admin-token-file", str(server.data_dir / "admin-token")
