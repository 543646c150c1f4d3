"""1. The split of the questions. 2. The shop answers through MCP, and its answers are right. 3. The shipped settings
load. 4. The whole run, shortened, on a tiny model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentjet.config import load_config
from tests.needs import need
from tests.tiny import make_model, set_options

need("mcp")

from examples.mcp_tools import server, tasks  # noqa: E402  after `need`
from examples.mcp_tools.train import SETTINGS, load, main  # noqa: E402


def test_held_out_items_are_neither_trained_on_nor_shown(tmp_path: Path) -> None:
    with load(tasks.write(tmp_path / "tasks.jsonl")) as shop:
        trained, held_out = ({task.id for task in split} for split in (shop.tasks, shop.held_out))
        rows = [task.payload for task in (*shop.tasks, *shop.held_out)]
    assert (len(trained), len(held_out)) == (tasks.NUM_TRAINING, tasks.NUM_HELD_OUT)
    assert trained.isdisjoint(held_out) and tasks.SHOWN.isdisjoint(trained | held_out)
    assert all(row["id"] in row["question"] for row in rows)
    right = {server.number(column, row["id"]) for row in rows for column in ("price", "stock")}
    assert {row["answer"] for row in rows} <= right


def test_an_item_that_the_shop_does_not_have() -> None:
    with pytest.raises(ValueError, match="there is no tan dragon"):
        server.price("tan dragon")
    assert server.price("tan apron") == f"{server.number('price', 'tan apron')} dollars"


def test_the_settings_load() -> None:
    assert load_config(SETTINGS, []).job.max_steps == 12


@pytest.mark.e2e
@pytest.mark.thorough
def test_the_run_shortened(tmp_path: Path) -> None:
    sets = set_options(make_model(tmp_path / "model", template="qwen3"), max_steps=1, batch_size=1, group_size=2)
    out = tmp_path / "out"
    result = main(["--out", str(out), "--tasks", "4", "--seed", "3", *sets])
    assert json.loads((out / "result.json").read_text()) == json.loads(json.dumps(result))
    assert (result["tasks"], result["aborted"], len(result["rewards"])) == (4, 0, 1)
