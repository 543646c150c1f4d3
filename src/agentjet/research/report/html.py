"""Facts as HTML, and the page: one file that needs no other, no script, light or dark as its reader likes it.

The page is made of the same prose as the Markdown. A number keeps its reference and its unrounded value, for whoever
points at it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from itertools import pairwise

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

from agentjet.research.report.facts import Fact, Facts
from agentjet.research.report.prose import REFERENCE, TEMPLATES, Printed, fill


def as_html(fact: Fact, figures: Mapping[str, str]) -> str:
    text = escape(fact.text)
    match fact.kind:
        case "verbatim":
            return text
        case "figure":
            return f'<span class="figure" role="img" aria-label="{text}">{figures[str(fact.value)]}</span>'
        case "verdict":
            return f'<data class="verdict" value="{fact.value}" title="{fact.ref}">{text}</data>'
        case _ if fact.value is not None:
            return f'<data value="{fact.value}" title="{fact.ref} = {fact.value}">{text}</data>'
        case _:
            return text


def page(prose: str, facts: Facts, figures: Mapping[str, str]) -> Printed:
    """`figures` are SVG by their file's name."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(prose)
    sections = anchor(tokens)
    body = parser.renderer.render(tokens, parser.options, {})
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=True)
    whole = environment.get_template("page.html.jinja").render(
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        sections=sections,
        body=body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>"),
    )
    return fill(whole, facts, lambda fact: as_html(fact, figures))


def anchor(tokens: list[Token]) -> list[tuple[str, str]]:
    """Give every section an id. Returns ids and titles of the sections."""
    sections = []
    for token, content in pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2" and not REFERENCE.search(content.content):
            name = re.sub(r"\W+", "-", content.content.lower()).strip("-")
            token.attrSet("id", name)
            sections.append((name, content.content))
    return sections
