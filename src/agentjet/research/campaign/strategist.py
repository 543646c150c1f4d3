"""`Proposer`, what it proposes, and `Strategist`, which needs no language model. Its rules are in `remedies.toml`.

An intervention changes the subject's files only. Model, held-out tasks, evaluator and lengths of a run are the judge's.

The facts of a run are numbers by name. A sign holds if its conditions on the facts hold. A remedy applies if its sign
holds. Remedies are ordered by prior times the effect that is left. Likely remedies are also proposed as one
intervention, because a trouble can hide the effect of mending another.

A remedy may edit the subject's files. Each edit takes the files by path and returns the changed ones, or an empty
mapping if it finds nothing to change.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import tomllib
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from agentjet.client.agent_source import file_and_function
from agentjet.research.diagnosis import Signals, SignRule, toml_of
from agentjet.research.journal import JournalEntry
from agentjet.research.models import UNSEEN, Declared, Outcome, Record, Setting, Value, refuse

# ---- proposals -----------------------------------------------------------------------------------------------------

Kind = Literal["settings", "recipe", "agent", "prompt", "reward", "curriculum", "tasks"]
LONGEST_NAME = 160
LONGEST_PATCH = 200_000
MOST_CHANGES = 50
Reason = Annotated[str, Field(max_length=2_000)]
NOTES = 5
"""Notes of people that stand in a prompt. The notebook has all."""


@dataclass(frozen=True)
class Intervention(Record):
    """A change of the subject and why it is worth a try. Its arm is a commit."""

    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    kind: Kind
    changes: Setting = field(default_factory=dict)
    """Settings of `[settings]` in subject.toml, by dotted name."""
    patch: Annotated[str, Field(max_length=LONGEST_PATCH)] = ""
    """A unified diff of the subject's folder; empty if only settings change."""
    why: Reason = ""
    predicts: Reason = ""
    refutes: Reason = ""
    """Result that would refute the hypothesis."""
    evidence: tuple[int, ...] = ()
    """Numbers of the notebook's entries that the reason refers to."""

    def __post_init__(self) -> None:
        refuse(not self.changes and not self.patch, f"{self.name}: it changes nothing; give settings or a patch")
        many = f"{self.name}: it changes {len(self.changes)} settings; give at most {MOST_CHANGES}"
        refuse(len(self.changes) > MOST_CHANGES, many)
        is_odd = any(unicodedata.category(character) in ("Cc", "Cs") for character in self.name)
        refuse(is_odd, f"name = {self.name!r}: give one line of text, without control characters")


@dataclass(frozen=True)
class Sign(Record):
    """A cause that a run shows: see `remedies.toml`."""

    cause: str
    seen: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """The part of a campaign that a proposer may read. Nothing in it comes from held-out tasks."""

    topic: str
    observation: Outcome
    """The newest full run of the commit that the next intervention changes."""
    observed: int
    """Number of that run's entry."""
    tried: Set[str]
    """Names of the interventions that were tried on this commit."""
    notebook: Sequence[JournalEntry]
    files: Mapping[str, str]
    """The commit's text files by path, without the judge's held-out tasks."""
    judge_source: str
    """Source of the evaluator, which an arm may copy as its training reward."""
    vetoed: Set[str] = frozenset()

    def remarks(self) -> str:
        """Vetoes and the newest notes of people, for a prompt; empty without any."""
        notes = [f"{e.content['text']} (entry {e.number})" for e in self.notebook if e.kind == "note"][-NOTES:]
        vetoes = [f"Do not propose {', '.join(map(repr, sorted(self.vetoed)))}: vetoed."] if self.vetoed else []
        said = [*(["Notes, newest first:", *reversed(notes)] if notes else []), *vetoes]
        return "\n".join(["", "The people who keep this campaign wrote:", *said]) if said else ""


class Proposer(Protocol):
    """The strategist, a language model or a coding agent."""

    name: str

    def propose(self, view: View, most: int) -> Sequence[Intervention | str]:
        """Returns at most `most` proposals, the most promising first. The campaign checks each.

        An unusable answer is returned as text with the reason; the campaign records it as refused. Raises
        `ProposerAway`.
        """
        ...


class ProposerAway(Exception):
    """The proposer does not answer. The next one is asked."""


# ---- edits of files --------------------------------------------------------------------------------------------------

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
    file, function = file_and_function(str(tomllib.loads(files["subject.toml"]).get("agent", "")))
    return (file, function) if file in files else ("", "")


SPELLINGS: Mapping[str, tuple[str, ...]] = {"max_tokens": ("max_completion_tokens", "max_output_tokens")}
"""Further names of an argument in the APIs of models."""


def remove_argument(files: Files, name: str) -> Files:
    """Removes what sets an argument of the model's calls in the agent's file and the files that it imports: a keyword,
    an entry of a dictionary, or an assignment to one.

    The value does not matter: it may be a constant, a variable, a default, or come from a caller. Functions and classes
    of the subject keep their parameters, and calls of these keep the keyword.
    """
    trees = agent_trees(files)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    names = (name, *SPELLINGS.get(name, ()))
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    parameters = {key: {one.arg for one in (*node.args.args, *node.args.kwonlyargs)} for key, node in functions.items()}
    parameters |= {node.name: {*names} for node in nodes if isinstance(node, ast.ClassDef)}
    places = {"self", "cls", *(Path(file).stem for file in trees)}
    read = {item_of(node) for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)}
    changed = {}
    for file, tree in trees.items():
        spans: list[tuple[int, int, str]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                taken = parameters.get(called(node, places), set())
                given = [one for one in node.keywords if one.arg in names and one.arg not in taken]
                spans += [(*span_of(files[file], one), "") for one in given]
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in names and key.value not in read:
                        spans.append((span_of(files[file], key)[0], span_of(files[file], value)[1], ""))
            elif isinstance(node, ast.Assign) and item_of(node.targets[0]) in names:
                spans.append((*span_of(files[file], node), "pass"))
        source, first = files[file], len(files[file])
        for start, end, instead in sorted(spans, reverse=True):
            if end > first:  # a part of what was removed
                continue
            before, after, first = source[:start], source[end:], start
            if not instead:
                before = before.rstrip()
                is_last = before.endswith(",")
                before, after = (before[:-1], after) if is_last else (before, after.lstrip().removeprefix(",").lstrip())
            source = f"{before}{instead}{after}"
        if spans:
            changed[file] = source
    return changed


def item_of(node: ast.AST) -> object:
    """The constant key of an item: that of `options["temperature"]`. None for anything else."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value
    return None


def called(call: ast.Call, places: Set[str]) -> str:
    """The name of a function that may be one of the subject's; empty for a method of another object."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in places:
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def agent_trees(files: Files) -> dict[str, ast.Module]:
    """The agent's file, and those of the subject that it imports, parsed; not the evaluator's, which is fixed."""
    fixed, _ = file_and_function(str(tomllib.loads(files["subject.toml"])["evaluator"]))
    waiting, found = [agent_file(files)[0]], dict[str, ast.Module]()
    while waiting:
        file = waiting.pop()
        if file in found or file not in files or file == fixed:
            continue
        found[file] = ast.parse(files[file])
        for node in ast.walk(found[file]):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names]
                modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                waiting += [f"{module.replace('.', '/')}.py" for module in modules]
    return found


def show_fields(files: Files, fields: Sequence[str]) -> Files:
    """Appends fields of the task to the user's message in the agent's function."""
    file, name = agent_file(files)
    if not file or not fields:
        return {}
    source, kinds = files[file], (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, kinds) and each.name == name]
    for function in functions:
        for content in filter(None, map(user_content, ast.walk(function))):
            start, end = span_of(source, content)
            task = f"{function.args.args[0].arg}.payload" if function.args.args else ""
            shown = "".join(f"\\n{field}: {{{task}[{field!r}]}}" for field in fields)
            return {file: f'{source[:start]}({source[start:end]}) + f"{shown}"{source[end:]}'} if task else {}
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
    """Pays in training what the judge pays, by a copy of its function; negated if less is better."""
    subject = tomllib.loads(files["subject.toml"])
    _, function = file_and_function(str(subject["evaluator"]))
    if judge_source and subject.get("best", 1.0) < subject.get("worst", 0.0):
        negated = f"def negated(task, messages):\n    return -{function}(task, messages)\n"
        judge_source, function = f"{judge_source}\n\n{negated}", "negated"
    named = f'reward = "{REWARD_FILE}:{function}"\n'
    if not judge_source or subject.get("reward") == f"{REWARD_FILE}:{function}":
        return {}
    text = re.sub(r"(?m)^reward\s*=.*\n", "", files["subject.toml"])
    head = re.search(r"(?m)^\[", text)
    place = head.start() if head else len(text)
    return {REWARD_FILE: judge_source, "subject.toml": text[:place] + named + text[place:]}


def keep_mixed(files: Files, by_task: Mapping[str, Sequence[float]]) -> Files:
    """Keeps the training tasks whose episodes differed, and those that were hardly tried."""
    named = str(tomllib.loads(files["subject.toml"])["tasks"])
    if not named.endswith(".jsonl") or named not in files:
        return {}
    rows = dict(enumerate(lines(files[named]), 1))
    names = {n: str(json.loads(row).get("id", f"line-{n}")) if row.strip() else "" for n, row in rows.items()}
    equal = {task for task, (least, most, tried) in by_task.items() if tried >= TRIED and least == most}
    kept = [row for number, row in rows.items() if names[number] not in equal]
    return {named: "".join(kept)} if TRIED <= len(kept) < len(rows) else {}


def span_of(source: str, node: Any) -> tuple[int, int]:
    """Start and end of a node in characters. Its columns are in bytes."""
    lines = source.encode().splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return len(b"".join([*lines[: line - 1], lines[line - 1][:column]]).decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)


# ---- signs and remedies ----------------------------------------------------------------------------------------------

WORTH = 0.03
"""Least expected gain of a remedy that is tried: prior times the effect that is left, in units of the score."""
LIKELY = 0.4
"""Prior from which remedies are also proposed together."""
BROKEN = frozenset({"same_score", "leaking_judge"})
"""Causes that leave nothing to propose: the scores do not measure the answers."""
TRIED = 4
"""Episodes of a task that show whether it teaches."""
LACKING = 0.2
"""Share of the prompts without an input from which it counts as unseen."""


LISTS = frozenset({"job.sampling.override"})
"""Settings to which several remedies add."""


class Remedy(Declared):
    """A row of `remedies.toml`, which documents the fields."""

    name: str
    cause: str = Field(alias="for")
    kind: Kind
    prior: float
    why: str
    predicts: str
    refutes: str
    set: Mapping[str, str] = {}
    low: float = 0.0
    high: float = float("inf")
    edit: str = ""
    unless: frozenset[str] = frozenset()

    def changes(self, settings: Mapping[str, Value]) -> dict[str, Value]:
        """The settings that it changes. Empty if one of them has no present value or would not change."""
        found: dict[str, Value] = {}
        for name, rule in self.set.items():
            present = settings.get(name)
            if rule[0] == "+":
                listed = present if isinstance(present, tuple) else ()
                if rule[1:] in listed:
                    return {}
                found[name] = (*listed, rule[1:])
                continue
            value: Any = tomllib.loads(f"v = {rule[1:]}")["v"]
            if rule[0] == "*":
                if not isinstance(present, int | float) or isinstance(present, bool):
                    return {}
                scaled = float(f"{min(max(present * float(value), self.low), self.high):.6g}")
                value = round(scaled) if isinstance(present, int) else scaled
            if value == present:
                return {}
            found[name] = value
        return found


@cache
def table() -> tuple[tuple[SignRule, ...], tuple[Remedy, ...]]:
    content = toml_of("agentjet.research.campaign", "remedies.toml")
    return tuple(map(SignRule.model_validate, content["sign"])), tuple(map(Remedy.model_validate, content["remedy"]))


def facts_of(run: Outcome) -> dict[str, float]:
    """The facts of a run that were reported."""
    if run.score is None:
        return {}
    found: dict[str, float | None] = {
        **run.facts,
        "score": run.score,
        "left": 1.0 - run.score,
        "score_fall": max(run.curve, default=run.score) - run.score,
        "score_first": run.curve[0] if run.curve else None,
        "unseen_fields": float(len(unseen_fields(run))),
    }
    if run.facts.get("held_out_error"):
        found["fall_errors"] = (found["score_fall"] or 0.0) / run.facts["held_out_error"]
    signals = Signals(run.signals)
    early, late = partial(third, signals, 0), partial(third, signals, -1)
    found |= {
        "zero_variance": early("groups/zero_variance"),
        "reward_early": early("reward/mean"),
        "reward_late": late("reward/mean"),
        "kl_late": late("policy/kl"),
        "entropy_late": late("policy/entropy"),
    }
    cut, first, last = early("completion/truncated"), early("policy/entropy"), late("policy/entropy")
    if cut is not None:
        found["truncated"] = max(cut, late("completion/truncated") or 0.0)
    if first and last is not None:
        found["entropy_kept"] = last / first
    for name in ("temperature", "max_tokens"):
        found[f"overridden_{name}"] = fmean(share or 0.0 for share in run.signals.get(f"overridden/{name}", (0.0,)))
    pays = {*run.curve} | {pay for least, most, _ in run.by_task.values() for pay in (least, most)}
    if run.by_task:
        found["spread"] = max(pays) - min(pays)
    known = [(least, most) for least, most, number in run.by_task.values() if number >= TRIED]
    if known:
        found["mixed"] = sum(most > least for least, most in known) / len(known)
    for name in ("temperature", "recipe.kl_coef", "optimizer.lr", "group_size", "max_tokens"):
        value = run.settings.get(f"job.{name}")
        if isinstance(value, int | float):
            found[name.rpartition(".")[2]] = float(value)
    return {name: float(value) for name, value in found.items() if value is not None}


def third(signals: Signals, which: int, name: str) -> float | None:
    """Mean of a signal's first or last third."""
    values = signals[name]
    part = values[: max(1, len(values) // 3)] if which == 0 else values[-max(1, len(values) // 3) :]
    part = part[np.isfinite(part)]
    return float(part.mean()) if len(part) else None


def unseen_fields(run: Outcome) -> list[str]:
    """Inputs of the tasks that a good part of the prompts lack."""
    return sorted(
        name.removeprefix(UNSEEN) for name, share in run.facts.items() if name.startswith(UNSEEN) and share > LACKING
    )


def signs(run: Outcome) -> list[Sign]:
    """Signs of a run, in the order of the table."""
    facts = facts_of(run)
    return [Sign(rule.cause, rule.meaning, rule.evidence(facts)) for rule in table()[0] if rule.holds(facts)]


def causes(run: Outcome) -> frozenset[str]:
    """The causes of a run that are not noisy: whether they show does not depend on the seed."""
    facts = facts_of(run)
    return frozenset(rule.cause for rule in table()[0] if not rule.noisy and rule.holds(facts))


def broken(run: Outcome) -> list[str]:
    """Why nothing can be proposed for a run."""
    return [sign.seen for sign in signs(run) if sign.cause in BROKEN]


class Strategist:
    """A `Proposer`."""

    name = "strategist"

    def propose(self, view: View, most: int) -> Sequence[Intervention]:
        run = view.observation
        shown = {sign.cause for sign in signs(run)}
        if broken(run):
            return []
        left = facts_of(run).get("left", 1.0)
        fitting = [row for row in table()[1] if (row.cause in shown or not row.cause) and not row.unless & shown]
        rows = [row for row in fitting if row.prior * left >= WORTH and row.name not in view.vetoed]
        found = [(row, made) for row in rows if (made := combined(view, [row])) is not None]
        found.sort(key=lambda pair: -pair[0].prior)
        best = {row.cause: row for row, _ in reversed(found) if row.prior >= LIKELY}
        together = combined(view, sorted(best.values(), key=lambda row: (-row.prior, row.cause)))
        for_signs = [*([together] if together else []), *(made for row, made in found if row.cause)]
        others = [made for row, made in found if not row.cause]
        for proposed in (for_signs, others):  # others only if no sign has a remedy left, because each costs a screen
            unique = {made.name: made for made in reversed(proposed) if made.name not in view.tried}
            if unique:
                return [*reversed(unique.values())][:most]
        return []


EDITS: Mapping[str, Callable[[View, Files], Files]] = {
    "show_fields": lambda view, files: show_fields(files, unseen_fields(view.observation)),
    "remove_temperature": lambda view, files: remove_argument(files, "temperature"),
    "remove_max_tokens": lambda view, files: remove_argument(files, "max_tokens"),
    "judge_reward": lambda view, files: judge_reward(files, view.judge_source),
    "keep_mixed": lambda view, files: keep_mixed(files, view.observation.by_task),
}


def combined(view: View, rows: Sequence[Remedy]) -> Intervention | None:
    """These remedies as one intervention, without those that change nothing; None if none is left."""
    run, files = view.observation, dict(view.files)
    changes: dict[str, Value] = {}
    used: list[Remedy] = []
    for row in rows:
        changed = EDITS[row.edit](view, files) if row.edit else {}
        news = {} if changed else row.changes({**run.settings, **changes})
        if (news and not {*changes} & {*news} - LISTS) or changed:
            changes |= news
            files |= changed
            used.append(row)
    if not used:
        return None
    kinds = {row.kind for row in used}
    predicts, refutes = used[0].predicts, used[0].refutes
    if len(used) > 1:
        predicts = "the score rises more than by one of them alone, because each can hide the others"
        refutes = "the score stays although all the signs are gone"
    facts = {name: f"{value:.3g}" for name, value in facts_of(run).items()} | {
        "unseen_names": ", ".join(unseen_fields(run))
    }
    return Intervention(
        " + ".join(row.name for row in used)[:LONGEST_NAME],
        kinds.pop() if len(kinds) == 1 else "agent",
        changes,
        unified_diff(view.files, files),
        why="; ".join(row.why.format(**facts) for row in used),
        predicts=predicts,
        refutes=refutes,
        evidence=(view.observed,),
    )
