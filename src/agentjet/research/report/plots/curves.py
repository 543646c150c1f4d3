"""Score along the run: a panel an arm, a thin line a seed; in grey the mean of what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentjet.research.report.plots.canvas import FAINT, SOFT, Look, blank, looks, name_rows, quiet, wrapped
from agentjet.research.report.proceedings import Launched, Proceedings

COLUMNS = 3
TITLE = 66
"""Characters that fit above the panels of a row."""


def curves_figure(done: Proceedings) -> Figure | None:
    """None where no confirming run reported a value on the way."""
    by_arm = {
        arm.name: [one for one in done.confirming(arm.name) if one.outcome and len(one.outcome.curve) > 1]
        for arm in done.study.arms
    }
    by_arm = {name: launched for name, launched in by_arm.items() if launched}
    if not by_arm:
        return None
    styles = looks(done.study)
    columns = min(COLUMNS, len(by_arm))
    rows = -(-len(by_arm) // columns)
    figure = blank(2.9 * rows + 0.2)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    low, high = shown_range(by_arm)
    for axes, (name, launched) in zip(panels, by_arm.items(), strict=False):
        draw_arm(axes, launched, styles[name], done.marks)
        for other in {h.against: None for h in done.study.hypotheses if h.arm == name and h.against in by_arm}:
            axes.plot(
                *mean_curve(by_arm[other], done.marks), color=SOFT, linestyle=(0, (4, 2)), linewidth=1.6, zorder=4
            )
        axes.set_title(f"{wrapped(name, TITLE // columns)} ({len(launched)})", color=styles[name].colour)
        axes.set_ylim(low, high)
        quiet(axes, "y")
    for axes in panels[len(by_arm) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(by_arm) - columns) : len(by_arm)]:
        axes.set_xlabel("step" if done.marks else "evaluation, in order")
        axes.tick_params(labelbottom=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines["bottom"].set(visible=True, color=FAINT)
    name_rows(figure, done.study.metric)
    return figure


def draw_arm(axes: Axes, launched: Sequence[Launched], look: Look, marks: Sequence[int]) -> None:
    for one in launched:
        assert one.outcome
        curve = one.outcome.curve
        diverged = one.end == "diverged"
        axes.plot(
            places(curve, marks),
            curve,
            color=look.colour,
            alpha=0.9 if diverged else 0.4,
            linewidth=0.9,
            linestyle=(0, (2, 1.5)) if diverged else "-",
            zorder=2,
        )
        if diverged:
            axes.plot(places(curve, marks)[-1], curve[-1], marker="X", color=look.colour, markersize=7, zorder=4)
    axes.plot(*mean_curve(launched, marks), color=look.colour, linewidth=2.6, zorder=3)


def mean_curve(launched: Sequence[Launched], marks: Sequence[int]) -> tuple[Sequence[int], list[float]]:
    """At each place, of the seeds that came so far."""
    every = [one.outcome.curve for one in launched if one.outcome]
    longest = max(map(len, every))
    means = [float(np.mean([curve[i] for curve in every if len(curve) > i])) for i in range(longest)]
    return places(means, marks), means


def places(curve: Sequence[float], marks: Sequence[int]) -> Sequence[int]:
    """The steps that its values are of, or their order where the study does not say."""
    return marks[: len(curve)] if len(curve) <= len(marks) else range(1, len(curve) + 1)


def shown_range(by_arm: dict[str, list[Launched]]) -> tuple[float, float]:
    """Of all that completed; what diverged may leave the picture rather than flatten it."""
    every = [one for launched in by_arm.values() for one in launched]
    healthy = [one for one in every if one.end == "completed"] or every
    values = [value for one in healthy if one.outcome for value in one.outcome.curve]
    room = 0.06 * (max(values) - min(values)) or 0.5
    return min(values) - room, max(values) + room
