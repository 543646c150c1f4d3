"""`reward.png`: the reward of each batch, and the held-out success before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentjet.cli.scoring import Score

INK, FAINT, BLUE, GREY, GREEN = "#22303c", "#d7dde2", "#2166ac", "#7b8794", "#1b7f5c"
SMOOTHING = 5
"""Batches averaged for the smooth line, centred."""


def draw_rewards(path: Path, rewards: Sequence[float], before: Score, after: Score) -> None:
    """Write the picture, 1600 x 900 pixels."""
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 5.625), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    steps = range(1, len(rewards) + 1)
    low, high = apart(before.success, after.success)
    axes.plot(steps, rewards, color=BLUE, alpha=0.35, linewidth=1, marker="o", markersize=3, label="batch mean reward")
    axes.plot(steps, smooth(rewards), color=BLUE, linewidth=2.6, label=f"mean of {SMOOTHING} batches")
    for score, colour, name, place in ((before, GREY, "before", low), (after, GREEN, "after", high)):
        axes.axhspan(*score.success_interval, color=colour, alpha=0.13, linewidth=0)
        axes.axhline(score.success, color=colour, linewidth=1.6, linestyle=(0, (5, 3)))
        axes.annotate(
            f" {name}: {score.success:.0%}",
            (1.0, place),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
            fontsize=11,
            fontweight="bold",
        )
    axes.set_xlim(1, max(2, len(rewards)))
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step (one batch each)", color=INK)
    axes.set_ylabel("reward  /  share of first answers right", color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.legend(loc="upper left", frameon=False, labelcolor=INK)
    axes.set_title(
        "A language model learns to add, from its agent's reward", loc="left", color=INK, fontsize=13, pad=24
    )
    axes.text(
        0,
        1.02,
        f"dashed: share of {after.tasks} held-out sums answered right at first, with 95 % intervals",
        transform=axes.transAxes,
        color=GREY,
        fontsize=10,
    )
    figure.savefig(path)


def apart(first: float, second: float, gap: float = 0.05) -> tuple[float, float]:
    """Where two labels go so that they do not overlap: at their values, or moved equally far from each other."""
    missing = gap - abs(second - first)
    if missing <= 0:
        return first, second
    shift = missing / 2 if second >= first else -missing / 2
    lift = max(0.0, gap / 2 - min(first - shift, second + shift))  # neither below the axis
    return first - shift + lift, second + shift + lift


def smooth(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """Centred moving average; near the ends over what there is, equally far to both sides."""
    smoothed = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed
