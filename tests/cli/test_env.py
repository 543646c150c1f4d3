"""`agentjet env`, and `--env` of `run` and `eval`, on kinds that the tests load by import path."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentjet.cli.env import environment_settings
from agentjet.cli.main import app
from agentjet.errors import ConfigError
from tests.environments.test_pool import below, is_running, wait_for
from tests.fakes import recent_episodes, saying
from tests.server.serving import TOKEN, Served, in_thread, serving

TOY = "tests.environments.toy/Corridor"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    def answer(prompt: str) -> str:
        return '"left"' if prompt.count("corridor") > prompt.count("went") else '"right"'

    with in_thread(serving(tmp_path / "data", saying(answer))) as (served, _):
        yield served


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def at(served: Served, *arguments: str) -> list[str]:
    return ["--url", served.url, "--token", TOKEN, *arguments]


def test_kinds_are_listed_and_one_is_shown() -> None:
    rows = {row["name"]: row for row in json.loads(invoke("env", "list", "--json"))}
    assert rows.keys() >= {"gymnasium", "verifiers", "harbor"}
    assert "ID of a Gymnasium environment" in rows["gymnasium"]["target"]
    assert "pip install 'gymnasium" in rows["gymnasium"]["problem"] or rows["gymnasium"]["installed"]
    assert "gymnasium" in invoke("env", "list")
    shown = json.loads(invoke("env", "show", TOY, "--env-set", "length=4", "--json"))
    assert (shown["tasks"], shown["held_out"], shown["first_tasks"][0]["id"]) == (8, 2, "corridor-0")
    assert shown["settings"]["length"] == {"value": 4, "default": 2, "meaning": "Number of steps."}
    assert [name for name, facts in shown["settings"].items() if not facts["meaning"]] == []
    assert "length = 4                         # Number of steps." in invoke(
        "env", "show", TOY, "--env-set", "length=4"
    )


def test_an_episode_is_played_turn_by_turn(served: Served) -> None:
    played = json.loads(invoke("env", "play", TOY, *at(served, "--env-set", "length=1", "--held-out", "--json")))
    assert (played["task"], played["reward"], played["text"]) == ("corridor-8", 0.5, "the end is reached")
    facts = [(turn["messages"][-1]["content"], turn["answer"]["content"], turn["reward"]) for turn in played["turns"]]
    assert facts == [("A corridor.", '"left"', 0.0), ("You went left.", '"right"', 0.5)]
    assert {tuple(turn["actions"]) for turn in played["turns"]} == {("left", "right")}
    [episode] = recent_episodes(served.run.gateway.swarm, 10)
    assert (episode.mode, episode.task_set, episode.reward) == ("eval", TOY, 0.5)
    text = invoke("env", "play", TOY, *at(served, "--task", "corridor-3"))
    assert 'valid actions: left, right\nanswer: "right"\nreward of the turn: 0.5\n----\nreward 1: the end is' in text
    crashed = invoke("env", "play", TOY, *at(served, "--env-set", "crash_share=2"), code=1)
    assert "aborted: EnvironmentFailed: its process ended with exit code 3; it printed nothing" in crashed


def test_environments_are_trained_and_evaluated(served: Served) -> None:
    two = ["--env", TOY, "--env", "tests.environments.toy/Listing:x", "--env-set", f"{TOY}.length=1"]
    two += ["--env-set", "tests.environments.toy/Listing:x.ids=['a']", "--env-set", "held_out=0.0"]
    trained = json.loads(invoke("run", *at(served, "--env", TOY, "--steps", "1", "--json")))
    assert (trained["steps"], trained["rewards"], trained["aborted"]) == (1, [1.0], 0)
    evaluated = json.loads(invoke("run", *at(served, *two, "--eval", "--json")))
    assert (evaluated["finished"], evaluated["tasks"]) == (2, 2), "two held-out tasks of one, none of the other"
    scored = json.loads(invoke("eval", served.url, "--token", TOKEN, *two, "--split", "train", "--json"))
    assert (scored["tasks"], scored["place"]) == (9, 1.0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["run", "--env", TOY, "--reward", "stdout"], "--env and --reward exclude each other"),
        (["run", "--env", TOY, "--task-file", "x"], "--env and --task-file exclude each other"),
        (["run", "--env", TOY, "--", "true"], "--env and a command exclude each other"),
        (["run", "--env", TOY, "--watch"], "--env and --watch exclude each other"),
        (["run", "--env", TOY, "--env", TOY], "is given twice: give it once"),
        (["run", "--env-set", "length=3"], "--env-set length=3: there is no --env that it belongs to"),
        (["run", "--env", TOY, "--env-set", "length"], "'length' is not of the form KEY=VALUE"),
        (["run", "--env", TOY, "--env-set", "a:b.length=3"], "it names none of the environments"),
        (["run", "--env", TOY, "--env-set", "lenght=3"], "lenght = 3: unknown setting; did you mean 'length'"),
        (["run", "--reward", "stdout"], "a command after `--` is missing: give a command, --task-file and --reward"),
        (["run", "--reward", "stdout", "--", "true"], "--task-file is missing"),
        (["eval", "m", "--env", TOY, "--agent", "a.py:b"], "--env and --agent exclude each other"),
        (["eval", "m", "--split", "train"], "--split train: it is for --env"),
        (["eval", "m", "--env", TOY, "--split", "test"], "--split 'test': give held_out or train"),
        (["eval", "m", "--env", TOY, "--tasks", "3"], "--tasks 3: there are 2 tasks of the split held_out"),
        (["env", "play", TOY, "--task", "coridor-3"], "has no such task; did you mean 'corridor-3'"),
        (["env", "show", "no:x"], "there is no kind of environment 'no'"),
    ],
)
def test_wrong_options_are_named_before_the_first_request(arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_settings_of_one_environment_and_of_all() -> None:
    given = ["seed=3", "a:b.make.slippery=false", "a:b.c.names=['x']"]
    assert environment_settings(["a:b", "a:b.c"], given) == {
        "a:b": {"seed": 3, "make": {"slippery": False}},
        "a:b.c": {"seed": 3, "names": ["x"]},
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(served: Served, number: signal.Signals, tmp_path: Path) -> None:
    name = "tests.environments.toy/Misbehaving:hangs"
    words = ["-m", "agentjet.cli", "run", *at(served, "--env", name, "--env-set", "held_out=0.0")]
    client = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: len(below(client.pid)) >= 4)
    started = below(client.pid)
    client.send_signal(number)
    output: Any = client.communicate()[0]
    assert client.returncode in (130, 143, 2), output
    wait_for(lambda: not any(map(is_running, started)))
    assert {episode.status for episode in recent_episodes(served.run.gateway.swarm, 50)} <= {"aborted"}
