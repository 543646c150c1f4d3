"""Estimates with their intervals, against the band of what does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentjet.research.models import Finding
from agentjet.research.report.facts import Rounding, written
from agentjet.research.report.plots.canvas import BAND, INK, NO, PAPER, SAME, SOFT, YES, blank, quiet, wrapped
from agentjet.research.report.proceedings import Proceedings

MARKS = {
    "supported": (YES, ">", True),
    "refuted": (NO, "<", True),
    "practically_equivalent": (SAME, "D", True),
    "inconclusive": (SOFT, "o", False),
}
"""Colour, mark, filled; a verdict can be told without the colour."""


def effects_figure(done: Proceedings) -> Figure | None:
    """None where there is no estimate yet."""
    hypotheses = [h for h in done.study.hypotheses if h.id in done.findings]
    rows = [(h, done.findings[h.id]) for h in hypotheses if done.findings[h.id].estimate is not None]
    if not rows:
        return None
    rounding, sesoi = Rounding(done.study.sesoi), done.study.sesoi
    edge = shown_range([found for _, found in rows], sesoi)
    names = [wrapped(h.claim or f"{h.arm} over {h.against}", 34) for h, _ in rows]
    num_lines = max(name.count("\n") + 1 for name in names)
    figure = blank(0.8 + max(0.62, 0.2 * num_lines) * len(rows))
    axes = figure.add_subplot()
    axes.axvspan(-sesoi, sesoi, color=BAND, linewidth=0, zorder=0)
    axes.axvline(0, color=SOFT, linewidth=0.9, zorder=1)
    for place, (_, found) in enumerate(rows):
        draw_row(axes, place, found, edge, rounding)
    axes.set_yticks(range(len(rows)), names, color=INK)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(-edge, edge)
    quiet(axes, "x")
    axes.set_xlabel(wrapped(f"difference of means, {done.study.metric}", 70))
    axes.annotate(
        f"± {written(sesoi)} does not matter",
        (0, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=SOFT,
        fontsize=8.5,
    )
    return figure


def draw_row(axes: Axes, place: int, found: Finding, edge: float, rounding: Rounding) -> None:
    """An interval that leaves the picture ends in an arrow; the numbers stand beside it."""
    assert found.estimate is not None and found.low is not None and found.high is not None
    colour, mark, filled = MARKS[found.verdict]
    axes.plot([found.low, found.high], [place, place], color=colour, linewidth=2.4, zorder=2)
    for beyond, x, arrow in ((found.low < -edge, -0.975 * edge, "<"), (found.high > edge, 0.975 * edge, ">")):
        if beyond:
            axes.plot(x, place, marker=arrow, color=colour, markersize=7, zorder=3)
    axes.plot(
        found.estimate,
        place,
        marker=mark,
        color=colour,
        markersize=9,
        markerfacecolor=colour if filled else PAPER,
        markeredgewidth=1.8,
        zorder=3,
    )
    said, low, high = (rounding.difference(x).text for x in (found.estimate, found.low, found.high))
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    verdict = found.verdict.replace("_", " ")
    axes.annotate(verdict, (1.02, place - 0.14), color=colour, fontweight="bold", **beside)
    axes.annotate(f"{said}  [{low}, {high}]", (1.02, place + 0.2), color=INK, **beside)


def shown_range(findings: Sequence[Finding], sesoi: float) -> float:
    """How far to both sides; an interval far wider than most may leave the picture rather than flatten the others."""
    reaches = [max(abs(found.low or 0.0), abs(found.high or 0.0)) for found in findings]
    usual = max(float(np.median(reaches)), sesoi)
    return 1.06 * max(1.25 * sesoi, *(reach for reach in [usual, *reaches] if reach <= 4 * usual))
