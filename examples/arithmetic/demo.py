"""The run of `agentjet demo`, from an untrained model to a picture, a report and an exported model.

Starts a server on this machine, evaluates the model on held-out sums, trains it, and evaluates it again.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentjet.cli.run import evaluate_all
from agentjet.cli.serve import ChildServer
from agentjet.client import Swarm, TrainReport
from agentjet.client.threads import raise_on_signals
from agentjet.config import check_models, load_config
from agentjet.errors import ConfigError

from .agent import FirstAnswer, agent, held_out_tasks, training_tasks
from .report import Score, draw_rewards, write_report

SETTINGS = Path(__file__).with_name("job.toml")
CONCURRENCY = 128
"""Episodes of an evaluation at the same time."""


@dataclass
class Demo:
    """One run of the demo. `steps` and `model` replace those of `job.toml`; `tasks` counts held-out sums."""

    seed: int
    out: Path
    steps: int | None
    model: str | None
    tasks: int
    overrides: list[str]
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""

    def run(self) -> None:
        """Writes reward.png, report.html, result.json and the model into `out`.

        Raises `AgentJetError`. After Ctrl-C the server has saved a checkpoint and exited when this returns.
        """
        started = time.monotonic()
        config = load_config(SETTINGS, self._overrides())
        check_models(config)
        job = config.job
        self._clear()
        _print(f"starting a server for {config.model.name}; its log is {self._server_dir / 'serve.log'}")
        with raise_on_signals(), ChildServer(SETTINGS, self._overrides(), self._server_dir) as server:
            with self._phase("start"):
                swarm = server.connect()
            with swarm:
                token = shlex.quote(str(self._server_dir / "viewer-token"))
                _print(f"the server is ready; to see its page: agentjet open --url {server.url} --token-file {token}")
                before = self._score(swarm, "base_eval")
                _print(f"before: {before}")
                with self._phase("train"):
                    report = swarm.train(
                        agent,
                        training_tasks(),
                        steps=job.max_steps,
                        concurrency=job.batch_size * job.group_size,
                        seed=self.seed,
                    )
                after = self._score(swarm, "final_eval")
                _print(f"after {job.max_steps} steps: {after}")
                with self._phase("export"):
                    shutil.move(swarm.export().path, self.out / "model")
            with self._phase("stop"):
                server.stop()
        picture = self.out / "reward.png"
        draw_rewards(picture, report.rewards, before, after)
        result = self._result(report, before, after, time.monotonic() - started)
        write_report(self.out / "report.html", config.model.name, result, before, after, picture)
        (self.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        _print(f"{result['seconds']:.0f} s in all. See {picture} and {self.out / 'report.html'}, then try:")
        _print(f"  agentjet eval {shlex.quote(str(self.out / 'model'))} --temperature 0")

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
        """Removes the results of an earlier demo. Raises `ConfigError` for a folder that no demo made."""
        if self._server_dir.exists() and not (self._server_dir / "serve.log").exists():
            raise ConfigError(f"{self._server_dir} was not made by a demo: give another folder with --out")
        for folder in (self._server_dir, self.out / "model"):
            if folder.exists():
                _print(f"replacing {folder} of an earlier demo")
                shutil.rmtree(folder)
        self.out.mkdir(parents=True, exist_ok=True)

    def _score(self, swarm: Swarm, phase: str) -> Score:
        examiner = FirstAnswer(seed=self.seed)
        with self._phase(phase):
            report = evaluate_all(swarm, examiner, held_out_tasks(self.tasks), concurrency=CONCURRENCY)
        return Score(report.mean_at_k, report.metric_at_k("well_formed"), examiner.answers)

    def _result(self, report: TrainReport, before: Score, after: Score, seconds: float) -> dict[str, Any]:
        """The content of `result.json`."""
        finished = report.finished
        return {
            "seed": self.seed,
            "steps": len(report.steps),
            "seconds": round(seconds, 1),
            "tasks": self.tasks,
            "base_success": before.right.value,
            "final_success": after.right.value,
            "episodes": len(finished),
            "aborted": report.num_aborted + report.num_expired,
            "multi_turn_share": sum(result.metrics["turns"] > 1 for result in finished) / len(finished),
            "base_success_interval": [before.right.low, before.right.high],
            "final_success_interval": [after.right.low, after.right.high],
            "base_well_formed": before.formed.value,
            "final_well_formed": after.formed.value,
            "base_well_formed_interval": [before.formed.low, before.formed.high],
            "final_well_formed_interval": [after.formed.low, after.formed.high],
            "rewards": [round(reward, 4) for reward in report.rewards],
            "timings": {phase: round(took, 1) for phase, took in self.timings.items()},
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.timings[name] = time.monotonic() - began


def _print(line: str) -> None:
    print(line, flush=True)
