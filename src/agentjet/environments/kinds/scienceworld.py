"""ScienceWorld: `scienceworld:boil`. A task is a variation; the library's own split decides which are held out.

Each process has one Java machine, which plays all its episodes. The valid actions of a state are an enumeration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Game, Observation
from agentjet.errors import ConfigError, did_you_mean

JAVA_OPTIONS = "-Xmx1g -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""A machine plays one episode at a time: more threads and compiling harder would cost CPU time that nothing uses."""
ENDS_NOTHING = frozenset({"reset task"})
"""Actions that are left out: it would take back what the episode has scored."""
LOWEST_SCORE, HIGHEST_SCORE = -100, 100


class ScienceWorld(Game):
    """A task of ScienceWorld, such as boiling water. The reward is the score that was gained, in hundredths."""

    requires: ClassVar[str] = "scienceworld>=1.2,<2"
    needs: ClassVar[str] = "java"
    install: ClassVar[str] = "apt-get install default-jre-headless"
    about: ClassVar[str] = "task of ScienceWorld, such as boil or 1-1"
    keeps_processes: ClassVar[bool] = True

    simplifications: str = ""
    """Simplifications, separated by commas, such as "easy" or "teleportAction,openDoors"."""
    max_actions: int = Field(2000, ge=2)
    """Maximum number of valid actions of a state. A state with more is a failure."""
    processes: int = Field(4, ge=1)
    """Maximum processes of the pool, each with a Java machine of about 400 MiB."""

    _env: Any = PrivateAttr(None)

    def tasks(self) -> Iterator[EnvironmentTask]:
        name = self._name()
        env = self.env()
        try:
            env.load(name, 0, self.simplifications)
        except ValueError as error:
            raise ConfigError(f"simplifications = {self.simplifications!r}: {error}") from None
        splits = {
            "train": env.get_variations_train(),
            "dev": env.get_variations_dev(),
            "test": env.get_variations_test(),
        }
        # The first tasks of the list have each split in its share, so that `num_tasks` keeps held-out ones.
        rows = [(rank / len(found), split, one) for split, found in splits.items() for rank, one in enumerate(found)]
        for _, split, variation in sorted(rows):
            held_out = "train" if split == "train" else "held_out"
            yield EnvironmentTask(f"{name}-{variation}", {"task": name, "variation": variation}, held_out)  # type: ignore[arg-type]

    def _name(self) -> str:
        """The name of the task. Raises `ConfigError` if there is none."""
        from scienceworld.utils import infer_task

        names = self.env().get_task_names()
        if (name := infer_task(self.target)) not in names:
            way_out = did_you_mean(name, names, f"there are {', '.join(names)}")
            raise ConfigError(f"ScienceWorld has no task {self.target!r}; {way_out}")
        return str(name)

    def env(self) -> Any:
        """The library's environment, with a Java machine that runs."""
        if self._env is not None and self._env._gateway.java_process.poll() is not None:
            self.close()
        if self._env is None:
            from scienceworld import ScienceWorldEnv

            os.environ.setdefault("JAVA_TOOL_OPTIONS", JAVA_OPTIONS)
            self._env = ScienceWorldEnv("", envStepLimit=self.max_turns)
        return self._env

    def world(self, task: EnvironmentTask) -> ScienceWorldWorld:
        return ScienceWorldWorld(self, task.payload)

    def close(self) -> None:
        """Ends the Java machine."""
        env, self._env = self._env, None
        if env is not None:
            with suppress(Exception):  # A machine that crashed answers nothing.
                env.close()
            env._gateway.java_process.kill()
            env._gateway.java_process.wait()


class ScienceWorldWorld:
    def __init__(self, kind: ScienceWorld, payload: Mapping[str, Any]) -> None:
        self._kind, self._payload = kind, payload
        self._score = 0

    def reset(self) -> Observation:
        return self._guarded(self._reset)

    def step(self, action: Any) -> Observation:
        return self._guarded(lambda: self._observed(*self._kind.env().step(str(action))))

    def close(self) -> None:
        pass

    def _reset(self) -> Observation:
        env = self._kind.env()
        env.load(self._payload["task"], self._payload["variation"], self._kind.simplifications)
        text, facts = env.reset()
        self._score = facts["score"]  # Some tasks begin with points.
        return self._observed(f"{facts['taskDesc'].strip()}\n{text}", 0, False, facts)

    def _guarded(self, work: Any) -> Observation:
        """A Java machine that failed is not used again."""
        try:
            observation: Observation = work()
        except EnvironmentFailed:
            raise
        except Exception:
            self._kind.close()
            raise
        return observation

    def _observed(self, text: str, _: int, is_done: bool, facts: Mapping[str, Any]) -> Observation:
        score = facts["score"]
        if not LOWEST_SCORE <= score <= HIGHEST_SCORE:
            raise EnvironmentFailed(
                f"{self._kind.target} has the score {score}, outside of {LOWEST_SCORE} to {HIGHEST_SCORE}"
            )
        actions = [action for action in facts["valid"] if action not in ENDS_NOTHING]
        if not is_done and not 0 < len(actions) <= self._kind.max_actions:
            raise EnvironmentFailed(
                f"{self._kind.target} has a state with {len(actions)} valid actions, and max_actions is "
                f"{self._kind.max_actions}: increase it, or set simplifications = 'easy'"
            )
        reward, self._score = (score - self._score) / 100, score
        why = f"score {score} of 100"
        return Observation(text.strip(), reward, is_done, actions, metrics={"score": score / 100}, why=why)
