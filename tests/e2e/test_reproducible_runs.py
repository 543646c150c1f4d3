"""`train(reproducible=True)` against a real server and a real model, over many batches.

1. With `concurrency = 1` two runs have the same batches and, after each batch, the same weights.
2. With more, agents of different speed change neither groups nor seeds nor the order of a batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from agentjet import Swarm, Task
from agentjet.swarm import Journal
from tests.e2e.server import Server
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]

STEPS = 48
SETTINGS = {
    "job__batch_size": 3,
    "job__group_size": 4,
    "job__max_tokens": 12,
    "job__max_staleness": 0,
    "job__optimizer__lr": 1e-2,
    "job__seed": 5,
}
Members = list[tuple[str, int | None, float | None]]


def share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


def train(model: Path, data: Path, concurrency: int) -> tuple[list[dict[str, int]], list[Members]]:
    """The fingerprint of the weights after each batch, and task, seed and reward of its members in their order."""
    with (
        Server(model, data, **SETTINGS) as server,
        openai.OpenAI(base_url=server.url, api_key="-", http_client=openai.DefaultHttpxClient(trust_env=False)) as llm,
    ):

        def agent(task: Task, episode: object) -> float:
            client = llm.with_options(base_url=episode.base_url, api_key=episode.api_key)  # type: ignore[attr-defined]
            time.sleep(random.random() * 0.02)
            answer = client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": f"Say digits. {task.id}"}]
            )
            return share_of_digits(answer.choices[0].message.content or "")

        with Swarm(server.url, token=server.token) as swarm:
            tasks = [Task(f"t{number}") for number in range(7)]
            report = swarm.train(
                agent, tasks, steps=STEPS, concurrency=concurrency, seed=3, progress=False, reproducible=True
            )
        assert len(report.steps) == STEPS and report.num_aborted == 0
    with closing(Journal.open_read_only(data / "runs" / "default" / "journal.sqlite")) as journal:
        batches = journal.batches(0)
        return [journal.fingerprints(batch.id) for batch in batches], [
            list(members(journal, batch.episode_ids)) for batch in batches
        ]


def members(journal: Journal, ids: tuple[str, ...]) -> Iterator[tuple[str, int | None, float | None]]:
    for episode in map(journal.episode, ids):
        assert episode is not None
        yield episode.task_id, episode.seed, episode.reward


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    weights, played = zip(
        *(train(model, tmp_path / f"{n}", count) for n, count in enumerate((1, 1, 8, 8))), strict=True
    )
    assert len(weights[0]) == len(played[0]) == STEPS and all(weights[0])
    assert sum(before != after for before, after in pairwise(weights[0])) > STEPS / 2, "batches changed the weights"
    assert played[1] == played[0]
    assert weights[1] == weights[0]
    # Rewards may differ: they come from answers, which are equal up to rounding.
    order = [[[(task, seed) for task, seed, _ in batch] for batch in batches] for batches in played]
    assert order[2] == order[3] == order[0]
