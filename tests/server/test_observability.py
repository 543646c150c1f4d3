"""Slow work, lag, spans and metrics.

Slow work: how far it is, how long it takes, and that the status shows it.

The lag of the event loop is measured where it occurs:

1. CPU time counts, and a pause of the machine does not;
2. the worst gap of every period is known, whatever came after it;
3. the function that held the loop is named, for status, metrics and Prometheus;
4. only the check of the leases renews them after a stall: reading a status renews none.

OpenTelemetry spans.

1. A call's span has its episode, its call and the policy version that sampled it. A step's span has its batch.
2. A cancelled call has a span, without a call's id.
3. Without a tracer no span is made, and the package is not even imported.

A policy that diverges.

1. A metric without a finite value is not recorded, and clients can still read the status. The log, the batch and the
   health of the run name it, and the hook `next_state`, which is not called.
2. Weights that are not finite are reported in the log and the status, also after a restart. They are never saved over
   the last good checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentjet.errors import Conflict, StackLine, thread_stack
from agentjet.protocol import BeginRequest, StatusResponse
from agentjet.server.monitoring import EVERY, Activity, LoopLag, exposition, function_of, work_text
from agentjet.swarm import journal
from agentjet.types import SlowWork
from tests.fakes import RUN, Clock, Running, running

pytestmark = pytest.mark.anyio


# ---- slow work -------------------------------------------------------------------------------------------------------


def test_the_time_left_comes_from_the_last_time(tmp_path: Path) -> None:
    clock = Clock()
    first = Activity(tmp_path / "durations.json", monotonic=clock)
    with first.work("export", "exporting version 3"):
        assert first.text == "exporting version 3"
        clock.advance(20)
        assert first.text == "exporting version 3: 20 s so far"
    assert first.text == ""
    again = Activity(tmp_path / "durations.json", monotonic=clock)
    with again.work("export", "exporting version 4"):
        clock.advance(5)
        assert again.text == "exporting version 4: 5 s so far, about 15 s left"
        with again.work("checkpoint", "saving"):
            assert again.text == "saving"
        clock.advance(25)
        assert again.text == "exporting version 4: 30 s so far, last time it took 20 s"


def test_parts_that_are_done(tmp_path: Path) -> None:
    clock = Clock()
    activity = Activity(tmp_path / "durations.json", monotonic=clock)
    with activity.work("replay", "learning again", 4) as work:
        assert activity.text == "learning again: 0 of 4"
        clock.advance(30)
        work.done = 1
        assert activity.text == "learning again: 1 of 4, 30 s so far, about 1 min 30 s left"
    assert not (tmp_path / "durations.json").exists(), "its pace is that of this time"


def test_a_failure_is_not_a_duration(tmp_path: Path) -> None:
    clock = Clock()
    activity = Activity(tmp_path / "durations.json", monotonic=clock)
    with pytest.raises(OSError), activity.work("export", "exporting"):
        clock.advance(20)
        raise OSError
    assert activity.text == "" and not (tmp_path / "durations.json").exists()


def test_a_damaged_file_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "durations.json").write_text("[1")
    Activity(tmp_path / "durations.json")
    unwritable = Activity(tmp_path / "missing" / "durations.json", monotonic=(clock := Clock()))
    with unwritable.work("export", "exporting"):
        clock.advance(20)


def test_a_download() -> None:
    assert work_text(SlowWork("downloading", 300.0, 1200.0, "MB", 10.0)) == (
        "downloading: 300 of 1,200 MB, about 30 s left"
    )
    assert work_text(SlowWork("downloading", 300.0, 0.0, "MB", 10.0)) == "downloading: 300 MB"


async def test_the_status_shows_the_load_of_the_model(tmp_path: Path) -> None:
    async with running(tmp_path / "d", wait_ready=False, prepare=lambda compute: compute.may_start.clear()) as run:
        await run.until(lambda: run.gateway.telemetry.activity.text != "")
        run.stopwatch.advance(12)
        name = run.gateway.config.model.name
        assert run.gateway.status().waiting_for == f"loading the model {name}: 12 s so far"
        run.compute.may_start.set()
        await run.gateway.engine.wait_until_up()
        assert run.gateway.telemetry.activity.text == ""


async def test_the_status_shows_a_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 1}) as run:
        await run.batch()
        texts: list[str] = []

        async def look() -> None:
            texts.append(run.gateway.status().waiting_for)

        with run.gateway.telemetry.activity.work("checkpoint", "saving the checkpoint of version 1"):
            await look()
        await asyncio.gather(run.gateway.versions.save(), look())
    assert texts[0] == "the engine, saving the checkpoint of version 1"


# ---- lag of the event loop -------------------------------------------------------------------------------------------


def test_the_worst_gap_of_every_period_is_known() -> None:
    cpu, wall = Clock(), Clock()
    cpu.now = wall.now = 0.0
    lag = LoopLag(cpu=cpu, monotonic=wall)
    ends = []
    for cpu_seconds, wall_seconds in [(0.3, 0.3), (0.1, 9.0), (0.2, 0.25), (0.01, 0.01), (4.0, 0.05)]:
        cpu.advance(cpu_seconds)
        wall.advance(wall_seconds)
        lag.note()
        ends.append(wall.now)
    worst = [lag.worst(since) for since in [0.0, *ends]]
    assert [gap and round(gap.cpu, 6) for gap in worst] == [0.3, 0.2, 0.2, 0.05, 0.05, None]
    assert worst[1] is not None and round(worst[1].wall, 6) == 0.25, "a slow machine is not a lag"


def test_the_function_of_agentjet_is_named_that_others_were_called_by() -> None:
    stack = [
        StackLine(tempfile.__file__, 3, "mkdtemp"),
        StackLine(journal.__file__, 7, "prune"),
        StackLine("x.py", 1, "f"),
    ]
    assert function_of(stack) == "agentjet.swarm.journal.prune"
    assert function_of([]) == function_of([StackLine("x.py", 1, "f")]) == ""


def test_the_stack_of_a_thread_that_runs_on_is_read() -> None:
    """Through frames, reading it crashed the process: see `thread_stack`."""

    def recurse(depth: int) -> None:
        if depth:
            recurse(depth - 1)
        while not closed.is_set() and not depth:
            sum(one for one in range(100))

    closed = threading.Event()
    thread = threading.Thread(target=recurse, args=[20])
    thread.start()
    stacks = [thread_stack(thread.ident or 0) for _ in range(50)]
    closed.set()
    thread.join()
    assert all([line.function for line in stack].count("recurse") == 21 for stack in stacks)
    assert all(Path(line.file) == Path(__file__) for stack in stacks for line in stack if line.function == "recurse")
    assert thread_stack(0) == []


def burn(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


async def test_a_run_shows_its_lag_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "d") as run:
        gateway = run.gateway
        real = gateway.swarm.journal.outcomes

        def slow() -> dict[str, int]:
            burn(0.3)
            return real()

        monkeypatch.setattr(gateway.swarm.journal, "outcomes", slow)
        gateway.status()
        monkeypatch.undo()
        await run.until(lambda: (worst := gateway.telemetry.lag.recent()) is not None and worst.cpu >= 0.3)
        status = gateway.status()
        assert status.loop is not None and status.loop.cpu >= 0.3 and status.loop.wall >= 0.3
        assert status.loop.held_by.startswith("agentjet.server.")
        metrics = exposition(status, gateway.phase.seconds_in_state(), gateway.folder).decode()
        assert f'agentjet_loop_lag_seconds{{clock="cpu"}} {status.loop.cpu}' in metrics
        found = {rule.name: rule for rule in (await gateway.reader.health()).rules}["loop"]
        assert found.level == "warn" and status.loop.held_by in found.text
        await run.batch()
        first = gateway.swarm.last_step
        await run.batch()
        assert first["server/loop_lag"] >= 0.3 > gateway.swarm.last_step["server/loop_lag"]


async def test_reading_a_status_renews_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.server.gateway.LEASE_CHECK_SECONDS", 3600.0)
    async with running(tmp_path / "d", job={"lease_seconds": 10}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        before = run.gateway.swarm.expires_at(episode)
        run.clock.advance(5)
        run.stopwatch.advance(5)
        for _ in range(2):
            run.gateway.status()
            assert run.gateway.leases() == {episode.id: before}
        run.gateway.swarm.reap()
        assert run.gateway.swarm.expires_at(episode) == before + 5


async def test_the_measurement_ends_with_the_server(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        [thread] = [each for each in threading.enumerate() if each.name == "loop-lag"]
    assert not thread.is_alive()
    run.runs.lag.close()
    ended = run.runs.lag.now()
    await asyncio.sleep(2 * EVERY)
    assert run.runs.lag.worst(ended) is None


# ---- spans -----------------------------------------------------------------------------------------------------------


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
import tempfile
import threading
from agentjet.front.tracing import Tracing
with Tracing().span("step", batch_id=0):
    Tracing().annotate(call_id="c")
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- policies that diverge -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "kept"), [("grpo", False), ({"name": "adaptive_kl", "kl_coef": 0.1}, True)], ids=["grpo", "adaptive_kl"]
)
async def test_metrics_that_are_no_number_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recipe: object, kept: bool
) -> None:
    async with running(tmp_path / "d", job={"recipe": recipe}) as run:
        await run.batch()
        assert await named(run) == ("ok", "all metrics are finite")
        run.compute.metrics = {"policy/mismatch_kl": math.nan, "policy/kl": math.inf, "optim/skipped_steps": 1.0}
        await run.batch()
        shown = StatusResponse.model_validate_json(run.gateway.status().model_dump_json())
        assert shown.last_step == run.gateway.swarm.last_step
        assert shown.last_step["optim/skipped_steps"] == 1.0
        assert not {"policy/mismatch_kl", "policy/kl"} & shown.last_step.keys()
        assert {"batch/not_finite/policy/mismatch_kl", "batch/not_finite/policy/kl"} < shown.last_step.keys()
        level, text = await named(run)
        assert level == "warn" and "the metrics 'policy/mismatch_kl', 'policy/kl' of 1 of the newest 2 batches" in text
        assert "batch 1: recipe " in caplog.text and "'policy/kl' of the batch are NaN or infinite" in caplog.text
        assert all(("`next_state` was not called" in said) == kept for said in (text, caplog.text))
    [_, line] = (tmp_path / "d" / RUN / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in line and "Infinity" not in line


async def named(run: Running) -> tuple[str, str]:
    """The level and the text of the rule about metrics."""
    health = await run.gateway.reader.health()
    return next((rule.level, rule.text) for rule in health.rules if rule.name == "metrics")


async def test_a_policy_that_diverged_says_so_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1}) as run:
        run.compute.metrics = {"weights/finite": 1.0}
        await run.batch()
        assert "diverged" not in run.gateway.status().waiting_for and "diverged" not in caplog.text
        run.compute.metrics = {"weights/finite": 0.0}
        await run.batch()
        assert "the policy has diverged" in run.gateway.status().waiting_for and "has diverged" in caplog.text
        for written in (run.gateway.versions.save, run.gateway.versions.export):
            with pytest.raises(Conflict, match="has diverged"):
                await written()
    assert not (tmp_path / "d" / RUN / "exports").exists()
    async with running(tmp_path / "d") as run:
        assert [info.policy_version for info in run.gateway.store.listing()] == [1]
        assert run.gateway.status().policy_version == 2
        assert "the policy has diverged" in run.gateway.status().waiting_for
