"""`agentjet research status` and `report`: what a study's journal holds, also while it is being written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli.options import Json
from agentjet.cli.research.run import Folder
from agentjet.cli.research.words import plain, requested
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.journal import Book


def status(folder: Folder, as_json: Json = False) -> None:
    """Show how far a study is, what it has spent, and what it found so far."""
    from agentjet.research.folder import StudyFolder
    from agentjet.research.steering import Steering

    files = StudyFolder(folder)
    study, books = files.study(), files.books()
    found = summary(books[0], seconds_at_work(folder))
    unread, when = (
        Steering(files.steering).unread(books),
        "never read" if found["stage"] == "finished" else "not read yet",
    )
    if unread:
        found[when] = unread if as_json else "; ".join(map(requested, unread))
    annexes = {f"annex-{n}": summary(book) for n, book in enumerate(books[1:], 1) if book.study}
    if as_json:
        found |= {"annexes": annexes} if annexes else {}
        typer.echo(json.dumps({"study": study.id, "topic": study.topic, **found}, indent=2))
        return
    typer.echo(f"{study.topic}  (study {study.id})")
    tell(found)
    for name, annex in annexes.items():
        typer.echo(f"\n{folder / name}, added after the data")
        tell(annex)


def tell(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if name != "findings":
            typer.echo(f"{name:12} {plain(value)}")
    for finding in found.get("findings", []):
        typer.echo(f"{finding['verdict'].replace('_', ' '):24} {finding['claim']}: {finding['reason']}")


def seconds_at_work(folder: Path) -> float:
    """From the first launch of a study to its newest outcome, by the times of the runner's files; 0 without any."""
    launches = folder / "launches"
    begun = [path.stat().st_mtime for path in launches.glob("*/trial.json")]
    ended = [path.stat().st_mtime for path in launches.glob("*/outcome.json")]
    return max(ended) - min(begun) if begun and ended else 0.0


def time_left(seconds: float, spent: float, left: float) -> str:
    """The time that `left` full runs take at the pace of the `spent` ones; empty where there is no pace yet."""
    if not (seconds and spent):
        return ""
    minutes = round(left * seconds / spent / 60)
    return f"at most {minutes // 60} h {minutes % 60} min, at the pace so far"


def summary(book: Book, seconds: float = 0.0) -> dict[str, Any]:
    """As `status --json` prints it. `seconds` is the time that the study has been at work."""
    from agentjet.research.planner.course import NOT_ADDED
    from agentjet.research.report.proceedings import Proceedings

    if book.study is None:
        return {"stage": "planned"}
    done = Proceedings(book)
    ends: dict[str, int] = {}
    for launched in done.launched:
        ends[launched.end] = ends.get(launched.end, 0) + 1
    over = done.stage == "finished"
    left = "" if over else time_left(seconds, done.spent, book.study.budget - done.spent)
    return {
        "stage": done.stage,
        "trials": ends,
        "spent": round(done.spent, 2),
        "running": round(done.ledger.total - done.spent, 2),
        "budget": book.study.budget,
        **({"time left": left} if left else {}),
        **({NOT_ADDED: done.not_added} if done.not_added else {}),
        "findings": [
            {"claim": h.claim, **done.findings[h.id].to_json()} for h in book.study.hypotheses if h.id in done.findings
        ],
    }


def report(
    folder: Folder,
    check: Annotated[
        Path | None, typer.Option(help="Instead of writing one: whether this report says what the journal does.")
    ] = None,
) -> None:
    """Write report.html and report.md from a study's journal, finished or not, and those of its annexes."""
    from agentjet.research.folder import StudyFolder
    from agentjet.research.report import book_of, build_all
    from agentjet.research.report import check as compared

    books = StudyFolder(folder).books()
    if check is None:
        for written in build_all(books, folder):
            typer.echo(written)
        return
    problems = compared(check, book_of(check, books))
    if problems:
        raise ConfigError("\n".join([f"{check} is not what the journal says:", *problems]))
    typer.echo(f"{check} says what the journal does")
