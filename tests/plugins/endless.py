"""Recipes whose hooks do not return: a loop that uses the CPU, and a wait."""

from __future__ import annotations

import time
from typing import Any

from agentjet.recipes.shelf.grpo import Grpo


class EndlessLoss(Grpo):
    """GRPO with a loss that never ends."""

    def token_loss(self, logp: Any, columns: Any) -> Any:
        while True:
            pass


class EndlessReads(Grpo):
    """GRPO with a property that never ends."""

    @property
    def reads(self) -> Any:
        while True:
            pass


class EndlessColumns(Grpo):
    """GRPO whose columns never come."""

    def columns(self, batch: Any, outputs: Any) -> Any:
        time.sleep(1e6)
