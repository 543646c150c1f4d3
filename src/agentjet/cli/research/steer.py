"""`agentjet research steer`: what a person asks of a running study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentjet.cli.research.run import Folder
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.planner.actions import Request

Action = Literal["pause", "resume", "cap", "veto", "add-arm", "add-hypothesis"]


def steer(
    folder: Folder,
    action: Annotated[Action, typer.Argument(help="What is asked.")],
    value: Annotated[str, typer.Argument(metavar="[RUNS|ARM]", help="Of cap: full runs in all. Else: the arm.")] = "",
    against: Annotated[str, typer.Option(help="With add-arm and add-hypothesis: the arm it is compared with.")] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="With add-arm: what it changes; can be repeated."),
    ] = None,
    why: Annotated[str, typer.Option(help="For the report.")] = "",
) -> None:
    """Pause or resume a study, cap its budget, veto an arm, or add an arm or a claim.

    A running study takes it before its next batch of trials, and says in its journal and its report what it took. What
    is added after the data began is exploratory; the rules of the verdicts cannot be changed.
    """
    from agentjet.research.folder import StudyFolder
    from agentjet.research.steering import Steering

    files = StudyFolder(folder)
    files.study()
    Steering(files.steering).append(request(action, value, against, change or [], why))
    typer.echo(f"asked: {action} {value}".rstrip())


def request(action: Action, value: str, against: str, changes: list[str], why: str) -> Request:
    """Raises `ConfigError` for what is no request."""
    from agentjet.cli.research.new import settings
    from agentjet.research.planner.actions import REQUEST, Refused, parse

    fields: dict[str, object] = {"kind": action.replace("-", "_")}
    if action == "cap":
        try:
            fields["runs"] = float(value)
        except ValueError:
            raise ConfigError(f"cap {value!r}: give a number of full runs, such as 40") from None
    elif action in ("veto", "add-arm", "add-hypothesis"):
        fields["arm"] = value
    if action in ("add-arm", "add-hypothesis"):
        fields |= {"against": against, "why": why}
    if action == "add-arm":
        fields["changes"] = settings(changes)
    try:
        return parse(REQUEST, fields)
    except Refused as refusal:
        raise ConfigError(f"{action}: {refusal}") from None
