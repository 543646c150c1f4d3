"""Logs, traces and metrics: context of log records, OpenTelemetry spans, `metrics.jsonl`, times of a step."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentjet.config import JobConfig
from agentjet.errors import ConfigError, Later
from agentjet.protocol import Event
from agentjet.recipes import hooks
from agentjet.swarm import SwarmState
from agentjet.swarm.batches import NOT_FINITE, WAY_OUT

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

run: ContextVar[str] = ContextVar("run", default="")
"""Name of the run whose work is done, or ''."""
episode_id: ContextVar[str] = ContextVar("episode_id", default="")
batch_id: ContextVar[int | None] = ContextVar("batch_id", default=None)


@contextmanager
def batch_context(batch: int) -> Iterator[None]:
    """Context whose log records carry this `batch_id`. Child tasks inherit it."""
    token = batch_id.set(batch)
    try:
        yield
    finally:
        batch_id.reset(token)


class LogContextFilter(logging.Filter):
    """Adds `run`, `episode_id` ('' if unknown) and `batch_id` (None if unknown) to every record. Drops none.

    Attach it to handlers: filters of a logger do not see the records of its children.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        for name, held in (("run", run.get()), ("episode_id", episode_id.get()), ("batch_id", batch_id.get())):
            if not hasattr(record, name):
                setattr(record, name, held)
        return True


class Tracing:
    """OpenTelemetry spans of a server: one per sampled choice, one per learned batch. None while `tracer` is unset."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None

    def span(self, name: str, **attributes: str | int) -> AbstractContextManager[object]:
        """Context of a span. Its attributes, and the name of the run, get the prefix `agentjet.`."""
        if self.tracer is None:
            return nullcontext()
        return self.tracer.start_as_current_span(name, attributes=_prefixed({"run": run.get(), **attributes}))

    def annotate(self, **attributes: str | int) -> None:
        """Adds attributes to the present span."""
        if self.tracer is not None:
            from opentelemetry import trace

            trace.get_current_span().set_attributes(_prefixed(attributes))


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"agentjet.{name}": value for name, value in attributes.items()}


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
        """Appends the metrics of the batch that produced `policy_version`."""
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


def emit_event(swarm: SwarmState, kind: str, body: dict[str, Any]) -> None:
    """Records an event in the journal. Logs it if the journal refuses writes."""
    try:
        swarm.store.emit(kind, body)
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
