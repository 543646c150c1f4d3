"""From a book to files, and from files back to the book: `build` writes a report, `check` holds one against its book.

A report is a function of the book: the same book gives the same bytes, with the same version of matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.research.journal import Book
from agentjet.research.report.comparing import compare
from agentjet.research.report.facts import Fact, Facts, Group
from agentjet.research.report.gathering import gather
from agentjet.research.report.html import page
from agentjet.research.report.linter import demand_clean, lint, lint_narration
from agentjet.research.report.markdown import as_markdown
from agentjet.research.report.proceedings import Proceedings
from agentjet.research.report.prose import Printed, compose, fill

NARRATION = "narration"
"""The decision of the book that holds it."""


@dataclass(frozen=True)
class Report:
    """As text; `figures` are SVG by their file, relative to the report."""

    html: Printed
    markdown: Printed
    figures: dict[str, str]


def build(book: Book, out: Path) -> Path:
    """Write `report.html`, which needs no other file, `report.md` and its `figures/` into the folder `out`.

    Returns the path of the HTML. Raises `ConfigError` where the book holds no study.
    """
    report = render(book)
    for name, text in {"report.html": report.html.text, "report.md": report.markdown.text, **report.figures}.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return out / "report.html"


def build_all(books: Sequence[Book], folder: Path) -> list[Path]:
    """The report of a study into its folder, and those of its annexes into `annex-1` and so on in there."""
    begun = [book for number, book in enumerate(books) if book.study or not number]
    return [build(book, folder / f"annex-{number}" if number else folder) for number, book in enumerate(begun)]


def book_of(report: Path, books: Sequence[Book]) -> Book:
    """The one whose plan the report names; that of the study itself where it names none."""
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    return next((book for book in books if book.study and book.study.id in text), books[0])


def check(path: Path, book: Book) -> list[str]:
    """What in a report was changed since it was built from this book, or was built from another; empty where nothing.

    `path` is a report's HTML, or its Markdown, which is checked with the figures beside it.
    """
    if path.suffix not in (".html", ".md"):
        raise ConfigError(f"{path}: a report is a .html or a .md file; name one of these")
    try:
        found = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a report that is there") from None
    report = render(book)
    if path.suffix == ".html":
        return compare(report.html, found)
    problems = compare(report.markdown, found)
    for name, drawing in report.figures.items():
        figure = path.parent / name
        if not figure.is_file():
            problems.append(f"{name}: is not beside the report; copy the report's figures along with it")
        elif figure.read_text(encoding="utf-8") != drawing:
            problems.append(f"{name}: is not what the study draws, with this version of matplotlib")
    return problems


def narrate(book: Book, prose: str) -> None:
    """Add sentences to the study's report, once. Raises `ConfigError`, naming what the linter refuses.

    Numbers are written as references, `{{F1.estimate}}`; `facts_of` has them all.
    """
    demand_clean(lint_narration(prose, facts_of(book)), "the narration")
    book.decide(NARRATION, prose)


def facts_of(book: Book) -> Facts:
    return gather(Proceedings(book))


def render(book: Book) -> Report:
    done = Proceedings(book)
    facts = gather(done)
    figures = draw(done, facts)
    narration = str(book.decisions.get(NARRATION, ""))
    demand_clean(lint_narration(narration, facts), "the journal's narration")
    prose = compose(facts, narration)
    demand_clean(lint(prose, facts), "the template's prose")
    return Report(page(prose, facts, figures), fill(prose, facts, as_markdown), figures)


def draw(done: Proceedings, facts: Facts) -> dict[str, str]:
    """The figures that there is something for, by file; the facts get them as `figures`."""
    from agentjet.research.report.plots.canvas import styled, to_svg
    from agentjet.research.report.plots.curves import curves_figure
    from agentjet.research.report.plots.effects import effects_figure
    from agentjet.research.report.plots.ledger import ledger_figure
    from agentjet.research.report.plots.scores import scores_figure
    from agentjet.research.report.plots.tuning import tuning_figure

    drawn: dict[str, str] = {}
    shown: dict[str, Fact] = {}
    with styled():
        for name, alt, figure in (
            ("effects", "Estimate and interval of each claim", effects_figure(done)),
            ("curves", "Score along the run, by arm", curves_figure(done)),
            ("scores", "Final scores of every confirming run, by arm", scores_figure(done)),
            ("tuning", "Scores while tuning, by the value of the knob", tuning_figure(done)),
            ("ledger", "Cost in full runs, beside the whole grid", ledger_figure(done, facts)),
        ):
            if figure is not None:
                drawn[f"figures/{name}.svg"] = to_svg(figure)
                shown[name] = Fact(alt, f"figures/{name}.svg", kind="figure")
    missing: Group = dict.fromkeys(("effects", "curves", "scores", "tuning", "ledger"))
    facts.groups["figures"] = missing | facts.group("figures", shown)
    return drawn
