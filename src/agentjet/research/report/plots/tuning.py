"""Scores while tuning, by the value of each knob: what was dropped early is hollow, what was chosen is ringed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentjet.research.models import Arm, Knob
from agentjet.research.report.facts import written
from agentjet.research.report.plots.canvas import (
    FAINT,
    INK,
    PAPER,
    Look,
    blank,
    looks,
    name_rows,
    quiet,
    wrapped,
)
from agentjet.research.report.proceedings import Explored, Proceedings

COLUMNS = 3
LABELS = 80
"""Characters that fit below the panels of a row, and above them."""


def tuning_figure(done: Proceedings) -> Figure | None:
    """None where nothing was tuned."""
    panels = [
        (arm, knob, [tried for tried in done.explored(arm) if tried.scores])
        for arm in done.study.arms
        for knob in arm.nuisance
        if len(knob.values) > 1
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    styles = looks(done.study)
    knobs = max(len(arm.nuisance) for arm, _, _ in panels)
    columns = min(COLUMNS, knobs if knobs > 1 else len(panels))  # with several knobs, a row is an arm
    rows = -(-len(panels) // columns)
    figure = blank(2.7 * rows + 0.2)
    every = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    low, high = shown_range([tried for panel in panels for tried in panel[2]])
    for axes, (arm, knob, tried) in zip(every, panels, strict=False):
        draw_panel(axes, arm, knob, tried, styles[arm.name], room=LABELS // columns, floor=low)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    every[0].set_ylim(low, high)
    name_rows(figure, done.study.metric)
    return figure


def draw_panel(
    axes: Axes, arm: Arm, knob: Knob, tried: Sequence[Explored], look: Look, *, room: int, floor: float
) -> None:
    if is_geometric(knob.values):
        axes.set_xscale("log")
    full = sorted((one for one in tried if one.fidelity == 1), key=lambda one: float(one.setting[knob.name]))
    if len(arm.nuisance) == 1:
        axes.plot(
            [float(one.setting[knob.name]) for one in full],
            [mean if (mean := float(np.mean(one.scores))) >= floor else np.nan for one in full],
            color=look.colour,
            linewidth=1.4,
            alpha=0.6,
            zorder=1,
        )
    for one in tried:
        draw_setting(axes, one, float(one.setting[knob.name]), look, floor)
    names = [written(float(value)) for value in knob.values]
    every = -(-sum(len(name) + 2 for name in names) // room)
    axes.set_xticks(knob.values, [name if i % every == 0 else "" for i, name in enumerate(names)])
    axes.minorticks_off()
    axes.set_title(wrapped(arm.name, room), color=look.colour)
    axes.set_xlabel(knob.name)
    quiet(axes)
    axes.spines["bottom"].set(visible=True, color=FAINT)


def draw_setting(axes: Axes, one: Explored, x: float, look: Look, floor: float) -> None:
    """A point for each seed."""
    done = one.fidelity == 1
    axes.plot(
        [x] * len(one.scores),
        one.scores,
        marker=look.mark,
        linestyle="none",
        color=look.colour,
        markersize=5.5,
        markerfacecolor=look.colour if done else PAPER,
        markeredgewidth=0.6 if done else 1.2,
        markeredgecolor=PAPER if done else look.colour,
        zorder=3,
    )
    if min(one.scores) < floor:
        axes.annotate(
            "▾", (x, floor), xytext=(0, 1), textcoords="offset points", ha="center", color=look.colour, fontsize=11
        )
    if one.chosen:
        mean = float(np.mean(one.scores))
        axes.plot(x, mean, marker="o", markersize=17, color="none", markeredgecolor=INK, zorder=4)


def is_geometric(values: Sequence[float]) -> bool:
    """Whether the values lie more evenly by their ratios than by their differences."""
    if len(values) < 3 or min(values) <= 0:
        return False
    ordered = sorted(values)
    logs = np.diff([math.log(value) for value in ordered])
    return float(np.ptp(logs)) < float(np.ptp(np.diff(ordered) / np.mean(np.diff(ordered))))


def shown_range(tried: Sequence[Explored]) -> tuple[float, float]:
    """A setting that scored far below most may leave the picture; an arrow shows where."""
    scores = [score for one in tried for score in one.scores]
    low, high = np.percentile(scores, [15, 100])
    low = max(min(scores), low - 0.7 * (high - low))
    room = 0.07 * (high - low) or 0.5
    return float(low - room), float(high + room)
