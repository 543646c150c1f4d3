"""Figures of a report, drawn by matplotlib: the common style, effects with intervals, and the budget.

An arm has the same colour and mark in every figure. The colours are near those of Okabe and Ito (2008), which most
colour-blind people can distinguish; marks and names distinguish arms in grey. In the SVG, colours are variables that
follow the reader's light or dark scheme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentjet.research.models import Finding, Study
from agentjet.research.report.facts import Facts, Rounding, StudyView, written

INK, SOFT, FAINT, BAND, PAPER = "#22303c", "#5b6975", "#d9dfe4", "#eaeef1", "#fefefe"
YES, NO, SAME = "#00664b", "#a33c00", "#005a92"
DARK = {INK: "#e3e9ee", SOFT: "#9fadb9", FAINT: "#36424d", BAND: "#26323c", PAPER: "#151b21"}
DARK |= {YES: "#4fc9a2", NO: "#f29a6b", SAME: "#73bdf0"}
"""Colours on white paper, with the colours on black."""

ARMS = (
    ("#0072b2", "#56b4e9", "o"),
    ("#d55e00", "#f08a3c", "s"),
    ("#009e73", "#3fcfa4", "^"),
    ("#b8578d", "#e39cc4", "D"),
    ("#b07c00", "#f0b429", "v"),
    ("#4b5fb3", "#9aa8f0", "P"),
)
"""Colour on white, colour on black, mark."""
DARK |= {light: dark for light, dark, _ in ARMS}

WIDTH = 8.2
"""In inches. A report is about this wide at 96 pixels per inch."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "agentjet",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": SOFT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.unicode_minus": True,
    "axes.formatter.useoffset": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": PAPER,
}


@dataclass(frozen=True, slots=True)
class ArmStyle:
    """Colour and mark of an arm in all figures."""

    colour: str
    mark: str


def looks(study: Study) -> dict[str, ArmStyle]:
    """By arm. The seventh arm has the style of the first."""
    styles = [ArmStyle(light, mark) for light, _, mark in ARMS]
    return {arm.name: styles[i % len(styles)] for i, arm in enumerate(study.arms)}


@contextmanager
def styled() -> Iterator[None]:
    """Uses matplotlib's defaults and the report's style, independent of local configuration."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def blank(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def remove_frame(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Draws grid lines and no frame."""
    axes.grid(axis=grid)
    for side in axes.spines.values():
        side.set_visible(False)


def name_rows(figure: Figure, metric: str) -> None:
    """Prints the metric at the left of all panels."""
    figure.supylabel(wrapped(metric, int(11 * figure.get_figheight())), color=SOFT, fontsize=9.5)


def wrapped(text: str, length: int) -> str:
    """Breaks `text` into lines of at most `length` characters. Labels are never cut off."""
    return "\n".join(wrap(text, length)) or text


def to_svg(figure: Figure) -> str:
    """Renders the same text for the same figure, with colours as variables."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    drawing = stream.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r'(<g|<path|<svg)([^>]*?) id="[\w.]+_\d+"', r"\1\2", drawing)  # the page has several figures
    names = {colour: f"--c{number}" for number, colour in enumerate(DARK)}
    drawing = re.sub(
        f"(?<=: )({'|'.join(DARK)})", lambda match: f"var({names[match[0]]})", drawing, flags=re.IGNORECASE
    )
    drawing = re.sub(r"font(-family)?: ([^;\"']*)'DejaVu Sans'[^;\"]*", r"font\1: \2system-ui, sans-serif", drawing)
    light = "".join(f"{names[colour]}:{colour};" for colour in DARK)
    dark = "".join(f"{names[colour]}:{other};" for colour, other in DARK.items())
    scheme = f"<style>svg{{{light}}}@media screen and (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    head = drawing.index(">") + 1
    return drawing[:head] + scheme + drawing[head:].rstrip() + "\n"


MARKS = {
    "supported": (YES, ">", True),
    "refuted": (NO, "<", True),
    "practically_equivalent": (SAME, "D", True),
    "inconclusive": (SOFT, "o", False),
}
"""Colour, mark, filled. Verdicts can be distinguished without colour."""


def effects_figure(view: StudyView) -> Figure | None:
    """Estimates with intervals over the band of irrelevant differences. None before the first estimate."""
    hypotheses = [h for h in view.study.hypotheses if h.id in view.findings]
    rows = [(h, view.findings[h.id]) for h in hypotheses if view.findings[h.id].estimate is not None]
    if not rows:
        return None
    rounding, sesoi = Rounding(view.study.sesoi), view.study.sesoi
    edge = effect_range([found for _, found in rows], sesoi)
    names = [wrapped(h.claim or f"{h.arm} over {h.against}", 34) for h, _ in rows]
    num_lines = max(name.count("\n") + 1 for name in names)
    figure = blank(0.8 + max(0.62, 0.2 * num_lines) * len(rows))
    axes = figure.add_subplot()
    axes.axvspan(-sesoi, sesoi, color=BAND, linewidth=0, zorder=0)
    axes.axvline(0, color=SOFT, linewidth=0.9, zorder=1)
    for place, (_, found) in enumerate(rows):
        draw_effect(axes, place, found, edge, rounding)
    axes.set_yticks(range(len(rows)), names, color=INK)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(-edge, edge)
    remove_frame(axes, "x")
    axes.set_xlabel(wrapped(f"difference of means, {view.study.metric}", 70))
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


def draw_effect(axes: Axes, place: int, found: Finding, edge: float, rounding: Rounding) -> None:
    """Draws an interval with its numbers. An arrow marks an end outside the figure."""
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
    estimate, low, high = (rounding.difference(x).text for x in (found.estimate, found.low, found.high))
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    verdict = found.verdict.replace("_", " ")
    axes.annotate(verdict, (1.02, place - 0.14), color=colour, fontweight="bold", **beside)
    axes.annotate(f"{estimate}  [{low}, {high}]", (1.02, place + 0.2), color=INK, **beside)


def effect_range(findings: Sequence[Finding], sesoi: float) -> float:
    """Range to both sides. A very wide interval may extend beyond it."""
    reaches = [max(abs(found.low or 0.0), abs(found.high or 0.0)) for found in findings]
    usual = max(float(np.median(reaches)), sesoi)
    return 1.06 * max(1.25 * sesoi, *(reach for reach in [usual, *reaches] if reach <= 4 * usual))


PARTS = (
    ("explore", "exploring", SAME),
    ("confirm", "confirming", YES),
    ("probe", "probes", SOFT),
    ("repeated", "repeats of lost runs", NO),
)


def ledger_figure(view: StudyView, facts: Facts) -> Figure | None:
    """Spending by phase, compared with the budget and the whole grid. None if nothing was spent."""
    if not view.launched:
        return None
    labels = {
        key: facts.known[f"ledger.{key}"] for key in (*(part for part, _, _ in PARTS), "budget", "small_grid", "grid")
    }
    size = {key: float(fact.value or 0.0) for key, fact in labels.items()}
    seeds = {key: facts.known[f"ledger.{key}_seeds"].text for key in ("small_grid", "grid")}
    rows: list[tuple[str, str, float, str]] = []  # key, name, start, colour
    start = 0.0
    for key, name, colour in PARTS:
        if size[key] or key in ("explore", "confirm"):
            rows.append((key, name, start, colour))
            start += size[key]
    rows.append(("budget", "budget", 0.0, "none"))
    grids = ("small_grid", "grid") if facts.groups["ledger"]["stopped_early"] else ("grid",)
    rows += [(key, f"grid with {seeds[key]} seeds", 0.0, FAINT) for key in grids]
    figure = blank(0.5 + 0.36 * len(rows))
    axes = figure.add_subplot()
    for row, (key, _, start, colour) in enumerate(rows):
        outlined = colour == "none"
        axes.barh(
            row, size[key], left=start, height=0.62, color=colour, edgecolor=SOFT if outlined else "none", zorder=2
        )
        axes.annotate(
            labels[key].text,
            (start + size[key], row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontweight="bold" if colour not in ("none", FAINT) else "normal",
        )
    axes.set_yticks(range(len(rows)), [name for _, name, _, _ in rows], color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.08 * max(size.values()))
    remove_frame(axes, "x")
    axes.set_xlabel("full runs")
    return figure
