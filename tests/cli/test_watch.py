"""`agentjet watch` and the lines of `status`.

1. The screen at 80, 100 and 160 columns shows the answers, the picture of the batch and the clocks that ran on.
2. Names of clients cannot control the terminal.
3. A pipe gets one line for each change, and nothing for episodes that begin or finish.
4. A server that stops is shown as such, with the age of what is shown, and followed again when it is back.
`tests.locks` has `watch --once` and `status` of recorded runs.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from rich.console import Console

from agentjet.cli.runs import status_lines
from agentjet.cli.watch import Lines, Snapshot, event_line, follow, picture, screen
from agentjet.client import AsyncSwarm
from agentjet.errors import Unreachable
from agentjet.protocol import (
    CellView,
    Event,
    FrontView,
    HealthRuleView,
    HealthView,
    LearningView,
    ScoredAnswer,
    StatusResponse,
    StepList,
    WaitingGroupView,
    WaitingView,
    ZeroVariance,
    duration,
)

FINE = HealthRuleView(name="engine", level="ok", text="the engine is sampling", docs="docs/health.md#engine")


def seen(
    *, step: int = 0, clients: dict[str, float] | None = None, holding: dict[str, int] | None = None, **more: Any
) -> StatusResponse:
    return StatusResponse(
        version="0", state="sampling", waiting_for="somebody", policy_version=step, batch_size=1,
        group_size=2, groups_complete=0, groups_open=0, episodes={}, calls_active=0, clients=clients or {},
        holding=holding or {}, last_event=0, uptime=1.0, **{"model": "tiny", "last_step": {}, "max_steps": 0, **more},
    )  # fmt: skip


def health(answer: str = "yes", *rules: HealthRuleView) -> HealthView:
    view = LearningView.model_validate({"answer": answer, "num_steps": 20, "text": f"{answer}: +0.021 a step"})
    return HealthView(learning=view, rules=[FINE, *rules])


def cell(state: str, reward: float | None = None, silent: float | None = None, left: float | None = None) -> CellView:
    return CellView.model_validate(
        {
            "episode_id": "ep_1",
            "state": state,
            "reward": reward,
            "silent_seconds": silent,
            "expires_in": left,
            "ends_in": 1740.0 if left else None,
        }
    )


def group(*cells: CellView, size: int = 4, task: str = "t1") -> WaitingGroupView:
    return WaitingGroupView(id=1, name=task, task_id=task, task_set="", state="open", size=size, cells=list(cells))


def waiting(*groups: WaitingGroupView, needed: int = 3) -> WaitingView:
    return WaitingView(text="rewards: 1 of 3", needed=needed, places=3, num_groups=len(groups), groups=list(groups))


def snapshot(**more: Any) -> Snapshot:
    metrics: dict[str, list[float | None]] = {
        "reward/mean": [0.1, 0.2, 0.4, 0.8], "time/sample": [3.0] * 4, "time/wait": [1.0] * 4,
        "time/learn": [1.0] * 4, "perf/tokens_per_second": [1940.0] * 4,
    }  # fmt: skip
    steps = StepList(versions=[1, 2, 3, 4], times=[0.0, 41.0, 82.0, 123.0], metrics=metrics)
    finished = group(cell("finished", 1.0), cell("finished", 0.0), cell("finished", 0.0), cell("finished", 1.0))
    filling = group(cell("finished", 0.0), cell("live", None, 38.0, 82.0), cell("failed"), task="t2")
    rules = [HealthRuleView(name="truncated", level="warn", text="12% were cut", docs="docs/health.md#truncated")]
    status = seen(step=57, ends_at_version=200, clients={"train-0": 2.0}, holding={"train-0": 6})
    found = Snapshot("http://host:8400", status, health("yes", *rules), waiting(finished, filling), steps)
    return Snapshot(**{**found.__dict__, **more})


def drawn(shown: Snapshot, width: int = 100) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(screen(shown, width))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_screen() -> None:
    assert drawn(snapshot(news=["12:04:31  ep_2 of task p9 aborted: Timeout"])) == [
        "agentjet   tiny  ● sampling  step 57 of 200  up 1 s  http://host:8400",
        "learning   yes: +0.021 a step  ▁▂▄█",
        "healthy    ! 12% were cut",
        "           ✓ engine",
        "waits for  rewards: 1 of 3",
        "           ████ █▒✕· ····",
        "           █ finished (green: highest reward)  ▒ live  ✕ failed  · free",
        "           longest silent: ep_1 of task t2, 38 s; lease ends in 1 min 22 s, episode in 29 min",
        "time       sample ▇▇▇▇▇▇ 60%  wait ▇▇ 20%  learn ▇▇ 20%  1,940 tokens/s  a step each 41 s",
        "clients    train-0 (holds 6, seen 2 s ago)",
        "just now   12:04:31  ep_2 of task p9 aborted: Timeout",
    ]


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_fits_its_width(width: int) -> None:
    lines = drawn(snapshot(news=["12:04:31  " + "long " * 60], problem="no answer " * 30), width)
    assert max(map(len, lines)) <= width
    assert sum("long long" in line for line in lines) == 1, "news are cut, not wrapped"


def test_clocks_run_on_between_two_reads() -> None:
    lines = "\n".join(drawn(snapshot(age=12.0, problem="no answer from http://host:8400")))
    assert "50 s; lease ends in 1 min 10 s, episode in" in lines and "up 13 s" in lines
    assert "no answer  since 12 s: no answer from http://host:8400" in lines


EQUAL = ZeroVariance(
    batches=3, truncated=0.0, task_id="t1", prompt="1 + 1?",
    answers=[ScoredAnswer(answer=f"{',' * n}", reward=0.0, count=9 - n) for n in range(1, 6)],
)  # fmt: skip


def test_batches_that_teach_nothing() -> None:
    lines = drawn(snapshot(status=seen(zero_variance=EQUAL)), 160)
    first = next(i for i, line in enumerate(lines) if line.startswith("warning"))
    assert "3 batches in a row could teach nothing" in lines[first]
    assert [line.strip() for line in lines[first + 1 : first + 6]] == [
        "task 't1', prompt '1 + 1?'",
        "reward 0 x 8: ','",
        "reward 0 x 7: ',,'",
        "reward 0 x 6: ',,,'",
        "look at the reward: the answers differ; does it accept what is right in them, or could it be partial?",
    ]
    said: list[str] = []
    shown = Lines(said.append)
    for _ in range(2):
        shown.changes(snapshot(status=seen(zero_variance=EQUAL)))
    assert sum("could teach nothing" in line for line in said) == 1


def test_a_large_batch_is_cut() -> None:
    full = group(*[cell("finished", 0.0)] * 16, size=16)
    rows = [row.plain for row in picture(waiting(*[full] * 30, needed=64), 60)]
    assert rows[0] == " ".join(["█" * 16] * 3) and len(rows) == 5
    assert rows[-1] == "and 52 more groups"


def test_a_run_without_episodes() -> None:
    empty = StepList(versions=[], times=[], metrics={})
    lines = drawn(snapshot(waiting=waiting(), steps=empty, health=health("too_early"), status=seen()))
    assert "waits for  rewards: 1 of 3" in lines and not [line for line in lines if line.startswith("time")]


def test_names_cannot_control_the_terminal() -> None:
    bad = "\x1b[2J\u202e[red]x"
    rule = HealthRuleView(name="episodes", level="bad", text=bad, docs="")
    status = seen(clients={bad: 1.0}, model=bad)
    view = waiting(group(cell("live", None, 1.0, 2.0), task=bad))
    text = "\n".join(drawn(snapshot(status=status, health=health("no", rule), waiting=view, problem=bad), 160))
    assert "\x1b" not in text and "\u202e" not in text and text.count("[red]x") == 5


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59, 60, 61, 3600, 7860, 48 * 3600, 180_000)] == [
        "0 s", "59 s", "1 min", "1 min 1 s", "1 h", "2 h 11 min", "2 d", "2 d 2 h"
    ]  # fmt: skip


# ---- lines -----------------------------------------------------------------------------------------------------------


def event(kind: str, **body: Any) -> Event:
    return Event(seq=1, kind=kind, time=0.0, body=body)


def test_events_that_deserve_a_line() -> None:
    assert event_line(event("step", policy_version=3, metrics={"reward/mean": 0.5})).endswith("  step 3: reward 0.5")
    assert event_line(event("state", state="failed", reason="no\nGPU")).endswith("state failed: no\\nGPU")
    lost = event("episode", episode_id="ep", task_id="t", status="expired", reason="silent")
    assert event_line(lost).endswith("ep of task t expired: silent")
    assert event_line(event("checkpoint", ok=False, policy_version=3, error="full")).endswith("3 failed: full")
    scored = {"score": 0.5, "policy_version": 3}  # as journals of earlier versions have it
    assert event_line(event("evaluation", **scored)).endswith("  held-out score 0.5 at version 3")
    for name, said in (("sums\n", "sums\\n"), ("", "the evaluation")):
        line = event_line(event("evaluation", **scored, held_out=False, name=name))
        assert line.endswith(f"  score of {said} 0.5 at version 3")
    assert event_line(event("task_set", task_set="math", state="joined")).endswith(
        "task_set state joined, task_set math"
    )
    assert event_line(event("episode", episode_id="ep", task_id="t", status="finished")) == ""
    assert event_line(event("group", group="g", state="complete", reason="")) == ""


def test_a_pipe_gets_a_line_for_each_change() -> None:
    lines: list[str] = []
    shown = Lines(lambda line: lines.append(line.partition("  ")[2]))
    shown.changes(snapshot())
    shown.changes(snapshot())
    assert lines == [
        "http://host:8400: sampling, step 57, waits for rewards: 1 of 3",
        "learning: yes: +0.021 a step",
        "health warn: 12% were cut (docs/health.md#truncated)",
    ]
    del lines[:]
    shown.changes(snapshot(problem="no answer"))
    shown.changes(snapshot(problem="no answer"))
    shown.changes(snapshot(health=health("falls")))
    assert lines == ["no answer", "the server answers again", "learning: falls: +0.021 a step"]


class Stub:
    """Answers like an `AsyncSwarm`, and fails as its script demands."""

    url = "http://host:8400"

    def __init__(self) -> None:
        self.fails = 0
        self.reads = 0
        self.streams: list[list[Event]] = [[event("state", state="learning", reason="")]]
        self.ended = asyncio.Event()

    async def status(self) -> StatusResponse:
        self.reads += 1
        if self.fails:
            self.fails -= 1
            raise Unreachable("no answer")
        return snapshot().status

    async def health(self) -> HealthView:
        return snapshot().health

    async def waiting(self) -> WaitingView:
        return snapshot().waiting

    async def steps(self, limit: int) -> StepList:
        return snapshot().steps

    async def events(self, after: int) -> AsyncGenerator[Event]:
        for one in self.streams.pop(0):
            yield one
        if self.streams:
            self.fails = 1
            raise Unreachable("gone")
        await self.ended.wait()


@pytest.mark.anyio
async def test_a_server_that_stops_is_shown_and_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.cli.watch.REDRAW_SECONDS", 0.001)
    stub, problems, kinds = Stub(), list[str](), list[str]()
    stub.streams.append([event("step", policy_version=58, metrics={})])
    back = asyncio.Event()

    def on_snapshot(shown: Snapshot) -> None:
        problems.append(shown.problem)
        if kinds == ["state", "step"]:
            back.set()

    following = asyncio.create_task(
        follow(cast(AsyncSwarm, stub), 0.0, lambda one: kinds.append(one.kind), on_snapshot)
    )
    await asyncio.wait_for(back.wait(), 30)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert list(dict.fromkeys(problems)) == ["", "no answer"]


@pytest.mark.anyio
async def test_many_events_are_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two reads the screen is drawn once in a pause, not as fast as the machine can."""
    pauses, done = list[float](), asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            done.set()
            await asyncio.Event().wait()

    monkeypatch.setattr("agentjet.cli.watch._pause", pause)
    stub, looks = Stub(), list[Snapshot]()
    stub.streams = [[event("state", state="learning", reason="")] * 50]
    following = asyncio.create_task(follow(cast(AsyncSwarm, stub), 100.0, lambda one: None, looks.append))
    await asyncio.wait_for(done.wait(), 30)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert pauses == [1.0] * 3 and stub.reads == 1 and len(looks) == 4


# ---- status ----------------------------------------------------------------------------------------------------------


def test_many_clients_are_one_line() -> None:
    """Those that hold most come first, then those that were seen last."""
    clients = {f"{'long-' * 50}{number}": 5.0 * number for number in range(40)}
    [first, *_] = clients
    line = dict(status_lines(seen(clients=clients | {"silent": 900.0}, holding={"silent": 3, first: 1})))["clients"]
    assert line.startswith("silent (holds 3, seen 900 s ago), long-long-") and "… (holds 1, seen 0 s ago)" in line
    assert line.endswith(" and 37 more") and len(line) < 300


def test_fronts_have_a_line_each() -> None:
    fronts = [
        FrontView(front=0, ready=True, calls=12, load=0.434, lag=0.0123, starts=1),
        FrontView(front=1, ready=False, calls=0, load=0.0, lag=0.0, starts=2, problem="starts"),
        FrontView(front=2, ready=True, calls=0, load=0.0, lag=0.0, starts=3),
        FrontView(front=3, ready=True, calls=5, load=0.9, lag=0.1, starts=1, problem="silent for 12 s"),
        FrontView(front=4, ready=True, calls=5, load=0.9, lag=12.3, starts=1),
    ]
    lines = ["0: 12 calls, 43% of a core, lag 0.012 s", "1: starts, 1 restart"]
    lines += ["2: 0 calls, 0% of a core, lag 0 s, 2 restarts", "3: silent for 12 s"]
    lines += ["4: 5 calls, 90% of a core, lag 12 s"]
    status = seen(fronts=fronts)
    shown = status_lines(status)
    place = shown.index(("fronts", lines[0]))
    assert [line for _, line in shown[place : place + 5]] == lines and "fronts" not in dict(status_lines(seen()))
    assert f"fronts     {lines[0]}" in drawn(snapshot(status=status))


def test_clients_of_long_ago_are_counted() -> None:
    clients = {"new": 3.0, "holder": 5000.0, "old": 601.0, "older": 9000.0}
    assert dict(status_lines(seen(clients=clients, holding={"holder": 2})))["clients"] == (
        "holder (holds 2, seen 5000 s ago), new (seen 3 s ago), 2 seen over 10 minutes ago"
    )
    assert dict(status_lines(seen()))["clients"] == "none yet"


def test_the_status_has_the_rules_that_are_not_ok() -> None:
    rule = HealthRuleView(name="disk", level="bad", text="the disk is full", docs="docs/health.md#disk")
    lines = status_lines(seen(), health("no", rule))
    assert ("learning", "no: +0.021 a step") in lines
    assert ("health", "bad: the disk is full (docs/health.md#disk)") in lines
    assert ("health", "ok: 1 rules") in status_lines(seen(), health())
