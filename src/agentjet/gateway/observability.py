"""What a log record is about: the episode and the batch at hand, carried by the task that logs.

Set where they become known, read by whoever formats records. Child tasks inherit what was set before they began.

OpenTelemetry spans: one a sampled call, one a learned step, with links from the step to the calls it trained.

Off until somebody sets `tracer`; without the package nothing here is ever imported. Where a call's span is to be found
is kept in memory, for the newest `MAX_CALLS` calls: after a restart of the gateway, steps are not linked to the calls
made before it. A step is linked to every call of its episodes, also to those that turned out not to be trained.

`metrics.jsonl`: one line a learned batch, for people and plots.

The journal holds the same numbers; this file is a copy.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from agentjet.errors import ConfigError
from agentjet.swarm.batches import WAY_OUT
from agentjet.types import Call

if TYPE_CHECKING:
    from opentelemetry.trace import Link, SpanContext, Tracer


episode_id: ContextVar[str] = ContextVar("episode_id", default="")
batch_id: ContextVar[int | None] = ContextVar("batch_id", default=None)


@contextmanager
def batch_context(batch: int) -> Iterator[None]:
    """Records of this task are about `batch` meanwhile."""
    token = batch_id.set(batch)
    try:
        yield
    finally:
        batch_id.reset(token)


class LogContextFilter(logging.Filter):
    """Lets every record through, with `episode_id` and `batch_id` (empty and None where there is none) put on it.

    Attach it to handlers: filters of a logger do not see the records of its children.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        for name, held in (("episode_id", episode_id.get()), ("batch_id", batch_id.get())):
            if not hasattr(record, name):
                setattr(record, name, held)
        return True


MAX_CALLS = 65_536


class Tracing:
    """Makes the spans of one gateway."""

    def __init__(self, *, max_calls: int = MAX_CALLS) -> None:
        self.tracer: Tracer | None = None
        self._max_calls = max_calls
        self._num_calls = 0
        self._calls: OrderedDict[str, list[tuple[str, SpanContext]]] = OrderedDict()
        """Episode id to call ids and where their spans are; the episode that called first comes first."""

    @contextmanager
    def call(self, episode_id: str, role: str) -> Iterator[None]:
        """The span of one choice of a call, current in this task, from before the gate to the journal."""
        if self.tracer is None:
            yield
            return
        attributes = {"agentjet.episode_id": episode_id, "agentjet.role": role}
        with self.tracer.start_as_current_span("call", attributes=attributes):
            yield

    def recorded(self, call: Call) -> None:
        """The call of the current span is in the journal."""
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
        """The span of learning a batch."""
        if self.tracer is None:
            yield
            return
        links = self._links(episode_ids)
        attributes = {
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


log = logging.getLogger(__name__)

DIVERGED = (
    "the policy has diverged: its weights are not finite; begin anew from an earlier checkpoint, with a lower "
    "job.optimizer.lr"
)


def has_diverged(step: Mapping[str, float]) -> bool:
    """Whether the batch with these metrics left weights that nothing can be computed with."""
    return step.get("weights/finite") == 0


class MetricsFile:
    """Appends lines; never fails the training it reports on."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def append(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        """The metrics of the batch that led to `policy_version`."""
        line = json.dumps({"step": policy_version, "time": round(self._clock(), 3), **metrics})
        try:
            self._path.touch(0o600)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            log.warning("%s could not be written: %s", self._path, error)

    def check_journal(self, policy_version: int) -> None:
        """Raises `ConfigError` where a batch beyond `policy_version`, the end of the journal, was acknowledged."""
        if (newest := self._newest()) > policy_version:
            raise ConfigError(
                f"{self._path} has policy version {newest}, but the journal beside it ends at {policy_version}: it "
                f"lost its end. {WAY_OUT}"
            )

    def _newest(self) -> int:
        """Policy version of the last whole line; 0 without one."""
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
    """Where the seconds between two batches went: a call was being sampled, nothing was, or the worker learned."""

    def __init__(self, busy_seconds: Callable[[], float], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._busy_seconds = busy_seconds
        self._monotonic = monotonic
        self.roll()

    def roll(self) -> None:
        """Sampling for a batch begins now."""
        self._rolling_since, self._busy_before = self._monotonic(), self._busy_seconds()

    def learn(self) -> None:
        """Learning it begins now."""
        self._learning_since, self._busy_after = self._monotonic(), self._busy_seconds()

    def metrics(self, num_sampled_tokens: int) -> dict[str, float]:
        """`time/{sample,learn,wait}` in seconds and the batch's tokens over their sum."""
        sample = self._busy_after - self._busy_before
        wait = max(0.0, self._learning_since - self._rolling_since - sample)
        learn = self._monotonic() - self._learning_since
        total = max(1e-9, sample + wait + learn)
        return {
            "time/sample": sample,
            "time/wait": wait,
            "time/learn": learn,
            "perf/tokens_per_second": num_sampled_tokens / total,
        }
