"""Rewards and weights of a seeded run, to compare two versions of the code: `python -m bench.seeded`, in each checkout.

Six batches of a tiny model, one episode at a time: equal code gives equal bits on one machine. Prints one JSON object.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import httpx

from agentjet import Task
from agentjet.cli.serve import ChildServer
from agentjet.client import Episode
from agentjet.client.threads import raise_on_signals
from tests.tiny import make_model

SETTINGS = """
[model]
device = "cpu"
dtype = "float32"
threads = 1
[job]
batch_size = 2
group_size = 4
max_tokens = 24
checkpoint_every = 0
seed = 7
[job.optimizer]
lr = 1e-2
"""
TASKS = [Task(f"t{number}") for number in range(4)]
STEPS, CALLS = 6, 2


def agent(task: Task, episode: Episode) -> float:
    """The share of letters in its answers."""
    messages = [{"role": "user", "content": f"Say something about {task.id}"}]
    letters = 0
    with httpx.Client(trust_env=False, timeout=60) as http:
        for _ in range(CALLS):
            answer = http.post(
                f"{episode.base_url}/chat/completions",
                json={"model": episode.model, "messages": messages},
                headers={"Authorization": f"Bearer {episode.api_key}"},
            )
            message = answer.raise_for_status().json()["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "Go on."}]
            letters += sum(sign.isalpha() for sign in message["content"] or "")
    return letters / (CALLS * 24)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, raise_on_signals():
        folder = Path(name)
        (folder / "settings.toml").write_text(SETTINGS)
        model = f"model.name={json.dumps(str(make_model(folder / 'model')))}"
        with ChildServer(folder / "settings.toml", [model], folder / "data") as child, child.connect() as swarm:
            report = swarm.train(agent, TASKS, steps=STEPS, concurrency=1, seed=3, progress=False)
            swarm.checkpoint()
        weights = next((folder / "data").rglob(f"step_{STEPS:06d}/policy/model.safetensors")).read_bytes()
    print(
        json.dumps(
            {
                "bench": "seeded",
                "rewards": [step.metrics["reward/mean"] for step in report.steps],
                "weights_sha256": hashlib.sha256(weights).hexdigest(),
            }
        )
    )


if __name__ == "__main__":
    main()
