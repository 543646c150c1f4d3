"""Edits of a subject's files: found in the source, and written as a unified diff.

Each edit takes the files by path and returns the changed ones, or an empty mapping if it finds nothing to change.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

Files = Mapping[str, str]
REWARD_FILE = "judge_reward.py"


def unified_diff(before: Files, after: Files) -> str:
    """A patch for `git apply`, of the files that differ."""
    parts: list[str] = []
    for path in sorted(after):
        old = before.get(path)
        if old != after[path]:
            there = f"a/{path}" if old is not None else "/dev/null"
            for line in difflib.unified_diff(lines(old or ""), lines(after[path]), there, f"b/{path}"):
                parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def lines(text: str) -> list[str]:
    """Lines as git counts them: only a line feed ends one."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def agent_file(files: Files) -> tuple[str, str]:
    """The file of the agent and its function. Empty if the agent is not a file of the subject."""
    file, _, function = str(tomllib.loads(files["subject.toml"]).get("agent", "")).rpartition(":")
    return (file, function) if file in files else ("", "")


def remove_argument(files: Files, name: str) -> Files:
    """Removes a constant argument `name=...` from calls, and a constant entry from requests, in the agent's file."""
    file, _ = agent_file(files)
    if not file:
        return {}
    source = files[file]
    spans: list[tuple[int, int]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            spans += [
                span_of(source, keyword)
                for keyword in node.keywords
                if keyword.arg == name and isinstance(keyword.value, ast.Constant)
            ]
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                    spans.append((span_of(source, key)[0], span_of(source, value)[1]))
    if not spans:
        return {}
    for start, end in sorted(spans, reverse=True):
        before, after = source[:start].rstrip(), source[end:]
        first = not before.endswith(",")
        source = before + after.lstrip().removeprefix(",").lstrip() if first else before[:-1] + after
    return {file: source}


def show_fields(files: Files, fields: Sequence[str]) -> Files:
    """Appends fields of the task to the user's message in the agent's function."""
    file, name = agent_file(files)
    if not file or not fields:
        return {}
    source = files[file]
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name != name:
            continue
        if not function.args.args:
            return {}
        task = function.args.args[0].arg
        for node in ast.walk(function):
            content = user_content(node)
            if content is not None:
                start, end = span_of(source, content)
                shown = "".join(f"\\n{field}: {{{task}.payload[{field!r}]}}" for field in fields)
                return {file: f'{source[:start]}({source[start:end]}) + f"{shown}"{source[end:]}'}
    return {}


def user_content(node: ast.AST) -> ast.expr | None:
    """The content of `{"role": "user", "content": ...}`."""
    if not isinstance(node, ast.Dict):
        return None
    entries = {
        key.value: value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)
    }
    role = entries.get("role")
    return entries.get("content") if isinstance(role, ast.Constant) and role.value == "user" else None


def judge_reward(files: Files, judge_source: str) -> Files:
    """Pays in training what the judge pays, by a copy of its function."""
    subject = tomllib.loads(files["subject.toml"])
    function = str(subject["evaluator"]).rpartition(":")[2]
    named = f'reward = "{REWARD_FILE}:{function}"\n'
    if not judge_source or subject.get("reward") == f"{REWARD_FILE}:{function}":
        return {}
    text = re.sub(r"(?m)^reward\s*=.*\n", "", files["subject.toml"])
    head = re.search(r"(?m)^\[", text)
    place = head.start() if head else len(text)
    return {REWARD_FILE: judge_source, "subject.toml": text[:place] + named + text[place:]}


def keep_mixed(files: Files, by_task: Mapping[str, Sequence[float]], fewest: int = 4) -> Files:
    """Keeps the training tasks whose episodes differed, and those that were hardly tried."""
    named = str(tomllib.loads(files["subject.toml"])["tasks"])
    if not named.endswith(".jsonl") or named not in files:
        return {}
    kept, removed = [], 0
    for number, row in enumerate(lines(files[named]), 1):
        task = str(json.loads(row).get("id", f"line-{number}")) if row.strip() else ""
        least, most, tried = by_task.get(task, (0.0, 0.0, 0))
        if tried >= fewest and least == most:
            removed += 1
        else:
            kept.append(row)
    return {named: "".join(kept)} if removed and len(kept) >= fewest else {}


def span_of(source: str, node: Any) -> tuple[int, int]:
    """Start and end of a node in characters. Its columns are in bytes."""
    lines = source.encode().splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return len(b"".join([*lines[: line - 1], lines[line - 1][:column]]).decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
