"""`Follower`, without a library.

1. It waits for the first step, follows new ones, and ends with the job.
2. A server that has another run now is refused; `tests/cli/test_track.py` has a run without a step.
3. A sink that cannot be asked goes on from the cursor.
4. A failing library is one sentence, and what it had is not written again.
5. A long backfill shows how far it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from agentjet.errors import ConfigError, TrackerError
from agentjet.trackers import Run, TrackedStep
from tests.trackers.steps import ListSource, Screen, follower, steps_of

STEPS = steps_of(30)
LABEL = "memory:it"


class Memory:
    """A sink that forgets nothing, and perhaps cannot be asked."""

    def __init__(self, *, can_be_asked: bool = True, breaks_at: int = 10**6) -> None:
        self.versions: list[int] = []
        self.run: Run | None = None
        self.ends = 0
        self.can_be_asked, self.breaks_at = can_be_asked, breaks_at

    def begin(self, run: Run) -> int | None:
        self.run = run
        return max(self.versions, default=0) if self.can_be_asked else None

    def write(self, steps: Sequence[TrackedStep]) -> None:
        if steps[-1].version >= self.breaks_at:
            raise RuntimeError("quota exceeded")
        self.versions += [step.version for step in steps]

    def end(self) -> None:
        self.ends += 1


def start(source: ListSource, sink: Memory, folder: Path, *, stay: bool = False, **more: object) -> None:
    follower(source, LABEL, folder, **{"sink": sink, **more}).run(stay=stay)


@pytest.fixture
def sink() -> Memory:
    return Memory()


def test_a_run_is_followed_from_before_its_first_step_to_its_end(sink: Memory, tmp_path: Path) -> None:
    source, screen = ListSource(STEPS, ready=0, end=STEPS[-1].version), Screen()

    def another_step() -> None:
        source.ready += 1

    start(source, sink, tmp_path, stay=True, pause=another_step, say=screen.say)
    assert sink.versions == [step.version for step in STEPS] and sink.ends == 1
    assert screen.lines[0] == "a list has no step yet: waiting for the first one"
    assert screen.lines[-1] == f"{LABEL} has all steps up to 35"


def test_another_run_at_the_same_address_is_refused(sink: Memory, tmp_path: Path) -> None:
    source = ListSource(STEPS, ready=10)

    def replace_the_server() -> None:
        source.held, source.ready = STEPS[1:], 20

    with pytest.raises(ConfigError, match="a list has another run now: start `agentjet track` again"):
        start(source, sink, tmp_path, stay=True, pause=replace_the_server)
    assert sink.versions == [step.version for step in STEPS[:10]] and sink.ends == 1


def test_a_sink_that_cannot_be_asked_goes_on_from_the_cursor(tmp_path: Path) -> None:
    sink = Memory(can_be_asked=False)
    for ready in (4, 4, 19, 30):
        start(ListSource(STEPS, ready=ready), sink, tmp_path)
    assert sink.versions == [step.version for step in STEPS]


def test_two_runs_have_two_cursors_and_ids(tmp_path: Path) -> None:
    first, second = Memory(can_be_asked=False), Memory(can_be_asked=False)
    start(ListSource(STEPS), first, tmp_path, name="one")
    start(ListSource(STEPS[1:]), second, tmp_path)
    assert first.run is not None and second.run is not None and first.run.id != second.run.id
    assert (first.run.name, second.run.name) == ("one", f"agentjet-{second.run.id}")
    assert len(second.versions) == 29


def test_a_failing_library_is_one_sentence(tmp_path: Path) -> None:
    sink = Memory(breaks_at=20)
    source = ListSource(STEPS, page=5)
    with pytest.raises(TrackerError, match=r"memory:it failed \(RuntimeError: quota exceeded\). Start it again"):
        start(source, sink, tmp_path)
    sink.breaks_at = 10**6
    start(source, sink, tmp_path)
    assert sink.versions == [step.version for step in STEPS]


def test_a_long_backfill_shows_how_far_it_is(sink: Memory, tmp_path: Path) -> None:
    ticks, screen = count(step=1.5), Screen()
    start(ListSource(STEPS, page=10), sink, tmp_path, clock=lambda: next(ticks), say=screen.say)
    assert screen.lines[1:-1] == ["step 25 of 35, 1 s left"]


def test_a_damaged_cursor_is_named(sink: Memory, tmp_path: Path) -> None:
    start(ListSource(STEPS), sink, tmp_path)
    [cursor] = (tmp_path / "cursors").iterdir()
    cursor.write_text("junk")
    with pytest.raises(ConfigError, match="is not a cursor of `agentjet track`"):
        start(ListSource(STEPS), sink, tmp_path)
