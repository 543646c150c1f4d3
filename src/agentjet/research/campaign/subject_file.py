"""subject.toml, which describes what a campaign improves and what judges it, as a `Subject`."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.research.records import dotted, refuse, unknown_key
from agentjet.research.subject import Subject

REQUIRED = {
    "model": "smollm2-135m",
    "agent": "agent.py:agent",
    "tasks": "tasks.jsonl",
    "held_out": "held_out.jsonl",
    "evaluator": "judge.py:score",
}
"""Examples by key."""
OPTIONAL = (
    *("reward", "hidden", "readable", "equal", "steps", "evaluations", "repeats", "concurrency", "floor", "patience"),
    "settings",
)
KEYS = (*REQUIRED, *OPTIONAL)
"""The keys of subject.toml, which are fields of `Subject`. Names of files are relative to its folder."""
ARM_KEYS = frozenset({"agent", "tasks", "reward", "concurrency", "settings"})
"""Keys that an intervention may change. The others are the judge's."""
HIDDEN = ["answer"]
DEFAULTS = {"hidden": HIDDEN, "concurrency": 16}
"""Where they are not those of `Subject`."""


def read_subject(path: Path) -> Subject:
    """The subject of a file that a user wrote. Raises `ConfigError`."""
    try:
        given = parse_subject(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--subject {path}: {getattr(error, 'strerror', error)}: give a subject.toml") from None
    return resolved(given, path.parent.absolute())


def parse_subject(text: str, name: str) -> Subject:
    """Raises `ConfigError` with the first wrong key, its value and the way out."""
    try:
        content = tomllib.loads(text)
        for key in content.keys() - set(KEYS):
            raise ConfigError(unknown_key(key, key, KEYS))
        for key in REQUIRED.keys() - content.keys():
            raise ConfigError(f"{key}: is required; add a line such as {key} = {REQUIRED[key]!r}")
        if isinstance(content.get("settings"), dict):
            content["settings"] = dict(dotted(content["settings"]))
        if isinstance(content.get("steps"), int):
            content.setdefault("evaluations", max(1, min(4, content["steps"])))
        return Subject.from_json({**DEFAULTS, **content, "judged": True})
    except (ConfigError, ValueError, RecursionError) as wrong:
        raise ConfigError(f"{name}: {wrong}") from None


def resolved(given: Subject, folder: Path) -> Subject:
    """With the model as an absolute path if it is a folder. Raises `ConfigError` for a file that is not there, and for
    held-out tasks in a file that arms must read.
    """
    for key in ("agent", "tasks", "held_out", "evaluator", "reward"):
        named = getattr(given, key)
        if not named and key == "reward":
            continue
        file, _, function = named.partition(":")
        is_tasks = key in ("tasks", "held_out") and named.endswith(".jsonl")
        wrong = not is_tasks and not (file.endswith(".py") and function.isidentifier())
        refuse(wrong, f"{key} = {named!r}: give FILE.py:FUNCTION{' or FILE.jsonl' * ('ta' in key)}")
        place = (folder / file).resolve()
        wrong = Path(file).is_absolute() or not place.is_relative_to(folder.resolve()) or not place.is_file()
        refuse(wrong, f"{key} = {named!r}: there is no file {file!r} in {folder}: name one of that folder")
        refuse(
            key != "held_out" and file == held_out_file(given),
            f"held_out = {given.held_out!r}: {key} is in the same file, which arms read: move the held-out tasks to a "
            "file that holds nothing else",
        )
    model = folder / given.model
    readable = tuple(str((folder / place).resolve()) for place in given.readable)
    return replace(given, model=str(model.resolve()) if model.is_dir() else given.model, readable=readable)


def held_out_file(given: Subject) -> str:
    return given.held_out.partition(":")[0]


def steps_as(given: Subject, first: Subject) -> int:
    """Steps of a full run, so that it learns from as many episodes as one of the first commit."""
    if first.equal == "steps":
        return first.steps
    return max(1, round(first.steps * episodes(first) / episodes(given)))


def episodes(given: Subject) -> float:
    """Training episodes of a batch."""
    return float(given.settings.get("job.batch_size", 8)) * float(given.settings.get("job.group_size", 8))


def flat_toml(given: Subject) -> str:
    """subject.toml in one spelling per content: a key a line, and the settings by their dotted names."""
    lines = [f"{key} = {json.dumps(getattr(given, key))}" for key in KEYS if key != "settings"]
    settings = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in sorted(given.settings.items())]
    return "\n".join([*lines, "", "[settings]", *settings, ""])
