"""What others wrote (ids, names, reasons, sampled tokens), for people to read in a terminal, which obeys none of it.

Output for programs does not pass here: JSON has escapes of its own.
"""

from __future__ import annotations

import unicodedata

import typer

JOINERS = "\u200c\u200d"
"""Invisible, but letters and emoji are put together with them."""


def say(text: str) -> None:
    """Print a line, or several."""
    typer.echo(printable(text))


def printable(text: str, *, keep: str = "\n\t") -> str:
    """`text` with everything that could steer a terminal, or turn what stands there around, as Python would escape it;
    control characters in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if _steers(c) and c not in keep else c for c in text)


def one_line(text: str) -> str:
    """The same within a line, which it cannot end."""
    return printable(text, keep="")


def _steers(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in JOINERS
