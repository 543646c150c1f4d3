"""Checks that hold for every view of the page, on a page that shows the view.

1. `unexpected_elements`: nothing on the page was made from data, and no string of the data was executed.
2. `wrong_facts`: each number with a place in the API is the number that the API answers.
3. `violations`: axe-core finds nothing serious or critical.
4. `overflow`: no view is wider than the window.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page, ViewportSize

DEFINE_PWNED = "window.pwned = () => { window.executed = (window.executed ?? 0) + 1; }"
"""Every hostile string calls `pwned`."""
OWN_TAGS = (
    "A ARTICLE ASIDE B BDI BUTTON CANVAS CAPTION CIRCLE CODE COL COLGROUP DATA DD DEL DETAILS DIALOG DIV DL DT EM "
    "FIELDSET FIGCAPTION FIGURE FOOTER FORM G H1 H2 H3 H4 HEADER I INPUT INS KBD LABEL LEGEND LI LINE MAIN MARK METER "
    "NAV OL OPTION OUTPUT P PATH POLYGON POLYLINE PRE PROGRESS Q RECT S SEARCH SECTION SELECT SMALL SPAN STRONG SUB "
    "SUMMARY SUP SVG TABLE TBODY TD TEXT TEXTAREA TH THEAD TIME TITLE TR UL"
)
"""Tags that the page itself makes."""
FOREIGN = """(tags) => [...document.getElementById("page").querySelectorAll("*")].flatMap((one) => [
  ...(tags.includes(one.tagName.toUpperCase()) ? [] : [one.tagName]),
  ...[...one.attributes].filter(({ name, value }) => name.startsWith("on") || name === "srcdoc"
    || (["href", "src", "action", "formaction", "xlink:href"].includes(name) && !value.startsWith("#")))
    .map(({ name, value }) => `${one.tagName} ${name}=${value}`),
])"""
FACTS = """() => [...document.querySelectorAll("[data-fact]")].map((one) => (
  [one.dataset.fact, one.getAttribute("value"), one.textContent.trim()]))"""
PLACE = re.compile(r'\.?([^.\[\]"]+)|\[(\d+)\]|\["((?:[^"\\]|\\.)*)"\]')
"""One part of a place in an answer: a name, an index, or a name in quotes."""
LOOKS: dict[str, tuple[Literal["light", "dark"], ViewportSize]] = {
    "light": ("light", {"width": 1280, "height": 900}),
    "dark": ("dark", {"width": 1280, "height": 900}),
    "narrow": ("light", {"width": 320, "height": 800}),
    "dark narrow": ("dark", {"width": 320, "height": 800}),
}
"""Colours and sizes that every view must have."""
OPTIONS = {
    "resultTypes": ["violations"],
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
}


def unexpected_elements(page: Page) -> list[str]:
    """Returns tags and attributes that the page does not make itself, and a note if code of the data ran."""
    found: list[str] = page.evaluate(FOREIGN, OWN_TAGS.split(" "))
    if page.evaluate("window.executed ?? 0"):
        found.append("a string was executed")
    return found


def resolve(answer: Any, place: str) -> Any:
    """Returns the value at a place such as `groups[0].id` or `metrics["reward/mean"][41]`."""
    at = 0
    while at < len(place):
        found = PLACE.match(place, at)
        assert found is not None, place
        name, index, quoted = found.groups()
        answer = (
            answer[int(index)] if index is not None else answer[name if name is not None else json.loads(f'"{quoted}"')]
        )
        at = found.end()
    return answer


def wrong_facts(page: Page, get: Callable[[str], Any]) -> tuple[int, list[str]]:
    """Returns the number of facts, and those that differ from the API: their value, or the text that shows it."""
    answers: dict[str, Any] = {}
    wrong = []
    facts = page.evaluate(FACTS)
    for fact, value, text in facts:
        route, _, place = fact.partition("#")
        if route not in answers:
            answers[route] = get(route)
        expected = resolve(answers[route], place)
        if not (_same(expected, value) and _shows(text, expected)):
            wrong.append(f"{fact} is {expected!r}: value {value!r}, shown {text!r}")
    return len(facts), wrong


def _same(expected: Any, value: str | None) -> bool:
    if isinstance(expected, bool) or not isinstance(expected, (int, float)):
        return value == ("null" if expected is None else str(expected))
    return value is not None and value != "null" and math.isclose(float(value), expected, rel_tol=1e-12)


def _shows(text: str, expected: Any) -> bool:
    """True if the shown text is the number, rounded to the digits that are shown. Durations have units; see `_same`."""
    if expected is None:
        return text == "–"
    if not isinstance(expected, (int, float)) or re.search(r"[a-z]{1,}", text.replace("e", "")):
        return bool(text)
    scale = 100.0 if text.endswith("%") else 1.0
    digits = text.removesuffix("%").replace(",", "").replace("+", "").replace("−", "-").strip()
    mantissa, _, exponent = digits.partition("e")
    rounding = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(digits) - expected * scale) <= rounding * 1.001


def give_look(page: Page, look: str) -> None:
    """Changes colours and size of the page."""
    colours, size = LOOKS[look]
    page.emulate_media(color_scheme=colours)
    page.set_viewport_size(size)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def violations(page: Page) -> list[str]:
    """Returns the serious and critical findings of axe-core, with the element of the first one."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate("async (options) => (await axe.run(options)).violations", OPTIONS)
    return [
        f"{one['id']} ({one['impact']}): {one['nodes'][0]['html'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def overflow(page: Page) -> int:
    """Returns the pixels by which the page is wider than its window."""
    width: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


def hidden_width(page: Page, table: str) -> int:
    """Returns the pixels of a table beyond its box, which one must scroll to see."""
    width: int = page.get_by_role("region", name=table).evaluate("(one) => one.scrollWidth - one.clientWidth")
    return width
