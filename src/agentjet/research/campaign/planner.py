"""`question_of`: a language model or a coding agent plans the study of a topic, else the offline grammar reads it.

`plan_study` makes the study of a question in a campaign: its arms are commits of the subject, and settings.

A planner gets the registry of factors, the forms, the subject's files, earlier findings and papers. Its plan is a
`StudyQuestion`, which the check of the grammar's questions checks, too. An invalid plan is answered with the reason. A
planner may refuse a topic that no experiment can answer.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from agentjet.client.agent_source import file_and_function
from agentjet.errors import ConfigError
from agentjet.recipes import registry
from agentjet.research.campaign.proposers import (
    PROMPTS,
    REPAIRS,
    CodingAgent,
    LanguageModel,
    ModelTools,
    Tool,
    texts_of,
)
from agentjet.research.campaign.runs import SHORT, Question
from agentjet.research.campaign.strategist import Intervention, Proposer, ProposerAway
from agentjet.research.campaign.subject_repo import SUBJECT, SubjectRepo, parse_subject
from agentjet.research.models import (
    MEASURED,
    Arm,
    Knob,
    Refused,
    Study,
    Subject,
    Value,
    mistake,
    refuse,
    shortened,
    shown_model,
    unknown_key,
)
from agentjet.research.plan import check_arms
from agentjet.research.question import (
    KEY_OF,
    METRICS_IN_WORDS,
    WORDS_OF_FORMS,
    StudyQuestion,
    arms_of,
    check_length,
    checked,
    factors,
    value_in,
)
from agentjet.research.scheduler import estimate_cost
from agentjet.research.topic import read_topic

GRAMMAR = "the offline grammar"
PLANNED = ("form", "varied", "metrics", "equal", "needs", "patches", "expects", "refutes", "cites")
"""Fields of a question that a planner gives."""
REQUIRED = ("form", "varied", "metrics", "expects", "refutes")


@dataclass(frozen=True)
class PlanView:
    """The part of a subject that a planner may read. Nothing in it comes from held-out tasks."""

    files: Mapping[str, str] = field(default_factory=dict)
    judge_source: str = ""
    findings: Sequence[str] = ()
    """Sentences of earlier notebooks."""
    repo: SubjectRepo | None = None
    """Makes arms of patches."""

    @classmethod
    def of(cls, repo: SubjectRepo, findings: Sequence[str] = ()) -> PlanView:
        return cls(repo.files(repo.first), repo.judge_source(), findings, repo)

    @property
    def settings(self) -> dict[str, Value]:
        """Those of a full run. Without a subject those of the default one."""
        given = parse_subject(self.files[SUBJECT], SUBJECT) if SUBJECT in self.files else None
        steps, own = (given.steps, given.settings) if given else (Subject.steps, {})
        return {"job.optimizer.total_steps": steps, **own}

    def rules(self) -> str:
        listed = {name: one for name, one in factors().items() if name != "nothing"}
        settings, lines = self.settings, []
        for name, one in ((name, one) for name, one in listed.items() if not one.refused):
            levels = registry.built_in() if name == "job.recipe" else one.levels
            known: dict[str, Any] = {"factor": name, "words": one.words[:4], "levels": levels}
            known["is_ordered"] = one.ordered
            if name.startswith(("job.", "model.")) and name != "job.recipe":
                known["default"] = value_in(settings, name)
            lines.append(json.dumps(known | ({"needs": one.needs} if one.needs else {})))
        return PROMPTS["plan"].format(
            forms="\n".join(f"{form}: {words.format('...')}" for form, words in WORDS_OF_FORMS.items()),
            factors="\n".join(lines),
            refused="\n".join(f"{name}: {one.refused}" for name, one in listed.items() if one.refused),
            findings="\n".join(self.findings) or "none",
        )


def question_of(topic: str, proposers: Sequence[Proposer], view: PlanView | None = None) -> StudyQuestion:
    """The plan of the first proposer that gives a valid one, else that of the grammar. Raises `ConfigError`."""
    check_length(topic)
    view, used, away = view or PlanView(), Counter[str](), ""
    question = None
    for proposer in proposers:
        begun = time.monotonic()
        try:
            if isinstance(proposer, LanguageModel):
                question = plan_with(proposer, topic, view)
            elif isinstance(proposer, CodingAgent):
                question = plan_by(proposer, topic, view)
        except ProposerAway as error:
            away += f", because {proposer.name} gave no valid plan ({shortened(str(error), 300)})"
        used.update({"hours": (time.monotonic() - begun) / 3600, **getattr(proposer, "used", {})})
        if question is not None:
            break
    if question is None:
        try:
            question = checked(read_topic(topic, view.settings), view.settings)
        except ConfigError as error:
            raise ConfigError(f"{error}{away}") from None
    by = question.planner or (GRAMMAR if away else "")
    return question.model_copy(update={"planner": f"{by}{away}", "used": dict(used)})


def question_in(
    answer: Mapping[str, Any], topic: str, view: PlanView, papers: Mapping[str, str], by: str
) -> StudyQuestion:
    """Returns the question that a planner answered. Raises an error with the reason why it is invalid."""
    for key in answer.keys() - {*PLANNED}:
        raise ConfigError(unknown_key(key, key, PLANNED))
    try:
        question = StudyQuestion.model_validate({**answer, "topic": topic, "planner": by})
    except ValidationError as error:
        raise ConfigError(mistake(error, PLANNED)) from None
    question = checked(question, view.settings, papers)
    for level in (str(level) for one in question.varied if one.factor in KEY_OF for level in one.levels):
        file, _ = file_and_function(level)
        refuse(
            file.endswith(".py") and file not in view.files, f"{level}: the subject has no file {file!r}: patch it in"
        )
    if (repo := view.repo) is not None:
        for level, patch in question.patches.items():
            repo.commit(repo.first, Intervention(level, "agent", patch=patch))
    return question


def plan_schema() -> Tool:
    schema = StudyQuestion.model_json_schema()
    properties = {name: one for name, one in schema["properties"].items() if name in PLANNED}
    return {**schema, "properties": properties, "required": [*REQUIRED]}


# ---- planners --------------------------------------------------------------------------------------------------------


@dataclass
class PlanTools(ModelTools):
    """The tools of a language model that plans. `proposals` has its plan."""

    TOOLS = ("files", "read", "plan", "refuse")
    LAST = ("plan", "refuse")
    topic: str = field(kw_only=True)
    view: PlanView = field(kw_only=True)
    by: str = field(kw_only=True)
    refusal: str = ""

    def schema(self) -> Tool:
        return plan_schema()

    def plan(self, **fields: Any) -> str:
        """Plans the study. `varied` are the factors with the levels to compare; `needs` are factors, each with a word
        why the person must give it; `patches` are unified diffs of the subject's files, with a/ and b/ prefixes.
        """
        self.proposals.append(question_in(fields, self.topic, self.view, self.texts["papers"], self.by))
        return "planned"

    def refuse(self, reason: str) -> str:
        """Refuses the topic, with the reason why no experiment can answer it."""
        if not reason.strip():
            raise ValueError("reason: give it in a sentence")
        self.refusal, self.ended = reason, True
        return "refused"


def plan_with(model: LanguageModel, topic: str, view: PlanView) -> StudyQuestion:
    """Returns the plan of a language model. Raises `ConfigError` if it refuses the topic, and `ProposerAway`."""
    by = f"a language model{f' ({model.limit})' if model.limit else ''}"
    texts = texts_of(view.files, view.judge_source, model.papers)
    tools = PlanTools(texts, topic=topic, view=view, by=by)
    prose = model.converse(tools, view.rules(), f"The topic: {topic}")
    return _plan_of([*tools.proposals, prose][0], "" if tools.proposals else tools.refusal, topic, by)


def plan_by(agent: CodingAgent, topic: str, view: PlanView) -> StudyQuestion:
    """Returns the plan that a coding agent writes. Raises like `plan_with`."""
    task, reason = view.rules() + PROMPTS["plan_file"].format(schema=json.dumps(plan_schema()), topic=topic), ""
    for _ in range(1 + REPAIRS):
        answer = agent.written("question.json", view.files, {"judge.txt": view.judge_source.encode()}, task + reason)
        try:
            if "refuse" in answer:
                break
            return question_in(answer, topic, view, {}, "a coding agent")
        except Exception as error:  # the boundary: an agent may write anything
            reason = f"Your last question.json was invalid: {shortened(str(error))}\n"
    return _plan_of(reason, str(answer.get("refuse", "")), topic, "a coding agent")


def _plan_of(plan: StudyQuestion | str, refusal: str, topic: str, by: str) -> StudyQuestion:
    if refusal:
        raise ConfigError(f"the topic {topic!r} is refused by {by}: {shortened(refusal)}")
    if isinstance(plan, str):
        raise ProposerAway(plan)
    return plan


# ---- the study of a question in a campaign ---------------------------------------------------------------------------


def plan_study(
    question: Question,
    asked: StudyQuestion,
    levels: Mapping[str, Sequence[Value]],
    repo: SubjectRepo,
    knobs: Sequence[Knob] = (),
) -> dict[str, Any]:
    """Returns the study as JSON, the commits of its arms, and what was asked. Every arm that does not set a knob tunes
    it. Raises `ConfigError` for arms that cannot be compared, and for a budget that cannot pay for them.
    """
    first = repo.described(repo.first)
    arms, claims = arms_of(asked, levels, first, repo.num_tasks)
    commits: dict[str, str] = {}
    made, agents = [], {}
    for name, arm in arms.items():
        commits[name] = repo.first
        if arm.patch or arm.keys:
            try:
                commits[name] = repo.arm(repo.first, name, arm.patch, keys=arm.keys)
            except Refused as error:
                raise ConfigError(f"arm {name!r}: {error}") from None
        code = commits[name] if commits[name] != repo.first else ""
        if code:
            agents[name] = arm.keys.get("agent", f"{first.agent} of {code[:8]}")
        tuned = tuple(knob for knob in knobs if knob.name not in arm.changes)
        made.append(Arm(name, dict(arm.changes), tuned, code))
    for knob in knobs:
        refuse(len(knob.values) < 2, f"--tune {knob.name}={knob.values[0]:g}: give two values or more to choose from")
        refuse(
            all(knob.name in arm.changes for arm in made),
            f"--tune {knob.name}: the arms differ in it, so none can tune it: give its values by --level",
        )
    check_arms(made, {"job.optimizer.total_steps": first.steps, **first.settings})
    study = Study(
        asked.topic,
        question.metric if asked.metrics[0] == "score" else METRICS_IN_WORDS[asked.metrics[0]],
        question.sesoi,
        tuple(made),
        claims,
        budget=1.0,
        reserve=Study.reserve if knobs else 0.0,
        looks=question.looks,
        alpha=question.alpha_of_topic(1),
        evaluator=question.evaluator,
        seed=question.seed,
        subject=replace(first, model=shown_model(first.model), agents=agents, code=question.evaluator),
        form=asked.form,
        reading=asked.reading(levels),
    )
    cost, before = estimate_cost(study), 1 + (SHORT * len(made) if question.equal in MEASURED else 0)
    refuse(
        question.budget.runs is not None and question.budget.runs < before + cost.least,
        f"budget = {question.budget.runs} runs: {len(made)} arms with {question.looks[0]} to {question.looks[-1]} "
        f"seeds need {before + cost.least:.0f} to {before + cost.most:.0f} full runs: give more, or fewer levels "
        "(--level)",
    )
    runs = cost.most if question.budget.runs is None else min(cost.most, question.budget.runs - before)
    content = replace(study, budget=round(runs, 6)).to_json()
    return {"study": content, "commits": commits, "asked": asked.model_dump(mode="json")}


def knobs_of(given: Mapping[str, Sequence[Value]]) -> list[Knob]:
    """Raises `ConfigError` for a setting that cannot be tuned."""
    for name, values in given.items():
        wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, int | float)]
        refuse(
            not name.startswith("job.") or bool(wrong),
            f"--tune {name}={values[0]}: numbers of a setting of the job are tuned, such as job.optimizer.lr=1e-5",
        )
    return [Knob(name, tuple(sorted({float(value) for value in values}))) for name, values in given.items()]  # type: ignore[arg-type]
