"""The engine's states: which may follow which, and what may be asked for in each. The one place that says so.

    offline ─► loading ─► sampling ◄─► learning
                  ▲  └──────┬──────────┘ (a worker that died: loading again)
                  │         ├─► draining ─► offline
                  └ failed ◄┘

Invariant: `Engine` changes its state through `check` only.
"""

from __future__ import annotations

from typing import Literal

from agentjet.errors import Conflict
from agentjet.types import EngineState

Demand = Literal["start", "stop", "checkpoint", "export"]

NEXT: dict[EngineState, frozenset[EngineState]] = {
    "offline": frozenset({"loading"}),
    "loading": frozenset({"loading", "sampling", "draining", "failed"}),
    "sampling": frozenset({"learning", "loading", "draining", "failed"}),
    "learning": frozenset({"sampling", "loading", "draining", "failed"}),
    "draining": frozenset({"offline", "failed"}),
    "failed": frozenset({"loading", "offline"}),
}
"""`failed` after `draining`: what went wrong while the engine was being stopped is not hidden."""

DEMANDS: dict[EngineState, tuple[Demand, ...]] = {
    "offline": ("start",),
    "loading": ("stop",),
    "sampling": ("stop", "checkpoint", "export"),
    "learning": ("stop", "checkpoint", "export"),
    "draining": (),
    "failed": ("start", "stop"),
}
"""What has an effect. To start what runs and to stop what is stopped is granted as well: that is so already."""


class IllegalInState(Conflict):
    """The engine's state does not allow the request."""

    code = "illegal_in_state"

    def __init__(self, demand: Demand, state: EngineState) -> None:
        self.state: EngineState = state
        self.legal = DEMANDS[state]
        ways = " or ".join(self.legal) or "nothing, until it is offline"
        super().__init__(f"{demand} is not possible while the engine is {state}; legal now: {ways}.")


def check(state: EngineState, following: EngineState) -> None:
    """An engine in `state` is about to be in `following`."""
    assert following in NEXT[state], f"the engine went from {state} to {following}"


def demand(wanted: Demand, state: EngineState) -> None:
    """Raises `IllegalInState` unless `wanted` may be asked for now."""
    if wanted not in DEMANDS[state]:
        raise IllegalInState(wanted, state)
