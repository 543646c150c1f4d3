"""`agentjet runs` lists, creates and ends the runs of a server; `agentjet compare` compares runs by their journals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Json, Run, Token, TokenFile, Url, connect, one_line, print_text
from agentjet.cli.data_dir import journal_of
from agentjet.errors import ConfigError, nearest_name
from agentjet.types import DEFAULT_RUN

if TYPE_CHECKING:
    from agentjet.protocol import ComparisonView, RunView

app = typer.Typer(
    name="runs", no_args_is_help=True, help="List, create and end the runs of a server; needs its admin token."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A lower-case letter or digit, then also `.`, `_`, `-`.")]
SECTIONS = ("policies", "job")
"""Sections of a settings file that a run has; the others belong to the server."""


@app.command("list")
def list_runs(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """List the runs of a server, the default run first."""
    with connect(url, token, token_file) as swarm:
        found = swarm.runs()
    if as_json:
        typer.echo(json.dumps([run.model_dump(mode="json") for run in found], indent=2))
        return
    width = max(len(run.name) for run in found)
    for run in found:
        print_text(f"{run.name:{width}}  {_facts(run)}")


@app.command("create")
def create_run(
    name: Name,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="Settings file (TOML) with sections policies.NAME and job; default: the server's."
        ),
    ] = None,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Create a run, open one that was ended, or change its job settings. Can be repeated."""
    settings = _settings(config)
    with connect(url, token, token_file) as swarm:
        made = swarm.start_run(name, **settings)
        address = swarm.of_run(name).url
    print_text(f"{name}: {_facts(made)}")
    typer.echo(
        "Its tokens are on the server's machine. There: agentjet token show client --data-dir DATA_DIR --run "
        f"{name}\nNext:\n  export AGENTJET_URL={address} AGENTJET_TOKEN=...\n  agentjet status"
    )


@app.command("end")
def end_run(name: Name, url: Url = None, token: Token = None, token_file: TokenFile = None) -> None:
    """Save a checkpoint of a run and close it. Its files remain: `agentjet runs create NAME` opens it again."""
    with connect(url, token, token_file) as swarm:
        print_text(f"{name}: {_facts(swarm.end_run(name))}")


def _facts(run: RunView) -> str:
    """A run as a line of text, without its name."""
    policies = f", policies {', '.join(run.policies)}" if run.policies else ""
    if not run.is_open:
        return f"not open{policies}{f': {run.reason}' if run.reason else ''}"
    reason = f" ({run.reason})" if run.reason else ""
    return f"{run.state}{reason}, policy version {run.policy_version}{policies}"


def _settings(path: Path | None) -> dict[str, Any]:
    """The sections of a settings file. Raises `ConfigError` for one that a run does not have."""
    from agentjet.config.loader import read_toml

    found = {} if path is None else read_toml(path)
    if foreign := [name for name in found if name not in SECTIONS]:
        near = nearest_name(foreign[0], SECTIONS)
        hint = f"did you mean [{near}]?" if near else "the settings of the server are not those of a run"
        raise ConfigError(f"{str(path)!r} has {foreign[0]!r}: a run has [policies.NAME] and [job] only; {hint}")
    return found


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Data dirs, or their folders runs/NAME.")],
    run: Run = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """Compare runs: rewards, held-out scores, cost, and the settings that differ."""
    if len(runs) < 2:
        raise ConfigError(
            f"{str(runs[0])!r} is only one run: name another one beside it, such as agentjet compare "
            f"{runs[0]} OTHER_DATA_DIR, or two folders DATA_DIR/runs/NAME"
        )
    compared = read_runs(runs, run)
    _check_different(runs, run)
    figures = [one.figures for one in compared.runs]
    if as_json:
        found = [{"run": one.title, **one.figures} for one in compared.runs]
        typer.echo(json.dumps({"runs": found, "settings": compared.settings, "notes": compared.notes}, indent=2))
        return
    lines = [["", *map(str, runs)]]
    lines += [[name.replace("_", " "), *(_figure(one[name]) for one in figures)] for name in figures[0]]
    lines += [["settings that differ", *([""] * len(runs))]] if compared.settings else []
    lines += [[key, *map(_setting, values)] for key, values in compared.settings.items()]
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        typer.echo("  ".join(cells).rstrip())
    for sentence in compared.notes:
        print_text(sentence)


def _check_different(runs: list[Path], run: str) -> None:
    """Raises `ConfigError` for a run that is named twice."""
    seen: dict[Path, Path] = {}
    for path in runs:
        other = seen.setdefault(journal_of(path, run).resolve(), path)
        if other is not path:
            raise ConfigError(
                f"{str(other)!r} and {str(path)!r} are the same run: name two different ones; those of one data dir "
                "are its folders runs/NAME"
            )


def read_runs(paths: Sequence[Path], run: str = DEFAULT_RUN) -> ComparisonView:
    """The figures of runs and the settings that differ, from their folders or data dirs. Raises `ConfigError`."""
    from agentjet.gateway.collection import Collection
    from agentjet.gateway.read import RunReader

    async def read() -> ComparisonView:
        readers = {str(path): RunReader.at(journal_of(path, run).parent, title=str(path)) for path in paths}
        collection = Collection(readers, {})
        try:
            for reader in readers.values():
                reader.check()
            return await collection.compare([*readers])
        finally:
            await collection.close()

    compared = asyncio.run(read())
    for one in compared.runs:
        if not one.figures["batches"] and not one.evaluations:
            raise ConfigError(
                f"{one.title!r} has no batch and no evaluation, so there is nothing to compare: name a data dir whose "
                "server has learned a batch, or recorded an evaluation (swarm.train, swarm.evaluate)"
            )
    return compared


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _setting(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
