"""The cells of `docs/practice.md` in a real kernel of Jupyter, against the real application over a scripted worker.

1. Each cell runs in the kernel's event loop; reports are drawn with their curve, and print little.
2. The agent's cell may be edited and run again.
3. An interrupt stops training: no episode stays live, and the next cell trains; with `await`, too.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from agentjet.protocol import StatusResponse
from agentjet.swarm.places import KEPT_SECONDS
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, in_thread, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.needs("ipykernel")]

PAGE = Path(__file__).parents[2] / "docs" / "practice.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("\n## In a notebook\n")[2].partition("\n## ")[0]
CELLS = re.findall(r"^```python\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
PATIENCE = 60.0
LONG_RUN = "swarm.train(agent, tasks[50:], steps=100_000, concurrency=8)"
LONG_RUN_ASYNC = """
from agentjet import AsyncSwarm
async with AsyncSwarm(token=token) as other:
    await other.train(agent, tasks[50:], steps=100_000, concurrency=8)
"""


def some_sums(prompt: str) -> str:
    """The right sum for most questions."""
    a, b = map(int, re.findall(r"(\d+) \+ (\d+)\?", prompt)[-1])
    return str(a + b if (a * b) % 3 else 0)


@dataclass
class Outcome:
    """The result of a cell."""

    error: str = ""
    text: str = ""
    """All that it printed."""
    values: dict[str, str] = field(default_factory=dict)
    """The value of its last line, by MIME type."""


class Kernel:
    """A kernel in its own process."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        from jupyter_client.manager import KernelManager  # type: ignore[import-not-found, unused-ignore]

        self._manager = KernelManager()
        self._manager.start_kernel(cwd=str(folder), env={**os.environ, **environment})
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE)

    def begin(self, code: str) -> str:
        return str(self._client.execute(code))

    def outcome(self, cell: str) -> Outcome:
        """Waits for the end of a cell."""
        found = Outcome()
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell:
                continue
            if kind == "stream":
                found.text += content["text"]
            elif kind == "execute_result":
                found.values = content["data"]
            elif kind == "error":
                found.error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return found

    def run(self, code: str) -> Outcome:
        return self.outcome(self.begin(code))

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    job = {"batch_size": 2, "group_size": 2}
    with in_thread(serving(tmp_path / "data", saying(some_sums), job=job)) as (found, _):
        yield found


@pytest.fixture
def kernel(served: Served, tmp_path: Path) -> Iterator[Kernel]:
    (tmp_path / "agentjet-data").mkdir()
    (tmp_path / "agentjet-data" / "token").write_text(TOKEN + "\n")
    started = Kernel(tmp_path, {"AGENTJET_URL": served.url})
    for code in CELLS[:2]:
        assert started.run(code) == Outcome()
    yield started
    started.close()


def until(predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def drawn(outcome: Outcome) -> ElementTree.Element:
    """The HTML of a cell's value."""
    assert not outcome.error and "\n" not in outcome.values["text/plain"] and len(outcome.text) < 5_000, outcome
    return ElementTree.fromstring(outcome.values["text/html"])


def status(served: Served) -> StatusResponse:
    """Over HTTP: this is not the thread of the server's event loop."""
    answer = httpx.get(f"{served.url}/swarm/v1/status", headers={"Authorization": f"Bearer {TOKEN}"})
    return StatusResponse.model_validate(answer.json())


def test_the_cells_of_the_page(kernel: Kernel, served: Served) -> None:
    assert len(CELLS) == 4
    [curve] = drawn(kernel.run(CELLS[2])).iter("polyline")
    assert len(curve.attrib["points"].split()) == 20 and status(served).policy_version == 20
    assert list(drawn(kernel.run(CELLS[3].replace("repeats=4", "repeats=1"))).iter("table"))
    edited = CELLS[1].replace("return float", "return 1.0 + float")
    assert edited != CELLS[1] and kernel.run(edited) == Outcome()
    report = kernel.run("report = swarm.train(agent, tasks[50:], steps=2, concurrency=4); min(report.rewards)")
    assert float(report.values["text/plain"]) >= 1.0


@pytest.mark.parametrize("code", [LONG_RUN, LONG_RUN_ASYNC])
def test_an_interrupt_stops_training_and_the_next_cell_goes_on(code: str, kernel: Kernel, served: Served) -> None:
    cell = kernel.begin(code)
    until(lambda: status(served).policy_version > 3 and status(served).episodes["live"] > 0)
    kernel.interrupt()
    stopped = kernel.outcome(cell)
    assert re.match("KeyboardInterrupt|CancelledError", stopped.error) and "To exit" not in stopped.text, stopped
    assert status(served).episodes["live"] == 0
    version = status(served).policy_version
    served.run.clock.advance(KEPT_SECONDS)  # The stopped client waits no longer for a place.
    again = kernel.run("swarm.train(agent, tasks[50:], steps=2, concurrency=8)")
    drawn(again)
    assert status(served).policy_version == version + 2
