"""OpenTelemetry spans: one a sampled call, one a learned step, with links from the step to the calls it trained.

Off until somebody sets `tracer`; without the package nothing here is ever imported. Where a call's span is to be found
is kept in memory, for the newest `MAX_CALLS` calls: after a restart of the gateway, steps are not linked to the calls
made before it. A step is linked to every call of its episodes, also to those that turned out not to be trained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentjet.types import Call

if TYPE_CHECKING:
    from opentelemetry.trace import Link, SpanContext, Tracer

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
