"""Every confirming run at its end, an arm a row: diverged ones as crosses, lost ones counted at the side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentjet.research.report.facts import Rounding
from agentjet.research.report.plots.canvas import INK, PAPER, SOFT, Look, blank, looks, quiet, wrapped
from agentjet.research.report.proceedings import Launched, Proceedings

TOUCHING = 0.012
"""Points nearer than this share of the width are put above each other."""
STEP = 0.13
"""How far above, in rows."""


def scores_figure(done: Proceedings) -> Figure | None:
    """None where no arm has confirming runs that ended."""
    by_arm = {arm.name: [o for o in done.confirming(arm.name) if o.outcome] for arm in done.study.arms}
    if not any(by_arm.values()):
        return None
    styles, rounding = looks(done.study), Rounding(done.study.sesoi)
    figure = blank(0.7 + 0.78 * len(by_arm))
    axes = figure.add_subplot()
    low, high = shown_range([one for launched in by_arm.values() for one in launched])
    axes.set_xlim(low, high)
    for row, (name, launched) in enumerate(by_arm.items()):
        draw_row(axes, row, launched, styles[name], (low, high), rounding)
    axes.set_yticks(range(len(by_arm)), [wrapped(name, 28) for name in by_arm])
    for label, name in zip(axes.get_yticklabels(), by_arm, strict=True):
        label.set(color=styles[name].colour, fontweight="bold")
    axes.tick_params(axis="y", pad=12)
    axes.set_ylim(len(by_arm) - 0.45, -0.6)
    quiet(axes, "x")
    axes.set_xlabel(wrapped(done.study.metric, 80))
    return figure


def draw_row(
    axes: Axes, row: int, launched: Sequence[Launched], look: Look, ends: tuple[float, float], rounding: Rounding
) -> None:
    scored = sorted((one for one in launched if one.score is not None), key=lambda one: one.score or 0.0)
    beside = [f"{len(scored)} seeds"]
    for end, word in (("diverged", "diverged"), ("infra_failed", "lost")):
        number = sum(one.end == end for one in launched)
        beside += [f"{number} {word}"] if number else []
    if scored:
        draw_points(axes, row, scored, look, ends, rounding)
        mean = float(np.mean([one.score for one in scored]))
        if ends[0] <= mean <= ends[1]:
            axes.plot([mean, mean], [row - 0.36, row + 0.36], color=INK, linewidth=2, zorder=2)
            above: dict[str, Any] = {
                "xytext": (0, 2),
                "textcoords": "offset points",
                "ha": "center",
                "va": "bottom",
                "fontsize": 8.5,
            }
            axes.annotate(rounding.score(mean).text, (mean, row - 0.36), **above)
        else:
            beside.append(f"mean {rounding.score(mean).text}")
    place: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "va": "center",
        "color": SOFT,
        "annotation_clip": False,
    }
    axes.annotate("\n".join(beside), (1.02, row), **place)


def draw_points(
    axes: Axes, row: int, scored: Sequence[Launched], look: Look, ends: tuple[float, float], rounding: Rounding
) -> None:
    """What lies outside is drawn at the margin, with its score."""
    low, high = ends
    places = [min(max(one.score or 0.0, low), high) for one in scored]
    for one, x, lift in zip(scored, places, stacked(places, TOUCHING * (high - low)), strict=True):
        diverged = one.end == "diverged"
        axes.plot(
            x,
            row + lift,
            marker="X" if diverged else look.mark,
            markersize=8.5 if diverged else 6.5,
            color=look.colour,
            markeredgecolor=PAPER,
            markeredgewidth=0.7,
            alpha=0.9,
            clip_on=False,
            zorder=3,
        )
        if one.score != x:
            left = x == low
            text = rounding.score(one.score).text
            axes.annotate(
                f"◂ {text}" if left else f"{text} ▸",
                (x, row + lift),
                xytext=(8 if left else -8, 0),
                textcoords="offset points",
                va="center",
                ha="left" if left else "right",
                color=look.colour,
                fontsize=8.5,
            )


def stacked(places: Sequence[float], near: float) -> list[float]:
    """Heights for points in rising order: the line that is next to the middle and has room for each."""
    lines = [0.0, -STEP, STEP, -2 * STEP, 2 * STEP]
    ends = dict.fromkeys(lines, -np.inf)
    heights: list[float] = []
    for x in places:
        free = [line for line in lines if x - ends[line] >= near]
        heights.append(free[0] if free else min(lines, key=lambda line: ends[line]))
        ends[heights[-1]] = x
    return heights


def shown_range(launched: Sequence[Launched]) -> tuple[float, float]:
    """Of all scores, unless diverged ones would squeeze the rest into a tenth of the width: these go to the margin."""
    every = [one.score for one in launched if one.score is not None]
    healthy = [one.score for one in launched if one.score is not None and one.end == "completed"] or every or [0.0, 1.0]
    low, high = min(healthy), max(healthy)
    spread = (high - low) or max(1e-9, abs(high) * 0.1)
    if max(every, default=high) - min(every, default=low) <= 10 * spread:
        low, high = min([*every, low]), max([*every, high])
        spread = (high - low) or spread
    return low - 0.08 * spread, high + 0.08 * spread
