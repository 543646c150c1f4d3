"""Reports and answers at the end of a notebook's cell are short, and a report shows its curve. A client works inside a
running event loop, as in a notebook."""

from __future__ import annotations

import _thread
import asyncio
import itertools
import math
from xml.etree import ElementTree

import pytest

from agentjet.cli.run import run_document
from agentjet.client import Episode, EpisodeResult, EvalReport, Step, TrainReport
from agentjet.client.report import svg_of
from agentjet.client.training import SftReport
from agentjet.protocol import Response, StepList
from agentjet.types import Task
from tests.client.server import FakeServer

MANY = tuple(EpisodeResult(f"t{n}", "", "finished", 0, n % 2, error="", where="") for n in range(4000))
FAILED = EpisodeResult("<b>", "", "aborted", 0, error="ValueError: <script>alert(1)</script>")
STEPS = tuple(Step(n, {"reward/mean": n / 50, "policy/cross_entropy": 2.0 - n / 50}) for n in range(1, 51))
REPORTS = {
    "train": TrainReport((*MANY, FAILED), STEPS, 12.0),
    "evaluate": EvalReport((*MANY, FAILED), 12.0),
    "sft": SftReport(STEPS, 800, 900, 10_000, 12.0),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_a_report_is_short_and_has_its_curve(kind: str) -> None:
    report = REPORTS[kind]
    assert len(repr(report)) < 300 and "\n" not in repr(report) and type(report).__name__ in repr(report)
    html = report._repr_html_()
    assert len(html) < 20_000
    tree = ElementTree.fromstring(html)
    [line] = tree.iter("polyline")
    assert len(line.attrib["points"].split()) >= 2
    assert "<script>" not in html and (kind == "sft" or "&lt;script&gt;" in html)


def test_dropped_groups_are_shown_by_reason() -> None:
    metrics = [{"groups/dropped": 3.0, "groups/dropped_no_tokens": 2.0, "groups/dropped_stale": 1.0}, {}]
    steps = tuple(Step(n, {**one, "groups/dropped_too_few": 0.0, "reward/mean": 0.5}) for n, one in enumerate(metrics))
    report = TrainReport((FAILED,), (*steps, steps[0]), 1.0)
    assert report.groups_dropped == {"no_tokens": 4, "stale": 2}
    assert "6 groups dropped, which trained nothing (4 no_tokens, 2 stale)" in str(report)
    html = report._repr_html_()
    assert "(4 no_tokens, 2 stale)" in html and "groups dropped: no_tokens</th><td align='right'>4<" in html
    assert run_document(report)["groups_dropped"] == report.groups_dropped
    assert "dropped" not in str(TrainReport((FAILED,), (steps[1],), 1.0))


def test_a_report_without_a_curve() -> None:
    for report in (TrainReport((), (), 0.0), EvalReport((FAILED,), 0.0), SftReport((), 0, 0, 0, 0.0)):
        assert "<svg" not in report._repr_html_() and repr(report)


def test_a_curve_has_gaps_where_numbers_are_missing_and_bounded_points() -> None:
    assert svg_of([1.0, math.nan], "reward") == ""
    assert svg_of([0.0, math.nan, 1.0], "reward").count(",") >= 2
    assert len(svg_of([n % 7 for n in range(100_000)], "reward")) < 10_000


def test_a_long_answer_is_cut() -> None:
    steps = StepList.model_construct(versions=list(range(10_000)), times=[], metrics={})
    assert isinstance(steps, Response) and len(repr(steps)) < 1100 and repr(steps).endswith("characters)")


def test_a_client_works_in_a_running_event_loop() -> None:
    """A notebook's cell runs inside a loop of this thread."""

    async def cell() -> TrainReport:
        with FakeServer().client() as swarm:
            return swarm.train(lambda task, episode: 1.0, [Task("a"), Task("b")], steps=2, progress=False)

    assert asyncio.run(cell()).rewards == (1.0, 1.0)


@pytest.mark.parametrize("is_interactive", [False, True])
def test_ctrl_c_ends_a_script_and_not_a_prompt(is_interactive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def agent(task: Task, episode: Episode) -> float:
        _thread.interrupt_main()
        return 1.0

    if is_interactive:
        monkeypatch.setattr("sys.ps1", "In : ", raising=False)
    server = FakeServer()
    with server.client() as swarm:
        with pytest.raises(KeyboardInterrupt, match="finished training steps are kept") as raised:
            swarm.train(agent, [Task("a")], steps=1_000, progress=False)
        assert isinstance(raised.value, SystemExit) != is_interactive


def test_a_generator_of_an_evaluation_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.client.inputs.MAX_TASKS", 100)
    drawn = itertools.count()
    with FakeServer().client() as swarm:
        for run in (
            lambda tasks: swarm.evaluate(print, tasks),
            lambda tasks: swarm.train(print, [Task("a")], steps=1, eval_tasks=tasks, eval_every=1),
        ):
            with pytest.raises(ValueError, match=r"more than 100 tasks.*a generator must end.*itertools.islice\("):
                run(Task(f"t{n}") for n in drawn)
    assert next(drawn) < 300
