"""Subjects with planted troubles, as files, and the check whether each trouble is mended.

A healthy subject asks for one of several digits. A trouble changes its agent, its settings, its tasks or its judge.
Subjects differ in the question, the style of the code, and the start of the policy. `DEVELOPED` are those that the
strategist was developed on; `unseen(seed)` draws others from the combinations.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STYLES = ("format", "f-string", "concatenation", "template")
NUM_TASKS, NUM_DEAD, NUM_HELD_OUT = 256, 512, 64
ASK = {
    "format": ('PROMPT = "{ask} {{digits}}"\n', "PROMPT.format(digits=task.payload['digits'])"),
    "f-string": ("", "f\"{ask} {{task.payload['digits']}}\""),
    "concatenation": ('ASK = "{ask} "\n', "ASK + task.payload['digits']"),
    "template": ('PROMPT = "{ask} %s"\n', "PROMPT % task.payload['digits']"),
}
HIDDEN = {
    "format": ('PROMPT = "{ask}"\n', "PROMPT.format(digits=task.payload['digits'])"),
    "f-string": ("", '"{ask}"'),
    "concatenation": ('ASK = "{ask} "\n', "ASK"),
    "template": ('PROMPT = "{ask} %s"\n', "PROMPT % task.payload['digits'][:0]"),
}
"""The prompt without the digits."""
AGENT = '''"""Asks one question, and pays for the right answer."""

import re

{constants}

def agent(task, episode):
    messages = [{{"role": "user", "content": {content}}}]
    text = episode.chat(messages{arguments})
    return reward(text, task.payload["answer"])


def reward(text, answer):
    found = re.findall(r"\\d", text)
{reward}
'''
JUDGE = '''"""The judge: the last digit of the answer counts."""

import re


def judge(task, transcript):
    found = re.findall(r"\\d", transcript[-1]["content"])
    return {judged}
'''
RIGHT = "    return 1.0 if found and found[-1] == answer else 0.0"
REWARDS = {
    "": RIGHT,
    "format_reward": "    return 1.0 if text == answer else 0.0",
    "hackable_reward": "    return 1.0 if answer in text else 0.0",
    "flipped_reward": "    return 0.0 if found and found[-1] == answer else 1.0",
    "length_reward": f"{RIGHT} + 0.05 * len(text.split())",
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "lr_high": {"job.optimizer.lr": 0.015},
    "lr_low": {"job.optimizer.lr": 2e-5},
    "truncation": {"job.max_tokens": 10},
    "cold": {"job.temperature": 0.05},
    "kl_high": {"job.recipe.kl_coef": 3.0},
}
ARGUMENTS = {"agent_temperature": ", temperature=0.05", "agent_max_tokens": ", max_tokens=8"}
TASKS = ("no_signal", "too_hard")
TRAPS = ("leaking_judge",)
TROUBLES = (*(name for name in REWARDS if name), "hidden_input", *SETTINGS, *ARGUMENTS, *TASKS)
EXCLUSIVE = (
    tuple(name for name in REWARDS if name),
    ("lr_high", "lr_low"),
    ("truncation", "agent_max_tokens"),
    ("cold", "agent_temperature"),
    TASKS,
)
"""Troubles of one place: a subject has at most one of each row."""


@dataclass(frozen=True)
class Planted:
    name: str
    troubles: tuple[str, ...] = ()
    seed: int = 0
    question: str = "largest"
    style: str = "format"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def healthy(self) -> Planted:
        return Planted(self.name, (), self.seed, self.question, self.style, self.settings)

    def files(self) -> dict[str, str]:
        """The user's folder."""
        ask = f"Which of these digits is the {self.question}?"
        constants, content = (HIDDEN if "hidden_input" in self.troubles else ASK)[self.style]
        paid = next((REWARDS[name] for name in self.troubles if name in REWARDS), RIGHT)
        settings = {"job.optimizer.lr": 1e-3, "job.max_tokens": 40, **self.settings}
        for trouble in self.troubles:
            settings |= SETTINGS.get(trouble, {})
        leaking = "leaking_judge" in self.troubles
        return {
            "subject.toml": subject_toml(settings, self.seed),
            "agent.py": AGENT.format(
                constants=constants.format(ask=ask),
                content=content.format(ask=ask),
                arguments="".join(ARGUMENTS.get(name, "") for name in self.troubles),
                reward=paid,
            ),
            "judge.py": JUDGE.format(
                judged='float(task.payload["answer"] in found)'
                if leaking
                else 'float(bool(found) and found[-1] == task.payload["answer"])'
            ),
            "tasks.jsonl": lines(self.training_tasks()),
            "held_out.jsonl": lines(tasks(random.Random(f"held {self.seed}"), self.question, NUM_HELD_OUT, "h")),
        }

    def training_tasks(self) -> list[dict[str, str]]:
        rng = random.Random(f"train {self.seed}")
        good = tasks(rng, self.question, NUM_TASKS, "t")
        dead = tasks(rng, self.question, NUM_DEAD, "d")
        if "no_signal" in self.troubles:  # the label is missing, so no answer is right
            return shuffled(rng, good, [{**row, "answer": "-"} for row in dead])
        if "too_hard" in self.troubles:  # products have two digits and more
            for row in dead:
                row["digits"] = " ".join(str(rng.randint(3, 9)) for _ in range(5))
                row["answer"] = str(math.prod(map(int, row["digits"].split())))
            return shuffled(rng, good, dead)
        return good


def shuffled(rng: random.Random, *parts: list[dict[str, str]]) -> list[dict[str, str]]:
    rows = [row for part in parts for row in part]
    rng.shuffle(rows)
    return rows


def tasks(rng: random.Random, question: str, number: int, prefix: str) -> list[dict[str, str]]:
    made = []
    for i in range(number):
        digits = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 4))]
        answer = {"largest": max(digits), "smallest": min(digits), "first": digits[0], "last": digits[-1]}[question]
        made.append({"id": f"{prefix}{i}", "digits": " ".join(digits), "answer": answer})
    return made


def lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def subject_toml(settings: Mapping[str, Any], seed: int) -> str:
    shown = "\n".join(f"{name} = {json.dumps(value)}" for name, value in sorted(settings.items()))
    return f"""model = "world:{seed}"
agent = "agent.py:agent"
tasks = "tasks.jsonl"
held_out = "held_out.jsonl"
evaluator = "judge.py:judge"
hidden = ["answer"]
steps = 40
evaluations = 4

[settings]
{shown}
"""


DEVELOPED = (
    Planted("format", ("format_reward",), 1),
    Planted("format and lr", ("format_reward", "lr_high"), 2, "smallest", "f-string"),
    Planted("hidden digits", ("hidden_input",), 3, "largest", "concatenation"),
    Planted("hidden digits, cold agent", ("hidden_input", "agent_temperature"), 4, "first", "format"),
    Planted("truncated", ("truncation",), 5, "last", "template"),
    Planted("truncated, slow", ("truncation", "lr_low"), 6, "largest", "f-string"),
    Planted("agent's limit, hackable", ("agent_max_tokens", "hackable_reward"), 7, "smallest", "concatenation"),
    Planted("no signal", ("no_signal",), 8, "first", "template"),
    Planted("too hard, KL", ("too_hard", "kl_high"), 9, "last", "f-string"),
    Planted("flipped, cold, fast", ("flipped_reward", "cold", "lr_high"), 10, "largest", "template"),
    Planted("leaking judge", ("leaking_judge",), 11, "smallest", "format"),
    Planted("healthy", (), 12, "last", "f-string"),
)


def unseen(seed: int, number: int = 12) -> list[Planted]:
    """Combinations by seed: two thirds with two or three troubles, one trap, one healthy subject."""
    rng = random.Random(f"unseen {seed}")
    known = {frozenset(planted.troubles) for planted in DEVELOPED}
    made: list[Planted] = []
    while len(made) < number - 2:
        count = (1, 2, 2, 3)[len(made) % 4]
        troubles = tuple(rng.sample(TROUBLES, count))
        clash = any(sum(name in row for name in troubles) > 1 for row in EXCLUSIVE)
        if clash or frozenset(troubles) in known:
            continue
        known.add(frozenset(troubles))
        made.append(drawn(rng, troubles, len(made)))
    return [*made, drawn(rng, TRAPS, len(made)), drawn(rng, (), len(made) + 1)]


def drawn(rng: random.Random, troubles: tuple[str, ...], number: int) -> Planted:
    name = f"{number + 1}: {', '.join(troubles) or 'healthy'}"
    question, style = rng.choice(("largest", "smallest", "first", "last")), rng.choice(STYLES)
    return Planted(name, troubles, rng.randrange(100, 10_000), question, style)
