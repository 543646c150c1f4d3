"""MMOA-RAG's roles: one model rewrites the question, selects documents and answers. All get the F1 score of the answer,
and each a penalty of its role.

Source: github.com/chenyiqun/MMOA-RAG at aa1106d, with the recipe of the run instead of PPO, and a search by words in
place of the retriever. Confidence: after it in the rewards.
"""

from __future__ import annotations

import re
from collections import Counter

from agentjet.client import Episode
from agentjet.types import Reward, Task
from examples.teams.asking import ask, question, role

POLICIES = ()
RECIPE = "dr_mas"
DOCUMENTS = tuple(f"{a} + {b} = {a + b}" for a in range(8) for b in range(8))
CANDIDATES = 10


def play(task: Task, episode: Episode) -> Reward:
    rewritten = ask(episode, role(episode, "rewriter"), f"Split into questions, one a line: {question(task)}").text
    found = sorted(DOCUMENTS, key=lambda document: -f1(f"{question(task)} {rewritten}", document))[:CANDIDATES]
    listed = "\n".join(f"Document{number}: {document}" for number, document in enumerate(found))
    chosen = ask(episode, role(episode, "selector"), f"Which help? {question(task)}\n{listed}").text
    documents = [found[number] for number in selected(chosen, len(found))]
    answer = ask(episode, role(episode, "generator"), f"{question(task)}\n" + "\n".join(documents)).text
    shared = f1(answer, str(sum(task.payload)))
    penalties = {
        "rewriter": -0.5 * is_too_long(rewritten.splitlines()),
        "selector": selector_penalty(chosen, len(found)),
        "generator": -1.0 * (len(answer.split()) > 30),
    }
    return Reward(shared, by_role={name: shared + penalty for name, penalty in penalties.items()})


def is_too_long(questions: list[str]) -> bool:
    """True for more than 4 questions, or more than 300 characters."""
    return len(questions) > 4 or sum(map(len, questions)) > 300


def selected(text: str, num_documents: int) -> list[int]:
    """Returns the numbers of `Document0,Document4`; empty if the text has another form, or a wrong or repeated one."""
    if not re.fullmatch(r"Document\d+(,Document\d+)*", text.strip()):
        return []
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    is_valid = max(numbers) < num_documents and len(set(numbers)) == len(numbers)
    return numbers if is_valid else []


def selector_penalty(text: str, num_documents: int) -> float:
    """Returns -1 for a text that does not select documents; an empty one selects none."""
    return 0.0 if not text.strip() or selected(text, num_documents) else -1.0


def f1(found: str, expected: str) -> float:
    """Returns the F1 score of words."""
    ours, theirs = found.lower().split(), expected.lower().split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0
