"""The words of a topic, and the numbers among them: what is one, what is a multiple, and what only looks like one."""

from __future__ import annotations

import re
from dataclasses import dataclass

WORD = re.compile(r"(?<![\w.])[-+]?\.?\d[^\s;:?!()\[\]{}\"“”=]*|[a-z0-9]+(?:'s)?")
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?")
POWER = re.compile(r"(?:(\d+(?:\.\d+)?)[*x×·])?10(?:\^|\*\*)([-+]?\d+)")
TIMES = re.compile(r"(\d+(?:\.\d+)?)(?:x| times)")
MULTIPLES = {
    "twice": 2.0,
    "double": 2.0,
    "doubling": 2.0,
    "doubled": 2.0,
    "triple": 3.0,
    "tripling": 3.0,
} | dict.fromkeys(("half", "halving", "halved"), 0.5)
UNITS = frozenset(("times", "hundred", "thousand", "million", "billion", "percent"))
"""What a number is said together with."""


@dataclass(frozen=True)
class Amount:
    """A number, or a multiple of the present value. None: what begins as a number does, and is neither."""

    value: float | None
    is_multiple: bool = False


def words_of(text: str) -> list[str]:
    """In lower case; what begins with a digit goes on to the next blank, so that no part of it passes for a number."""
    words: list[str] = []
    for word in (found.rstrip(".,'’") for found in WORD.findall(text.lower().replace("ß", "ss"))):
        if word in UNITS and words and NUMBER.fullmatch(words[-1]):
            words[-1] += f" {word}"
        else:
            words += _listed(word)
    return words


def _listed(word: str) -> list[str]:
    """The numbers of a list without blanks, where it can be no decimal comma, no fraction and no thousands."""
    parts = re.split("[,/]", word)
    is_list = len(parts) > 2 or "e" in word or "." in word
    is_thousands = all(len(part) == 3 and part.isdigit() for part in parts[1:])
    return parts if is_list and not is_thousands and all(map(NUMBER.fullmatch, parts)) else [word]


def amount_of(word: str) -> Amount | None:
    """None for what is no number at all."""
    if word in MULTIPLES:
        return Amount(MULTIPLES[word], is_multiple=True)
    if found := TIMES.fullmatch(word):
        return Amount(float(found[1]), is_multiple=True)
    if found := POWER.fullmatch(word):
        return Amount(float(f"{found[1] or 1}e{found[2]}"))
    if NUMBER.fullmatch(word):
        return Amount(float(word))
    return Amount(None) if word.lstrip("-+.")[:1].isdigit() else None
