"""Files of checkpoints are removed in threads, and the record of a score waits for no batch.

1. A checkpoint that is not needed any more loses its name at once. Its files are removed beside the event loop.
2. The next start removes the files that a stop left.
3. The answer to a new best score comes while a batch is learned; the checkpoint is kept after the batch.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import ComputeError
from agentjet.protocol import EvaluationRequest
from agentjet.types import CheckpointStamp, PolicyId
from tests.fakes import RUN, Running, running

pytestmark = pytest.mark.anyio


def names(data_dir: Path) -> list[str]:
    return sorted(path.name for path in (data_dir / RUN / "checkpoints").iterdir() if path.is_dir())


@pytest.fixture
def removals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The removed folders, and True if the main thread, which has the event loop, removed it."""
    seen: list[tuple[str, bool]] = []
    remove = shutil.rmtree

    def counting(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).exists():
            seen.append((Path(path).name, threading.current_thread() is threading.main_thread()))
        remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", counting)
    return seen


async def test_files_are_removed_beside_the_loop(tmp_path: Path, removals: list[tuple[str, bool]]) -> None:
    (tmp_path / "d" / RUN / "checkpoints" / ".step_000009.new").mkdir(parents=True)
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1}) as run:
        for _ in range(3):
            await run.batch()
        assert [info.policy_version for info in run.gateway.store.listing()] == [3]
        await run.until(lambda: names(tmp_path / "d") == ["step_000003"])
    assert len([name for name, _ in removals if name.startswith((".step_000001", ".step_000002"))]) == 2
    assert ".step_000009.new" in [name for name, _ in removals]
    assert not any(of_loop for _, of_loop in removals)


async def test_files_of_a_failed_checkpoint_and_old_exports_are_removed_beside_the_loop(
    tmp_path: Path, removals: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(policy: PolicyId, path: Path) -> CheckpointStamp:
        path.mkdir()
        raise ComputeError("the disk is full")

    async with running(tmp_path / "d", server={"keep_exports": 1}) as run:
        for _ in range(2):
            await run.batch()
            await run.gateway.versions.export()
        with monkeypatch.context() as failing:
            failing.setattr(run.compute, "save", half)
            with pytest.raises(ComputeError):
                await run.gateway.versions.save()
    assert removals == [("step_000001", False), (".step_000002.new", False)]


async def test_the_next_start_removes_what_a_stop_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as stopped:
        stopped.setattr(shutil, "rmtree", lambda *_, **__: None)
        async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1}) as run:
            await run.batch()
            await run.batch()
            assert [info.policy_version for info in run.gateway.store.listing()] == [2]
    assert len(names(tmp_path / "d")) == 2
    async with running(tmp_path / "d"):
        assert names(tmp_path / "d") == ["step_000002"]


def score(version: int, value: float) -> EvaluationRequest:
    return EvaluationRequest(policy_version=version, score=value, num_tasks=1, num_episodes=1)


async def tagged(run: Running) -> dict[str, int]:
    return run.gateway.store.tags.read()


async def test_the_answer_to_a_best_score_waits_for_no_batch(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"keep_best": True, "checkpoint_every": 1}) as run:
        await run.batch()
        run.compute.may_learn.clear()
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "learning")
        for _ in range(2):  # A client repeats a request whose answer was lost.
            answers = await run.gateway.versions.record_evaluation(score(1, 0.5), idempotency_key="k")
            assert [answer.best for answer in answers] == [True]
        assert await tagged(run) == {}
        run.compute.may_learn.set()
        await run.until(lambda: run.gateway.store.tags.read() == {"best": 1})


async def test_a_stop_ends_the_wait_of_a_best_score(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"keep_best": True}) as run:
        await run.batch()
        run.compute.may_learn.clear()
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "learning")
        await run.gateway.versions.record_evaluation(score(1, 0.5))
        run.compute.may_learn.set()
        await run.gateway.engine.stop()
        await run.until(lambda: not run.gateway.versions._keeping)


async def test_a_best_score_whose_checkpoint_cannot_be_saved_ends_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"keep_best": True}) as run:
        await run.batch()
        run.compute.fail_save.append(ComputeError("the worker has no room"))
        await run.gateway.versions.record_evaluation(score(1, 0.5))
        await run.gateway.versions.close()
        await run.batch()


async def test_a_score_just_before_a_stop_keeps_its_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"keep_best": True}) as run:
        await run.batch()
        await run.gateway.versions.record_evaluation(score(1, 0.5))
    async with running(tmp_path / "d") as run:
        assert await tagged(run) == {"best": 1}
