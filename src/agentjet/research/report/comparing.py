"""A printed report against what its book prints: where they differ, which reference was changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from agentjet.research.report.prose import Printed

TOKEN = re.compile(r"[+\N{MINUS SIGN}-]?\d[\w.,\N{NARROW NO-BREAK SPACE}]*|\w+|[^\w\s]")
SHOWN = 60
"""Characters of a token that are told of."""


def compare(expected: Printed, found: str) -> list[str]:
    """What was changed, a sentence each; empty where nothing was."""
    if found == expected.text:
        return []
    old, new = expected.text.splitlines(keepends=True), found.splitlines(keepends=True)
    head = shared(old, new)
    tail = shared(old[head:][::-1], new[head:][::-1])
    middle = old[head : len(old) - tail], new[head : len(new) - tail]
    problems: list[str] = []
    for tag, i, i_end, j, j_end in SequenceMatcher(None, *middle, autojunk=False).get_opcodes():
        if tag != "equal":
            start = sum(map(len, old[: head + i]))
            end = start + sum(map(len, middle[0][i:i_end]))
            problems += changes(expected, start, end, "".join(middle[1][j:j_end]), line=head + j + 1)
    return problems


def shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many lines they begin with together."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def changes(expected: Printed, start: int, end: int, found: str, *, line: int) -> Iterator[str]:
    """Token by token, between two places of what was expected."""
    old = list(TOKEN.finditer(expected.text, start, end))
    new = list(TOKEN.finditer(found))
    matcher = SequenceMatcher(None, [m[0] for m in old], [m[0] for m in new], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        where = f"line {line + (found.count(chr(10), 0, new[j].start()) if j < len(new) else 0)}"
        said = shown(found[new[j].start() : new[j_end - 1].end()]) if j_end > j else "nothing"
        if i_end == i:
            yield f"{where}: {said} is in no fact of the study"
            continue
        first, last = old[i].start(), old[i_end - 1].end()
        ref = expected.reference_at(first, last)
        yield f"{where}: {said} stands where {ref or 'the report'} says {shown(expected.text[first:last])}"


def shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")
