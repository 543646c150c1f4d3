"""Harbor: `harbor:FOLDER` with task folders. The agent and the verifier work in separate sandboxes.

The agent is a loop of commands, or a program of the user (`agent_command`). `harbor_folder.py` reads the format,
`harbor_machines.py` has the sandboxes, and containers for tasks that need an image.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from agentjet.environments.environment import GIVEN
from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Kind, Split
from agentjet.environments.kinds.harbor_folder import HarborTask, read
from agentjet.environments.kinds.harbor_machines import PATH, Container, Sandboxes, TaskMachine, check, remove
from agentjet.environments.model import ContextFull, Message, Model, ModelAnswer
from agentjet.errors import ConfigError
from agentjet.sandbox import ProgramFolder, programs
from agentjet.types import Reward, beginning, shown

SPLITS: tuple[Split, ...] = ("train", "held_out")
ENDS = ("exit", "done")
"""Commands that end the agent's work."""
MARGIN_SECONDS = 600.0
"""Time of a container beyond the limits of its task."""
MAX_REWARD_BYTES = 1 << 16
REASON_CHARACTERS = 500
PROMPT = "You work in a Linux shell. Answer with one command. Its output is the next message. End with exit."
FENCED = re.compile(r"```(?:bash|sh|shell)?\n(.*?)```", re.DOTALL)
Trajectory = list[dict[str, Any]]


class Harbor(Kind):
    """Tasks in Harbor's format."""

    about: ClassVar[str] = "Folder of Harbor tasks, or one task"

    seconds: float = Field(7200.0, gt=0)
    """Maximum duration of an episode. The limits of `task.toml` hold within it."""
    commands: tuple[str, ...] = ()
    """Commands that the agent chooses from; default: `commands` in the table `metadata.agentjet` of the task, else
    any."""
    commands_each_turn: int = Field(1, ge=1)
    """Number of these commands in an answer, which is a JSON list if there are several."""
    shows_commands: bool = True
    """Write these commands below the instruction. The sampler enforces them either way."""
    command_seconds: float = Field(60.0, gt=0)
    """Maximum duration of a command."""
    output_characters: int = Field(4000, ge=100)
    """Maximum length of an output in the conversation. The middle of a longer one is left out."""
    agent_command: str = ""
    """A program that acts instead of the loop. `{instruction}` becomes the quoted instruction."""
    agent_folders: tuple[str, ...] = ()
    """Folders of this machine that the agent may read, such as that of its program."""
    artefacts: str = ""
    """Folder in which each episode keeps its commands, logs and work folder; default: not kept."""
    lowest: float = 0.0
    """Lowest reward of the verifiers."""
    highest: float = 1.0
    """Highest reward of the verifiers."""

    @field_validator("sandbox")
    @classmethod
    def _has_its_own(cls, value: bool) -> bool:
        if value:
            raise ValueError("tasks of Harbor are always played in sandboxes: leave this setting out")
        return value

    @field_validator("agent_command")
    @classmethod
    def _without_spaces(cls, value: str) -> str:
        return value.strip()

    def tasks(self) -> Iterator[EnvironmentTask]:
        if not self.target:
            raise ConfigError("the name has no folder: give harbor:FOLDER with task folders")
        places = found(_from_caller(self.target))
        tasks = [read(folder) for folder, _ in places]
        for task in tasks:
            self._check(task)
        check(tasks)
        for folder, split in places:
            yield EnvironmentTask(folder.name, {"folder": str(folder)}, split)

    def _check(self, task: HarborTask) -> None:
        limits = (task.table.agent.timeout_sec or 0.0) + task.table.verifier.timeout_sec
        if limits > self.seconds:
            raise ConfigError(
                f"{task.folder / 'task.toml'} allows {limits:g} s, more than seconds = {self.seconds:g}: set seconds"
            )
        if not task.needs_container and (task.memory_mb or 0) > self.memory:
            raise ConfigError(
                f"{task.folder / 'task.toml'} needs {task.memory_mb} MiB, more than memory = {self.memory}: set memory"
            )
        if self.agent_command and task.needs_container:
            raise ConfigError(
                f"agent_command works in sandboxes, and {task.folder.name} needs a container ({task.needs_container})"
            )

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        """Lets the agent work, then the verifier. Raises `EnvironmentFailed` if there is no valid reward."""
        harbor = read(Path(task.payload["folder"]))
        check([harbor])
        with ProgramFolder(dir=Path.cwd()) as folder:
            machine = self._machine(harbor, Path(folder), model)
            trajectory: Trajectory = []
            try:
                metrics = self._work(harbor, machine, model, trajectory)
                machine = machine.verifier()
                self._keep(task.id, "work", machine, harbor.layout.workdir)
                self._keep(task.id, "agent", machine, "/logs/agent")
                rewards, output = self._verified(harbor, machine, Path(folder, "verifier"))
            finally:
                self._write(task.id, "trajectory.json", json.dumps(trajectory, indent=1))
                with suppress(EnvironmentFailed, OSError):
                    self._keep(task.id, "verifier", machine, "/logs/verifier")
                machine.close()
        value = self._checked(task.id, rewards)
        text = beginning(output.strip()[-REASON_CHARACTERS:], REASON_CHARACTERS)
        return Reward(value, metrics=metrics | rewards, text=text)

    def _machine(self, task: HarborTask, folder: Path, model: Model) -> TaskMachine:
        if task.needs_container:
            limits = (task.table.agent.timeout_sec or self.seconds) + task.table.verifier.timeout_sec
            return Container(task, limits + MARGIN_SECONDS)
        root = folder / "root"
        root.mkdir()
        seen = tuple(map(_from_caller, self.agent_folders))
        if not self.agent_command:
            return Sandboxes(task, root, seen)
        seen += programs(self.agent_command.split()[0])
        paths = (urlsplit(url).path for url in (model.base_url, model.url_with_key) if url)
        return Sandboxes(task, root, seen, model.base_url, tuple(paths))

    # ---- the agent ----

    def _work(self, task: HarborTask, machine: TaskMachine, model: Model, trajectory: Trajectory) -> dict[str, float]:
        """Runs the agent until its end, or the time of `task.toml`. Returns metrics."""
        seconds = task.table.agent.timeout_sec or self.seconds
        if not self.agent_command:
            return self._loop(task, machine, model, trajectory, seconds)
        command = self.agent_command.replace("{instruction}", shlex.quote(task.instruction))
        variables = {name: os.environ[name] for name in GIVEN if name in os.environ}
        variables["PATH"] = f"{PATH}:{os.environ.get('PATH', '')}"  # The program may lie in a folder of the user's.
        ran = machine.run(["bash", "-c", command], seconds, variables)
        trajectory.append({"command": self.agent_command, "output": ran.output, "code": ran.code, "end": ran.excess})
        if ran.code:
            raise EnvironmentFailed(f"the agent ended with exit code {ran.code}; it printed last: {_last(ran.output)}")
        return {"agent_ended_by_limit": float(ran.code is None)}

    def _loop(
        self, task: HarborTask, machine: TaskMachine, model: Model, trajectory: Trajectory, seconds: float
    ) -> dict[str, float]:
        """The time of the model's answers does not count: the server may be learning."""
        menu = list(self.commands or task.table.metadata.agentjet.commands)
        messages = [{"role": "system", "content": self.system_prompt or PROMPT}]
        listed = "\n".join(["", "", "Commands:", *menu]) if menu and self.shows_commands else ""
        messages.append({"role": "user", "content": task.instruction + listed})
        most = min(self.max_turns, model.max_turns or self.max_turns)
        while len(trajectory) < most and seconds > 0:
            try:
                answer = self._answer(model, messages, menu)
            except ContextFull:
                if not trajectory:
                    raise  # The instruction alone is too long: nothing was done.
                break
            command = _command(answer.action)
            if command in ENDS:
                trajectory.append({"command": command})
                break
            started = time.monotonic()
            ran = machine.run(["bash", "-c", command], min(seconds, self.command_seconds), {})
            seconds -= time.monotonic() - started
            trajectory.append({"command": command, "output": ran.output, "code": ran.code, "end": ran.excess})
            messages += [answer.message, {"role": "user", "content": self._shown(ran.output, ran.code, ran.excess)}]
        return {"turns": float(len(trajectory))}

    def _answer(self, model: Model, messages: list[Message], menu: list[str]) -> ModelAnswer:
        """An answer whose action is a text: a command, or several in lines."""
        number = self.commands_each_turn
        if not menu or number == 1:
            return model.act(messages, menu)
        items = {"type": "string", "enum": menu}
        schema = {"type": "array", "items": items, "minItems": number, "maxItems": number}
        answer = model.act(messages, schema=schema)
        return ModelAnswer(answer.message, "\n".join(answer.action))

    def _shown(self, output: str, code: int | None, excess: str) -> str:
        """The message to the model about a command."""
        half = self.output_characters // 2
        if len(output) > self.output_characters:
            output = f"{output[:half]}\n[{len(output) - 2 * half} characters]\n{output[-half:]}"
        end = f"[{excess}]" if excess else f"[exit code {code}]" if code else ""
        return "\n".join(part for part in (output.rstrip(), end) if part) or "[no output]"

    # ---- the verifier ----

    def _verified(self, task: HarborTask, machine: TaskMachine, folder: Path) -> tuple[dict[str, float], str]:
        """The numbers that the verifier wrote, and its output."""
        machine.put(task.folder / "tests", "/tests")
        seconds, name = task.table.verifier.timeout_sec, task.folder.name
        script = "chmod +x /tests/test.sh; exec /tests/test.sh"
        ran = machine.run(["bash", "-c", script], seconds, task.table.verifier.env)
        self._write(name, "test-stdout.txt", ran.output)
        if ran.excess:
            raise EnvironmentFailed(f"the verifier of {name} {ran.excess}; it printed last: {_last(ran.output)}")
        machine.get("/logs/verifier", folder)
        try:
            return rewards_in(folder), ran.output
        except ValueError as error:
            raise EnvironmentFailed(f"the verifier of {name} {error}; it printed last: {_last(ran.output)}") from None

    def _checked(self, task_id: str, rewards: Mapping[str, float]) -> float:
        """The number "reward", or the only number."""
        value = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else math.nan)
        if math.isnan(value):
            raise EnvironmentFailed(
                f"reward.json of {task_id} has {', '.join(rewards) or 'no numbers'}: one of them must be called reward"
            )
        if not self.lowest <= value <= self.highest:
            raise EnvironmentFailed(
                f"the verifier of {task_id} gave the reward {value:g}: it must be from {self.lowest:g} to "
                f"{self.highest:g}, or set lowest and highest"
            )
        return value

    # ---- artefacts ----

    def _place(self, task_id: str) -> Path:
        place = _from_caller(self.artefacts) / task_id / os.environ.get("AGENTJET_EPISODE", "episode")
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _keep(self, task_id: str, name: str, machine: TaskMachine, source: str) -> None:
        if self.artefacts:
            remove(self._place(task_id) / name)
            machine.get(source, self._place(task_id) / name)

    def _write(self, task_id: str, name: str, text: str) -> None:
        if self.artefacts:
            (self._place(task_id) / name).write_text(text)


def _from_caller(path: str) -> Path:
    """A path that is relative to the folder in which the user works."""
    return Path(os.environ.get("AGENTJET_CALLER", "."), Path(path).expanduser()).resolve()


def found(folder: Path) -> list[tuple[Path, Split]]:
    """The task folders below a folder, in the order of their names, with their split."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give a folder with task folders of Harbor")
    if (folder / "task.toml").exists() or (folder / "instruction.md").exists():
        return [(folder, "")]
    splits: list[tuple[Path, Split]] = [(folder / split, split) for split in SPLITS if (folder / split).is_dir()]
    places = [(path, split) for place, split in splits or [(folder, "")] for path in sorted(place.iterdir())]
    tasks = [(path, split) for path, split in places if path.is_dir() and not path.name.startswith((".", "_"))]
    if not tasks:
        raise ConfigError(f"{folder} has no task folders: each has a task.toml")
    return tasks


def rewards_in(folder: Path) -> dict[str, float]:
    """The numbers of `reward.json`, else of `reward.txt`. Raises `ValueError`."""
    for name in ("reward.json", "reward.txt"):
        text = _read_regular(folder / name)
        if text is None:
            continue
        if not text.strip():
            raise ValueError(f"wrote an empty {name}")
        try:
            content = json.loads(text) if name == "reward.json" else float(text)
        except (ValueError, RecursionError):
            raise ValueError(f"wrote {beginning(text.strip(), 80)!r} into {name}, which is not a number") from None
        numbers = content if isinstance(content, dict) else {"reward": content}
        for key, value in numbers.items():
            if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"wrote {key} = {shown(value)} into {name}, which is not a finite number")
        return {key: float(value) for key, value in numbers.items()}
    raise ValueError("wrote no reward: it must write reward.txt or reward.json into /logs/verifier")


def _read_regular(path: Path) -> str | None:
    """The text of a file; None without one. A link could lead to a file of this machine, and a pipe has no end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        raise ValueError(f"made {path.name}, which is not a file") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"made {path.name}, which is not a file")
        return os.read(descriptor, MAX_REWARD_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


def _command(action: str) -> str:
    """The command in an answer: its first block of code, else the whole text."""
    block = FENCED.search(action)
    return (block[1] if block else action).strip()


def _last(output: str) -> str:
    return output.strip()[-REASON_CHARACTERS:] or "nothing"
