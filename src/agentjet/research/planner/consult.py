"""A language model is consulted: before the data, about the plan, and when a study has its findings, about an annex.

It proposes, and is believed nothing. Every answer goes to the journal before it is read, so that a study that is
resumed hears the same; what is not an action of the schema is sent back twice, then refused. No answer is no harm: the
plan stands, and the study ends without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentjet.errors import AgentJetError
from agentjet.research.desk import Desk
from agentjet.research.journal import Book
from agentjet.research.models import Exchange, Finding, Origin, Study
from agentjet.research.planner.actions import PROPOSAL, Action, Refused, as_text, loads, parse
from agentjet.research.planner.course import Course
from agentjet.research.planner.plan import Plan
from agentjet.research.planner.priors import own_values, priors
from agentjet.research.planner.register import Register
from agentjet.research.planner.rehearsal import rehearse

REPAIRS = 2
"""Times an answer that is not as it should be is sent back."""
MAX_ACTIONS = 8
"""Of one answer; the rest of a longer one is not read."""
Message = dict[str, str]
RULES = f"""You advise a study in reinforcement learning. You propose; code decides, runs and judges.
Answer with one JSON object {{"actions": [...]}}, at most {MAX_ACTIONS}, each by the schema. Or {{"actions": []}}.
Numbers come from trials: give no results and no numbers in "why". Name an arm by what it changes, not by how it does: a
name with a word such as "better" is refused. The smallest effect of interest, alpha, the looks,
the evaluator and the budget are fixed. After the data began every claim is exploratory."""


class Silence(AgentJetError):
    """A language model gave no answer."""


class Voice(Protocol):
    """A language model: messages in, text out."""

    def answer(self, messages: Sequence[Message]) -> str:
        """Raises `Silence`."""
        ...


@dataclass(frozen=True)
class ModelAdviser:
    """Asks a model what to add to a study that has its findings."""

    voice: Voice

    def advise(self, desk: Desk, findings: list[Finding]) -> None:
        view = {**view_of(desk.study), "runs_left": round(desk.ledger.left("confirm"), 2)}
        view["findings"] = [
            {"claim": hypothesis.claim, "verdict": found.verdict, "estimate": found.estimate, "seeds": found.seeds}
            for hypothesis, found in zip(desk.study.hypotheses, findings, strict=True)
        ]
        for said in proposals(self.voice, desk.book, f"after {desk.study.id}", view):
            desk.helm.take(said, "llm")


def refine(plan: Plan, voice: Voice, book: Book) -> Plan:
    """The plan with what a model adds to it. The book is the study's, which is fixed when it is first run."""
    draft = Draft(plan.study, book)
    for said in proposals(voice, book, "plan", view_of(plan.study)):
        draft.take(said, "llm")
    return plan.with_study(draft.course.study)


class Draft(Register):
    """A plan that may still be added to, as long as its budget suffices."""

    def __init__(self, study: Study, book: Book, codes: frozenset[str] = frozenset()) -> None:
        super().__init__(Course(study, begun=False, codes=codes), book, lambda: study.budget)

    def granted(self, action: Action, origin: Origin) -> Course:
        course = super().granted(action, origin)
        least = rehearse(course.study).least
        if least > course.study.budget:
            budget = course.study.budget
            raise Refused(f"the study would take {least:.1f} full runs where all is plain, of a budget of {budget:g}")
        return course


def view_of(study: Study) -> dict[str, object]:
    """What a model is told of a study: nothing that was held out."""
    return {
        "topic": study.topic,
        "arms": [arm.to_json() for arm in study.arms],
        "hypotheses": [hypothesis.to_json() for hypothesis in study.hypotheses],
        "looks": study.looks,
        "budget": study.budget,
        "settings": sorted({*own_values(study), *(priors() if study.subject else ())}),
    }


# ---- the conversation -----------------------------------------------------------------------------------------------


def proposals(voice: Voice, book: Book, moment: str, view: dict[str, object]) -> list[object]:
    """What a model proposes at a moment, well-formed or not, each to be judged."""
    schema = json.dumps(PROPOSAL.json_schema())
    messages = [
        {"role": "system", "content": f"{RULES}\nSchema of an action: {schema}"},
        {"role": "user", "content": json.dumps(view, ensure_ascii=False)},
    ]
    recorded = [exchange for exchange in book.exchanges if exchange.moment == moment]
    for attempt in range(1 + REPAIRS):
        exchange = recorded[attempt] if attempt < len(recorded) else asked(voice, book, moment, messages)
        if exchange.failed:
            return []
        actions, complaint = read_answer(exchange.answer)
        if not complaint or attempt == REPAIRS:
            return actions
        messages.append({"role": "assistant", "content": exchange.answer})
        messages.append({"role": "user", "content": f"That is not granted: {complaint}. Answer again, in full."})
    raise AssertionError("unreachable")


def asked(voice: Voice, book: Book, moment: str, messages: Sequence[Message]) -> Exchange:
    """A question put and its answer, on record."""
    question = as_text(messages[-1]["content"])
    try:
        exchange = Exchange(moment, question, as_text(voice.answer(messages), limit=20_000))
    except Silence as silence:
        exchange = Exchange(moment, question, "", failed=as_text(str(silence)))
    book.append("exchange", exchange.to_json())
    return exchange


def read_answer(answer: str) -> tuple[list[object], str]:
    """The actions of an answer as they were said, and the first thing that is wrong about it, or nothing."""
    fenced = re.search(r"```(?:json)?\n(.*?)```", answer, re.DOTALL)
    try:
        content = loads(fenced[1] if fenced else answer)
    except Refused as refusal:
        return [answer], str(refusal)
    actions = content.get("actions") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(actions, list) or set(content) != {"actions"}:
        return [answer], 'the answer is one object with one key, "actions", a list'
    complaint = f"{len(actions)} actions are more than {MAX_ACTIONS}" if len(actions) > MAX_ACTIONS else ""
    for action in actions[:MAX_ACTIONS]:
        try:
            parse(PROPOSAL, action)
        except Refused as refusal:
            complaint = complaint or str(refusal)
    return actions[:MAX_ACTIONS], complaint
