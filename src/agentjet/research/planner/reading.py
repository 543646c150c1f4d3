"""One question of a topic, read from left to right: which words are settings, whose the numbers are, what is given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from agentjet.errors import ConfigError
from agentjet.research.planner.numerals import Amount, amount_of, words_of
from agentjet.research.planner.priors import priors

Kind = Literal["sweep", "ablation", "a_against_b", "reward_shaping", "scaling", "diagnosis"]
KIND_WORDS: dict[Kind, str] = {
    "reward_shaping": "reward shaping, shaped reward, length penalty, length bonus, format reward, bonus",
    "diagnosis": "why, collapse, collapses, diverge, diverges, unstable, diagnose, stuck, does not learn",
    "ablation": "ablation, ablations, ablate, removing, remove, leaving out, leave out, needed, need",
    "sweep": "sweep, sweeps, best, tune, tuning, optimal, search, which value",
    "scaling": "scale, scales, scaling, larger, more, bigger, higher, smaller, lower, increase, increasing, raise, "
    "raising, lowering, decrease, decreasing, reduce, reducing, how many",
    "a_against_b": "vs, versus, against, or, compared, compare, comparing, better, worse, than, beat, beats, help, "
    "helps, hurt, hurts",
}
"""In the order in which the first one found decides."""


def listed(words: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", words))


SILENT = ("fine tuning", "finetuning")
"""They hold a word that means something elsewhere."""
FILLERS = listed(
    """
    a agent agents all an and any are as at be between by can coefficient do does doing effect effects for from
    given good has have high how i if in instead is it its low matter matters model much my no not of on our over
    performance policy reward score set should so still the this to training train under rl use used using value
    values we what when where which while who will with without work
    """
).union(SILENT)
BINDING = listed("a an are at be between by coefficient equal from is of set the to value values")
"""Words between a setting and its number."""
NAMING = listed("as for in")
"""Words between numbers and the setting that is named after them: "is 16 better than 8 as group size?"."""
ELSEWHERE = listed("after before during for in on over within")
"""Words after which a number belongs to something else."""
RIVALS = listed("vs versus against or than compared beat beats")
CONDITIONS = listed("when while if given with without at under using for")
TOGETHER = listed("and")
WHOLE = listed("compare comparing between")
"""Before the first setting, they hold all of them against each other."""


@dataclass(frozen=True)
class Mention:
    """A setting that a topic speaks of: by itself, as one of its choices, or with numbers."""

    setting: str
    words: str
    choice: str = ""
    amounts: tuple[Amount, ...] = ()
    given: bool = False
    """It is no side of the comparison but a condition of it ("when", "without"), the same for all arms."""
    absent: bool = False
    """The condition is that it is not there."""


Meaning = Mention | Amount | Kind | None
Items = Sequence[tuple[str, Meaning]]
"""The phrases of a question, each with what it means."""


@dataclass(frozen=True)
class Question:
    """What stands between two question marks."""

    text: str
    mentions: tuple[Mention, ...]
    kinds: frozenset[Kind]
    ignored: tuple[str, ...]
    rivals: bool

    @property
    def settings(self) -> frozenset[str]:
        return frozenset(mention.setting for mention in self.mentions)

    @property
    def asks(self) -> bool:
        return bool(self.mentions) or not self.kinds.isdisjoint(("diagnosis", "reward_shaping"))


def read(text: str) -> Question:
    """Raises `ConfigError` for what stands where a number belongs, and is none."""
    items = list(items_of(text))
    placed = owners(items)
    found = [i for i, (_, meaning) in enumerate(items) if isinstance(meaning, Mention)]
    mentions: list[Mention] = []
    rivals = False
    for number, i in enumerate(found):
        meaning = items[i][1]
        assert isinstance(meaning, Mention)
        before = [phrase for phrase, _ in items[found[number - 1] + 1 if number else 0 : i]]
        joint, absent = joint_of(before)
        if WHOLE.intersection(phrase for phrase, _ in items[: found[0]]):
            joint = "rivals"
        given = {
            "condition": True,
            "rivals": bool(mentions) and all(mention.given for mention in mentions),
            "together": bool(mentions) and mentions[-1].given,
        }.get(joint, False)
        rivals = rivals or (joint == "rivals" and number > 0)
        amounts = tuple(
            amount for j, (_, amount) in enumerate(items) if placed.get(j) == i and isinstance(amount, Amount)
        )
        mentions.append(replace(meaning, amounts=amounts, given=given, absent=absent))
    return Question(
        text,
        tuple(settled(mentions)),
        frozenset(meaning for _, meaning in items if isinstance(meaning, str)),
        tuple(phrase for i, (phrase, meaning) in enumerate(items) if is_ignored(phrase, meaning) and i not in placed),
        rivals,
    )


def items_of(text: str) -> Iterator[tuple[str, Meaning]]:
    """The longest phrase that begins at a word, then what follows it."""
    words = words_of(text)
    position = 0
    while position < len(words):
        length, meaning = longest(words, position)
        phrase = " ".join(words[position : position + max(1, length)])
        yield phrase, meaning or amount_of(phrase)
        position += max(1, length)


def longest(words: list[str], position: int) -> tuple[int, Meaning]:
    """The longest known phrase that begins here: how many words, and what it means."""
    best: tuple[int, Meaning] = (0, None)
    for phrase, meaning in phrases():
        parts = phrase.split()
        if len(parts) > best[0] and words[position : position + len(parts)] == parts:
            best = (len(parts), meaning)
    return best


def is_ignored(phrase: str, meaning: Meaning) -> bool:
    return isinstance(meaning, Amount) or (meaning is None and phrase not in FILLERS)


# ---- numbers --------------------------------------------------------------------------------------------------------


def owners(items: Items) -> dict[int, int]:
    """By position of a number, the position of the setting it belongs to. Raises `ConfigError` for what is none there.

    A number goes to the setting it is bound to ("of 4", "4 vs 16"), else to the one that follows it ("4 rollouts per
    prompt"), else to the last one, unless something stands between that the planner does not know.
    """
    found: dict[int, int] = {}
    for i, (phrase, meaning) in enumerate(items):
        if not isinstance(meaning, Amount):
            continue
        owner = bound(items, i, found)
        owner = following(items, i) if owner is None else owner
        owner = preceding(items, i, found) if owner is None and not meaning.is_multiple else owner
        if owner is None:
            continue
        if meaning.value is None:
            raise ConfigError(
                f"{phrase!r} is no number that the planner reads: write it in full and by itself, such as 0.001, 1e-3 "
                "or '4 vs 16'"
            )
        found[i] = owner
    return found


def bound(items: Items, i: int, found: dict[int, int]) -> int | None:
    """By words such as "of"; or by "vs" and the like to a number that is."""
    for j in reversed(range(i)):
        phrase, meaning = items[j]
        if j in found:
            return found[j]
        if is_setting(meaning):
            return j if all(word in BINDING for word, _ in items[j + 1 : i]) else None
        if phrase not in BINDING | RIVALS | TOGETHER:
            return None
    return None


def following(items: Items, i: int) -> int | None:
    """The setting after it, where nothing but other numbers of it and words that compare them stand between."""
    for j in range(i + 1, len(items)):
        phrase, meaning = items[j]
        if is_setting(meaning):
            return j
        if not (isinstance(meaning, Amount) or meaning == "a_against_b" or phrase in BINDING | RIVALS | NAMING):
            return None
    return None


def preceding(items: Items, i: int, found: dict[int, int]) -> int | None:
    """The last setting, where all words since are known and none leads elsewhere."""
    for j in reversed(range(i)):
        phrase, meaning = items[j]
        if j in found:
            return found[j]
        if is_setting(meaning):
            return j
        if is_ignored(phrase, meaning) or isinstance(meaning, Mention) or phrase in ELSEWHERE:
            return None
    return None


def is_setting(meaning: Meaning) -> bool:
    """Not one of its choices, which takes no number."""
    return isinstance(meaning, Mention) and not meaning.choice


# ---- conditions -----------------------------------------------------------------------------------------------------


def joint_of(before: Sequence[str]) -> tuple[str, bool]:
    """How the words before a setting join it to what was said: as "rivals", a "condition" or "together"; and whether it
    is said to be absent.
    """
    joint, absent, last = "", False, -2
    for i, word in enumerate(before):
        if word in CONDITIONS:
            joint = joint if joint == "rivals" and last == i - 1 else "condition"  # "than with" compares
            absent, last = word == "without", i
        elif word in RIVALS or word in TOGETHER:
            joint, absent, last = "rivals" if word in RIVALS else "together", False, i
        elif word == "no":
            absent = True
    return joint, absent


def settled(mentions: Sequence[Mention]) -> list[Mention]:
    """What is asked about is no condition of itself; where all are conditions, they are what is asked about."""
    asked = {mention.setting for mention in mentions if not mention.given}
    return [
        replace(mention, given=mention.given and bool(asked) and mention.setting not in asked) for mention in mentions
    ]


# ---- words ----------------------------------------------------------------------------------------------------------


@cache
def phrases() -> tuple[tuple[str, Mention | Kind | None], ...]:
    """Every phrase that means something, and those that only seem to."""
    found: dict[str, Mention | Kind | None] = dict.fromkeys(SILENT)
    found |= {word: kind for kind, words in KIND_WORDS.items() for word in words.split(", ")}
    for name, prior in priors().items():
        for phrase in (*prior.says, name, name.rpartition(".")[2]):
            found.setdefault(" ".join(words_of(phrase)), Mention(name, phrase))
        for choice, said in prior.choices.items():
            for phrase in (*said, *([choice] if "_" in choice else [])):
                found[" ".join(words_of(phrase))] = Mention(name, phrase, choice)
    return tuple(found.items())
