"""verifiers: `verifiers:my-taskset`, a taskset with its harness and runtime.

The target is an installed environment package, a file or a folder. The library's own `Env.run_episode` plays an
episode, and the sum of the rewards of its traces is the reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from sys import executable
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, ValidationError

from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Kind, Split
from agentjet.environments.model import Model
from agentjet.errors import ConfigError, did_you_mean
from agentjet.types import Reward, shown

LAST_CLASSIC = "0.3.1"
"""The last version of verifiers that runs `load_environment` functions."""
ENDLESS = 100
KEY = "OPENAI_API_KEY"
"""The library takes the key from a variable. The pool sets it for each episode."""


class Verifiers(Kind):
    """A taskset of verifiers."""

    requires: ClassVar[str] = "verifiers>=0.4,<0.5"
    about: ClassVar[str] = "an installed taskset of verifiers, its file or its folder"

    taskset: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the taskset."""
    held_out_taskset: Mapping[str, Any] | None = None
    """Settings that give the held-out tasks, such as `split: test`; default: a share of the tasks."""
    harness: str = ""
    """Harness; default: the one of the environment if it has one, else `null`, which only chats and calls tools."""
    runtime: str = ""
    """Place of the harness; default: the one of the environment if it is on this machine, else `subprocess`."""
    env: Mapping[str, Any] = Field(default_factory=dict)
    """More of the library's `[env]` settings, such as `{"agent": {"timeout": {"rollout": 60}}}`."""

    _envs: dict[tuple[Split, int], Any] = PrivateAttr(default_factory=dict)
    _rows: dict[Split, dict[str, Any]] = PrivateAttr(default_factory=dict)

    def tasks(self) -> Iterator[EnvironmentTask]:
        splits: tuple[Split, ...] = ("",) if self.held_out_taskset is None else ("train", "held_out")
        for split in splits:
            for task_id in self._tasks(split, self._env(split, self.max_turns)):
                yield EnvironmentTask(task_id, {"split": split}, split)

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        vf = importlib.import_module("verifiers.v1")
        split = task.payload["split"]
        env = self._env(split, min(self.max_turns, model.max_turns or self.max_turns))
        row = self._tasks(split, env).get(task.id)
        if row is None:
            raise EnvironmentFailed(f"{self.target} has no task {task.id!r} now: it must load the same tasks each time")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # Tool servers are processes that import it.
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        context = vf.ModelContext(
            model=model.name,
            client=vf.EvalClientConfig(base_url=model.base_url, api_key_var=KEY),
            sampling=vf.SamplingConfig(**{name: value for name, value in sampling.items() if value is not None}),
        )
        return _reward(asyncio.run(_played(env, row, context)), model.base_url)

    def _tasks(self, split: Split, env: Any) -> dict[str, Any]:
        """The library's tasks by id. Equal tasks are numbered in their order."""
        if split not in self._rows:
            rows = self._rows[split] = {}
            seen: Counter[str] = Counter()
            for row in itertools.islice(env.taskset, self.num_tasks or (None if env.taskset.bounded else ENDLESS)):
                name = f"held-out-{_id(row)}" if split == "held_out" else _id(row)
                seen[name] += 1
                rows[name if seen[name] == 1 else f"{name}-{seen[name]}"] = row
        return self._rows[split]

    def _env(self, split: Split, max_turns: int) -> Any:
        """The library's environment with the settings of a split. Raises `ConfigError`."""
        if (split, max_turns) in self._envs:
            return self._envs[split, max_turns]
        vf = importlib.import_module("verifiers.v1")
        name = _module_name(self.target)
        _check_taskset(vf, self.target, name)
        _run_chats_with_this_python()
        held_out = (self.held_out_taskset or {}) if split == "held_out" else {}
        block: dict[str, Any] = {**self.env, "taskset": {**self.taskset, **held_out, "id": name}}
        try:
            for role, field in vf.env_config_type(name, block.get("id", "")).model_fields.items():
                if isinstance(field.default, vf.AgentConfig):
                    block[role] = self._seat(vf, field.default, name, max_turns) | dict(block.get(role, {}))
            self._envs[split, max_turns] = vf.load_environment(vf.resolve_env_config(block))
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"verifiers refuses the settings of {self.target}: {_first(error)}") from None
        return self._envs[split, max_turns]

    def _seat(self, vf: Any, seat: Any, name: str, max_turns: int) -> dict[str, Any]:
        """Settings of a role: its harness and its runtime, which is never a cloud by default."""
        from verifiers.v1.runtimes import runtime_is_local

        settings: dict[str, Any] = {"max_turns": max_turns}
        own_harness = vf.default_harness_id(name)  # "bash" if the taskset brings none.
        if self.harness or (seat.harness is None and own_harness == "bash"):
            settings["harness"] = {"id": self.harness or "null"}
        if self.runtime or not runtime_is_local(seat.runtime):
            settings["runtime"] = {"type": self.runtime or "subprocess"}
        return settings


async def _played(env: Any, row: Any, context: Any) -> Any:
    async with env.serving():
        return await env.run_episode(row, context)


def _reward(episode: Any, base_url: str) -> Reward:
    """The sum of the rewards of the traces. Raises `EnvironmentFailed` with the library's error, or without a score."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        stops = ", ".join(str(trace.stop_condition) for trace in episode.traces)
        raise EnvironmentFailed(f"{errors[-1].type}: {errors[-1].message}" if errors else f"it stopped: {stops}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == base_url:
            raise EnvironmentFailed(
                f"the role {trace.agent.name!r} is not trained, but calls the policy: give it a model of its own with "
                f'env = {{"{trace.agent.name}": {{"model": ..., "client": {{"base_url": ..., "api_key_var": ...}}}}}}'
            )
    rewards = [(trace, name, reward) for trace in traces for name, reward in trace.rewards.items()]
    if not rewards:
        raise EnvironmentFailed("the episode has no reward: the task needs a method with @vf.reward")
    for trace, name, reward in rewards:
        if reward is None:
            stop = trace.stop_condition
            raise EnvironmentFailed(f"the reward {name!r} was not computed: the episode ended by {stop}")
    numbers: dict[str, list[float]] = {}
    for trace in traces:
        scores = {name: reward.score for name, reward in trace.rewards.items()}
        known = {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in {**scores, **known, "turns": trace.num_turns, "truncated": trace.is_truncated}.items():
            numbers.setdefault(name, []).append(float(value))
    return Reward(
        sum(reward.value for _, _, reward in rewards),
        metrics={name: sum(values) / len(values) for name, values in numbers.items()},
        text=", ".join(f"{name} {reward.score:g}" for _, name, reward in rewards),
    )


def _id(row: Any) -> str:
    """The task's own id, or its content without its position."""
    from verifiers.v1 import Task

    if row.data.id:
        return str(row.data.id)
    return str(row.key) if type(row).key is not Task.key else str(row.with_data(idx=None).hash)[:16]


# ---- the target ------------------------------------------------------------------------------------------------------


def _module_name(target: str) -> str:
    """The name that the library imports. A file or folder is put on the path of modules. Raises `ConfigError`."""
    path = Path(os.environ.get("AGENTJET_CALLER", ""), Path(target).expanduser()).resolve()
    is_path = target.endswith(".py") or target.startswith((".", "~", "/")) or ("/" in target and path.exists())
    if not is_path:
        return target
    name = path.name.removesuffix(".py").replace("-", "_")
    for folder in (path.parent, path):
        file = folder / f"{name}.py" if path.suffix == ".py" else folder / name / "__init__.py"
        if file.is_file() and name == name.lower():
            sys.path.insert(0, str(folder))
            return name
    raise ConfigError(
        f"{target} is not a taskset: give a file such as my_tasks.py, or a folder with __init__.py or a package of its "
        "own name, in small letters"
    )


def _check_taskset(vf: Any, target: str, name: str) -> None:
    """Raises `ConfigError` if the target does not exist, lacks a package, or has no taskset."""
    try:
        module = vf.import_taskset(name)
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", None) or error.name or ""
        if missing and missing.split(".")[-1] != name.rsplit("/", 1)[-1].split("@")[0].replace("-", "_").lower():
            raise ConfigError(f"{target} needs the package {missing}: install it in the same Python") from None
        way_out = did_you_mean(name, _installed(), "install its package, or give a file such as ./my_tasks.py")
        raise ConfigError(f"there is no taskset {target!r}; {way_out}") from None
    names = getattr(module, "__all__", ())
    if any(isinstance(item := getattr(module, n, None), type) and issubclass(item, vf.Taskset) for n in names):
        return
    if hasattr(module, "load_environment"):
        raise ConfigError(
            f"{target} is a classic environment (load_environment). verifiers {LAST_CLASSIC} was the last version that "
            "runs it, and this kind needs 0.4: ask its author for a taskset, or run it as an agent of its own"
        )
    raise ConfigError(f"{target} exports no taskset: name a subclass of vf.Taskset in __all__ of {module.__file__}")


def _installed() -> list[str]:
    """Names of the installed packages that need verifiers, and of the library's own tasksets."""
    import pkgutil

    from verifiers.v1 import tasksets

    own = [module.name for module in pkgutil.iter_modules(tasksets.__path__)]
    needs = (d for d in distributions() if any(r.startswith("verifiers") for r in d.requires or ()))
    return [*own, *(d.metadata["Name"] for d in needs)]


def _first(error: Exception) -> str:
    """The first line of an error, or the first finding of a validation."""
    if isinstance(error, ValidationError):
        finding = error.errors()[0]
        return f"{'.'.join(map(str, finding['loc']))} = {shown(finding['input'])}: {finding['msg']}"
    return str(error).partition("\n")[0]


def _run_chats_with_this_python() -> None:
    """Prepares the library's chat program, which would otherwise need the program uv and a network.

    Its packages are packages of the library itself, so this interpreter has them.
    """
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    program = CHAT_PROGRAM_SOURCE.encode()
    path = Path(SubprocessRuntime.scripts_dir, f"{hashlib.sha256(program).hexdigest()}.py")
    if not path.is_file() or path.read_bytes() != program:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.tmp")
        new.write_bytes(program)
        new.replace(path)  # Other processes may run it now.
    SubprocessRuntime._interpreters[str(path)] = executable
