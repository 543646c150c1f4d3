"""`agentjet watch`: one screen about a running server, which its events keep up to date.

The status, health and waiting groups are read when an event arrives, at most once in `--every` seconds. The clocks of
the screen run on between two reads. A file or a pipe gets one line for each change.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from typer import Option

from agentjet.cli import Server, one_line
from agentjet.cli.runs import clients_line, code_lines, front_lines, task_set_lines
from agentjet.errors import Later, Unreachable
from agentjet.protocol import duration, report_lines
from agentjet.types import DEFAULT_RUN

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agentjet.client import AsyncSwarm
    from agentjet.protocol import CellView, Event, HealthView, StatusResponse, StepList, WaitingGroupView, WaitingView

NUM_NEWS = 6
NUM_STEPS = 50
IDLE_SECONDS = 10.0
"""Seconds without an event after which everything is read again: clients come and go without events."""
REDRAW_SECONDS = 1.0
PATIENCE = 2.0
"""Seconds of retries before a server without an answer is shown as such."""


@dataclass(frozen=True)
class Snapshot:
    """The answers of a server, and their age."""

    url: str
    status: StatusResponse
    health: HealthView
    waiting: WaitingView
    steps: StepList
    age: float = 0.0
    """Seconds since the answers."""
    problem: str = ""
    """The error of the newest request, or ''."""
    news: Sequence[str] = ()
    """Lines about the newest events, oldest first."""


def watch(
    server: Server,
    every: Annotated[float, Option(min=0.1, max=86_400, help="Seconds between two reads at least.")] = 1.0,
    once: Annotated[bool, Option("--once", help="Print the screen once and end.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print each event as a line of JSON, for programs.")] = False,
) -> None:
    """Watch a server until Ctrl-C, also across restarts: does it learn, is it healthy, and what does it wait for.

    A file or a pipe gets one line for each change.
    """
    from rich.console import Console

    from agentjet.client import AsyncSwarm
    from agentjet.client.connection import Retry

    token, console = server.read_token(), Console(highlight=False)

    async def run() -> None:
        async with AsyncSwarm(server.url, token, instance_id="", retry=Retry(patience=PATIENCE)) as swarm:
            if once:
                console.print(screen(await read(swarm), console.width))
            elif as_json:
                await follow(swarm, every, lambda event: print(event.model_dump_json(), flush=True), _print_problem)
            elif not console.is_terminal:
                lines = Lines()
                await follow(swarm, every, lines.event, lines.changes)
            else:
                await _live(swarm, every, console)

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


async def read(swarm: AsyncSwarm) -> Snapshot:
    """Reads everything that the screen shows. Raises `Unreachable`, `Later`."""
    status = await swarm.status()  # First: events after its `last_event` are changes.
    health, waiting, steps = await asyncio.gather(swarm.health(), swarm.waiting(), swarm.steps(limit=NUM_STEPS))
    return Snapshot(swarm.url, status, health, waiting, steps)


async def follow(
    swarm: AsyncSwarm, every: float, on_event: Callable[[Event], None], on_snapshot: Callable[[Snapshot], None]
) -> None:
    """Calls `on_event` with each event from now on and `on_snapshot` after changes and each second, without end.

    Raises the error of the first read. Later ones are shown, and the server is tried again.
    """
    snapshot = await read(swarm)
    on_snapshot(snapshot)
    while True:
        begun, changed = time.monotonic(), asyncio.Event()

        async def receive(after: int, changed: asyncio.Event = changed) -> None:
            async for event in swarm.events(after):
                on_event(event)
                changed.set()

        events = asyncio.create_task(receive(snapshot.status.last_event))
        try:
            while not events.done():
                age = time.monotonic() - begun
                if changed.is_set():  # Too early to read again: one read serves all events until then.
                    await _pause(min(REDRAW_SECONDS, max(0.0, every - age)))
                else:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), REDRAW_SECONDS)
                age = time.monotonic() - begun
                if age >= IDLE_SECONDS or (changed.is_set() and age >= every):
                    changed.clear()
                    snapshot, begun = await read(swarm), time.monotonic()
                    age = 0.0
                on_snapshot(replace(snapshot, age=age))
            await events
        except (Unreachable, Later) as error:
            on_snapshot(replace(snapshot, age=time.monotonic() - begun, problem=str(error)))
        finally:
            events.cancel()
            await asyncio.gather(events, return_exceptions=True)
        snapshot = await _again(swarm, snapshot, begun, on_snapshot)


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _again(
    swarm: AsyncSwarm, snapshot: Snapshot, begun: float, on_snapshot: Callable[[Snapshot], None]
) -> Snapshot:
    while True:
        await asyncio.sleep(REDRAW_SECONDS)
        try:
            found = await read(swarm)
        except (Unreachable, Later) as error:
            on_snapshot(replace(snapshot, age=time.monotonic() - begun, problem=str(error)))
        else:
            on_snapshot(found)
            return found


async def _live(swarm: AsyncSwarm, every: float, console: Console) -> None:
    """Draws the screen in the terminal, and again when its size changes."""
    from rich.live import Live

    news = deque[str](maxlen=NUM_NEWS)

    def on_event(event: Event) -> None:
        if line := event_line(event):
            news.append(line)

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:

        def on_snapshot(snapshot: Snapshot) -> None:
            live.update(screen(replace(snapshot, news=tuple(news)), console.width), refresh=True)

        await follow(swarm, every, on_event, on_snapshot)


def _print_problem(snapshot: Snapshot) -> None:
    if snapshot.problem:
        print(f"agentjet: {one_line(snapshot.problem)}", file=sys.stderr, flush=True)


# ---- lines -----------------------------------------------------------------------------------------------------------


def event_line(event: Event) -> str:
    """A line about an event, or '' for one that does not change much, such as an episode that began or finished."""
    body, when = event.body, time.strftime("%H:%M:%S", time.localtime(event.time))
    if event.kind == "step":
        reward = body["metrics"].get("reward/mean")
        found = f"step {body['policy_version']}" + ("" if reward is None else f": reward {reward:.4g}")
    elif event.kind == "state":
        found = f"state {body['state']}" + (f": {body['reason']}" if body["reason"] else "")
    elif event.kind == "episode" and body["status"] in ("aborted", "expired"):
        found = f"{body['episode_id']} of task {body['task_id']} {body['status']}: {body['reason']}"
    elif event.kind == "group" and body["state"] == "dropped":
        found = f"group {body['group']} dropped: {body['reason']}"
    elif event.kind == "checkpoint":
        found = f"checkpoint {body['policy_version']}" + ("" if body["ok"] else f" failed: {body['error']}")
    elif event.kind == "evaluation":
        kind = "held-out score" if body.get("held_out", True) else f"score of {body['name'] or 'the evaluation'}"
        found = f"{kind} {body['score']:.4g} at version {body['policy_version']}"
    elif event.kind in ("episode", "group"):
        return ""
    else:
        found = f"{event.kind} " + ", ".join(f"{name} {body[name]}" for name in sorted(body) if name != "episodes")
    return one_line(f"{when}  {found}")


@dataclass
class Lines:
    """Prints one line for each change: of state, step, answer to "is it learning?", and of a health rule. Batches that
    could teach nothing are reported once."""

    print_line: Callable[[str], None] = field(default=lambda line: print(line, flush=True))
    _levels: dict[str, str] = field(default_factory=dict)
    _answer: str = ""
    _problem: str = ""
    _is_reported: bool = False

    def event(self, event: Event) -> None:
        if line := event_line(event):
            self.print_line(line)

    def changes(self, snapshot: Snapshot) -> None:
        now = time.strftime("%H:%M:%S")
        for line in self._lines(snapshot):
            self.print_line(one_line(f"{now}  {line}"))

    def _lines(self, snapshot: Snapshot) -> Iterator[str]:
        if snapshot.problem != self._problem:
            self._problem = snapshot.problem
            yield snapshot.problem or "the server answers again"
        if not self._answer:
            status = snapshot.status
            yield f"{snapshot.url}: {status.state}, step {status.policy_version}, waits for {snapshot.waiting.text}"
        if snapshot.health.learning.answer != self._answer:
            self._answer = snapshot.health.learning.answer
            yield f"learning: {snapshot.health.learning.text}"
        for rule in snapshot.health.rules:
            before, self._levels[rule.name] = self._levels.get(rule.name, "ok"), rule.level
            if rule.level != before:
                yield f"health {rule.level}: {rule.text} ({rule.docs})"
        report = nothing_to_learn(snapshot.status)
        if not self._is_reported:
            yield from report
        self._is_reported = bool(report)


# ---- the screen ------------------------------------------------------------------------------------------------------

BARS = "▁▂▃▄▅▆▇█"
MARKS = {"bad": ("✗", "bold red"), "warn": ("!", "yellow"), "ok": ("✓", "green")}
CELLS = {"finished": "█", "live": "▒", "failed": "✕"}
FREE = "·"
LEGEND = "█ finished (green: highest reward)  ▒ live  ✕ failed  · free"
STATES = {"sampling": "green", "learning": "cyan", "failed": "bold red"}
SHOWN_STEPS = 40
SHOWN_ROWS = 4
"""Rows of the picture of the present batch."""
TIMED_STEPS = 10
SHOWN_VERSIONS = 3
SHOWN_ANSWERS = 3


def screen(snapshot: Snapshot, width: int) -> Table:
    """The screen as a table of names and texts that wrap at `width`."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    silence = f"since {duration(snapshot.age)}: {one_line(snapshot.problem)}"

    def plain(lines: Sequence[str], style: str = "") -> list[Text]:
        return [Text(one_line(line), style) for line in lines]

    rows: list[tuple[str, Sequence[Text]]] = [
        ("agentjet", [headline(snapshot)]),
        ("no answer", [Text(silence, "bold red")] if snapshot.problem else []),
        ("learning", [learning(snapshot)]),
        ("healthy", healthy(snapshot.health)),
        ("warning", plain(nothing_to_learn(snapshot.status), "yellow")),
        ("waits for", waits(snapshot, width - 14)),
        ("time", spent(snapshot.steps)),
        ("fronts", plain(front_lines(snapshot.status))),
        ("task sets", plain(task_set_lines(snapshot.status))),
        ("clients", plain([clients_line(snapshot.status)])),
        ("code", plain(code_lines(snapshot.status, SHOWN_VERSIONS))),
        ("just now", [Text(one_line(line), no_wrap=True, overflow="ellipsis") for line in snapshot.news]),
    ]
    for name, texts in rows:
        for i, text in enumerate(texts):
            table.add_row("" if i else name, text)
    return table


def headline(snapshot: Snapshot) -> Text:
    from rich.text import Text

    status = snapshot.status
    end = f" of {status.ends_at_version}" if status.ends_at_version else ""
    run = [f"run {status.run}"] if status.run != DEFAULT_RUN else []
    model = ", ".join(status.policies) or status.model
    text = Text(one_line("  ".join([model, *run])), "bold")
    text.append(f"  ● {status.state}", STATES.get(status.state, "yellow"))
    text.append(f"  step {status.policy_version}{end}  up {duration(status.uptime + snapshot.age)}  ", "none")
    return text.append(snapshot.url, "dim")


def learning(snapshot: Snapshot) -> Text:
    """The answer to "is it learning?", with bars of the newest rewards from the lowest to the highest."""
    from rich.text import Text

    answer = snapshot.health.learning
    style = {"yes": "green", "learned": "green", "falls": "bold red"}.get(answer.answer, "")
    text = Text(one_line(answer.text), style)
    rewards = [reward for reward in snapshot.steps.metrics.get("reward/mean", []) if reward is not None][-SHOWN_STEPS:]
    if not rewards:
        return text
    low, high = min(rewards), max(rewards)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(BARS[round((reward - low) * scale)] for reward in rewards)
    return text.append(f"  {bars}", "cyan")


def healthy(health: HealthView) -> list[Text]:
    """Rules that are not ok, the worst first, and the names of the others."""
    from rich.text import Text

    texts = {level: [one_line(rule.text) for rule in health.rules if rule.level == level] for level in ("bad", "warn")}
    fine = ", ".join(rule.name for rule in health.rules if rule.level == "ok")
    texts["ok"] = [fine] if fine else []
    return [Text(f"{MARKS[level][0]} {text}", MARKS[level][1]) for level in MARKS for text in texts[level]]


def nothing_to_learn(status: StatusResponse) -> list[str]:
    """Lines about the newest batches if they could teach nothing, with the most frequent answers of one group."""
    found = status.zero_variance
    if found is None:
        return []
    return report_lines(found.model_copy(update={"answers": found.answers[:SHOWN_ANSWERS]}))


def waits(snapshot: Snapshot, width: int) -> list[Text]:
    """The phrase of the server, the picture of the batch, and the live episode that is silent for longest."""
    from rich.text import Text

    lines = [Text(one_line(snapshot.waiting.text))]
    if not snapshot.waiting.groups:
        return lines
    lines += picture(snapshot.waiting, width)
    lines.append(Text(LEGEND, "dim"))
    silent = [(cell, group) for group in snapshot.waiting.groups for cell in group.cells if cell.silent_seconds]
    if silent:
        cell, group = max(silent, key=lambda one: one[0].silent_seconds or 0.0)
        seconds, lease, most = (cell.silent_seconds or 0.0) + snapshot.age, cell.expires_in or 0.0, cell.ends_in or 0.0
        text = (
            f"longest silent: {cell.episode_id} of task {group.task_id}, {duration(seconds)}; lease ends in "
            f"{duration(lease - snapshot.age)}, episode in {duration(most - snapshot.age)}"
        )
        lines.append(Text(one_line(text)))
    return lines


def picture(waiting: WaitingView, width: int) -> list[Text]:
    """The groups as cells, at most `SHOWN_ROWS` rows. Groups without an episode are free places."""
    from rich.text import Text

    rewards = [cell.reward for group in waiting.groups for cell in group.cells if cell.reward is not None]
    best = max(rewards, default=0.0) if rewards and max(rewards) > min(rewards) else math.inf
    size = max(group.size for group in waiting.groups)
    groups = [_cells(group, best) for group in waiting.groups]
    groups += [Text(FREE * size, "dim")] * (waiting.needed - waiting.num_groups)
    rows, shown = [Text()], 0
    for group in groups:
        used = rows[-1].cell_len
        if used and used + 1 + group.cell_len > width:
            if len(rows) == SHOWN_ROWS:
                break
            rows.append(Text())
            used = 0
        rows[-1].append(" " if used else "").append_text(group)
        shown += 1
    left = waiting.num_groups + max(0, waiting.needed - waiting.num_groups) - shown
    return [*rows, *([Text(f"and {left} more groups", "dim")] if left > 0 else [])]


def _cells(group: WaitingGroupView, best: float) -> Text:
    from rich.text import Text

    def style(cell: CellView) -> str:
        if cell.state == "finished":
            return "green" if cell.reward is not None and cell.reward >= best else "blue"
        return "yellow" if cell.state == "live" else "red"

    text = Text()
    for cell in group.cells:
        text.append(CELLS[cell.state], style(cell))
    return text.append(FREE * max(0, group.size - len(group.cells)), "dim")


def spent(steps: StepList) -> list[Text]:
    """A line with the shares of sampling, waiting and learning in the newest steps; none before the first step."""
    from rich.text import Text

    def newest(metric: str) -> list[float]:
        return [value for value in steps.metrics.get(metric, [])[-TIMED_STEPS:] if value is not None]

    seconds = {name: sum(newest(f"time/{name}")) for name in ("sample", "wait", "learn")}
    total = sum(seconds.values())
    if not total:
        return []
    shares = "  ".join(f"{name} {'▇' * round(10 * part / total)} {part / total:.0%}" for name, part in seconds.items())
    speed = newest("perf/tokens_per_second")
    between = [after - before for before, after in pairwise(steps.times[-TIMED_STEPS:])]
    pace = f"  a step each {duration(sum(between) / len(between))}" if between else ""
    return [Text(shares + (f"  {speed[-1]:,.0f} tokens/s" if speed else "") + pace)]
