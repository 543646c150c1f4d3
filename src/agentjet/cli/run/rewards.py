"""Where the reward of a command comes from: a Python function, the last line of its output, its exit code or a file.

A reward that cannot be read aborts the episode: it is not 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agentjet.client.agent_source import load_function
from agentjet.client.command import Result, Score
from agentjet.errors import ConfigError
from agentjet.types import Reward

WAYS = "FILE.py:FUNCTION, stdout, exit-code or file:NAME"


class NoReward(Exception):
    """A program ended well, but what it left is no reward."""


@dataclass(frozen=True)
class RewardSource:
    """`score` judges a result; `any_exit_code`: also of a program that exits with 1 to 124."""

    score: Score
    any_exit_code: bool = False
    is_function: bool = False


def reward_source(text: str) -> RewardSource:
    """What `--reward` names. Raises `ConfigError`."""
    if text == "stdout":
        return RewardSource(lambda task, result: from_stdout(result))
    if text == "exit-code":
        return RewardSource(lambda task, result: float(result.exit_code == 0), any_exit_code=True)
    kind, separator, name = text.rpartition(":")
    if kind == "file" and name:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"--reward {text}: the file must lie in the command's working directory")
        return RewardSource(lambda task, result: from_file(result.folder / name, name))
    if separator and kind.endswith(".py"):
        return RewardSource(load_function(text, option="--reward"), is_function=True)
    raise ConfigError(f"--reward {text}: expected {WAYS}")


def from_stdout(result: Result) -> Reward:
    """The last line that is not empty."""
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    if not lines:
        raise NoReward("stdout is empty: its last line must be the reward")
    return _parsed(lines[-1], "the last line of stdout")


def from_file(path: Path, name: str) -> Reward:
    """The whole of a file that the command wrote into its working directory."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NoReward(f"the file {name} of the reward: {error.strerror}") from None
    return _parsed(text, f"the file {name}")


def _parsed(text: str, what: str) -> Reward:
    try:
        found = json.loads(text, parse_int=float)  # one of 400 digits is no number to learn from: infinite
    except (ValueError, RecursionError):
        found = None
    whole = {"reward": found} if _is_number(found) else found
    if not isinstance(whole, dict) or not _is_number(whole.get("reward")):
        raise NoReward(f'{what} is {text.strip()[:100]!r}: expected a number or {{"reward": number}}')
    if unknown := set(whole) - {"reward", "by_role", "metrics"}:
        raise NoReward(f"{what} has the key {min(unknown)!r}: there are reward, by_role and metrics")
    maps = {key: whole.get(key, {}) for key in ("by_role", "metrics")}
    for key, values in maps.items():
        if not isinstance(values, dict) or not all(map(_is_number, values.values())):
            raise NoReward(f"{what} has {key} = {json.dumps(values)[:100]}: expected an object of numbers")
    return Reward(float(whole["reward"]), **maps)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
