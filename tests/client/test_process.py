"""The process of a client: forks, signals, threads, proxies of its environment, and the types that mypy sees.

A request to end the process raises in the main thread, inside the context only. Signals that the program handles or
ignores, and other threads, are not affected.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentjet.client import AsyncSwarm, Episode, Swarm
from agentjet.client.connection import proxy_hint, reach_directly, without_proxy
from agentjet.client.rollout import AgentFailing
from agentjet.client.threads import FORKED, LoopThread, raise_on_signals
from agentjet.types import Task
from tests.client.server import TOKEN, URL, FakeServer, FakeTime

TASKS = [Task(f"t{number}") for number in range(8)]


def in_child(work: Any) -> str:
    """The text that `work` returns in a forked process, or that of its exception."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    timer = threading.Timer(20, os.kill, [pid, signal.SIGKILL])
    timer.start()
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(pid, 0)
    timer.cancel()
    return text


def test_a_client_that_was_used_before_a_fork_says_so_in_the_child() -> None:
    server = FakeServer()
    with server.client() as swarm:
        swarm.status()
        assert in_child(swarm.status) == f"RuntimeError: {FORKED}"
        assert in_child(lambda: swarm.train(lambda task, episode: 0.0, TASKS, steps=1)) == f"RuntimeError: {FORKED}"
        assert in_child(swarm.close) == "None"
        assert swarm.status().state == "sampling", "the parent's client goes on"
    with server.client() as unused:
        assert in_child(lambda: unused.status().state) == "sampling"


def test_an_asynchronous_client_and_an_episode_say_so_too() -> None:
    async def scenario() -> tuple[str, str]:
        async with AsyncSwarm(URL, TOKEN, transport=FakeServer().transport()) as swarm:
            await swarm.status()
            said: list[str] = []

            def agent(task: Task, episode: Episode) -> float:
                said.append(in_child(episode.heartbeat))
                return 1.0

            await swarm.evaluate(agent, TASKS[:1], progress=False)
            thread = ThreadPoolExecutor(1)  # This one has a running loop.
            return in_child(lambda: thread.submit(asyncio.run, swarm.status()).result()), said[0]

    assert asyncio.run(scenario()) == (f"RuntimeError: {FORKED}",) * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_twice_leaves_no_episode_live(number: signal.Signals) -> None:
    server, begun = FakeServer(), threading.Event()

    async def agent(task: Task, episode: Any) -> float:
        begun.set()
        await asyncio.sleep(3600)
        return 0.0

    def twice() -> None:
        assert begun.wait(30)
        time.sleep(0.3)
        server.hold_answers = asyncio.Event()
        for _ in range(2):
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        time.sleep(0.3)
        held, server.hold_answers = server.hold_answers, None
        swarm._loop._started().call_soon_threadsafe(held.set)

    with server.client() as swarm:
        sender = threading.Thread(target=twice)
        sender.start()
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            swarm.train(agent, TASKS, steps=1, concurrency=4, progress=False)
        sender.join()
        assert server.by_status()["live"] == 0 and server.by_status()["aborted"] == 4


def test_agents_reach_a_server_on_this_machine_past_a_proxy() -> None:
    environ = {"HTTP_PROXY": "http://user:secret@proxy:3128", "NO_PROXY": "intranet"}
    reach_directly("http://127.0.0.1:8400", environ)
    assert environ["NO_PROXY"] == environ["no_proxy"] == "intranet,127.0.0.1"
    for url, other in (("http://far:8400", dict(environ)), ("http://localhost:1", {"A": "b"})):
        before = dict(other)
        reach_directly(url, other)
        assert other == before, "a server elsewhere may need the proxy, and without one nothing is set"
    assert without_proxy("localhost", {"no_proxy": "*"}) == {}


@pytest.mark.parametrize(
    ("error", "url", "is_named"),
    [
        (ConnectionError("Connection error."), "http://127.0.0.1:8400/v1", True),
        (OSError("502 Bad Gateway"), "http://localhost:8400/v1", True),
        (ConnectionError("Connection error."), "http://far:8400/v1", False),
        (KeyError("answer"), "http://127.0.0.1:8400/v1", False),
    ],
)
def test_an_agent_that_could_not_connect_is_shown_the_proxy(error: Exception, url: str, is_named: bool) -> None:
    hint = proxy_hint(error, url, {"HTTP_PROXY": "http://user:secret@proxy:3128"})
    assert bool(hint) == is_named and "secret" not in hint
    assert not is_named or ("HTTP_PROXY is set" in hint and "NO_PROXY=" in hint)
    assert proxy_hint(error, url, {}) == ""


def test_the_agents_of_a_run_do_not_use_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")

    async def agent(task: Task, episode: Any) -> float:
        seen.append(os.environ["NO_PROXY"])
        raise ConnectionError("Connection error.")

    said = r"Connection error\. \(HTTP_PROXY is set.*NO_PROXY=127\.0\.0\.1"
    with (
        Swarm(URL, TOKEN, transport=FakeServer().transport(), retry=FakeTime().retry()) as swarm,
        pytest.raises(AgentFailing, match=said),
    ):
        swarm.evaluate(agent, TASKS, concurrency=1, progress=False)
    assert set(seen) == {"127.0.0.1"}


@pytest.mark.slow
def test_mypy_sees_the_types(tmp_path: Path) -> None:
    """In a package without `py.typed` everything is `Any`, so nothing is an error."""
    (tmp_path / "user.py").write_text("from agentjet import Swarm\nwrong: int = Swarm().status()\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert 'expression has type "StatusResponse", variable has type "int"' in found.stdout, found.stdout + found.stderr
    assert "py.typed" not in found.stdout


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_request_to_end_unwinds() -> None:
    with pytest.raises(SystemExit) as ended, raise_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_the_program_does_itself_stays() -> None:
    heard: list[int] = []
    for own in (lambda number, frame: heard.append(number), signal.SIG_IGN):
        signal.signal(signal.SIGTERM, own)
        with raise_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) == own
    assert heard == [signal.SIGTERM]


def test_in_another_thread_it_does_nothing() -> None:
    found: list[object] = []

    def work() -> None:
        with raise_on_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_a_coroutine_that_exits_ends_its_caller_and_not_the_loop() -> None:
    async def leave(code: int) -> None:
        sys.exit(code)

    async def leave_in_a_task() -> None:
        await asyncio.create_task(leave(4))

    loop, codes = LoopThread(), []

    def work() -> None:
        for coroutine in (leave(3), leave_in_a_task(), asyncio.sleep(0)):
            try:
                loop.run(coroutine)
            except SystemExit as ended:
                codes.append(ended.code)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive() and codes == [3, 4]
    loop.stop()


def test_an_interpreter_that_ends_waits_for_no_coroutine() -> None:
    """An episode that was never left, in a generator that is closed only while the interpreter ends."""
    script = """
from agentjet.client.threads import LoopThread

async def abort():
    pass

def episode(loop):
    try:
        yield
    finally:
        loop.run(abort())

loop = LoopThread()
loop.run(abort())
begun = episode(loop)
next(begun)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=20, capture_output=True, text=True, check=True)
    assert "the interpreter is ending" in ended.stderr
