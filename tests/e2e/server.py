"""`agentjet serve` as a real process on a tiny model, and what its clients and agents do, over HTTP."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
READY = "agentjet status"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
PATIENCE = 120.0

SETTINGS = {
    "model.device": "cpu",
    "model.dtype": "float32",
    "model.threads": 1,
    "job.batch_size": 2,
    "job.group_size": 2,
    "job.max_tokens": 8,
    "job.checkpoint_every": 0,
    "sampler.cache_tokens": 4096,
}


def serve_command(model: Path | str, data_dir: Path, *options: str, **settings: Any) -> list[str]:
    """The command line of a server on a free port; `settings` are `section__setting=value`."""
    chosen = {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}
    sets = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    port = [] if "--port" in options else ["--port", "0"]
    where = ["--model", str(model), "--data-dir", str(data_dir), *port]
    return [sys.executable, "-m", "agentjet.cli", "serve", *where, *sets, *options]


def environment(*paths: Path) -> dict[str, str]:
    """The environment of a server; `paths` are further folders with modules."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENTJET_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", *paths)))}


class Server:
    """A running server. `with` ends it by Ctrl-C, or by force when it has not ended already."""

    def __init__(self, model: Path, data_dir: Path, *options: str, paths: Sequence[Path] = (), **settings: Any) -> None:
        """`options` go to the command line as they are; `paths` are further folders with modules."""
        self.data_dir = data_dir
        self.log = data_dir.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                serve_command(model, data_dir, *options, **settings),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(*paths),
            )
        try:
            self.wait_for(READY)
            self.url = ADDRESS.findall(self.output)[0]
            self.token = (data_dir / "token").read_text().strip()
            self.http = httpx.Client(
                base_url=self.url + "/swarm/v1", headers={"Authorization": f"Bearer {self.token}"}, timeout=60
            )
        except BaseException:
            self.process.kill()
            raise

    @property
    def folder(self) -> Path:
        """The folder of the default run."""
        return self.data_dir / "runs" / "default"

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        """Until the server has printed `text`."""
        self.until(lambda: text in self.output)

    def until(self, predicate: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not predicate():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"it took too long:\n{self.output}"
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """Process ids of the children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.http.close()
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """As a power cut would."""
        self.http.close()
        self.process.kill()
        self.process.wait(PATIENCE)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    # ---- what clients and agents do -------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        return self.http.post(path, json=body).raise_for_status().json()

    def begin(self, **body: Any) -> dict[str, Any]:
        begun: dict[str, Any] = self.post("/episodes", **{"task_id": "t", "wait": 30, **body})
        return begun

    def agent(self, episode: dict[str, Any]) -> OpenAI:
        return OpenAI(base_url=episode["base_url"], api_key=episode["api_key"], max_retries=0, timeout=PATIENCE)

    def ask(self, episode: dict[str, Any], text: str, **options: Any) -> Any:
        with self.agent(episode) as client:
            return client.chat.completions.create(
                model=episode["model"], messages=[{"role": "user", "content": text}], **options
            )

    def exported(self) -> dict[str, Any]:
        """The weights of the policy, by name. The folder is removed: the server would not write it a second time."""
        folder = Path(self.post("/exports")["path"])
        weights = dict(load_file(folder / "model.safetensors"))
        shutil.rmtree(folder)
        return weights

    def batch(self) -> None:
        """Fill a batch and wait until it is learned. Members of a group get the rewards 0 and 1."""
        version = self.get("/status")["policy_version"]
        self.fill_batch()
        self.until(lambda: self.get("/status")["policy_version"] == version + 1)

    def fill_batch(self) -> None:
        """Finish the episodes of a batch, as in `batch`."""
        for member in range(4):
            episode = self.begin(task_id=f"t{member // 2}")
            self.ask(episode, f"hello {member // 2}")
            self.post(f"/episodes/{episode['episode_id']}/finish", reward=member % 2)


def are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two policies have the same weights, bit by bit."""
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
