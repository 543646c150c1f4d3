"""The parts of a study as frozen dataclasses.

    Study ── Subject              the model, agent and tasks of every trial
      ├── Arm ── Knob             fixed before the first trial: what is compared, and how it will be judged
      │    └── Trial ── Outcome   one run of an arm with one seed, and how it ended
      └── Hypothesis ── Finding   a claim, and what the outcomes show about it

The id of a record is the hash of its content, so it is equal in every process. Records are stored as JSON, never
pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from agentjet.client import agent_source
from agentjet.client.agent_source import file_and_function, source_of
from agentjet.client.inputs import load_agent, load_tasks
from agentjet.client.rollout import Agent
from agentjet.errors import AgentJetError, ConfigError, nearest_name
from agentjet.types import Task

# ---- records ---------------------------------------------------------------------------------------------------------

Value = bool | int | float | str | tuple[str, ...]
Setting = Mapping[str, Value]
"""Settings by name, such as `job.optimizer.lr`, as `agentjet serve --set` takes them; of arms and trials also those of
`OF_SUBJECT`."""
OF_SUBJECT = frozenset({"model", "steps", "tasks.number", "tasks.order"})
"""Names that an arm may set besides settings of its server: the base model, the length of its runs, and number and
order of its training tasks."""


def of_server(setting: Setting) -> Setting:
    return {name: value for name, value in setting.items() if name not in OF_SUBJECT}


def shown_model(model: str) -> str:
    """Returns the name of a base model; of a folder without its place, which differs between machines."""
    return Path(model).name if Path(model).is_absolute() else model


def number_of(setting: Setting, name: str, default: float) -> float:
    """Returns the number of a setting. Raises `ConfigError` for another value."""
    value = setting.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} = {value!r}: give a number")
    return value


@cache
def adapter(kind: type) -> TypeAdapter[Any]:
    """Cached, because building an adapter takes a millisecond."""
    return TypeAdapter(kind)


class Record:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)
    LATER: ClassVar[tuple[str, ...]] = ()
    """Fields that records of earlier versions lack. The JSON omits their defaults, so that ids, and seeds that are
    derived from ids, stay as they were.
    """

    @cached_property
    def id(self) -> str:
        """Hash of the content."""
        return hash_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        # Ten times faster than `asdict`. A list where the type has a tuple is the same JSON, and no reason to warn.
        # mypy does not see that a class is hashable.
        content: dict[str, Any] = adapter(type(self)).dump_python(self, warnings=False)  # type: ignore[arg-type]
        for name, value in vars(self).items():
            if isinstance(value, Record):
                content[name] = value.to_json()
            elif isinstance(value, tuple) and any(isinstance(each, Record) for each in value):
                content[name] = tuple(each.to_json() for each in value)
        defaults = {name: getattr(type(self), name, {}) for name in self.LATER}
        return {name: value for name, value in content.items() if name not in defaults or value != defaults[name]}

    @classmethod
    def from_json(cls, content: object) -> Self:
        """Raises `ConfigError` naming the first invalid field."""
        try:
            # mypy does not see that a class is hashable.
            checked: Self = adapter(cls).validate_json(canonical(content), strict=True)  # type: ignore[arg-type]
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {mistake(error)}") from None
        return checked


class Declared(BaseModel):
    """A part of a file, or of the answer of a language model. It is frozen, and takes no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical(content: object) -> str:
    """JSON with one spelling per content. Raises `ValueError` for NaN and infinity."""
    return ENCODER.encode(content)


def hash_of(content: object) -> str:
    """The first 64 bits of the SHA-256 of the content, in hexadecimal."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:16]


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ConfigError(message)


ARM_NAME = r"^[\w.+-][\w .+-]{0,39}$"
"""Up to 40 letters, digits, blanks, dots and any of + - _, without a leading blank."""
LONGEST = 60
"""Maximum characters shown of an invalid value."""
LONGEST_NOTE = 2000


def mistake(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Describes the first error of a validation: the key, the value and what is expected. `known` are names of keys."""
    detail: Any = error.errors(include_url=False)[0]
    *outer, last = detail["loc"] or ("",)
    key, value = ".".join(map(str, (*outer, last))), shortened(repr(detail["input"]), LONGEST)
    message = detail["msg"].removeprefix("Value error, ")
    if last == "bool" and detail["type"].startswith("bool"):  # the first type of a setting's value; no type fits
        key, message = ".".join(map(str, outer)), "it must be text, a number, true or false, or a list of texts"
    elif detail["type"] == "missing":
        return f"{key}: is required"
    elif detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(key, str(last), [*known])
    return f"{key} = {value}: {message[0].lower()}{message[1:]}"


def unknown_key(key: str, name: str, known: Sequence[str]) -> str:
    near = nearest_name(name, known)
    way = f"; did you mean {near}?" if near else f"; the keys are {', '.join(known)}" if known else ""
    return f"{key}: unknown key{way}"


def shortened(text: str, limit: int = LONGEST_NOTE) -> str:
    """Shortens a long text to its beginning and its end. The cause of a failure is usually its last line."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[: half - 5].rstrip()} ... {text[-half:].lstrip()}"


# ---- the subject -----------------------------------------------------------------------------------------------------

Message = dict[str, Any]
"""A message in OpenAI's chat format."""
Judge = Callable[[Task, Sequence[Message]], float]
"""Scores a conversation about a task: `score(task, messages)`. The last message is the answer."""
Equal = Literal["episodes", "steps", "tokens", "seconds"]
MEASURED: tuple[Equal, ...] = ("tokens", "seconds")
"""Amounts that only a run shows. A short run gives the length of an arm's full runs."""
UNSEEN = "unseen."
"""Beginning of the names of facts about inputs that prompts lack."""
NOT_IMPORTED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
FOREIGN_MARKERS = ("study.json", "notebook.sqlite", "journal.jsonl", "journal.sqlite", "pyvenv.cfg")
"""Files that mark a folder as not part of the code beside it: a study, a campaign, a data dir or an environment."""


@dataclass(frozen=True)
class Subject(Record):
    """A model, the agent it is trained in, and the tasks it is scored on. Arms may override parts of it.

    Code and tasks are stored by name: `FILE.py:FUNCTION`, relative to the working directory, or
    `package.module:function`. Tasks may also be a file of JSON lines.
    """

    model: str
    """Base model of every run: a Hugging Face id, a local folder, or `smollm2-135m`."""
    agent: str
    """Plays the training tasks: `agent(task, episode) -> reward`."""
    tasks: str
    """Training tasks: a function that returns tasks, or a file of them (`FILE.jsonl`)."""
    held_out: str
    """Held-out tasks for scoring, named in the same way. They are never trained on."""
    evaluator: str = ""
    """Plays the held-out tasks; its mean reward is the score. Empty: the agent plays them."""
    deployed: str = ""
    """Plays the held-out tasks of a judged subject in place of the agent, as in a changed world."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """By arm, the agents of arms that differ in code or in reward."""
    settings: Setting = field(default_factory=dict)
    """Server settings that are not defaults. Arms and knobs override them."""
    steps: int = 40
    """Batches of a full run."""
    evaluations: int = 4
    """Evenly spaced evaluations of a full run, the last one at its end; one more comes before the first step."""
    repeats: int = 1
    """Episodes per held-out task in an evaluation."""
    concurrency: int = 32
    """Episodes at the same time."""
    models: tuple[str, ...] = ()
    """Base models of single arms, whose files are locked, too."""
    num_tasks: int = 0
    """Training tasks that a run uses: see `chosen_tasks`. 0: all."""
    task_order: str = ""
    """Their order: see `chosen_tasks`."""
    floor: float = 0.0
    """Score of a diverged run whose policy cannot answer; lower if one of the run's held-out episodes earned less."""
    patience: float = 1800.0
    """Maximum seconds of an evaluation, or of the training between two, before the run counts as lost."""
    judged: bool = False
    """The evaluator does not play. It is a `Judge` of the conversations in which the arm's own agent plays."""
    reward: str = ""
    """A `Judge` that pays the training episodes, in place of the reward that the agent returns."""
    hidden: tuple[str, ...] = ()
    """Keys of a held-out payload that only the judge reads. The agent gets those of training tasks."""
    shown: tuple[str, ...] = ()
    """Keys of a payload that a prompt may show."""
    best: float = 1.0
    worst: float = 0.0
    """Scale of a `Judge`: the highest and the lowest score, or the reverse if less is better. Scores of judged runs are
    shares of it.
    """
    readable: tuple[str, ...] = ()
    """Folders that the arm's code may read, the first with the code. Empty: the code is not sandboxed."""
    code: str = ""
    """Hash of the named code and tasks. A study whose files changed is refused."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By file, the hashes behind `code`."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """By file, the hashes of a local model folder. Empty for other models."""
    equal: Equal = "episodes"
    """Amount that is the same in full runs of all arms. `steps_as` and `CampaignRuns` keep it."""
    LATER = (
        *("files", "weights", "judged", "reward", "hidden", "readable", "shown", "models", "num_tasks", "task_order"),
        *("deployed", "equal"),
    )

    def __post_init__(self) -> None:
        refuse(self.steps < 1, f"subject.steps = {self.steps}: a run learns at least 1 batch")
        most = f"give 1 to subject.steps = {self.steps}"
        refuse(not 1 <= self.evaluations <= self.steps, f"subject.evaluations = {self.evaluations}: {most} of them")
        for name, value in (("repeats", self.repeats), ("concurrency", self.concurrency)):
            refuse(value < 1, f"subject.{name} = {value}: give 1 or more")
        refuse(
            not math.isfinite(self.floor), f"subject.floor = {self.floor}: give the lowest score that a run may have"
        )
        refuse(not self.patience > 0, f"subject.patience = {self.patience}: give seconds above 0")
        scale = f"worst = {self.worst:g}, best = {self.best:g}"
        refuse(self.best == self.worst, f"{scale}: give the lowest and the highest score of the judge")
        low, high = sorted((self.worst, self.best))
        refuse(
            self.judged and not low <= self.floor <= high,
            f"floor = {self.floor:g} is outside of the judge's scale, {scale}: give a floor on it, or correct it",
        )
        both = sorted({*self.hidden} & {*self.shown})
        refuse(bool(both), f"{both} is hidden and shown: keep it in one of the two keys")

    def agent_of(self, arm: str) -> str:
        return self.agents.get(arm, self.agent)

    def steps_at(self, fidelity: float) -> int:
        """Number of batches of a run of that fraction of the full length."""
        return max(1, round(self.steps * fidelity))

    def evaluation_steps(self, fidelity: float) -> list[int]:
        """Steps at which such a run is evaluated: 0, those of a full run that it reaches, and its last step."""
        end = self.steps_at(fidelity)
        spaced = {round(self.steps * number / self.evaluations) for number in range(self.evaluations + 1)}
        return sorted({mark for mark in spaced if mark < end} | {end})

    def to_json(self) -> dict[str, Any]:
        content = super().to_json()
        if (self.worst, self.best) == (0.0, 1.0):  # As of a study without a judge.
            del content["worst"], content["best"]
        return content

    def varied(self, setting: Setting) -> Subject:
        """Returns the subject of an arm: with what it sets of `OF_SUBJECT`."""
        steps, model = int(number_of(setting, "steps", self.steps)), str(setting.get("model", self.model))
        return replace(
            self,
            model=model,
            models=self.models if model == self.model else (*self.models, self.model),
            steps=steps,
            evaluations=min(self.evaluations, steps),
            num_tasks=int(number_of(setting, "tasks.number", self.num_tasks)),
            task_order=str(setting.get("tasks.order", self.task_order)),
        )

    def with_hashes(self) -> Subject:
        """Returns the subject with hashes of its code, tasks and model. Raises `ConfigError` for a missing file."""
        named = {self.agent, self.tasks, self.held_out, self.evaluator or self.agent, *self.agents.values()}
        folders = map(Path, dict.fromkeys((self.model, *self.models)))
        files, model = hashes_of(code_files(named)), {str(file): file for one in folders for file in files_below(one)}
        return replace(self, code=digest_of(files), files=files, weights=hashes_of(model))

    def evaluator_hash(self) -> str:
        """Returns the hash of the evaluator and the held-out tasks."""
        return digest_of(hashes_of(code_files({self.evaluator or self.agent, self.held_out})))

    def check_code(self) -> None:
        """Raises `ConfigError` if code, tasks or model changed since the study was fixed."""
        if not self.code:
            return
        now = self.with_hashes()
        for name, before, after in (("code", self.files, now.files), ("model", self.weights, now.weights)):
            wrong = [
                f"{file} {'is new' if file not in before else 'is gone' if file not in after else 'changed'}"
                for file in sorted({*before, *after})
                if before.get(file) != after.get(file)
            ]
            refuse(
                bool(wrong),
                f"subject.{name}: {', '.join(wrong)}. A study is fixed before its data: restore its files, or plan a "
                "new study",
            )

    def as_deployed(self, held_out: Sequence[Task], training: Sequence[Task]) -> list[Task]:
        """Held-out tasks as the agent gets them: hidden values are those of training tasks, or empty without any."""
        others = [task.payload if isinstance(task.payload, Mapping) else {} for task in training]
        shown = []
        for number, task in enumerate(held_out):
            of_task, other = task.payload if isinstance(task.payload, Mapping) else {}, others[number % len(others)]
            hidden = {key: other.get(key, type(of_task[key])()) for key in of_task if key in self.hidden}
            shown.append(replace(task, payload={**of_task, **hidden}) if of_task else task)
        return shown

    def load_arm_agent(self, arm: str) -> Agent:
        """Loads the agent that an arm trains. Raises `ConfigError`."""
        return load_agent(self.agent_of(arm), option="subject.agent")

    def load_evaluator(self) -> Agent:
        """Loads the agent that plays the held-out tasks. Raises `ConfigError`."""
        return load_agent(self.evaluator or self.agent, option="subject.evaluator")

    def training_tasks(self) -> list[Task]:
        """Raises `ConfigError`."""
        return chosen_tasks(load_tasks(self.tasks, option="subject.tasks"), self.num_tasks, self.task_order)

    def held_out_tasks(self) -> list[Task]:
        """Raises `ConfigError`."""
        return load_tasks(self.held_out, option="subject.held_out")


GIVEN = "given"
"""Level of a factor that is code, or the order of tasks: the subject's own."""


def chosen_tasks(tasks: Sequence[Task], number: int, order: str) -> list[Task]:
    """Returns so many of the training tasks, or all for 0, in an order: `given`, `shuffled`, or by the numbers under a
    key of their payloads, upwards, or downwards after a minus. All runs choose and shuffle alike: an order in a file
    may be that of difficulty. Raises `ConfigError`.
    """
    refuse(number > len(tasks), f"tasks.number = {number}: there are {len(tasks)} training tasks; give at most so many")
    places = sorted(range(len(tasks)), key=lambda at: hash_of([tasks[at].task_set, tasks[at].id]))
    chosen = places[: number or len(tasks)]
    if order == "shuffled":
        return [tasks[at] for at in chosen]
    found = [tasks[at] for at in sorted(chosen)]
    if order in ("", GIVEN):
        return found
    key = order.removeprefix("-")
    numbers = [task.payload.get(key) if isinstance(task.payload, Mapping) else None for task in found]
    if missing := [task.id for task, one in zip(found, numbers, strict=True) if not isinstance(one, int | float)]:
        raise ConfigError(
            f"tasks.order = {order!r}: the payload of task {missing[0]!r} has no number {key!r}; give 'given', "
            "'shuffled', or a key of all payloads"
        )
    return sorted(found, key=lambda task: -task.payload[key] if order != key else task.payload[key])


def code_files(named: set[str]) -> dict[str, Path]:
    """The file behind each name, called by its package if that is installed. Python may import all files beside it."""
    found: dict[str, Path] = {}
    for name in named:
        place, function = file_and_function(name)
        file = Path(name) if name.endswith(".jsonl") else source_of(name, option="subject")
        shown = file.parent
        if function and not place.endswith(".py"):
            module = Path(*place.split("."))
            shown = module if file.name == "__init__.py" else module.parent
        beside = [path for path in files_below(file.parent) if path.suffix == ".py"] if file.suffix == ".py" else []
        found |= {str(shown / path.relative_to(file.parent)): path for path in {file, *beside}}
    return found


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder, without hidden files and folders of other projects."""
    for place, folders, names in os.walk(folder):
        here = Path(place)
        own = [] if here.name in NOT_IMPORTED else [one for one in folders if one[0] != "." and one not in NOT_IMPORTED]
        folders[:] = [name for name in own if not any((here / name / file).exists() for file in FOREIGN_MARKERS)]
        yield from (here / name for name in names if not name.startswith("."))


def hashes_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Hashes files in pieces, because weights are large. Raises `ConfigError`."""
    hashes = {}
    for name, file in sorted(files.items()):
        try:
            with file.open("rb") as content:
                hashes[name] = hashlib.file_digest(content, "sha256").hexdigest()[:12]
        except OSError as error:
            raise ConfigError(f"subject: {file}: {error.strerror or error}") from None
    return hashes


def digest_of(hashes: Mapping[str, str]) -> str:
    return agent_source.hash_of({name: digest.encode() for name, digest in hashes.items()})


# ---- the study -------------------------------------------------------------------------------------------------------

TIMES = ("time/sample", "time/wait", "time/learn")
"""Signals that together are the seconds of a step."""
Phase = Literal["explore", "confirm"]
End = Literal["completed", "diverged", "infra_failed", "arm_failed"]
Verdict = Literal["supported", "refuted", "practically_equivalent", "inconclusive"]
Origin = Literal["prior", "llm", "human"]
Sign = Literal["+", "-", "0", "?"]
EXPECTED: Mapping[Sign, str] = {"+": "higher", "-": "lower", "0": "no difference that matters", "?": "nothing is known"}
Metric = Literal["score", "tokens", "seconds"]
"""Score of the held-out tasks, tokens of an answer, and seconds of training."""
MOST_COMBINATIONS = 16
"""Maximum combinations of an arm's knobs. All are tried."""


@dataclass(frozen=True)
class Knob(Record):
    """A nuisance setting that each arm tunes for itself, over the same values."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Arm(Record):
    """One side of a comparison: changes to the base settings, the code it runs, and knobs to tune first."""

    name: str
    changes: Setting = field(default_factory=dict)
    nuisance: tuple[Knob, ...] = ()
    code: str = ""
    """Hash of the agent's code; empty if arms do not differ in code."""

    @property
    def num_settings(self) -> int:
        """Number of combinations of its knobs."""
        return math.prod(len(knob.values) for knob in self.nuisance)


@dataclass(frozen=True)
class Hypothesis(Record):
    """`arm` scores higher than `against`, by more than the study's smallest effect of interest."""

    claim: str
    arm: str
    against: str
    confirmatory: bool = True
    origin: Origin = "prior"
    sign: Sign | None = None
    """Expected sign of the difference, if one is declared. `sign` and `why` decide nothing."""
    why: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of arms, if the claim is about a weighted sum of their means: a slope, or an interaction. They add up
    to 0. Empty: `arm` minus `against`."""
    sesoi: float = 0.0
    """Smallest effect of interest of this claim. 0: that of the study."""
    metric: Metric = "score"
    """The measured quantity. Differences of tokens and of seconds are those of their logarithms, so of shares."""
    LATER = ("sign", "why", "weights", "sesoi", "metric")

    @property
    def contrast(self) -> Mapping[str, float]:
        """Weights by arm."""
        return self.weights or {self.arm: 1.0, self.against: -1.0}


@dataclass(frozen=True)
class Study(Record):
    """A question with everything that decides its answer, fixed before the data.

    Costs are in full runs: a trial of a third of the length costs 1/3. `sesoi` is in units of the metric.
    """

    topic: str
    metric: str
    sesoi: float
    """The smallest effect of interest. A smaller difference does not matter."""
    arms: tuple[Arm, ...]
    hypotheses: tuple[Hypothesis, ...]
    budget: float
    reserve: float = 0.4
    """The share of the budget that tuning may not spend."""
    alpha: float = 0.05
    """Approximate chance of any wrong confirmatory verdict, over all looks. The chance is higher if `sesoi` is less
    than a fifth of the spread between seeds, or if the arms spread unequally (`bench.error_rates`).
    """
    looks: tuple[int, ...] = (4, 8, 12)
    """Seeds per arm at which the scores are tested."""
    rungs: tuple[float, ...] = (1 / 9, 1 / 3, 1.0)
    """Fractions of a full run at which tuning drops the worse candidates."""
    evaluator: str = ""
    """Hash of the code that computes the metric."""
    seed: int = 0
    form: str = ""
    """Form of the question that the topic was read as: see `question.Form`. Empty if a person wrote the arms."""
    reading: str = ""
    """The reading of the topic, in a sentence."""
    spread: float = 0.0
    """Least standard deviation over seeds, if earlier seeds showed one. Few seeds may agree by chance."""
    subject: Subject | None = None
    """The trained subject; None if the runner decides."""
    LATER = ("form", "reading", "spread", "subject")

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        refuse(len(set(names)) < len(names), f"arms = {names}: two arms have the same name; rename one")
        for hypothesis in self.hypotheses:
            for name in (hypothesis.arm, hypothesis.against, *hypothesis.weights):
                refuse(name not in names, f"hypotheses: {name!r} is not an arm of the study; the arms are {names}")
            refuse(hypothesis.arm == hypothesis.against, f"hypotheses: {hypothesis.arm!r} is compared with itself")
            off = sum(hypothesis.weights.values())
            refuse(abs(off) > 1e-9, f"hypotheses: the weights of {hypothesis.claim!r} add up to {off:g}, not to 0")
        refuse(not 0 < self.sesoi < math.inf, f"sesoi = {self.sesoi}: give the smallest relevant difference, above 0")
        refuse(not 0 < self.alpha < 0.5, f"alpha = {self.alpha}: choose one between 0 and 0.5, such as 0.05")
        refuse(not 0 <= self.reserve < 1, f"reserve = {self.reserve}: choose a share from 0 up to, not including, 1")
        refuse(not 0 < self.budget < math.inf, f"budget = {self.budget}: give a number of full runs above 0")
        rising = list(self.looks) == sorted(set(self.looks)) and bool(self.looks)
        refuse(not rising or self.looks[0] < 4, f"looks = {self.looks}: seeds must rise and start at 4 or more")
        climbing = list(self.rungs) == sorted(set(self.rungs)) and bool(self.rungs) and self.rungs[0] > 0
        refuse(not climbing or self.rungs[-1] != 1.0, f"rungs = {self.rungs}: fractions must rise and end with 1.0")
        for arm in self.arms:
            for knob in arm.nuisance:
                refuse(not knob.values, f"nuisance knob {knob.name!r} has no values to try")
            refuse(
                arm.num_settings > MOST_COMBINATIONS,
                f"arm {arm.name!r} would tune {arm.num_settings} combinations of its knobs: give at most "
                f"{MOST_COMBINATIONS}, with fewer values or fewer knobs",
            )

    @property
    def measures_seconds(self) -> bool:
        return any(claim.metric == "seconds" for claim in self.hypotheses)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Trial(Record):
    """A run of an arm with one seed. Its id is its launch key. Trials that differ in `fidelity` continue each other."""

    study: str
    arm: str
    setting: Setting
    """All differences from the base: the arm's changes and the tuned knobs."""
    seed: int
    phase: Phase
    fidelity: float = 1.0

    @cached_property
    def run(self) -> str:
        """Name of the run that it continues."""
        return hash_of([self.study, self.arm, dict(self.setting), self.seed, self.phase])


@dataclass(frozen=True)
class Transcript(Record):
    """A training episode at the end of the run."""

    place: Literal["best", "median", "worst"]
    task: Any
    """The task's payload, without the keys that only the judge sees."""
    messages: tuple[Mapping[str, Any], ...]
    """The conversation of the last call, with the answer."""
    reward: float
    """As training paid."""
    judged: float | None = None
    """Score of the judge for the same messages, as a share of its scale."""


@dataclass(frozen=True)
class Outcome(Record):
    """The end of a trial. A diverged run is a result with a score; an infrastructure failure has no score.

    `arm_failed` has no score either: the arm's own code failed, and a repeat would end the same way. Studies whose
    evaluator plays do not use it, because an agent also fails if its environment does.
    """

    trial: str
    end: End
    score: float | None = None
    """The metric at the trial's last step, not its best value."""
    curve: tuple[float, ...] = ()
    """The metric along the run, for the figures."""
    signals: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Training metrics by name, one value per step. None if a step reported no finite value."""
    settings: Setting = field(default_factory=dict)
    """The settings in effect on the server. Empty if the runner does not report them."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers: see `agentjet.research.diagnosis`; of judged subjects: `JudgedEpisodes`."""
    note: str = ""
    transcripts: tuple[Transcript, ...] = ()
    """Best, median and worst training episodes of a judged subject."""
    by_task: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    """By training task of a judged subject: least and highest reward, and number of episodes."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Versions, hardware and base weights of the run: see `trial_process.machine_of`. Empty if not reported."""

    def measured(self, metric: Metric) -> float | None:
        """The score; or the logarithm of an answer's mean tokens in the last quarter, or of all seconds; if known."""
        if metric == "score" or self.score is None:
            return self.score
        names = ("completion/tokens",) if metric == "tokens" else TIMES
        values = [[value or 0.0 for value in self.signals.get(name, ())] for name in names]
        steps = [sum(step) for step in zip(*values, strict=False)]
        found = fmean(steps[-max(1, len(steps) // 4) :]) if metric == "tokens" and steps else sum(steps)
        return math.log(found) if found > 0 else None

    def __post_init__(self) -> None:
        refuse(
            (self.score is None) != (self.end in ("infra_failed", "arm_failed")),
            f"outcome of trial {self.trial}: end = {self.end!r} with score = {self.score}: every run has a score, "
            "and only a failure of the infrastructure or of the arm's code has none",
        )
        refuse(self.score is not None and not math.isfinite(self.score), f"outcome: score = {self.score} is not finite")


@dataclass(frozen=True)
class Diagnosis(Record):
    """The cause of a problem in a trial: what was seen, and what it means."""

    trial: str
    cause: str
    """A cause from `diagnosis.toml`, or one of the run itself: a lost server, a dead environment, an equal run."""
    seen: str
    meaning: str = ""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the symptom, by name."""


@dataclass(frozen=True)
class Finding(Record):
    """The result of a hypothesis. The verdict was read from this interval."""

    hypothesis: str
    verdict: Verdict
    reason: str
    estimate: float | None = None
    """Mean of `arm` minus mean of `against`, over the confirming seeds only."""
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """Nominal level of the interval at this look. Over all looks it is about 1 - 2 * (the claim's share of alpha),
    because alpha is one-sided.
    """
    p_value: float | None = None
    """Welch's two-sided p-value; None if no scores spread but runs differ. Compare it with 1 - `confidence` of the
    look, not with alpha.
    """
    seeds: int = 0
    """Per arm."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """By arm, the setting that was judged."""
    trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class Address(Record):
    """URL of a run, and the client token or the admin token."""

    url: str
    token: str


VETOED = "vetoed by people"
"""Beginning of the reason of a claim that people did not want to be tested."""


class Refused(AgentJetError):
    """A proposal was refused. The message states the reason for the proposer."""
