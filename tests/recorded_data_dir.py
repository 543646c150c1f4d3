"""A data dir that an earlier AgentJet wrote, for tests that the present one opens it and goes on with it.

`recorded_data_dir.tar.xz` was recorded at c42d8fc6~1, with journal schema 14 before it got nullable columns. It has the
model, and a run whose server was killed while batch 3 was pending: a learned batch after the only checkpoint, rewards
of turns, an evaluation, and a group with one finished and one live member. To record it at another commit:

    git worktree add OLD COMMIT && cp tests/recorded_data_dir.py OLD/tests/
    cd OLD && PYTHONPATH=src:. python tests/recorded_data_dir.py
"""

from __future__ import annotations

import os
import signal
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).with_suffix(".tar.xz")
MODEL, DATA = Path("model"), Path("data")
"""Folders in the archive. The run's model is named by this relative path, so a server starts beside the two."""
SETTINGS: dict[str, Any] = {
    "model__lora__rank": 2,
    "job__checkpoint_every": 2,
    "job__keep_checkpoints": 2,
    "job__max_staleness": 1,
    "job__max_tokens": 6,
    "job__recipe__name": "dense_turn_credit",
}
"""Settings of the recorded server; those of the next one must not differ in the model."""
TURNS = {"": [1.0, 0.5], "judge": [0.25]}
"""Rewards of the calls that `play` makes."""


def unpack(folder: Path) -> Path:
    """Writes the archive's folders into `folder`. Returns the folder of the run."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / DATA / "runs" / "default"


def play(server: Any, episode: dict[str, Any]) -> None:
    """Two calls of one conversation, and one of another role."""
    messages: list[dict[str, Any]] = []
    with server.agent(episode) as client:
        for turn in range(2):
            messages.append({"role": "user", "content": f"turn {turn}: é"})
            answer = client.chat.completions.create(model=episode["model"], messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        judged = [{"role": "user", "content": "judge"}]
        client.chat.completions.create(model=f"{episode['model']}@judge", messages=judged)


def finish(server: Any, episode: dict[str, Any], reward: float) -> None:
    server.post(f"/episodes/{episode['episode_id']}/finish", reward=reward, by_turn=TURNS)


def group(server: Any, name: str) -> None:
    for member in range(2):
        episode = server.begin(task_id=name)
        play(server, episode)
        finish(server, episode, float(member))


def learn_batch(server: Any) -> None:
    version = server.get("/status")["policy_version"]
    for place in range(2):
        group(server, f"task {version}.{place}")
    server.until(lambda: server.get("/status")["policy_version"] == version + 1)


def record() -> None:
    from tests.e2e.server import Server
    from tests.tiny import make_model

    make_model(MODEL, layers=1, hidden=16)
    with Server(MODEL, DATA, **SETTINGS) as server:
        for _ in range(3):
            learn_batch(server)
        server.post("/evaluations", policy_version=2, score=0.25, num_tasks=1, num_episodes=1)
        waiting, live = server.begin(task_id="unfinished"), server.begin(task_id="unfinished")
        play(server, waiting)
        finish(server, waiting, 1.0)
        play(server, live)
        group(server, "task 3.0")
        last = [server.begin(task_id="task 3.1") for _ in range(2)]
        for episode in last:
            play(server, episode)
        workers = server.workers()
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # The batch is composed, and cannot be learned.
        for episode in last:
            finish(server, episode, 1.0)
        server.until(lambda: "batch 3" in server.get("/status")["waiting_for"])
        server.kill()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for folder in (MODEL, DATA / "runs"):
            archive.add(folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        record()
