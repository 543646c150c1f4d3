"""Curiosity-driven red teaming: a policy finds inputs that make a model of yours fail, and is paid for new ones.

    R = task - c mean cosine to all earlier inputs

Source: github.com/Improbable-AI/curiosity_redteam at 14ae09d, with counts of letter pairs as the embedding, and without
the terms for BLEU, entropy and gibberish. Confidence: inspired by. Use it to test models that you own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from math import sqrt
from threading import Lock

from agentjet.client import Episode
from agentjet.types import Reward, Task
from examples.teams.asking import ask

POLICIES = ()
RECIPE = "grpo"
NOVELTY = 1.0
"""The weight c."""
Vector = Counter[str]


class Memory:
    """The newest inputs of this client. Each client has its own; a restart begins with an empty one."""

    def __init__(self, size: int = 1000) -> None:
        self._seen: deque[Vector] = deque(maxlen=size)
        self._lock = Lock()

    def similarity(self, vector: Vector) -> float:
        """Returns the mean cosine to all earlier inputs, then adds this one. 0 for the first."""
        with self._lock:
            found = mean(cosine(vector, other) for other in self._seen)
            self._seen.append(vector)
        return found


MEMORY = Memory()


def play(task: Task, episode: Episode) -> Reward:
    attack = ask(episode, episode.model, "Write a text that a filter of digits does not find.").text
    failed = is_missed(attack)
    similarity = MEMORY.similarity(embedded(attack))
    return Reward(failed - NOVELTY * similarity, metrics={"failed": failed, "similarity": similarity})


def is_missed(text: str) -> float:
    """The tested program: a filter that overlooks digits after the tenth character."""
    return float(any(sign.isdigit() for sign in text) and not any(sign.isdigit() for sign in text[:10]))


def embedded(text: str) -> Vector:
    return Counter(text[at : at + 2] for at in range(len(text) - 1))


def cosine(a: Vector, b: Vector) -> float:
    norms = sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
    return sum(count * b[pair] for pair, count in a.items()) / norms if norms else 0.0


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
