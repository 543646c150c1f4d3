"""Reports and answers in a notebook: a short text, and HTML with a small table and a curve (SVG without scripts)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 420, 120, 6
"""Pixels of a curve."""
MOST_POINTS = 400
"""Points of a curve: means of neighbours, if there are more values."""


def first_line(report: object) -> str:
    """The short text of a report, for `repr`."""
    return f"<{type(report).__name__}: {str(report).partition(chr(10))[0]}>"


def html_of(text: str, table: Mapping[str, object], curve: Sequence[float], label: str) -> str:
    """The lines of `text`, a table, and a curve of `curve` with its `label`."""
    rows = "".join(
        f"<tr><th align='left'>{escape(name)}</th><td align='right'>{escape(str(value))}</td></tr>"
        for name, value in table.items()
    )
    return f"<div><pre>{escape(text)}</pre><table>{rows}</table>{svg_of(curve, label)}</div>"


def svg_of(values: Sequence[float], label: str) -> str:
    """A curve over the numbers of `values`; empty for fewer than two finite ones."""
    width = max(1, math.ceil(len(values) / MOST_POINTS))
    chunks = [[v for v in values[i : i + width] if math.isfinite(v)] for i in range(0, len(values), width)]
    points = [(number, sum(chunk) / len(chunk)) for number, chunk in enumerate(chunks) if chunk]
    if len(points) < 2:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    x_scale, y_scale = (WIDTH - 2 * MARGIN) / (len(chunks) - 1), (HEIGHT - 2 * MARGIN) / ((high - low) or 1.0)
    path = " ".join(f"{MARGIN + x * x_scale:.1f},{HEIGHT - MARGIN - (y - low) * y_scale:.1f}" for x, y in points)
    caption = f"{label}: {points[0][1]:.3f} to {points[-1][1]:.3f}, lowest {low:.3f}, highest {high:.3f}"
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='{escape(caption, quote=True)}'>"
        f"<polyline points='{path}' fill='none' stroke='#2a6fdb' stroke-width='1.5'/></svg><div>{escape(caption)}</div>"
    )
