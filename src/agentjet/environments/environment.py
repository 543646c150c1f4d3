"""`Environment`: tasks, held-out tasks and an agent, from a name such as `gymnasium:FrozenLake-v1`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from agentjet.client.command import environment as variables_of
from agentjet.client.episode import AsyncEpisode
from agentjet.environments.kind import EnvironmentFailed, Kind
from agentjet.environments.pool import Pool
from agentjet.environments.registry import check_installed, find, versions
from agentjet.errors import ConfigError, did_you_mean
from agentjet.sandbox import missing
from agentjet.types import MAX_NAME, Reward, Task, shown


class Environment:
    """An environment: `swarm.train(environment.agent, environment.tasks)`. Close it to end its processes."""

    def __init__(self, name: str, kind: Kind, pool: Pool, listed: Sequence[dict[str, Any]]) -> None:
        self.name = name
        self.kind = kind
        self._pool = pool
        self._listed = {row["id"]: row for row in listed}
        self.tasks = self._of("train")
        """Tasks to train on; their task set is `name`."""
        self.held_out = self._of("held_out")
        """Tasks that are never trained on."""
        self.agent = EnvironmentAgent([self])

    def _of(self, split: str) -> list[Task]:
        rows = (row for row in self._listed.values() if row["split"] == split)
        return [Task(row["id"], self.name, row["payload"]) for row in rows]

    async def play(self, task: Task, episode: AsyncEpisode, *, with_actions: bool = False) -> Played:
        """Plays one episode in a process of the pool. Raises `EnvironmentFailed`, which aborts the episode."""
        if task.id not in self._listed or task.task_set != self.name:
            raise EnvironmentFailed(f"{self.name} has no task {task.id!r}: play the tasks of `tasks` or `held_out`")
        order = {
            "do": "play",
            "task": self._listed[task.id],
            "model": self._model(episode),
            "variables": {name: value for name, value in variables_of(task, episode).items() if name in GIVEN},
            "with_actions": with_actions,
        }
        answer = await self._pool.play(order, self.kind.seconds)
        return Played(Reward(**answer["reward"]), answer.get("actions", ()))

    def _model(self, episode: AsyncEpisode) -> dict[str, Any]:
        policy = self.kind.policy
        if episode.policies and policy not in episode.policies:
            names = ", ".join(episode.policies)
            raise ConfigError(f"policy = {policy!r} of {self.name}: the run has the policies {names}; give one of them")
        return {
            "base_url": episode.base_url,
            "api_key": episode.api_key,
            "url_with_key": episode.url_with_key if episode.is_recorded else "",
            "name": policy or episode.model,
            "max_turns": episode.max_turns,
            "max_tokens": self.kind.max_tokens,
            "temperature": self.kind.temperature,
        }

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Environment {self.name}: {len(self.tasks)} tasks, {len(self.held_out)} held out>"


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that was scored."""

    reward: Reward
    actions: Sequence[Any] = ()
    """The valid actions of each call that a `Game` made: a list, a JSON schema, or None for any text."""


class EnvironmentAgent:
    """The agent for the tasks of environments. It returns the reward that the environment gives."""

    def __init__(self, environments: Sequence[Environment]) -> None:
        self._environments = {environment.name: environment for environment in environments}
        self.capacity = {environment.name: environment.kind.processes for environment in environments}
        """Maximum live episodes by task set, so that an environment that hangs does not take the room of others."""
        self.code_version = ", ".join(versions(environment.kind) for environment in environments)

    async def __call__(self, task: Task, episode: AsyncEpisode) -> Reward:
        if task.task_set not in self._environments:
            known = ", ".join(self._environments)
            raise EnvironmentFailed(f"task {task.id!r} is of the task set {task.task_set!r}: there are {known}")
        return (await self._environments[task.task_set].play(task, episode)).reward


GIVEN = frozenset({f"{api}_{name}" for api in ("OPENAI", "ANTHROPIC") for name in ("BASE_URL", "API_KEY", "MODEL")}) | {
    "AGENTJET_EPISODE",
    "AGENTJET_TASK",
    "NO_PROXY",
    "no_proxy",
}
"""Variables that change from one episode to the next."""


def load(name: str, **settings: Any) -> Environment:
    """Returns the environment `KIND:TARGET`, such as `load("gymnasium:FrozenLake-v1", num_tasks=50)`.

    Starts a process that lists the tasks. Raises `ConfigError` for an unknown kind or setting, a missing package (with
    the command that installs it) or tasks that cannot be listed.
    """
    kind_name, environment = parsed(name, settings)
    if len(environment.task_set or name) > MAX_NAME:
        raise ConfigError(f"{name}: it has more than {MAX_NAME} characters: give a shorter name with task_set")
    if environment.sandbox and (reason := missing()):
        raise ConfigError(f"sandbox = true of {name}: {reason}")
    pool = Pool(kind_name, environment)
    try:
        listed = pool.ask({"do": "tasks"}, environment.start_seconds)
        return Environment(environment.task_set or name, environment, pool, listed)
    except EnvironmentFailed as error:
        pool.close()
        raise ConfigError(f"the tasks of {name} cannot be listed: {error}") from None
    except BaseException:
        pool.close()
        raise


def parsed(name: str, settings: dict[str, Any]) -> tuple[str, Kind]:
    """The kind's name and its settings, checked. Raises `ConfigError`."""
    kind_name, _, target = name.partition(":")
    if "target" in settings:
        raise ConfigError(f"target = {shown(settings['target'])}: the target is the part of the name behind the colon")
    kind = find(kind_name)
    check_installed(kind_name, kind)
    if inspect.isabstract(kind):
        raise ConfigError(f"the kind {kind_name!r} is abstract: it must define tasks and play")
    try:
        return kind_name, kind.model_validate({"target": target, **settings})
    except ValidationError as error:
        wrong = error.errors()[0]
    key, message = ".".join(map(str, wrong["loc"])), wrong["msg"].removeprefix("Value error, ")
    if wrong["type"] == "extra_forbidden":
        fields = [field for field in kind.model_fields if field != "target"]
        message = f"unknown setting; {did_you_mean(key, fields, 'there are ' + ', '.join(fields))}"
    raise ConfigError(f"{name}: {key} = {shown(wrong['input'])}: {message}")


class EnvironmentMixture:
    """Several environments of one run, each with its own processes. `job.task_weights` sets their shares of a batch.

    The keys of the weights are the names of the environments.
    """

    def __init__(self, environments: Sequence[Environment]) -> None:
        self.environments = tuple(environments)
        self.tasks = [task for environment in environments for task in environment.tasks]
        self.held_out = [task for environment in environments for task in environment.held_out]
        self.agent = EnvironmentAgent(environments)

    def close(self) -> None:
        for environment in self.environments:
            environment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mixture(environments: Iterable[Environment]) -> EnvironmentMixture:
    """Joins environments for one run: `swarm.train(mixed.agent, mixed.tasks)`. Raises `ConfigError` for equal names."""
    listed = list(environments)
    names = Counter(environment.name for environment in listed)
    if not listed:
        raise ConfigError("a mixture needs at least one environment")
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"there are two environments {twice[0]!r}: give one of them another name with task_set")
    return EnvironmentMixture(listed)
