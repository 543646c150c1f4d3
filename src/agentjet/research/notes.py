"""What is kept and told of a failure: it begins with what happened, and its cause is the last line of a log."""

from __future__ import annotations

import re

LONGEST_NOTE = 2000
LONGEST_LINE = 400
"""Characters that are told on a terminal."""


def shortened(text: str, limit: int = LONGEST_NOTE) -> str:
    """A text that fits; of a longer one, its first sentences and its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{whole_sentences(text, half)} [...] {text[len(text) - half + 7 :].lstrip()}"


def in_a_line(note: str) -> str:
    """A note for a terminal: its first line, and the last of the log that it goes on with."""
    first, *log = [line.strip() for line in note.splitlines() if line.strip()] or [""]
    return " ".join([whole_sentences(first, LONGEST_LINE), *(whole_sentences(line, LONGEST_LINE) for line in log[-1:])])


def whole_sentences(text: str, limit: int) -> str:
    """As many of the first ones as fit; of a first one that is too long, as many words."""
    if len(text) <= limit:
        return text
    ends = [match.end() for match in re.finditer(r"[.;!?](?=\s)", text[: limit + 1])]
    return text[: ends[-1]] if ends else f"{text[:limit].rpartition(' ')[0] or text[:limit]} ..."
