"""What the figures share: colours, marks, and the way to SVG.

An arm keeps its colour and its mark in every figure. The colours are near those of Okabe and Ito (2008), which most
colour-blind people tell apart; marks and names tell arms apart in grey. In the SVG colours are variables, so a figure
is light or dark as its reader's screen is.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentjet.research.models import Study

INK, SOFT, FAINT, BAND, PAPER = "#22303c", "#5b6975", "#d9dfe4", "#eaeef1", "#fefefe"
YES, NO, SAME = "#00664b", "#a33c00", "#005a92"
DARK = {INK: "#e3e9ee", SOFT: "#9fadb9", FAINT: "#36424d", BAND: "#26323c", PAPER: "#151b21"}
DARK |= {YES: "#4fc9a2", NO: "#f29a6b", SAME: "#73bdf0"}
"""By colour on white paper, the one on black."""

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
"""Inches; a report is about as wide at 96 pixels an inch."""
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
class Look:
    """How an arm is drawn, everywhere."""

    colour: str
    mark: str


def looks(study: Study) -> dict[str, Look]:
    """By arm. The seventh is drawn as the first is."""
    styles = [Look(light, mark) for light, _, mark in ARMS]
    return {arm.name: styles[i % len(styles)] for i, arm in enumerate(study.arms)}


@contextmanager
def styled() -> Iterator[None]:
    """matplotlib's own defaults and ours, whatever this machine's are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def blank(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def quiet(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Lines that lead the eye, and no frame."""
    axes.grid(axis=grid)
    for side in axes.spines.values():
        side.set_visible(False)


def name_rows(figure: Figure, metric: str) -> None:
    """The metric, upright at the left of all panels."""
    figure.supylabel(wrapped(metric, int(11 * figure.get_figheight())), color=SOFT, fontsize=9.5)


def wrapped(text: str, length: int) -> str:
    """`text` in lines of at most `length` characters. Labels are never cut off."""
    return "\n".join(wrap(text, length)) or text


def to_svg(figure: Figure) -> str:
    """As text that is the same for the same figure, in colours that follow the reader's screen."""
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
