"""The examples with held-out tasks: each whole run, shortened, on a tiny model."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest

from agentjet.config import load_config
from tests.needs import need
from tests.tiny import make_model, set_options

EXAMPLES = {"calculator_tool": "", "household_game": "", "mcp_tools": "mcp", "terminal_tasks": "bubblewrap"}
"""With what each needs."""
TOOLS = ("calculator_tool", "mcp_tools")
THOROUGH = [pytest.mark.e2e, pytest.mark.thorough]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_shipped_settings_load(example: str) -> None:
    job = load_config(Path("examples") / example / "job.toml", []).job
    assert job.max_steps > 0 and job.group_size > 1


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=() if name == "terminal_tasks" else THOROUGH) for name in EXAMPLES]
)
def test_the_run_shortened(example: str, tmp_path: Path) -> None:
    if EXAMPLES[example]:
        need(EXAMPLES[example])
    main = importlib.import_module(f"examples.{example}.train").main
    model = make_model(tmp_path / "model", template="qwen3" if example in TOOLS else "chatml")
    sets = set_options(model, max_steps=1, batch_size=2, group_size=2)
    sets += ["--set", "job.max_tokens=100"]
    out = tmp_path / "out"
    result = main(["--out", str(out), "--tasks", "3", "--concurrency", "3", "--seed", "3", *sets])
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["batches"], result["aborted"], result["seed"]) == (1, 0, 3)
    assert result["episodes"] >= 4 and all(map(math.isfinite, result["rewards"]))
    for score in (result["before"], result["after"]):
        low, high = score["interval"]
        assert score["tasks"] == 3 and 0 <= low <= score["success"] <= high <= 1
    assert list((out / "model").glob("*.safetensors"))
    with pytest.raises(SystemExit):
        main(["--out", str(out)])
