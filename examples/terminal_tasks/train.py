"""Starts a server, plays the held-out tasks, trains, and plays them again; `result.json` keeps the figures.

python -m examples.terminal_tasks.train --out terminal-tasks
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentjet import environments
from examples import before_after
from examples.terminal_tasks.make_tasks import NUM_HELD_OUT, make

SETTINGS = Path(__file__).with_name("job.toml")
PROMPT = """\
Sort the lines of a.txt.
Delete b.txt.
Copy c.txt to d.txt.
["sort -o a.txt a.txt", "rm b.txt", "cp c.txt d.txt"]

Replace x with y in e.txt.
Rename f.txt to g.txt.
Delete h.txt.
["sed -i s/x/y/ e.txt", "mv f.txt g.txt", "rm h.txt"]"""
"""Two solved tasks: without them the model often repeats one command."""
SETTINGS_OF_TASKS = {"max_turns": 1, "commands_each_turn": 3, "shows_commands": False, "system_prompt": PROMPT}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = before_after.options_of(__doc__, "terminal-tasks", NUM_HELD_OUT, 16, arguments)
    make(options.out / "tasks", num_held_out=options.tasks)
    target = f"harbor:{options.out / 'tasks'}"
    with environments.load(target, processes=options.concurrency, **SETTINGS_OF_TASKS) as terminal:
        return before_after.train(
            options, SETTINGS, terminal.agent, terminal.tasks, terminal.held_out, success="solved"
        )


if __name__ == "__main__":
    main()
