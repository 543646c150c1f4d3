"""`Ending`: how a run gives back the episodes that are live at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from agentjet.client.episode import GOODBYE_SECONDS
from agentjet.errors import AgentJetError, RequestError

COMPLETE_SECONDS = 30.0
"""Seconds for giving episodes back after the last step: a busy server answers late, and each one left behind blocks a
place of the next run until its lease runs out."""


@dataclass
class Ending:
    """The end of one run, and how many episodes were left behind."""

    has_enough: bool = False
    """The run reached its goal; otherwise it was interrupted, or failed."""
    num_left: int = 0
    """Episodes that may be live on the server still, until their leases run out."""

    @property
    def seconds(self) -> float:
        """Seconds that one step of giving an episode back may take. They are few after an interruption."""
        return COMPLETE_SECONDS if self.has_enough else GOODBYE_SECONDS / 2

    async def give_back(self, asking: Awaitable[object], *, at_least: float = 0.0) -> None:
        """Wait for requests that give an episode back. A server that gave no answer may have left it live: counted."""
        try:
            async with asyncio.timeout(max(self.seconds, at_least)):
                await asking
        except RequestError as refusal:
            self.num_left += refusal.status >= 500  # What the server refuses otherwise is not live.
        except (AgentJetError, TimeoutError):
            self.num_left += 1

    def __str__(self) -> str:
        return (
            f"{self.num_left} episode{'' if self.num_left == 1 else 's'} could not be given back, since the server did "
            "not answer in time: each may keep its place until its lease runs out"
        )
