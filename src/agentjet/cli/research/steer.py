"""`agentjet research steer`: what a person asks of a running study."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentjet.cli.research.run import Folder
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.journal import Book
    from agentjet.research.models import Study
    from agentjet.research.planner.actions import Request
    from agentjet.research.planner.course import Course
    from agentjet.research.steering import Steering

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
    asked = request(action, value, against, change or [], why)
    steering = Steering(files.steering)
    check(asked, files.study(), files.books(), steering)
    steering.append(asked)
    typer.echo(f"asked: {action} {value}".rstrip())


def check(asked: Request, study: Study, books: list[Book], steering: Steering) -> None:
    """Raises `ConfigError` for what the study would refuse, as far as that is known now."""
    from agentjet.research.planner.actions import Cap, Refused, Resume
    from agentjet.research.planner.course import EVERYTHING, grant
    from agentjet.research.report.proceedings import Proceedings

    kind, book = asked.kind.replace("_", "-"), books[-1]
    if book.study is not None:
        done = Proceedings(book)
        if done.stage == "finished":
            raise ConfigError(f"{kind}: the study has its findings; plan another with `agentjet research new`")
        spent = done.ledger.total
        if isinstance(asked, Cap) and asked.runs < spent:
            raise ConfigError(f"cap {asked.runs:g}: {spent:.1f} full runs are spent or under way; give more than that")
    course = course_of(book.study or study, book, steering.unread(books))
    if isinstance(asked, Resume) and not course.paused:
        raise ConfigError("resume: the study is not paused")
    try:
        grant(course, asked, "human", EVERYTHING)
    except Refused as refusal:
        raise ConfigError(f"{kind}: {refusal}") from None


def course_of(study: Study, book: Book, waiting: list[str]) -> Course:
    """What a study becomes by all that was granted, and by what it has still to read."""
    from agentjet.research.planner.actions import Refused, loads
    from agentjet.research.planner.course import EVERYTHING, Course, grant
    from agentjet.research.planner.register import parsed

    course = Course(study, begun=True)
    for amendment in book.amendments:
        if not amendment.refused and amendment.point >= 0:
            course = grant(course, parsed(amendment.origin, amendment.asked), amendment.origin, EVERYTHING)
    for line in waiting:
        with suppress(Refused):
            course = grant(course, parsed("human", loads(line)), "human", EVERYTHING)
    return course


def request(action: Action, value: str, against: str, changes: list[str], why: str) -> Request:
    """Raises `ConfigError` for what is no request."""
    from agentjet.cli.research.new import settings
    from agentjet.research.planner.actions import REQUEST, Refused, parse

    if value.startswith("--"):
        raise ConfigError(f"{value}: there is no such option; those are --against, --set and --why")
    if not value and action in ("veto", "add-arm", "add-hypothesis"):
        raise ConfigError(f"{action}: name the arm, as in: agentjet research steer FOLDER {action} ARM")
    fields: dict[str, object] = {"kind": action.replace("-", "_")}
    if action == "cap":
        try:
            runs = float(value)
        except ValueError:
            runs = 0.0
        if not runs > 0:
            raise ConfigError(f"cap {value!r}: give a number of full runs above 0, such as 40")
        fields["runs"] = runs
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
