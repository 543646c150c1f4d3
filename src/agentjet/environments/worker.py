"""A process of an environment: `python -m agentjet.environments.worker`.

Orders are JSON lines on standard input, answers are JSON lines on standard output. What the library prints goes to
standard error. The first order is `{"kind": ..., "settings": {...}}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentjet.client.agent_source import OURS
from agentjet.environments.kind import EnvironmentTask, Kind
from agentjet.environments.model import Model
from agentjet.environments.registry import check_installed, find
from agentjet.errors import AgentJetError, ConfigError
from agentjet.types import Reward

LONGEST_REASON = 2000
FOLDER = Path.cwd()
"""The process's own empty folder."""


def main() -> None:
    orders, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # Programs that the library starts must not read orders,
    os.dup2(2, 1)  # and what they print is not an answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal: the parent ends this process.
    kind: Kind | None = None
    for line in orders:
        order = json.loads(line)
        if kind is None:
            kind, answer = _started(order)
        else:
            answer = _answer(lambda: ORDERS[order["do"]](kind, order))  # noqa: B023  called at once
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if kind is not None:
        kind.close()


def _started(order: Mapping[str, Any]) -> tuple[Kind | None, dict[str, Any]]:
    try:
        kind = find(order["kind"])
        check_installed(order["kind"], kind)
        return kind.model_validate(order["settings"]), {"result": None}
    except (AgentJetError, ValueError) as error:
        return None, {"error": str(error), "wrong": "settings"}


def _tasks(kind: Kind, order: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [asdict(task) for task in kind.listed()]


def _play(kind: Kind, order: Mapping[str, Any]) -> dict[str, Any]:
    os.chdir(FOLDER)  # The episode before may have changed it.
    os.environ.update(order["variables"])
    reward = kind.play(EnvironmentTask(**order["task"]), Model(**order["model"]))
    if not isinstance(reward, Reward):
        raise TypeError(f"{type(kind).__name__}.play returned {reward!r}: return a Reward")
    return asdict(reward)


ORDERS: dict[str, Callable[[Kind, Mapping[str, Any]], Any]] = {"tasks": _tasks, "play": _play}


def _answer(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        result = work()
        json.dumps(result)
        return {"result": result}
    except ConfigError as error:
        return {"error": str(error), "wrong": "settings"}
    except (Exception, SystemExit) as error:  # The boundary: a library may raise anything.
        traceback.print_exc()
        return {"error": _described(error)[:LONGEST_REASON], "wrong": "environment"}


def _described(error: BaseException) -> str:
    """The error with its type, and the innermost line outside of AgentJet."""
    if isinstance(error, AgentJetError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(OURS)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    main()
    sys.stdout.flush()
