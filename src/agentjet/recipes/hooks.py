"""Calls the hooks of a recipe, checks what they return, and bounds the time that code of a plug-in takes.

A hook that fails, or returns what cannot be trained, raises `RecipeError` with the recipe, the hook, the value and the
line of the file. The run stops with that message. Its finished episodes and its batch stay in the journal, so that the
run continues with the mended recipe. Shapes: M targets.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import copy_context
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from agentjet.errors import AgentJetError, RecipeError, failure, queued_seconds
from agentjet.recipes.recipe import Attempt, FinishedGroup, Recipe, ReferenceMoves, Teaching, ValueHeads
from agentjet.recipes.rollout import Rollout, TaskStats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from agentjet.timeline.batch import TrainingBatch
    from agentjet.timeline.forest import Forest

Result = TypeVar("Result")
COMPUTED = ("new_", "reference")
"""Beginnings of the columns that a loss may read without `columns`, because the learner computes them."""
GRADES = ("teacher", "teacher_top")
UNNAMED = "the plug-in did not return"
WAY_OUT = "mend the recipe and start the server again; nothing is lost"
PACKAGE = __name__.partition(".")[0]
HOOK_SECONDS = 20.0
"""Default of `server.hook_timeout`, and the limit where no settings of a server are known."""


class ThreadTime:
    """Seconds since now, without those for which a thread of this process waits for a core."""

    def __init__(self, native_id: int) -> None:
        self.begun = time.monotonic()
        self._task = Path(f"/proc/self/task/{native_id}")
        self._queued = queued_seconds(self._task)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun - max(0.0, queued_seconds(self._task) - self._queued)


class HookCall(NamedTuple):
    """A call of a hook that has not returned."""

    recipe: str
    hook: str
    time: ThreadTime


RUNNING: dict[int, HookCall] = {}
"""The calls of hooks in this process by thread."""


@contextmanager
def running(recipe: str, hook: str) -> Iterator[None]:
    """Context of a call of a hook, or of the backward pass of its loss. `recipe` is the name."""
    thread = threading.get_ident()
    RUNNING[thread] = HookCall(recipe, hook, ThreadTime(threading.get_native_id()))
    try:
        yield
    finally:
        del RUNNING[thread]


def is_plug_in(kind: type) -> bool:
    """True for a class outside this package."""
    return kind.__module__.partition(".")[0] != PACKAGE


def overdue(thread: int, limit: str, unnamed: str = UNNAMED, way_out: str = WAY_OUT) -> str:
    """Returns a sentence about the hook that a thread calls, which did not return within `limit`. `unnamed` is the
    beginning for a thread that calls none.
    """
    frame, call = sys._current_frames().get(thread), RUNNING.get(thread)
    at = "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    text = unnamed if call is None else f"the recipe {call.recipe!r}: `{call.hook}` did not return"
    return f"{text} within {limit}; it was at {at}; {way_out}"


def overdue_call(seconds: float, limit: str) -> str:
    """Returns a sentence about a call that has not returned for more than `seconds`, or ''."""
    for thread, call in list(RUNNING.items()):
        if call.time.seconds > seconds:
            return overdue(thread, limit)
    return ""


class PlugInThreads:
    """Calls code of plug-ins in daemon threads with a time limit. A thread that does not return in time is abandoned:
    its result is ignored. It is named until it ends.
    """

    def __init__(
        self,
        seconds: float = HOOK_SECONDS,
        *,
        run: str = "",
        ends: bool = True,
        unnamed: str = UNNAMED,
        way_out: str = WAY_OUT,
    ) -> None:
        """`seconds` is the limit; that of a run is `server.hook_timeout`. `ends` ends abandoned threads that run
        Python code. `unnamed` and `way_out` are parts of the sentence about a thread: see `overdue`.
        """
        self._seconds = seconds
        self._words = unnamed, way_out
        self._of_run = f" of run {run}" if run else ""
        self._ends = ends

    def call(self, name: str, function: Callable[[], Result]) -> Result:
        """Returns the result of a function, or raises its error. Raises `RecipeError` after the limit."""
        with self._limited(name, function, self._seconds) as thread:
            while (left := self._seconds - thread.time.seconds) > 0 and not thread.result.done():
                wait([thread.result], left)
        return thread.result.result()

    async def wait_for(self, name: str, function: Callable[[], Result], *, most: float = math.inf) -> Result:
        """Waits beside the event loop, at most `most` seconds. The rest as `call`."""
        seconds = min(self._seconds, most)
        with self._limited(name, function, seconds) as thread:
            done = asyncio.wrap_future(thread.result)
            while (left := seconds - thread.time.seconds) > 0 and not done.done():
                await asyncio.wait([done], timeout=left)
        return await done

    def abandoned(self) -> list[str]:
        """Returns a sentence about each abandoned thread that has not ended."""
        now = time.monotonic()
        alive = [thread for thread in threading.enumerate() if isinstance(thread, _PlugInThread)]
        own = [thread for thread in alive if thread.abandoned_by is self]
        return [f"thread {one.name!r}: {self._overdue(one, f'{now - one.time.begun:.0f} s')}" for one in own]

    def _overdue(self, thread: _PlugInThread[Any], limit: str) -> str:
        return overdue(thread.ident or 0, limit, *self._words)

    @contextmanager
    def _limited(self, name: str, function: Callable[[], Result], seconds: float) -> Iterator[_PlugInThread[Result]]:
        """Context of the wait for a thread that calls a function."""
        thread = _PlugInThread(name + self._of_run, function)
        limit = f"{seconds:g} s"
        if self._of_run and seconds == self._seconds:
            limit += " (server.hook_timeout)"
        late = ""
        try:
            yield thread
        finally:
            if not thread.result.done():  # The caller may have been cancelled.
                late = self._overdue(thread, limit)
                thread.abandon(self, ends=self._ends)
        if late:
            raise RecipeError(late)


class _PlugInThread(threading.Thread, Generic[Result]):
    """A daemon thread that calls a function."""

    def __init__(self, name: str, function: Callable[[], Result]) -> None:
        """Starts the thread. It has the context variables of the caller."""
        super().__init__(target=copy_context().run, args=(self._call, function), name=name, daemon=True)
        self.result: Future[Result] = Future()
        self.abandoned_by: PlugInThreads | None = None
        self._lock = threading.Lock()
        self.start()
        self.time = ThreadTime(self.native_id or 0)

    def abandon(self, by: PlugInThreads, *, ends: bool) -> None:
        """Ignores the result."""
        with self._lock:
            self.abandoned_by = by
            if ends and not self.result.done() and self.ident is not None:
                # An endless loop would take half of the time of all other threads for ever. A thread that waits in C
                # gets the exception once the wait is over.
                identity = ctypes.c_ulong(self.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(SystemExit))

    def _call(self, function: Callable[[], Result]) -> None:
        try:
            found = function()
        except BaseException as error:  # Boundary: the waiting thread raises it.
            with self._lock:
                if self.abandoned_by is None:
                    self.result.set_exception(error)
        else:
            with self._lock:
                if self.abandoned_by is None:
                    self.result.set_result(found)


VALIDATORS = PlugInThreads(way_out="make them faster; a server that runs reads the file again at its next start")
"""Threads of the validators of plug-ins, which run while settings are read: `server.hook_timeout` is not known then.
No run has stopped.
"""
IMPORTS = PlugInThreads(60.0, ends=False, unnamed="its import did not end", way_out="try again, or import less in it")
"""Threads that import plug-ins. Large libraries take long, and would be unusable after half of their import. A second
import finds the files in the memory of the machine, or the end of the first one.
"""


def called(recipe: Recipe, hook: str, function: Callable[[], Result]) -> Result:
    """Returns what a hook returns. Raises `RecipeError` if it fails."""
    try:
        with running(recipe.name, hook):
            return function()
    except (AgentJetError, MemoryError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # Boundary: the recipe may be a plug-in, which may also call `sys.exit`.
        if type(error).__name__ == "OutOfMemoryError":  # Of torch: the batch is too large, the recipe is not wrong.
            raise
        raise RecipeError(f"{_name(recipe, hook)} failed at {failure(error)}; {WAY_OUT}") from error


TYPES = {"value_heads": ValueHeads, "teaching": Teaching, "reference_moves": ReferenceMoves}
"""Types of properties that may also be None."""


def declared(recipe: Recipe, name: str) -> Any:
    """Returns a property of a recipe, which a plug-in may compute. Raises `RecipeError` for another type."""
    found = called(recipe, name, lambda: getattr(recipe, name))
    if name in TYPES and found is not None and not isinstance(found, TYPES[name]):
        raise _wrong(recipe, name, f"returned {found!r} instead of None or {TYPES[name].__name__}(...)")
    # A recipe that declares a parameter again loses its bounds.
    if isinstance(found, Teaching | ReferenceMoves) and (problem := found.problem()):
        raise _wrong(recipe, name, f"returned {found!r}: {problem}")
    return found


def accept(recipe: Recipe, group: FinishedGroup, others: frozenset[str]) -> str:
    """Returns the recipe's reason to drop a group, or ''. `others` are reasons that have another meaning."""
    try:
        reason = called(recipe, "accept", lambda: recipe.accept(group))
    except RecipeError:
        raise
    except AgentJetError as error:  # No request waits for the answer, so none can get the refusal.
        raise _wrong(recipe, "accept", f"failed at {failure(error)}") from error
    if not isinstance(reason, str) or (reason and (not re.fullmatch("[a-z_]+", reason) or reason in others)):
        raise RecipeError(
            f"the recipe {recipe.name!r} drops a group for the reason {reason!r}: `accept` returns '' to train the "
            f"group, or a short name of letters a-z and _, other than {', '.join(sorted(others))}; {WAY_OUT}"
        )
    return reason


def teaching(recipe: Recipe) -> Teaching | None:
    """Returns the teacher of a recipe that needs one."""
    return declared(recipe, "teaching") if "teacher" in declared(recipe, "needs") else None


def rollout(recipe: Recipe, task: TaskStats, default: Rollout, version: int) -> Rollout:
    """Returns how the next group of a task is sampled. `InvalidRequest` of the hook refuses the request."""
    hook = "rollout"
    found: Any = called(recipe, hook, lambda: recipe.rollout(task, default, version))
    if not isinstance(found, Rollout):
        raise _wrong(recipe, hook, f"returned {found!r} instead of `default` or `replace(default, ...)`")
    try:
        return found.checked(default, recipe.smallest_group)
    except ValueError as error:
        raise _wrong(recipe, hook, f"returned for task {task.task_id!r} {error}") from None


def teacher_context(recipe: Recipe, attempt: Attempt, others: Sequence[Attempt]) -> str | None:
    """Returns the text that only the teacher sees, or None if the attempt is not graded."""
    hook = "teacher_context"
    found: Any = called(recipe, hook, lambda: recipe.teacher_context(attempt, others))
    if found is not None and not isinstance(found, str):
        raise _wrong(recipe, hook, f"returned {found!r} instead of a text, or None for an attempt that is not graded")
    return found


def columns(
    recipe: Recipe, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
) -> tuple[Forest, dict[str, float]]:
    from agentjet.timeline.forest import Forest

    hook = "columns"
    result: Any = called(recipe, hook, lambda: recipe.columns(batch, outputs))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Forest)):
        raise _wrong(recipe, hook, f"returned {_kind(result)} instead of a forest and metrics")
    forest, metrics = result
    if not isinstance(metrics, dict) or not all(isinstance(value, Real) for value in metrics.values()):
        raise _wrong(recipe, hook, f"returned the metrics {metrics!r} instead of a dict of numbers")
    reads, teaching = declared(recipe, "reads"), declared(recipe, "teaching")
    top_k = teaching.top_k if teaching is not None else 0
    if "new_top" in reads and not top_k:
        raise _wrong(recipe, hook, "has no tokens for 'new_top' of `reads`: `teaching` must return Teaching(top_k=...)")
    for name in reads if forest.num_targets else ():  # The loss of a policy without a token is not computed.
        if name not in forest.targets and not name.startswith(COMPUTED):
            has = ", ".join(sorted(forest.targets))
            raise _wrong(recipe, hook, f"returned no column {name!r}, which `reads` names; the forest has {has}")
    given = {name: batch.forest.targets[name] for name in reads if name in batch.forest.targets} | {**outputs}
    # Otherwise the policy has diverged. A target that the teacher does not grade has NaN.
    if all(_is_finite(values) for name, values in given.items() if name not in GRADES):
        for name in forest.targets.keys() & set(reads):
            _check_column(recipe, hook, forest, forest[name], f"the column {name!r}", top_k)
    return forest, {name: float(value) for name, value in metrics.items()}


def weights(recipe: Recipe, forest: Forest) -> NDArray[np.float32]:
    found = called(recipe, "weights", lambda: recipe.weights(forest))
    _check_column(recipe, "weights", forest, found, "weights")
    return found


def contributing(recipe: Recipe, forest: Forest) -> NDArray[np.bool_]:
    found: Any = called(recipe, "contributing", lambda: recipe.contributing(forest))
    _check_column(recipe, "contributing", forest, found, "values")
    if found.dtype != bool:
        raise _wrong(recipe, "contributing", f"returned values of type {found.dtype} instead of bool")
    return found  # type: ignore[no-any-return]


def loss_hook(recipe: Recipe) -> str:
    """Returns the name of the hook that is the recipe's loss."""
    return "batch_loss" if declared(recipe, "takes_batch") else "token_loss"


def loss(recipe: Recipe, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the losses [M], or one number of a `batch_loss`, and metrics [M]. Values that are not finite are for
    `check_loss`.
    """
    from torch import Tensor

    hook = loss_hook(recipe)
    try:
        result: Any = called(recipe, hook, lambda: getattr(recipe, hook)(logp, columns))
    except RecipeError as error:
        missing = error.__cause__.args[:1] if isinstance(error.__cause__, KeyError) else ()
        if missing and missing[0] not in columns:
            what = str(error).removesuffix(f"; {WAY_OUT}")
            known = ", ".join(sorted(columns))
            raise RecipeError(f"{what}: the columns are {known}; add others to `reads`; {WAY_OUT}") from error
        raise
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise _wrong(recipe, hook, f"returned {_kind(result)} instead of the losses and a dict of metrics")
    loss, metrics = result
    if hook == "batch_loss":  # Numbers of the whole mini-batch.
        metrics = {name: _one_each(values, logp) for name, values in metrics.items()}
    wanted = {"losses": _one_each(loss, logp) if hook == "batch_loss" else loss}
    wanted |= {f"the metric {name!r}": values for name, values in metrics.items()}
    for what, values in wanted.items():
        if not isinstance(values, Tensor) or values.shape != logp.shape:
            raise _wrong(recipe, hook, f"returned {what} as {_kind(values)} instead of a tensor of {len(logp)} values")
    if not loss.requires_grad:
        raise _wrong(recipe, hook, "returned losses without gradient: compute them from `logp`, without `detach`")
    kinds = type(recipe), type(getattr(recipe, "loss", None))
    if kinds not in _CHECKED and any(map(is_plug_in, kinds)):
        _check_terms(recipe, hook, logp, columns)
        _CHECKED.add(kinds)
    return loss, metrics


_CHECKED: set[tuple[type, type]] = set()
"""Classes of plug-ins and their losses whose terms were checked."""


def _check_terms(recipe: Recipe, hook: str, logp: Tensor, columns: Mapping[str, Tensor]) -> None:
    """Raises `RecipeError` for a term that changes nothing: a sum with numbers that have a twin with gradient.

    A column without gradient has an effect as a factor: then the slope of the loss in it depends on something with
    gradient. As a summand it has none.
    """
    from torch.autograd import grad

    moving = [logp, *(values for name, values in columns.items() if name.startswith("new_") and values.requires_grad)]
    twins = {name.removeprefix("new_") for name in columns if name.startswith("new_")} | {"entropy"}
    for name in sorted(twins & columns.keys()):
        leaf = columns[name].detach().clone().requires_grad_()
        changed = {**columns, name: leaf}
        found: Any = called(recipe, hook, lambda: getattr(recipe, hook)(logp, changed))  # noqa: B023  called at once
        try:
            [slope] = grad(found[0].sum(), [leaf], create_graph=True, allow_unused=True)
            is_factor = slope is not None and slope.requires_grad
            mixed = grad(slope.sum(), moving, allow_unused=True) if is_factor else ()
        except RuntimeError:  # A function of the loss has no second derivative.
            continue
        if slope is not None and slope.any() and not any(one is not None and one.any() for one in mixed):
            raise _wrong(
                recipe,
                hook,
                f"adds {name!r}, which has no gradient, so this term changes nothing: put 'new_{name}' into `reads`, "
                f"and use columns['new_{name}']",
            )


def _one_each(values: Any, logp: Tensor) -> Any:
    """Returns one number as a tensor [M], and anything else as it is."""
    return values.expand_as(logp) if getattr(values, "shape", None) == () else values


def num_not_finite(loss: Tensor, logp: Tensor, columns: Mapping[str, Tensor]) -> float:
    """Returns the number of losses that are not finite although log-probability and columns are."""
    wrong = ~loss.detach().isfinite()
    for values in (logp, *columns.values()):
        is_finite = values.detach().isfinite()
        is_finite = is_finite.all(-1) if is_finite.dim() > 1 else is_finite  # Of the likely tokens of a target.
        wrong &= is_finite if wrong.shape else is_finite.all()
    return float(wrong.sum())


def check_loss(recipe: Recipe, num_not_finite: float, forest: Forest) -> None:
    """Raises `RecipeError` if some losses of a mini-batch are not finite."""
    if num_not_finite:
        raise _wrong(
            recipe,
            loss_hook(recipe),
            f"returned {num_not_finite:g} of {forest.num_targets} losses that are not finite",
        )


def has_state(recipe: Recipe) -> bool:
    """True if the recipe has the hook `next_state`."""
    return type(recipe).next_state is not Recipe.next_state


def next_state(recipe: Recipe, state: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the state of the recipe for the next batch. A batch with a metric that is not finite leaves it, because
    the policy may have diverged. The gateway names the metric and this hook.
    """
    if not all(map(math.isfinite, metrics.values())):
        return dict(state)
    hook = "next_state"
    found: Any = called(recipe, hook, lambda: recipe.next_state(state, metrics))
    if not isinstance(found, Mapping) or not all(
        isinstance(value, Real) and math.isfinite(value) for value in found.values()
    ):
        raise _wrong(recipe, hook, f"returned {found!r} instead of a dict of finite numbers")
    return {name: float(value) for name, value in found.items()}


def check_shape(recipe: Recipe, hook: str, values: Any, shape: tuple[int, ...], of: str) -> None:
    """Raises `RecipeError` unless the returned array has the shape. `of` names what the array has one value for."""
    import numpy as np

    if np.shape(values) != shape:
        raise _wrong(recipe, hook, f"returned {_kind(values)} instead of an array of shape {shape}: one value for {of}")


def check_group(recipe: Recipe, advantages: NDArray[np.float64], rewards: NDArray[np.float64]) -> None:
    """Raises `RecipeError` unless `group_advantages` returned one finite number for each reward."""
    import numpy as np

    hook = "group_advantages"
    check_shape(recipe, hook, advantages, rewards.shape, "each episode")
    if np.asarray(advantages).dtype.kind not in "bif":
        raise _wrong(recipe, hook, f"returned {list(advantages[:8])} instead of numbers")
    if not _is_finite(advantages):
        raise _wrong(
            recipe,
            hook,
            f"returned {_few(advantages)} for the rewards {_few(rewards)}: a division by a deviation of 0 needs a "
            "small number, such as 1e-6, in the divisor",
        )


def _check_column(recipe: Recipe, hook: str, forest: Forest, values: Any, what: str, top_k: int = 0) -> None:
    """Raises `RecipeError` unless the values [M] are finite numbers; with `top_k`, they may be [M, top_k]."""
    import numpy as np

    shapes = [(forest.num_targets,), *([(forest.num_targets, top_k)] if top_k else [])]
    if not isinstance(values, np.ndarray) or values.shape not in shapes:
        raise _wrong(
            recipe, hook, f"returned {what} as {_kind(values)} instead of an array of {forest.num_targets} tokens"
        )
    if not _is_finite(values):
        number = int((~np.isfinite(values)).sum())
        raise _wrong(recipe, hook, f"returned {what} with {number} of {len(values)} values that are not finite")


def _is_finite(values: Any) -> bool:
    import numpy as np

    return bool(np.isfinite(values).all())


def _wrong(recipe: Recipe, hook: str, what: str) -> RecipeError:
    return RecipeError(f"{_name(recipe, hook)} {what}; {WAY_OUT}")


def _name(recipe: Recipe, hook: str) -> str:
    return f"the recipe {recipe.name!r}: `{hook}`"


def _few(values: NDArray[np.float64]) -> str:
    return str([float(value) for value in values[:8]]) + ("..." if len(values) > 8 else "")


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
