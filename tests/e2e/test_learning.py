"""A real server learns from a real agent, and learns nothing from noise.

The tiny model's answers are random letters at first; the agent rewards the share of digits in them. Some batches
later the share must be far beyond what batches of that size differ by chance. With the same rewards dealt at
random among the episodes it must not rise.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import openai
import pytest

from agentjet import Swarm, Task
from tests.e2e.server import Server
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 24
SETTINGS = {
    "job__batch_size": 2,
    "job__group_size": 8,
    "job__max_tokens": 12,
    "job__optimizer__lr": 1e-2,
    "sampler__cache_tokens": 16384,
}


def share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


def train(folder: Path, *, shuffled: bool) -> list[float]:
    """Mean share of digits of each batch's episodes, in the order they were begun."""
    shares: list[float] = []
    noise = random.Random(0)
    model = make_model(folder / "model")
    with (
        Server(model, folder / "data", **SETTINGS) as server,
        openai.OpenAI(base_url=server.url, api_key="-", http_client=openai.DefaultHttpxClient(trust_env=False)) as llm,
    ):

        def agent(task: Task, episode: object) -> float:
            client = llm.with_options(base_url=episode.base_url, api_key=episode.api_key)  # type: ignore[attr-defined]
            answer = client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": f"Say digits. {task.id}"}]
            )
            share = share_of_digits(answer.choices[0].message.content or "")
            shares.append(share)
            return noise.choice(shares) if shuffled else share

        with Swarm(server.url, token=server.token) as swarm:
            tasks = [Task(f"t{i}") for i in range(8)]
            report = swarm.train(agent, tasks, steps=STEPS, concurrency=16, seed=3, progress=False)
        assert len(report.steps) == STEPS
        assert report.num_aborted == 0
    return [statistics.mean(shares[i * 16 : (i + 1) * 16]) for i in range(STEPS)]


def test_the_reward_rises_well_outside_noise(tmp_path: Path) -> None:
    means = train(tmp_path, shuffled=False)
    start, end = means[:4], means[-4:]
    noise = statistics.stdev(start) + 0.01
    assert statistics.mean(end) > statistics.mean(start) + 5 * noise, means
    assert statistics.mean(end) > 3 * statistics.mean(start), means


@pytest.mark.thorough
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    means = train(tmp_path, shuffled=True)
    assert statistics.mean(means[-4:]) < statistics.mean(means[:4]) + 0.1, means
