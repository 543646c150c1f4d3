"""The base classes of environments: `Kind`, and `Game` for worlds that answer one action at a time.

A kind adapts a library. It lists tasks and plays episodes, both in a process of `pool`, so that the library is imported
there only. The fields of a kind are its settings. `docs/environments.md` shows a kind of another package.

A failure of an environment is an exception. It aborts the episode with its reason, and is never scored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args

from pydantic import Field

from agentjet.environments.model import ContextFull, Model
from agentjet.errors import AgentJetError, ConfigError
from agentjet.section import Section
from agentjet.types import MAX_NAME, Reward, checked_number, shown

Split = Literal["", "train", "held_out"]


class EnvironmentFailed(AgentJetError):
    """An environment crashed, hung or gave no valid score. Its episode is aborted with this reason."""


@dataclass(frozen=True, slots=True)
class EnvironmentTask:
    """A task as its kind lists it. `payload` is JSON, and all that `Kind.play` gets."""

    id: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    split: Split = ""
    """Empty: a hash of the id decides, by `Kind.held_out`."""


class Kind(Section, ABC):
    """An environment. Subclasses add settings as fields, and define `tasks` and `play`."""

    requires: ClassVar[str] = ""
    """The library as pip writes it, such as "gymnasium>=1,<2"; empty: none."""
    needs: ClassVar[str] = ""
    """A program that the library starts, such as "java"."""
    install: ClassVar[str] = ""
    """A command that installs that program."""
    about: ClassVar[str] = ""
    """Meaning of the target, for `agentjet env list`, such as "ID of a Gymnasium environment"."""
    one_episode_a_process: ClassVar[bool] = False
    """True if the library cannot play a second episode in one process."""
    keeps_processes: ClassVar[bool] = False
    """True if a program that one episode started serves the next one, too. Otherwise it is ended after the episode."""

    target: str = ""
    """Part of the name behind the colon."""
    task_set: str = Field("", max_length=MAX_NAME)
    """Name of the task set, and key of `job.task_weights`; default: the name of the environment."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of tasks; default: all, or 100 of an endless environment."""
    held_out: float = Field(0.2, ge=0, lt=1)
    """Share of the tasks that are held out, by a hash of their ids. Not used if the environment has splits."""
    max_turns: int = Field(30, ge=1)
    """Maximum calls of the model in an episode."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of an answer; default: the server's."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; default: the server's."""
    system_prompt: str = ""
    """The first message; default: that of the environment, if it has one."""
    policy: str = ""
    """Policy that acts, in a run with named policies."""
    processes: int = Field(8, ge=1)
    """Maximum processes of the pool. One plays one episode at a time."""
    seconds: float = Field(600.0, gt=0)
    """Maximum duration of an episode."""
    start_seconds: float = Field(300.0, gt=0)
    """Maximum duration of a process's start, and of the list of tasks."""
    memory: int = Field(4096, ge=64)
    """Maximum memory of a process and its children in MiB."""
    sandbox: bool = False
    """Play in sandboxes, whose only network is the model."""

    @abstractmethod
    def tasks(self) -> Iterable[EnvironmentTask]:
        """Yields the tasks, in the same order with the same ids each time. May be endless if no task has a split."""

    @abstractmethod
    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        """Plays one episode. Raises an exception if the environment fails."""

    def readable(self) -> Sequence[Path]:
        """Files and folders that a sandbox shows. By default the target, if it is one."""
        return [Path(self.target)] if self.target and os.path.exists(self.target) else []

    def close(self) -> None:
        """Ends what the kind started, when its process ends."""

    def listed(self) -> list[EnvironmentTask]:
        """The tasks, each with its split. Raises `ConfigError` for tasks without an id or with equal ids."""
        most = self.num_tasks or MAX_TASKS
        listed: dict[str, EnvironmentTask] = {}
        for number, task in enumerate(itertools.islice(self.tasks(), MAX_TASKS)):
            if number >= most and not task.split:  # It may be endless; environments with splits are not.
                break
            where = f"task {number} of {self.target or type(self).__name__}"
            if not isinstance(task, EnvironmentTask):
                raise ConfigError(f"{where} is {shown(task)}: yield an EnvironmentTask")
            if task.split not in get_args(Split):
                splits = "'train', 'held_out' or nothing"
                raise ConfigError(f"{where} has the split {task.split!r}: give {splits}")
            if not isinstance(task.id, str) or not task.id:
                raise ConfigError(f"{where} has the id {task.id!r}: give each task a text that stays the same")
            if len(task.id) > MAX_NAME:
                raise ConfigError(f"{where} has an id of {len(task.id)} characters: {MAX_NAME} are allowed")
            if task.id in listed:
                raise ConfigError(f"{where} has the id {task.id!r}, as another task: give each task its own id")
            split = task.split or ("held_out" if share(task.id) < self.held_out else "train")
            listed[task.id] = EnvironmentTask(task.id, json.loads(json.dumps(task.payload)), split)
        if not listed:
            raise ConfigError(f"{self.target or type(self).__name__} has no tasks")
        return first_of_each_split(list(listed.values()), most)


def first_of_each_split(tasks: list[EnvironmentTask], most: int) -> list[EnvironmentTask]:
    """At most `most` tasks, taken from the splits in turn, so that none is cut off."""
    if len(tasks) <= most:
        return tasks
    splits: dict[str, list[EnvironmentTask]] = {}
    for task in tasks:
        splits.setdefault(task.split, []).append(task)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*splits.values()))
    return [task for task in in_turn if task is not None][:most]


MAX_TASKS = 100_000


def share(task_id: str) -> float:
    """A number in [0, 1) that the id determines, the same in every process and version."""
    digest = hashlib.blake2b(task_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


# ---- games -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a world after an action, or at its beginning."""

    text: str
    """The message to the model."""
    reward: float = 0.0
    """Reward of the action before: that of its turn."""
    done: bool = False
    actions: Sequence[str] = ()
    """The valid actions: the sampler produces one of them. Empty: any text is an action."""
    schema: Mapping[str, Any] | None = None
    """Instead of `actions`: the JSON schema that an action matches."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the chart; the last of each name counts."""
    why: str = ""
    """Reason for the reward, for people; the last one counts."""

    def __post_init__(self) -> None:
        """Raises `EnvironmentFailed` naming what is of another type."""
        checked_number(self.reward, "the reward of a turn")
        if not isinstance(self.text, str):
            raise EnvironmentFailed(f"the text of an observation is {shown(self.text)}: give a text")
        is_list = isinstance(self.actions, Sequence) and not isinstance(self.actions, str)
        if not (is_list and all(isinstance(action, str) for action in self.actions)):
            raise EnvironmentFailed(f"the actions of an observation are {shown(self.actions)}: give a list of texts")
        for name, value in (("schema", self.schema or {}), ("metrics", self.metrics)):
            if not isinstance(value, Mapping):
                raise EnvironmentFailed(f"the {name} of an observation is {shown(value)}: give a dict")


class World(Protocol):
    """One episode of a game."""

    def reset(self) -> Observation: ...

    def step(self, action: Any) -> Observation:
        """`action` is the text of the answer, one of the valid actions, or the JSON value of the schema."""
        ...

    def close(self) -> None: ...


class Game(Kind):
    """An environment that answers one action at a time."""

    @abstractmethod
    def world(self, task: EnvironmentTask) -> World:
        """Returns a new world for an episode."""

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        """Plays until the world is done, `max_turns` calls were made, or the context is full.

        The reward is the sum over turns. Each turn's reward is in `by_turn`.
        """
        with closing(self.world(task)) as world:
            seen = observation(world.reset(), "reset")
            messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            rewards: list[float] = []
            metrics, why = dict(seen.metrics), seen.why
            most = min(self.max_turns, model.max_turns or self.max_turns)
            while not seen.done and len(rewards) < most:
                messages.append({"role": "user", "content": seen.text})
                try:
                    answer = model.act(messages, seen.actions, seen.schema)
                except ContextFull:
                    if not rewards:
                        raise  # The first observation alone is too long: nothing was played.
                    break
                messages.append(answer.message)
                seen = observation(world.step(answer.action), "step")
                rewards.append(seen.reward)
                metrics, why = metrics | dict(seen.metrics), seen.why or why
        metrics |= {"turns": len(rewards), "completed": seen.done}
        return Reward(sum(rewards), metrics=metrics, by_turn=rewards, text=why)


def observation(seen: Any, method: str) -> Observation:
    """Raises `EnvironmentFailed` if a world returned something else."""
    if not isinstance(seen, Observation):
        raise EnvironmentFailed(f"`{method}` of the world returned {shown(seen)}: return an Observation")
    return seen
