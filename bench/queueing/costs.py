"""`Costs`: the measured costs of gateway and journal that the simulation uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of the gateway process, bytes of its journal and memory, and the disk."""

    call: float
    """Of a call, besides its tokens."""
    per_prompt_token: float
    """Of each token of the prompt, known or new."""
    per_new_token: float
    """Of each token of the prompt that the gateway did not know."""
    per_token: float
    """Of each token of a plain answer."""
    per_streamed_token: float
    record: float
    """Part of `call` in which it is journalled."""
    record_token: float
    begin: float
    finish: float
    per_live: float
    """Of each begin and finish, for every live episode."""
    idle_live: float
    """A second for every live episode."""
    route: float
    """Of the choice of a replica, for each replica; part of `call` for one."""
    batch_token: float
    """Of each forest token, while a batch is built in a thread."""
    rank_token: float
    """Of each forest token, while the batch is encoded for the ranks."""
    sync: float
    """Seconds of a wait for the disk."""
    disk_bandwidth: float
    """Bytes a second, in writes that are waited for one by one."""
    bytes_call: float
    """Bytes written for a call, besides its tokens."""
    bytes_token: float
    """Bytes written for each new token of a prompt or answer."""
    rank_bytes_token: float = 0.0
    """Bytes sent to a rank for each forest token."""
    memory_live: float = 0.0
    """Bytes of a live episode without calls."""
    memory_token: float = 0.0
    """Bytes of each token of a live episode's conversation."""
    memory_call: float = 0.0
    """Bytes of a waiting call, besides its prompt."""
    rows_episode: float = 0.0
    rows_call: float = 0.0
    wait_share: float = 0.0
    """Share of the measurement in which the gateway was ready to run and another program ran."""
    fit_error: float = 0.0
    """Largest relative error of the CPU seconds that the costs predict for the loads they were fitted to."""
