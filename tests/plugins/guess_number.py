"""A kind of environment outside the package: guess a number with hints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from agentjet.environments import EnvironmentTask, Game, Observation


class GuessNumber(Game):
    """Guess a number. Each guess is answered with "higher" or "lower"."""

    about = "largest number"  # The meaning of the target, for `agentjet env list`.

    guesses: int = Field(4, ge=1)
    """Maximum number of guesses."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        for number in range(1, self.largest + 1):
            yield EnvironmentTask(f"number-{number}", {"number": number})

    def world(self, task: EnvironmentTask) -> Guessing:
        return Guessing(self.largest, task.payload["number"], self.guesses)

    @property
    def largest(self) -> int:
        return int(self.target or 20)


class Guessing:
    def __init__(self, largest: int, number: int, guesses: int) -> None:
        self.largest, self.number, self.left = largest, number, guesses

    def reset(self) -> Observation:
        return self.observed(f"Guess a number from 1 to {self.largest}.")

    def step(self, action: Any) -> Observation:  # `action` matches the schema: the sampler enforces it.
        self.left -= 1
        if action == self.number:
            return self.observed("Right.", reward=1.0, done=True, why=f"found {self.number}")
        hint = "higher" if action < self.number else "lower"
        return self.observed(f"The number is {hint}.", done=self.left == 0, why=f"the number was {self.number}")

    def observed(self, text: str, **more: Any) -> Observation:
        return Observation(text, schema={"type": "integer", "minimum": 1, "maximum": self.largest}, **more)

    def close(self) -> None:
        pass
