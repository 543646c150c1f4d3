"""The sinks that need a library. Each is skipped by name where its library is missing.

1. Each step is there once after 20 kills at any line of the package, with equal values (TensorBoard: float32).
2. Settings, names and times are there.
3. What a kill left incomplete is completed.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentjet.trackers import (
    Run,
    TrackedStep,
    id_of_run,
    mlflow_metrics,
    mlflow_name,
    tensorboard_events,
    wandb_records,
)
from tests.needs import need
from tests.trackers.steps import ListSource, Rows, copy, copy_through_kills, rows_of, steps_of

STEPS, MANY = steps_of(12), steps_of(60)
RUN = Run(id_of_run(STEPS[0]), "one", ListSource(STEPS).settings())


def gathered(points: Iterable[tuple[int, str, float]]) -> Rows:
    """Rows of single values. Fails if one is there twice."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for version, name, value in points:
        assert name not in rows[version], f"step {version} has {name} twice"
        rows[version][name] = value
    return sorted(rows.items())


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def as_float32(steps: list[TrackedStep]) -> Rows:
    return [(v, {n: struct.unpack("f", struct.pack("f", x))[0] for n, x in row.items()}) for v, row in rows_of(steps)]


def events(folder: Path) -> list[Any]:
    """Those of steps."""
    return [event for file in sorted(folder.glob("*.tfevents.*")) for event in tensorboard_events(file) if event.step]


def event_rows(folder: Path) -> Rows:
    values = [(event.step, value) for event in events(folder) for value in event.summary.value]
    return gathered((step, value.tag, value.simple_value) for step, value in values if not value.HasField("tensor"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder for TensorBoard."""
    return tmp_path / "runs"


def test_tensorboard_has_each_step_once_after_20_kills(runs: Path, tmp_path: Path) -> None:
    copy_through_kills(MANY, f"tensorboard:{runs}", tmp_path)
    assert event_rows(runs) == as_float32(MANY)


def test_tensorboard_completes_a_torn_record(runs: Path, tmp_path: Path) -> None:
    copy(STEPS, f"tensorboard:{runs}", tmp_path)
    [file] = runs.iterdir()
    os.truncate(file, file.stat().st_size - 5)
    copy(STEPS, f"tensorboard:{runs}", tmp_path)
    assert event_rows(runs) == as_float32(STEPS)


def test_tensorboard_has_settings_and_times(runs: Path, tmp_path: Path) -> None:
    for ready in (3, 12):
        copy(STEPS[:ready], f"tensorboard:{runs}", tmp_path)
    found = events(runs)
    assert [event.wall_time for event in found] == [step.time for step in STEPS]
    texts = [value.tensor.string_val for event in found for value in event.summary.value if value.HasField("tensor")]
    assert len(texts) == 1 and b"job.optimizer.lr = 1e-06" in texts[0][0]


@pytest.mark.needs("tensorboard")
def test_tensorboard_itself_reads_them(runs: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator

    copy_through_kills(MANY, f"tensorboard:{runs}", tmp_path, kills=5)
    shown = event_accumulator.EventAccumulator(str(runs), size_guidance={"scalars": 0})
    shown.Reload()
    points = [(point.step, tag, point.value) for tag in shown.Tags()["scalars"] for point in shown.Scalars(tag)]
    assert gathered(points) == as_float32(MANY)


# ---- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A database for MLflow."""
    need("mlflow")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def mlflow_run(uri: str) -> tuple[Any, str]:
    """A client, and the id of the only run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("agentjet")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    return client, run.info.run_id


def mlflow_rows(uri: str) -> Rows:
    client, run_id = mlflow_run(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.params["job.recipe.name"] == "grpo"
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return gathered((point.step, point.key, point.value) for history in histories for point in history)


def as_mlflow(steps: list[TrackedStep]) -> Rows:
    return [(version, {mlflow_name(name): value for name, value in row.items()}) for version, row in rows_of(steps)]


@pytest.mark.thorough
def test_mlflow_has_each_step_once_after_20_kills(uri: str, tmp_path: Path) -> None:
    copy_through_kills(MANY, f"mlflow:{uri}", tmp_path)
    assert mlflow_rows(uri) == as_mlflow(MANY)


@pytest.mark.thorough
def test_mlflow_completes_a_step_that_arrived_half(uri: str, tmp_path: Path) -> None:
    copy(STEPS[:5], f"mlflow:{uri}", tmp_path)
    client, run_id = mlflow_run(uri)
    client.log_batch(run_id, metrics=list(mlflow_metrics(STEPS[5:]))[:4])
    copy(STEPS, f"mlflow:{uri}", tmp_path)
    assert mlflow_rows(uri) == as_mlflow(STEPS)


# ---- Trackio ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.needs("trackio")
def test_trackio_has_each_step_once_after_20_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    copy_through_kills(MANY, "trackio:project", tmp_path)
    found = SQLiteStorage.get_logs("project", run_id=RUN.id)
    assert len({row.pop("timestamp") for row in found}) == len(MANY)
    assert [(row.pop("step"), row) for row in found] == rows_of(MANY)
    config = SQLiteStorage.get_run_config("project", run_id=RUN.id)
    assert config is not None and config["job.recipe.name"] == "grpo"


# ---- Weights & Biases ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.needs("wandb")
def test_wandb_has_each_step_once_after_20_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    copy_through_kills(MANY, "wandb:project", tmp_path)
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{RUN.id}/run-{RUN.id}.wandb"))
    history = [
        record.history
        for file in files
        for record in map(Record.FromString, wandb_records(file.read_bytes()))
        if record.HasField("history")
    ]
    points = [(one.step.num, item.nested_key[0], float(item.value_json)) for one in history for item in one.item]
    rows = gathered(points)
    assert [row.pop("_timestamp") for _, row in rows] == [step.time for step in MANY]
    assert [(v, {n: x for n, x in row.items() if not n.startswith("_")}) for v, row in rows] == rows_of(MANY)
