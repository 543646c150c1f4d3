"""The files of a data dir: the check of a new one, the folder of a run, and `agentjet token`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentjet.cli import Run
from agentjet.errors import ConfigError
from agentjet.protocol import check_run_name
from agentjet.types import DEFAULT_RUN, JOURNAL

METRICS = "metrics.jsonl"


def check_data_dir(folder: Path) -> None:
    """Raises `ConfigError` if the default run lost its journal. `checkpoints/` alone is allowed."""
    run = folder / "runs" / DEFAULT_RUN
    if (run / METRICS).exists() and (run / "checkpoints").is_dir() and not (run / JOURNAL).exists():
        raise ConfigError(
            f"server.data_dir = {str(folder)!r} has checkpoints and no {JOURNAL}. Restore the journal; or move "
            "only checkpoints/ to runs/default/ of a new server.data_dir, which starts at the newest good one"
        )


def run_folder(data_dir: Path, run: str) -> Path:
    """The folder of a run in a data dir. Raises `ConfigError`, and `InvalidRequest` for a wrong name."""
    check_run_name(run)
    folder = data_dir / "runs" / run
    if (folder / JOURNAL).is_file():
        return folder
    if found := sorted(path.parent.name for path in data_dir.glob(f"runs/*/{JOURNAL}")):
        raise ConfigError(f"{str(data_dir)!r} has no run {run!r}; its runs are {', '.join(found)} (--run NAME)")
    what = f"it has no runs/{run}/{JOURNAL}" if data_dir.is_dir() else "there is no such folder"
    raise ConfigError(
        f"{str(data_dir)!r} is not a data dir of AgentJet: {what}. Name the folder that `agentjet serve` was given as "
        "--data-dir (agentjet-data by default)"
    )


def journal_of(place: Path, run: str) -> Path:
    """The journal of a run, from the folder of the run or from its data dir. Raises as `run_folder` does."""
    return (place if (place / JOURNAL).is_file() else run_folder(place, run)) / JOURNAL


app = typer.Typer(name="token", no_args_is_help=True, help="Show or replace the tokens of a run.")

DataDir = Annotated[Path, typer.Option("--data-dir", help="The server's data dir.")]
DEFAULT_DATA_DIR = Path("agentjet-data")


@app.command()
def show(
    role: Annotated[Literal["client", "admin", "viewer"], typer.Argument(help="Role of the token.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    run: Run = DEFAULT_RUN,
) -> None:
    """Print a token, and nothing else. The admin token of the default run opens every run of the server."""
    from agentjet.server.auth import SECRET_FILES, read_secret

    typer.echo(read_secret(_key_folder(data_dir, run) / SECRET_FILES[role]))


@app.command()
def rotate(
    role: Annotated[
        Literal["client", "admin", "viewer", "keys"],
        typer.Argument(help="Role of the token; `keys` is the secret that signs episode keys."),
    ],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    run: Run = DEFAULT_RUN,
) -> None:
    """Replace a token by a new one; a running server uses it from its next request on.

    A new token leaves the keys of live episodes valid. New `keys` make all of them invalid at once, and no token.
    """
    from agentjet.server.auth import SECRET_FILES, replace_secret

    path = _key_folder(data_dir, run) / SECRET_FILES[role]
    if not path.exists():
        raise ConfigError(f"{path} does not exist: --data-dir must name the data dir of a server that has run")
    replace_secret(path)
    if role == "keys":
        typer.echo(f"{path} is new: all earlier episode keys are invalid.")
        return
    typer.echo(
        f"{path} is new; the earlier {role} token is invalid. To see the new one: agentjet token show {role} "
        f"--data-dir {shlex.quote(str(data_dir))} --run {run}"
    )
    if role == "client" and run == DEFAULT_RUN:
        typer.echo(
            "A server started with AGENTJET_TOKEN writes that token again at its next start: change it there, too."
        )


def _key_folder(data_dir: Path, run: str) -> Path:
    """The folder of a run's tokens; those of the default run are in the data dir."""
    return data_dir if run == DEFAULT_RUN else run_folder(data_dir, run)
