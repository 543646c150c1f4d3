"""1. The split of the questions. 2. The shop answers through MCP, and its answers are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needs import need

need("mcp")

from examples.mcp_tools import server, tasks  # noqa: E402  after `need`
from examples.mcp_tools.train import load  # noqa: E402


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
