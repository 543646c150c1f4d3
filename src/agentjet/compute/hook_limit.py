"""Ends a process that computes when a hook of a recipe does not return. Workers and ranks share it. No torch.

A hook in an endless loop uses CPU time, so the watchdog of the gateway takes it for work. A thread of the process
measures it instead, and reports the hook before it ends the process. A hook that holds Python's lock in C stops this
thread, too: then only the watchdog is left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from agentjet.errors import HookHung
from agentjet.processes.rpc import Answer, Request
from agentjet.recipes import hooks

LOOKS_PER_LIMIT = 10


def end_overdue(limit: float, request: Callable[[], Request | None], send: Callable[[Answer], object]) -> None:
    """Start the thread. `limit` in seconds; `request` returns the one that the process works on."""
    text = f"{limit:g} s (server.hook_timeout)"

    def watch() -> None:
        while not (overdue := hooks.overdue_call(limit, text)):
            time.sleep(limit / LOOKS_PER_LIMIT)
        present = request()
        if present is not None:
            send(Answer(present.id, error=HookHung(overdue, during=str(present.policy)), ends=True))
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
