"""The results of a demo run for people: `reward.png`, and `report.html`, one page that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from agentjet.client import Estimate

from .agent import held_out_tasks, is_right

NUM_EXAMPLES = 12
INK, FAINT, BLUE, GREY, GREEN = "#22303c", "#d7dde2", "#2166ac", "#7b8794", "#1b7f5c"
SMOOTHING = 5
"""Batches averaged for the smooth line, centred."""


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of the first answers to the held-out sums that were right, and well formed. Answers are by task id."""

    right: Estimate
    formed: Estimate
    answers: Mapping[str, str]

    @property
    def tasks(self) -> int:
        return self.right.num_tasks

    def __str__(self) -> str:
        right = self.right
        return (
            f"{right.value:.1%} of {self.tasks} first answers right (95 % interval {right.low:.1%} to "
            f"{right.high:.1%}), {self.formed.value:.1%} well formed"
        )


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>AgentJet: the demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #22303c; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
img {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #d7dde2; vertical-align: top; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.right {{ color: #1b7f5c; font-weight: 600; }} code {{ background: #f2f4f6; padding: .1rem .3rem; }}
</style>
<h1>{model} learned to add in {minutes}</h1>
<p>Success on {tasks} held-out sums, first answers only, sampled at temperature 1:
<strong>{before:.1%}</strong> before, <strong>{after:.1%}</strong> after {steps} batches.</p>
<img alt="Reward of each batch, and held-out success before and after" src="data:image/png;base64,{picture}">
<h2>Held-out evaluation</h2>
<table><tr><th><th>before<th>after{scores}</table>
<h2>Answers of the model</h2>
<table><tr><th>task<th>before<th>after{examples}</table>
<h2>The run</h2>
<table>{facts}</table>
</html>
"""


def write_report(path: Path, model: str, result: Mapping[str, Any], before: Score, after: Score, picture: Path) -> None:
    """Writes the page. `result` is the content of `result.json`."""
    facts = {key: value for key, value in result.items() if not isinstance(value, dict | list)}
    facts |= {f"seconds: {phase}": seconds for phase, seconds in result["timings"].items()}
    page = PAGE.format(
        model=escape(model),
        minutes=f"{result['seconds'] / 60:.1f} minutes",
        tasks=after.tasks,
        before=before.right.value,
        after=after.right.value,
        steps=result["steps"],
        picture=base64.b64encode(picture.read_bytes()).decode(),
        scores=_rows(
            [
                ("right", _share(before.right), _share(after.right)),
                ("well formed", _share(before.formed), _share(after.formed)),
            ]
        ),
        examples=_examples(before, after),
        facts=_rows([(key, _number(value)) for key, value in facts.items()]),
    )
    path.write_text(page, encoding="utf-8")


def _examples(before: Score, after: Score) -> str:
    rows = []
    for task in held_out_tasks(min(NUM_EXAMPLES, after.tasks)):
        a, b = task.payload
        cells = [
            f'<td class="right">{escape(answer)}' if is_right(answer, a, b) else f"<td>{escape(answer)}"
            for answer in (before.answers[task.id], after.answers[task.id])
        ]
        rows.append(f"<tr><td>{a} + {b}{''.join(cells)}")
    return "\n".join(rows)


def _rows(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)


def _share(share: Estimate) -> str:
    return f"{share.value:.1%} (95 % interval {share.low:.1%} to {share.high:.1%})"


def _number(value: Any) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def draw_rewards(path: Path, rewards: Sequence[float], before: Score, after: Score) -> None:
    """Writes the picture of 1600 x 900 pixels: the reward of each batch, and the held-out success before and after."""
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 5.625), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    steps = range(1, len(rewards) + 1)
    low, high = label_heights(before.right.value, after.right.value)
    axes.plot(steps, rewards, color=BLUE, alpha=0.35, linewidth=1, marker="o", markersize=3, label="batch mean reward")
    axes.plot(steps, smooth(rewards), color=BLUE, linewidth=2.6, label=f"mean of {SMOOTHING} batches")
    for score, colour, name, place in ((before, GREY, "before", low), (after, GREEN, "after", high)):
        axes.axhspan(score.right.low, score.right.high, color=colour, alpha=0.13, linewidth=0)
        axes.axhline(score.right.value, color=colour, linewidth=1.6, linestyle=(0, (5, 3)))
        axes.annotate(
            f" {name}: {score.right.value:.0%}",
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


def label_heights(first: float, second: float, gap: float = 0.05) -> tuple[float, float]:
    """Heights of two labels that do not overlap: their values, or both moved by the same distance."""
    missing = gap - abs(second - first)
    if missing <= 0:
        return first, second
    shift = missing / 2 if second >= first else -missing / 2
    lift = max(0.0, gap / 2 - min(first - shift, second + shift))  # neither below the axis
    return first - shift + lift, second + shift + lift


def smooth(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """The centred moving average. Near the ends the window is shorter, and still symmetric."""
    smoothed = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed
