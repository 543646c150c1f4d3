"""From a topic in English to a question with a form: what differs, at which levels, and what is measured.

A small grammar over the registry of factors, `factors.toml` and the schemas of the settings. It is a reader of
phrases, not of meaning: a topic without a known word is refused with the nearest questions, and every plan has the
reading of its topic, with the words that played no part.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from agentjet.errors import ConfigError
from agentjet.recipes import registry
from agentjet.research.models import Metric, Setting, Value, refuse
from agentjet.research.question import (
    EMPTY,
    MOST_ARMS,
    Factor,
    Form,
    StudyQuestion,
    Varied,
    check_length,
    checked,
    factor_table,
    factors,
    order_of,
    shown_level,
    value_in,
)


@cache
def _pattern(*names: str) -> re.Pattern[str]:
    """Returns the pattern of a list of alternatives in the table."""
    found: Any = factor_table()
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


def read_topic(topic: str, settings: Setting | None = None) -> StudyQuestion:
    """Reads a topic. `settings` are the subject's, with which levels are compared. Raises `ConfigError`."""
    words = _words(check_length(topic))
    refuse(not words, EMPTY)
    letters = [character for character in topic if character.isalpha()]
    if 2 * sum(map(str.isascii, letters)) < len(letters):
        raise ConfigError(f"the topic {topic!r} is not in English: translate it, or give a language model (--llm)")
    text = f" {' '.join(words)} "
    amount = _pattern("amounts").search(text)
    amounts = {
        factor_table()["equal"][next(filter(None, found.groups()))] for found in _pattern("amounts").finditer(text)
    }
    if len(amounts) > 1:
        raise ConfigError(f"the topic {topic!r} holds {' and '.join(sorted(amounts))} equal: keep one of them")
    known, used = _named([*words] if amount is None else _without(words, text, amount))
    for one in known:
        if one.factor.refused:
            raise ConfigError(f"the topic {topic!r} asks about {one.factor.name}: {one.factor.refused}")
    equal = next(iter(amounts), "episodes")
    form: Form = next((form for form in factor_table()["cues"] if _pattern("cues", form).search(text)), "compare")
    fillers = _words(factor_table()["fillers"])  # They change nothing once factors, numbers and cues were found.
    unread = list(dict.fromkeys(word for word in _unread(words, used, text) if word not in fillers))
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
    if has_levels and (odd := _pattern("odd_numbers").search(topic.lower().replace("−", "-"))):
        raise ConfigError(
            f"the topic {topic!r} has {odd[0].strip()!r}, which is no plain number: write numbers such as 0.05, 1e-5 "
            "or 4000, with a blank between them; shares of the tasks are given by --level tasks.number=1/4"
        )
    numbers, left_out = _numbers(words, known, used) if form != "diagnose" else ([], [])
    metrics = _metrics(" ".join(word for at, word in enumerate(words) if at not in used), form, known)
    if form != "diagnose":
        form = _form(form, _varied(known, numbers, form, settings), len(numbers), text)
    if len(metrics) > 1 and form not in ("diagnose", "interaction"):
        form = "trade_off"
    varied = _varied(known, numbers, form, settings)
    if unread and any(one.factor == "job.recipe" and len(one.levels) == 1 for one in varied):  # It asks about another.
        raise ConfigError(_not_understood(topic, unread))
    metrics = metrics if form == "trade_off" else metrics[-1:]
    needs = {one.factor.name: one.factor.needs for one in known if one.factor.needs}
    named = tuple(dict.fromkeys((*unread, *left_out)))
    asked = StudyQuestion(
        topic=topic, form=form, varied=varied, metrics=metrics, equal=equal, needs=needs, unread=named
    )
    return checked(asked if form != "diagnose" else asked.model_copy(update={"metrics": ("score",), "needs": {}}))


def _questions(topic: str) -> list[str]:
    """Returns the clauses of a topic that are about different things."""
    found: list[tuple[str, set[str]]] = []
    for clause in filter(None, _pattern("clauses").split(topic)):
        names = {one.factor.name for one in _named(_words(clause))[0] if not one.is_time}
        if names and not any(names & known for _, known in found):
            found.append((clause.strip(" ?.;!"), names))
    return [clause for clause, _ in found]


def _words(topic: str) -> list[str]:
    """Returns the words in lower case and in the singular."""
    plain = re.sub(r"(?<=[a-z])[-/](?=[a-z])", " ", topic.lower().replace("×", " x ").replace("'s", ""))
    if (powers := _pattern("powers")).search(plain):

        def doubled(found: re.Match[str]) -> str:
            first, last = int(found[1]), int(found[2])
            return " ".join(str(first * 2**power) for power in range(MOST_ARMS) if first * 2**power <= last)

        plain = _pattern("ranges").sub(doubled, powers.sub("", plain))
    plain = re.sub(r"\b(?:job|model)\.(?:[a-z]+\.)*(?=[a-z])|_", " ", plain)
    plain = re.sub(r"-(?=\d+(?:\.\d+)?b\b)", " ", plain.replace("dr. ", "dr "))
    return [_stem(word) for word in _pattern("words").findall(plain)]


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
    is_number = [word[0].isdigit() or word in factor_table()["numbers"] for word in words] + [False]
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
    units, relative = factor_table()["units"], factor_table()["relative"]
    found: list[tuple[str, int | float]] = []
    left_out: list[str] = []
    for row in _rows(words):
        at, number = row[0][0], row[-1][0]
        after = words[number + 1] if number + 1 < len(words) else ""
        nearest = min(ordered, key=lambda one: _distance(one, at, number), default=None)
        is_other = after in units and number + 1 not in used and nearest and not _is_unit(after, nearest.factor)
        if nearest is None or is_other or after in relative:
            left_out += [
                f"{words[place]} {after}" if after in (*units, *relative) else words[place] for place, _ in row
            ]
        else:
            found += [(nearest.factor.name, value) for _, value in row]
    return found, left_out


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
        if not is_plain and word not in factor_table()["numbers"]:
            continue
        if row and any(between not in ("and", "or", "to") for between in words[row[-1][0] + 1 : at]):
            yield row
            row = []
        row.append((at, factor_table()["numbers"].get(word) or (int(word) if word.isdigit() else float(word))))
    if row:
        yield row


def _varied(
    known: Sequence[Read], numbers: Sequence[tuple[str, int | float]], form: Form, settings: Setting | None
) -> tuple[Varied, ...]:
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
    base = str((settings or {}).get("job.recipe.name", registry.DEFAULT))
    if any(one.factor.name == "own_recipe" for one in known):
        levels.setdefault("job.recipe", [])
    elif levels.get("job.recipe") == [base] and len(levels) > 1:  # It says where the others are varied.
        del levels["job.recipe"]
    if (recipes := levels.get("job.recipe")) is not None and (len(recipes) < 2 or base in recipes):
        recipes[:] = [base, *(name for name in recipes if name != base)]
        recipes += [registry.DEFAULT] if recipes == [base] != [registry.DEFAULT] else []
    return tuple(
        Varied(factor=name, levels=_compared(factors()[name], own, form, settings)) for name, own in levels.items()
    )


def _usual(factor: Factor, settings: Setting | None) -> tuple[Value, ...]:
    """Returns the usual levels of a factor around the subject's own value, in the same proportions."""
    usual, own = factor.levels, None if settings is None else value_in(settings, factor.name)
    if own is None or not usual or own == usual[0]:
        return usual
    numbers = [level for level in (own, *usual) if isinstance(level, int | float) and not isinstance(level, bool)]
    if len(numbers) <= len(usual) or not usual[0] or not own:
        return (own, *(level for level in usual if level != own))
    kind, first = type(usual[0]), numbers[1]
    scaled = [float(f"{numbers[0] * level / first:.3g}") for level in numbers[1:]]
    return tuple(dict.fromkeys(int(level) if kind is int else level for level in scaled if level >= 1 or kind is float))


def _compared(factor: Factor, own: list[Value], form: Form, settings: Setting | None) -> tuple[Value, ...]:
    """Returns the named levels if there are several, in their order, else the usual ones."""
    usual = _usual(factor, settings)
    if form == "interaction" and all(isinstance(level, int | float) for level in usual):
        usual = tuple(sorted(usual, key=order_of))
    if factor.name == "job.recipe":
        return tuple(own)
    if len(own) > 1:
        return tuple(sorted(own, key=order_of))
    if len(own) == 1 and (own[0] not in usual or form == "interaction"):  # Of an interaction the ends are compared.
        return (*[level for level in usual if level != own[0]][:1], own[0])
    if form == "dose_response" and len(usual) == 2 and isinstance(usual[1], float) and usual[0] == 0:
        return 0.0, usual[1] / 10, usual[1], usual[1] * 10
    return usual


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
    if form == "scaling" and names[0] in factor_table()["scales"]:
        return form
    if factors()[names[0]].ordered and num_numbers != 2:
        asks_whether = form != "dose_response" and _pattern("switches").search(text) is not None
        is_switch = asks_whether and not num_numbers
        return "compare" if is_switch else "dose_response"
    return "compare"


def _metrics(text: str, form: Form, known: Sequence[Read]) -> tuple[Metric, ...]:
    """Returns what a topic measures: the score first, if it names it beside something that costs."""
    measured = f" {_pattern('amounts').sub('', text)} "
    found: list[Metric] = [name for name in factor_table()["metrics"] if _pattern("metrics", name).search(measured)]
    costs = [name for name in found if name != "score"]
    if form == "trade_off" and not costs:
        costs = ["seconds" if any(one.factor.name == "job.max_turns" for one in known) else "tokens"]
    if costs and ("score" in found or form == "trade_off"):
        return "score", costs[0]
    return (costs[0] if costs else "score",)


def _unread(words: Sequence[str], used: set[int], text: str) -> Iterator[str]:
    """Yields the words that are in no factor, number or cue."""
    patterns = [("amounts",), *((kind, name) for kind in ("metrics", "cues") for name in factor_table()[kind])]
    in_cues = {word for names in patterns for found in _pattern(*names).finditer(text) for word in found[0].split()}
    for at, word in enumerate(words):
        is_number = word in factor_table()["numbers"] or word[0].isdigit()
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
    return (
        f"the topic {topic!r} was not understood: {what}. Near ones are {questions}. Ask in English and in such words, "
        "or give a language model (--llm)"
    )
