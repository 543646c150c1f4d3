"""Starts a server, plays the held-out tasks, trains, and plays them again; `result.json` keeps the figures.

python -m examples.household_game.train --out household-game
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentjet import environments
from examples import before_after

SETTINGS = Path(__file__).with_name("job.toml")
GAME = "examples.household_game.house/Household"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = before_after.options_of(__doc__, "household-game", 100, 32, arguments)
    with environments.load(GAME, processes=options.concurrency) as game:
        return before_after.train(options, SETTINGS, game.agent, game.tasks, game.held_out, success="success")


if __name__ == "__main__":
    main()
