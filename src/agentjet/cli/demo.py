"""`agentjet demo`: the main job end to end, from an untrained model to a picture and an exported one."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentjet.cli import Override
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.cli.scoring import Score
    from agentjet.client import Swarm, TrainReport

DEFAULT_OUT = Path("agentjet-demo")
CONCURRENCY = 128
"""Held-out sums asked at the same time."""


def demo(
    seed: Annotated[int, typer.Option(help="Seed of the tasks' order, of sampling and of the learner.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the results; an earlier demo's are replaced.")] = DEFAULT_OUT,
    steps: Annotated[int | None, typer.Option(min=1, help="Batches to learn; default: as tuned.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model: a Hugging Face id or a local folder.")] = None,
    tasks: Annotated[int, typer.Option(min=1, max=500, help="Held-out sums of each evaluation.")] = 500,
    override: Override = None,
) -> None:
    """Train a small language model to add, from an agent written with OpenAI's SDK.

    Starts a server of its own on this machine, evaluates the model on sums it is not trained on, trains it, evaluates
    it again, and writes reward.png, report.html, result.json and the trained model (a Hugging Face folder) into the
    output folder.
    """
    run = Demo(seed=seed, out=out, steps=steps, model=model, tasks=tasks, overrides=override or [])
    try:
        run.run()
    except KeyboardInterrupt:
        typer.echo(f"interrupted; the server has ended, and what it had learned is in {out / 'server'}", err=True)
        raise typer.Exit(130) from None


@dataclass
class Demo:
    """One run of the demo."""

    seed: int
    out: Path
    steps: int | None
    model: str | None
    tasks: int
    overrides: list[str]
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""

    def run(self) -> None:
        """Everything. Raises `AgentJetError`; on Ctrl-C the server has saved a checkpoint and ended before this
        returns."""
        # These need the [server] and [demo] extras; `agentjet --help` does not.
        from agentjet.cli.arithmetic import SETTINGS, agent, training_tasks
        from agentjet.cli.picture import draw_rewards
        from agentjet.cli.report import write_report
        from agentjet.cli.serve import ChildServer
        from agentjet.client.threads import raise_on_signals
        from agentjet.config import load_config

        started = time.monotonic()
        config = load_config(SETTINGS, self._overrides(), environ={})
        job = config.job
        self._clear()
        typer.echo(f"starting a server for {config.model.name}; its log is {self._server_dir / 'serve.log'}")
        with raise_on_signals(), ChildServer(SETTINGS, self._overrides(), self._server_dir) as server:
            with self._phase("start"):
                swarm = server.connect()
            with swarm:
                watch = f"agentjet watch --url {server.url} --token-file {shlex.quote(str(self._server_dir / 'token'))}"
                typer.echo(f"the server is ready; look on with: {watch}")
                before = self._score(swarm, "base_eval")
                typer.echo(f"before: {before}")
                with self._phase("train"):
                    report = swarm.train(
                        agent,
                        training_tasks(),
                        steps=job.max_steps,
                        concurrency=job.batch_size * job.group_size,
                        seed=self.seed,
                    )
                after = self._score(swarm, "final_eval")
                typer.echo(f"after {job.max_steps} steps: {after}")
                with self._phase("export"):
                    shutil.move(swarm.export().path, self.out / "model")
            with self._phase("stop"):
                server.stop()
        picture = self.out / "reward.png"
        draw_rewards(picture, report.rewards, before, after)
        result = self._result(report, before, after, time.monotonic() - started)
        write_report(self.out / "report.html", config.model.name, result, before, after, picture)
        (self.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        typer.echo(f"{result['seconds']:.0f} s in all. Look at {picture} and {self.out / 'report.html'}, then try:")
        typer.echo(f"  agentjet eval {shlex.quote(str(self.out / 'model'))} --greedy")

    @property
    def _server_dir(self) -> Path:
        return self.out / "server"

    def _overrides(self) -> list[str]:
        overrides = [f"job.seed={self.seed}"]
        if self.model is not None:
            overrides.append(f"model.name={json.dumps(self.model)}")
        if self.steps is not None:
            overrides += [f"job.max_steps={self.steps}", f"job.optimizer.total_steps={self.steps}"]
        return [*overrides, *self.overrides]

    def _clear(self) -> None:
        """Make room for the results. Raises `ConfigError` rather than remove what no demo made."""
        if self._server_dir.exists() and not (self._server_dir / "serve.log").exists():
            raise ConfigError(f"{self._server_dir} was not made by a demo: give another folder with --out")
        for folder in (self._server_dir, self.out / "model"):
            if folder.exists():
                typer.echo(f"replacing {folder} of an earlier demo")
                shutil.rmtree(folder)
        self.out.mkdir(parents=True, exist_ok=True)

    def _score(self, swarm: Swarm, phase: str) -> Score:
        from agentjet.cli.scoring import Exam, score_policy

        with self._phase(phase):
            return score_policy(swarm, Exam(self.tasks, seed=self.seed, concurrency=CONCURRENCY))

    def _result(self, report: TrainReport, before: Score, after: Score, seconds: float) -> dict[str, Any]:
        """What `result.json` holds."""
        finished = report.finished
        return {
            "seed": self.seed,
            "steps": len(report.steps),
            "seconds": round(seconds, 1),
            "tasks": after.tasks,
            "base_success": before.success,
            "final_success": after.success,
            "episodes": len(finished),
            "aborted": report.num_aborted + report.num_expired,
            "multi_turn_share": sum(result.metrics["turns"] > 1 for result in finished) / len(finished),
            "base_success_interval": list(before.success_interval),
            "final_success_interval": list(after.success_interval),
            "base_well_formed": before.well_formed,
            "final_well_formed": after.well_formed,
            "base_well_formed_interval": list(before.well_formed_interval),
            "final_well_formed_interval": list(after.well_formed_interval),
            "rewards": [round(reward, 4) for reward in report.rewards],
            "timings": {phase: round(took, 1) for phase, took in self.timings.items()},
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.timings[name] = time.monotonic() - began
