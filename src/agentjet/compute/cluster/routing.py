"""A replica as the server sees it, and routing: which replica gets the next completion.

The replica that holds the longest known prefix of the prompt in its cache, unless it has much more to do than another;
among equals the one with the least to do. Without the second rule, a system prompt that all tasks share would send
everything to one replica.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from agentjet.compute.cluster.weights import Publication
from agentjet.errors import WorkerDied
from agentjet.processes.rpc import Peer
from agentjet.processes.supervisor import Watchdog

BLOCK_TOKENS = 64
"""Prefixes are compared in blocks of this many tokens."""
MORE_FACTOR, MORE = 1.25, 4
"""A replica may have this factor and this number of completions more than the least busy one."""

Cause = Literal["work", "replica", "unwanted"]
"""Why a replica ended: perhaps its work crashed it, or it is at fault itself, or it is not needed."""

Key = TypeVar("Key")


@dataclass(eq=False)
class RoutedCompletion:
    """A completion or a scoring on its way through the replicas. `prompt` [T] are int32 token ids."""

    prompt: np.ndarray
    uses_cache: bool = True
    """True if a cached prefix saves work."""
    sampled: list[int] = field(default_factory=list)
    """Tokens of the completion that were received."""
    losses: int = 0
    """Replicas in a row that it lost before they sent a token of it."""
    blame: int = 0
    """Those of them that it may have crashed."""
    keys: list[int] = field(default_factory=list)
    """Keys of the blocks of prompt and sampled tokens, as far as `update_keys` counted."""

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and sampled tokens."""
        return np.concatenate([self.prompt, np.asarray(self.sampled, np.int32)]) if self.sampled else self.prompt

    def update_keys(self) -> None:
        """Compute the keys of new blocks. A key stands for a block and all blocks before it."""
        if not self.uses_cache:
            return
        tokens, key = self.tokens, self.keys[-1] if self.keys else 0
        for start in range(len(self.keys) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = hash((key, tokens[start : start + BLOCK_TOKENS].tobytes()))
            self.keys.append(key)


class Load:
    """The work that a replica has, and the prefixes that its cache probably holds."""

    def __init__(self, num_places: int, cache_tokens: int) -> None:
        self.running: set[RoutedCompletion] = set()
        self._num_places = num_places
        self._max_keys = max(1, cache_tokens // BLOCK_TOKENS)
        self._known: OrderedDict[int, None] = OrderedDict()

    def has_place(self, work: RoutedCompletion) -> bool:
        """True if the replica may get this work.

        A replica gets one work at a time that lost its last replica. So work that crashes every replica is found, and
        the work beside it is not blamed.
        """
        if work.losses and any(other.losses for other in self.running):
            return False
        return len(self.running) < self._num_places

    def add(self, work: RoutedCompletion) -> None:
        self.running.add(work)
        self._remember(work)

    def remove(self, work: RoutedCompletion) -> None:
        """The work ended, or left the replica. Its tokens stay in the cache for the next turn."""
        self.running.discard(work)
        work.update_keys()
        self._remember(work)

    def forget(self) -> None:
        """The weights changed, so the cache is empty, except for the running completions."""
        self._known.clear()
        for work in self.running:
            self._remember(work)

    def known_blocks(self, keys: Sequence[int]) -> int:
        """Returns the number of leading blocks in the cache of the replica."""
        return next((i for i, key in enumerate(keys) if key not in self._known), len(keys))

    def _remember(self, work: RoutedCompletion) -> None:
        for key in reversed(work.keys):  # The beginning of a prefix is forgotten last.
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._max_keys:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class End:
    """The end of a replica. Its requests fail with `reason`."""

    reason: WorkerDied
    cause: Cause
    time: float
    """By the event loop."""


class ReplicaHandle:
    """One replica. From its end on it gets no more work."""

    def __init__(self, name: str, load: Load, timeout: float) -> None:
        self.name = name
        self.load = load
        self.watchdog = Watchdog(timeout)
        self.peer: Peer | None = None
        """Its connection, when it is loaded."""
        self.publication: Publication | None = None
        """The weights that it serves."""
        self.is_adopting = False
        self.is_suspended = True
        """True while it uses no memory of its GPUs: before its start, and from `Fleet.suspend` to its next adoption."""
        self.serial = 0
        """Number of the publish that it fulfils."""
        self.verified: set[int] = set()
        """Versions whose probe it passed. Its received tokens may be of any of them."""
        self.attempts = 0
        """Failed attempts to adopt the present publication."""
        self.problem = ""
        """The error of the last attempt, if it failed."""
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.busy_since = 0.0
        """Time from which it has work. Times are those of the event loop."""

    @property
    def version(self) -> int | None:
        """The version that it serves."""
        return None if self.publication is None else self.publication.version

    @property
    def is_ready(self) -> bool:
        """True if it may get work."""
        is_alive = self.peer is not None and not self.peer.died.done() and not self.end.done()
        return is_alive and self.publication is not None and not (self.is_adopting or self.is_suspended)

    def silence(self, now: float) -> float:
        """Returns the seconds for which it has had work and sent nothing."""
        if self.peer is None or not self.load.running:
            return 0.0
        return now - max(self.peer.heard_at, self.busy_since)


def choose(loads: Mapping[Key, Load], work: RoutedCompletion) -> Key | None:
    """Returns the replica that should get the work; None if none has a place for it."""
    free = {key: load for key, load in loads.items() if load.has_place(work)}
    if not free:
        return None
    limit = MORE + MORE_FACTOR * min(len(load.running) for load in free.values())
    near = [key for key, load in free.items() if len(load.running) <= limit]
    return max(near, key=lambda key: (free[key].known_blocks(work.keys), -len(free[key].running)))
