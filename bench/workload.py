"""The one RL step that every contender of `bench.step` carries out, and what each reports of it.

A step is `num_prompts` questions x `repeats` completions of exactly `new_tokens` tokens each, a reward, one optimiser
step. End tokens are ordinary tokens here, for every contender, so that all of them sample and learn the same number of
tokens from the untruncated distribution.
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from bench.machine import peak_memory


@dataclass(frozen=True, slots=True)
class Workload:
    """The measured workload."""

    model: str = "smollm2-135m"
    num_prompts: int = 8
    repeats: int = 8
    new_tokens: int = 12
    steps: int = 3
    warmup: int = 1
    threads: int = 2
    lr: float = 1e-6
    seed: int = 0

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps

    def questions(self) -> list[str]:
        """The questions of all steps in order, `num_prompts` a step: the additions of `agentjet demo`."""
        rng = random.Random(self.seed)
        pairs = [(rng.randrange(50), rng.randrange(50)) for _ in range(self.num_prompts * self.total_steps)]
        return [f"What is {a} + {b}? Reply with only the number." for a, b in pairs]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step, in seconds: `sampling` from questions to scored completions, `learning` from there to new weights."""

    sampling: float
    learning: float
    prompt_tokens: int
    sampled_tokens: int


def reward(text: str) -> float:
    """Share of digits in a completion: fixed, cheap, and different within a group from the first step on."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def report(workload: Workload, steps: list[StepTime], device: str) -> dict[str, Any]:
    """The output of a contender. Peak memory is that of the GPU if it computes on one, else of the process."""
    counted = steps[workload.warmup :]
    return {
        "step_s": statistics.median(s.sampling + s.learning for s in counted),
        "sampling_s": statistics.median(s.sampling for s in counted),
        "learning_s": statistics.median(s.learning for s in counted),
        "prompt_tokens": statistics.median(s.prompt_tokens for s in counted),
        "sampled_tokens": statistics.median(s.sampled_tokens for s in counted),
        "steps_s": [round(s.sampling + s.learning, 3) for s in counted],
        "peak_mb": peak_memory() / 2**20,
        "device": device,
    }
