"""Servers of OpenEnv, unmodified.

1. The project that `openenv init` makes, a project of our own with splits and enumerated actions, and one with tools.
2. Failures of the server abort the episode, with what the server printed.
3. A wrong target, setting or version is an error before the run.
"""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentjet import environments
from agentjet.environments import Environment, EnvironmentFailed
from agentjet.environments.kinds.openenv import OpenEnv
from agentjet.environments.registry import check_installed
from agentjet.errors import ConfigError
from tests.environments.episodes import Play, episodes
from tests.needs import need

need("openenv")

PROJECT = Path(__file__).parent / "guess_env"


def load(target: Path | str = PROJECT, **settings: Any) -> Environment:
    return environments.load(f"openenv:{target}", **{"processes": 1, **settings})


def reply(prompt: str) -> str:
    if "add" in prompt:
        return '{"tool_name": "add", "arguments": {"a": 2, "b": 3}}'
    return '"up"' if "up or down" in prompt else "hello"


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    with episodes(reply) as (play, _):
        yield play


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run(
        [sys.executable, "-m", "openenv.cli", "init", "echo_env"], cwd=folder, check=True, capture_output=True
    )
    return folder / "echo_env"


def test_the_template_is_played(play: Play, template: Path) -> None:
    with load(template, max_turns=3, num_tasks=10, seed=7) as environment:
        ids = [task.id for task in (*environment.tasks, *environment.held_out)]
        reward = play(environment, environment.tasks[0])
    assert sorted(ids) == sorted(f"seed-{seed}" for seed in range(7, 17))
    assert reward.by_turn == (0.5, 0.5, 0.5)
    assert reward.metrics == {"completed": 0.0, "scored_steps": 3.0, "step": 3.0, "turns": 3.0}


def test_splits_enumerated_actions_and_one_session_for_many_processes(play: Play) -> None:
    with load() as first, load() as second:
        for environment in (first, second):
            assert [task.id for task in environment.tasks] == [f"train-{index}" for index in range(5)]
            assert [task.id for task in environment.held_out] == [f"test-{index}" for index in range(8)]
        reward = play(first, first.held_out[1])
    assert (reward.value, reward.by_turn) == (2.0, (1.0, 1.0))
    assert reward.metrics == {"completed": 1.0, "scored_steps": 2.0, "steps_left": 0.0, "turns": 2.0}


def test_tools_are_actions(play: Play) -> None:
    with load(app="tools:app", max_turns=1, num_tasks=2, held_out=0) as environment:
        assert play(environment, environment.tasks[0]).value == 1.0


REASONS = [
    "no step had a reward: the environment must set Observation.reward",
    "no step had a reward",  # OpenEnv sends NaN as null.
    "the reward 3 is not in the range 0 to 1 of openenv.yaml",
    "Server error: the board fell",
    r"ConnectionClosed.*the server printed last: ",
]


def test_failures_of_the_server_are_reasons(play: Play) -> None:
    with load() as environment:
        for task, reason in zip(environment.held_out[2:-1], REASONS, strict=True):
            with pytest.raises(EnvironmentFailed, match=f"(?s){reason}"):
                play(environment, task)
        assert play(environment, environment.held_out[0]).value == 2.0  # The server was started again.


def test_a_server_that_hangs_is_ended(play: Play) -> None:
    reason = "it did not end within 3 s and was ended"
    with load(seconds=3) as environment, pytest.raises(EnvironmentFailed, match=reason):
        play(environment, environment.held_out[-1])


def test_a_wrong_field_has_the_nearest_name(play: Play) -> None:
    with load(text="texd") as environment, pytest.raises(ConfigError, match="text = 'texd': did you mean 'text'"):
        play(environment, environment.tasks[0])


def test_a_running_server_and_one_that_is_down(play: Play) -> None:
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", "0"]
    with subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "running on" in line)
        url = line.split("running on ")[1].split()[0]
        try:
            with load(url) as environment:
                assert play(environment, environment.tasks[0]).value == 2.0
                process.kill()
                process.wait()
                with pytest.raises(EnvironmentFailed, match=f"no server answers at {url} .*start it, or give its"):
                    play(environment, environment.tasks[0])
        finally:
            process.kill()
    with pytest.raises(ConfigError, match=f"cannot be listed: no server answers at {url}"):
        load(url)


def test_a_server_of_something_else() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match=r"is not a server of OpenEnv: .*501"):
            load(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


@pytest.mark.parametrize(
    ("target", "settings", "sentence"),
    [
        ("eco-env", {}, "there is no OpenEnv environment 'eco-env'; give a URL, a folder or an installed package"),
        (PROJECT.parent, {}, "environments has no openenv.yaml: give the folder that `openenv init` made, or set app"),
        (PROJECT, {"app": "apq:app"}, "the server ended with exit code 3 before it listened; .*apq"),
        (PROJECT, {"seed": -1}, "seed = -1: Input should be greater than or equal to 0"),
        (PROJECT, {"sead": 1}, "sead = 1: unknown setting; did you mean 'seed'?"),
    ],
)
def test_what_is_wrong_is_said_before_the_run(target: Path | str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){sentence}"):
        load(target, **settings)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.environments.registry.version", lambda package: "0.3.1")
    sentence = "openenv 0.3.1 does not fit the kind openenv, which needs openenv>=0.4,<0.11: .*pip install"
    with pytest.raises(ConfigError, match=sentence):
        check_installed("openenv", OpenEnv)
