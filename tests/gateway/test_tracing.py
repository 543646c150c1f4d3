"""OpenTelemetry spans.

1. A call's span has its episode, its call and the policy version that sampled it. A step's span has its batch.
2. A cancelled call has a span, without a call's id.
3. Without a tracer no span is made, and the package is not even imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentjet.protocol import BeginRequest
from tests.fakes import running


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
async def test_calls_and_steps_have_spans(tmp_path: Path) -> None:
    recording = Recording()
    async with running(tmp_path / "d") as run:
        run.gateway.telemetry.tracing.tracer = recording.tracer
        untrained = await run.gateway.begin(BeginRequest(task_id="t", mode="eval"))
        call = await run.say(untrained.id, role="judge")
        await run.batch()
        await run.batch()
    first, *others = recording.spans("call")
    assert [attribute(first, name) for name in ("run", "episode_id", "role", "call_id", "policy_version")] == [
        "default",
        untrained.id,
        "judge",
        call.id,
        0,
    ]
    assert [attribute(span, "policy_version") for span in others] == [0] * 4 + [1] * 4
    assert len({attribute(span, "call_id") for span in others}) == 8
    steps = recording.spans("step")
    assert [attribute(span, "batch_id") for span in steps] == [0, 1]
    assert [attribute(span, "policy_version") for span in steps] == [1, 2]
    assert [attribute(span, "replay") for span in steps] == [False, False]


@pytest.mark.anyio
async def test_a_cancelled_call_has_a_span_without_a_call(tmp_path: Path) -> None:
    recording = Recording()
    async with running(tmp_path / "d", job={"batch_size": 1}) as run:
        run.gateway.telemetry.tracing.tracer = recording.tracer
        begun = await run.gateway.begin(BeginRequest(task_id="t"))
        stream = run.stream(begun.id)
        await anext(stream)
        await stream.aclose()
        [cancelled] = recording.spans("call")
        assert attribute(cancelled, "episode_id") == begun.id and attribute(cancelled, "call_id") is None


def test_without_a_tracer_nothing_is_imported() -> None:
    program = """
import sys
from agentjet.gateway.observability import Tracing
with Tracing().span("step", batch_id=0):
    Tracing().annotate(call_id="c")
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
