"""Starts a server, asks the held-out questions, trains, and asks them again; `result.json` keeps the figures.

    python -m examples.mcp_tools.train --out mcp-tools

The MCP server is `server.py` beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentjet import environments
from agentjet.environments import Environment
from examples import before_after
from examples.mcp_tools import tasks

SETTINGS = Path(__file__).with_name("job.toml")
SERVER = Path(__file__).with_name("server.py")


def load(task_file: Path, processes: int = 16) -> Environment:
    """The shop. Its servers keep no state, so a process keeps its server for the next episode."""
    return environments.load(
        f"mcp:python {SERVER}",
        task_set="shop",
        task_file=task_file,
        reward="contains",
        tool_choice="required",
        strict=True,
        shared=True,
        max_turns=2,
        max_tokens=40,
        processes=processes,
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = before_after.options_of(__doc__, "mcp-tools", tasks.NUM_HELD_OUT, 32, arguments)
    with load(tasks.write(options.out / "tasks.jsonl"), options.concurrency) as shop:
        return before_after.train(options, SETTINGS, shop.agent, shop.tasks, shop.held_out)


if __name__ == "__main__":
    main()
