"""A household game in text: find an object, carry it to another room, and put it down.

The world has the API of `agentjet.environments`: `Household` lists the tasks, `House` answers actions. Every
observation comes with the actions that are valid in it, and the sampler produces one of them.

Held-out tasks are about objects that no other task names. So they cannot be solved by memory of the objects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from agentjet.environments import EnvironmentTask, Game, Observation

ROOMS = ("bathroom", "bedroom", "garage", "garden", "kitchen")
OBJECTS = (
    *("apple", "bag", "ball", "basket", "belt", "blanket", "book", "bottle", "bowl", "box", "brush", "bucket"),
    *("candle", "chair", "clock", "coat", "cup", "doll", "drum", "fork", "hat", "jacket", "jar", "key"),
    *("knife", "lamp", "letter", "mirror", "mug", "pan", "pen", "picture", "pillow", "plate", "pot", "radio"),
)
HELD_OUT_OBJECTS = (
    *("broom", "camera", "glass", "guitar", "ladder", "phone", "ring", "shirt", "shoe", "spoon", "ticket", "towel"),
)
NUM_TRAINING, NUM_HELD_OUT = 800, 200
MILESTONE = 0.25
"""Reward for each of four: to reach the object, to take it, to carry it to its room, to put it down there."""


EXAMPLE = """You tidy a house. An example:
Task: put the sock in the garden. The sock is in the bedroom.
You are in the kitchen. You see nothing. You carry nothing.
"go bedroom"
You are in the bedroom. You see the sock. You carry nothing.
"take sock"
You are in the bedroom. You see nothing. You carry the sock.
"go garden"
You are in the garden. You see nothing. You carry the sock.
"put sock\""""


class Household(Game):
    """Put an object into a room."""

    system_prompt: str = EXAMPLE
    """The first message: a solved task."""
    max_turns: int = Field(6, ge=4)
    """Maximum number of actions. Four are enough."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        yield from _tasks(OBJECTS, NUM_TRAINING, "train")
        yield from _tasks(HELD_OUT_OBJECTS, NUM_HELD_OUT, "held_out")

    def world(self, task: EnvironmentTask) -> House:
        return House(task.payload)


def _tasks(objects: tuple[str, ...], count: int, split: Any) -> Iterator[EnvironmentTask]:
    chance = random.Random(f"household {split}")
    for number in range(count):
        target, other = chance.sample(objects, 2)
        start, where, to = chance.sample(ROOMS, 3)
        places = dict(sorted({target: where, other: chance.choice(ROOMS)}.items()))
        yield EnvironmentTask(
            f"{split}-{number}", {"object": target, "start": start, "to": to, "places": places}, split
        )


class House:
    """One episode. The payload has the `object`, the room `to` which it belongs, the `start`, and all `places`."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.target, self.to, self.room = payload["object"], payload["to"], payload["start"]
        self.places: dict[str, str] = dict(payload["places"])
        self.carried = ""
        self.reached = 0
        """Number of milestones so far."""

    def reset(self) -> Observation:
        where = self.places[self.target]
        return self._seen(f"Task: put the {self.target} in the {self.to}. The {self.target} is in the {where}.\n")

    def step(self, action: str) -> Observation:
        verb, _, noun = action.partition(" ")
        if verb == "go":
            self.room = noun
        elif verb == "take":
            self.carried = noun
            del self.places[noun]
        else:
            self.places[noun], self.carried = self.room, ""
        before, self.reached = self.reached, max(self.reached, self._milestones())
        return self._seen("", MILESTONE * (self.reached - before))

    def close(self) -> None:
        pass

    def _milestones(self) -> int:
        if self.carried == self.target:
            return 3 if self.room == self.to else 2
        if self.places[self.target] == self.to:
            return 4
        return int(self.places[self.target] == self.room)

    def _seen(self, text: str, reward: float = 0.0) -> Observation:
        here = [name for name, room in self.places.items() if room == self.room]
        carried = [self.carried] if self.carried else []
        takes = [] if carried else [f"take {name}" for name in here]
        is_done = self.reached == 4
        return Observation(
            f"{text}You are in the {self.room}. You see {_listed(here)}. You carry {_listed(carried)}.",
            reward,
            is_done,
            actions=[f"go {room}" for room in ROOMS] + takes + [f"put {name}" for name in carried],
            metrics={"success": float(is_done)},
            why=f"the {self.target} is in the {self.to}" if is_done else f"milestone {self.reached} of 4",
        )


def _listed(names: list[str]) -> str:
    return " and ".join(f"the {name}" for name in names) or "nothing"
