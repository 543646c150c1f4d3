"""Names of the present work, its run, episode and batch, for log records; and OpenTelemetry spans."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

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
        if self.tracer is not None:
            from opentelemetry import trace

            trace.get_current_span().set_attributes(_prefixed(attributes))


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"agentjet.{name}": value for name, value in attributes.items()}
