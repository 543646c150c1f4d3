"""OpenTelemetry spans.

1. A call's span has its episode, its call and the policy version that sampled it. A step's span links to exactly the
   calls of its batch.
2. A cancelled call has a span, and no link.
3. The memory for links is bounded.
4. Without a tracer no span is made, and the package is not even imported.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.gateway.observability import Tracing
from agentjet.protocol import AbortRequest, BeginRequest
from tests.fakes import running

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Recording:
    """A tracer, and the spans it made."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes.get(f"agentjet.{name}")


@pytest.mark.anyio
async def test_a_step_is_linked_to_the_calls_it_trained(tmp_path: Path) -> None:
    recording = Recording()
    async with running(tmp_path / "d") as run:
        run.gateway.tracing.tracer = recording.tracer
        untrained = await run.gateway.begin(BeginRequest(task_id="t", mode="eval"))
        await run.say(untrained.id)
        await run.batch()
        await run.batch()
    calls = {attribute(span, "call_id"): span for span in recording.spans("call")}
    assert len(calls) == 9
    first, second = recording.spans("step")
    assert [attribute(span, "batch_id") for span in (first, second)] == [0, 1]
    assert [attribute(span, "policy_version") for span in (first, second)] == [1, 2]
    linked: list[object] = []
    for step, sampled_by in ((first, 0), (second, 1)):
        assert len(step.links) == 4 and attribute(step, "replay") is False
        for link in step.links:
            assert link.attributes is not None
            call = calls[link.attributes["agentjet.call_id"]]
            assert call.get_span_context() == link.context
            assert attribute(call, "episode_id") == link.attributes["agentjet.episode_id"]
            assert attribute(call, "policy_version") == sampled_by
            linked.append(attribute(call, "episode_id"))
    assert len(set(linked)) == 8 and untrained.id not in linked


@pytest.mark.anyio
async def test_a_cancelled_call_is_linked_to_nothing(tmp_path: Path) -> None:
    recording = Recording()
    async with running(tmp_path / "d", job={"batch_size": 1}) as run:
        run.gateway.tracing.tracer = recording.tracer
        begun = await run.gateway.begin(BeginRequest(task_id="t"))
        stream = run.stream(begun.id)
        await anext(stream)
        await stream.aclose()
        [cancelled] = recording.spans("call")
        assert attribute(cancelled, "episode_id") == begun.id and attribute(cancelled, "call_id") is None
        await run.gateway.abort(begun.id, AbortRequest())
        await run.batch()
    [step] = recording.spans("step")
    assert cancelled.get_span_context() not in [link.context for link in step.links]


@pytest.mark.anyio
async def test_memory_is_bounded(tmp_path: Path) -> None:
    recording, tracing = Recording(), Tracing(max_calls=3)
    tracing.tracer = recording.tracer
    async with running(tmp_path / "d") as run:
        begun = await run.gateway.begin(BeginRequest(task_id="t", mode="eval"))
        call = await run.say(begun.id)
    for number in range(10):
        with tracing.call(f"ep{number}", ""):
            tracing.recorded(replace(call, id=f"call{number}", episode_id=f"ep{number}"))
    with tracing.step(0, [f"ep{number}" for number in range(10)], replay=True):
        pass
    [step] = recording.spans("step")
    assert [link.attributes and link.attributes["agentjet.call_id"] for link in step.links] == [
        "call7",
        "call8",
        "call9",
    ]


def test_without_a_tracer_nothing_is_imported() -> None:
    program = """
import sys
from agentjet.gateway.observability import Tracing
with Tracing().call("ep1", ""), Tracing().step(0, ["ep1"], replay=False):
    Tracing().recorded(None)
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
