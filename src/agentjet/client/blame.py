"""Where in an agent an exception came from: the file and line its author knows, not those of the libraries below."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from agentjet.errors import InvalidRequest

OURS = Path(__file__).parents[1]
"""What lies there, a reward read from a program's output, say, is nobody's agent to mend."""


def place_of(agent: Callable[..., Any], error: BaseException) -> str:
    """`file:line in function`: the innermost line of the agent's own file that `error` passed through, or that of the
    agent's definition when what it returned is at fault; else empty.
    """
    own = _code_of(agent)
    if own is None or Path(own.co_filename).is_relative_to(OURS):
        return ""
    cause: BaseException | None = error
    while cause is not None:
        lines = [
            (frame.f_code.co_name, line)
            for frame, line in traceback.walk_tb(cause.__traceback__)
            if frame.f_code.co_filename == own.co_filename
        ]
        if lines:
            name, line = lines[-1]
            return f"{own.co_filename}:{line} in {name}"
        cause = cause.__cause__
    if isinstance(error, InvalidRequest) and error.code == "invalid_reward":
        return f"{own.co_filename}:{own.co_firstlineno} in {own.co_name}"
    return ""


def _code_of(agent: Callable[..., Any]) -> CodeType | None:
    while isinstance(agent, functools.partial):
        agent = agent.func
    agent = inspect.unwrap(agent)
    if not inspect.isroutine(agent):
        agent = getattr(type(agent), "__call__", agent)  # noqa: B004 - an object's own method, to be read
    code = getattr(agent, "__code__", None)
    return code if isinstance(code, CodeType) else None
