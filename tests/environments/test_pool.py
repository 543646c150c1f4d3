"""The processes of environments.

1. An environment that fails aborts its episode with a reason, and the next episode works.
2. An episode changes nothing for the next one: folder, variables, processes.
3. Nothing is left when the environment is closed, the client is killed, or an episode is cancelled.
4. Names, settings and tasks that are wrong are an error before the first episode.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from agentjet import environments
from agentjet.cli.env import kinds
from agentjet.client.episode import AsyncEpisode, Endpoint
from agentjet.environments import Environment, EnvironmentFailed, EnvironmentTask, Kind, Model, registry
from agentjet.errors import AgentJetError, ConfigError
from agentjet.protocol import BeginRequest
from agentjet.types import Reward

TOY = "tests.environments.toy"
PATIENCE = 20.0


def load(what: str, **settings: Any) -> Environment:
    return environments.load(f"{TOY}/Misbehaving:{what}", held_out=0, **settings)


def episode() -> AsyncEpisode:
    """An episode of a model that nothing calls."""
    return Endpoint("http://127.0.0.1:9/v1", "m").begin(BeginRequest(client_id="c", task_id="only"))


def play(environment: Environment) -> Reward:
    return asyncio.run(environment.agent(environment.tasks[0], episode()))


def is_running(pid: int) -> bool:
    """True unless the process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(is_met: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_met():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("what", "settings", "reason"),
    [
        ("no_score", {}, "Misbehaving.play returned None: return a Reward"),
        ("number", {}, "Misbehaving.play returned 1.0: return a Reward"),
        ("nan", {}, "reward is nan: it must be a finite number"),
        ("raises", {}, r"IndexError: list index out of range \(.*toy.py:\d+\)"),
        ("exits", {}, "SystemExit: 3"),
        ("exits_at_once", {}, "its process ended with exit code 7; it printed last: so long"),
        ("segfaults", {}, "its process ended by signal 11"),
        ("kills_group", {}, "its process ended by signal 9; it printed nothing"),
        ("kills_parent", {}, "its process ended by signal 9; it printed nothing"),
        ("hangs", {"seconds": 0.3}, "it did not end within 0.3 s and was ended"),
        ("refuses_to_end", {"seconds": 0.3}, "it did not end within 0.3 s and was ended"),
        ("prints_much", {}, "it printed more than 16 MiB in one episode and was ended: print less"),
        ("writes_everywhere", {}, "its process sent something else than an answer"),
        ("nests_deeply", {}, "its process sent something else than an answer"),
        ("closes_everything", {}, "its process ended with exit code"),
        ("huge_answer", {}, "its answer has 70 MiB, and 64 are allowed"),
        ("many_metrics", {}, "metrics has 65 names: 64 are allowed"),
        ("uses_memory", {"memory": 280}, "it used more than 280 MiB of memory and was ended: use less"),
        ("leaves_process_and_ends", {}, "its process ended with exit code 5"),
    ],
)
def test_a_failure_is_the_reason_of_an_abort(
    what: str, settings: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with load(what, **settings) as environment, pytest.raises(EnvironmentFailed, match=reason):
        play(environment)
    if (left := tmp_path / "left.pid").exists():
        wait_for(lambda: not is_running(int(left.read_text())))


def test_an_episode_changes_nothing_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with load("changes_all", processes=1) as environment:
        for _ in range(2):
            assert play(environment).metrics == {"left": 0.0, "moved": 0.0}
    with load("closes_output", processes=1) as environment:
        assert [play(environment).value for _ in range(2)] == [1.0, 1.0]
    with load("removes_folder", processes=1) as environment:
        assert [play(environment).value for _ in range(2)] == [1.0, 1.0]
    with load("leaves_process", processes=1) as environment:
        assert play(environment).value == 1.0
        assert not is_running(int((tmp_path / "left.pid").read_text()))


def test_a_process_that_used_too_much_memory_is_not_used_again() -> None:
    with load("uses_memory", processes=1, memory=280) as environment:
        for _ in range(3):
            with pytest.raises(EnvironmentFailed, match="it used more than 280 MiB of memory and was ended"):
                play(environment)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("nothing", "`reset` of the world returned None: return an Observation"),
        ("number_as_text", "the text of an observation is 12: give a text"),
        ("no_reward", "the reward of a turn is None"),
        ("text_as_actions", "the actions of an observation are 'abc': give a list of texts"),
        ("numbers_as_actions", r"the actions of an observation are \[1, 2\]: give a list of texts"),
        ("generated_actions", "the actions of an observation are <generator .*: give a list of texts"),
        ("list_as_schema", r"the schema of an observation is \[1\]: give a dict"),
        ("no_metrics", "the metrics of an observation is None: give a dict"),
    ],
)
def test_an_observation_of_another_type_is_named(what: str, reason: str) -> None:
    game = environments.load(f"{TOY}/Misobserving:{what}", held_out=0)
    with game, pytest.raises(EnvironmentFailed, match=reason):
        play(game)


@pytest.mark.parametrize(
    "code", ["raise RuntimeError('boom')", "def x(:", "raise SystemExit(2)", "import no_such_module"]
)
def test_a_kind_that_cannot_be_imported(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_kind.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("broken", "broken_kind:Kind", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(ConfigError, match="the kind 'broken' cannot be loaded from broken_kind:Kind: "):
        environments.load("broken:x")
    rows = {row["name"]: row["problem"] for row in kinds()}
    assert rows["broken"].startswith("the kind 'broken' cannot be loaded"), "the others are listed, too"


def test_a_cancelled_episode_ends_its_process_and_frees_its_place() -> None:
    async def cancel_twice(environment: Environment) -> None:
        for seconds in (1.0, 0.1):  # The second would wait for the place of the first.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await environment.agent(environment.tasks[0], episode())

    with load("hangs", processes=1) as environment:
        for _ in range(2):  # Each call has an event loop of its own.
            asyncio.run(cancel_twice(environment))
    wait_for(lambda: not children())
    with pytest.raises(EnvironmentFailed, match="the environment was closed: load it again"):
        play(environment)


def children() -> list[str]:
    """The processes of environments below this one. Other tests may have left processes of their own."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in pids if b"agentjet.environments.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


KILLED = """
import asyncio, sys
from tests.environments.test_pool import load, play
environment = load("hangs")
print("ready", flush=True)
play(environment)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_everything_ends_with_the_client(number: signal.Signals) -> None:
    client = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.readline() == b"ready\n"
    started = below(client.pid)
    assert len(started) == 2, "an outer and an inner process"
    client.send_signal(number)
    client.communicate()
    wait_for(lambda: not any(map(is_running, started)))


def below(pid: int) -> list[int]:
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [one for child in children for one in (child, *below(child))]


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("gymnasum:x", {}, "there is no kind of environment 'gymnasum'; did you mean 'gymnasium'?"),
        (f"{TOY}/Corridr:", {}, "the kind 'tests.environments.toy/Corridr' cannot be loaded from"),
        (f"{TOY}/CorridorWorld:", {}, "it must be a subclass of agentjet.environments.Kind"),
        ("agentjet.environments.kind/Game:", {}, "is abstract: it must define tasks and play"),
        (f"{TOY}/Corridor", {"lenght": 3}, "lenght = 3: unknown setting; did you mean 'length'?"),
        (f"{TOY}/Corridor", {"length": "far"}, "length = 'far': Input should be a valid integer"),
        (f"{TOY}/Corridor", {"seconds": 0}, "seconds = 0: Input should be greater than 0"),
        (f"{TOY}/Unloadable", {}, "need the package no-such-package: pip install 'no-such-package>=2'"),
        (f"{TOY}/OfAnotherVersion", {}, "pydantic 2.* does not fit the kind .*, which needs pydantic>=1,<2"),
        (f"{TOY}/OfAWrongRequirement", {}, "requires = 'pydantic~=2.0' of .*: write it as 'package>=1,<2'"),
        (f"{TOY}/ListingOthers", {}, "task 0 of ListingOthers is 'a': yield an EnvironmentTask"),
        (f"{TOY}/ListingOthers:test", {}, "has the split 'test': give 'train', 'held_out' or nothing"),
        (f"{TOY}/WithoutProgram", {}, "need the program no-such-program: apt-get install no-such-program"),
        (f"{TOY}/Listing", {}, "Listing has no tasks"),
        (f"{TOY}/Listing", {"ids": [""]}, "task 0 of Listing has the id '': give each task a text"),
        (f"{TOY}/Listing", {"ids": [7]}, "task 0 of Listing has the id 7: give each task a text"),
        (f"{TOY}/Listing", {"ids": ["x" * 300]}, "has an id of 300 characters: 256 are allowed"),
        (f"{TOY}/Listing", {"ids": ["a", "a"]}, "task 1 of Listing has the id 'a', as another task"),
        (f"{TOY}/Listing", {"ids": ["a"], "megabytes": 65}, "its answer has 65 MiB, and 64 are allowed: list fewer"),
        (
            f"{TOY}/Listing",
            {"ids": ["a"], "hangs": True, "start_seconds": 1},
            "it did not end within 1 s and was ended",
        ),
        (f"{TOY}/Listing", {"ids": ["a"], "held_out": 1}, "held_out = 1: Input should be less than 1"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_before_the_first_episode(
    name: str, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        environments.load(name, **settings)
    assert not children()


def test_a_task_of_another_environment_is_refused() -> None:
    with environments.load(f"{TOY}/Corridor:") as corridor, load("no_score") as other:
        assert [len(corridor.tasks), len(corridor.held_out)] == [8, 2]
        with pytest.raises(AgentJetError, match=r"'only' is of the task set '.*no_score': there are .*Corridor:"):
            asyncio.run(corridor.agent(other.tasks[0], episode()))


class Split(Kind):
    """Five tasks to train on, then five held-out ones; or endless tasks without a split."""

    is_endless: bool = False
    """Without splits."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        if self.is_endless:
            yield from (EnvironmentTask(f"{number}") for number in itertools.count())
        for split in ("train", "held_out"):
            yield from (EnvironmentTask(f"{split}-{number}", {}, split) for number in range(5))

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        return Reward(0.0)


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, [f"{split}-{number}" for split in ("train", "held_out") for number in range(5)]),
        ({"num_tasks": 3}, ["train-0", "held_out-0", "train-1"]),
        ({"num_tasks": 3, "is_endless": True}, ["0", "1", "2"]),
    ],
)
def test_a_number_of_tasks_cuts_no_split_off(settings: dict[str, Any], ids: list[str]) -> None:
    assert [task.id for task in Split(**settings).listed()] == ids
