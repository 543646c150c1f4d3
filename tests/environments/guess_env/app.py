"""A server of OpenEnv, as its users write them: a guess, up or down, with tasks and their splits."""

import os
import time
from enum import StrEnum
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

TESTS = ["", "", "none", "nan", "much", "error", "crash", "hang"]
"""What a step of each task of the split `test` does."""


class Way(StrEnum):
    up = "up"
    down = "down"


class Guess(Action):
    way: Way


class Seen(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = False

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=os.urandom(8).hex())
        self._does = ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self._state = State(episode_id=episode_id or os.urandom(8).hex())
        self._does = TESTS[kwargs["index"]] if kwargs.get("split") == "test" else ""
        return Seen(text=f"task {kwargs.get('split')} {kwargs.get('index')}: up or down?")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self._state.step_count += 1
        match self._does:
            case "error":
                raise RuntimeError("the board fell")
            case "crash":
                print("so long", flush=True)
                os._exit(7)
            case "hang":
                time.sleep(60)
        reward = {"none": None, "nan": float("nan"), "much": 3.0}.get(self._does, float(action.way is Way.up))
        done = self._state.step_count == 2
        return Seen(text="again", reward=reward, done=done, metadata={"steps_left": 2 - self._state.step_count})

    @property
    def state(self) -> State:
        return self._state

    def list_splits(self) -> list[str]:
        return ["train", "test"]

    def num_tasks(self, split: str) -> int:
        return {"train": 5, "test": len(TESTS)}[split]


app = create_app(GuessEnvironment, Guess, Seen, env_name="guess_env", max_concurrent_envs=1)
