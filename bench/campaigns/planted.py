"""Subjects with planted troubles (`cases/planted.toml`), and whether a campaign mended them.

A healthy subject asks for one of several digits. A trouble changes its agent, its settings, its tasks or its judge.
`drawn(seed)` draws twelve subjects: most have two or three troubles, one has a judge that leaks, one is healthy.
"""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from agentjet.client.inputs import load_tasks
from agentjet.errors import AgentJetError
from agentjet.research.campaign.campaign import Campaign
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.campaign.strategist import Strategist, table
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.journal import JournalEntry, Notebook
from agentjet.types import Task
from bench.campaigns.world import DEFAULTS, Code, SubjectRunner
from bench.machine import CASES
from tests.research.campaign.campaign_world import FakeClock

BUDGET = 80.0
NUM_TASKS, NUM_DEAD, NUM_HELD_OUT = 256, 512, 64
LEAK = "leaking_judge"
AGENT = '''"""Asks one question, and pays for the right answer."""

import re
{top}


def agent(task, episode):
    messages = [{{"role": "user", "content": {content}}}]
    text = {call}
    return reward(text, task.payload["answer"])


def reward(text, answer):
    found = re.findall(r"\\d", text)
    return {reward}
'''
JUDGE = '''"""The judge: the last digit of the answer counts."""

import re


def judge(task, transcript):
    found = re.findall(r"\\d", transcript[-1]["content"])
    return {judged}
'''
SOUND, LEAKING = 'float(found[-1:] == [task.payload["answer"]])', 'float(task.payload["answer"] in found)'
HACKABLE = "1.0 if answer in found else 0.0"
RIGHT = "1.0 if found[-1:] == [answer] else 0.0"
SUBJECT = """model = "world-{seed}"
agent = "agent.py:agent"
tasks = "tasks.jsonl"
held_out = "held_out.jsonl"
evaluator = "judge.py:judge"
hidden = ["answer"]
shown = ["digits"]
steps = 40

[settings]
{settings}
"""


@cache
def cases() -> Any:
    return tomllib.loads((CASES / "planted.toml").read_text(encoding="utf-8"))


def named(kind: str) -> dict[str, Any]:
    return {row["name"]: row for row in cases()[kind]}


@dataclass(frozen=True)
class Planted:
    name: str
    troubles: tuple[str, ...] = ()
    seed: int = 0
    question: str = "largest"
    style: str = "format"
    form: str = "keyword"

    def files(self) -> dict[str, str]:
        """The user's folder."""
        ask = f"Which of these digits is the {self.question}?"
        rows = [named("trouble")[name] for name in self.troubles if name != LEAK]
        style = named("style")[self.style]
        style = style | style["hidden"] if "hidden_input" in self.troubles else style
        settings = {"job.optimizer.lr": 1e-3, "job.max_tokens": 40}
        for row in rows:
            settings |= row.get("settings", {})
        found = call_of(self.form, {name: value for row in rows for name, value in row.get("set", {}).items()})
        agent = AGENT.format(
            top="\n".join(filter(None, (found["top"], style.get("top", "").format(ask=ask)))),
            content=style["content"].format(ask=ask),
            call=found["call"],
            reward=HACKABLE
            if LEAK in self.troubles
            else next((row["reward"] for row in rows if "reward" in row), RIGHT),
        )
        shown = "\n".join(f"{name} = {json.dumps(value)}" for name, value in sorted(settings.items()))
        return {
            "subject.toml": SUBJECT.format(seed=self.seed, settings=shown),
            "agent.py": agent,
            "judge.py": JUDGE.format(judged=LEAKING if LEAK in self.troubles else SOUND),
            "tasks.jsonl": jsonl(self.training_tasks()),
            "held_out.jsonl": jsonl(tasks(random.Random(f"held {self.seed}"), self.question, NUM_HELD_OUT, "h")),
            **found["files"],
        }

    def training_tasks(self) -> list[dict[str, str]]:
        rng = random.Random(f"train {self.seed}")
        good = tasks(rng, self.question, NUM_TASKS, "t")
        dead = tasks(rng, self.question, NUM_DEAD, "d")
        if "no_signal" in self.troubles:  # the label is missing, so no answer is right
            dead = [{**row, "answer": "-"} for row in dead]
        elif "too_hard" in self.troubles:  # products have two digits and more
            for row in dead:
                row["digits"] = " ".join(str(rng.randint(3, 9)) for _ in range(5))
                row["answer"] = str(math.prod(map(int, row["digits"].split())))
        else:
            return good
        rows = [*good, *dead]
        rng.shuffle(rows)
        return rows


def call_of(form: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The call of the model with these arguments: code above the agent, the expression, and further files."""
    if not given:
        return {"top": "", "call": "episode.chat(messages)", "files": {}}
    row = named("form")[form]

    def each(text: str, between: str) -> str:
        return between.join(text.format(name=name, value=value, all="{all}") for name, value in given.items())

    parts = {
        "all": each(row["each"], row.get("join", ", ")),
        "pass": each(row.get("passed", ""), ", "),
        "names": each(row.get("names", ""), ", "),
    }
    lines = (
        (each(row["lines"], "\n") if "{all}" not in row.get("lines", "") else row["lines"].format(**parts))
        if "lines" in row
        else ""
    )
    top, file = row.get("top", "").format(**parts), row.get("file", "")
    own = top if file else "\n".join(filter(None, (top, lines)))
    return {"top": own, "call": row["call"].format(**parts), "files": {file: f"{lines}\n"} if file else {}}


def tasks(rng: random.Random, question: str, number: int, prefix: str) -> list[dict[str, str]]:
    made = []
    for i in range(number):
        digits = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 4))]
        made.append({"id": f"{prefix}{i}", "digits": " ".join(digits), "answer": answer_to(question, digits)})
    return made


def answer_to(question: str, digits: Sequence[str]) -> str:
    return {"largest": max(digits), "smallest": min(digits), "first": digits[0], "last": digits[-1]}[question]


def jsonl(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(files: Mapping[str, str], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "subject.toml"


def drawn(seed: int, number: int = 12) -> list[Planted]:
    """Subjects by seed: three quarters with two or three troubles, one trap, one healthy subject."""
    rng = random.Random(f"planted {seed}")
    known: set[frozenset[str]] = set()
    made: list[Planted] = []
    while len(made) < number - 2:
        rows = rng.sample(cases()["trouble"], (1, 2, 2, 3)[len(made) % 4])
        troubles = frozenset(row["name"] for row in rows)
        if len({row["place"] for row in rows}) == len(rows) and troubles not in known:
            known.add(troubles)
            made.append(one(rng, tuple(sorted(troubles)), seed, len(made)))
    return [*made, one(rng, (LEAK,), seed, len(made)), one(rng, (), seed, len(made) + 1)]


def one(rng: random.Random, troubles: tuple[str, ...], seed: int, number: int) -> Planted:
    name = f"{seed}.{number + 1}"
    question, style = rng.choice(cases()["question"]), rng.choice(cases()["style"])["name"]
    form = rng.choice(cases()["form"])["name"]
    return Planted(name, troubles, rng.randrange(100, 10_000), question, style, form)


# ---- the truth -------------------------------------------------------------------------------------------------------

REACHED = 0.95
"""Share of the healthy performance at which every trouble counts as mended, by whatever change."""
NEEDED_TOKENS = 21
TEXTS = ("7", "The answer is 7.", "3", "The answer is 3.", "0 1 2 3 4 5 6 7 8 9", f"{'word ' * 30}3", "")
"""Answers to a task whose answer is 7. The first two are right."""
PROBE = Task("probe", payload={"id": "probe", "digits": "4 7 1", "answer": "7"})


@dataclass(frozen=True)
class Judged:
    """The result of one campaign."""

    planted: Planted
    accepted: list[str]
    reason: str
    mended: dict[str, bool]
    first: float
    score: float
    healthy: float
    claims: list[tuple[str, str, str]]
    """Name of the change, verdict, true verdict."""
    runs: float

    @property
    def recovered(self) -> float:
        return min(1.0, self.score / self.healthy)

    @property
    def wrong(self) -> list[tuple[str, str, str]]:
        return [claim for claim in self.claims if claim[1] not in ("inconclusive", claim[2])]

    def line(self) -> str:
        shown = f"{self.first:.2f} to {self.score:.2f} of {self.healthy:.2f}, {self.runs:.1f} runs"
        wrong = f", wrong: {self.wrong}" if self.wrong else ""
        form = f" ({self.planted.form})" if any(name.startswith("agent_") for name in self.planted.troubles) else ""
        return f"{self.planted.name}{form}: mended {self.mended}, {shown}, accepted {self.accepted}{wrong}"


def exhaustive_cost() -> float:
    """Full runs to try every single remedy of the table once, at full length, with the fewest seeds of a verdict."""
    return 4.0 * (len({row.name for row in table()[1]}) + 1)


def judged(planted: Planted, entries: Sequence[JournalEntry], runner: SubjectRunner, folder: Path) -> Judged:
    """The truth is that of fresh seeds, by the sound judge."""
    sound = replace(planted, name="sound", troubles=tuple(name for name in planted.troubles if name != LEAK))
    healthy = SubjectRunner(
        repo=SubjectRepo.create(
            folder / "healthy", write(replace(sound, troubles=()).files(), folder / "whole"), load=unloaded
        )
    )
    [ended] = [entry.content for entry in entries if entry.kind == "ended"]
    base = ended["base"]
    leaks = "other tasks" in ended["reason"]
    is_trap = LEAK in planted.troubles
    first, final = (runner.truth(commit) for commit in (runner.repo.first, base))
    possible = healthy.truth(healthy.repo.first)
    claims = claims_of(entries, runner)
    if leaks or is_trap:
        claims.append(("the judge leaks", *("yes" if true else "no" for true in (leaks, is_trap))))
    reached = final >= REACHED * possible
    mended = {name: reached or gone(name, runner.repo.worktree(base)) for name in sound.troubles}
    if is_trap:
        mended = {LEAK: leaks and not ended["accepted"]}
    runs = ended["spent"]["runs"]
    return Judged(
        planted,
        ended["accepted"],
        ended["reason"],
        mended or {"healthy": reached},
        first,
        final,
        possible,
        claims,
        runs,
    )


def conducted(planted: Planted, folder: Path) -> Judged:
    """A campaign on a subject, and the truth about it."""
    repo = SubjectRepo.create(folder / "campaign", write(planted.files(), folder / "given"), load=unloaded)
    runner = SubjectRunner(repo=repo)
    return judged(planted, entries_of(repo, runner, BUDGET), runner, folder)


def entries_of(repo: SubjectRepo, runner: SubjectRunner, runs: float) -> list[JournalEntry]:
    """The notebook of a campaign with this budget."""
    with Notebook(repo.folder) as notebook:
        question = Question("why does it not learn?", Budget(runs=runs), **repo.rules)
        Campaign(question, notebook, repo, runner, [Strategist()], FakeClock(), lambda _: None).run()
        return notebook.entries


def summary(found: Sequence[Judged]) -> dict[str, Any]:
    """The figures; `recovered` leaves out the judges that leak. `by_trouble`: mended of planted."""
    troubles = [(name, is_mended) for one in found for name, is_mended in one.mended.items()]
    claims = sum(len(one.claims) for one in found)
    names = sorted({name for name, _ in troubles})
    return {
        "mended": fmean(is_mended for _, is_mended in troubles),
        "recovered": fmean(one.recovered for one in found if LEAK not in one.planted.troubles),
        "wrong": sum(len(one.wrong) for one in found) / max(1, claims),
        "cost_ratio": fmean(one.runs for one in found) / exhaustive_cost(),
        "troubles": len(troubles),
        "claims": claims,
        "subjects": len(found),
        "by_trouble": {
            name: f"{sum(m for n, m in troubles if n == name)}/{sum(n == name for n, _ in troubles)}" for name in names
        },
    }


def claims_of(entries: Sequence[JournalEntry], runner: SubjectRunner) -> list[tuple[str, str, str]]:
    """By study: the name of the change, the verdict, and that of the true scores."""
    learned = {entry.key.removeprefix("learned "): entry.content for entry in entries if entry.kind == "learned"}
    claims = []
    for entry in entries:
        if entry.kind == "study" and (found := learned.get(entry.key.removeprefix("study "))):
            study = entry.content["study"]
            arms = {arm["name"]: runner.truth(arm["code"]) for arm in study["arms"]}
            effect = arms["changed"] - arms["base"]
            true = (
                "practically_equivalent" if abs(effect) < study["sesoi"] else "supported" if effect > 0 else "refuted"
            )
            claims.append((entry.content["name"], found["verdict"], true))
    return claims


def unloaded(order: object) -> list[Task]:
    """In place of loading an arm's code in a sandbox: `--hostile` measures that."""
    return []


def gone(trouble: str, folder: Path) -> bool:
    """True if the files do not have the trouble any more."""
    code, subject = Code(folder), tomllib.loads((folder / "subject.toml").read_text(encoding="utf-8"))
    settings = {**DEFAULTS, **subject["settings"]}
    row = named("trouble")[trouble]
    asked = Asked()
    try:
        code.function(subject["agent"])(PROBE, asked)
        used = settings | {f"job.{name}": value for name, value in asked.parameters.items()}
        if trouble == "hidden_input":
            return "4 7 1" in asked.text
        if row["place"] == "limit":
            return int(used["job.max_tokens"]) >= NEEDED_TOKENS
        if row["place"] == "temperature":
            overridden = settings if "temperature" in settings["job.sampling.override"] else used
            return float(overridden["job.temperature"]) >= 0.5
        if row["place"] == "reward":
            paid = rewards_of(subject, code)
            return min(paid[:2]) > max(paid[2:])
    except AgentJetError:
        return False
    if row["place"] == "lr":
        return 1e-4 <= float(settings["job.optimizer.lr"]) <= 5e-3
    if row["place"] == "kl":
        return float(settings["job.recipe.kl_coef"]) <= 0.1
    rows = load_tasks(str(folder / subject["tasks"]), option="tasks")
    solvable = [len(task.payload["answer"]) == 1 and task.payload["answer"] != "-" for task in rows]
    return bool(settings["job.recipe.drop_zero_variance"]) or sum(solvable) >= len(solvable) / 2


@dataclass
class Asked:
    """An episode that records what the agent asks."""

    text: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    mode: str = "train"
    model: str = "policy"

    def chat(self, messages: list[dict[str, Any]], **parameters: Any) -> str:
        self.text, self.parameters = "\n".join(str(each["content"]) for each in messages), parameters
        return "7"


def rewards_of(subject: Mapping[str, Any], code: Code) -> list[float]:
    """Training rewards of `TEXTS`."""
    if subject.get("reward"):
        paid = code.function(subject["reward"])
        return [float(paid(PROBE, [{"role": "assistant", "content": text}])) for text in TEXTS]
    return [float(code.function("agent.py:reward")(text, "7")) for text in TEXTS]
