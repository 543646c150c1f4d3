"""`Fact`: a thing that a report may say, with the name it is referred to by and the rounding it is printed with.

Facts come from a study's book and from nowhere else. Prose refers to them as `{{F1.estimate}}`; a numeral that is
no such reference is refused (`linter`), so whatever number stands in a report can be traced to trials.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentjet.research.models import Setting, Value

NOTHING = "–"
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Fact:
    text: str
    """As it is printed."""
    value: Value | None = None
    """Unrounded, where `text` is a number."""
    kind: Literal["said", "verbatim", "verdict", "figure"] = "said"
    """Verbatim is code: an id, a file. The text of a figure says what it shows."""
    ref: str = ""


Group = dict[str, Any]
"""Facts by name, for the template; beside them plain values that it may ask for, and groups that belong to them."""


@dataclass(frozen=True)
class Facts:
    """Every fact of a report. `groups` is what the template sees, `known` what a reference may name."""

    groups: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Fact] = field(default_factory=dict)

    def group(self, name: str, facts: Mapping[str, Fact], **beside: Any) -> Group:
        """Name the facts `name.key`, once and for all."""
        named = {key: replace(fact, ref=f"{name}.{key}") for key, fact in facts.items()}
        for fact in named.values():
            assert fact.ref not in self.known, f"two facts are called {fact.ref}"
            self.known[fact.ref] = fact
        return {**named, **beside}


# ---- how things are printed -------------------------------------------------------------------------------------


def quote(text: str) -> Fact:
    """What the study or its outcomes say in words, on a single line."""
    return Fact(" ".join(text.split()) or NOTHING)


def verbatim(text: str) -> Fact:
    return Fact(text or NOTHING, kind="verbatim")


def count(number: int) -> Fact:
    return Fact(f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}"), number)


def counts(numbers: tuple[int, ...]) -> Fact:
    return Fact(", ".join(map(str, numbers)))


def share(part: float, *, decimals: int = 1) -> Fact:
    return Fact(f"{trimmed(100 * part, decimals)} %", part)


def runs(number: float) -> Fact:
    """Full runs."""
    return Fact(trimmed(number, 2), number)


def chance(p: float | None) -> Fact:
    if p is None:
        return Fact(NOTHING)
    return Fact("< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}", p)


def plain(value: Value) -> Fact:
    """A setting's value, as somebody would type it."""
    return Fact(written(value), value)


def setting_text(setting: Setting) -> Fact:
    return quote(", ".join(f"{name} = {written(value)}" for name, value in sorted(setting.items())) or "the base")


def written(value: Value) -> str:
    if type(value) is not float:
        return str(value)
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.10g}")


def trimmed(number: float, decimals: int) -> str:
    text = f"{number:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", MINUS)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Scores and differences of a study: to a twentieth of the smallest effect of interest, or a little finer."""

    sesoi: float

    @property
    def decimals(self) -> int:
        return max(0, math.ceil(math.log10(20 / self.sesoi)))

    def score(self, value: float | None) -> Fact:
        if value is None:
            return Fact(NOTHING)
        text = f"{value:.{self.decimals}f}" if abs(value) < 1e6 else f"{value:.3g}"
        return Fact(text.replace("-", MINUS), value)

    def difference(self, value: float | None) -> Fact:
        """With its sign, also where rounding leaves 0."""
        found = self.score(value)
        return replace(found, text=f"+{found.text}") if value is not None and value > 0 else found
