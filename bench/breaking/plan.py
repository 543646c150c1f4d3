"""Which faults a run has, in which order: everything that is drawn at random, drawn before anything runs.

The kinds and their shares are fixed; a seed decides the order, the moments and the victims. A run of `WHOLE` faults or
more passes through every transition of the journal at every moment.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
TEAM = "team"
RUNS: dict[str, tuple[str, ...]] = {"default": ("policy",), TEAM: ("planner", "coder")}
"""The runs of the server, and their policies. All policies have the same worker."""
WHOLE = 150
TRANSITIONS = (
    "count",
    "put_episode",
    "put_group",
    "add_call",
    "add_undelivered",
    "add_batch",
    "put_operation",
    "remove_batches",
    "add_step",
    "delete",
    "remember",
    "put_checkpoint",
    "add_event",
)
"""Methods of the journal that write while the server runs; `commit` has them on disk."""
MOMENTS = ("before", "after", "committed")
"""Moments of a transition: before its row is written, after that, and on disk but not yet reported."""
RARE = ("remove_batches", "add_undelivered")  # Transitions that must be provoked; short runs leave them out
WORKER_VERBS = ("sample", "forward_backward", "accumulated", "optim_step", "publish", "save", "start", "any")
"""The work of a worker at the moment it is killed; `any`: at a random time."""
HANGING_VERBS = ("sample", "forward_backward")  # The work of a worker at the moment it is stopped (SIGSTOP)
REQUESTS = ("begin", "finish", "chat", "abort")
WIRE = ("request lost", "answer lost", "answer cut", "request twice", "hung up")
DISKS = ("journal full", "writes refused", "checkpoint full")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `at` and `when` give the place, `amount` a size or a time, by kind; see `inject`."""

    kind: str
    at: str = ""
    when: str = ""
    amount: float = 0.0
    skip: int = 0  # Number of chances that are passed over first


SHARES = {
    "gateway killed at a transition": 47,
    "gateway killed at a random time": 12,
    "gateway killed, WAL tail torn": 12,
    "worker killed": 30,
    "worker killed twice by one batch": 1,
    "worker hangs": 5,
    "client killed": 26,
    "request lost": 12,
    "answer lost": 12,
    "answer cut": 12,
    "request twice": 12,
    "hung up": 12,
    "disk": 9,
    "agent hangs": 14,
    "clock jumps": 8,
}
"""Out of their sum."""
WHOLE_RUNS_ONLY = ("worker killed twice by one batch", "gateway killed at a random time")
"""They take long, and short runs have others like them."""


def plan(num_faults: int, seed: int) -> list[Fault]:
    """The faults of a run, in order."""
    dice = random.Random(seed)
    drawn = []
    for kind, number in _numbers(num_faults).items():
        drawn += _drawn(kind, number, dice)
    dice.shuffle(drawn)
    return drawn


def _numbers(num_faults: int) -> dict[str, int]:
    """Number of faults of each kind: by their shares, at least one of each. The most frequent kinds absorb the
    rounding."""
    every = sum(SHARES.values())
    numbers = {kind: max(1, share * num_faults // every) for kind, share in SHARES.items()}
    if num_faults >= WHOLE:
        numbers["gateway killed at a transition"] = max(47, numbers["gateway killed at a transition"])
    else:
        for kind in WHOLE_RUNS_ONLY:
            del numbers[kind]
    rest = [kind for kind in numbers if kind in WIRE or kind == "client killed"]
    for i in range(max(0, num_faults - sum(numbers.values()))):
        numbers[rest[i % len(rest)]] += 1
    return numbers


def _drawn(kind: str, number: int, dice: random.Random) -> list[Fault]:
    if kind == "gateway killed at a transition":
        return [
            Fault(kind, at, when, skip=0 if at in RARE else dice.randrange(3))
            for at, when in _transitions(number, dice)
        ]
    if kind == "gateway killed, WAL tail torn":
        return [Fault(kind, "commit", "committed", dice.random(), dice.randrange(6)) for _ in range(number)]
    if kind == "worker killed":
        verbs = _dealt(WORKER_VERBS[: number if number < len(WORKER_VERBS) else None], number)
        return [Fault(kind, verb, amount=_delay(verb, dice)) for verb in verbs]
    if kind == "worker hangs":
        return [Fault(kind, verb, amount=_delay(verb, dice)) for verb in _dealt(HANGING_VERBS, number)]
    if kind == "request twice":
        return [Fault(kind, at, skip=dice.randrange(3)) for at in _dealt(("begin", "finish"), number)]
    if kind in WIRE:
        at = ("chat", "begin") if kind == "hung up" else REQUESTS
        return [Fault(kind, one, amount=dice.random() / 4, skip=dice.randrange(3)) for one in _dealt(at, number)]
    if kind == "disk":
        return [Fault(kind, at, amount=0.5 + dice.random()) for at in _dealt(DISKS, number)]
    if kind == "agent hangs":
        return [Fault(kind, at) for at in _dealt(("silent", "silent", "silent", "busy"), number)]
    if kind == "clock jumps":
        return [Fault(kind, amount=amount) for amount in _dealt((30.0, -5.0), number)]
    return [Fault(kind, amount=dice.random()) for _ in range(number)]


def _transitions(number: int, dice: random.Random) -> list[tuple[str, str]]:
    """Transitions and moments; the rare ones last to be drawn."""
    every = [(at, when) for at in TRANSITIONS for when in MOMENTS] + [("commit", "before"), ("commit", "committed")]
    dice.shuffle(every)
    every.sort(key=lambda one: one[0] in RARE)
    again = [one for one in every if one[0] not in RARE]
    return [*every, *_dealt(again, max(0, number - len(every)))][:number]


def _dealt(choices: Sequence[T], number: int) -> list[T]:
    """`number` of them, each as often as the others."""
    return [choices[i % len(choices)] for i in range(number)]


def _delay(verb: str, dice: random.Random) -> float:
    """Seconds after the verb was sent: within what it takes on a tiny model."""
    longest = {"sample": 0.05, "forward_backward": 0.03, "save": 0.05, "start": 2.0, "any": 1.0}
    return longest.get(verb, 0.005) * dice.random()
