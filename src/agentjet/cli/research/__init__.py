"""`agentjet research`: the commands of studies and of campaigns.

The functions of the commands import what they need, so that `agentjet --help` is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentjet.cli import Json
from agentjet.cli.research import campaign, study
from agentjet.cli.research.study import AdminTokenFiles, Local, Servers, new
from agentjet.errors import ConfigError

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the study or campaign.")]
NOTEBOOK = "notebook.sqlite"
"""File that makes a folder that of a campaign."""


def run(folder: Folder, local: Local = 2, server: Servers = None, admin_token_file: AdminTokenFiles = None) -> None:
    """Run a study, or continue one that was interrupted or killed. Ctrl-C stops it; the same command continues.

    Servers are started on this machine, one per trial; or each trial is a run on a server of --server, beside others.
    At the end the report is in the folder.
    """
    from agentjet.cli.research.execution import carry_out, slots_of
    from agentjet.research.journal import StudyFolder
    from agentjet.research.servers import check_arms

    slots = slots_of(server, admin_token_file, local)
    if server:
        check_arms(StudyFolder(folder).study())
    carry_out(folder, slots)


def status(folder: Folder, as_json: Json = False) -> None:
    """Show the progress of a study or of a campaign, its spending and its findings so far."""
    if (folder / NOTEBOOK).exists():
        campaign.status(folder, as_json)
    else:
        check_folder(folder)
        study.status(folder, as_json)


def report(
    folder: Folder,
    check: Annotated[
        Path | None, typer.Option(help="Check this report of a study against its journal instead of writing one.")
    ] = None,
) -> None:
    """Write the report of a study or of a campaign, finished or not."""
    from agentjet.research.campaign.report import build

    if (folder / NOTEBOOK).exists():
        if check is not None:
            raise ConfigError(
                f"--check {check}: {folder} is a campaign, and only reports of studies are checked: omit it"
            )
        for written in build(folder):
            typer.echo(written)
    else:
        check_folder(folder)
        study.report(folder, check)


def check_folder(folder: Path) -> None:
    """Raises `ConfigError` if the folder has neither a campaign nor a study."""
    if not (folder / "study.json").exists():
        raise ConfigError(f"{folder}: there is neither a campaign ({NOTEBOOK}) nor a study (study.json) in this folder")


app = typer.Typer(
    name="research",
    help="Find out what keeps an agent from learning, and mend it (start); or compare ways to train it (new, run).",
    no_args_is_help=True,
)
app.command()(new)
app.command()(run)
app.command()(status)
app.command()(report)
app.command()(campaign.start)
app.command()(campaign.resume)
app.command()(campaign.digest)
app.command()(campaign.demo)
