"""`agentjet compare`: rewards, held-out scores, cost and settings of runs, from their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Json, Run, one_line
from agentjet.cli.data_dir import METRICS
from agentjet.errors import ConfigError
from agentjet.types import DEFAULT_RUN, JOURNAL

if TYPE_CHECKING:
    from agentjet.gateway.collection import Figures


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Data dirs, or their folders runs/NAME.")],
    run: Run = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """Compare runs: rewards, held-out scores, cost, and the settings that differ."""
    from agentjet.gateway.collection import differing_settings

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
    from agentjet.gateway.collection import figures
    from agentjet.gateway.recorded import settings_of
    from agentjet.swarm import Journal

    folder = path if (path / METRICS).exists() else path / "runs" / run
    steps = _steps(folder / METRICS)
    with closing(Journal.open_read_only(folder / JOURNAL)) as journal:
        settings, evaluations = settings_of(journal), journal.evaluations()
        rollbacks = [event.body for event in journal.events_of("rollback")]
    undone = {version for done in rollbacks for version in range(done["to"] + 1, done["policy_version"])}
    return figures(steps, evaluations, undone), settings


def _steps(file: Path) -> dict[int, Mapping[str, Any]]:
    """The lines of a metrics file, by the policy version after the step."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        steps = [json.loads(line) for line in lines if line.endswith("\n")]  # The last line may be being written.
        if steps:
            return {step["step"]: step for step in steps}
    except FileNotFoundError:
        pass
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{str(file)!r} is damaged: {error!r}") from None
    raise ConfigError(f"{str(file)!r} has no batch: name a data dir whose server has learned one")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _setting(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
