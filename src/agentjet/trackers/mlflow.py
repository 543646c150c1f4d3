"""`mlflow:URI`: a tracking server, or a database such as `mlflow:sqlite:///mlflow.db`.

MLflow ignores a metric that it has with the same key, step, time and value, so a step that was half written is written
again as a whole. The tag `agentjet.version` follows the metrics.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from agentjet.trackers.sink import Run, Step

EXPERIMENT = "agentjet"
RUN_TAG, VERSION_TAG = "agentjet.run", "agentjet.version"
METRICS_A_CALL, PARAMS_A_CALL = 1000, 100
"""Limits of MLflow."""
LONGEST_NAME, LONGEST_VALUE = 250, 6000
FORBIDDEN = re.compile(r"[^/\w.\- :]", re.ASCII)


class MlflowSink:
    """Metrics by name; the step is the policy version. Settings are parameters."""

    def __init__(self, target: str) -> None:
        self._client = MlflowClient(tracking_uri=target)
        self._run_id = ""

    def begin(self, run: Run) -> int | None:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        held = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        mine = held[0] if held else self._client.create_run(experiment, tags={RUN_TAG: run.id}, run_name=run.name)
        self._run_id = mine.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        values = ((_name(name), str(value)[:LONGEST_VALUE]) for name, value in run.settings.items())
        new = (Param(name, value) for name, value in values if name not in mine.data.params)
        while some := list(islice(new, PARAMS_A_CALL)):
            self._client.log_batch(self._run_id, params=some)
        return int(mine.data.tags.get(VERSION_TAG, 0))

    def write(self, steps: Sequence[Step]) -> None:
        metrics = _metrics(steps)
        while some := list(islice(metrics, METRICS_A_CALL)):
            self._client.log_batch(self._run_id, metrics=some)
        self._client.set_tag(self._run_id, VERSION_TAG, str(steps[-1].version))

    def end(self) -> None:
        self._client.set_terminated(self._run_id)


def _metrics(steps: Sequence[Step]) -> Iterator[Metric]:
    for step in steps:
        for name, value in step.metrics.items():
            yield Metric(_name(name), value, int(step.time * 1000), step.version)


def _name(name: str) -> str:
    """The name with the characters that MLflow allows. A changed one ends with a hash, so that two stay different."""
    allowed = FORBIDDEN.sub("_", name)[:LONGEST_NAME]
    if allowed == name:
        return name
    return f"{allowed[: LONGEST_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
