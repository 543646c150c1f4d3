"""Monitoring of a server: its log, metrics of steps, slow work, the lag of the event loop, Prometheus, the machine.

Log records name their episode and batch, and contain no secrets. Episode keys occur in paths
(`/k/{key}/`), tokens and keys in headers; `redact` replaces them in messages and tracebacks.

The lag: a timer in the loop notes the CPU time of the whole process between two of its runs. CPU time leaves out the
time that other programs take. A thread looks at the stack of the loop while the timer is late.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, get_args

import psutil
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import agentjet
from agentjet.config import JobConfig
from agentjet.errors import ConfigError, Later, StackLine, redact, thread_stack
from agentjet.front.tracing import Tracing, present_episode, present_run
from agentjet.protocol import Event, GpuView, MachineView, StatusResponse, duration, remaining
from agentjet.recipes import hooks
from agentjet.swarm import SwarmState
from agentjet.swarm.batches import NOT_FINITE, WAY_OUT
from agentjet.types import DEFAULT_RUN, EngineState, SlowWork

log = logging.getLogger(__name__)
present_batch: ContextVar[int | None] = ContextVar("batch_id", default=None)

MAX_LOG_BYTES = 256 * 2**20
"""Size of a process's log beyond which its beginning is removed."""
KEPT_LOG_BYTES = 16 * 2**20
LOG_CHECK_SECONDS = 1.0


class LogFile(RotatingFileHandler):
    """A rotating log file that only its owner can read."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).touch(0o600)
        return super()._open()


async def limit_process_logs(data_dir: Path) -> None:
    """Without end: shortens the logs to which processes write their output. A plug-in that prints without end would
    fill the disk.
    """
    logged = ""
    while True:
        await asyncio.sleep(LOG_CHECK_SECONDS)
        try:
            await asyncio.to_thread(shorten_logs, data_dir)
        except Exception as error:  # The boundary: the next check may succeed. A repeated failure is logged once.
            if repr(error) != logged:
                log.exception("logs of processes could not be shortened; retrying every %g s", LOG_CHECK_SECONDS)
            logged = repr(error)


def shorten_logs(data_dir: Path) -> None:
    """Keeps the last `KEPT_LOG_BYTES` of each log above `MAX_LOG_BYTES`. Its writer has opened it to append, so it goes
    on at the new end.
    """
    for path in (*data_dir.glob("*.log"), *data_dir.glob("logs/**/*.log")):
        with suppress(OSError):  # It was removed, or the disk is full: the next check tries again.
            if path.stat().st_size > MAX_LOG_BYTES:
                with path.open("rb") as file:
                    file.seek(-KEPT_LOG_BYTES, os.SEEK_END)
                    end = file.read(KEPT_LOG_BYTES)
                os.truncate(path, 0)
                with path.open("ab") as file:
                    file.write(f"[the log exceeded {MAX_LOG_BYTES} bytes: its beginning was removed]\n".encode() + end)


def configure_handler(handler: logging.Handler, line: str) -> None:
    """Sets filters and format of `handler`. `line` is the format in `logging`'s percent style."""
    handler.addFilter(_add_context)
    handler.addFilter(_is_relevant)
    handler.setFormatter(TextFormatter(line))


def _add_context(record: logging.LogRecord) -> bool:
    """Adds `run`, `episode_id` ('' if unknown) and `batch_id` (None if unknown) to a record. Drops none."""
    for context in (present_run, present_episode, present_batch):
        if not hasattr(record, context.name):
            setattr(record, context.name, context.get())
    return True


def _is_relevant(record: logging.LogRecord) -> bool:
    """False for asyncio's warning about a client that left during a response; the gateway counts these."""
    return not (record.name == "asyncio" and str(record.msg).startswith("socket.send() raised"))


class TextFormatter(logging.Formatter):
    """A text line that ends with the run (not the default one), episode and batch of the record."""

    def format(self, record: logging.LogRecord) -> str:
        context = {name: getattr(record, name, None) for name in ("run", "episode_id", "batch_id")}
        about = [
            f"{name}={value}"
            for name, value in context.items()
            if value not in (None, "", DEFAULT_RUN) and str(value) not in record.getMessage()
        ]
        first, newline, rest = super().format(record).partition("\n")
        return redact(" ".join([first, *about]) + newline + rest)


@contextmanager
def batch_context(batch: int) -> Iterator[None]:
    """Context whose log records carry this `batch_id`. Child tasks inherit it."""
    token = present_batch.set(batch)
    try:
        yield
    finally:
        present_batch.reset(token)


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


# ---- metrics of steps ------------------------------------------------------------------------------------------------


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


# ---- slow work -------------------------------------------------------------------------------------------------------

SLOW_SECONDS = 2.0
"""Shorter work has no times in its text, and its duration is not kept."""


@dataclass(slots=True)
class Work:
    """Slow work that began at `begun`. Set `done` as its parts are done, and `problem`."""

    kind: str
    text: str
    total: int
    begun: float
    done: int = 0
    problem: str = ""
    """A sentence about what hinders it, or ''."""


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
        text = work.problem or work.text
        elapsed, known = self._monotonic() - work.begun, self._known.get(work.kind, 0.0)
        parts = [f"{work.done} of {work.total}"] if work.total else []
        if elapsed >= SLOW_SECONDS:
            left = remaining(elapsed, work.done, work.total) or remaining(elapsed, elapsed, known)
            late = f"last time it took {duration(known)}" if 0 < known <= elapsed and not work.total else ""
            parts += [f"{duration(elapsed)} so far", *filter(None, [left or late])]
        return f"{text}: {', '.join(parts)}" if parts else text

    @property
    def problem(self) -> str:
        return self._stack[-1].problem if self._stack else ""

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
        return self.worst(self._monotonic() - RECENT_SECONDS)

    def now(self) -> float:
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


# ---- Prometheus ------------------------------------------------------------------------------------------------------

GAUGES = ("live", "waiting")
"""Episode counts that can fall. The others only grow."""


def printable(text: str) -> str:
    """Returns `text` with control characters escaped: clients choose metric names, and terminals show them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def exposition(status: StatusResponse, seconds_in_state: float, folder: Path) -> bytes:
    """Returns the body of `GET /metrics` for the run in `folder`, in Prometheus' text format."""
    return generate_latest(_StatusCollector(status, seconds_in_state, folder))


@dataclass(frozen=True)
class _StatusCollector(Collector):
    status: StatusResponse
    seconds_in_state: float
    folder: Path

    def collect(self) -> Iterator[Metric]:
        status, family = self.status, self._family
        states = {state: float(state == status.state) for state in get_args(EngineState)}
        yield family("state", "1 for the present state of the engine.", states, "state")
        yield family("state_seconds", "Seconds since the engine entered its state.", self.seconds_in_state)
        waiting = {name: count for name, count in status.episodes.items() if name in GAUGES}
        yield family("episodes", "Episodes that are live, or finished and not yet trained.", waiting, "status")
        ended = {name: count for name, count in status.episodes.items() if name not in GAUGES}
        yield family("episodes_total", "Ended episodes since the data dir was created.", ended, "status")
        groups = {"open": status.groups_open, "complete": status.groups_complete}
        yield family("groups", "Groups of the batch that is being filled.", groups, "state")
        step = {printable(name): value for name, value in status.last_step.items()}
        yield family("step", "Metrics of the newest batch.", step, "metric")
        yield family("workers_started_total", "Workers started.", status.workers_started)
        yield family("workers_hung_total", "Workers killed because they made no progress.", status.workers_hung)
        yield family("policy_version", "Number of learned batches.", status.policy_version)
        yield family("calls_active", "Calls that wait, are sampled, or are being sent.", status.calls_active)
        yield family("clients", "Most recent clients since the server started.", len(status.clients))
        unusable = len(status.unusable_checkpoints)
        yield family("unusable_checkpoints", "Checkpoints that could not be used.", unusable)
        journal = [path for path in self.folder.glob("journal.sqlite*") if path.suffix != ".lock"]
        yield family("journal_bytes", "Size of the journal on disk.", sum(path.stat().st_size for path in journal))
        meaning = "Longest time without an answer of the event loop in the last ten minutes"
        lag = {} if status.loop is None else {"cpu": status.loop.cpu, "wall": status.loop.wall}
        yield family("loop_lag_seconds", f"{meaning}, in CPU time of the process and in wall time.", lag, "clock")
        if status.fronts:
            yield from self._fronts()
        yield family("uptime_seconds", "Seconds since the server started.", status.uptime)

    def _fronts(self) -> Iterator[Metric]:
        def family(name: str, meaning: str, field: str) -> Metric:
            values = {str(one.front): float(getattr(one, field)) for one in self.status.fronts}
            return self._family(name, meaning, values, "front")

        ready = {str(one.front): float(not one.problem) for one in self.status.fronts}
        yield self._family("front_ready", "1 while the front answers calls and reports.", ready, "front")
        yield family("front_calls", "Calls that wait, are sampled, or are being sent.", "calls")
        yield family("front_load", "CPU seconds a second in the last half second.", "load")
        yield family("front_lag_seconds", "Longest delay of the event loop, or of its report.", "lag")
        yield family("front_starts_total", "Processes since the server began.", "starts")

    def _family(self, name: str, meaning: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        """Returns a metric with a value for each value of `label`. Only other runs than the default one are a label."""
        run = [] if self.status.run == DEFAULT_RUN else [self.status.run]
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"agentjet_{name}", meaning, labels=[*(["run"] if run else []), *([label] if label else [])])
        for value, number in values.items() if isinstance(values, Mapping) else [("", values)]:
            family.add_metric([*run, value], number)
        return family


# ---- the machine -----------------------------------------------------------------------------------------------------

MACHINE_SECONDS = 5.0
"""Age up to which a measurement is returned again. `nvidia-smi` takes up to a second."""
GPU_QUERY = ("--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
MIB = 2**20


class Machine:
    """Measures at most once in `MACHINE_SECONDS`, in a thread."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._measured_at = 0.0
        self._view: MachineView | None = None
        psutil.cpu_percent()  # The first value is meaningless: each one covers the time since the call before.

    async def view(self) -> MachineView:
        async with self._lock:
            if self._view is None or time.monotonic() - self._measured_at > MACHINE_SECONDS:
                self._view = await asyncio.to_thread(_measure)
                self._measured_at = time.monotonic()
            return self._view


def _measure() -> MachineView:
    memory = psutil.virtual_memory()
    return MachineView(
        cores=psutil.cpu_count() or 1,
        cpu=psutil.cpu_percent() / 100,
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        gpus=_gpus(),
    )


def _gpus() -> list[GpuView]:
    """Returns NVIDIA's GPUs; empty without `nvidia-smi`, or if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *GPU_QUERY], capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in done.stdout.splitlines() if (gpu := read_gpu(line)) is not None]


def read_gpu(line: str) -> GpuView | None:
    """Returns the GPU of a line of `nvidia-smi`; None if a figure is missing, such as `[N/A]`."""
    try:
        *name, load, used, total = (part.strip() for part in line.split(","))
        return GpuView(
            name=", ".join(name),
            load=float(load) / 100,
            memory_used=int(float(used) * MIB),
            memory_total=int(float(total) * MIB),
        )
    except ValueError:
        return None
