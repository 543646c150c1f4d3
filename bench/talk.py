"""A game for `bench.environments`, in a module that a process imports quickly."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

from agentjet.environments import EnvironmentTask, Game, Observation

TURNS = 4


class Talk(Game):
    """A game of a few turns whose actions are any text. Of its episodes, a share crashes."""

    crashes: float = 0.0
    """Share of the episodes that crash."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        for number in range(16):
            yield EnvironmentTask(f"talk-{number}", {}, "train")

    def world(self, task: EnvironmentTask) -> Talking:
        return Talking(self.crashes)


class Talking:
    def __init__(self, crashes: float) -> None:
        self._left, self._crashes = TURNS, random.random() < crashes

    def reset(self) -> Observation:
        return Observation("Say something about a row of numbers.")

    def step(self, action: str) -> Observation:
        self._left -= 1
        if self._crashes:
            os._exit(1)
        return Observation("Go on.", float(len(action) % 2), done=not self._left)

    def close(self) -> None:
        pass
