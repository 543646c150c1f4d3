"""Starts a server, asks the held-out questions, trains, and asks them again; `result.json` keeps the figures.

python -m examples.calculator_tool.train --out calculator-tool
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples import before_after
from examples.calculator_tool.agent import NUM_HELD_OUT, agent, held_out_tasks, training_tasks

SETTINGS = Path(__file__).with_name("job.toml")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = before_after.options_of(__doc__, "calculator-tool", NUM_HELD_OUT, 96, arguments)
    return before_after.train(options, SETTINGS, agent, training_tasks(), held_out_tasks(options.tasks))


if __name__ == "__main__":
    main()
