"""What prose may not say: a numeral of its own, a reference to nothing, a claim stronger than its verdict.

The template is held to it and so is narration, which a language model may have written: it is plain sentences without
markup. The rules are of words, not of meaning, and err on the side of refusing: whoever is refused writes it plainer.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.research.report.facts import Facts, Group
from agentjet.research.report.prose import REFERENCE

VOCABULARY = tomllib.loads((Path(__file__).parent / "vocabulary.toml").read_text(encoding="utf-8"))
NUMBER_WORDS = frozenset(VOCABULARY["numbers"].split())
OVERSTATED = frozenset(VOCABULARY["overstated"].split())
CLAIMS = {verdict: frozenset(words.split()) for verdict, words in VOCABULARY["claims"].items()}
NUMBER_PHRASE = re.compile(r"\borders?\s+of\s+magnitude\b|\bscores?\s+of\s+times\b|\bper\s+cent\b")
NO_DIFFERENCE = re.compile(
    r"\bno (?:real |measurable )?(?:difference|effect|influence)\b|\bas (?:good|bad) as\b|\bon (?:a )?par\b"
)
TOUCHING = r"[\w+\-−–/^%×·]"
GLUED = re.compile(rf"{TOUCHING}{REFERENCE.pattern}|{REFERENCE.pattern}(?:{TOUCHING}|[.,:]?\{{\{{|[.,:]\w)")
SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?=[-|>#])|\|")
ARM_NAME = re.compile(r"A\d+\.name")
WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
MARKUP = re.compile(r"[<>\[\]|`#*]|^\s*[-+=~]|\{%|\{#", re.MULTILINE)
TAG = re.compile(r"</?\w+[^>]*>")


def lint(prose: str, facts: Facts) -> list[str]:
    """What is wrong with it, a sentence each; empty where nothing is."""
    verdicts = {group["name"].text: group for group in facts.groups["findings"]}
    problems = []
    for sentence in filter(str.strip, SENTENCE_ENDS.split(TAG.sub("", prose))):
        found = [*unresolved(sentence, facts), *glued(sentence), *numerals(sentence), *overclaims(sentence, verdicts)]
        problems += [f"{problem}, in: {' '.join(sentence.split())}" for problem in found]
    return problems


def lint_narration(prose: str, facts: Facts) -> list[str]:
    """Narration is linted, and may bring no markup."""
    marks = sorted(set(MARKUP.findall(prose)))
    return [f"markup {mark.strip()!r}: narration is plain sentences" for mark in marks] + lint(prose, facts)


def demand_clean(problems: list[str], what: str) -> None:
    if problems:
        raise ConfigError(f"{what} is refused: " + "; ".join(problems))


def unresolved(sentence: str, facts: Facts) -> Iterator[str]:
    for ref in REFERENCE.findall(sentence):
        if ref not in facts.known:
            yield f"{{{{{ref}}}}} is no fact of this study"
    if "{{" in REFERENCE.sub("", sentence):
        yield "a reference is written {{F1.estimate}}"


def glued(sentence: str) -> Iterator[str]:
    """References that make another number together with what touches them: a sign, a digit, a letter, a reference."""
    for match in GLUED.finditer(sentence):
        yield f"{match[0]!r} makes a number of its own: let a reference stand by itself"


def numerals(sentence: str) -> Iterator[str]:
    """Digits of any script, and numbers in words."""
    rest = REFERENCE.sub(" ", sentence)
    for token in rest.split():
        if any(character.isnumeric() for character in token):
            yield f"{token!r} is a numeral and no reference"
    for word in WORD.findall(rest.lower()):
        if any(part.removesuffix("fold") in NUMBER_WORDS for part in word.split("-")) or word.endswith("-fold"):
            yield f"{word!r} is a number and no reference"
    for phrase in NUMBER_PHRASE.findall(rest.lower()):
        yield f"{phrase!r} is a number and no reference"


def overclaims(sentence: str, findings: dict[str, Group]) -> Iterator[str]:
    """A sentence that claims must refer to findings, and all of those must have the verdict that the claim needs."""
    text = REFERENCE.sub(" ", sentence).lower()
    words = set(WORD.findall(text))
    for word in sorted(words & OVERSTATED):
        yield f"{word!r} is stronger than any verdict"
    refs = REFERENCE.findall(sentence)
    about = {ref.split(".")[0] for ref in refs} & findings.keys()
    for verdict, vocabulary in CLAIMS.items():
        said = sorted(words & vocabulary)
        if verdict == "practically_equivalent":
            said += NO_DIFFERENCE.findall(text)
        if not said:
            continue
        if not about:
            yield f"{said[0]!r} is a claim that refers to no finding"
        if any(ARM_NAME.fullmatch(ref) for ref in refs):
            yield f"{said[0]!r} names an arm by itself: in a claim it is {{{{F1.arm}}}} or {{{{F1.against}}}}"
        for name in sorted(about):
            if findings[name]["verdict_is"] != verdict:
                yield f"{said[0]!r} needs a verdict of {verdict!r}, and {name} is {findings[name]['verdict_is']!r}"
            elif findings[name]["exploratory"] and "exploratory" not in words:
                yield f"{said[0]!r} of {name}, which is exploratory: the sentence has to say so"
            elif verdict != "practically_equivalent" and is_turned_round(refs, name):
                yield f"{said[0]!r} is said of {name}.against: {name}.arm comes first"


def is_turned_round(refs: list[str], name: str) -> bool:
    """Whether the claim is made of what the finding compares with."""
    sides = [ref for ref in refs if ref in (f"{name}.arm", f"{name}.against")]
    return sides[:1] == [f"{name}.against"]
