"""Trains an agent whose prompt is corrected during training; writes result.json and reward.png.

    python -m examples.live_edit.run --out live-edit

The server is a child of this process, on a free loopback port, and ends with it. A thread plays the part of a person
with an editor: after some batches it writes the corrected prompt into the agent's file, a copy in the output folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentjet import Swarm, Task, TrainReport
from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from examples.arithmetic.agent import training_tasks
from examples.arithmetic.demo import SETTINGS

AGENT = Path(__file__).with_name("adder.py")
BROKEN = 'PROMPT = ["Write a poem about {a} + {b}."]'
CORRECTED = 'PROMPT = ["3 + 5", "3 + 5 = 8", "12 + 7", "12 + 7 = 19", "{a} + {b}"]'
SMALLER = "job.batch_size=4"
"""Batches of 32 episodes: an edit is seen soon."""
CONCURRENCY = 32


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The whole run; returns what it wrote to `result.json`."""
    options = _parser().parse_args(arguments)
    server_dir = options.out / "server"
    if server_dir.exists():
        raise SystemExit(f"{server_dir} is there already: give another folder with --out, or remove it")
    overrides = [f"job.max_steps={options.steps}", f"job.seed={options.seed}", SMALLER, *options.set]
    with raise_on_signals(), ChildServer(SETTINGS, overrides, server_dir) as server, server.connect() as swarm:
        print(f"the server is ready; its log is {server.log}", flush=True)
        result = edit_live(swarm, training_tasks(), options.out, steps=options.steps, edit_after=options.edit_after)
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(options.out / "reward.png", result)
    print(json.dumps({key: value for key, value in result.items() if key != "rewards"}))
    return result


def edit_live(
    swarm: Swarm, tasks: Sequence[Task], folder: Path, *, steps: int, edit_after: int, concurrency: int = CONCURRENCY
) -> dict[str, Any]:
    """Train for `steps` batches, with the edit after `edit_after` of them; the figures."""
    file = Path(shutil.copy(AGENT, folder))
    sys.path.insert(0, str(folder))
    try:
        agent = importlib.import_module(AGENT.stem).agent
        editor = threading.Thread(target=_edit, args=(swarm, file, swarm.status().policy_version + edit_after))
        editor.daemon = True
        editor.start()
        before = swarm.status()
        report = swarm.train(agent, tasks, steps=steps, concurrency=concurrency, reload=True)
        after = swarm.status()
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(AGENT.stem, None)
    print(report, flush=True)
    return figures(report) | {
        "server_restarts": _restarts(swarm, before.last_event, after.last_event),
        "lost_finished_episodes": after.episodes["dropped"] - before.episodes["dropped"],
    }


def figures(report: TrainReport) -> dict[str, Any]:
    """The report's figures for the two prompts, in the order of their use."""
    versions = list(report.by_code_version.items())
    [change] = report.code_changes
    return {
        "batches": len(report.steps),
        "seconds": round(report.seconds, 1),
        "edit": change.kind,
        "versions": [
            {"code_version": name, "episodes": v.num_finished, "reward": v.mean_reward} for name, v in versions
        ],
        "failed_episodes": report.num_aborted + report.num_expired,
        "rewards": [round(reward, 4) for reward in report.rewards],
    }


def _restarts(swarm: Swarm, first: int, last: int) -> int:
    """The number of starts of the server, or its worker, between two events."""
    num_restarts = 0
    for event in swarm.events(after=first) if last > first else ():
        num_restarts += event.kind == "state" and event.body["state"] == "loading"
        if event.seq >= last:
            break
    return num_restarts


def _edit(swarm: Swarm, file: Path, version: int) -> None:
    """Mend the prompt once the policy is at `version`."""
    for event in swarm.events():
        if event.kind == "step" and event.body["policy_version"] >= version:
            file.write_text(file.read_text().replace(BROKEN, CORRECTED))
            return


def draw(path: Path, result: dict[str, Any]) -> None:
    """The mean reward of each batch, and where the new code came into use."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rewards = result["rewards"]
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=3, label="mean reward of a batch")
    share = result["versions"][0]["episodes"] / sum(version["episodes"] for version in result["versions"])
    axes.axvline(share * len(rewards) + 0.5, linestyle="--", color="grey", label="the prompt was corrected")
    axes.set_xlabel("batch")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Mend an agent's prompt while it is trained.")
    parser.add_argument("--out", type=Path, default=Path("live-edit"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=36, help="batches to learn")
    parser.add_argument("--edit-after", type=int, default=6, help="batches learned with the broken prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="override a setting of the server")
    return parser


if __name__ == "__main__":
    main()
