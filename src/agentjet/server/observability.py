"""Observability of a server: events in the log, `metrics.jsonl`, times of a step, slow work, and the lag of the event
loop.

The lag: a timer in the loop notes the CPU time of the whole process between two of its runs. CPU time leaves out the
time that other programs take. A thread looks at the stack of the loop while the timer is late.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentjet
from agentjet.config import JobConfig
from agentjet.errors import ConfigError, Later, StackLine, thread_stack
from agentjet.front.calls import Tracing
from agentjet.protocol import Event, duration, remaining
from agentjet.recipes import hooks
from agentjet.swarm import SwarmState
from agentjet.swarm.batches import NOT_FINITE, WAY_OUT
from agentjet.types import SlowWork

log = logging.getLogger(__name__)
present_batch: ContextVar[int | None] = ContextVar("batch_id", default=None)


@contextmanager
def batch_context(batch: int) -> Iterator[None]:
    """Context whose log records carry this `batch_id`. Child tasks inherit it."""
    token = present_batch.set(batch)
    try:
        yield
    finally:
        present_batch.reset(token)


def divergence(step: Mapping[str, float]) -> str:
    """Returns the report if the weights after the batch with these metrics are not finite, else ''."""
    for name, value in step.items():
        policy, found, rest = name.rpartition("weights/finite")
        if found and not rest and value == 0:
            which = f"the policy {policy.rstrip('/')} has diverged" if policy else "the policy has diverged"
            return (
                f"{which}: its weights are not finite. Restart from an earlier checkpoint with a lower job.optimizer.lr"
            )
    return ""


def metrics_not_finite(steps: Sequence[Mapping[str, float]], job: JobConfig) -> str:
    """Returns a sentence about the metrics of steps that were not finite, with the hook that was not called, or ''."""
    found = dict.fromkeys(name for step in steps for name in step if name.startswith(NOT_FINITE))
    if not found:
        return ""
    names = ", ".join(repr(name.removeprefix(NOT_FINITE)) for name in found)
    num = sum(not found.keys().isdisjoint(step) for step in steps)
    where = "of the batch" if len(steps) == 1 else f"of {num} of the newest {len(steps)} batches"
    kept = (
        "; `next_state` was not called, so the state of the recipe is the old one"
        if hooks.has_state(job.recipe)
        else ""
    )
    return f"recipe {job.recipe.name!r}: the metrics {names} {where} are NaN or infinite, and were left out{kept}"


class MetricsFile:
    """`metrics.jsonl`: one line per learned batch, a copy of the journal's metrics. Write errors are logged only."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def append(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        line = json.dumps({"step": policy_version, "time": round(self._clock(), 3), **metrics})
        try:
            self._path.touch(0o600)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            log.warning("%s could not be written: %s", self._path, error)

    def check_journal(self, policy_version: int) -> None:
        """Raises `ConfigError` if the file has a batch after `policy_version`, the end of the journal."""
        newest = 0
        with suppress(OSError):
            for line in self._path.read_bytes().splitlines()[-2:]:  # The last one may be cut off.
                with suppress(ValueError, KeyError, TypeError):
                    newest = int(json.loads(line)["step"])
        if newest > policy_version:
            raise ConfigError(
                f"{self._path} has policy version {newest}, but the journal in the same folder ends at "
                f"{policy_version}: the journal is incomplete. {WAY_OUT}"
            )


class StepTimer:
    """Splits the time of a step into sampling, waiting (no call is sampled) and learning."""

    def __init__(self, busy_seconds: Callable[[], float], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._busy_seconds = busy_seconds
        self._monotonic = monotonic
        self.start_sampling()

    def start_sampling(self) -> None:
        self._sampling_since, self._busy_before = self._monotonic(), self._busy_seconds()

    def start_learning(self) -> None:
        self._learning_since, self._busy_after = self._monotonic(), self._busy_seconds()

    def metrics(self, num_sampled_tokens: int) -> dict[str, float]:
        """Returns `time/{sample,learn,wait}` in seconds, and the batch's sampled tokens per second of their sum."""
        sample = self._busy_after - self._busy_before
        wait = max(0.0, self._learning_since - self._sampling_since - sample)
        learn = self._monotonic() - self._learning_since
        speed = num_sampled_tokens / max(1e-9, sample + wait + learn)
        return {"time/sample": sample, "time/wait": wait, "time/learn": learn, "perf/tokens_per_second": speed}


@dataclass(eq=False)
class Telemetry:
    """The measurements of one run. `lag` and `tracing` are those of the server."""

    tracing: Tracing
    lag: LoopLag
    activity: Activity
    metrics: MetricsFile
    timer: StepTimer

    def __post_init__(self) -> None:
        self._step_ended = self.lag.now()

    def step_metrics(self, num_sampled_tokens: int) -> dict[str, float]:
        """Returns the times of a step, and the worst lag of the event loop since the step before, in seconds."""
        worst, self._step_ended = self.lag.worst(self._step_ended), self.lag.now()
        lag = {} if worst is None else {"server/loop_lag": worst.cpu, "server/loop_lag_wall": worst.wall}
        return {**self.timer.metrics(num_sampled_tokens), **lag}


def emit_event(swarm: SwarmState, kind: str, body: dict[str, Any]) -> None:
    """Records an event in the journal. Logs it if the journal refuses writes."""
    try:
        swarm.emit(kind, body)
    except Later as later:
        log.error("event %s %s is not in the journal: %s", kind, body, later)


def log_event(event: Event) -> None:
    """Logs an event with its episode or batch. The record's `event` attribute has the body for programs."""
    body, context = event.body, {"event": event.model_dump()}
    if "episode_id" in body:
        context["episode_id"] = body["episode_id"]
    if event.kind == "step":
        context["batch_id"] = body["policy_version"] - 1
    outcome = body.get("status") or body.get("state") or body.get("policy_version", "")
    log.info("event %d: %s %s", event.seq, event.kind, outcome, extra=context)


# ---- slow work -------------------------------------------------------------------------------------------------------

SLOW_SECONDS = 2.0
"""Shorter work has no times in its text, and its duration is not kept."""


@dataclass(slots=True)
class Work:
    """Slow work that began at `begun`. Set `done` as its parts are done."""

    kind: str
    text: str
    total: int
    begun: float
    done: int = 0


class Activity:
    """The slow work of one run. Work may contain other work; the innermost is shown."""

    def __init__(self, path: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._stack: list[Work] = []
        self._known = _read(path)

    @contextmanager
    def work(self, kind: str, text: str, total: int = 0) -> Iterator[Work]:
        """Context of slow work. `kind` names works of about the same duration; `total` is the number of its parts."""
        work = Work(kind, text, total, self._monotonic())
        self._stack.append(work)
        try:
            yield work
            self._keep(work)
        finally:
            self._stack.remove(work)

    @property
    def text(self) -> str:
        """A phrase about the present work, such as `saving checkpoint 40: 8 s so far, about 12 s left`, or ''."""
        if not self._stack:
            return ""
        work = self._stack[-1]
        elapsed, known = self._monotonic() - work.begun, self._known.get(work.kind, 0.0)
        parts = [f"{work.done} of {work.total}"] if work.total else []
        if elapsed >= SLOW_SECONDS:
            left = remaining(elapsed, work.done, work.total) or remaining(elapsed, elapsed, known)
            late = f"last time it took {duration(known)}" if 0 < known <= elapsed and not work.total else ""
            parts += [f"{duration(elapsed)} so far", *filter(None, [left or late])]
        return f"{work.text}: {', '.join(parts)}" if parts else work.text

    def _keep(self, work: Work) -> None:
        elapsed = self._monotonic() - work.begun
        if elapsed < SLOW_SECONDS or work.total:
            return
        self._known[work.kind] = round(elapsed, 1)
        with suppress(OSError):  # Only an estimate is lost.
            self._path.touch(0o600)
            self._path.write_text(json.dumps(self._known), encoding="utf-8")


def work_text(work: SlowWork) -> str:
    """A phrase such as `downloading the model x: 120 of 1,200 MB, about 40 s left`."""
    amount = f"{work.done:,.0f} of {work.total:,.0f} {work.unit}" if work.total else f"{work.done:,.0f} {work.unit}"
    return ", ".join(filter(None, [f"{work.text}: {amount}", remaining(work.seconds, work.done, work.total)]))


def _read(path: Path) -> dict[str, float]:
    """Returns the kept durations; none from a missing or damaged file."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(kind): float(seconds) for kind, seconds in json.loads(path.read_bytes()).items()}
    return {}


# ---- the lag of the event loop ---------------------------------------------------------------------------------------

EVERY = 0.01
"""Seconds between two runs of the timer."""
BOUND = 0.05
"""CPU seconds for which no request, batch, checkpoint or clean-up may hold the loop."""
LOGGED = 1.0
"""CPU seconds from which a gap is logged."""
RECENT_SECONDS = 600.0
"""Age up to which the status and the health rule show a gap."""
PACKAGE = Path(agentjet.__file__).parent
MAX_GAPS = 512


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between two runs of the timer."""

    at: float
    """Monotonic time of its end."""
    cpu: float
    """CPU seconds of the process, all threads, at most the wall seconds."""
    wall: float
    held_by: str = ""
    """The function of AgentJet that ran in it, or ''."""


class LoopLag:
    """Measures from `start` to `close`. It belongs to one event loop, and `worst` is called in it."""

    def __init__(
        self, *, cpu: Callable[[], float] = time.process_time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._cpu = cpu
        self._monotonic = monotonic
        self._gaps: list[Gap] = []
        """Oldest first, each with more CPU time than all after it: others are the worst of no period until now."""
        self._last = (0.0, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._held_by = ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to measure in the running event loop, or starts again without the gaps so far."""
        self._gaps.clear()
        self._last = (self._cpu(), self._monotonic())
        if self._timer is None:
            self._closed.clear()
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._run)
            arguments = (threading.get_ident(),)
            self._thread = threading.Thread(target=self._look, args=arguments, name="loop-lag", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the measurement. Idempotent."""
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def worst(self, since: float) -> Gap | None:
        """Returns the gap with the most CPU time that ended after the monotonic time `since`."""
        return next((gap for gap in self._gaps if gap.at > since), None)

    def recent(self) -> Gap | None:
        """Returns the worst gap of the last `RECENT_SECONDS`."""
        return self.worst(self._monotonic() - RECENT_SECONDS)

    def now(self) -> float:
        """Returns the monotonic time, for `worst`."""
        return self._monotonic()

    def _run(self) -> None:
        self.note()
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._run)

    def note(self) -> None:
        """Ends one gap and begins the next."""
        (cpu_before, before), now = self._last, (self._cpu(), self._monotonic())
        self._last, held_by, self._held_by = now, self._held_by, ""
        wall = now[1] - before
        # Other threads may compute beside the loop, which is not held longer than the wall time.
        gap = Gap(now[1], min(now[0] - cpu_before, wall), wall, held_by)
        if gap.cpu >= LOGGED:
            log.warning("the event loop was held for %.1f s of CPU time by %s", gap.cpu, held_by or "unknown code")
        while self._gaps and self._gaps[-1].cpu <= gap.cpu:
            self._gaps.pop()
        if len(self._gaps) < MAX_GAPS:
            self._gaps.append(gap)

    def _look(self, loop_thread: int) -> None:
        """The loop of the thread. It sleeps until the timer would be late, so it wakes about 20 times a second."""
        pause = BOUND
        while not self._closed.wait(pause):
            late = self._monotonic() - self._last[1]
            if late >= BOUND and not self._held_by:
                self._held_by = function_of(thread_stack(loop_thread))
            pause = BOUND - late if late < BOUND else BOUND


def function_of(stack: Sequence[StackLine]) -> str:
    """Returns the innermost function of AgentJet on a stack as `module.function`, or ''."""
    for file, _, function in stack:
        path = Path(file)
        if path.is_relative_to(PACKAGE) and path != Path(__file__):
            return ".".join([*path.relative_to(PACKAGE.parent).with_suffix("").parts, function])
    return ""
