"""OpenEnv: a running server, the folder of an `openenv init` project, or an installed environment package.

Folders and packages are served by uvicorn on a free loopback port, one server for each process of the pool. Actions
are restricted by the server's JSON schema of actions.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, ClassVar

import httpx
from pydantic import Field, PrivateAttr

from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Game, Observation, Split
from agentjet.environments.model import Model
from agentjet.errors import ConfigError, did_you_mean
from agentjet.types import Reward, beginning

ENDLESS = 100
START_SECONDS = 120.0
KEPT_LINES = 30
LONGEST_LINE = 1000
PAUSE_SECONDS = 0.2
MISSING = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
TEXT = {"type", "title", "description", "default"}
"""Keys of the schema of a text without restrictions."""
MANIFEST = "openenv.yaml"


class OpenEnv(Game):
    """An environment of OpenEnv, played through a session of its server."""

    requires: ClassVar[str] = "openenv>=0.4,<0.11"
    about: ClassVar[str] = "the URL of an OpenEnv server, its folder, or its installed package"
    keeps_processes: ClassVar[bool] = True

    seed: int = Field(0, ge=0)
    """Seed of the first task; the others follow. Not used if the server lists tasks."""
    reset: Mapping[str, Any] = Field(default_factory=dict)
    """More arguments of `reset`."""
    text: str = ""
    """Field of the observation that the model reads; default: the only field, else all of them as JSON."""
    app: str = ""
    """Import path of the server's application; default: `app` of openenv.yaml."""

    _servers: list[OpenEnvServer] = PrivateAttr(default_factory=list)

    def tasks(self) -> Iterator[EnvironmentTask]:
        """The server's own tasks, or seeds."""
        server = self._server()
        server.ask("/schema")  # Another server is an error before the run.
        splits = server.splits()
        if not splits:
            for seed in itertools.islice(itertools.count(self.seed), self.num_tasks or ENDLESS):
                yield EnvironmentTask(f"seed-{seed}", {"reset": {"seed": seed}})
            return
        both = {split for split, _, _ in splits} == {"train", "held_out"}
        rows = [[(split, name, index) for index in range(number)] for split, name, number in splits]
        for split, name, index in filter(None, itertools.chain(*itertools.zip_longest(*rows))):
            reset = {"split": name, "index": index}
            yield EnvironmentTask(f"{name}-{index}", {"reset": reset}, split if both else "")

    def world(self, task: EnvironmentTask) -> OpenEnvWorld:
        return OpenEnvWorld(self, self._server(), task.payload["reset"])

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        reward = super().play(task, model)
        if not reward.metrics.get("scored_steps"):
            raise EnvironmentFailed("no step had a reward: the environment must set Observation.reward")
        return reward

    def close(self) -> None:
        while self._servers:
            self._servers.pop().close()

    def _server(self) -> OpenEnvServer:
        """The server, started if it does not run. Raises `ConfigError` or `EnvironmentFailed`."""
        if self._servers and not self._servers[-1].has_ended:
            return self._servers[-1]
        self.close()
        if re.match("https?://", self.target):
            self._servers.append(OpenEnvServer(self.target.rstrip("/")))
        else:
            self._servers.append(_started(*_application(self.target, self.app)))
        return self._servers[-1]


# ---- a session -------------------------------------------------------------------------------------------------------


class OpenEnvWorld:
    def __init__(self, kind: OpenEnv, server: OpenEnvServer, reset: Mapping[str, Any]) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._kind, self._server, self._reset = kind, server, dict(kind.reset) | dict(reset)
        self._client: Any = GenericEnvClient(base_url=server.url, message_timeout_s=kind.seconds).sync()
        self._form = server.ask("/schema")["action"]
        self._fields = {name: field for name, field in self._form.get("properties", {}).items() if name != "metadata"}
        self._tools: list[dict[str, Any]] = []
        self._session: Any = None
        self._num_scored = 0

    def reset(self) -> Observation:
        result = self._answer(lambda: self._client.reset(**self._reset))
        self._session = self._state().get("episode_id")
        intro = ""
        if "tool_name" in self._fields:  # An MCP environment.
            listed = self._answer(lambda: self._client.step({"type": "list_tools"})).observation
            self._tools = listed.get("tools") or []
            lines = [f"{tool['name']}: {tool.get('description') or ''}" for tool in self._tools]
            intro = "\n".join(["Tools:", *lines, "", ""])
        seen = self._observed(result, 0.0)
        return Observation(intro + seen.text, done=seen.done, actions=seen.actions, schema=seen.schema)

    def step(self, action: Any) -> Observation:
        if self._tools:
            action = {"type": "call_tool", **action}
        elif self._choices() or self._is_text():
            action = {next(iter(self._fields)): action}
        result = self._answer(lambda: self._client.step(action))
        self._num_scored += result.reward is not None
        reward = 0.0 if result.reward is None else float(result.reward)
        low, high = self._server.reward_range
        if not low <= reward <= high and result.reward is not None:
            raise EnvironmentFailed(f"the reward {reward:g} is not in the range {low:g} to {high:g} of {MANIFEST}")
        return self._observed(result, reward)

    def close(self) -> None:
        with suppress(Exception):  # The session may be lost; the reason of that is reported.
            self._client.close()

    def _observed(self, result: Any, reward: float) -> Observation:
        state = self._state()
        if state.get("episode_id") != self._session:
            raise EnvironmentFailed(self._server.described("the server lost the session"))
        numbers = {**state, **(result.metadata or {}), "scored_steps": self._num_scored}
        metrics = {
            name: float(value) for name, value in numbers.items() if isinstance(value, int | float) and name not in OURS
        }
        text = self._text(result.observation)
        return Observation(text, reward, bool(result.done), self._choices(), self._schema(), metrics)

    def _text(self, observation: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
        if self._kind.text:
            if self._kind.text not in fields:
                way_out = did_you_mean(self._kind.text, fields, f"the observation has {', '.join(fields)}")
                raise ConfigError(f"text = {self._kind.text!r}: {way_out}")
            fields = {self._kind.text: fields[self._kind.text]}
        if len(fields) == 1 and isinstance(value := next(iter(fields.values())), str):
            return value
        return json.dumps(fields, ensure_ascii=False)

    def _choices(self) -> tuple[str, ...]:
        """The values of the only field of an action, if they are texts of a list."""
        if len(self._fields) != 1:
            return ()
        field = next(iter(self._fields.values()))
        name = field.get("$ref", "").rpartition("/")[2]
        values = self._form.get("$defs", {}).get(name, field).get("enum", ())
        return tuple(values) if all(isinstance(value, str) for value in values) else ()

    def _is_text(self) -> bool:
        fields = list(self._fields.values())
        return len(fields) == 1 and fields[0].get("type") == "string" and fields[0].keys() <= TEXT

    def _schema(self) -> Mapping[str, Any] | None:
        if self._tools:
            return {"anyOf": [_call(tool) for tool in self._tools]}
        if self._choices() or self._is_text():
            return None
        return {**self._form, "properties": self._fields, "additionalProperties": False}

    def _state(self) -> dict[str, Any]:
        return dict(self._answer(self._client.state) or {})

    def _answer(self, ask: Any) -> Any:
        """The server's answer. Waits for a free session. Raises `EnvironmentFailed` with what the server printed."""
        while True:
            try:
                return ask()
            except Exception as error:  # The client raises errors of three libraries.
                if "CAPACITY_REACHED" not in str(error):
                    problem = f"{type(error).__name__}: {error}"
                    raise EnvironmentFailed(self._server.described(problem)) from error
            self._client.disconnect()
            time.sleep(PAUSE_SECONDS)


OURS = frozenset({"step_count", "turns", "completed"})


def _call(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call of a tool."""
    arguments = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"tool_name": {"const": tool["name"]}, "arguments": arguments},
        "required": ["tool_name", "arguments"],
        "additionalProperties": False,
    }


# ---- the server ------------------------------------------------------------------------------------------------------


class OpenEnvServer:
    """A server of the user at a URL, or a process that we started."""

    def __init__(
        self, url: str, process: subprocess.Popen[bytes] | None = None, reward_range: tuple[float, float] | None = None
    ) -> None:
        self.url = url
        self.reward_range = reward_range or (float("-inf"), float("inf"))
        self._process = process
        self._printed: deque[str] = deque(maxlen=KEPT_LINES)
        self._listens = threading.Event()
        if process is not None:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while line := process.stdout.readline(LONGEST_LINE):
            text = line.decode(errors="replace").rstrip()
            if match := re.search(r"^INFO: .* running on (http://127\.0\.0\.1:\d+)", text):
                self.url = match[1]
                self._listens.set()
            if not text.startswith("INFO: "):
                self._printed.append(text)
        self._listens.set()

    def wait(self) -> None:
        """Waits until the process listens. Raises `EnvironmentFailed`."""
        assert self._process is not None
        if not self._listens.wait(START_SECONDS):
            problem = f"the server did not listen within {START_SECONDS:g} s"
        elif self.url:
            return
        else:
            problem = f"the server ended with exit code {self._process.wait()} before it listened"
        self.close()
        raise EnvironmentFailed(self.described(problem))

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def described(self, problem: str) -> str:
        """The problem, with what the server printed last."""
        if self._process is None:
            return f"{problem} ({self.url})"
        printed = "\n".join(self._printed)
        return f"{problem}; the server printed last: {printed}" if printed else f"{problem}; the server printed nothing"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer, or None if the server has no such function. Raises `EnvironmentFailed`."""
        is_local = httpx.URL(self.url).host in ("localhost", "127.0.0.1", "::1")
        try:
            with httpx.Client(trust_env=not is_local, timeout=30.0) as client:
                answer = client.get(self.url + path) if body is None else client.post(self.url + path, json=body)
            if path != "/schema" and answer.status_code in MISSING:
                return None
            answer.raise_for_status()
            found = answer.json()
            if path == "/schema" and not isinstance(found.get("action"), dict):
                raise ValueError(f"{path} has no schema of actions")
        except httpx.TransportError as error:
            problem = f"no server answers at {self.url} ({error}): start it, or give its folder"
            raise EnvironmentFailed(self.described(problem) if self._process else problem) from None
        except (httpx.HTTPStatusError, ValueError, AttributeError) as error:
            what = beginning(str(error).partition("\n")[0], 200)
            raise EnvironmentFailed(self.described(f"{self.url} is not a server of OpenEnv: {what}")) from None
        return found

    def splits(self) -> list[tuple[Split, str, int]]:
        """The server's splits: ours, its name, and the number of its tasks."""
        names = self.ask("/list_environments") or []
        found = (self.ask(f"/{names[0]}/splits") if names else None) or []
        splits: list[tuple[Split, str, int]] = []
        for split in found:
            number = (self.ask(f"/{names[0]}/num_tasks", {"split": split["name"]}) or {}).get("num_tasks", 0)
            splits.append(("train" if split.get("type") == "train" else "held_out", split["name"], int(number)))
        return splits

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _started(folder: Path, app: str, reward_range: tuple[float, float] | None) -> OpenEnvServer:
    """Starts a server. It gets no variables of the episode, which would be those of its first episode only."""
    command = [sys.executable, "-P", "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "0", "--no-access-log"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    server = OpenEnvServer("", process, reward_range)
    server.wait()
    return server


def _application(target: str, app: str) -> tuple[Path, str, tuple[float, float] | None]:
    """The folder, the import path of the application, and the range of rewards. Raises `ConfigError`."""
    folder, prefix = Path(os.environ.get("AGENTJET_CALLER", ""), Path(target).expanduser()).resolve(), ""
    if not folder.is_dir():
        name = target.replace("-", "_")
        found = importlib.util.find_spec(name) if name.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            way_out = did_you_mean(name, _installed(), "give a URL, a folder or an installed package")
            raise ConfigError(f"there is no OpenEnv environment {target!r}; {way_out}")
        folder, prefix = Path(next(iter(found.submodule_search_locations))), f"{name}."
    path = folder / MANIFEST
    if not path.is_file() and not app:
        raise ConfigError(f"{folder} has no {MANIFEST}: give the folder that `openenv init` made, or set app")
    manifest = importlib.import_module("yaml").safe_load(path.read_text()) if path.is_file() else {}
    if not isinstance(manifest, dict) or not (app := app or str(manifest.get("app") or "")):
        raise ConfigError(f"{path} names no app: add `app: server.app:app`, or set app")
    limits = ((manifest.get("validation") or {}).get("reward") or {}).get("range")
    return (folder.parent if prefix else folder), prefix + app, tuple(limits) if limits else None


def _installed() -> list[str]:
    """Names of the installed packages of environments."""
    names = [distribution.metadata["Name"] for distribution in distributions()]
    return [name.removeprefix("openenv-").replace("-", "_") for name in names if name.startswith("openenv-")]
