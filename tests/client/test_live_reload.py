"""1. An edit is loaded between groups: begun groups are completed by the code they began with. 2. Code that cannot be
loaded, or only fails, is not kept. 3. An agent's version is a hash of its author's files. 4. Errors in a user's file,
even `sys.exit`, become one message. 5. The search order for packages.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentjet.client import Command, TrainReport
from agentjet.client.agent_source import (
    AgentSource,
    AgentVersion,
    CodeFolder,
    ModuleSource,
    code_version_of,
    load_function,
    source_of,
)
from agentjet.client.live_reload import LiveReload
from agentjet.client.report import EpisodeResult, EvalReport, Outcome
from agentjet.client.rollout import AgentFailing, RolloutSpec, Visit
from agentjet.client.training import HeldOutEvaluations
from agentjet.errors import ConfigError, Conflict
from agentjet.types import Task
from tests.client.server import FakeServer, FakeTime

pytestmark = pytest.mark.anyio

TASKS = [Task(f"t{number}", payload=number) for number in range(20)]
AGENT = """
import asyncio
from live_words import REWARD

async def agent(task, episode):
    await GATE()
    return REWARD
"""


@dataclass
class Files:
    """An agent's module and one beside it; each of its episodes awaits `gate`."""

    folder: Path
    edits: dict[int, Callable[[], object]] = field(default_factory=dict)
    num_begun: int = 0

    def write(self, name: str, text: str) -> None:
        (self.folder / (name if Path(name).suffix else f"{name}.py")).write_text(text)

    def edit(self, at: int, name: str, text: str) -> None:
        """Have it written in the midst of the episode that is the `at`th to begin."""
        self.edits[at] = lambda: self.write(name, text)

    async def gate(self) -> None:
        self.num_begun += 1
        if self.num_begun in self.edits:
            self.edits[self.num_begun]()
        await asyncio.sleep(0)

    def agent(self) -> Any:
        __import__("live_agent")
        return sys.modules["live_agent"].agent  # type: ignore[attr-defined]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    files = Files(tmp_path)
    files.write("live_words", "REWARD = 0.25\n")
    files.write("live_agent", AGENT)
    monkeypatch.setattr("builtins.GATE", files.gate, raising=False)
    finders = [*sys.meta_path]
    yield files
    sys.meta_path[:] = finders  # Some tests load without a run, which would end it.
    for name in ("live_agent", "live_words", "live_more"):
        sys.modules.pop(name, None)


class YieldingTime(FakeTime):
    """Leaves the processor to the thread that copies and loads code; its loops would spin beside it."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        await asyncio.sleep(0.002)


@dataclass
class Run:
    """Training runs over the fake server, in time that does not pass."""

    server: FakeServer = field(default_factory=lambda: FakeServer(batch_size=2, group_size=2))
    tasks: Iterable[Task] = tuple(TASKS)
    time: FakeTime = field(default_factory=YieldingTime)

    async def train(self, agent: Any, steps: int, **options: Any) -> TrainReport:
        async with self.server.connect(self.time) as swarm:
            async with asyncio.timeout(20):
                options = {"concurrency": 2, "progress": False, "reload": True, **options}
                return await swarm.train(agent, self.tasks, steps=steps, **options)

    def rewards_of_groups(self) -> Counter[tuple[float | None, ...]]:
        groups: dict[str, list[float | None]] = {}
        for view in self.server.episodes.values():
            if view.status == "finished":
                groups.setdefault(view.group, []).append(view.reward)
        return Counter(map(tuple, groups.values()))

    def versions_of_groups(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for view in self.server.episodes.values():
            if view.status == "finished":
                found.setdefault(view.group, set()).add(view.code_version)
        return found


def test_an_edit_is_taken_up_between_groups(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """The first episode of the first group edits: its partner still runs the old code, all others the new."""
    run = Run()
    files.edit(1, "live_words", "REWARD = 0.75\n")
    report = asyncio.run(run.train(files.agent(), 3, concurrency=1, progress=True))
    old, new = report.by_code_version
    assert [report.by_code_version[it].mean_reward for it in (old, new)] == [0.25, 0.75]
    assert report.by_code_version[old].num_finished == 2
    assert all(len(versions) == 1 for versions in run.versions_of_groups().values())
    assert [(it.kind, it.before, it.to) for it in report.code_changes] == [("loaded", old, new)]
    assert report.rewards == (0.5, 0.75, 0.75)
    assert not report.num_aborted
    assert f"code {new} takes the place of {old}: live_words.py changed\n" in capsys.readouterr().out
    assert f"code {new} took the place of {old}: live_words.py changed" in str(report)
    assert f"code {new}: " in str(report)


@pytest.mark.parametrize(
    ("edits", "names"),
    [
        ({}, ""),
        ({"live_words.py": "REWARD = 0.5\n"}, "live_words.py changed"),
        ({"live_more.py": "", "live_words.py": "REWARD = 1\n"}, "live_more.py is new, live_words.py changed"),
        ({"live_gone.py": None}, "live_gone.py was removed"),
        (
            {f"live_{letter}.txt": letter for letter in "hijabcdefg"},
            ", ".join(f"live_{letter}.txt is new" for letter in "abcdefgh") + " and 2 more",
        ),
    ],
)
def test_only_files_with_another_content_are_named(
    files: Files, edits: dict[str, str | None], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file gets a new time, as by `touch`, `git checkout` or a save without a change. Two groups of three are
    under way when the edit comes; the last episode of theirs is begun only after it, by the old code.
    """
    files.write("live_gone", "")
    run, agent = Run(FakeServer(batch_size=4, group_size=3)), files.agent()

    def edit() -> None:
        for name, text in edits.items():
            (files.folder / name).unlink() if text is None else files.write(name, text)
        for path in files.folder.glob("live_*"):
            path.write_bytes(path.read_bytes())

    files.edits[5] = edit
    report = asyncio.run(run.train(agent, 4, concurrency=5, progress=True))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("code ", "live_", "the agent"))]
    if not names:
        assert (lines, report.code_changes) == ([], ())
        return
    old, new = report.by_code_version
    assert all(len(versions) == 1 for versions in run.versions_of_groups().values())
    num_old = report.by_code_version[old].num_finished
    assert 5 <= num_old < 12 and num_old % 3 == 0, "its groups are complete, and none began after the edit"
    assert run.server.by_status()["finished"] == len(report.finished)
    assert lines == [
        f"{names}; code {old} completes the groups it has begun",
        f"code {new} takes the place of {old}: {names}",
    ]
    assert [(change.kind, change.why) for change in report.code_changes] == [("loaded", names)]


def test_an_edit_after_the_last_group_has_begun_is_reported(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    files.edit(4, "live_words", "REWARD = 0.75\n")  # The run has two groups of two.
    report = asyncio.run(run.train(files.agent(), 1, concurrency=1, progress=True))
    [version] = report.by_code_version
    why = "live_words.py changed after the last group of this run had begun, so no episode ran the edit"
    assert [(it.kind, it.before, it.to, it.why) for it in report.code_changes] == [("not loaded", version, "", why)]
    assert f"the edited code was not loaded, code {version} stays: {why}\n" in capsys.readouterr().out
    assert f"an edit of code {version} was not loaded: {why}" in str(report)


def test_a_folder_that_grows_too_large_does_not_end_the_run(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = files.agent()
    monkeypatch.setattr("agentjet.client.agent_source.MAX_FILES", 2)
    files.edit(1, "live_more", "")
    report = asyncio.run(Run().train(agent, 3, progress=True))
    [change] = report.code_changes
    assert change.kind == "not loaded" and "more than 2 files" in change.why
    assert capsys.readouterr().out.count("more than 2 files") == 1
    assert set(report.rewards) == {0.25}


def test_groups_that_have_begun_are_completed_by_their_code(files: Files) -> None:
    """Two groups of three are under way when the edit comes; the last episode of theirs is begun only after it."""
    run = Run(FakeServer(batch_size=4, group_size=3))
    files.edit(5, "live_words", "REWARD = 0.75\n")
    report = asyncio.run(run.train(files.agent(), 4, concurrency=5))
    groups = run.versions_of_groups()
    assert all(len(versions) == 1 for versions in groups.values()), groups
    old = next(iter(report.by_code_version))
    num_old = report.by_code_version[old].num_finished
    assert num_old >= 5 and num_old % 3 == 0, "the groups of the old code are complete"
    assert num_old < 12, "none began after the edit"
    finished = [view for view in run.server.episodes.values() if view.status == "finished"]
    assert len(finished) == len(report.finished)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def agent(:\n", r"SyntaxError: .*live_agent\.py, line 1"),
        ("import no_such_module_anywhere\n", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("", "AttributeError: module 'live_agent' has no attribute 'agent'"),
        ("agent = 3\n", "TypeError: agent of .*live_agent.py is not a function any more"),
    ],
)
def test_what_cannot_be_loaded_is_not_taken_up(
    files: Files, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    files.edit(1, "live_agent", text)
    report = asyncio.run(run.train(files.agent(), 2, progress=True))
    [change] = report.code_changes
    [version] = report.by_code_version
    assert (change.kind, change.before) == ("not loaded", version)
    assert re.match(why, change.why), change.why
    assert set(report.rewards) == {0.25} and not report.num_aborted
    assert f"was not loaded, code {version} stays" in capsys.readouterr().out


def test_an_edit_mended_after_a_typo_is_taken_up(files: Files) -> None:
    run = Run()
    files.edit(1, "live_words", "REWARD = = 0.5\n")
    files.edit(7, "live_words", "REWARD = 0.75\n")
    report = asyncio.run(run.train(files.agent(), 5))
    assert [change.kind for change in report.code_changes] == ["not loaded", "loaded"]
    assert "live_words.py" in report.code_changes[0].why
    assert report.rewards[-1] == 0.75


LAZY = "def agent(task, episode):\n    import live_more\n    return live_more.REWARD\n"
"""An agent that imports its helper at each call."""


@dataclass
class Live:
    """The versions of a run without a server, in time that does not pass."""

    code: AgentSource | None
    first: AgentVersion
    time: FakeTime = field(default_factory=YieldingTime)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reload = LiveReload(self.first, self.code, group_size=2, sleep=self.time.sleep, notify=self.said.append)

    async def begin(self, group: str, place: int = 0) -> tuple[str, Any]:
        """Begins a member of a group; returns its code version and agent."""
        version, agent = await self.reload.begin(spec_of(group, place), return_version)
        return str(version), agent

    def finish(self, group: str, version: str, place: int = 0, outcome: Outcome = "finished") -> None:
        self.reload.ended(spec_of(group, place), result_of(group, version, outcome), True)


async def return_version(code_version: str) -> Any:
    """In place of a request: the version that the episode would have."""
    return code_version


def result_of(group: str, version: str, outcome: Outcome = "finished") -> EpisodeResult:
    return EpisodeResult(group, "", outcome, 0, 1.0, {}, "", "", version, {}, (), 1, "")


def spec_of(group: str, place: int) -> RolloutSpec:
    return RolloutSpec(Task(group), group, 0, spare=place >= 2, place=place, visit=Visit(num_left=1))


@pytest.fixture
def lazy(files: Files) -> Iterator[Live]:
    files.write("live_more", "REWARD = 0.25\n")
    files.write("live_agent", LAZY)
    code = ModuleSource(files.agent())
    yield Live(code, code.load())
    code.close()


async def test_an_edit_does_not_wait_for_groups_that_nothing_completes(files: Files, lazy: Live) -> None:
    """Each worker waits for the reload with an episode of another group, so none begins the group's second member."""
    old, _ = await lazy.begin("a")
    files.write("live_more", "REWARD = 0.75\n")
    waiting = asyncio.create_task(lazy.begin("b"))
    for _ in range(100):
        await lazy.time.sleep(0.2)
    assert not waiting.done(), "the first group has a live episode"
    began = lazy.time.now
    lazy.finish("a", old)
    new, agent = await asyncio.wait_for(waiting, 20)
    assert new != old and agent(None, None) == 0.75 and lazy.time.now - began < 10
    with pytest.raises(Conflict, match="members of older code") as raised:
        await lazy.begin("a", 1)
    assert raised.value.code == "group_closed"


async def test_an_edit_waits_for_the_spare_episodes_of_complete_groups(
    files: Files, lazy: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that imports a module later would get that of the edit. A group is waited for once."""
    monkeypatch.setattr("agentjet.client.live_reload.GROUPS_SECONDS", 30.0)
    old, _ = await lazy.begin("a")
    for place in (1, 2):
        await lazy.begin("a", place)
    for place in (0, 1):
        lazy.finish("a", old, place)
    files.write("live_more", "REWARD = 0.75\n")
    waiting = asyncio.create_task(lazy.begin("b"))
    for _ in range(50):
        await lazy.time.sleep(0.2)
    assert not waiting.done(), "the spare episode of the first group is live"
    new, _ = await asyncio.wait_for(waiting, 20)
    assert new != old and lazy.time.now >= 30
    lazy.finish("b", new)
    files.write("live_more", "REWARD = 0.5\n")
    began = lazy.time.now
    newer, _ = await lazy.begin("c")
    assert newer != new and lazy.time.now - began < 10


async def test_a_held_out_evaluation_runs_one_version(files: Files, lazy: Live) -> None:
    """Groups go on with its version. An edit meanwhile is loaded after it, also by the next evaluation."""
    async with lazy.reload.held_out() as version:
        files.write("live_more", "REWARD = 0.75\n")
        old, _ = await lazy.begin("a")
        assert old == version.code_version and version.agent(None, None) == 0.25
    lazy.finish("a", old)
    await lazy.begin("a", 1)
    lazy.finish("a", old, 1)
    async with lazy.reload.held_out() as edited:
        assert edited.agent(None, None) == 0.75 and edited.code_version != old


async def test_no_version_is_rolled_back_during_a_held_out_evaluation(files: Files, lazy: Live) -> None:
    files.write("live_more", "REWARD = 0.75\n")
    bad, _ = await lazy.begin("a")
    async with lazy.reload.held_out() as version:
        for place in range(9):
            lazy.finish("a", bad, place, "aborted")
        assert version.agent(None, None) == 0.75
    lazy.finish("a", bad, 9, "aborted")
    assert [change.kind for change in lazy.reload.changes] == ["loaded", "rolled back"]
    assert version.agent(None, None) == 0.25, "it finds the modules of the version before"


@pytest.mark.parametrize(
    ("kind", "changes", "reward"),
    [("on trial", ["loaded", "rolled back"], 0.25), ("proven", ["loaded"], 0.75), ("the first", [], 0.25)],
)
def test_an_evaluation_that_an_edit_breaks_is_skipped(
    kind: str, changes: list[str], reward: float, files: Files, lazy: Live
) -> None:
    """The evaluation loads the edit itself, so it may be the first to run it."""

    async def failing(version: AgentVersion) -> EvalReport:
        raise AgentFailing("every episode failed")

    async def scenario() -> None:
        if kind != "the first":
            files.write("live_more", "REWARD = 0.75\n")
        if kind == "proven":
            lazy.finish("a", (await lazy.begin("a"))[0])
        async with lazy.reload.held_out() as version:
            await HeldOutEvaluations(failing, every=1).run(version, lazy.said.append)

    if kind == "the first":
        with pytest.raises(AgentFailing, match="held-out evaluation: every episode failed"):
            asyncio.run(scenario())
    else:
        asyncio.run(scenario())
        assert "held-out evaluation: every episode failed" in lazy.said[-1]
    assert [change.kind for change in lazy.reload.changes] == changes
    assert lazy.reload.current.version.agent(None, None) == reward


@pytest.mark.parametrize("broken", ["True", "task.id.startswith('h')"])
def test_no_edit_ends_a_run_with_held_out_tasks(broken: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails on all tasks, and one that fails on the held-out tasks alone."""
    agent = "async def agent(task, episode):\n    await GATE()\n    assert not {}\n    return 0.25\n"
    files.write("live_agent", agent.format("False"))
    files.edit(9, "live_agent", agent.format(broken))
    options = {"eval_tasks": [Task("h0"), Task("h1")], "eval_every": 1, "progress": True}
    report = asyncio.run(Run().train(files.agent(), 8, **options))
    assert len(report.steps) == 8 and set(report.rewards) == {0.25}
    kinds, said = [change.kind for change in report.code_changes], capsys.readouterr().out
    assert kinds == (["loaded", "rolled back"] if broken == "True" else ["loaded"])
    assert ("skipped: held-out evaluation: every" in said) == (broken != "True"), said


@pytest.mark.parametrize("when", ["before the import", "in the import"])
async def test_no_version_is_rolled_back_during_a_load(
    when: str, files: Files, lazy: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback would activate the modules of another version than the one that is being loaded."""
    may_load, loading, copy = threading.Event(), threading.Event(), CodeFolder.copy

    def wait() -> None:
        loading.set()
        may_load.wait(20)

    def copy_late(*args: Any) -> Any:
        wait()
        return copy(*args)

    files.write("live_more", "REWARD = None\n")
    bad, _ = await lazy.begin("a")
    lazy.finish("a", bad, outcome="aborted")
    monkeypatch.setattr("builtins.HANG", wait, raising=False)
    files.write("live_more", "REWARD = 0.75\n")
    if when == "in the import":
        files.write("live_agent", "HANG()\n" + LAZY)
    else:
        monkeypatch.setattr(CodeFolder, "copy", copy_late)
    waiting = asyncio.create_task(lazy.begin("b"))
    while not loading.is_set():
        await asyncio.sleep(0.001)
    for place in range(9):
        lazy.finish("a", bad, place, "aborted")
    may_load.set()
    mended, agent = await asyncio.wait_for(waiting, 20)
    assert agent(None, None) == 0.75 and mended not in (bad, lazy.first.code_version)
    assert [change.kind for change in lazy.reload.changes] == ["loaded", "loaded"]


@pytest.mark.parametrize("is_watched", [False, True])
async def test_what_is_kept_of_a_run_does_not_grow_with_its_groups(is_watched: bool, lazy: Live) -> None:
    live = Live(lazy.code if is_watched else None, lazy.first)

    def sizes() -> dict[str, int]:
        return {name: len(value) for name, value in vars(live.reload).items() if isinstance(value, Sized)}

    async def play(groups: range) -> None:
        for number in groups:
            spec = spec_of(f"g{number}", 0)
            await live.reload.begin(spec, return_version)
            live.reload.ended(spec, result_of(spec.group, live.first.code_version), True)
            spec.visit.num_left = 0

    await play(range(3))
    before = sizes()
    await play(range(3, 20))
    assert sizes() == before


@pytest.mark.parametrize("ends", ["well", "by an exception"])
async def test_a_load_that_comes_too_late_changes_no_module(
    ends: str, files: Files, lazy: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    monkeypatch.setattr("agentjet.client.live_reload.LOAD_SECONDS", 0.6)
    monkeypatch.setattr("builtins.HANG", hang.wait, raising=False)
    files.write("live_more", "REWARD = 0.75\n")
    files.write("live_agent", "HANG()\n" + ("1 / 0\n" if ends != "well" else "") + LAZY)
    old, agent = await lazy.begin("a")
    [change] = lazy.reload.changes
    assert (change.kind, old) == ("not loaded", lazy.first.code_version)
    assert change.why == "TimeoutError: loading it did not end within 0.6 s"
    assert agent(None, None) == 0.25
    threads = [thread for thread in threading.enumerate() if thread.name == "agentjet-agent"]
    hang.set()
    for thread in threads:
        thread.join(20)
    assert agent(None, None) == 0.25
    del sys.modules["live_more"]
    assert agent(None, None) == 0.25, "it is found in the copy of the old version"


async def test_a_part_of_a_source_that_was_loaded_before_another_failed_is_not_used(files: Files, lazy: Live) -> None:
    """As with a program and its reward function, which is loaded first."""

    class Half:
        stamp, described = lazy.code.stamp, lazy.code.described

        def load(self) -> AgentVersion:
            lazy.code.load()
            raise PermissionError(13, "Permission denied", "secret.txt")

    live = Live(Half(), lazy.first)
    files.write("live_more", "REWARD = 0.75\n")
    old, agent = await live.begin("a")
    assert [change.kind for change in live.reload.changes] == ["not loaded"]
    assert (old, agent(None, None)) == (lazy.first.code_version, 0.25)


def test_a_working_directory_that_is_gone_does_not_end_the_run(files: Files, lazy: Live, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    files.write("live_more", "REWARD = 0.75\n")
    lazy.reload.end()
    assert [change.why.partition(" changed")[0] for change in lazy.reload.changes] == [str(tmp_path / "live_more.py")]


def test_files_that_change_while_they_are_loaded_are_loaded_again(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edit imports the old words; before its hash is computed, there are new ones."""
    run, late = Run(), ["REWARD = 0.75\n"]
    monkeypatch.setattr("builtins.LATE", lambda: late and files.write("live_words", late.pop()), raising=False)
    files.edit(1, "live_agent", AGENT + "LATE()\n")
    report = asyncio.run(run.train(files.agent(), 3, concurrency=1))
    old, new = report.by_code_version
    assert [report.by_code_version[it].mean_reward for it in (old, new)] == [0.25, 0.75]


def test_a_version_that_only_fails_is_rolled_back(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    files.edit(1, "live_words", "REWARD = 1 / 0 if False else None\n")
    report = asyncio.run(run.train(files.agent(), 4, progress=True))
    good, bad = report.by_code_version
    assert [change.kind for change in report.code_changes] == ["loaded", "rolled back"]
    back = report.code_changes[1]
    assert (back.before, back.to) == (bad, good)
    assert "its first 4 episodes all failed, the last with Unprocessable: reward is None" in back.why
    assert report.by_code_version[bad].num_finished == 0
    assert set(report.rewards) == {0.25} and len(report.rewards) == 4
    assert f"ROLLED BACK to code {good}" in capsys.readouterr().out
    assert "rolled back to" in str(report)
    assert all(len(versions) == 1 for versions in run.versions_of_groups().values())


def test_no_task_is_given_up_for_a_version_that_is_rolled_back(files: Files) -> None:
    """One worker alone: its task fails more often than a task may before the version has failed often enough."""
    run = Run(FakeServer(batch_size=1, group_size=2))
    files.edit(2, "live_words", "REWARD = None\n")
    report = asyncio.run(run.train(files.agent(), 4, concurrency=1))
    assert [change.kind for change in report.code_changes] == ["loaded", "rolled back"]
    assert report.num_aborted == 4
    finished = Counter(result.task_id for result in report.finished)
    assert len(finished) == 4 and set(finished.values()) == {2}


def test_a_version_rolled_back_is_tried_again_when_the_files_change(files: Files) -> None:
    run = Run()
    files.edit(1, "live_words", "REWARD = None\n")
    files.edit(14, "live_words", "REWARD = 1.0\n")
    report = asyncio.run(run.train(files.agent(), 6))
    assert [change.kind for change in report.code_changes] == ["loaded", "rolled back", "loaded"]
    assert report.rewards[-1] == 1.0
    assert run.server.by_status()["live"] == 0


def test_one_that_fails_now_and_then_is_kept(files: Files) -> None:
    run = Run()
    files.edit(1, "live_agent", AGENT + "    # edited\n" + FLAKY)
    report = asyncio.run(run.train(files.agent(), 3))
    assert [change.kind for change in report.code_changes] == ["loaded"]
    assert report.num_aborted >= 3


FLAKY = """
num_calls = 0
reliable = agent

async def agent(task, episode):
    global num_calls
    num_calls += 1
    assert num_calls % 3, "every third one fails"
    return await reliable(task, episode)
"""


def test_two_edits_of_one_size_within_one_tick_of_the_clock(files: Files) -> None:
    """Python's compiled cache distinguishes files by size and second; a version must not."""
    agent = files.agent()
    code = ModuleSource(agent)
    versions = []
    for reward in ("0.10", "0.20", "0.30"):
        files.write("live_words", f"REWARD = {reward}\n")
        os.utime(files.folder / "live_words.py", (1_700_000_000, 1_700_000_000))
        version = code.load()
        versions.append(version.code_version)
        assert version.agent.__globals__["REWARD"] == float(reward)
        assert code_version_of(version.agent) == version.code_version
    assert len(set(versions)) == 3
    assert agent.__globals__["REWARD"] == 0.25, "what runs keeps what it has"


def test_a_failed_load_leaves_the_old_modules_imported(files: Files) -> None:
    code = ModuleSource(files.agent())
    before = sys.modules["live_agent"], sys.modules["live_words"]
    files.write("live_agent", "from live_words import REWARD\nraise RuntimeError('half way')\n")
    with pytest.raises(RuntimeError, match="half way"):
        code.load()
    assert (sys.modules["live_agent"], sys.modules["live_words"]) == before


def test_a_module_that_is_imported_newly_belongs_to_the_version(files: Files) -> None:
    code = ModuleSource(files.agent())
    files.write("live_more", "REWARD = 0.5\n")
    files.write("live_agent", AGENT.replace("live_words", "live_more"))
    first = code.load().code_version
    stamp = code.stamp()
    files.write("live_more", "REWARD = 0.625\n")
    assert code.stamp() != stamp
    assert code.load().code_version != first


def test_a_module_of_a_package_is_loaded_anew_however_it_is_imported(files: Files) -> None:
    (files.folder / "live_package").mkdir()
    files.write("live_package/words", "REWARD = 0.25\n")
    files.write("live_package/tasks", "")
    files.write(
        "live_package/agent", "from live_package import words\n\ndef agent(task, episode):\n    return words.REWARD\n"
    )
    old = importlib.import_module("live_package.agent").agent
    tasks = importlib.import_module("live_package.tasks")  # by the script alone
    code = ModuleSource(old)
    try:
        files.write("live_package/words", "REWARD = 0.75\n")
        new = code.load().agent
        assert (old(None, None), new(None, None)) == (0.25, 0.75)
        assert importlib.import_module("live_package.tasks") is not tasks, "the script keeps its own"
        files.write("live_package/words", "REWARD = = 1\n")
        with pytest.raises(SyntaxError):
            code.load()
        assert importlib.import_module("live_package").words.REWARD == 0.75
    finally:
        for name in [name for name in sys.modules if name.startswith("live_package")]:
            del sys.modules[name]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("payload", "is_named"),
    [
        (lambda words: words.Kind.SUM, True),
        (lambda words: {"steps": [(words.Kind.SUM, 3)]}, True),
        (lambda words: words.Puzzle([words.Kind.SUM]), True),
        (lambda words: {"steps": [(words.Kind.SUM.value, 3)]}, False),
        (lambda words: None, False),
    ],
)
def test_objects_of_reloaded_classes_in_tasks_are_named(
    payload: Callable[[Any], object], is_named: bool, stream: bool, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """For the agent, which is imported again, they are not equal to the members of its own enum."""
    classes = "class Puzzle:\n    def __init__(self, kinds):\n        self.kinds = kinds\n"
    files.write(
        "live_words", f"import enum\nREWARD = 0.25\nKind = enum.Enum('Kind', 'SUM', module=__name__)\n{classes}"
    )
    agent = files.agent()
    made = payload(sys.modules["live_words"])
    tasks = [Task(f"t{number}", payload=made) for number in range(3)]
    asyncio.run(Run(tasks=iter(tasks) if stream else tasks).train(agent, 1))
    assert [record.getMessage().count("live_words.Kind") for record in caplog.records] == [1] * is_named


def test_the_version_of_an_agent(files: Files) -> None:
    version = code_version_of(files.agent())
    assert len(version) == 12
    assert code_version_of(files.agent()) == version
    assert code_version_of(Command(["true"], lambda payload, result: 0.0, code_version="mine")) == "mine"
    assert code_version_of(eval("lambda task, episode: 0.0", {"__name__": "typed in"})) == ""


def test_the_server_is_told_the_version_also_without_reload(files: Files) -> None:
    run = Run()
    report = asyncio.run(run.train(files.agent(), 1, reload=False))
    assert {view.code_version for view in run.server.episodes.values()} == {code_version_of(files.agent())}
    named = asyncio.run(run.train(files.agent(), 1, reload=False, code_version="v7"))
    assert list(named.by_code_version) == ["v7"]
    assert report.code_changes == ()


@pytest.mark.parametrize("what", ["closure", "instance", "main"])
def test_an_agent_that_cannot_be_found_again_is_refused(what: str, files: Files) -> None:
    class Instance:
        async def __call__(self, task: Task, episode: Any) -> float:
            return 0.0

    def closure(task: Task, episode: Any) -> float:
        return 0.0

    agents: dict[str, Any] = {"closure": closure, "instance": Instance()}
    if what == "main":
        names: dict[str, Any] = {"__name__": "__main__"}
        exec("def agent(task, episode): ...", names)
        agents["main"] = names["agent"]
    with pytest.raises(ConfigError, match="move it to another file" if what == "main" else "top of a module"):
        asyncio.run(Run().train(agents[what], 1))


IN_FOLDERS = {
    "a subfolder": ("from live_sub import deep", "deep.REWARD", "live_sub/deep", "REWARD = {}\n"),
    "a folder of a subfolder": (
        "import live_sub.more.deep as deep",
        "deep.REWARD",
        "live_sub/more/deep",
        "REWARD = {}\n",
    ),
    "inside the function": ("", "__import__('live_lazy').REWARD", "live_lazy", "REWARD = {}\n"),
    "a data file": (
        "from pathlib import Path",
        "float(Path(__file__).with_name('live_prompt.txt').read_text())",
        "live_prompt.txt",
        "{}",
    ),
    "a data file of a subfolder": (
        "from pathlib import Path\nHERE = Path(__file__).parent",
        "float((HERE / 'live_sub' / 'prompt.md').read_text())",
        "live_sub/prompt.md",
        "{}",
    ),
}


@pytest.mark.parametrize("kind", IN_FOLDERS)
def test_what_the_agent_uses_below_its_folder_belongs_to_the_version(kind: str, files: Files) -> None:
    """The first member of the first group edits before it looks: it and its partner still see the old state."""
    first_line, value, name, text = IN_FOLDERS[kind]
    (files.folder / name).parent.mkdir(parents=True, exist_ok=True)
    files.write(name, text.format(0.25))
    files.write("live_agent", f"{first_line}\nasync def agent(task, episode):\n    await GATE()\n    return {value}\n")
    files.edit(1, name, text.format(0.75))
    run = Run()
    try:
        report = asyncio.run(run.train(files.agent(), 3, concurrency=1))
    finally:
        for module in [module for module in sys.modules if module.startswith("live_")]:
            del sys.modules[module]
    assert run.rewards_of_groups() == {(0.25, 0.25): 1, (0.75, 0.75): 5}
    assert [change.kind for change in report.code_changes] == ["loaded"]


def test_a_package_is_one_version_with_its_relative_imports(files: Files) -> None:
    for name, text in {
        "live_pkg/__init__": "",
        "live_pkg/words": "REWARD = 0.25\n",
        "live_pkg/agents/__init__": "",
        "live_pkg/agents/solver": "from ..words import REWARD\nasync def agent(task, episode):\n"
        "    await GATE()\n    return REWARD\n",
    }.items():
        (files.folder / name).parent.mkdir(exist_ok=True, parents=True)
        files.write(name, text)
    files.edit(1, "live_pkg/words", "REWARD = 0.75\n")
    agent = importlib.import_module("live_pkg.agents.solver").agent
    before = dict(sys.modules)
    run = Run()
    try:
        report = asyncio.run(run.train(agent, 3, concurrency=1))
        assert run.rewards_of_groups() == {(0.25, 0.25): 1, (0.75, 0.75): 5}
        assert len(report.by_code_version) == 2
        names = [name for name in sys.modules if name.startswith("live_pkg")]
        assert all(sys.modules[name] is before[name] for name in names), "after the run the script's modules are back"
        assert not [finder for finder in sys.meta_path if "CopyFinder" in repr(finder)]
    finally:
        for module in [module for module in sys.modules if module.startswith("live_")]:
            del sys.modules[module]


def test_the_watched_files_are_shown_and_those_that_are_not(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("train", "")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(files.folder / "train.py"), raising=False)
    (files.folder / "prompt.txt").write_text("Add.")
    (files.folder / "run.log").write_text("")
    (files.folder / "big.json").write_bytes(b" " * (5 * 2**20))
    (files.folder / ".venv").mkdir()
    (files.folder / "__pycache__").mkdir(exist_ok=True)  # Python writes it again, beside the copy.
    (files.folder / "agentjet-data" / "runs" / "default").mkdir(parents=True)
    asyncio.run(Run().train(files.agent(), 1, progress=True))
    shown = capsys.readouterr().out
    watched = (
        f"watched: 3 files of {files.folder}, the folder of live_agent.py: live_agent.py, live_words.py, prompt.txt"
    )
    assert f"{watched}\n" in shown
    linked = ".venv, agentjet-data (a server's data dir), big.json (large), run.log"
    script = "train.py (the running script: start it again after an edit)"
    assert f"not watched and not copied: {linked}, {script}\n" in shown


ERRORS = {
    "the agent": ("", "raise KeyError('gone')", "live_agent.py:3 in agent"),
    "a helper": ("from live_more import look", "look('gone')", "live_more.py:2 in look"),
    "a helper in a folder": ("from live_sub.deep import look", "look('gone')", "live_sub/deep.py:2 in look"),
    "a library": ("import json", "json.loads('{')", "live_agent.py:3 in agent"),
    "a helper, through a library": (
        "import functools\nfrom live_more import look",
        "functools.reduce(look, ['a', 'b'])",
        "live_more.py:2 in look",
    ),
    "generated code": ("", "eval('1 / 0')", "live_agent.py:3 in agent"),
}


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_shown_where_it_was_raised_in_the_original(kind: str, reload: bool, files: Files) -> None:
    first_line, call, where = ERRORS[kind]
    (files.folder / "live_sub").mkdir()
    for name in ("live_more", "live_sub/deep"):
        files.write(name, "def look(word, other=None):\n    return {}[word]\n")
    lines = (first_line, "async def agent(task, episode):", f"    {call}")
    files.write("live_agent", "\n".join(lines))
    expected = where.replace(":3", f":{first_line.count(chr(10)) + 3}")
    try:
        with pytest.raises(AgentFailing, match=re.escape(f" at {files.folder}/{expected}:")):
            asyncio.run(Run().train(files.agent(), 1, reload=reload))
    finally:
        for module in [module for module in sys.modules if module.startswith("live_")]:
            del sys.modules[module]


def test_a_file_that_ends_the_program(tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text("import sys\nsys.exit('no key')\n")
    with pytest.raises(ConfigError, match=r"--reward .*ends.py: importing it ends the program \(SystemExit: no key\)"):
        load_function(f"{file}:reward", option="--reward")


def test_a_package_of_the_current_folder_is_found_after_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tasks_xyz.py").write_text("def reward(): return 1\n")
    (tmp_path / "wave.py").write_text("raise SystemExit('a module of the standard library was replaced')\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert source_of("my_tasks_xyz:reward", option="--reward") == tmp_path / "my_tasks_xyz.py"
    assert load_function("my_tasks_xyz:reward", option="--reward")() == 1
    assert callable(load_function("wave:open", option="--reward"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos.absent\n", "AttributeError: module 'os' has no attribute 'absent'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import no_such_library\n", "No module named 'no_such_library'"),
    ],
)
def test_a_package_whose_import_fails_is_refused(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a function in a package is found by an import of the package."""
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"--reward .*{message}"):
        source_of("broken_package.agent:reward", option="--reward")
