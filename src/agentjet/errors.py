"""The exception tree: `ConfigError`, `RequestError`, `ComputeError`, `CheckpointError`, `TrackerError`, `Unreachable`.

A refusal does not know HTTP: `protocol.STATUSES` has the status of each class.

Messages to users name the setting or parameter, its value and the way out. An exception inside an agent is not part of
this tree: it aborts that agent's episode and is counted.
"""

from __future__ import annotations

import copyreg
import faulthandler
import re
import tempfile
import traceback
from collections.abc import Iterable
from difflib import SequenceMatcher
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

LIBRARIES = ("numpy", "torch", "pydantic")
"""Packages whose lines are not the place of a failure: they were called with something wrong."""
LEAST_SIMILAR = 0.6
"""Smallest share of equal characters of a name that is suggested."""
SECRET_PATTERNS = (
    (re.compile(r"/k/[^/\s\"']+"), "/k/…"),
    (re.compile(r"(aj[ks])-[\w.~-]+"), r"\1-…"),
    (re.compile(r"(?i)(bearer\s+)[\w.~+/=-]{8,}"), r"\1…"),
    (re.compile(r"(\w://)[^/\s\"'@]+@"), r"\1…@"),
)


class AgentJetError(Exception):
    """Base class of all exceptions of AgentJet. Copies have the same attributes, also in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which lack what its constructor takes by keyword.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(AgentJetError):
    """A setting is unknown, malformed or impossible. The process must not start."""


class RecipeError(ConfigError):
    """A hook of the recipe failed, or returned what cannot be trained. The run stops, and nothing is lost."""


def _encodable(text: str) -> str:
    """Returns the text with lone surrogates as escapes, because UTF-8 cannot encode them."""
    return text.encode(errors="backslashreplace").decode()


class RequestError(AgentJetError):
    """A refused request.

    `message` is one sentence for people. `code` is stable and for programs. `param` is the name of the wrong field, or
    None.
    """

    code: str = "invalid_request"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        self.message = _encodable(message)
        self.param = None if param is None else _encodable(param)
        super().__init__(self.message)
        self.code = code or self.code


class InvalidRequest(RequestError):
    """The request is malformed or impossible."""


class Unprocessable(InvalidRequest):
    """A well-formed request of the control API has a value that cannot be honoured."""


class MethodNotAllowed(InvalidRequest):
    """The path does not take this method. `allowed` are those it takes, without HEAD."""

    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: Iterable[str] = (), code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.allowed = tuple(allowed)


class ContextOverflow(InvalidRequest):
    """The prompt leaves no room for an answer in the context. The message is that of OpenAI's API.

    `asked` is the name of the prompt's parameter. `num_tokens` is the length of the prompt, or a lower bound of it
    (`or_more`). `maximum` is the context length.
    """

    code = "context_length_exceeded"

    def __init__(self, asked: str, num_tokens: int, maximum: int, *, or_more: bool = False) -> None:
        super().__init__(
            f"This model's maximum context length is {maximum} tokens. However, your {asked} resulted in "
            f"{num_tokens} tokens{' or more' if or_more else ''}, which leaves no room for an answer. "
            f"Please reduce the length of the {asked}.",
            param=asked,
        )
        self.num_tokens = num_tokens
        self.maximum = maximum


class Unauthorized(RequestError):
    """No key, a wrong key or an expired key."""

    code = "unauthorized"


class Forbidden(RequestError):
    """A valid key, but not for this."""

    code = "forbidden"


class NotFound(RequestError):
    """The requested object does not exist."""

    code = "not_found"


class Conflict(RequestError):
    """The present state does not allow the request."""

    code = "conflict"


class OperationConflict(Conflict):
    """An operation is out of order, or repeats a number with another body."""

    code = "operation_conflict"


class TooLarge(RequestError):
    """The request is larger than the server accepts."""

    code = "too_large"


class Later(RequestError):
    """The request cannot be served now: retry after `retry_after` seconds."""

    code = "later"

    def __init__(self, message: str, *, retry_after: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class Unavailable(Later):
    """The server, or a part that the request needs, cannot serve any such request now."""


def run_closed() -> Unavailable:
    """Returns the refusal of a request of a run that was open when the request began."""
    return Unavailable("The run was closed during the request.", code="run_closed", retry_after=1.0)


class ServerFailed(RequestError):
    """The server failed to serve a valid request. A repeated request would probably fail, too."""


class UpstreamFailed(ServerFailed):
    """Another server, which this one asked for the answer, failed."""


class StorageFailed(ServerFailed):
    """The server could not write the files that the request needs."""


class ComputeError(AgentJetError):
    """The backend failed."""


class OutOfCache(ComputeError):
    """The sequence is too long for the sampler's cache."""


class GrammarError(ComputeError):
    """The sampler cannot follow a grammar."""


class WorkerDied(ComputeError):
    """The worker process ended unexpectedly; the gateway starts another.

    `during` is the policy whose operation the worker applied, or a policy of the only run that it sampled for, as
    `RUN/POLICY`; else empty.
    """

    def __init__(self, message: str, *, during: str = "") -> None:
        super().__init__(message)
        self.during = during


class WorkerHung(WorkerDied):
    """The worker process made no progress for `server.worker_timeout` seconds and was killed."""


class HookHung(WorkerHung):
    """A hook of a recipe did not return within `server.hook_timeout` seconds, so its process was ended.

    The run of the policy `during` stops with this reason. Other runs of the process continue on another one.
    """


class PolicyRemoved(WorkerDied):
    """The policy was removed from its worker, or no worker has it. The worker did not crash."""


class CheckpointError(AgentJetError):
    """A checkpoint could not be written, or is not the expected one."""


class TrackerError(AgentJetError):
    """The library of a tracker, such as W&B, failed. No training depends on it."""


LONGEST_COMPARED = 200
"""Characters of a wrong name to which known names are compared. The work grows with their square."""


class Unreachable(AgentJetError):
    """The server did not answer within the retries (client side)."""


def nearest_name(name: str, known: Iterable[str], *, separator: str = "") -> str | None:
    """Returns the known name that `name` probably means: the one with the fewest edits, among those that are similar.

    Capitals do not count. With a `separator`, names are paths, such as `job.batch_size`: they are compared without the
    beginning that they share, and by their last parts.
    """
    if len(name) > LONGEST_COMPARED:
        return None
    near = [(*_difference(name.casefold(), other.casefold(), separator), other) for other in known]
    return min(near)[2] if (near := [one for one in near if one[0] < inf]) else None


def counted(num: object, noun: str) -> str:
    """A number with its noun, such as `1 rank` or `2 ranks`. `num` may be a range, such as `1..4`."""
    return f"{num} {noun}{'' if str(num) == '1' else 's'}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, separator: str = "") -> str:
    """Returns the way out of a wrong name: the nearest known one as a question, or the clause `otherwise`."""
    near = nearest_name(name, known, separator=separator)
    return f"did you mean {near!r}?" if near else otherwise


def _difference(name: str, other: str, separator: str) -> tuple[float, float]:
    """Returns the number of edits and, for equal numbers, the share of unequal characters. Infinite: not similar."""
    ways = [[(name, other)]]
    if separator:
        parts, others = name.split(separator), other.split(separator)
        while len(parts) > 1 and len(others) > 1 and parts[0] == others[0]:
            parts, others = parts[1:], others[1:]
        whole = list(zip(parts, others, strict=True)) if len(parts) == len(others) else []
        ways = [whole, [(parts[-1], others[-1])]]
    costs = [
        sum(edit_distance(*pair) for pair in pairs) + extra
        for extra, pairs in enumerate(ways)  # Another place costs an edit and more likeness.
        if pairs and all(_share_of_equal(*pair) * (1 - 0.05 * extra) >= LEAST_SIMILAR for pair in pairs)
    ]
    return min(costs, default=inf), 1 - _share_of_equal(name, other)


def edit_distance(one: str, other: str) -> int:
    """The number of inserted, removed, replaced or exchanged characters (Damerau 1964, optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, char in enumerate(one, 1):
        previous, row = row, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (char != wanted)))
            if i > 1 and j > 1 and char == other[j - 2] and one[i - 2] == wanted:
                row[j] = min(row[j], before[j - 2] + 1)
        before = previous
    return row[-1]


def _share_of_equal(one: str, other: str) -> float:
    return SequenceMatcher(None, other, one).ratio()


def install_extra(*extras: str) -> str:
    """Returns the way to install extras of this package, which is not on PyPI: its name there is another project's."""
    named = f"[{','.join(extras)}]"
    return f"pip install '.{named}' in a checkout of AgentJet, or its wheel (make wheel) with {named}"


def failure(error: BaseException) -> str:
    """Returns `FILE:LINE: TYPE: MESSAGE` of an error of a user's code. The line is the innermost that is not of one of
    `LIBRARIES`.
    """
    frames = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES
        and not frame.f_code.co_filename.startswith("<frozen")
    ]
    place = frames[-1] if frames else "an unknown line"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return f"{place}: {type(error).__name__}: {error}"


def redact(text: str) -> str:
    """Returns `text` without keys and tokens."""
    for pattern, instead in SECRET_PATTERNS:
        text = pattern.sub(instead, text)
    return text


class StackLine(NamedTuple):
    """A function that a thread is in, and its present line."""

    file: str
    line: int
    function: str


def thread_stack(thread: int) -> list[StackLine]:
    """Returns the stack of a running thread, innermost function first, at most 100. Empty for an unknown thread."""
    # The frames of `sys._current_frames` change while the thread runs on: `f_back` crashed CPython 3.11.
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = re.split(r"^(?:Current t|T)hread 0x([0-9a-f]+).*$", file.read(), flags=re.MULTILINE)
    found = {int(number, 16): stack for number, stack in zip(stacks[1::2], stacks[2::2], strict=True)}
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', found.get(thread, ""), re.MULTILINE)
    return [StackLine(name, int(line), function) for name, line, function in lines]


def queued_seconds(task: Path) -> float:
    """Returns the seconds for which a thread was ready to run and had no core, by its folder `/proc/PID/task/TID`.

    0 if the system does not count them, and for a thread that ended.
    """
    try:
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
