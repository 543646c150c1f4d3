"""A file of a user that is nested too deeply is refused by its name, as any other invalid file: a parser raises
`RecursionError` for it, which is not a `ValueError`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agentjet.client.connection import ForeignAnswer, _decoded, _parse_events
from agentjet.client.inputs import read_tasks
from agentjet.compute.checkpoint import verified_state
from agentjet.compute.memory import model_size, parameters_in
from agentjet.compute.merging import base_of
from agentjet.config.loader import read_toml
from agentjet.errors import CheckpointError, ConfigError
from agentjet.research.campaign.proposers import anthropic_blocks, object_in
from agentjet.research.campaign.subject_repo import read_subject
from agentjet.research.journal import StudyFolder
from agentjet.research.plan import read_space
from agentjet.server.checkpoints import Tags
from agentjet.server.run_policies import _token_ids
from agentjet.trackers import Run, open_tracker
from tests.cli.test_doctor import LAPTOP, lines, settings

JSON = "[" * 100_000
TOML = f"value = {JSON}"
HEADER = f"{chr(0)}{chr(64)}{chr(1)}{chr(0) * 5}{JSON}"
"""A safetensors header of 81,920 bytes."""
RUN = Run("a-run", "one", {})


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("tasks.jsonl", JSON, read_tasks),
        ("serve.toml", TOML, read_toml),
        ("space.toml", TOML, read_space),
        ("subject.toml", TOML, read_subject),
        ("study.json", JSON, lambda path: StudyFolder(path.parent).study()),
        ("config.json", JSON, lambda path: model_size(path.parent)),
        ("metrics.jsonl", f"{JSON}\n", lambda path: open_tracker(f"jsonl:{path}").open(RUN).__enter__()),
        ("model.safetensors", HEADER, parameters_in),
        ("model.safetensors", "short", parameters_in),
        ("model.safetensors", "not a header at all", parameters_in),
        ("tokenizer.json", JSON, lambda path: _token_ids(path.parent)),
        ("adapter_config.json", JSON, lambda path: base_of([path.parent])),
        ("state.json", JSON, lambda path: verified_state(path.parent)),
        ("tags.json", JSON, lambda path: Tags(path).read()),
    ],
    ids=[
        *("tasks", "settings", "space", "subject", "study", "model", "metrics"),
        *("weights", "short weights", "other weights", "teacher", "adapter", "checkpoint", "tags"),
    ],
)
def test_a_file_that_is_nested_too_deeply_is_named(
    name: str, content: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises((ConfigError, CheckpointError), match=name if name != "state.json" else "cannot be read"):
        read(path)


def test_the_reasons_of_a_coding_agent_are_left_out_if_they_are_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "reasons.json"
    path.write_text(JSON)
    assert object_in(path) == {}


def test_doctor_reports_a_model_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(JSON)
    assert "config.json cannot be read" in lines(settings(tmp_path), LAPTOP)


def test_an_answer_of_a_server_that_is_nested_too_deeply_is_foreign() -> None:
    with pytest.raises(ForeignAnswer):
        _decoded(httpx.Response(200, text=JSON))


@pytest.mark.anyio
@pytest.mark.parametrize("text", [JSON, "not JSON"])
async def test_an_event_that_is_not_one_is_foreign(text: str) -> None:
    with pytest.raises(ForeignAnswer):
        [event async for event in _parse_events(httpx.Response(200, text=f"data: {text}\n\n"))]


def test_arguments_of_a_tool_call_that_are_nested_too_deeply_are_text() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": JSON}}
    [block] = anthropic_blocks({"role": "assistant", "content": "", "tool_calls": [call]})
    assert block["input"] == {"text": JSON}
