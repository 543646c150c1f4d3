"""Starts a server, lets a model work in the coding assistant of `cli.py`, trains it, and looks again.

    python -m examples.claude_style_cli.train --out claude-style-cli

The server is a child of this process, on a free loopback port, and ends with it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import anthropic

from agentjet import Episode, Reward, Swarm, Task
from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from examples.claude_style_cli.cli import Workspace, work
from examples.claude_style_cli.repairs import TASKS, Repair
from examples.claude_style_cli.reward import worth

SETTINGS = Path(__file__).with_name("job.toml")

# A copy of a client for another episode costs nothing. The server is on this machine: no proxy is asked.
ANTHROPIC = anthropic.Anthropic(
    base_url="http://127.0.0.1",
    api_key="each episode has its own",
    http_client=anthropic.DefaultHttpxClient(trust_env=False),
)


def agent(task: Task, episode: Episode) -> Reward:
    """One repair in a fresh folder; 1 when the tests pass in the end."""
    job: Repair = task.payload
    llm = ANTHROPIC.with_options(base_url=episode.anthropic_base_url, api_key=episode.api_key)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{task.id}.py").write_text(job.code, encoding="utf-8")
        workspace = Workspace(Path(folder), job.tests)
        used = list(work(llm, episode.model, workspace, f"The function in {task.id}.py is wrong. Repair it."))
        solved = workspace.passes()
    return worth(solved, used)


def share_solved(swarm: Swarm, repeats: int) -> float:
    """The share of attempts, `repeats` at each task, whose tests pass in the end."""
    return swarm.evaluate(agent, TASKS, repeats=repeats).mean_metric("solved")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    job = load_config(SETTINGS, options.set).job
    with (
        raise_on_signals(),
        ChildServer(SETTINGS, options.set, options.out / "server") as server,
        server.connect() as swarm,
    ):
        print(f"the server is ready; its log is {server.log}", flush=True)
        before = share_solved(swarm, options.repeats)
        print(f"before: {before:.1%} of the attempts repaired the function", flush=True)
        report = swarm.train(agent, TASKS, steps=job.max_steps, concurrency=job.batch_size * job.group_size)
        after = share_solved(swarm, options.repeats)
        print(f"after {job.max_steps} batches: {after:.1%}", flush=True)
    result = {
        "before": round(before, 4),
        "after": round(after, 4),
        "batches": len(report.steps),
        "aborted": report.num_aborted + report.num_expired,
        "training_seconds": round(report.seconds, 1),
        "rewards": [round(reward, 4) for reward in report.rewards],
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("claude-style-cli"), help="folder of the results")
    parser.add_argument("--repeats", type=int, default=8, help="attempts at each task of an evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a setting")
    return parser


if __name__ == "__main__":
    main()
