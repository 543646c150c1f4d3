"""Answers on their way to their agents. One that does not arrive is an orphan: it trains nothing.

An answer has arrived once all of it was taken: for a stream, once its last event was written to the socket. Until then
it has not, whoever says so: its client leaves, its episode ends (by its lease, or by a `finish` that comes meanwhile),
or the server stops. Then what was recorded of it is marked, and a connection whose client does not read is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from agentjet.errors import Conflict, Later
from agentjet.gateway.requests import CallChunk, CallRequest
from agentjet.gateway.retries import Retries
from agentjet.swarm import SwarmState
from agentjet.timeline import ConversationTree

Outbox = asyncio.Queue[CallChunk | BaseException]


@dataclass(slots=True, eq=False)
class Delivery:
    """The answer to one request, from its arrival until all of it was taken."""

    episode_id: str
    role: str
    request: CallRequest
    hang_up: Callable[[], None]
    """Closes the connection, whatever is still to be written to it."""
    ordinal: int
    """Its place among the calls of its episode, which no other call has, whether or not those before it were answered.
    """
    outbox: Outbox = field(default_factory=asyncio.Queue)
    recorded: list[str] = field(default_factory=list)
    """The calls that it consists of, by id, as far as they are recorded."""
    being_read: bool = False
    """Its agent has not yet taken what it was given last."""

    @property
    def is_sampled(self) -> bool:
        return len(self.recorded) == self.request.choices


class Deliveries:
    """One for a gateway."""

    def __init__(self, swarm: SwarmState) -> None:
        self._swarm = swarm
        self._open: dict[str, list[Delivery]] = {}
        self._next_ordinal: dict[str, int] = {}
        """By live episode: no later call may have a smaller one, or it would have another call's seed."""
        self._retries = Retries()
        swarm.store.undelivered_calls = self._handing_out

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    @contextmanager
    def delivering(
        self, episode_id: str, role: str, request: CallRequest, hang_up: Callable[[], None]
    ) -> Iterator[Delivery]:
        """Left by its end, the answer was delivered; left by an exception, a cancelled generator's too, it was not."""
        episode = self._swarm.episode(episode_id)
        under_way = self._open.setdefault(episode_id, [])
        ordinal = episode.num_calls + sum(not other.is_sampled for other in under_way)
        ordinal = max(ordinal, self._next_ordinal.get(episode_id, 0))
        if episode.status == "live":
            self._next_ordinal[episode_id] = ordinal + 1
        delivery = Delivery(episode_id, role, request, hang_up, ordinal)
        under_way.append(delivery)
        try:
            yield delivery
        except BaseException:
            self._lost(delivery)
            raise
        self._forget(delivery)

    def repeated(self, delivery: Delivery, tree: ConversationTree) -> list[str]:
        """The calls of `tree` that are asked for once more, one for each choice at most; oldest first."""
        return self._retries.earlier(delivery.episode_id, delivery.role, delivery.request, tree)

    def episode_ended(self, episode_id: str) -> None:
        """Cut its answers off: nobody delays a batch by what will not be trained."""
        for delivery in list(self._open.get(episode_id, ())):
            if not self._hung_up(delivery):
                delivery.outbox.put_nowait(
                    Conflict(f"Episode {episode_id} ended while it was answered.", code="episode_ended_meanwhile")
                )
        self._retries.forget(episode_id)
        self._next_ordinal.pop(episode_id, None)

    def close(self) -> None:
        """Whoever has not taken an answer by now does not get it, and the journal, still open, says so."""
        for delivery in [delivery for under_way in self._open.values() for delivery in under_way]:
            if not self._hung_up(delivery):
                self._lost(delivery)

    def _hung_up(self, delivery: Delivery) -> bool:
        """Hang up on an agent that does not read; one that waits for more is told."""
        if delivery.being_read:
            self._lost(delivery)
            delivery.hang_up()
        return delivery.being_read

    def _lost(self, delivery: Delivery) -> None:
        if not self._forget(delivery) or self._swarm.episode(delivery.episode_id).status != "live":
            return
        tree = self._swarm.tree(delivery.episode_id, delivery.role)  # Does not know what the disk refused.
        if known := [call_id for call_id in delivery.recorded if tree.knows(call_id)]:
            with suppress(Later):
                self._swarm.undelivered(delivery.episode_id, known)
        else:
            self._retries.unanswered(delivery.episode_id, delivery.role, delivery.request.fingerprint)

    def _forget(self, delivery: Delivery) -> bool:
        """False when that happened before."""
        under_way = self._open.get(delivery.episode_id, [])
        if delivery not in under_way:
            return False
        under_way.remove(delivery)
        if not under_way:
            del self._open[delivery.episode_id]
        return True

    def _handing_out(self, episode_id: str) -> list[str]:
        return [call_id for delivery in self._open.get(episode_id, ()) for call_id in delivery.recorded]
