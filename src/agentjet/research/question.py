"""A question that a study answers: the factors in which arms may differ, the check, arms and claims, and the answer.

The registry of factors is `factors.toml` and the schemas of the settings. `topic` and `campaign.planner` make
questions.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from agentjet.config import JobConfig, parse_config
from agentjet.config.loader import check_model_name, parse_value
from agentjet.errors import ConfigError, did_you_mean
from agentjet.recipes import registry
from agentjet.research.models import (
    GIVEN,
    VETOED,
    Declared,
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
from agentjet.research.plan import METRIC, check_job

Form = Literal["compare", "dose_response", "interaction", "scaling", "diagnose", "robustness", "trade_off"]
LONGEST_TOPIC = 1000
Reason = Annotated[str, Field(max_length=2000)]
SHARE = 0.1
"""The smallest change of tokens and seconds that matters."""


class Varied(Declared):
    """A factor of a question, with the levels that are compared. The first level is the usual one, if it is one."""

    factor: str
    levels: tuple[Value, ...] = ()


class Citation(Declared):
    """A paper that a plan builds on."""

    file: str
    says: Reason
    """The sentence that matters for the question."""
    title: str = ""
    """Its first line."""


class StudyQuestion(Declared):
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
def factor_table() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("factors.toml").read_text("utf-8"))
    return found


@cache
def factors() -> dict[str, Factor]:
    """Returns all factors by name: those of `factors.toml`, every setting of a job, and those of the default recipe."""
    given: dict[str, dict[str, Any]] = factor_table()["factor"]
    default = registry.find(registry.DEFAULT)
    types: dict[str, Any] = dict((*_settings(JobConfig, "job"), *_settings(default, "job.recipe")))
    found = {}
    for name in dict.fromkeys((*types, *given)):
        own, levels = given.get(name, {}), tuple(given.get(name, {}).get("levels", ())) or _choices(types.get(name))
        words = (*own.get("words", ()), *([name.rpartition(".")[2].replace("_", " ")] if name in types else ()))
        is_number = bool(levels) and all(isinstance(level, int | float) for level in levels)
        ordered = types[name] in (int, float) if name in types else own.get("ordered", is_number)
        texts = {key: own[key] for key in ("named", "needs", "refused") if key in own}
        if not own.get("hidden"):
            found[name] = Factor(name, words, levels, ordered, **texts)
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


def order_of(level: Value) -> float:
    return float(level) if isinstance(level, int | float) else 0.0


def _shown_levels(levels: Sequence[Value], form: Form) -> str:
    shown = [*map(shown_level, levels)]
    if form == "interaction" and len(shown) > 2:
        return f"{shown[0]} and {shown[-1]}, the ends of {', '.join(shown)}"
    return ", ".join(shown) or "levels to be given"


def shown_level(level: Value) -> str:
    if isinstance(level, bool):
        return "on" if level else "off"
    return f"{level:g}" if isinstance(level, float) else shown_model(str(level))


def value_in(settings: Setting, name: str) -> Value | None:
    """Returns the value of a setting, or of `steps`, with these settings of a subject; None for another factor."""
    if name == "steps":
        return settings.get("job.optimizer.total_steps")
    found: Any = parse_config({key: value for key, value in settings.items() if key != "model.name"})
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, bool | int | float | str) and name.startswith(("job.", "model.")) else None


# ---- the check of a question -----------------------------------------------------------------------------------------


NO_FACTOR = (
    "there is no such factor: give a setting of a job, such as job.temperature, or one that docs/campaigns.md lists"
)
EMPTY = "the topic is empty: give the question, such as 'Does a KL penalty help?'"


def check_length(topic: str) -> str:
    """Raises `ConfigError` for an empty topic, and for one that is too long."""
    refuse(not topic.strip(), EMPTY)
    refuse(
        len(topic) > LONGEST_TOPIC, f"the topic has {len(topic)} characters: give a question of at most {LONGEST_TOPIC}"
    )
    return topic


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
            raise ConfigError(f"{name}: {did_you_mean(name, factors(), NO_FACTOR, separator='.')}")
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
KEY_OF = {"agent": "agent", "prompt": "agent", "reward": "reward", "world": "deployed", "tasks.filter": "tasks"}
"""Factors whose levels are files, with the key of subject.toml that names them."""
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
    if missing := [name for name in question.needs if name not in (*given, *levels, "own_recipe")]:
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
            raise ConfigError(f"{named} {option}: {did_you_mean(name, factors(), NO_FACTOR, separator='.')}")
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
    return tuple(sorted(own, key=order_of)) if is_ordered else own


def _arm_name(levels: Setting) -> str:
    text = " ".join(f"{name.rpartition('.')[2]} {shown_level(level)}" for name, level in levels.items())
    return re.sub(r"[^\w .+-]+", "-", text)[:40].strip()


def _arm(
    levels: Setting, question: StudyQuestion, given: Mapping[str, Sequence[Value]], subject: Subject
) -> PlannedArm:
    """Returns an arm with one level of each factor. With equal episodes, larger batches mean fewer of them."""
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
    metric = question.metrics[0]
    claimed = partial(Hypothesis, sign="?", metric=metric, sesoi=0.0 if metric == "score" else SHARE)
    if question.form == "interaction":
        none, other, one, both = arms
        weights = {both: 1.0, one: -1.0, other: -1.0, none: 1.0}
        factor, beside = levels[0]
        yield claimed(f"the effect of {factor} depends on {beside}", both, none, weights=weights)
        for arm, against in ((one, none), (both, other)):
            yield claimed(f"{arm} against {against}", arm, against)
        return
    if question.form == "scaling":
        claim = f"{metric} grows with each doubling of {next(iter(levels[0]))}"
        yield claimed(claim, arms[-1], arms[0], sign="+", weights=_slope(arms, levels))
        if len(arms) == 2:  # The only step is the slope.
            return
    in_order = question.form in ("dose_response", "scaling")
    for number, arm in enumerate(arms[1:], 1):
        against = arms[number - 1] if in_order else arms[0]
        for place, metric in enumerate(question.metrics):
            verb = "scores higher than" if metric == "score" else f"takes more {metric} than"
            sesoi, is_main = 0.0 if metric == "score" else SHARE, place == 0 or question.form == "trade_off"
            claim = f"{arm} {verb} {against}"
            yield claimed(claim, arm, against, metric=metric, sesoi=sesoi, confirmatory=is_main)


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
    vetoed = found.reason.startswith(VETOED)
    if vetoed or found.estimate is None or found.low is None or found.high is None:
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
            return f"{text}: no difference of {matters:g} or more, {size}."
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
