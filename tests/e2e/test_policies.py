"""Two runs of one real server train at once, one of them two policies in shared episodes. The server is killed in the
middle and started again: no finished episode is lost, all policies learn, and rewards are those that the agents gave.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from agentjet import Episode, Swarm, Task
from agentjet.client import Retry, TrainReport
from tests.e2e.server import Server
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

STEPS = 3
POLICIES = ("digits", "letters")
TASKS = [Task(f"t{number}") for number in range(8)]
SETTINGS = "[policies.digits]\n[policies.letters]\n"
JOB = {"batch_size": 2, "group_size": 2, "max_tokens": 8, "checkpoint_every": 0}
LLM = openai.OpenAI(
    base_url="http://127.0.0.1", api_key="-", max_retries=8, http_client=openai.DefaultHttpxClient(trust_env=False)
)


def said(episode: Episode, model: str, task: Task) -> str:
    llm = LLM.with_options(base_url=episode.base_url, api_key=episode.api_key)
    completion = llm.chat.completions.create(model=model, messages=[{"role": "user", "content": task.id}])
    return completion.choices[0].message.content or ""


def share(text: str, of_kind: str) -> float:
    kinds = {"digits": str.isdigit, "letters": str.isalpha}
    return sum(map(kinds[of_kind], text)) / max(1, len(text))


class Pair:
    """The default run with two policies, and the run `other` with one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, make_model(folder / "model")
        self.settings = folder / "job.toml"
        self.settings.write_text(SETTINGS)
        self.rewards: dict[str, Mapping[str, float]] = {}
        """By episode of the default run, those that its agent returned."""
        self.others: dict[str, float] = {}
        self.killed_at = STEPS
        """The version of the default run when its server was killed."""
        self.server = self.start(0)

    def start(self, port: int) -> Server:
        options = ("--config", str(self.settings), "--port", str(port))
        return Server(self.model, self.folder / "data", *options)

    def by_policy(self, task: Task, episode: Episode) -> dict[str, float]:
        assert (episode.policies, episode.model) == (POLICIES, "")
        rewards = {policy: share(said(episode, policy, task), policy) for policy in POLICIES}
        self.rewards[episode.id] = rewards
        return rewards

    def alone(self, task: Task, episode: Episode) -> float:
        self.others[episode.id] = share(said(episode, episode.model, task), "letters")
        return self.others[episode.id]

    def kill_and_restart(self) -> None:
        self.server.until(lambda: len(self.rewards) >= 6 and len(self.others) >= 3)
        self.killed_at = self.server.get("/status")["policy_version"]
        port = int(self.server.url.rpartition(":")[2])
        self.server.kill()
        self.server = self.start(port)


def test_two_runs_at_once_and_a_killed_server(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    admin = (tmp_path / "data" / "admin-token").read_text().strip()
    try:
        with LLM, Swarm(pair.server.url, admin, retry=Retry()) as swarm, ThreadPoolExecutor() as pool:
            swarm.start_run("other", job=JOB)
            with swarm.of_run("other") as other:
                options: dict[str, Any] = {"steps": STEPS, "concurrency": 4, "seed": 1, "progress": False}
                runs = [
                    pool.submit(swarm.train, pair.by_policy, TASKS, **options),
                    pool.submit(other.train, pair.alone, TASKS, **options),
                ]
                killer = threading.Thread(target=pair.kill_and_restart)
                killer.start()
                reports = [run.result() for run in runs]
                killer.join()
                check(swarm, reports[0], {name: (sum(r.values()) / 2, dict(r)) for name, r in pair.rewards.items()})
                check(other, reports[1], {name: (reward, {}) for name, reward in pair.others.items()})
            assert pair.killed_at < STEPS
            for policy in POLICIES:
                assert max(step.metrics[f"{policy}/optim/grad_norm"] for step in reports[0].steps) > 0
            assert max(step.metrics["optim/grad_norm"] for step in reports[1].steps) > 0
            saved = Path(swarm.checkpoint().path)
            assert {path.name for path in saved.iterdir() if path.is_dir()} == set(POLICIES)
            assert [(run.name, run.is_open) for run in swarm.runs()] == [("default", True), ("other", True)]
            assert not swarm.end_run("other").is_open
    finally:
        pair.server.__exit__()


def check(swarm: Swarm, report: TrainReport, rewards: Mapping[str, tuple[float, Mapping[str, float]]]) -> None:
    """Every episode that finished has the rewards that its agent returned, and is trained or waits."""
    finished = {view.episode_id: view for view in swarm.episodes(500).episodes if view.status == "finished"}
    assert len(finished) == len(report.finished) >= STEPS * 4
    for name, view in finished.items():
        assert (view.reward, view.by_role) == (pytest.approx(rewards[name][0]), rewards[name][1])
    assert len(report.steps) == STEPS
    counts = swarm.status().episodes
    assert counts["finished"] == counts["trained"] + counts["waiting"] and counts["dropped"] == 0
