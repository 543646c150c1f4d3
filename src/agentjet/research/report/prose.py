"""Prose: Markdown in which every number is a reference, `{{F1.estimate}}`, until it is printed.

The template `report.md.jinja` writes a report as such prose, narration is such prose, and the linter reads it. Printing
puts the facts in and remembers where, so that a printed report can be held against its facts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from agentjet.research.report.facts import Fact, Facts

TEMPLATES = Path(__file__).parent / "templates"
REFERENCE = re.compile(r"\{\{\s*([A-Za-z]\w*\.\w+)\s*\}\}")


class Prose(str):
    """Text with references, from outside the template, that was linted."""


@dataclass(frozen=True, slots=True)
class Printed:
    text: str
    spans: tuple[tuple[int, int, str], ...]
    """From, to, and the reference that was printed there."""

    def reference_at(self, start: int, end: int) -> str | None:
        """The one that reaches into the characters from `start` to `end`."""
        return next((ref for first, last, ref in self.spans if first < end and start < last), None)


def compose(facts: Facts, narration: str = "") -> str:
    """The whole report as prose."""
    text = templates().get_template("report.md.jinja").render(facts.groups, narration=Prose(narration))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        finalize=as_reference,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )


def as_reference(said: object) -> str:
    """What the template prints is a fact, or prose that has been linted."""
    if isinstance(said, Prose):
        return said
    assert isinstance(said, Fact), f"the template prints {said!r}, which is no fact"
    return f"{{{{{said.ref}}}}}"


def fill(prose: str, facts: Facts, printed_as: Callable[[Fact], str]) -> Printed:
    """References become what `printed_as` makes of their facts. Raises `KeyError` for one that is unresolved."""
    pieces: list[str] = []
    spans: list[tuple[int, int, str]] = []
    length = last = 0
    for match in REFERENCE.finditer(prose):
        between, said = prose[last : match.start()], printed_as(facts.known[match[1]])
        pieces += [between, said]
        spans.append((length + len(between), length + len(between) + len(said), match[1]))
        length, last = length + len(between) + len(said), match.end()
    return Printed("".join([*pieces, prose[last:]]), tuple(spans))
