"""A recipe that waits in one of its hooks, which its parameter names, until the test releases it."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Self

from pydantic import model_validator

from agentjet.recipes.recipe import FinishedGroup, Need, ValueHeads
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.recipes.shelf.grpo import Grpo


class Waiting(Grpo):
    """GRPO with slow hooks."""

    hook: str = ""
    """The hook that waits, or spins for ever if it begins with `endless `."""

    entered: ClassVar[threading.Event] = threading.Event()
    released: ClassVar[threading.Event] = threading.Event()
    calls: ClassVar[list[str]] = []

    def _wait(self, hook: str) -> None:
        Waiting.calls.append(hook)
        if hook == self.hook:
            Waiting.entered.set()
            Waiting.released.wait()
        elif self.hook == f"endless {hook}":
            while not Waiting.released.is_set():
                pass

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._wait("validators")
        return self

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        self._wait("rollout")
        return default

    def accept(self, group: FinishedGroup) -> str:
        self._wait("accept")
        return ""

    @property
    def needs(self) -> frozenset[Need]:
        self._wait("needs")
        return frozenset(["teacher"]) if self.hook == "teaching" else super().needs

    @property
    def value_heads(self) -> ValueHeads | None:
        self._wait("value_heads")
        return None

    @property
    def teaching(self) -> Any:
        self._wait("teaching")
        return super().teaching

    def reward_advantages(self, batch: Any) -> Any:
        self._wait("reward_advantages")
        return super().reward_advantages(batch)
