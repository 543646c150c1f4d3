"""Progress of commands that wait: one line in place on a terminal, a line now and then in a file, nothing at first."""

from __future__ import annotations

import io
import threading

import pytest

import agentjet.cli as shown
from agentjet.cli import ProgressLine, progress, work_of
from agentjet.client import Swarm
from tests.fakes import Clock
from tests.server.serving import TOKEN, Served


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_in_place() -> None:
    out, clock = Terminal(), Clock()
    line = ProgressLine(out, clock=clock)
    line.show("exporting")
    assert out.getvalue() == "", "short work is not shown"
    clock.advance(3)
    line.show("exporting\x1b[2J")
    clock.advance(9)
    line.show("exporting version 3: 12 s so far, about 8 s left")
    line.clear()
    line.clear()
    assert out.getvalue().split("\r\x1b[K") == [
        "",
        "exporting\\x1b[2J: 3 s so far",
        "exporting version 3: 12 s so far, about 8 s left",
        "",
    ]


def test_a_long_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out, clock = Terminal(), Clock()
    line = ProgressLine(out, clock=clock)
    clock.advance(3)
    line.show("x" * 50)
    assert out.getvalue() == "\r\x1b[K" + "x" * 18 + "…"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_output_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    out, clock = (Terminal() if is_terminal else io.StringIO()), Clock()

    def fail(text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    line = ProgressLine(out, clock=clock)
    monkeypatch.setattr(out, "write", fail)
    clock.advance(3)
    line.show("loading")
    line.clear()


def test_a_file_has_a_line_now_and_then() -> None:
    out, clock = io.StringIO(), Clock()
    line = ProgressLine(out, clock=clock)
    for _ in range(25):
        clock.advance(1)
        line.show("copying")
    line.clear()
    assert out.getvalue().splitlines() == ["copying: 2 s so far", "copying: 12 s so far", "copying: 22 s so far"]


def test_a_thread_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(shown, "PATIENCE", 0.0)
    out, looked = Terminal(), threading.Event()

    def doing() -> str:
        if "better" in out.getvalue():
            looked.set()
        return "a better text"

    with progress("text", doing, line=ProgressLine(out)):
        assert looked.wait(30)
    assert "a better text: 0 s so far" in out.getvalue() and out.getvalue().endswith("\r\x1b[K")


def test_the_work_of_a_server(served: Served) -> None:
    with Swarm(served.url, TOKEN) as swarm:
        doing = work_of(swarm)
        assert doing() == ""
        with served.run.gateway.telemetry.activity.work("export", "exporting version 0"):
            served.run.stopwatch.advance(5)
            assert doing() == "the engine, exporting version 0: 5 s so far"
