"""Where the budget went, each part beginning where the one before it ends, beside what the grid would have cost."""

from __future__ import annotations

from matplotlib.figure import Figure

from agentjet.research.report.facts import Facts
from agentjet.research.report.plots.canvas import FAINT, INK, NO, SAME, SOFT, YES, blank, quiet
from agentjet.research.report.proceedings import Proceedings

PARTS = (
    ("explore", "exploring", SAME),
    ("confirm", "confirming", YES),
    ("probe", "probes", SOFT),
    ("repeated", "repeats of lost runs", NO),
)


def ledger_figure(done: Proceedings, facts: Facts) -> Figure | None:
    """None where nothing was spent."""
    if not done.launched:
        return None
    said = {
        key: facts.known[f"ledger.{key}"] for key in (*(part for part, _, _ in PARTS), "budget", "small_grid", "grid")
    }
    size = {key: float(fact.value or 0.0) for key, fact in said.items()}
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
            said[key].text,
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
    quiet(axes, "x")
    axes.set_xlabel("full runs")
    return figure
