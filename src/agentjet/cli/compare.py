"""`agentjet compare`: rewards, held-out scores, cost and settings of runs, from their journals."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Json, Run, one_line
from agentjet.cli.data_dir import journal_of
from agentjet.errors import ConfigError
from agentjet.types import DEFAULT_RUN

if TYPE_CHECKING:
    from agentjet.gateway.comparison import Figures


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Data dirs, or their folders runs/NAME.")],
    run: Run = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """Compare runs: rewards, held-out scores, cost, and the settings that differ."""
    from agentjet.gateway.comparison import differing_settings

    if len(runs) < 2:
        raise ConfigError(f"only one run, {str(runs[0])!r}: name two or more to compare")
    compared, settings = zip(*(read_run(path, run) for path in runs), strict=True)
    different = differing_settings(settings)
    if as_json:
        found = [{"run": str(path), **one} for path, one in zip(runs, compared, strict=True)]
        typer.echo(json.dumps({"runs": found, "settings": different}, indent=2))
        return
    lines = [["", *map(str, runs)]]
    lines += [[name.replace("_", " "), *(_figure(one[name]) for one in compared)] for name in compared[0]]
    lines += [["settings that differ", *([""] * len(runs))]] if different else []
    lines += [[key, *map(_setting, values)] for key, values in different.items()]
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        typer.echo("  ".join(cells).rstrip())


def read_run(path: Path, run: str = DEFAULT_RUN) -> tuple[Figures, dict[str, Any]]:
    """The figures of a run and its settings, from its folder or its data dir. Raises `ConfigError`."""
    from agentjet.gateway.comparison import figures
    from agentjet.gateway.recorded import MOST_STEPS, settings_of
    from agentjet.swarm import Journal, records

    with closing(Journal.open_read_only(journal_of(path, run))) as journal:
        steps = {step.version: step.metrics for step in records.steps(journal, 0, MOST_STEPS)}
        evaluations, settings = journal.evaluations(), settings_of(journal)
    if not steps:
        raise ConfigError(f"{str(path)!r} has no batch: name a data dir whose server has learned one")
    return figures(steps, evaluations), settings


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _setting(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
