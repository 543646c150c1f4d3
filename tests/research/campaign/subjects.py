"""A subject whose folder is written by a test."""

from __future__ import annotations

from pathlib import Path

SUBJECT = """\
model = "smollm2-135m"
agent = "agent.py:agent"
tasks = "tasks.jsonl"
held_out = "held_out.jsonl"
evaluator = "judge.py:score"
steps = 12

[settings.job]
optimizer.lr = 0.01
batch_size = 2
group_size = 4
"""
AGENT = """\
from words import PROMPT


def agent(task, episode):
    return 1.0 if ask(episode, PROMPT, temperature=0.1) == task.payload["answer"] else 0.0


def ask(episode, prompt, temperature):
    return prompt
"""
WORDS = 'PROMPT = "Answer with a number."\n'
JUDGE = """\
def score(task, messages):
    return float(messages[-1]["content"] == task.payload["answer"])
"""
HELD_OUT = """\
{"id": "x", "question": "2+2", "answer": "4"}
{"id": "y", "question": "3+3", "answer": "6"}
"""


def write_subject(folder: Path, **changed: str) -> Path:
    """Writes the folder, with other contents by the name of a file without its suffix. Returns its subject.toml."""
    files = {
        "subject.toml": SUBJECT,
        "agent.py": AGENT,
        "words.py": WORDS,
        "judge.py": JUDGE,
        "tasks.jsonl": '{"id": "a", "question": "1+1", "answer": "2"}\n',
        "held_out.jsonl": HELD_OUT,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(changed.get(name.partition(".")[0], content))
    return folder / "subject.toml"
