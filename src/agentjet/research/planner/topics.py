"""From the words of a topic to a kind of question and the settings it is about. What was not understood is said.

Word matching, longest phrase first, over the packaged priors: no language model, and no guess either.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from agentjet.errors import ConfigError
from agentjet.research.planner.priors import priors

Kind = Literal["sweep", "ablation", "a_against_b", "reward_shaping", "scaling", "diagnosis"]
MEANINGS: dict[Kind, str] = {
    "sweep": "does tuning gain anything over the present value?",
    "ablation": "what is lost when a part is taken away?",
    "a_against_b": "which of these scores higher?",
    "reward_shaping": "does another reward in training raise the score that counts?",
    "scaling": "what does more of it bring, step by step?",
    "diagnosis": "which remedy helps a training that goes wrong?",
}
KIND_WORDS: dict[Kind, str] = {
    "reward_shaping": "reward shaping, shaped reward, length penalty, length bonus, format reward, bonus",
    "diagnosis": "why, collapse, collapses, diverge, diverges, unstable, diagnose, stuck, does not learn",
    "ablation": "ablation, ablations, ablate, removing, remove, leaving out, leave out, needed, need",
    "sweep": "sweep, sweeps, best, tune, tuning, optimal, search, which value",
    "scaling": "scale, scales, scaling, larger, more, bigger, smaller, increase, increasing, how many",
    "a_against_b": "vs, versus, against, or, compared, compare, better, than, beat, beats, help, helps",
}
"""In the order in which the first one found decides."""
FILLERS = frozenset(
    re.findall(
        r"\w+",
        """a agent agents all an and any are at be by can do does doing effect effects for from good has have high how
        if in instead is it its low matter matters model much my no not of on our over performance policy reward score
        should so still the this to training train rl use used using value values we what when where which while who
        will with without work""",
    )
)


@dataclass(frozen=True)
class Mention:
    """A setting that a topic speaks of: by itself, as one of its choices, or with numbers."""

    setting: str
    words: str
    choice: str = ""
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Understood:
    kind: Kind
    mentions: tuple[Mention, ...]
    ignored: tuple[str, ...]
    """Words that mean nothing to the planner."""

    @property
    def settings(self) -> list[str]:
        """In the order they are first spoken of."""
        return list(dict.fromkeys(mention.setting for mention in self.mentions))


def understand(topic: str) -> Understood:
    """Raises `ConfigError` when the topic names neither a known setting nor a question that needs none, or a value that
    its setting cannot have.
    """
    words = normal(topic).split()
    mentions: list[Mention] = []
    kinds: set[Kind] = set()
    ignored: list[str] = []
    position = 0
    while position < len(words):
        length, meaning = longest(words, position)
        phrase = " ".join(words[position : position + max(1, length)])
        number = as_number(phrase)
        if isinstance(meaning, Mention):
            mentions.append(meaning)
        elif meaning:
            kinds.add(meaning)
        elif number is not None and mentions and not mentions[-1].choice:
            last = mentions[-1]
            mentions[-1] = Mention(last.setting, last.words, values=(*last.values, number))
        elif phrase not in FILLERS:
            ignored.append(phrase)
        position += max(1, length)
    kind = next((kind for kind in KIND_WORDS if kind in kinds), None)
    if not mentions and kind not in ("diagnosis", "reward_shaping"):
        raise ConfigError(unknown(topic, ignored))
    for mention in mentions:
        for value in mention.values:
            if sentence := priors()[mention.setting].refusal(mention.setting, value):
                raise ConfigError(f"topic {topic!r}: {sentence}")
    return Understood(kind_of(kind, mentions), tuple(mentions), tuple(ignored))


def kind_of(said: Kind | None, mentions: list[Mention]) -> Kind:
    """Named choices and numbers are compared whatever else is said; without a word for it, the setting decides."""
    if said == "ablation" or (said in ("diagnosis", "reward_shaping") and not mentions):
        return said
    named = any(mention.choice or len(mention.values) > 1 for mention in mentions)
    if named or (said == "a_against_b" and len(mentions) > 1):
        return "a_against_b"
    prior = priors()[mentions[0].setting]
    if prior.choices or prior.switch:
        return "a_against_b"
    if said in ("sweep", "scaling", "diagnosis", "reward_shaping"):
        return said
    return "a_against_b" if prior.off is not None else "scaling"


def unknown(topic: str, words: list[str]) -> str:
    known = [phrase for phrase, _ in phrases()]
    near = list(dict.fromkeys(match for word in words for match in difflib.get_close_matches(word, known, 2, 0.5)))
    nearest = near[:5] or [priors()[name].says[0] for name in list(priors())[:5]]
    return (
        f"topic {topic!r} names no setting that the planner knows; the nearest are {', '.join(map(repr, nearest))}. "
        "Say the topic with one of them, or what is to be compared in a file: --space space.toml"
    )


# ---- words ----------------------------------------------------------------------------------------------------------


def normal(text: str) -> str:
    """Lower case, words apart by single blanks; signs inside numbers stay."""
    return " ".join(
        re.findall(
            r"(?<![\w.])-?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?|[a-z0-9]+(?:'s)?", text.lower().replace("ß", "ss")
        )
    )


def as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


@cache
def phrases() -> tuple[tuple[str, Mention | Kind], ...]:
    """Every phrase that means something."""
    found: dict[str, Mention | Kind] = {word: kind for kind, words in KIND_WORDS.items() for word in words.split(", ")}
    for name, prior in priors().items():
        for phrase in (*prior.says, name, name.rpartition(".")[2]):
            found.setdefault(normal(phrase), Mention(name, phrase))
        for choice, said in prior.choices.items():
            for phrase in (*said, *([choice] if "_" in choice else [])):
                found[normal(phrase)] = Mention(name, phrase, choice)
    return tuple(found.items())


def longest(words: list[str], position: int) -> tuple[int, Mention | Kind | None]:
    """The longest phrase that begins here: how many words, and what it means."""
    best: tuple[int, Mention | Kind | None] = (0, None)
    for phrase, meaning in phrases():
        parts = phrase.split()
        if len(parts) > best[0] and words[position : position + len(parts)] == parts:
            best = (len(parts), meaning)
    return best
