"""Logs, traces and metrics: context of log records, OpenTelemetry spans, `metrics.jsonl`, times of a step."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentjet.errors import ConfigError, Later
from agentjet.protocol import Event
from agentjet.swarm import SwarmState
from agentjet.swarm.batches import WAY_OUT
from agentjet.types import Call

if TYPE_CHECKING:
    from opentelemetry.trace import Link, SpanContext, Tracer

log = logging.getLogger(__name__)

MAX_CALLS = 65_536

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
    """OpenTelemetry spans of a server: one per sampled call, one per learned batch.

    A batch's span links to the spans of all calls of its episodes, trained or not. The links exist for the newest
    `max_calls` calls and are lost at a restart. Without a `tracer` no span is made, and OpenTelemetry is not
    imported.
    """

    def __init__(self, *, max_calls: int = MAX_CALLS) -> None:
        self.tracer: Tracer | None = None
        self._max_calls = max_calls
        self._num_calls = 0
        self._calls: OrderedDict[str, list[tuple[str, SpanContext]]] = OrderedDict()
        """Call ids and span contexts by episode id, oldest episode first."""

    @contextmanager
    def call(self, episode_id: str, role: str) -> Iterator[None]:
        """Context and span of one choice, from before the gate until it is in the journal."""
        if self.tracer is None:
            yield
            return
        attributes = {"agentjet.run": run.get(), "agentjet.episode_id": episode_id, "agentjet.role": role}
        with self.tracer.start_as_current_span("call", attributes=attributes):
            yield

    def recorded(self, call: Call) -> None:
        """Adds the recorded call to the current span."""
        if self.tracer is None:
            return
        from opentelemetry import trace

        span = trace.get_current_span()
        span.set_attributes(
            {
                "agentjet.call_id": call.id,
                "agentjet.policy_version": call.versions[-1] if call.versions else -1,
                "agentjet.completion_tokens": len(call.completion),
                "agentjet.finish_reason": call.finish_reason,
            }
        )
        self._calls.setdefault(call.episode_id, []).append((call.id, span.get_span_context()))
        self._num_calls += 1
        while self._num_calls > self._max_calls:
            self._num_calls -= len(self._calls.popitem(last=False)[1])

    @contextmanager
    def step(self, batch_id: int, episode_ids: Iterable[str], *, replay: bool) -> Iterator[None]:
        """Context and span of learning a batch."""
        if self.tracer is None:
            yield
            return
        links = self._links(episode_ids)
        attributes: dict[str, str | int] = {
            "agentjet.run": run.get(),
            "agentjet.batch_id": batch_id,
            "agentjet.policy_version": batch_id + 1,
            "agentjet.replay": replay,
            "agentjet.linked_calls": len(links),
        }
        with self.tracer.start_as_current_span("step", attributes=attributes, links=links):
            yield

    def _links(self, episode_ids: Iterable[str]) -> list[Link]:
        from opentelemetry.trace import Link

        return [
            Link(context, {"agentjet.call_id": call_id, "agentjet.episode_id": episode_id})
            for episode_id in episode_ids
            for call_id, context in self._calls.get(episode_id, ())
        ]


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
        if (newest := self._newest()) > policy_version:
            raise ConfigError(
                f"{self._path} has policy version {newest}, but the journal in the same folder ends at "
                f"{policy_version}: the journal is incomplete. {WAY_OUT}"
            )

    def _newest(self) -> int:
        """Returns the policy version of the last complete line, or 0."""
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return 0
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue
        return 0


class StepTimer:
    """Splits the time of a step into sampling, waiting (no call is sampled) and learning."""

    def __init__(self, busy_seconds: Callable[[], float], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._busy_seconds = busy_seconds
        self._monotonic = monotonic
        self.start_sampling()

    def start_sampling(self) -> None:
        """Marks the start of the time in which the batch is sampled."""
        self._sampling_since, self._busy_before = self._monotonic(), self._busy_seconds()

    def start_learning(self) -> None:
        """Marks the start of the time in which the batch is learned."""
        self._learning_since, self._busy_after = self._monotonic(), self._busy_seconds()

    def metrics(self, num_sampled_tokens: int) -> dict[str, float]:
        """Returns `time/{sample,learn,wait}` in seconds, and the batch's sampled tokens per second of their sum."""
        sample = self._busy_after - self._busy_before
        wait = max(0.0, self._learning_since - self._sampling_since - sample)
        learn = self._monotonic() - self._learning_since
        total = max(1e-9, sample + wait + learn)
        return {
            "time/sample": sample,
            "time/wait": wait,
            "time/learn": learn,
            "perf/tokens_per_second": num_sampled_tokens / total,
        }


def emit_event(swarm: SwarmState, kind: str, body: dict[str, Any]) -> None:
    """Records an event in the journal. Logs it if the journal refuses writes."""
    try:
        swarm.store.emit(kind, body)
    except Later as later:
        log.error("event %s %s is not in the journal: %s", kind, body, later)


def log_event(event: Event) -> None:
    """Logs an event with its episode or batch. The record's `event` attribute has the body for programs."""
    body = event.body
    context = {name: body[name] for name in ("episode_id",) if name in body}
    if event.kind == "step":
        context["batch_id"] = body["policy_version"] - 1
    outcome = body.get("status") or body.get("state") or body.get("policy_version", "")
    log.info("event %d: %s %s", event.seq, event.kind, outcome, extra={**context, "event": event.model_dump()})
