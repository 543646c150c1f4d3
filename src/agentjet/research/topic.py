"""From a topic in English to a question with a form: what differs, at which levels, and what is measured.

A small grammar over the registry of factors, `factors.toml` and the schemas of the settings. It is a reader of
phrases, not of meaning: a topic without a known word is refused with the nearest questions, and every plan has the
reading of its topic, with the words that played no part.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from agentjet.config import JobConfig, parse_config
from agentjet.config.loader import check_model_name, parse_value
from agentjet.errors import ConfigError, did_you_mean
from agentjet.recipes import registry
from agentjet.research.models import (
    Equal,
    Finding,
    Hypothesis,
    Metric,
    Setting,
    Study,
    Subject,
    Value,
    number_of,
    refuse,
    shortened,
    shown_model,
)
from agentjet.research.plan import METRIC, PlanPart, check_job

Form = Literal["compare", "dose_response", "interaction", "scaling", "diagnose", "robustness", "trade_off"]
LONGEST_TOPIC = 1000
Reason = Annotated[str, Field(max_length=2000)]
SHARE = 0.1
"""The smallest change of tokens and seconds that matters."""


class Varied(PlanPart):
    """A factor of a question, with the levels that are compared. The first level is the usual one, if it is one."""

    factor: str
    levels: tuple[Value, ...] = ()


class Citation(PlanPart):
    """A paper that a plan builds on."""

    file: str
    says: Reason
    """The sentence that matters for the question."""
    title: str = ""
    """Its first line."""


class StudyQuestion(PlanPart):
    """A question whose answer a study can be planned for."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # A language model reads the schema.

    topic: str
    form: Form
    varied: tuple[Varied, ...] = ()
    """Factors in which the arms differ. Interactions have two, diagnoses and trade-offs any number, others one."""
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = ("score",)
    """Fixed before the data; the first one decides. In a trade-off, the aim for the second one is a small value."""
    equal: Equal = "episodes"
    """The amount that is equal for all arms."""
    needs: Mapping[str, str] = Field(default_factory=dict)
    """Things that a person must give before the study can begin, by factor."""
    unread: tuple[str, ...] = ()
    """Words of the topic that played no part."""
    patches: Mapping[str, str] = Field(default_factory=dict)
    """By level of a factor that is code: the unified diff of the subject's files that makes it. One level of each such
    factor has none: the subject as it is.
    """
    expects: Reason = ""
    """The result that the author of the plan expects. It decides nothing."""
    refutes: Reason = ""
    """A result that would refute it."""
    cites: tuple[Citation, ...] = ()
    planner: str = ""
    """Origin of the plan, if it is not the grammar alone."""
    used: Mapping[str, float] = Field(default_factory=dict)
    """Cost of asking planners: `hours`, tokens `read` and `written`, and their `price`."""

    def reading(self, given: Mapping[str, Sequence[Value]] = {}) -> str:
        """Returns the sentence by which a person sees how the topic was read. `given` are levels as in `arms_of`."""
        levels = {one.factor: given.get(one.factor, one.levels) for one in self.varied}
        shown = [f"{name} ({_shown_levels(own, self.form)})" for name, own in levels.items()]
        measured = " and ".join(self.metrics)
        equal = "" if any(one.factor == "steps" for one in self.varied) else f", at equal {self.equal}"
        more = {
            "these words played no part": ", ".join(self.unread),
            "planned by": self.planner,
            "expected": self.expects,
            "refuted by": self.refutes,
            "related work": ", ".join(f"{one.title} ({one.file}): {one.says}" for one in self.cites),
        }
        parts = [f"{WORDS_OF_FORMS[self.form].format(' × '.join(shown))}", f"measured: {measured}{equal}"]
        parts += [f"{name}: {' '.join(text.split())}" for name, text in more.items() if text]
        return "".join(letter if letter.isprintable() else " " for letter in "; ".join(parts))


WORDS_OF_FORMS: Mapping[Form, str] = {
    "compare": "Which is better: {}",
    "dose_response": "Up to where does more of it matter: {}",
    "interaction": "Does the effect of one depend on the other: {}",
    "scaling": "How does the result grow with it: {}",
    "diagnose": "What keeps the agent from learning? {}",
    "robustness": "What does the trained policy lose in a changed world: {}",
    "trade_off": "What does a gain in one cost in the other: {}",
}


# ---- the registry ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Factor:
    """Something in which the arms of a study may differ."""

    name: str
    words: tuple[str, ...]
    """Phrases by which a topic names it."""
    levels: tuple[Value, ...] = ()
    ordered: bool = False
    """True if more or less of it can be had."""
    named: Mapping[str, Value] = field(default_factory=dict)
    """Levels by the phrases that name them."""
    needs: str = ""
    refused: str = ""


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("factors.toml").read_text("utf-8"))
    return found


@cache
def factors() -> dict[str, Factor]:
    """Returns all factors by name: those of `factors.toml`, every setting of a job, and those of the default recipe."""
    given: dict[str, dict[str, Any]] = dict(_table()["factor"])
    found: dict[str, Factor] = {}
    for name, annotation in (*_settings(JobConfig, "job"), *_settings(registry.find(registry.DEFAULT), "job.recipe")):
        own = given.pop(name, {})
        if own.get("hidden"):
            continue
        levels = tuple(own.get("levels", ())) or _choices(annotation)
        words = (*own.get("words", ()), name.rpartition(".")[2].replace("_", " "))
        found[name] = Factor(name, words, levels, annotation in (int, float), own.get("named", {}))
    for name, own in given.items():
        levels = tuple(own.get("levels", ()))
        is_number = bool(levels) and all(isinstance(level, int | float) for level in levels)
        ordered = own.get("ordered", is_number)
        words = tuple(own.get("words", ()))
        named = own.get("named", {})
        found[name] = Factor(name, words, levels, ordered, named, own.get("needs", ""), own.get("refused", ""))
    return found


def _settings(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the settings of a section that one value can set, by name, with their types."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from () if kind.__module__.startswith("agentjet.recipes") else _settings(kind, f"{prefix}.{name}")
        elif kind in (int, float, bool, str) or get_origin(kind) is Literal:
            yield f"{prefix}.{name}", kind


def _choices(annotation: Any) -> tuple[Value, ...]:
    if annotation is bool:
        return False, True
    return get_args(annotation) if get_origin(annotation) is Literal else ()


# ---- the grammar -----------------------------------------------------------------------------------------------------

EQUAL: Mapping[str, Equal] = {
    "token": "tokens",
    "episode": "episodes",
    "step": "steps",
    **dict.fromkeys(("second", "time", "hour", "minute", "wall clock"), "seconds"),
}


@cache
def _pattern(*names: str) -> re.Pattern[str]:
    """Returns the pattern of a list of alternatives in the table."""
    found: Any = _table()
    for name in names:
        found = found[name]
    return re.compile("|".join(found))


class Read(NamedTuple):
    """A factor that a topic names."""

    factor: Factor
    at: int
    """Place of its first word."""
    last: int
    """Place of its last word."""
    level: Value | None = None
    is_time: bool = False
    """True if it names a time of the question, such as "after RL"."""


EMPTY = "the topic is empty: give the question, such as 'Does a KL penalty help?'"


def check_length(topic: str) -> str:
    """Raises `ConfigError` for an empty topic, and for one that is too long."""
    refuse(not topic.strip(), EMPTY)
    refuse(
        len(topic) > LONGEST_TOPIC, f"the topic has {len(topic)} characters: give a question of at most {LONGEST_TOPIC}"
    )
    return topic


def read_topic(topic: str) -> StudyQuestion:
    """Reads a topic. Raises `ConfigError` for one that no study can answer, or that was not understood."""
    words = _words(check_length(topic))
    refuse(not words, EMPTY)
    letters = [character for character in topic if character.isalpha()]
    if 2 * sum(map(str.isascii, letters)) < len(letters):
        raise ConfigError(f"the topic {topic!r} is not in English: translate it, or give a language model (--llm)")
    text = f" {' '.join(words)} "
    amount = _pattern("amounts").search(text)
    amounts = {EQUAL[next(filter(None, found.groups()))] for found in _pattern("amounts").finditer(text)}
    if len(amounts) > 1:
        raise ConfigError(f"the topic {topic!r} holds {' and '.join(sorted(amounts))} equal: keep one of them")
    known, used = _named([*words] if amount is None else _without(words, text, amount))
    for one in known:
        if one.factor.refused:
            raise ConfigError(f"the topic {topic!r} asks about {one.factor.name}: {one.factor.refused}")
    equal = next(iter(amounts), "episodes")
    form: Form = next((form for form in _table()["cues"] if _pattern("cues", form).search(text)), "compare")
    unread = list(dict.fromkeys(word for word in _unread(words, used, text) if word not in _fillers()))
    if form == "robustness" and {one.factor.name for one in known} <= {"agent", "prompt", "steps", "tasks.order"}:
        known = [Read(factors()["world"], 0, 0)]
    if form == "trade_off" and not known and "tokens" in _metrics(text, form, known):
        known = [Read(factors()["job.recipe"], 0, 0, "alp")]
    known += _choices_named(words, known, used)
    if form not in ("interaction", "scaling", "dose_response") or len(known) > 1:
        known = [one for one in known if not (one.is_time and form != "interaction")]
    if not known and form != "diagnose":
        raise ConfigError(_not_understood(topic, unread))
    if any(one.factor.name == "world" for one in known):  # Its policy is trained in any case.
        known = [one for one in known if one.factor.name not in ("steps", "agent", "prompt")]
    if form not in ("diagnose", "interaction") and len(parts := _questions(topic)) > 1:
        raise ConfigError(
            f"the topic asks {len(parts)} questions, {' and '.join(map(repr, parts))}: ask one at a time; or ask if "
            "the effect of one depends on the other"
        )
    has_levels = form != "diagnose" and any(one.factor.ordered and one.level is None for one in known)
    if has_levels and (odd := ODD_NUMBER.search(topic.lower().replace("−", "-"))):
        raise ConfigError(
            f"the topic {topic!r} has {odd[0].strip()!r}, which is no plain number: write numbers such as 0.05, 1e-5 "
            "or 4000, with a blank between them; shares of the tasks are given by --level tasks.number=1/4"
        )
    numbers, left_out = _numbers(words, known, used) if form != "diagnose" else ([], [])
    metrics = _metrics(" ".join(word for at, word in enumerate(words) if at not in used), form, known)
    if form != "diagnose":
        form = _form(form, _varied(known, numbers, form), len(numbers), text)
    if len(metrics) > 1 and form not in ("diagnose", "interaction"):
        form = "trade_off"
    varied = _varied(known, numbers, form)
    metrics = metrics if form == "trade_off" else metrics[-1:]
    needs = {one.factor.name: one.factor.needs for one in known if one.factor.needs}
    named = tuple(dict.fromkeys((*unread, *left_out)))
    asked = StudyQuestion(
        topic=topic, form=form, varied=varied, metrics=metrics, equal=equal, needs=needs, unread=named
    )
    return checked(asked if form != "diagnose" else asked.model_copy(update={"metrics": ("score",), "needs": {}}))


CLAUSES = re.compile(
    r"(?<!e\.g)(?<!i\.e)(?<!\bvs)[?.;!]\s+|,?\s+(?:and|then)\s+(?=(?:which|how|does|do|should|is|are|can|test|check|what|whether|if)\b)",
    re.IGNORECASE,
)


def _questions(topic: str) -> list[str]:
    """Returns the clauses of a topic that are about different things."""
    found: list[tuple[str, set[str]]] = []
    for clause in filter(None, CLAUSES.split(topic)):
        names = {one.factor.name for one in _named(_words(clause))[0] if not one.is_time}
        if names and not any(names & known for _, known in found):
            found.append((clause.strip(" ?.;!"), names))
    return [clause for clause, _ in found]


@cache
def _fillers() -> frozenset[str]:
    """Returns the words that change nothing in a topic once its factors, numbers and cues were found."""
    return frozenset(_words(_table()["fillers"]))


WORD = re.compile(r"\d+(?:\.\d+)?b\b|\d+(?:\.\d+)?(?:e[+-]?\d+)?|[^\W\d_][\w+-]*")
ODD_NUMBER = re.compile(
    r"[\d.]+\s?(?:%|percent\b|‰)|[\d.]*\d[kmx]\b"  # Units.
    r"|\S*\d(?:\^|\*\*|\s?[·×*⋅]\s?10\b)\S*"  # Powers.
    r"|(?<![\d/.,])\d+[/,]\d+(?![\d/.,e])|\b\d{1,3}(?:,\d{3})+(?![\d,])"  # One or two?
    r"|(?<![\d.])\.\d+|\d+\.\d+\.\d+|\d['_]\d+|(?<![\w.+-])0\d+|(?<![\w.)])-\d[\w.-]*|\d+e\+?\d{3,}",
    re.ASCII,
)
"""Numbers with a unit, a power or a sign, and those that could be two."""


POWERS = r"\b(?:in )?powers? of (?:two|2)\b|\b(?:repeatedly )?doubl(?:ing|ed)(?: repeatedly)?\b"
RANGE = re.compile(r"\b(\d+) (?:up )?to (\d+)\b", re.ASCII)


def _doubled(first: int, last: int) -> str:
    """The numbers from one to another, each twice the one before."""
    return " ".join(str(first * 2**power) for power in range(MOST_ARMS) if first * 2**power <= last)


def _words(topic: str) -> list[str]:
    """Returns the words in lower case and in the singular."""
    plain = re.sub(r"(?<=[a-z])[-/](?=[a-z])", " ", topic.lower().replace("×", " x ").replace("'s", ""))
    if re.search(POWERS, plain):
        plain = RANGE.sub(lambda found: _doubled(int(found[1]), int(found[2])), re.sub(POWERS, "", plain))
    plain = re.sub(r"\b(?:job|model)\.(?:[a-z]+\.)*(?=[a-z])|_", " ", plain)
    plain = re.sub(r"-(?=\d+(?:\.\d+)?b\b)", " ", plain.replace("dr. ", "dr "))
    return [_stem(word) for word in WORD.findall(plain)]


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def _choices_named(words: Sequence[str], known: Sequence[Read], used: set[int]) -> list[Read]:
    """Returns the levels among the words that are choices of the named settings, such as `k1` of an estimator."""
    found = []
    for one in {read.factor.name: read.factor for read in known if read.factor.name != "job.recipe"}.values():
        choices = {str(level): level for level in one.levels if isinstance(level, str)}
        for at, word in enumerate(words):
            if at not in used and word in choices:
                used.add(at)
                found.append(Read(one, at, at, choices[word]))
    return found


@cache
def _phrases() -> list[tuple[list[str], Factor, Value | None]]:
    """Returns the phrases of all factors and recipes as words, the longest first."""
    recipe = factors()["job.recipe"]
    found: list[tuple[list[str], Factor, Value | None]] = [
        (_words(phrase), factor, None) for factor in factors().values() for phrase in factor.words
    ]
    for factor in factors().values():
        found += [(_words(phrase), factor, level) for phrase, level in factor.named.items()]
    for name in registry.built_in():
        found += [(_words(shown), recipe, name) for shown in {name, name.replace("_", " ")} if shown != "sft"]
    return sorted(found, key=lambda one: -len(one[0]))


def _named(words: Sequence[str]) -> tuple[list[Read], set[int]]:
    """Returns the factors that a topic names, in their order, and the places of the words that name them.

    Numbers, and what joins them, may stand within a phrase.
    """
    found: list[Read] = []
    is_number = [word[0].isdigit() or word in _table()["numbers"] for word in words] + [False]
    joins = [word in ("and", "or", "to") and is_number[at + 1] for at, word in enumerate(words)]
    places = [at for at in range(len(words)) if not is_number[at] and not joins[at]]
    plain = [words[at] for at in places]
    used: set[int] = set()
    for phrase, factor, level in _phrases():
        for at in range(len(plain) - len(phrase) + 1):
            own = {*places[at : at + len(phrase)]}
            if plain[at : at + len(phrase)] == phrase and not own & used:
                used |= own
                found.append(Read(factor, min(own), max(own), level, is_time=phrase[0] == "after"))
    for at, word in enumerate(words):
        if re.fullmatch(r"\d+(?:\.\d+)?b", word):
            used.add(at)
            found.append(Read(factors()["model"], at, at, word.upper()))
    known = [one for one in found if one.factor.name != "nothing"]
    return sorted(known, key=lambda one: one.at), used


def _without(words: Sequence[str], text: str, found: re.Match[str]) -> list[str]:
    """Returns the words of a topic, with those of an amount replaced by blanks."""
    first, last = len(text[: found.start()].split()), len(text[: found.end()].split())
    return [" " if first <= at < last else word for at, word in enumerate(words)]


def _numbers(
    words: Sequence[str], known: Sequence[Read], used: set[int]
) -> tuple[list[tuple[str, int | float]], list[str]]:
    """Returns the levels among the numbers of a topic, each with its factor, and the other numbers in words.

    Numbers in a row belong to the factor with an order that they stand before (`4 epochs`), else to the nearest one
    that they follow, else to the next. Amounts of other things (`20 steps`, `3 times`) are left out.
    """
    ordered = [one for one in known if one.factor.ordered and one.level is None]
    found: list[tuple[str, int | float]] = []
    left_out: list[str] = []
    for row in _rows(words):
        at, number = row[0][0], row[-1][0]
        after = words[number + 1] if number + 1 < len(words) else ""
        nearest = min(ordered, key=lambda one: _distance(one, at, number), default=None)
        is_other = after in UNITS and number + 1 not in used and nearest and not _is_unit(after, nearest.factor)
        if nearest is None or is_other or after in RELATIVE:
            left_out += [
                f"{words[place]} {after}" if after in (*UNITS, *RELATIVE) else words[place] for place, _ in row
            ]
        else:
            found += [(nearest.factor.name, value) for _, value in row]
    return found, left_out


UNITS = ("step", "batch", "episode", "task", "token", "turn", "epoch", "run", "gpu", "hour", "minute", "second", "day")
RELATIVE = ("time", "fold", "more", "fewer")


def _distance(one: Read, first: int, last: int) -> tuple[bool, int]:
    """Returns what is smallest for the factor that owns the numbers from one place to another."""
    return one.at > last + 1, one.at - last - 1 if one.at > last else max(0, first - one.last)


def _is_unit(word: str, factor: Factor) -> bool:
    """True if a phrase of the factor counts in the word: the last one, or a plural. A `step size` counts no steps."""
    phrases = (factor.name.replace(".", " ").replace("_", " "), *factor.words)
    return any(
        one.endswith("s") or place == len(phrase)
        for phrase in map(str.split, phrases)
        for place, one in enumerate(phrase, 1)
        if _stem(one) == word
    )


def _rows(words: Sequence[str]) -> Iterator[list[tuple[int, int | float]]]:
    """Yields the numbers of a topic with their places, those in a row together."""
    row: list[tuple[int, int | float]] = []
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if (word == "one" and before not in ("than", "or", "of", "and", "to")) or (word == "two" and before == "the"):
            continue  # A pronoun.
        is_plain = word[0].isdigit() and not word.endswith("b")
        if not is_plain and word not in _table()["numbers"]:
            continue
        if row and any(between not in ("and", "or", "to") for between in words[row[-1][0] + 1 : at]):
            yield row
            row = []
        row.append((at, _table()["numbers"].get(word) or (int(word) if word.isdigit() else float(word))))
    if row:
        yield row


def _varied(known: Sequence[Read], numbers: Sequence[tuple[str, int | float]], form: Form) -> tuple[Varied, ...]:
    """Returns the factors with the levels that the topic names, or their usual ones."""
    names = dict.fromkeys(one.factor.name for one in known if one.factor.name not in ("teacher", "own_recipe"))
    levels: dict[str, list[Value]] = {name: [] for name in names}
    for one in known:
        if one.level is not None and one.level not in levels[one.factor.name]:
            levels[one.factor.name].append(one.level)
    for name, number in numbers:
        if number not in levels[name]:
            levels[name].append(number)
        elif len(levels[name]) == 1:
            raise ConfigError(f"{name} = {shown_level(number)} is named twice: name two different levels, or one")
    if any(one.factor.name == "own_recipe" for one in known):
        levels.setdefault("job.recipe", [registry.DEFAULT])
    elif (recipes := levels.get("job.recipe")) is not None and (len(recipes) < 2 or registry.DEFAULT in recipes):
        recipes[:] = [registry.DEFAULT, *(name for name in recipes if name != registry.DEFAULT)]
    return tuple(Varied(factor=name, levels=_compared(factors()[name], own, form)) for name, own in levels.items())


def _compared(factor: Factor, own: list[Value], form: Form) -> tuple[Value, ...]:
    """Returns the named levels if there are several, in their order, else the usual ones."""
    usual = factor.levels
    if form == "interaction" and all(isinstance(level, int | float) for level in usual):
        usual = tuple(sorted(usual, key=_order))
    if factor.name == "job.recipe":
        return tuple(own)
    if len(own) > 1:
        return tuple(sorted(own, key=_order))
    if len(own) == 1 and (own[0] not in usual or form == "interaction"):  # Of an interaction the ends are compared.
        return (*[level for level in usual if level != own[0]][:1], own[0])
    if form == "dose_response" and len(usual) == 2 and isinstance(usual[1], float) and usual[0] == 0:
        return 0.0, usual[1] / 10, usual[1], usual[1] * 10
    return usual


def _order(level: Value) -> float:
    return float(level) if isinstance(level, int | float) else 0.0


def _form(form: Form, varied: Sequence[Varied], num_numbers: int, text: str) -> Form:
    """Returns the form that fits the factors of a question.

    A changed world is one of robustness, several factors are an interaction, an order makes a dose. A single factor
    with an order is compared if two levels are named, or if the topic asks whether it helps.
    """
    names = [one.factor for one in varied]
    if form == "diagnose" or (form == "trade_off" and names):
        return form
    if "world" in names or (form == "robustness" and "tasks.filter" in names):
        return "robustness"
    if len(names) > 1:
        return "interaction"
    if form == "scaling" and names[0] in SCALES:
        return form
    if factors()[names[0]].ordered and num_numbers != 2:
        asks_whether = form != "dose_response" and _pattern("switches").search(text) is not None
        is_switch = asks_whether and not num_numbers
        return "compare" if is_switch else "dose_response"
    return "compare"


SCALES = ("steps", "tasks.number", "model", "job.batch_size", "job.group_size")
"""Factors along which a result may grow."""


def _metrics(text: str, form: Form, known: Sequence[Read]) -> tuple[Metric, ...]:
    """Returns what a topic measures: the score first, if it names it beside something that costs."""
    measured = f" {_pattern('amounts').sub('', text)} "
    found: list[Metric] = [name for name in _table()["metrics"] if _pattern("metrics", name).search(measured)]
    costs = [name for name in found if name != "score"]
    if form == "trade_off" and not costs:
        costs = ["seconds" if any(one.factor.name == "job.max_turns" for one in known) else "tokens"]
    if costs and ("score" in found or form == "trade_off"):
        return "score", costs[0]
    return (costs[0] if costs else "score",)


def _unread(words: Sequence[str], used: set[int], text: str) -> Iterator[str]:
    """Yields the words that are in no factor, number or cue."""
    patterns = [("amounts",), *((kind, name) for kind in ("metrics", "cues") for name in _table()[kind])]
    in_cues = {word for names in patterns for found in _pattern(*names).finditer(text) for word in found[0].split()}
    for at, word in enumerate(words):
        is_number = word in _table()["numbers"] or word[0].isdigit()
        if at not in used and not is_number and word not in in_cues and word != "x":
            yield word


def _not_understood(topic: str, unread: Sequence[str]) -> str:
    """Returns why a topic was not understood, with the nearest questions."""
    phrases = {" ".join(words): factor for words, factor, _ in _phrases() if not factor.refused}
    wanted = " ".join(unread) or topic.lower()

    def likeness(phrase: str) -> float:
        return max(difflib.SequenceMatcher(None, part, phrase).ratio() for part in (wanted, *wanted.split()))

    near = list(dict.fromkeys(phrases[phrase].words[0] for phrase in sorted(phrases, key=likeness, reverse=True)))[:3]
    questions = "; ".join(f"'Does the {phrase} matter?'" for phrase in near)
    what = (
        f"its words {', '.join(map(repr, unread))} name nothing that a study can change"
        if unread
        else "it names nothing that a study can change"
    )
    return f"the topic {topic!r} was not understood: {what}. Near ones are {questions}"


def _shown_levels(levels: Sequence[Value], form: Form) -> str:
    shown = [*map(shown_level, levels)]
    if form == "interaction" and len(shown) > 2:
        return f"{shown[0]} and {shown[-1]}, the ends of {', '.join(shown)}"
    return ", ".join(shown) or "levels to be given"


def shown_level(level: Value) -> str:
    if isinstance(level, bool):
        return "on" if level else "off"
    return f"{level:g}" if isinstance(level, float) else shown_model(str(level))


# ---- the check of a question -----------------------------------------------------------------------------------------


def checked(
    question: StudyQuestion, settings: Setting | None = None, papers: Mapping[str, str] = MappingProxyType({})
) -> StudyQuestion:
    """Returns a question with what a person must give for it, and with the titles of its papers.

    `settings` are those of the subject, if it is known: then a server must take the levels. Raises `ConfigError` for
    factors, levels and papers that do not exist, and for levels and forms that do not fit.
    """
    names = [one.factor for one in question.varied]
    for name in (*names, *question.needs):
        if name not in factors():
            raise ConfigError(f"{name}: {did_you_mean(name, factors(), 'there is no such factor', separator='.')}")
        if why := factors()[name].refused:
            raise ConfigError(f"the topic {question.topic!r} asks about {name}: {why}")
        refuse(name in question.needs and not factors()[name].needs, f"needs: {name} is set by a study: give levels")
    needs = {name: factors()[name].needs for name in question.needs}
    for one in question.varied:
        needs |= _needs(one, question) if question.form != "diagnose" else {}
        refuse(len(one.levels) > MOST_ARMS, f"{one.factor}: {len(one.levels)} levels: give at most {MOST_ARMS}")
        refuse(len({*map(str, one.levels)}) < len(one.levels), f"{one.factor}: a level is named twice in {one.levels}")
        is_given = one.factor in needs or (one.factor == "job.recipe" and "own_recipe" in needs)
        refuse(
            len(one.levels) < 2 and not is_given and question.form != "diagnose",
            f"{one.factor} has the levels {one.levels}: give two or more to compare",
        )
        for level in one.levels:
            _check_level(one.factor, level)
            _check_together({one.factor: level}, settings)
    _check_form(question, names)
    if len(names) > 1 and question.form != "diagnose":
        for setting in _combined(question.form, {one.factor: one.levels for one in question.varied}):
            _check_together(setting, settings)
    code = {level for one in question.varied if one.factor in KEY_OF for level in one.levels}
    for level in question.patches.keys() - code:
        raise ConfigError(
            f"patches: {level!r} is not a level of {', '.join(KEY_OF)}: name the level that a patch makes"
        )
    for cited in question.cites:
        if cited.file not in papers:
            raise ConfigError(f"cites: {did_you_mean(cited.file, papers, 'there is no paper ' + repr(cited.file))}")
    titles = {name: text.strip().partition("\n")[0].strip("# ")[:200] for name, text in papers.items()}
    cites = tuple(one.model_copy(update={"title": titles[one.file]}) for one in question.cites)
    return question.model_copy(update={"needs": needs, "cites": cites})


def _needs(one: Varied, question: StudyQuestion) -> dict[str, str]:
    """Returns what a person must give for the levels of a factor, by factor."""
    own = [str(level) for level in one.levels]
    if one.factor in KEY_OF:
        made = [level for level in own if level in question.patches or FILE_AND_FUNCTION.search(level)]
        if made and len(own) - len(made) <= 1 < len(own):
            return {}
        refuse(bool(made), f"{one.factor} = {one.levels}: all but one need a patch, or are FILE.py:FUNCTION")
    if one.factor == "model" and own and all(map(_is_model, own)):
        return {}
    name = "teacher" if one.factor == "job.recipe" and "distill" in own else one.factor
    return {name: needed} if (needed := factors()[name].needs) else {}


def _is_model(name: str) -> bool:
    try:
        check_model_name(name, "model")
    except ConfigError:
        return False
    return True


FILE_AND_FUNCTION = re.compile(r"\.py:\w+$|\.jsonl$")
LONGEST_LEVEL, LONGEST_RUN = 160, 1_000_000
PLAIN_TASKS = re.compile(r"all|1/[1-9]\d*|[1-9]\d*")


def _check_level(name: str, level: Value) -> None:
    """Raises `ConfigError` for a level that no arm can have."""
    factor, is_number = factors()[name], isinstance(level, int | float) and not isinstance(level, bool)
    wrong = f"{name} = {level!r}: "
    if name in ("job.recipe", "job.recipe.name"):
        known = registry.built_in()
        if level not in known:
            why = f"there is no recipe {level!r} (one of your own: needs = own_recipe)"
            raise ConfigError(wrong + did_you_mean(str(level), known, why))
    elif name == "tasks.number":
        refuse(PLAIN_TASKS.fullmatch(str(level)) is None, f"{wrong}give a number of tasks, a share such as 1/4, or all")
    elif name in ("steps", "job.max_turns"):
        is_count = type(level) is int and 1 <= level <= LONGEST_RUN
        refuse(not is_count, f"{wrong}give a whole number from 1 to {LONGEST_RUN}")
    elif name.startswith(("job.", "model.")):
        refuse(factor.ordered and not is_number, f"{wrong}give a number")
        refuse(factor.levels == (False, True) and not isinstance(level, bool), f"{wrong}give true or false")
    else:
        wrong_text = not isinstance(level, str) or not 0 < len(level.strip()) <= LONGEST_LEVEL
        refuse(wrong_text, f"{shortened(wrong, LONGEST_LEVEL)}give a text of at most {LONGEST_LEVEL} characters")


def _check_together(levels: Setting, settings: Setting | None) -> None:
    """Raises `ConfigError` if a server refuses these levels with the subject's settings."""
    own = {"job.recipe.name" if name == "job.recipe" else name: level for name, level in levels.items()}
    own = {name: level for name, level in own.items() if name.startswith(("job.", "model."))}
    if own and settings is not None:
        check_job({**settings, **own})


NUMBER_OF_FACTORS: Mapping[Form, range] = {"interaction": range(2, 3), "diagnose": range(10), "trade_off": range(1, 10)}
"""Numbers of factors that a form may have. All other forms have one."""


def _check_form(question: StudyQuestion, names: Sequence[str]) -> None:
    """Raises `ConfigError` for factors and metrics that do not fit a form."""
    form, number = question.form, len(names)
    first, wanted = names[0] if names else "", NUMBER_OF_FACTORS.get(form, range(1, 2))
    refuse(len({*names}) < number, f"varied: a factor is named twice in {', '.join(names)}")
    refuse(number not in wanted, f"form = {form!r}: it has {wanted[0]} to {wanted[-1]} factors, and not {number}")
    is_unordered = form in ("dose_response", "scaling") and not factors()[first].ordered
    is_odd = form == "robustness" and first not in ("world", "tasks.filter")
    refuse(len({*question.metrics}) < len(question.metrics), f"metrics: one is named twice in {question.metrics}")
    refuse(form == "trade_off" and len(question.metrics) < 2, "form = 'trade_off': give two metrics, the aim first")
    refuse(is_unordered, f"form = {form!r}: more or less of {first} cannot be had: take form = 'compare'")
    refuse(is_odd, f"form = 'robustness': its factor is world or tasks.filter, not {first}")


def _combined(form: Form, levels: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Returns the levels of each arm: in an interaction the ends. Raises `ConfigError` for too many."""
    if form == "interaction":
        levels = {name: (own[0], own[-1]) for name, own in levels.items() if own}
    number = math.prod(map(len, levels.values()))
    refuse(number > MOST_ARMS, f"{number} arms: give fewer levels (--level), so that there are {MOST_ARMS}")
    return [dict(zip(levels, values, strict=True)) for values in product(*levels.values())]


# ---- from a question to arms and claims ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedArm:
    """One side of a comparison."""

    changes: Setting
    """Settings, and those of `OF_SUBJECT`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of subject.toml: see `KEY_OF`."""
    patch: str = ""
    """A unified diff of the subject's files."""


MOST_ARMS = 12
SIZES = ("job.group_size", "job.batch_size")
GIVEN = "given"
"""Level of a factor that is code: the subject's own."""
KEY_OF = {"agent": "agent", "prompt": "agent", "reward": "reward", "world": "deployed", "tasks.filter": "tasks"}
"""Factors whose levels are files, with the key of subject.toml that names them."""
ALIASES = ("own_recipe",)
"""Needs that are levels of another factor."""
METRICS_IN_WORDS: Mapping[Metric, str] = {
    "score": METRIC,
    "tokens": "tokens of an answer in training, at the end of a run",
    "seconds": "seconds of training",
}


def arms_of(
    question: StudyQuestion, given: Mapping[str, Sequence[Value]], subject: Subject, num_tasks: Callable[[], int]
) -> tuple[dict[str, PlannedArm], tuple[Hypothesis, ...]]:
    """Returns the arms by name, and the claims by which a question is answered. `given` are levels by factor, which
    replace those of the question. Raises `ConfigError` if a person must give something first.
    """
    topic, known = question.topic, {*(one.factor for one in question.varied), *question.needs}
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"--level {unknown[0]}: the question is about {', '.join(sorted(known)) or 'no factor'}")
    levels: dict[str, tuple[Value, ...]] = {}
    for one in question.varied:
        if one.factor in question.needs and one.factor not in given and not question.patches.keys() & {*one.levels}:
            raise ConfigError(f"{topic!r} needs {question.needs[one.factor]}")
        levels[one.factor] = _levels(one, given, question, num_tasks)
    if missing := [name for name in question.needs if name not in (*given, *levels, *ALIASES)]:
        raise ConfigError(f"{topic!r} needs {question.needs[missing[0]]}")
    if question.equal == "episodes" and levels.keys() == {*SIZES}:
        del levels["job.batch_size"]  # It follows from the size of a group.
    chosen = _combined(question.form, levels)
    names = [_arm_name(one) for one in chosen]
    if len({*names}) < len(names):
        names = [f"{name[:36]} {number}" for number, name in enumerate(names, 1)]
    arms = {name: _arm(one, question, given, subject) for name, one in zip(names, chosen, strict=True)}
    return arms, tuple(_claims(question, names, chosen))


def given_levels(options: Sequence[str], named: str = "--level") -> dict[str, list[Value]]:
    """Reads levels that are given as `FACTOR=VALUE` by the option `named`. Raises `ConfigError`."""
    found: dict[str, list[Value]] = {}
    for option in options:
        name, equals, text = option.partition("=")
        refuse(not equals or not text, f"{named} {option}: give FACTOR=VALUE, such as steps=80")
        if name not in factors():
            raise ConfigError(
                f"{named} {option}: {did_you_mean(name, factors(), 'there is no such factor', separator='.')}"
            )
        found.setdefault(name, []).append(parse_value(text))
    return found


def _levels(
    one: Varied, given: Mapping[str, Sequence[Value]], question: StudyQuestion, num_tasks: Callable[[], int]
) -> tuple[Value, ...]:
    """Returns the levels of a factor that are compared, in their order."""
    name, own = one.factor, tuple(given.get(one.factor, one.levels))
    if name in given and len(one.levels) == 1:
        own = (*one.levels, *own)
    if (name in KEY_OF or name == "warm_start") and (len({*own}) == 1 or name == "world"):
        own = (GIVEN, *own)
    own = tuple(dict.fromkeys(own))
    refuse(len(own) < 2, f"{name}: two levels or more are compared: --level {name}=VALUE, two or more times")
    if "easy_first" in own or "hard_first" in own:
        raise ConfigError(
            f"{question.topic!r} needs the key of the payloads by whose numbers tasks are sorted: "
            "--level tasks.order=shuffled --level tasks.order=KEY (-KEY: downwards)"
        )
    if name in ("model", "warm_start"):
        for model in {*own} - {GIVEN}:
            check_model_name(str(model), f"--level {name}")
        own = tuple(str(Path(str(model)).resolve()) if Path(str(model)).is_dir() else model for model in own)
    if name == "tasks.number":
        own = tuple(_number_of_tasks(level, num_tasks()) for level in own)
    is_ordered = question.form in ("dose_response", "scaling") and all(isinstance(level, int | float) for level in own)
    return tuple(sorted(own, key=_order)) if is_ordered else own


def _arm_name(levels: Setting) -> str:
    text = " ".join(f"{name.rpartition('.')[2]} {shown_level(level)}" for name, level in levels.items())
    return re.sub(r"[^\w .+-]+", "-", text)[:40].strip()


def _arm(
    levels: Setting, question: StudyQuestion, given: Mapping[str, Sequence[Value]], subject: Subject
) -> PlannedArm:
    """Returns an arm with one level of each factor. With equal episodes a larger group means fewer groups
    in a batch, and larger batches mean fewer of them.
    """
    own = {name: levels[name] for name in levels if name in KEY_OF and levels[name] != GIVEN}
    patches = [question.patches[str(level)] for level in own.values() if level in question.patches]
    keys = {KEY_OF[name]: str(level) for name, level in own.items() if level not in question.patches}
    changes = {NAMED_AS.get(name, name): level for name, level in levels.items() if name not in KEY_OF}
    if changes.get("model") == GIVEN:
        del changes["model"]
    if changes.get("job.recipe.name") == "distill":
        changes["job.recipe.teacher"] = given["teacher"][0]
    if question.equal == "episodes" and len(sized := [name for name in SIZES if name in changes]) == 1:
        job = parse_config(subject.settings).job
        size, name = int(number_of(changes, sized[0], 0)), sized[0]
        follows, every = (
            ("job.batch_size", job.batch_size * job.group_size)
            if name == SIZES[0]
            else ("steps", subject.steps * job.batch_size)
        )
        refuse(
            size < 1 or every % size > 0, f"{name} = {size}: {every} is no multiple of it, so {follows} cannot follow"
        )
        changes[follows] = every // size
    return PlannedArm(changes=changes, keys=keys, patch="\n".join(patches))


NAMED_AS = {"job.recipe": "job.recipe.name", "warm_start": "model"}
"""Factors whose name is not that of their setting."""


def _number_of_tasks(level: Value, every: int) -> int:
    """Returns the number of tasks of a level: a number, `all`, or a share such as `1/4`."""
    text = str(level)
    if text == "all":
        return every
    number = every // int(text[2:]) if re.fullmatch(r"1/[1-9]\d*", text) else int(text) if text.isdigit() else 0
    refuse(number < 1, f"tasks.number = {level!r}: give a number, a share such as 1/4, or all")
    refuse(number > every, f"tasks.number = {level!r}: there are {every} training tasks")
    return number


def _claims(question: StudyQuestion, arms: Sequence[str], levels: Sequence[Setting]) -> Iterator[Hypothesis]:
    first, last = arms[0], arms[-1]
    primary = question.metrics[0]
    sesoi = 0.0 if primary == "score" else SHARE
    if question.form == "interaction":
        both, one, other, none = arms[3], arms[2], arms[1], arms[0]
        weights = {both: 1.0, one: -1.0, other: -1.0, none: 1.0}
        factor, beside = levels[0]
        claim = f"the effect of {factor} depends on {beside}"
        yield Hypothesis(claim, both, none, sign="?", weights=weights, metric=primary, sesoi=sesoi)
        for arm, against in ((one, none), (both, other)):
            yield Hypothesis(f"{arm} against {against}", arm, against, sign="?", metric=primary, sesoi=sesoi)
        return
    if question.form == "scaling":
        yield Hypothesis(
            f"{primary} grows with each doubling of {next(iter(levels[0]))}",
            last,
            first,
            sign="+",
            weights=_slope(arms, levels),
            metric=primary,
            sesoi=sesoi,
        )
        if len(arms) == 2:  # The only step is the slope.
            return
    in_order = question.form in ("dose_response", "scaling")
    for number, arm in enumerate(arms[1:], 1):
        against = arms[number - 1] if in_order else first
        for place, metric in enumerate(question.metrics):
            verb = "scores higher than" if metric == "score" else f"takes more {metric} than"
            yield Hypothesis(
                f"{arm} {verb} {against}",
                arm,
                against,
                sign="?",
                metric=metric,
                sesoi=0.0 if metric == "score" else SHARE,
                confirmatory=place == 0 or question.form == "trade_off",
            )


def _slope(arms: Sequence[str], levels: Sequence[Setting]) -> dict[str, float]:
    """Returns the weights of arms by which the slope over the logarithm to base 2 of a level is estimated."""
    values = [next(iter(one.values())) for one in levels]
    numbers = [float(value) for value in values if isinstance(value, int | float) and value > 0]
    places = np.log2(numbers) if len(numbers) == len(values) else np.arange(len(values), dtype=float)
    away = places - places.mean()
    return {arm: float(weight) for arm, weight in zip(arms, away / (away**2).sum(), strict=True)}


# ---- the answer ------------------------------------------------------------------------------------------------------

MANY_MORE = 1000
"""Seeds beyond which no number is given."""


def answer(study: Study, findings: Mapping[str, Finding]) -> list[str]:
    """Returns the sentences that answer the question of a study, from the findings by the id of their claim."""
    known = [(claim, findings[claim.id]) for claim in study.hypotheses if claim.id in findings]
    found = [_sentence(study, claim, finding) for claim, finding in known]
    if study.form == "dose_response" and len(known) == len(study.hypotheses):
        gains = [claim.arm for claim, finding in known if finding.verdict == "supported"]
        falls = [claim.arm for claim, finding in known if finding.verdict == "refuted"]
        last = f"More of it helps up to {gains[-1]}" if gains else "No step to more of it is confirmed to help"
        found.insert(0, f"{last}{f'; from {falls[0]} on it harms' if falls else ''}.")
    if study.form == "trade_off" and len(known) == len(study.hypotheses):
        kept = {claim.arm for claim, finding in known if claim.metric == "score" and finding.verdict in KEPT}
        less = [claim.arm for claim, finding in known if claim.metric != "score" and finding.verdict == "refuted"]
        both = [arm for arm in less if arm in kept]
        found.insert(
            0,
            f"{', '.join(both)} costs less without a loss of score."
            if both
            else "No arm is confirmed to cost less without a loss of score.",
        )
    return found


KEPT = ("supported", "practically_equivalent")


def _sentence(study: Study, claim: Hypothesis, found: Finding) -> str:
    matters, text = claim.sesoi or study.sesoi, claim.claim[0].upper() + claim.claim[1:]
    if found.estimate is None or found.low is None or found.high is None:
        return f"{text}: not decided, because {found.reason}."
    size = f"{found.estimate:+.3g} ({found.low:+.3g} to {found.high:+.3g})"
    if claim.metric != "score":
        size += f" in logarithms, which is {np.expm1(found.estimate):+.0%}"
    match found.verdict:
        case "supported":
            return f"{text}: yes, {size}."
        case "refuted":
            return f"{text}: no, the opposite, {size}."
        case "practically_equivalent":
            return f"{text}: no difference within ± {matters:g}, {size}."
    return f"{text}: not decided, {size}; {_more_seeds(found, matters)}."


def _more_seeds(found: Finding, matters: float) -> str:
    """Returns how many more seeds would decide a claim, if its estimate and its spread stay as they are."""
    assert found.estimate is not None and found.low is not None and found.high is not None
    away, half = abs(abs(found.estimate) - matters), (found.high - found.low) / 2
    wanted = found.seeds * (half / away) ** 2 if away else np.inf
    if not wanted < MANY_MORE:
        return f"more than {MANY_MORE} seeds an arm would be needed, because the effect is about as large as matters"
    if wanted <= found.seeds:
        return f"more seeds alone would not decide it: {found.reason}"
    return f"about {int(np.ceil(wanted)) - found.seeds} more seeds an arm would"
