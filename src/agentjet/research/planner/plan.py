"""From a topic or a file to a `Plan`: the study, its cost, and the page that a person reads before it runs.

`space.toml` names arms, knobs and claims in place of a topic:

    sesoi = 0.02                         # the smallest difference that matters, in units of the score

    [arms.base]                          # the first arm is compared with the others, unless claims are given
    [arms.short]
    agent = "short.py:agent"             # another agent, or another reward in training: the agent returns it
    changes = { "job.max_tokens" = 64 }  # settings that differ from the subject's

    [knobs."job.optimizer.lr"]           # tuned for every arm that does not set it
    low = 1e-6
    high = 1e-3
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentjet.errors import ConfigError
from agentjet.research.confirmation import MIN_SCORES
from agentjet.research.models import EXPECTED, Arm, ArmName, Hypothesis, Knob, Setting, Sign, Study, Subject, Value
from agentjet.research.planner.priors import base_of, check_job, equal_arm, rounded, whole_settings
from agentjet.research.planner.templates import Claim, PlanDraft, draft_plan
from agentjet.research.planner.topics import MEANINGS, ParsedTopic, TopicKind, parse_topic
from agentjet.research.records import validation_message
from agentjet.research.scheduler import CostEstimate, estimate_cost
from agentjet.research.servers import check_changes

MOST_SEEDS = 1000
"""Maximum seeds per arm at the last look."""
MOST_LOOKS = 20
RANGE_VALUES = 25
"""Values of a range, including both ends: finer than any run can distinguish."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SpaceArm(Part):
    changes: dict[str, Value] = {}
    agent: str = ""


class SpaceKnob(Part):
    """`values`, or a range."""

    values: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None
    scale: Literal["log", "linear"] = "log"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        ranged = self.low is not None and self.high is not None
        if bool(self.values) == ranged or ranged != (self.low is not None or self.high is not None):
            raise ValueError("give either values or both low and high")
        if ranged and not self._low() < self._high():
            raise ValueError(f"low = {self.low} is not below high = {self.high}")
        if ranged and self.scale == "log" and self._low() <= 0:
            raise ValueError(f"low = {self.low} has no logarithm; set scale = 'linear', or a low above 0")
        return self

    def ladder(self, *, whole: bool) -> tuple[float, ...]:
        """Returns the values, or those that divide the range, rounded to whole numbers or three digits."""
        if self.values:
            return tuple(sorted(set(self.values)))
        low, high = self._low(), self._high()
        shares = [i / (RANGE_VALUES - 1) for i in range(1, RANGE_VALUES - 1)]
        if self.scale == "linear":
            cuts = [low + share * (high - low) for share in shares]
        else:
            cuts = [math.exp(math.log(low) + share * math.log(high / low)) for share in shares]
        between = {float(round(cut)) if whole else rounded(cut, 3) for cut in cuts}
        return tuple(sorted({low, high, *(value for value in between if low < value < high)}))

    def _low(self) -> float:
        assert self.low is not None
        return self.low

    def _high(self) -> float:
        assert self.high is not None
        return self.high


class SpaceClaim(Part):
    arm: ArmName
    against: ArmName
    sign: Sign = "?"
    why: str = ""
    confirmatory: bool = True


class Space(Part):
    """The whole file."""

    arms: Annotated[dict[ArmName, SpaceArm], Field(min_length=2)]
    knobs: dict[str, SpaceKnob] = {}
    hypotheses: tuple[SpaceClaim, ...] = ()
    metric: str = ""
    sesoi: Annotated[float | None, Field(gt=0)] = None
    alpha: float = 0.05
    looks: Annotated[tuple[Annotated[int, Field(le=MOST_SEEDS)], ...], Field(max_length=MOST_LOOKS)] = (4, 8, 12)

    @model_validator(mode="after")
    def _compared_once(self) -> Self:
        claimed: set[frozenset[str]] = set()
        for claim in self.hypotheses:
            if (pair := frozenset((claim.arm, claim.against))) in claimed:
                raise ValueError(
                    f"hypotheses: {claim.arm!r} and {claim.against!r} are compared twice, and a difference has one "
                    "sign: keep one of the claims"
                )
            claimed.add(pair)
        return self

    def draft_plan(self, folder: Path) -> PlanDraft:
        """Raises `ConfigError` for a missing agent. Agents are relative to `folder`."""
        knobs = [Knob(name, tried.ladder(whole=name in whole_settings())) for name, tried in self.knobs.items()]
        arms = [
            Arm(
                name,
                dict(arm.changes),
                tuple(knob for knob in knobs if knob.name not in arm.changes),
                code_hash(folder, arm.agent) if arm.agent else "",
            )
            for name, arm in self.arms.items()
        ]
        first, *others = self.arms
        claims = [
            Claim(claim.arm, claim.against, claim.sign, claim.why, confirmatory=claim.confirmatory)
            for claim in self.hypotheses
        ]
        return PlanDraft(arms, claims or [Claim(other, first, "?") for other in others])


def read_space(path: Path) -> Space:
    """Raises `ConfigError` with the file, the key and the remedy."""
    try:
        return Space.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--space {str(path)!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--space {str(path)!r} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"--space {str(path)!r}: {misfit(error)}") from None


def misfit(error: ValidationError) -> str:
    """Describes the first error."""
    first = error.errors(include_url=False)[0]
    message = validation_message(error)
    if first["type"] != "extra_forbidden":
        return message
    known = sorted({name for part in (Space, SpaceArm, SpaceKnob, SpaceClaim) for name in part.model_fields})
    near = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
    return f"{message}; " + (f"did you mean {near[0]}?" if near else f"those are {', '.join(known)}")


def code_hash(folder: Path, agent: str) -> str:
    """Hash of the file of `FILE.py:FUNCTION` and of the function's name."""
    name, _, function = agent.partition(":")
    path = folder / name
    if not path.is_file() or not function:
        raise ConfigError(f"agent = {agent!r}: give FILE.py:FUNCTION, in {folder}")
    return hashlib.sha256(function.encode() + b"\0" + path.read_bytes()).hexdigest()[:16]


ARMS = ("arm", "changes", "code", "tunes before it is judged")


@dataclass(frozen=True)
class Plan:
    study: Study
    kind: TopicKind | None
    """None if the question came as a file."""
    understood: tuple[tuple[str, str], ...]
    """Words of the topic with the settings they mean."""
    ignored: tuple[str, ...]
    cost: CostEstimate
    notes: tuple[str, ...] = ()
    run_seconds: float | None = None
    servers: int = 1

    def with_study(self, study: Study) -> Plan:
        """Returns the same plan for a changed study."""
        return replace(self, study=study, cost=estimate_cost(study))

    def to_markdown(self) -> str:
        study = self.study
        parts = [
            f"# {study.topic}",
            self._question(),
            "## Claims",
            self._claims(),
            "## Arms",
            self._arms(),
            "## Rules",
            self._rules(),
            "## Cost",
            self._cost(),
            f"Study `{study.id}`. It is fixed with its first journal entry. Later additions are exploratory.",
        ]
        return "\n\n".join(parts) + "\n"

    def _question(self) -> str:
        lines = [f"**Question**: {MEANINGS[self.kind]}" if self.kind else "**Question**: as the file puts it."]
        if self.understood:
            lines.append("Understood: " + "; ".join(f"“{words}” is `{name}`" for words, name in self.understood) + ".")
        if self.ignored:
            lines.append(
                f"Not understood, so not part of the question: {', '.join(f'“{word}”' for word in self.ignored)}."
            )
        return "\n\n".join([*lines, *(f"Note: {note}." for note in self.notes)])

    def _claims(self) -> str:
        rows = []
        for hypothesis in self.study.hypotheses:
            expected = EXPECTED[hypothesis.sign] if hypothesis.sign else f"proposed by {self._proposer(hypothesis)}"
            standing = "confirmatory" if hypothesis.confirmatory else "exploratory"
            rows.append((hypothesis.claim, expected, standing, hypothesis.why or "–"))
        return table(("claim", "expected", "standing", "because"), rows)

    def _proposer(self, hypothesis: Hypothesis) -> str:
        arm = self.study.arm(hypothesis.arm)
        return "a coding agent" if arm.code and arm.name == coded_name(arm.code) else "a language model"

    def _arms(self) -> str:
        """Adds a column with agents if the arms differ in them."""
        subject = self.study.subject
        if subject is None or not subject.agents:
            return table(ARMS, map(arm_row, self.study.arms))
        rows = ((*arm_row(arm), f"`{subject.agent_of(arm.name)}`") for arm in self.study.arms)
        return table((*ARMS, "agent"), rows)

    def _rules(self) -> str:
        study, subject = self.study, self.study.subject
        known = (subject.evaluator or subject.agent if subject else "", study.evaluator)
        evaluator = ", ".join(f"`{name}`" for name in known if name) or "the runner’s"
        looks = ", ".join(map(str, study.looks))
        lines = [
            f"Score: {study.metric}. Smallest effect of interest: **{study.sesoi:g}**; less does not matter.",
            f"Seeds: fresh after tuning, the same for all arms; looks at {looks} an arm; alpha {study.alpha:g} in all, "
            "about: more where that effect is less than a fifth of what seeds differ by, or arms spread unequally.",
            "A claim is supported or refuted when its whole interval lies beyond that effect, practically equivalent "
            "when it lies within at the last look, else inconclusive.",
            f"Evaluator: {evaluator}; it scores every arm.",
        ]
        if study.subject is not None:
            lines.append(
                f"A diverged run whose policy cannot answer scores {study.subject.floor:g}, or the lowest reward of "
                "one of its held-out episodes if that is lower."
            )
        return "\n".join(f"* {line}" for line in lines)

    def _cost(self) -> str:
        study, cost = self.study, self.cost
        lines = [
            f"Budget: **{study.budget:g} full runs**, {study.reserve:.0%} of it for confirming alone, which has what "
            f"exploring leaves, too. Rehearsed on made-up scores, the study takes {cost.least:.1f} runs where all is "
            f"plain, and {cost.most:.1f} where nothing is."
        ]
        if cost.most > study.budget:
            lines.append("The budget may run out before the last look: open claims then end as inconclusive.")
        if self.run_seconds is not None:
            hours = study.budget * self.run_seconds / self.servers / 3600
            lines.append(f"At {self.run_seconds:g} s a run, {self.servers} at a time, that is at most {hours:.1f} h.")
        return "\n\n".join(lines)


def coded_name(code: str) -> str:
    """Name of an arm whose agent a coding agent wrote, from the hash of its changes."""
    return f"agent {code[:6]}"


def arm_row(arm: Arm) -> tuple[str, ...]:
    changes = ", ".join(f"`{name} = {value}`" for name, value in arm.changes.items())
    knobs = "; ".join(f"`{knob.name}`: {tried(knob.values)}" for knob in arm.nuisance)
    return arm.name, changes or "–", f"`{arm.code}`" if arm.code else "–", knobs or "–"


def tried(values: tuple[float, ...]) -> str:
    if len(values) > 8:
        return f"{len(values)} values from {values[0]:g} to {values[-1]:g}"
    return ", ".join(f"{value:g}" for value in values)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


METRIC = "mean reward on the held-out tasks, at the last step"
SESOI = 0.02
"""Default: two points of a hundred, for rewards from 0 to 1."""
LONGEST_TOPIC = 500
"""In characters."""
SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def plan(
    topic: str,
    *,
    budget: str,
    subject: Subject | None = None,
    space: Space | None = None,
    folder: Path = Path(),
    sesoi: float | None = None,
    run_seconds: float | None = None,
    servers: int = 1,
    seed: int = 0,
) -> Plan:
    """Plans a study. Raises `ConfigError` if the topic is not understood, cannot be compared, or exceeds the budget.

    `budget` is in full runs ("60") or in time ("4h"), which needs `run_seconds`. `folder` holds the agents of a space
    file.
    """
    if sesoi is not None and not 0 < sesoi < math.inf:
        raise ConfigError(f"--sesoi {sesoi:g}: give a finite difference above 0; the default is {SESOI:g}")
    if run_seconds is not None and not 0 < run_seconds < math.inf:
        raise ConfigError(f"--run-minutes {run_seconds / 60:g}: give the duration of a full run, above 0 and finite")
    check_topic(topic)
    base: Setting = subject.settings if subject else {}
    if subject:
        check_job(base)
        base = base_of(subject)
    understood = None if space else parse_topic(topic)
    found = space.draft_plan(folder) if space else draft_plan(understood, base) if understood else PlanDraft()
    for arm in found.arms if subject or understood else ():
        check_arm(arm, base)
    if understood or subject:
        check_differ(found.arms, base)
    if space and subject:
        agents = {name: str(folder / arm.agent) for name, arm in space.arms.items() if arm.agent}
        subject = with_agents(subject, agents)
        for arm_name in agents if subject.code else ():
            subject.load_arm_agent(arm_name)
    study = Study(
        topic=topic,
        metric=space.metric if space and space.metric else METRIC,
        sesoi=next(given for given in (sesoi, space.sesoi if space else None, SESOI) if given is not None),
        arms=tuple(found.arms),
        hypotheses=tuple(hypothesis(claim) for claim in found.claims),
        budget=runs_of(budget, run_seconds, servers),
        alpha=space.alpha if space else 0.05,
        looks=space.looks if space else (4, 8, 12),
        evaluator=subject.evaluator_hash() if subject and subject.code else "",
        seed=seed,
        subject=subject,
    )
    cost = estimate_cost(study)
    if cost.least > study.budget:
        raise ConfigError(
            f"budget = {budget}: {study.budget:g} full runs, but the study needs at least {cost.least:.1f}; "
            f"give at least that{cheaper(study, 'in the file' if space else 'in a file: --space space.toml')}"
        )
    return Plan(
        study,
        understood.kind if understood else None,
        tuple(meanings(understood)) if understood else (),
        understood.ignored if understood else (),
        cost,
        tuple(found.notes),
        run_seconds,
        servers,
    )


def check_topic(topic: str) -> None:
    """Raises `ConfigError` for a topic that cannot be a title."""
    if len(topic) > LONGEST_TOPIC:
        raise ConfigError(
            f"the topic has {len(topic)} characters: ask one question in {LONGEST_TOPIC} or fewer; longer "
            "comparisons go in a file, --space space.toml"
        )
    if wrong := next((character for character in topic if unicodedata.category(character) in ("Cc", "Cs")), ""):
        raise ConfigError(f"the topic has the character {wrong!a}, which cannot be printed: remove it")


def cheaper(study: Study, where: str) -> str:
    """Suggests changes that would make the study cheaper."""
    ways = [
        *([f"compare fewer than {len(study.arms)} arms"] if len(study.arms) > 2 else []),
        *(["have less tuned"] if any(arm.nuisance for arm in study.arms) else []),
        *([f"look before {study.looks[0]} seeds"] if study.looks[0] > MIN_SCORES else []),
    ]
    return f", or {' or '.join(ways)}, {where}" if ways else ""


def with_agents(subject: Subject, agents: Mapping[str, str]) -> Subject:
    """Sets agents of some arms, and updates the hashes if there are any."""
    subject = replace(subject, agents={**subject.agents, **agents})
    return subject.with_hashes() if subject.code else subject


def hypothesis(claim: Claim) -> Hypothesis:
    return Hypothesis(
        f"{claim.arm} scores higher than {claim.against}",
        claim.arm,
        claim.against,
        claim.confirmatory,
        sign=claim.sign,
        why=f"{claim.why} ({claim.reference})" if claim.reference else claim.why,
    )


def meanings(understood: ParsedTopic) -> list[tuple[str, str]]:
    named = (
        (mention.words, f"{mention.setting} = {mention.choice}" if mention.choice else mention.setting)
        for mention in understood.mentions
    )
    return list(dict.fromkeys(named))


def check_arm(arm: Arm, base: Setting) -> None:
    """Raises `ConfigError` if a server would refuse the arm at some value of its knobs."""
    longest = max((len(knob.values) for knob in arm.nuisance), default=1)
    for position in range(longest):
        tuned = {knob.name: knob.values[min(position, len(knob.values) - 1)] for knob in arm.nuisance}
        try:
            check_changes({**arm.changes, **tuned})
            check_job({**base, **arm.changes, **tuned})
        except ConfigError as error:
            raise ConfigError(f"arm {arm.name!r}: {error}") from None


def check_differ(arms: Sequence[Arm], base: Setting) -> None:
    """Raises `ConfigError` for two arms that would be trained alike."""
    for number, arm in enumerate(arms):
        if other := equal_arm(arm, arms[:number], base):
            raise ConfigError(f"arm {arm.name!r} does not differ from arm {other.name!r}: give it changes, or an agent")


def runs_of(budget: str, run_seconds: float | None, servers: int) -> float:
    """Returns the full runs that a budget pays for. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", budget.strip().lower())
    unit = match[2].removesuffix("s") if match and match[2] != "s" else "s" if match else ""
    if not match or float(match[1]) <= 0 or unit not in ("", "run", *SECONDS):
        raise ConfigError(f"budget = {budget!r}: give full runs, such as 60, or time, such as 4h or 90m")
    if unit in ("", "run"):
        return float(match[1])
    if run_seconds is None:
        raise ConfigError(
            f"budget = {budget!r}: the duration of a run is unknown; give --run-minutes, or a number of full runs"
        )
    return float(match[1]) * SECONDS[unit] * servers / run_seconds
