"""Healthy subjects (`cases/healthy.toml`), and the statements of a campaign that are false for them.

Their tasks have metadata that prompts need not show, their judges have other scales than 0 to 1, their rewards have
another scale than the judge or are coarser, and in half of them 70 % of the tasks have the same answer. A statement is
false if it names a trouble of the judge, the prompt, the reward or the settings, or if a study's verdict contradicts
fresh seeds. Signs that only repeat what the run reported, such as a score that fell, are not counted.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentjet.errors import ConfigError
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.journal import JournalEntry
from bench.campaigns.planted import NUM_HELD_OUT, NUM_TASKS, answer_to, claims_of, entries_of, jsonl, unloaded, write
from bench.campaigns.world import SubjectRunner
from bench.machine import CASES

TROUBLES = frozenset(
    {
        *("leaking_judge", "same_score", "unseen_input", "overridden_temperature", "overridden_max_tokens"),
        *("reward_rejects", "reward_overpays", "truncated", "held_back", "no_exploration"),
    }
)
"""Signs that name a trouble which no subject here has."""
QUESTIONS = ("largest", "smallest", "first", "last")
FREQUENT = 0.7
BUDGET = 40.0
AGENT = '''"""Asks one question."""

import re

from agentjet import Reward

LOG = []


def agent(task, episode):
    prompt = {notes}"Which of these digits is the {question}? " + {shown}
    text = episode.chat([{{"role": "user", "content": prompt}}])
    return reward(task, text)


def reward(task, text):
    best, worst = {best}, {worst}
{facts}
    return {paid}
'''
FACTS = """    found = re.findall(r"\\d", text)
    answer = str(task.payload["answer"])
    right = found[-1:] == [answer]
    apart = abs(int(found[-1]) - int(answer)) / 9 if found else 1.0
    share = {score}
"""
JUDGE = '''"""The judge: the last digit of the answer counts."""

import re


def judge(task, transcript):
    text = transcript[-1]["content"]
{facts}
    return {worst} + share * ({best} - {worst})
'''
SUBJECT = """model = "world-{seed}"
agent = "agent.py:agent"
tasks = "tasks.jsonl"
held_out = "held_out.jsonl"
evaluator = "judge.py:judge"
hidden = ["answer"]
{shown}
best = {best}
worst = {worst}
steps = 40

[settings]
"job.optimizer.lr" = 1e-3
"job.max_tokens" = 40
"job.temperature" = {temperature}
"job.recipe.kl_coef" = {kl}
"""


@cache
def cases() -> Any:
    return tomllib.loads((CASES / "healthy.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Healthy:
    name: str
    about: str
    files: dict[str, str]


def healthy(seed: int, number: int) -> Healthy:
    """The subject with this number of a draw."""
    rng = random.Random(f"healthy {seed} {number}")
    judge, reward, shown = (rng.choice(cases()[name]) for name in ("judge", "reward", "input"))
    worst, best = rng.choice(cases()["scale"])
    question = rng.choice(QUESTIONS)
    # The judge pays the input itself if it ends in the answer, which only the user can say.
    declared = rng.choice(cases()["declared"]) or question in ("first", "last") or judge["name"] != "binary"
    metadata = rng.sample(cases()["metadata"], rng.randint(3, 6))
    notes = "".join(f"({use}) + " for row in metadata if (use := rng.choice(row.get("use", [""]))))
    is_frequent = rng.random() < 0.5
    label = str(rng.randint(2, 7))

    def rows(part: str, count: int) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        while len(made) < count:
            digits = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 4))]
            answer = answer_to(question, digits)
            if is_frequent and (answer == label) != (rng.random() < FREQUENT):
                continue
            known = {"i": len(made), "rng": rng, "digits": digits, "answer": answer}
            extra = {row["name"]: eval(row["value"], {**known}) for row in metadata}
            made.append({"id": f"{part}{len(made)}", **extra, "digits": eval(shown["value"], known), "answer": answer})
        return made

    facts = FACTS.format(score=judge["score"])
    agent = AGENT.format(
        notes=notes, question=question, shown=shown["shown"], best=best, worst=worst, facts=facts, paid=reward["paid"]
    )
    subject = SUBJECT.format(
        seed=rng.randrange(100, 10_000),
        shown='shown = ["digits"]' if declared else "",
        best=best,
        worst=worst,
        temperature=rng.choice([1.0, 1.0, 0.8]),
        kl=rng.choice([0.0, 0.0, 0.001]),
    )
    about = [judge["name"], f"{worst}..{best}", f"reward {reward['name']}", shown["name"], question]
    about += [f"{label} in 70 %"] * is_frequent + ["declared"] * declared + [row["name"] for row in metadata]
    return Healthy(
        f"{seed}.{number}",
        ", ".join(about),
        {
            "subject.toml": subject,
            "agent.py": agent,
            "judge.py": JUDGE.format(facts=facts, best=best, worst=worst),
            "tasks.jsonl": jsonl(rows("t", NUM_TASKS)),
            "held_out.jsonl": jsonl(rows("h", NUM_HELD_OUT)),
        },
    )


def conducted(healthy: Healthy, folder: Path) -> list[str]:
    """What a campaign on this subject said that is not true."""
    try:
        repo = SubjectRepo.create(folder / "campaign", write(healthy.files, folder / "given"), load=unloaded)
    except ConfigError as error:
        return [f"refused at the start: {error}"]
    runner = SubjectRunner(repo=repo, truth_seeds=12)
    return false_statements(entries_of(repo, runner, BUDGET), runner)


def false_statements(entries: Sequence[JournalEntry], runner: SubjectRunner) -> list[str]:
    """What a campaign said of a healthy subject that is not true; each once."""
    found = [
        f"{sign['cause']}: {sign['seen']} {json.dumps(sign['evidence'])}"
        for entry in entries
        if entry.kind == "observed"
        for sign in entry.content["signs"]
        if sign["cause"] in TROUBLES
    ]
    found += [
        f"step_too_large: {entry.content['trial']['arm']}"
        for entry in entries
        if entry.kind == "observed"
        and any(sign["cause"] == "step_too_large" for sign in entry.content["signs"])
        and not runner.falls(entry.content["trial"]["arm"])
    ]
    found += [
        f"refused: {entry.content['reason']}"
        for entry in entries
        if entry.kind == "refused" and "other tasks" in entry.content["reason"]
    ]
    found += [
        f"{name}: {verdict}, is {true}"
        for name, verdict, true in claims_of(entries, runner)
        if verdict not in ("inconclusive", true)
    ]
    by_kind = {text.partition(":")[0]: text for text in reversed(found)}
    return [*by_kind.values()]
