"""The words of a topic, and the numbers among them: what is one, what is a multiple, and what only looks like one.

One question of a topic, read from left to right: which words are settings, whose the numbers are, what is given.

From the words of a topic to a kind of question and the settings it is about. What was not understood is said.

Word matching, longest phrase first, over the packaged priors: no language model, and no guess either.
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


Meaning = Mention | Amount | TopicKind | None
Items = Sequence[tuple[str, Meaning]]
"""The phrases of a question, each with what it means."""


@dataclass(frozen=True)
class Question:
    """What stands between two question marks."""

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
def phrases() -> tuple[tuple[str, Mention | TopicKind | None], ...]:
    """Every phrase that means something, and those that only seem to."""
    found: dict[str, Mention | TopicKind | None] = dict.fromkeys(SILENT)
    found |= {word: kind for kind, words in KIND_WORDS.items() for word in words.split(", ")}
    for name, prior in priors().items():
        for phrase in (*prior.says, name, name.rpartition(".")[2]):
            found.setdefault(" ".join(words_of(phrase)), Mention(name, phrase))
        for choice, said in prior.choices.items():
            for phrase in (*said, *([choice] if "_" in choice else [])):
                found[" ".join(words_of(phrase))] = Mention(name, phrase, choice)
    return tuple(found.items())


MEANINGS: dict[TopicKind, str] = {
    "sweep": "does tuning gain anything over the present value?",
    "ablation": "what is lost when a part is taken away?",
    "a_against_b": "which of these scores higher?",
    "reward_shaping": "does another reward in training raise the score that counts?",
    "scaling": "what does more of it bring, step by step?",
    "diagnosis": "which remedy helps a training that goes wrong?",
}
QUESTIONS = re.compile(
    r"[?;!\n]+|(?:\.|,?\s+and)\s+(?=(?:does|do|is|are|should|which|how|why|what|can|will)\s)", re.IGNORECASE
)
"""Where one question ends and another may begin."""


@dataclass(frozen=True)
class ParsedTopic:
    kind: TopicKind
    mentions: tuple[Mention, ...]
    ignored: tuple[str, ...]
    """Words that mean nothing to the planner."""
    rivals: bool = False
    """Different settings are held against each other ("a or b"), not named beside each other ("a and b")."""

    @property
    def asked(self) -> list[Mention]:
        return [mention for mention in self.mentions if not mention.given]

    @property
    def settings(self) -> list[str]:
        """That are asked about, in the order they are first spoken of."""
        return list(dict.fromkeys(mention.setting for mention in self.asked))


def parse_topic(topic: str) -> ParsedTopic:
    """Raises `ConfigError` when the topic names neither a known setting nor a question that needs none, more than one
    question, or a value that its setting cannot have.
    """
    questions = [read(text.strip()) for text in QUESTIONS.split(topic) if text.strip()]
    asking = [question for question in questions if question.asks]
    if not asking:
        raise ConfigError(unknown(topic, [word for question in questions for word in question.ignored]))
    check_one(topic, asking)
    beside = [question for question in questions if not question.asks and question.ignored]
    heard = [question for question in questions if question not in beside]
    mentions = tuple(mention for question in heard for mention in question.mentions)
    check_conditions(topic, mentions)
    said = next((kind for kind in KIND_WORDS if any(kind in question.kinds for question in heard)), None)
    rivals = any(question.rivals for question in heard)
    kind = kind_of(said, [mention for mention in mentions if not mention.given], rivals=rivals)
    for mention in mentions:
        for amount in mention.amounts:
            if amount.value is None or amount.is_multiple:
                continue
            if sentence := priors()[mention.setting].refusal(mention.setting, amount.value):
                raise ConfigError(f"topic {topic!r}: {sentence}")
    if kind == "diagnosis":
        mentions = tuple(replace(mention, given=True) for mention in mentions)
    ignored = [word for question in questions for word in ([question.text] if question in beside else question.ignored)]
    return ParsedTopic(kind, mentions, tuple(dict.fromkeys(ignored)), rivals)


def check_one(topic: str, asking: Sequence[Question]) -> None:
    """Raises `ConfigError` for two questions, unless one is about nothing else than the other."""
    first, *others = asking
    for other in others:
        ours, theirs = first.settings, other.settings
        if not ours or not theirs or not (ours <= theirs or theirs <= ours):
            raise ConfigError(
                f"topic {topic!r} asks two questions, {first.text!r} and {other.text!r}: one question a study; plan "
                "the other by itself"
            )


def check_conditions(topic: str, mentions: Sequence[Mention]) -> None:
    """Raises `ConfigError` for a condition that has two values."""
    for setting in dict.fromkeys(mention.setting for mention in mentions if mention.given):
        given = [amount for mention in mentions if mention.setting == setting for amount in mention.amounts]
        values = [f"{amount.value:g}" for amount in given if amount.value is not None]
        if len(set(values)) > 1:
            raise ConfigError(
                f"topic {topic!r} gives {setting} two values, {' and '.join(values)}, beside another comparison: one "
                f"setting is compared at a time; ask for '{setting.rpartition('.')[2]} {' vs '.join(values)}', or give "
                "it one value"
            )


def kind_of(said: TopicKind | None, asked: Sequence[Mention], *, rivals: bool) -> TopicKind:
    """Named choices and numbers are compared whatever else is said; without a word for it, the setting decides."""
    goes_wrong = said in ("diagnosis", "reward_shaping")
    if said == "ablation" or (said and goes_wrong and not asked):
        return said
    named = any(mention.choice or len(mention.amounts) > goes_wrong for mention in asked)
    if named or (said == "a_against_b" and rivals):
        return "a_against_b"
    prior = priors()[asked[0].setting]
    if prior.choices or prior.switch:
        return "a_against_b"
    if said in ("sweep", "scaling", "diagnosis", "reward_shaping"):
        return said
    return "a_against_b" if prior.off is not None else "scaling"


def unknown(topic: str, words: list[str]) -> str:
    known = [phrase for phrase, meaning in phrases() if meaning]
    near = list(dict.fromkeys(match for word in words for match in difflib.get_close_matches(word, known, 2, 0.5)))
    nearest = near[:5] or [priors()[name].says[0] for name in list(priors())[:5]]
    return (
        f"topic {topic!r} names no setting that the planner knows; the nearest are {', '.join(map(repr, nearest))}. "
        "Say the topic with one of them, or what is to be compared in a file: --space space.toml"
    )
