"""Facts as Markdown: what a study calls its arms may not become markup."""

from __future__ import annotations

import re

from agentjet.research.report.facts import Fact

SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w)")


def as_markdown(fact: Fact) -> str:
    match fact.kind:
        case "verbatim":
            return fact.text
        case "figure":
            return f"![{escaped(fact.text)}]({fact.value})"
        case _:
            return escaped(fact.text)


def escaped(text: str) -> str:
    return SPECIAL.sub(r"\\\g<0>", text)
