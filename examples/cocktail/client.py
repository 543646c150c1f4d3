"""One client of three: trains the server's policy on one task set, in the environment of its interpreter.

    AGENTJET_URL=... AGENTJET_TOKEN=... python -m examples.cocktail.client addition

The last line of its output is its result, as JSON; `shares` are the set's shares of each batch's groups. It uses only
those parts of OpenAI's SDK that already exist in its first major version.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import openai

from agentjet import Swarm
from agentjet.client import Episode
from agentjet.types import Task

Rule = Callable[[str, str], bool]
"""Takes the model's answer and the right one; returns True if the answer is right."""


@dataclass(frozen=True)
class TaskSet:
    """A task's `payload` is the question and the right answer. `seconds` is how long an episode's environment takes."""

    tasks: Callable[[], list[Task]]
    is_right: Rule
    seconds: float


def sums() -> list[Task]:
    """Sums of two numbers below 20; the answer is the equation."""
    return _equations("addition", lambda a, b: f"{a} + {b} = {a + b}")


def differences() -> list[Task]:
    """Differences of numbers below 20, none below 0; the answer is the equation."""
    return _equations("subtraction", lambda a, b: f"{max(a, b)} - {min(a, b)} = {abs(a - b)}")


def chain_sums() -> list[Task]:
    """Tasks of reasoning-gym, which only this client's environment has."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset("chain_sum", seed=7, size=400, max_terms=2, max_digits=1)
    return [
        Task(f"chain_sum/{i}", "reasoning", (entry["question"], entry["answer"])) for i, entry in enumerate(entries)
    ]


def _equations(task_set: str, equation: Callable[[int, int], str]) -> list[Task]:
    found = {equation(a, b) for a in range(20) for b in range(20)}
    question = "What is {}? Reply with only the equation."
    return [Task(text, task_set, (question.format(text.partition(" =")[0]), text)) for text in sorted(found)]


def is_same(said: str, answer: str) -> bool:
    return said.strip() == answer


def ends_with(said: str, answer: str) -> bool:
    return re.findall(r"-?\d+", said)[-1:] == [answer]


TASK_SETS = {
    "addition": TaskSet(sums, is_same, seconds=0.2),
    "subtraction": TaskSet(differences, is_same, seconds=0.2),
    "reasoning": TaskSet(chain_sums, ends_with, seconds=2.0),
}


class Agent:
    """Asks one question, in an environment that takes its time."""

    def __init__(self, task_set: TaskSet) -> None:
        self.task_set = task_set
        self._llm = openai.OpenAI(
            base_url="http://127.0.0.1",
            api_key="each episode has its own",
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def __call__(self, task: Task, episode: Episode) -> float:
        time.sleep(self.task_set.seconds)
        question, answer = task.payload
        llm = self._llm.with_options(base_url=episode.base_url, api_key=episode.api_key)
        completion = llm.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": question}])
        return float(self.task_set.is_right(completion.choices[0].message.content or "", answer))


def main(arguments: list[str] | None = None) -> None:
    """Train until the job ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task_set", choices=sorted(TASK_SETS))
    parser.add_argument("--together", action="store_true", help="say when ready, and begin when standard input ends")
    options = parser.parse_args(arguments)
    name, task_set = options.task_set, TASK_SETS[options.task_set]
    tasks = task_set.tasks()
    with Swarm(client_id=name) as swarm:
        status = swarm.status()
        if options.together:
            print("ready", flush=True)
            sys.stdin.read()
        report = swarm.train(
            Agent(task_set),
            tasks,
            steps=status.max_steps - status.policy_version,
            concurrency=status.batch_size * status.group_size,
            progress=False,
        )
    result = {
        "task_set": name,
        "openai": openai.__version__,
        "finished": len(report.finished),
        "failed": report.num_aborted + report.num_expired,
        "rewards": [step.metrics.get(f"reward/{name}/mean") for step in report.steps],
        "shares": [step.metrics.get(f"batch/share/{name}", 0.0) for step in report.steps],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
