"""Monitoring of the server: its log, its metrics, and the load of its machine.

Log records name their episode and batch, and contain no secrets. Episode keys occur in paths
(`/k/{key}/`), tokens and keys in headers; `redact` replaces them in messages and tracebacks.

`GET /metrics` is in Prometheus' text format. It reads the gateway's numbers on each request and counts nothing itself.

The logs of processes have a limit, see `shorten_logs`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import get_args

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentjet.front.calls import present_episode, present_run
from agentjet.protocol import GpuView, MachineView
from agentjet.server.gateway import Gateway
from agentjet.server.observability import present_batch
from agentjet.types import DEFAULT_RUN, EngineState

log = logging.getLogger(__name__)

SECRET_PATTERNS = (
    (re.compile(r"/k/[^/\s\"']+"), "/k/…"),
    (re.compile(r"(aj[ks])-[\w.~-]+"), r"\1-…"),
    (re.compile(r"(?i)(bearer\s+)[\w.~+/=-]{8,}"), r"\1…"),
)


MAX_LOG_BYTES = 256 * 2**20
"""Size of a process's log beyond which its beginning is removed."""
KEPT_LOG_BYTES = 16 * 2**20
LOG_CHECK_SECONDS = 1.0
GAUGES = ("live", "waiting")
"""Episode counts that can fall. The others only grow."""


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


def redact(text: str) -> str:
    """Returns `text` without keys and tokens."""
    for pattern, instead in SECRET_PATTERNS:
        text = pattern.sub(instead, text)
    return text


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


def printable(text: str) -> str:
    """Returns `text` with control characters escaped: clients choose metric names, and terminals show them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def exposition(gateway: Gateway) -> bytes:
    """Returns the body of `GET /metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_GatewayCollector(gateway))
    return generate_latest(registry)


class _GatewayCollector(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        status, phase, family = self._gateway.status(), self._gateway.phase, self._family
        states = {state: float(state == status.state) for state in get_args(EngineState)}
        yield family("state", "1 for the present state of the engine.", states, "state")
        yield family("state_seconds", "Seconds since the engine entered its state.", phase.seconds_in_state())
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
        journal = [path for path in self._gateway.folder.glob("journal.sqlite*") if path.suffix != ".lock"]
        yield family("journal_bytes", "Size of the journal on disk.", sum(path.stat().st_size for path in journal))
        worst = self._gateway.telemetry.lag.recent()
        meaning = "Longest time without an answer of the event loop in the last ten minutes"
        lag = {} if worst is None else {"cpu": worst.cpu, "wall": worst.wall}
        yield family("loop_lag_seconds", f"{meaning}, in CPU time of the process and in wall time.", lag, "clock")
        yield family("uptime_seconds", "Seconds since the server started.", status.uptime)

    def _family(self, name: str, meaning: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        """Returns a metric with a value for each value of `label`. Only other runs than the default one are a label."""
        run = [] if self._gateway.run == DEFAULT_RUN else [self._gateway.run]
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"agentjet_{name}", meaning, labels=[*(["run"] if run else []), *([label] if label else [])])
        for value, number in values.items() if isinstance(values, Mapping) else [("", values)]:
            family.add_metric([*run, value], number)
        return family


# --- the machine

MACHINE_SECONDS = 5.0
"""Age up to which a measurement is returned again. `nvidia-smi` takes up to a second."""
TIMEOUT = 5.0
QUERY = ("--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
MIB = 2**20


class Machine:
    """Measures at most once in `MACHINE_SECONDS`, in a thread."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._measured_at = 0.0
        self._view: MachineView | None = None
        psutil.cpu_percent()  # The first value is meaningless: each one covers the time since the call before.

    async def view(self) -> MachineView:
        """Returns the newest measurement."""
        async with self._lock:
            if self._view is None or time.monotonic() - self._measured_at > MACHINE_SECONDS:
                self._view = await asyncio.to_thread(measure)
                self._measured_at = time.monotonic()
            return self._view


def measure() -> MachineView:
    memory = psutil.virtual_memory()
    return MachineView(
        cores=psutil.cpu_count() or 1,
        cpu=psutil.cpu_percent() / 100,
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        gpus=gpus(),
    )


def gpus() -> list[GpuView]:
    """Returns NVIDIA's GPUs; empty without `nvidia-smi`, or if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=TIMEOUT, check=True)
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
