"""Parses a topic: its kind of question, its settings and their numbers. Words that were not understood are listed.

Words are matched with the packaged priors, longest phrase first, without a language model and without guesses.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from agentjet.errors import ConfigError
from agentjet.research.planner.priors import priors

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
"""Words that belong to the number before them."""


@dataclass(frozen=True)
class Amount:
    """A number, or a multiple of the present value. None marks a malformed number."""

    value: float | None
    is_multiple: bool = False


def words_of(text: str) -> list[str]:
    """Words in lower case. A word that begins with a digit extends to the next blank, so that no part passes for a
    number.
    """
    words: list[str] = []
    for word in (found.rstrip(".,'’") for found in WORD.findall(text.lower().replace("ß", "ss"))):
        if word in UNITS and words and NUMBER.fullmatch(words[-1]):
            words[-1] += f" {word}"
        else:
            words += _listed(word)
    return words


def _listed(word: str) -> list[str]:
    """Splits a list without blanks, unless it may be a decimal comma, a fraction or thousands."""
    parts = re.split("[,/]", word)
    is_list = len(parts) > 2 or "e" in word or "." in word
    is_thousands = all(len(part) == 3 and part.isdigit() for part in parts[1:])
    return parts if is_list and not is_thousands and all(map(NUMBER.fullmatch, parts)) else [word]


def amount_of(word: str) -> Amount | None:
    """None for a word that is not a number."""
    if word in MULTIPLES:
        return Amount(MULTIPLES[word], is_multiple=True)
    if found := TIMES.fullmatch(word):
        return Amount(float(found[1]), is_multiple=True)
    if found := POWER.fullmatch(word):
        return Amount(float(f"{found[1] or 1}e{found[2]}"))
    if NUMBER.fullmatch(word):
        return Amount(float(word))
    return Amount(None) if word.lstrip("-+.")[:1].isdigit() else None


TopicKind = Literal["sweep", "ablation", "a_against_b", "reward_shaping", "scaling", "diagnosis"]
KIND_WORDS: dict[TopicKind, str] = {
    "reward_shaping": "reward shaping, shaped reward, length penalty, length bonus, format reward, bonus",
    "diagnosis": "why, collapse, collapses, diverge, diverges, unstable, diagnose, stuck, does not learn",
    "ablation": "ablation, ablations, ablate, removing, remove, leaving out, leave out, needed, need",
    "sweep": "sweep, sweeps, best, tune, tuning, optimal, search, which value",
    "scaling": "scale, scales, scaling, larger, more, bigger, higher, smaller, lower, increase, increasing, raise, "
    "raising, lowering, decrease, decreasing, reduce, reducing, how many",
    "a_against_b": "vs, versus, against, or, compared, compare, comparing, better, worse, than, beat, beats, help, "
    "helps, hurt, hurts",
}
"""The first kind that is found decides, in this order."""


def listed(words: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", words))


SILENT = ("fine tuning", "finetuning")
"""Phrases that contain a word with another meaning."""
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
"""Words before the first setting that compare all settings with each other."""


@dataclass(frozen=True)
class Mention:
    """A setting in the topic: by name, by one of its choices, or with numbers."""

    setting: str
    words: str
    choice: str = ""
    amounts: tuple[Amount, ...] = ()
    given: bool = False
    """True for a condition of all arms ("when", "without") that is not compared."""
    absent: bool = False
    """True if the condition is that the setting is off."""


Meaning = Mention | Amount | TopicKind | None
Items = Sequence[tuple[str, Meaning]]
"""The phrases of a question with their meanings."""


@dataclass(frozen=True)
class Question:
    """One question of the topic."""

    text: str
    mentions: tuple[Mention, ...]
    kinds: frozenset[TopicKind]
    ignored: tuple[str, ...]
    rivals: bool

    @property
    def settings(self) -> frozenset[str]:
        return frozenset(mention.setting for mention in self.mentions)

    @property
    def asks(self) -> bool:
        return bool(self.mentions) or not self.kinds.isdisjoint(("diagnosis", "reward_shaping"))


def read(text: str) -> Question:
    """Raises `ConfigError` for a malformed number."""
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
    """Yields the longest known phrase at each position, with its meaning."""
    words = words_of(text)
    position = 0
    while position < len(words):
        length, meaning = longest(words, position)
        phrase = " ".join(words[position : position + max(1, length)])
        yield phrase, meaning or amount_of(phrase)
        position += max(1, length)


def longest(words: list[str], position: int) -> tuple[int, Meaning]:
    """Returns the longest known phrase at `position`: its number of words and its meaning."""
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
    """Returns the position of the setting to which each number belongs. Raises `ConfigError` for a malformed number.

    A number belongs to the setting it is bound to ("of 4", "4 vs 16"), else to the next setting ("4 rollouts per
    prompt"), else to the last setting, unless an unknown word stands between.
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
                f"{phrase!r} is not a number that the planner can read: write it in full and separately, such as "
                "0.001, 1e-3 or '4 vs 16'"
            )
        found[i] = owner
    return found


def bound(items: Items, i: int, found: dict[int, int]) -> int | None:
    """Binds by words such as "of", or by "vs" to a number that is bound."""
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
    """Returns the next setting, if only its other numbers and comparing words stand between."""
    for j in range(i + 1, len(items)):
        phrase, meaning = items[j]
        if is_setting(meaning):
            return j
        if not (isinstance(meaning, Amount) or meaning == "a_against_b" or phrase in BINDING | RIVALS | NAMING):
            return None
    return None


def preceding(items: Items, i: int, found: dict[int, int]) -> int | None:
    """Returns the last setting, if all words since are known and none leads elsewhere."""
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
    """True for a setting; a choice of a setting takes no number."""
    return isinstance(meaning, Mention) and not meaning.choice


# ---- conditions -----------------------------------------------------------------------------------------------------


def joint_of(before: Sequence[str]) -> tuple[str, bool]:
    """Returns how words join a setting to the previous one ("rivals", "condition" or "together"), and if it is
    absent.
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
    """A compared setting is not also a condition. If all are conditions, all are compared."""
    asked = {mention.setting for mention in mentions if not mention.given}
    return [
        replace(mention, given=mention.given and bool(asked) and mention.setting not in asked) for mention in mentions
    ]


# ---- words ----------------------------------------------------------------------------------------------------------


@cache
def phrases() -> tuple[tuple[str, Mention | TopicKind | None], ...]:
    """Every phrase with a meaning, and those that only seem to have one."""
    found: dict[str, Mention | TopicKind | None] = dict.fromkeys(SILENT)
    found |= {word: kind for kind, words in KIND_WORDS.items() for word in words.split(", ")}
    for name, prior in priors().items():
        for phrase in (*prior.says, name, name.rpartition(".")[2]):
            found.setdefault(" ".join(words_of(phrase)), Mention(name, phrase))
        for choice, stated in prior.choices.items():
            for phrase in (*stated, *([choice] if "_" in choice else [])):
                found[" ".join(words_of(phrase))] = Mention(name, phrase, choice)
    return tuple(found.items())


MEANINGS: dict[TopicKind, str] = {
    "sweep": "does tuning gain anything over the present value?",
    "ablation": "what does the score lose without a part?",
    "a_against_b": "which of these scores higher?",
    "reward_shaping": "does another reward in training raise the score that counts?",
    "scaling": "what does each increase of it gain?",
    "diagnosis": "which remedy helps a failing training?",
}
QUESTIONS = re.compile(
    r"[?;!\n]+|(?:\.|,?\s+and)\s+(?=(?:does|do|is|are|should|which|how|why|what|can|will)\s)", re.IGNORECASE
)
"""Separators between questions."""


@dataclass(frozen=True)
class ParsedTopic:
    kind: TopicKind
    mentions: tuple[Mention, ...]
    ignored: tuple[str, ...]
    """Words without a meaning for the planner."""
    rivals: bool = False
    """True for settings compared with each other ("a or b"), false for a list ("a and b")."""

    @property
    def asked(self) -> list[Mention]:
        return [mention for mention in self.mentions if not mention.given]

    @property
    def settings(self) -> list[str]:
        """Compared settings, in the order of the topic."""
        return list(dict.fromkeys(mention.setting for mention in self.asked))


def parse_topic(topic: str) -> ParsedTopic:
    """Raises `ConfigError` if the topic has no known setting, more than one question, or an invalid value."""
    questions = [read(text.strip()) for text in QUESTIONS.split(topic) if text.strip()]
    asking = [question for question in questions if question.asks]
    if not asking:
        raise ConfigError(unknown(topic, [word for question in questions for word in question.ignored]))
    check_one(topic, asking)
    beside = [question for question in questions if not question.asks and question.ignored]
    relevant = [question for question in questions if question not in beside]
    mentions = tuple(mention for question in relevant for mention in question.mentions)
    check_conditions(topic, mentions)
    stated = next((kind for kind in KIND_WORDS if any(kind in question.kinds for question in relevant)), None)
    rivals = any(question.rivals for question in relevant)
    kind = kind_of(stated, [mention for mention in mentions if not mention.given], rivals=rivals)
    for mention in mentions:
        for amount in mention.amounts:
            if amount.value is None or amount.is_multiple:
                continue
            if reason := priors()[mention.setting].refusal(mention.setting, amount.value):
                raise ConfigError(f"topic {topic!r}: {reason}")
    if kind == "diagnosis":
        mentions = tuple(replace(mention, given=True) for mention in mentions)
    ignored = [word for question in questions for word in ([question.text] if question in beside else question.ignored)]
    return ParsedTopic(kind, mentions, tuple(dict.fromkeys(ignored)), rivals)


def check_one(topic: str, asking: Sequence[Question]) -> None:
    """Raises `ConfigError` for two questions, unless one only repeats settings of the other."""
    first, *others = asking
    for other in others:
        ours, theirs = first.settings, other.settings
        if not ours or not theirs or not (ours <= theirs or theirs <= ours):
            raise ConfigError(
                f"topic {topic!r} asks two questions, {first.text!r} and {other.text!r}: plan one study per question"
            )


def check_conditions(topic: str, mentions: Sequence[Mention]) -> None:
    """Raises `ConfigError` for a condition with two values."""
    for setting in dict.fromkeys(mention.setting for mention in mentions if mention.given):
        given = [amount for mention in mentions if mention.setting == setting for amount in mention.amounts]
        values = [f"{amount.value:g}" for amount in given if amount.value is not None]
        if len(set(values)) > 1:
            raise ConfigError(
                f"topic {topic!r} gives {setting} two values, {' and '.join(values)}, besides another comparison: "
                f"compare one setting at a time; ask for '{setting.rpartition('.')[2]} {' vs '.join(values)}', or give "
                "it one value"
            )


def kind_of(stated: TopicKind | None, asked: Sequence[Mention], *, rivals: bool) -> TopicKind:
    """Named choices and numbers are compared in any case. Without a word for it, the setting decides."""
    goes_wrong = stated in ("diagnosis", "reward_shaping")
    if stated == "ablation" or (stated and goes_wrong and not asked):
        return stated
    named = any(mention.choice or len(mention.amounts) > goes_wrong for mention in asked)
    if named or (stated == "a_against_b" and rivals):
        return "a_against_b"
    prior = priors()[asked[0].setting]
    if prior.choices or prior.switch:
        return "a_against_b"
    if stated in ("sweep", "scaling", "diagnosis", "reward_shaping"):
        return stated
    return "a_against_b" if prior.off is not None else "scaling"


def unknown(topic: str, words: list[str]) -> str:
    known = [phrase for phrase, meaning in phrases() if meaning]
    near = list(dict.fromkeys(match for word in words for match in difflib.get_close_matches(word, known, 2, 0.5)))
    nearest = near[:5] or [priors()[name].says[0] for name in list(priors())[:5]]
    return (
        f"topic {topic!r} names no known setting; the nearest are {', '.join(map(repr, nearest))}. "
        "Use one of them in the topic, or describe the comparison in a file: --space space.toml"
    )
