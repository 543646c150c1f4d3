"""What holds for every test: one thread each, no network beyond loopback, and the longest first.

The environment is set before anything imports NumPy or torch, which read it once; server processes that a test starts
inherit it.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import typer.main
import typer.testing
from hypothesis import settings

from tests.needs import need

signal.signal(signal.SIGINT, signal.default_int_handler)  # What is started in the background has it ignored, for good.
gc.disable()  # until `pytest_collection_finish`

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

# Typer would build all commands again for every test of one: half of the time of such a test.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)

# Of tests that set no number of their own. `--hypothesis-profile=thorough` takes about half an hour of one core.
settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=2_000, deadline=None)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that take long come first, so that none of them is the last to be running, all by itself."""
    longest = {item.path: 0 for item in items}
    for item in items:
        takes = (
            2 if any(map(item.get_closest_marker, ("slow", "thorough"))) else 1 if item.get_closest_marker("e2e") else 0
        )
        longest[item.path] = max(longest[item.path], takes)
    items.sort(key=lambda item: -longest[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that needs more than `make setup` gives is skipped, or fails if that is required (`tests.needs`)."""
    for marker in item.iter_markers("needs"):
        need(*marker.args)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector, at a quarter of the suite's time, need not look through it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def clients_of_agents_are_closed() -> Iterator[None]:
    """An agent has one HTTP client, which lives as long as its process: here, as long as the session."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith(("agentjet_example_", "examples.")):
            for client in ("OPENAI", "ANTHROPIC", "HTTP"):
                if hasattr(vars(module).get(client), "close"):
                    vars(module)[client].close()
