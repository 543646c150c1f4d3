"""An existing application whose users judge it later: it begins an episode a session and forgets it, and another
process posts the feedback as the reward, by curl's means or the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import Conflict
from tests.cli.test_commands import at, run
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, in_thread, serving

DAY = 86400.0
JOB = {"batch_size": 1, "group_size": 2, "lease_seconds": 2 * DAY, "max_episode_seconds": 7 * DAY}
APPLICATION = """
import json, os, sys, urllib.request
for turn in sys.argv[1:]:
    body = {"model": "policy", "messages": [{"role": "user", "content": turn}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with in_thread(serving(tmp_path / "data", saying(lambda prompt: "at your service"), job=JOB)) as (served, _):
        yield served


def post(served: Served, path: str, key: str, **body: Any) -> Any:
    """Sends the request of `curl -d`."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(served.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def use(environment: dict[str, str], *turns: str) -> list[str]:
    """The application, in a process that ends before anybody has judged it."""
    done = subprocess.run(
        [sys.executable, "-c", APPLICATION, *turns], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def command(served: Served, *arguments: str) -> str:
    return run(*arguments, *at(served))


def test_feedback_that_comes_days_later_is_learned(served: Served) -> None:
    sessions = []
    for user in ("ada", "bob"):
        begun = post(served, "/swarm/v1/episodes", TOKEN, task_id=f"session-{user}", group="support", client_id="shop")
        given = {"OPENAI_BASE_URL": begun["base_url"], "OPENAI_API_KEY": begun["api_key"]}
        assert use(given, "hello", "where is my parcel?") == ["at your service"] * 2
        sessions.append(begun)
    served.run.clock.advance(DAY)
    with pytest.raises(urllib.error.HTTPError) as full:
        post(served, "/swarm/v1/episodes", TOKEN, task_id="session-eve", group="support", client_id="shop")
    assert full.value.code == 429
    full.value.close()
    served_all_the_same = post(served, "/swarm/v1/episodes", TOKEN, task_id="session-eve", mode="eval")
    assert served_all_the_same["api_key"]
    ada, bob = (session["episode_id"] for session in sessions)
    seen = post(served, f"/swarm/v1/episodes/{ada}/finish", sessions[0]["api_key"], reward=1.0)
    assert (seen["status"], seen["num_calls"]) == ("finished", 2)
    served.run.clock.advance(DAY / 2)
    assert (
        command(served, "episodes", "finish", bob, "--reward", "0", "--text", "no help")
        == f"{bob}: finished, reward 0\n"
    )
    deadline = 200
    while served.run.gateway.swarm.episode(bob).trained_in is None and deadline:
        deadline -= 1
        command(served, "status")
    trained = [served.run.gateway.swarm.episode(episode) for episode in (ada, bob)]
    assert [(one.trained_in, one.reward, one.group) for one in trained] == [(0, 1.0, "support"), (0, 0.0, "support")]
    assert [one.reward_text for one in trained] == ["", "no help"]


def test_the_command_line_begins_and_ends_episodes(served: Served) -> None:
    printed = command(served, "episodes", "begin", "it's a session", "--group", "support")
    given = dict(line.removeprefix("export ").split("=", 1) for line in printed.splitlines())
    assert list(given) == [
        "AGENTJET_EPISODE",
        *("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"),
        *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL"),
    ]
    assert given["OPENAI_MODEL"] == given["ANTHROPIC_MODEL"] == served.run.gateway.hosted.model_name
    assert given["ANTHROPIC_BASE_URL"] + "/v1" == given["OPENAI_BASE_URL"] == f"{served.url}/v1"
    assert use(given, "hello") == ["at your service"]
    episode = given["AGENTJET_EPISODE"]
    command(served, "episodes", "abort", episode, "--reason", "the user left")
    ended = served.run.gateway.swarm.episode(episode)
    assert (ended.status, ended.reason, ended.task_id, ended.num_calls) == (
        *("aborted", "the user left"),
        *("it's a session", 1),
    )
    with pytest.raises(Conflict, match="aborted"):
        command(served, "episodes", "finish", episode, "--reward", "1")
    looked = json.loads(command(served, "episodes", "begin", "t", "--eval", "--json"))
    assert served.run.gateway.swarm.episode(looked["episode_id"]).mode == "eval"
    command(served, "episodes", "finish", looked["episode_id"], "--reward", "0.5")
