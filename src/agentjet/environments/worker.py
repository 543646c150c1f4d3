"""A process of an environment: `python -m agentjet.environments.worker MEBIBYTES`.

Orders are JSON lines on standard input, answers are JSON lines on standard output. Prints of the library go to
standard error. The first order is `{"kind": ..., "settings": {...}}`.

There are two processes. The inner one imports the library. The outer one guards it: it ends everything that the inner
one started when the client or the inner process ends, or when all of them together use too much memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from agentjet.environments.kind import EnvironmentTask, Kind
from agentjet.environments.model import Model
from agentjet.environments.registry import check_installed, find
from agentjet.errors import AgentJetError, ConfigError
from agentjet.sandbox.usage import descendants, memory_of
from agentjet.types import Reward, shown

LONGEST_REASON = 2000
MAX_ANSWER = 64 << 20
"""Bytes of an answer."""
TICK_SECONDS = 0.1
KILL_SECONDS = 10.0
"""Longest attempt to end processes that start new ones."""
CLOSE_SECONDS = 2.0
"""Time for the environment to remove what outlives processes, such as containers."""
ENDED = "ended"
"""Marks the last answer of a process that the outer one ended."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OURS = Path(__file__).parents[1]
FOLDER = Path.cwd()
"""The process's own empty folder."""
_prints: list[int] = []
"""A second descriptor of standard error."""


def main() -> None:
    _control(PR_SET_CHILD_SUBREAPER, 1)
    outer = os.getpid()
    if inner := os.fork():
        guard(inner, int(sys.argv[1]))
    _control(PR_SET_PDEATHSIG, signal.SIGKILL)  # The environment cannot get away by an end of the outer process.
    if os.getppid() != outer:
        os._exit(1)
    os.setsid()
    answer_orders()


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---- the outer process -----------------------------------------------------------------------------------------------


def guard(inner: int, most_memory: int) -> None:
    """Waits for the end of the inner process or of the client, ends the rest, and ends as the inner one did.

    The client asks for the end with SIGTERM. `most_memory` is in MiB.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    waking = _wake_up_on(signal.SIGCHLD)
    client = os.getppid()
    events = select.poll()
    events.register(waking)
    events.register(0, 0)  # Only the end of the input: the inner process reads it.
    deadline, ended, status = inf, 0, 0
    while ended != inner and time.monotonic() < deadline:
        happened = dict(events.poll(TICK_SECONDS * 1000))
        if waking in happened:
            os.read(waking, 512)
        if deadline == inf and (0 in happened or asked or os.getppid() != client):
            events.unregister(0)
            deadline = time.monotonic() + CLOSE_SECONDS
            os.kill(inner, signal.SIGTERM)
        if uses_more_than(most_memory << 20):
            os.kill(inner, signal.SIGKILL)
            reason = f"it used more than {most_memory} MiB of memory and was ended: use less, or raise memory"
            os.write(1, _refusal(reason, ENDED).encode() + b"\n")
            break
        ended, status = os.waitpid(-1, os.WNOHANG)
    end_all(inner)
    code = os.waitstatus_to_exitcode(status) if ended == inner else 0
    if code < 0:
        with suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have no handler.
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def uses_more_than(most: int) -> bool:
    """True if the processes below this one use more bytes together. The exact sum is slow, and not larger."""
    pids = descendants(os.getpid())
    return all(memory_of(pids, shared_once=exact) > most for exact in (False, True))


def _wake_up_on(number: signal.Signals) -> int:
    """Returns a descriptor that becomes readable at every signal that has a handler, and gives `number` one."""
    waking, woken = os.pipe()
    os.set_blocking(waking, False)
    os.set_blocking(woken, False)
    signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    return waking


def end_all(inner: int) -> None:
    """Ends every process below this one, also those that left its session."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(inner, signal.SIGKILL)
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


# ---- the inner process -----------------------------------------------------------------------------------------------


def answer_orders() -> None:
    _control(PR_SET_CHILD_SUBREAPER, 1)  # What the episode leaves behind can be found below this process.
    orders, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # Programs that the library starts must not read orders,
    os.dup2(2, 1)  # and what they print is not an answer.
    _prints.append(os.dup(2))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal: the parent ends this process.
    signal.signal(signal.SIGTERM, _unwind)
    kind: Kind | None = None
    try:
        for line in orders:
            order = json.loads(line)
            if kind is None:
                kind, answer = _started(order)
            else:
                answer = _answer(lambda: ORDERS[order["do"]](kind, order))  # noqa: B023  called at once
            answers.write(answer + "\n")
            answers.flush()
    except _Ended:
        pass
    finally:
        if kind is not None:
            kind.close()


class _Ended(BaseException):
    """The outer process asks for the end."""


def _unwind(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


def _started(order: Mapping[str, Any]) -> tuple[Kind | None, str]:
    try:
        kind = find(order["kind"])
        check_installed(order["kind"], kind)
        return kind.model_validate(order["settings"]), json.dumps({"result": None})
    except (AgentJetError, ValueError) as error:
        return None, _refusal(str(error), "settings")


def _tasks(kind: Kind, order: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [asdict(task) for task in kind.listed()]


def _play(kind: Kind, order: Mapping[str, Any]) -> dict[str, Any]:
    with _episode(kind.keeps_processes):
        os.environ.update(order["variables"])
        asked: list[Any] | None = [] if order["with_actions"] else None
        reward = kind.play(EnvironmentTask(**order["task"]), Model(**order["model"], asked=asked))
    if not isinstance(reward, Reward):
        raise TypeError(f"{type(kind).__name__}.play returned {shown(reward)}: return a Reward")
    return {"reward": asdict(reward)} | ({} if asked is None else {"actions": asked})


@contextmanager
def _episode(keeps_processes: bool) -> Iterator[None]:
    """Undoes what an episode changed: the working folder, the environment variables, and processes that it left."""
    variables, processes = dict(os.environ), descendants(os.getpid())
    _go_home()
    for output in (1, 2):
        try:
            os.fstat(output)
        except OSError:  # The episode before closed it: another file would get its number.
            os.dup2(_prints[0], output)
    try:
        yield
    finally:
        _go_home()
        os.environ.clear()
        os.environ.update(variables)
        if not keeps_processes:
            end_left(processes)


def _go_home() -> None:
    FOLDER.mkdir(exist_ok=True)  # The episode may have removed it.
    os.chdir(FOLDER)


def end_left(kept: Collection[int]) -> None:
    """Ends the processes below this one, without those of `kept`."""
    deadline = time.monotonic() + KILL_SECONDS
    while (left := set(descendants(os.getpid())).difference(kept)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # It is not a child of this process, or the library waited for it.
                os.waitpid(pid, 0)


ORDERS: dict[str, Callable[[Kind, Mapping[str, Any]], Any]] = {"tasks": _tasks, "play": _play}


def _answer(work: Callable[[], Any]) -> str:
    try:
        answer = json.dumps({"result": work()})
    except ConfigError as error:
        return _refusal(str(error), "settings")
    except _Ended:
        raise
    except BaseException as error:  # The boundary: a library may raise anything.
        traceback.print_exc()
        return _refusal(_described(error), "environment")
    if len(answer) > MAX_ANSWER:
        return _refusal(
            f"its answer has {len(answer) >> 20} MiB, and {MAX_ANSWER >> 20} are allowed: list fewer tasks with "
            "num_tasks, or make payloads, metrics and texts shorter",
            "environment",
        )
    return answer


def _refusal(reason: str, wrong: str) -> str:
    return json.dumps({"error": reason[:LONGEST_REASON], "wrong": wrong})


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
