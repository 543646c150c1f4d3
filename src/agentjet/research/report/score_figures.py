"""Figures of scores: at the end of confirming runs, along them, and while tuning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentjet.research.models import Arm, Knob
from agentjet.research.report.facts import Explored, Launched, Rounding, StudyView, written
from agentjet.research.report.figures import (
    FAINT,
    INK,
    PAPER,
    SOFT,
    ArmStyle,
    blank,
    looks,
    name_rows,
    remove_frame,
    wrapped,
)

TOUCHING = 0.012
"""Points closer than this share of the width are stacked."""
STEP = 0.13
"""Distance of stacked points, in rows."""


def scores_figure(view: StudyView) -> Figure | None:
    """One row per arm. Diverged runs are crosses, lost ones are counted at the side. None if no confirming run has
    ended.
    """
    by_arm = {arm.name: [o for o in view.confirming(arm.name) if o.outcome] for arm in view.study.arms}
    if not any(by_arm.values()):
        return None
    styles, rounding = looks(view.study), Rounding(view.study.sesoi)
    figure = blank(0.7 + 0.78 * len(by_arm))
    axes = figure.add_subplot()
    low, high = score_range([one for launched in by_arm.values() for one in launched])
    axes.set_xlim(low, high)
    for row, (name, launched) in enumerate(by_arm.items()):
        draw_row(axes, row, launched, styles[name], (low, high), rounding)
    axes.set_yticks(range(len(by_arm)), [wrapped(name, 28) for name in by_arm])
    for label, name in zip(axes.get_yticklabels(), by_arm, strict=True):
        label.set(color=styles[name].colour, fontweight="bold")
    axes.tick_params(axis="y", pad=12)
    axes.set_ylim(len(by_arm) - 0.45, -0.6)
    remove_frame(axes, "x")
    axes.set_xlabel(wrapped(view.study.metric, 80))
    return figure


def draw_row(
    axes: Axes, row: int, launched: Sequence[Launched], look: ArmStyle, ends: tuple[float, float], rounding: Rounding
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
    axes: Axes, row: int, scored: Sequence[Launched], look: ArmStyle, ends: tuple[float, float], rounding: Rounding
) -> None:
    """Draws points outside the range at the margin, with their score."""
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
    """Heights for points in rising order: for each the free line nearest to the middle."""
    lines = [0.0, -STEP, STEP, -2 * STEP, 2 * STEP]
    ends = dict.fromkeys(lines, -np.inf)
    heights: list[float] = []
    for x in places:
        free = [line for line in lines if x - ends[line] >= near]
        heights.append(free[0] if free else min(lines, key=lambda line: ends[line]))
        ends[heights[-1]] = x
    return heights


def score_range(launched: Sequence[Launched]) -> tuple[float, float]:
    """Range of all scores. Diverged ones go to the margin if they would squeeze the rest into a tenth of the width."""
    every = [one.score for one in launched if one.score is not None]
    healthy = [one.score for one in launched if one.score is not None and one.end == "completed"] or every or [0.0, 1.0]
    low, high = min(healthy), max(healthy)
    spread = (high - low) or max(1e-9, abs(high) * 0.1)
    if max(every, default=high) - min(every, default=low) <= 10 * spread:
        low, high = min([*every, low]), max([*every, high])
        spread = (high - low) or spread
    return low - 0.08 * spread, high + 0.08 * spread


CURVE_COLUMNS = 3
TITLE = 66
"""Characters that fit above the panels of a row."""


def curves_figure(view: StudyView) -> Figure | None:
    """A panel per arm, a thin line per seed, and in grey the mean of the compared arm. None without any curve."""
    by_arm = {
        arm.name: [one for one in view.confirming(arm.name) if one.outcome and len(one.outcome.curve) > 1]
        for arm in view.study.arms
    }
    by_arm = {name: launched for name, launched in by_arm.items() if launched}
    if not by_arm:
        return None
    styles = looks(view.study)
    columns = min(CURVE_COLUMNS, len(by_arm))
    rows = -(-len(by_arm) // columns)
    figure = blank(2.9 * rows + 0.2)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    low, high = curve_range(by_arm)
    for axes, (name, launched) in zip(panels, by_arm.items(), strict=False):
        draw_arm(axes, launched, styles[name], view.evaluation_steps)
        for other in {h.against: None for h in view.study.hypotheses if h.arm == name and h.against in by_arm}:
            axes.plot(
                *mean_curve(by_arm[other], view.evaluation_steps),
                color=SOFT,
                linestyle=(0, (4, 2)),
                linewidth=1.6,
                zorder=4,
            )
        axes.set_title(f"{wrapped(name, TITLE // columns)} ({len(launched)})", color=styles[name].colour)
        axes.set_ylim(low, high)
        remove_frame(axes, "y")
    for axes in panels[len(by_arm) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(by_arm) - columns) : len(by_arm)]:
        axes.set_xlabel("step" if view.evaluation_steps else "evaluation, in order")
        axes.tick_params(labelbottom=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines["bottom"].set(visible=True, color=FAINT)
    name_rows(figure, view.study.metric)
    return figure


def draw_arm(axes: Axes, launched: Sequence[Launched], look: ArmStyle, evaluation_steps: Sequence[int]) -> None:
    for one in launched:
        assert one.outcome
        curve = one.outcome.curve
        diverged = one.end == "diverged"
        axes.plot(
            places(curve, evaluation_steps),
            curve,
            color=look.colour,
            alpha=0.9 if diverged else 0.4,
            linewidth=0.9,
            linestyle=(0, (2, 1.5)) if diverged else "-",
            zorder=2,
        )
        if diverged:
            axes.plot(
                places(curve, evaluation_steps)[-1], curve[-1], marker="X", color=look.colour, markersize=7, zorder=4
            )
    axes.plot(*mean_curve(launched, evaluation_steps), color=look.colour, linewidth=2.6, zorder=3)


def mean_curve(launched: Sequence[Launched], evaluation_steps: Sequence[int]) -> tuple[Sequence[int], list[float]]:
    """Mean at each place over the seeds that reached it."""
    every = [one.outcome.curve for one in launched if one.outcome]
    longest = max(map(len, every))
    means = [float(np.mean([curve[i] for curve in every if len(curve) > i])) for i in range(longest)]
    return places(means, evaluation_steps), means


def places(curve: Sequence[float], evaluation_steps: Sequence[int]) -> Sequence[int]:
    """Steps of the values, or their order if the steps are unknown."""
    return evaluation_steps[: len(curve)] if len(curve) <= len(evaluation_steps) else range(1, len(curve) + 1)


def curve_range(by_arm: dict[str, list[Launched]]) -> tuple[float, float]:
    """Range of completed runs. Diverged ones may extend beyond it."""
    every = [one for launched in by_arm.values() for one in launched]
    healthy = [one for one in every if one.end == "completed"] or every
    values = [value for one in healthy if one.outcome for value in one.outcome.curve]
    room = 0.06 * (max(values) - min(values)) or 0.5
    return min(values) - room, max(values) + room


COLUMNS = 3
LABELS = 80
"""Characters that fit below and above the panels of a row."""


def tuning_figure(view: StudyView) -> Figure | None:
    """Scores by the value of each knob. Dropped settings are hollow, the chosen one has a ring. None without tuning."""
    panels = [
        (arm, knob, [tried for tried in view.explored(arm) if tried.scores])
        for arm in view.study.arms
        for knob in arm.nuisance
        if len(knob.values) > 1
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    styles = looks(view.study)
    knobs = max(len(arm.nuisance) for arm, _, _ in panels)
    columns = min(COLUMNS, knobs if knobs > 1 else len(panels))  # with several knobs, a row is an arm
    rows = -(-len(panels) // columns)
    figure = blank(2.7 * rows + 0.2)
    every = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    low, high = tuning_range([tried for panel in panels for tried in panel[2]])
    for axes, (arm, knob, tried) in zip(every, panels, strict=False):
        draw_panel(axes, arm, knob, tried, styles[arm.name], room=LABELS // columns, floor=low)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    every[0].set_ylim(low, high)
    name_rows(figure, view.study.metric)
    return figure


def draw_panel(
    axes: Axes, arm: Arm, knob: Knob, tried: Sequence[Explored], look: ArmStyle, *, room: int, floor: float
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
    remove_frame(axes)
    axes.spines["bottom"].set(visible=True, color=FAINT)


def draw_setting(axes: Axes, one: Explored, x: float, look: ArmStyle, floor: float) -> None:
    """Draws a point per seed."""
    view = one.fidelity == 1
    axes.plot(
        [x] * len(one.scores),
        one.scores,
        marker=look.mark,
        linestyle="none",
        color=look.colour,
        markersize=5.5,
        markerfacecolor=look.colour if view else PAPER,
        markeredgewidth=0.6 if view else 1.2,
        markeredgecolor=PAPER if view else look.colour,
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
    """True if the values are spaced more evenly by ratios than by differences."""
    if len(values) < 3 or min(values) <= 0:
        return False
    ordered = sorted(values)
    logs = np.diff([math.log(value) for value in ordered])
    return float(np.ptp(logs)) < float(np.ptp(np.diff(ordered) / np.mean(np.diff(ordered))))


def tuning_range(tried: Sequence[Explored]) -> tuple[float, float]:
    """Range of most scores. Settings far below are marked with an arrow."""
    scores = [score for one in tried for score in one.scores]
    low, high = np.percentile(scores, [15, 100])
    low = max(min(scores), low - 0.7 * (high - low))
    room = 0.07 * (high - low) or 0.5
    return float(low - room), float(high + room)
