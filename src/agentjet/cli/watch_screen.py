"""The screen of `agentjet watch`: what is drawn of a run, as lines of `rich`. Nothing here reads from a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from agentjet.cli import one_line
from agentjet.cli.status import clients_line, code_line, task_set_line
from agentjet.protocol import duration, report_lines
from agentjet.types import DEFAULT_RUN

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from agentjet.protocol import CellView, HealthView, StatusResponse, StepList, WaitingGroupView, WaitingView

BARS = "▁▂▃▄▅▆▇█"
MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "bold red")}
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
    news: Sequence[str] = field(default_factory=tuple)
    """Lines about the newest events, oldest first."""


def screen(look: Snapshot, width: int) -> Table:
    """The screen as a table of names and texts that wrap at `width`."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows: list[tuple[str, Text]] = [("agentjet", headline(look))]
    if look.problem:
        rows.append(("no answer", Text(f"since {duration(look.age)}: {one_line(look.problem)}", "bold red")))
    rows += [("learning", learning(look)), *_named("healthy", healthy(look.health))]
    rows += _named("warning", [Text(one_line(line), "yellow") for line in nothing_to_learn(look.status)])
    rows += _named("waits for", waits(look, width - 14))
    if (times := spent(look.steps)) is not None:
        rows.append(("time", times))
    status = look.status
    sets = [task_set_line(name, one) for name, one in status.task_sets.items()]
    versions = list(status.code_versions.items())[-SHOWN_VERSIONS:]
    rows += _named("task sets", [Text(one_line(line)) for line in sets])
    rows.append(("clients", Text(one_line(clients_line(status)))))
    rows += _named("code", [Text(one_line(code_line(name, code))) for name, code in reversed(versions)])
    rows += _named("just now", [Text(one_line(line), no_wrap=True, overflow="ellipsis") for line in look.news])
    for name, text in rows:
        table.add_row(name, text)
    return table


def _named(name: str, lines: Sequence[Text]) -> list[tuple[str, Text]]:
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def headline(look: Snapshot) -> Text:
    from rich.text import Text

    status = look.status
    end = f" of {status.ends_at_version}" if status.ends_at_version else ""
    run = [f"run {status.run}"] if status.run != DEFAULT_RUN else []
    model = ", ".join(status.policies) or status.model
    text = Text(one_line("  ".join([model, *run])), "bold")
    text.append(f"  ● {status.state}", STATES.get(status.state, "yellow"))
    text.append(f"  step {status.policy_version}{end}  up {duration(status.uptime + look.age)}  ", "none")
    return text.append(look.url, "dim")


def learning(look: Snapshot) -> Text:
    from rich.text import Text

    answer = look.health.learning
    style = {"yes": "green", "learned": "green", "falls": "bold red"}.get(answer.answer, "")
    text = Text(one_line(answer.text), style)
    rewards = [value for value in look.steps.metrics.get("reward/mean", []) if value is not None]
    return text.append(f"  {sparkline(rewards[-SHOWN_STEPS:])}", "cyan") if rewards else text


def healthy(health: HealthView) -> list[Text]:
    """Rules that are not ok, the worst first, and the names of the others."""
    from rich.text import Text

    lines = []
    for level in ("bad", "warn"):
        mark, style = MARKS[level]
        lines += [Text(f"{mark} {one_line(rule.text)}", style) for rule in health.rules if rule.level == level]
    fine = [rule.name for rule in health.rules if rule.level == "ok"]
    mark, style = MARKS["ok"]
    return [*lines, Text(f"{mark} {', '.join(fine)}", style)] if fine else lines


def nothing_to_learn(status: StatusResponse) -> list[str]:
    """Lines about the newest batches if they could teach nothing, with the most frequent answers of one group."""
    found = status.zero_variance
    if found is None:
        return []
    return report_lines(found.model_copy(update={"answers": found.answers[:SHOWN_ANSWERS]}))


def sparkline(values: Sequence[float]) -> str:
    """Bars from the lowest to the highest value."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


# ---- the present batch -----------------------------------------------------------------------------------------------


def waits(look: Snapshot, width: int) -> list[Text]:
    """The phrase of the server, the picture of the batch, and the live episode that is silent for longest."""
    from rich.text import Text

    lines = [Text(one_line(look.waiting.text))]
    if not look.waiting.groups:
        return lines
    lines += picture(look.waiting, width)
    lines.append(Text(LEGEND, "dim"))
    silent = [(cell, group) for group in look.waiting.groups for cell in group.cells if cell.silent_seconds]
    if silent:
        cell, group = max(silent, key=lambda one: one[0].silent_seconds or 0.0)
        seconds, lease, most = (cell.silent_seconds or 0.0) + look.age, cell.expires_in or 0.0, cell.ends_in or 0.0
        text = (
            f"longest silent: {cell.episode_id} of task {group.task_id}, {duration(seconds)}; lease ends in "
            f"{duration(lease - look.age)}, episode in {duration(most - look.age)}"
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

    text = Text()
    for cell in group.cells:
        text.append(CELLS[cell.state], _style(cell, best))
    return text.append(FREE * max(0, group.size - len(group.cells)), "dim")


def _style(cell: CellView, best: float) -> str:
    if cell.state == "finished":
        return "green" if cell.reward is not None and cell.reward >= best else "blue"
    return "yellow" if cell.state == "live" else "red"


# ---- time ------------------------------------------------------------------------------------------------------------


def spent(steps: StepList) -> Text | None:
    """Shares of sampling, waiting and learning in the newest steps; None before the first step."""
    from rich.text import Text

    seconds = {name: _newest(steps, f"time/{name}") for name in ("sample", "wait", "learn")}
    total = sum(map(sum, seconds.values()))
    if not total:
        return None
    shares = "  ".join(f"{name} {'▇' * round(10 * sum(s) / total)} {sum(s) / total:.0%}" for name, s in seconds.items())
    speed = _newest(steps, "perf/tokens_per_second")
    between = [after - before for before, after in pairwise(steps.times[-TIMED_STEPS:])]
    pace = f"  a step each {duration(sum(between) / len(between))}" if between else ""
    return Text(shares + (f"  {speed[-1]:,.0f} tokens/s" if speed else "") + pace)


def _newest(steps: StepList, metric: str) -> list[float]:
    return [value for value in steps.metrics.get(metric, [])[-TIMED_STEPS:] if value is not None]
