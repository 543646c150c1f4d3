"""A household game in text: go to an object, take it, and bring it to another room.

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
MILESTONES = (0.2, 0.3, 0.5)
"""Rewards for reaching the object, for taking it, and for bringing it to its room."""

EXAMPLE = """You tidy a house. An example:
Bring the sock to the garden. It is in the bedroom.
You are in the kitchen.
"go bedroom"
You are in the bedroom. You see the sock.
"take sock"
You are in the bedroom. You carry the sock.
"go garden\""""


class Household(Game):
    """Bring an object to a room."""

    system_prompt: str = EXAMPLE
    """The first message: a solved task."""
    max_turns: int = Field(4, ge=3)
    """Maximum number of actions. Three are enough."""

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
        return self._seen(f"Bring the {self.target} to the {self.to}. It is in the {where}.\n")

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
        return self._seen("", sum(MILESTONES[before : self.reached]))

    def close(self) -> None:
        pass

    def _milestones(self) -> int:
        if self.carried == self.target:
            return 3 if self.room == self.to else 2
        return int(self.places[self.target] == self.room)

    def _seen(self, text: str, reward: float = 0.0) -> Observation:
        here = [name for name, room in self.places.items() if room == self.room]
        carried = [self.carried] if self.carried else []
        takes = [] if carried else [f"take {name}" for name in here]
        text += f"You are in the {self.room}."
        for verb, names in (("see", here), ("carry", carried)):
            text += f" You {verb} {' and '.join(f'the {name}' for name in names)}." if names else ""
        is_done = self.reached == len(MILESTONES)
        return Observation(
            text,
            reward,
            is_done,
            actions=[f"go {room}" for room in ROOMS] + takes + [f"put {name}" for name in carried],
            metrics={"success": float(is_done)},
            why=f"the {self.target} is in the {self.to}" if is_done else f"milestone {self.reached} of 3",
        )
