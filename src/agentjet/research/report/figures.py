"""Figures of a report as SVG text: claims with their intervals, and scores along runs. No library draws them, so the
same facts give the same bytes. Colours follow the reader's light or dark scheme, and a line has the colour of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from agentjet.types import beginning

WIDTH, LEFT, ROW = 860, 240, 46
"""In pixels: the figure, its column of names, and a row."""
COLOURS = ("#0072b2", "#c45100", "#008a63", "#b8578d", "#8a6d00", "#4b5fb3")
"""Near those of Okabe and Ito (2008), which most colour-blind people can distinguish."""
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#22303c}.soft{fill:#5b6975}.line{stroke:#d9dfe4}.band{fill:#eaeef1}
@media (prefers-color-scheme:dark){text{fill:#e3e9ee}.soft{fill:#9fadb9}.line{stroke:#36424d}.band{fill:#26323c}}
</style>"""
FARTHEST = 3.0
"""A point farther from the middle half than this many times its width is drawn at the margin."""


def svg(height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}">{STYLE}\n{body}\n</svg>\n'


def label(x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {look}>{escape(text)}</text>'


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A function from values to pixels. Values outside are at the margin."""
    width = (high - low) or 1.0
    return lambda value: start + (end - start) * min(1.0, max(0.0, (value - low) / width))


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Range of the values without those far from the middle half."""
    low, high = np.quantile(values, [0.25, 0.75])
    room = FARTHEST * (high - low) or max(1e-9, 0.1 * abs(high))
    inside = [value for value in values if low - room <= value <= high + room]
    margin = 0.06 * (max(inside) - min(inside)) or room
    return min(inside) - margin, max(inside) + margin


def effects(findings: Sequence[Mapping[str, Any]], sesoi: float) -> str:
    """Estimates with intervals over the band of differences that do not matter; empty without any."""
    rows = [found for found in findings if found["estimate"] is not None]
    if not rows:
        return ""
    reach = 1.1 * max(1.2 * sesoi, *(abs(row[end]) for row in rows for end in ("low", "high")))
    at, height = scale(-reach, reach, LEFT, WIDTH - 170), ROW * len(rows) + 30
    parts = [
        f'<rect class="band" x="{at(-sesoi):.1f}" y="20" width="{at(sesoi) - at(-sesoi):.1f}" height="{height - 20}"/>',
        f'<path class="line" d="M{at(0):.1f} 20V{height}"/>',
        label(at(0), 13, f"± {sesoi:g} does not matter", 'class="soft"', "middle"),
    ]
    for number, row in enumerate(rows):
        y, (low, middle, high) = 20 + ROW * (number + 0.5), (at(row[n]) for n in ("low", "estimate", "high"))
        interval = f"{row['estimate']:+.3g} ({row['low']:+.3g} to {row['high']:+.3g})"
        parts += [
            label(0, y + 4, beginning(row["claim"], 34)),
            f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{COLOURS[0]}" stroke-width="3"/>',
            f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="{COLOURS[0]}"/>',
            label(WIDTH - 160, y - 3, row["verdict"].replace("_", " "), 'font-weight="bold"'),
            label(WIDTH - 160, y + 13, interval, 'font-size="11"'),
        ]
    return svg(height, parts)


def curves(named: Sequence[tuple[str, Sequence[Sequence[float]]]], steps: Sequence[int] = ()) -> str:
    """A thick line for the mean of the curves of a name, and a thin one for each. Empty without a curve.

    `steps` are those of the longest curve; without them values are numbered.
    """
    every = [curve for _, found in named for curve in found]
    longest = max(map(len, every), default=0)
    if longest < 2:
        return ""
    steps = steps if len(steps) == longest else range(1, longest + 1)
    low, high = usual_range([value for curve in every for value in curve])
    x, y = scale(steps[0], steps[-1], 60, WIDTH - 190), scale(high, low, 10, 270)
    parts = [f'<path class="line" d="M60 {y(value):.1f}H{WIDTH - 190}"/>' for value in (low, high)]
    parts += [label(54, y(value) + 4, f"{value:.3g}", 'class="soft"', "end") for value in (low, high)]
    parts += [label(x(step), 290, str(step), 'class="soft"', "middle") for step in (steps[0], steps[-1])]
    for number, (name, found) in enumerate(named):
        colour = COLOURS[number % len(COLOURS)]
        means = [float(np.mean([c[i] for c in found if len(c) > i])) for i in range(max(map(len, found), default=0))]
        for curve, width in (*((one, 0.7) for one in found), (means, 3)):
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, curve, strict=False))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(label(WIDTH - 180, 20 + 20 * number, beginning(name, 24), f'style="fill:{colour}"'))
    return svg(300, parts)
