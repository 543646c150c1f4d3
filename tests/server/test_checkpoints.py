"""Checkpoints, and the policies that begin from them.

The checkpoints that count, on a scripted worker. Damage of real files: `tests/compute/test_checkpoint.py`.

1. An unusable checkpoint is renamed, counted and shown, and the next older good one is loaded.
2. Without a good one the journal is replayed from version 0 if it reaches there. Else every start is refused.
3. A checkpoint that the journal did not record never counts, unless the journal begins at it or AgentJet 0.1 wrote it.
4. Only checkpoints that this server wrote or loaded are returned as written, displace older ones, or release calls.
5. An interrupted write leaves no checkpoint that counts, even if the journal had recorded it.
6. A stop while the journal refuses a published batch writes no checkpoint, and the batch is learned later.
7. An incomplete journal is refused, and no checkpoint is renamed.
8. The calls of a few episodes outlive the checkpoints that cover them; those of the others are gone. They are searched
   in a thread, and the event loop runs between two slices of the clean-up.

Files of checkpoints are removed in threads, and the record of a score waits for no batch.

1. A checkpoint that is not needed any more loses its name at once. Its files are removed beside the event loop.
2. The next start removes the files that a stop left.
3. The answer to a new best score comes while a batch is learned; the checkpoint is kept after the batch.

A run that begins from a checkpoint of another one: `model = "RUN@VERSION"`.

1. The checkpoint becomes version 0 of the new run, once: later starts need neither the other run nor its checkpoints.
2. A run, policy or version that does not exist is refused by name, with those that do.

The engine starts with the policy that the data dir was created with, or not at all.

1. Other base weights end the start, or the run if a worker is replaced: nothing is loaded, learned or tried again.
2. A checkpoint of other settings does so, too, even if an older one or a replay would serve.
3. If no checkpoint can be read and the journal does not reach back, the message begins with that.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.checkpoints import branch
from agentjet.cli.server_process import check_data_dir
from agentjet.compute.checkpoint import seal
from agentjet.errors import CheckpointError, ComputeError, ConfigError, Conflict, Later, Unavailable
from agentjet.protocol import AbortRequest, BeginRequest, EpisodeTree, EvaluationRequest, RunSettings
from agentjet.server.run_policies import whole_model
from agentjet.swarm import journal
from agentjet.swarm.journal import Slice
from agentjet.types import CheckpointStamp, PolicyId
from tests.fakes import RUN, Running, ScriptedCompute, running
from tests.tiny import make_model_info

pytestmark = pytest.mark.anyio


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def versions(run: Running) -> list[int]:
    return [info.policy_version for info in run.gateway.store.listing()]


def folder(data_dir: Path, version: int) -> Path:
    return data_dir / RUN / "checkpoints" / f"step_{version:06d}"


def of_the_future(data_dir: Path) -> None:
    folder(data_dir, 3).rename(folder(data_dir, 7))
    seal(folder(data_dir, 7), {"policy_version": 7, "weights": "others"})


async def test_an_unusable_checkpoint_is_set_aside_and_the_one_before_is_taken(tmp_path: Path) -> None:
    name = "unusable_000003"
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        for _ in range(3):
            await run.batch()
        weights = run.compute.weights
    (folder(tmp_path / "d", 3) / "state.json").write_text("{")
    async with running(tmp_path / "d") as run:
        assert (run.compute.learned, run.compute.weights) == ([2], weights)
        assert versions(run) == [2]
        assert run.gateway.status().unusable_checkpoints == [str(tmp_path / "d" / RUN / "checkpoints" / name)]
        [event] = [event.body for event in run.gateway.swarm.queries.journal.events() if event.body.get("set_aside")]
        assert not event["ok"] and event["set_aside"].endswith(name)
        info = await run.gateway.versions.save()
        assert (info.policy_version, versions(run)) == (3, [2, 3]), "it is written again"
    async with running(tmp_path / "d") as run:
        assert (run.compute.learned, run.compute.weights) == ([], weights)


@pytest.mark.parametrize(
    ("num_kept", "num_batches", "why"),
    [
        (2, 3, r"batches before 2 were pruned.*unusable_000003"),
        (1, 1, r"step_000001 cannot be read: .*; The journal cannot replay"),
    ],
)
async def test_without_a_good_one_and_without_the_calls_the_start_is_refused(
    tmp_path: Path, num_kept: int, num_batches: int, why: str
) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": num_kept}) as run:
        for _ in range(num_batches):
            await run.batch()
    for path in (tmp_path / "d" / RUN / "checkpoints").iterdir():
        (path / "state.json").write_text("{")
    for match in (why, "unusable_"):
        with pytest.raises(CheckpointError, match=match):
            async with running(tmp_path / "d"):
                pass


async def test_an_empty_journal_beside_damaged_checkpoints_does_not_begin_at_zero(tmp_path: Path) -> None:
    async with running(tmp_path / "a", job={"checkpoint_every": 1}) as run:
        await run.batch()
    (folder(tmp_path / "a", 1) / "state.json").write_text("{")
    (tmp_path / "d" / RUN).mkdir(parents=True)
    (tmp_path / "a" / RUN / "checkpoints").rename(tmp_path / "d" / RUN / "checkpoints")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="the checkpoint of version 1 covers them"):
            async with running(tmp_path / "d"):
                pass


async def refused(data_dir: Path, why: str) -> None:
    """Every start is, and changes no checkpoint."""
    before = sorted(path.name for path in (data_dir / RUN / "checkpoints").iterdir())
    for _ in range(2):
        with pytest.raises(ConfigError, match=why):
            async with running(data_dir):
                pass
    assert sorted(path.name for path in (data_dir / RUN / "checkpoints").iterdir()) == before


async def test_a_journal_that_ends_before_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        for _ in range(3):
            await run.batch()
    of_the_future(tmp_path / "d")
    await refused(
        tmp_path / "d", r"version 7 is newer than the journal, which ends at 3\. .*Restore journal\.sqlite together"
    )


@pytest.mark.parametrize("end", [0, 2])
async def test_a_journal_that_lost_its_end_is_refused(tmp_path: Path, end: int) -> None:
    """Its write-ahead log was lost, and with it all of it, or was damaged in its middle."""
    data = tmp_path / "d"
    for batches in (end, 3 - end):
        async with running(data, job={"checkpoint_every": 1}) as run:
            for _ in range(batches):
                await run.batch()
        if not (tmp_path / "early.sqlite").exists():
            shutil.copy(data / RUN / "journal.sqlite", tmp_path / "early.sqlite")
    shutil.copy(tmp_path / "early.sqlite", data / RUN / "journal.sqlite")
    (data / RUN / "journal.sqlite-wal").unlink(missing_ok=True)  # SQLite leaves it if a reader closes last.
    with (data / RUN / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')  # A line that was cut off counts for nothing.
    await refused(
        data,
        rf"metrics\.jsonl has policy version 3, .* ends at {end}: .*move only checkpoints/ to runs/default/ of a new",
    )
    (tmp_path / "new" / RUN).mkdir(parents=True)
    (data / RUN / "checkpoints").rename(tmp_path / "new" / RUN / "checkpoints")
    check_data_dir(tmp_path / "new")
    async with running(tmp_path / "new") as run:
        assert run.gateway.swarm.policy_version == 3, "the way out"


async def test_one_damaged_checkpoint_does_not_lose_the_run(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        await run.batch()
        weights = run.compute.weights
        assert versions(run) == [1]
    (folder(tmp_path / "d", 1) / "state.json").write_text("{")
    async with running(tmp_path / "d") as run:
        assert (run.compute.learned, run.compute.weights) == ([0], weights)


async def test_a_whole_checkpoint_from_which_the_journal_cannot_replay_is_refused_with_those_set_aside(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 2}) as run:
        await run.batch()
        run.gateway.versions.tag("old", 1)
        for _ in range(3):
            await run.batch()
    for version in (3, 4):
        (folder(tmp_path / "d", version) / "state.json").write_text("{")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"cannot replay from policy version 1: .*unusable_000004"):
            async with running(tmp_path / "d"):
                pass


async def test_a_checkpoint_that_the_journal_did_not_record_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await run.batch()
        await run.batch()
        swarm = run.gateway.swarm
        for version in (1, 2):
            with pytest.raises(CheckpointError, match="did not record a checkpoint of policy version"):
                swarm.batches.check_checkpoint(CheckpointStamp(version, ""))
        swarm.batches.record_checkpoint(CheckpointStamp(1, "d1"))
        with pytest.raises(CheckpointError, match="has another digest"):
            swarm.batches.check_checkpoint(CheckpointStamp(1, ""))


async def test_only_what_this_server_wrote_or_loaded_counts(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 2}) as run:
        for _ in range(3):
            await run.batch()
    async with running(tmp_path / "d", job={"keep_checkpoints": 2}) as run:
        await run.batch()
        # Whoever puts a folder there does not make it a checkpoint of this run.
        shutil.copytree(folder(tmp_path / "d", 3), folder(tmp_path / "d", 4))
        info = await run.gateway.versions.save()
        assert json.loads((Path(info.path) / "state.json").read_text())["policy_version"] == 4
        assert versions(run) == [3, 4]
        assert [path.name for path in run.gateway.store.unusable()] == ["unusable_000004"]
        assert run.gateway.swarm.state.durable_version == 3


async def test_an_older_one_that_was_not_verified_is_kept_until_enough_good_ones_are_there(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 3}) as run:
        for _ in range(3):
            await run.batch()
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 3}) as run:
        await run.batch()
        assert versions(run) == [1, 2, 3, 4], "only 3 and 4 are known to be good"
        await run.batch()
        assert versions(run) == [3, 4, 5]


async def test_a_write_that_the_journal_did_not_record_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d") as run:
        await run.batch()

        def refuses(stamp: CheckpointStamp) -> None:
            raise Unavailable("the disk is full", retry_after=1.0)

        with monkeypatch.context() as patched:
            patched.setattr(run.gateway.swarm.batches, "record_checkpoint", refuses)
            with pytest.raises(Later):
                await run.gateway.versions.save()
        assert list((tmp_path / "d" / RUN / "checkpoints").iterdir()) == []
        assert (await run.gateway.versions.save()).policy_version == 1


async def test_a_checkpoint_that_was_recorded_and_not_named_is_written_again(tmp_path: Path) -> None:
    """The server was killed between the two."""
    data = tmp_path / "d"
    async with running(data, job={"checkpoint_every": 1}) as run:
        await run.batch()
        await run.batch()
        weights = run.compute.weights
    folder(data, 2).rename(data / RUN / "checkpoints" / ".step_000002.new")
    async with running(data) as run:
        assert (run.compute.learned, run.compute.weights, versions(run)) == ([1], weights, [1])
        assert not (data / RUN / "checkpoints" / ".step_000002.new").exists()
        await run.gateway.versions.save()
    async with running(data) as run:
        assert (run.compute.learned, run.compute.weights, versions(run)) == ([], weights, [1, 2])


async def test_the_sweep_takes_what_was_not_finished_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = tmp_path / "d" / RUN / "checkpoints"
    for name in (".step_000001.new", "..step_000001.new.partial", ".step_000001.partial", "step_000001.bak", "notes"):
        (checkpoints / name).mkdir(parents=True)
    async with running(tmp_path / "d"):
        assert {path.name for path in checkpoints.iterdir()} == {"step_000001.bak", "notes"}


async def test_a_checkpoint_that_cannot_be_renamed_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        await run.batch()
    (folder(tmp_path / "d", 1) / "state.json").write_text("{")

    def refuses(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    def prepare(compute: ScriptedCompute) -> None:
        monkeypatch.setattr(Path, "rename", refuses)

    with pytest.raises(CheckpointError, match=r"could not be renamed .*: move it to another folder"):
        async with running(tmp_path / "d", prepare=prepare):
            pass


async def test_a_stop_while_the_journal_refuses_a_published_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Later] = []

    def refuse(*_: object) -> None:
        refused.append(Unavailable("full", code="journal_unavailable", retry_after=3600.0))
        raise refused[-1]

    async with running(tmp_path / "d") as run:
        await run.batch()
        with monkeypatch.context() as patch:
            patch.setattr(run.gateway.swarm.batches, "learned_in_slices", refuse)
            await run.fill_batch()
            await run.until(lambda: bool(refused))
            async with asyncio.timeout(20):
                await run.gateway.engine.stop()
        assert (run.gateway.phase.state, versions(run)) == ("offline", [])
        run.gateway.engine.start()
        await run.until(lambda: run.gateway.swarm.policy_version == 2)


async def test_some_transcripts_outlive_checkpoints_and_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1, "group_size": 3}) as run:
        failed = await run.gateway.begin(BeginRequest(task_id="t", client_id="c", wait=5))
        await run.say(failed.id, "hello")
        await run.gateway.abort(failed.id, AbortRequest(reason="Timeout: tool"))
        ids = await run.fill_batch()
        await run.until(lambda: run.gateway.swarm.policy_version == 1)
        await run.batch()
    async with running(tmp_path / "d") as run:
        await run.until(lambda: not run.gateway.swarm.unneeded())
        trees = [EpisodeTree.model_validate_json(await run.gateway.reader.episode(one)) for one in (failed.id, *ids)]
    assert [tree.kept for tree in trees] == ["journal", "journal", "gone", "gone", *["journal"] * 3]
    assert [bool(tree.calls) for tree in trees] == [tree.kept == "journal" for tree in trees]
    assert trees[0].calls[0].response["content"] == "hi"


async def test_the_event_loop_runs_between_two_slices_of_a_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SLICE_ROWS", 1)
    rounds, pruned, searches = 0, [], []
    async with running(tmp_path / "d", job={"keep_checkpoints": 1}, server={"keep_transcripts": 0}) as run:
        store = run.gateway.swarm
        await run.batch()

        async def count() -> None:
            nonlocal rounds
            while True:
                await asyncio.sleep(0)
                rounds += 1

        def prune(rows: Slice, real: Callable[[Slice], None] = store.prune) -> None:
            pruned.append(rounds)
            real(rows)

        def unneeded(real: Callable[[], list[Slice]] = store.unneeded) -> list[Slice]:
            searches.append(threading.get_ident())
            return real()

        monkeypatch.setattr(store, "prune", prune)
        monkeypatch.setattr(store, "unneeded", unneeded)
        counting = asyncio.create_task(count())
        await run.gateway.versions.save()
        await run.until(lambda: not store.journal.file.db.execute("SELECT 1 FROM calls").fetchone())
        counting.cancel()
    assert threading.get_ident() not in searches and searches
    assert len(pruned) >= 4 and all(before < after for before, after in pairwise(pruned)), "four calls, one a slice"


# ---- removal ---------------------------------------------------------------------------------------------------------


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


# ---- first weights ---------------------------------------------------------------------------------------------------


async def test_a_checkpoint_becomes_the_first_version(tmp_path: Path) -> None:
    study = PolicyId("study", "p")
    async with running(tmp_path / "d") as run:
        await run.batch()
        weights = run.compute.weights
        await run.gateway.versions.save()
        run.gateway.versions.tag("good", 1)
        await run.runs.put("study", RunSettings(policies={"p": {"model": "default@good"}}))
        await run.until(lambda: run.runs.get("study").phase.state == "sampling")
        start = run.runs.get("study").folder / "start" / "default@good"
        assert (start / "model.txt").read_text() == weights
        assert run.compute.policies[study].version == 0
        await run.of_run("study").batch()
        shutil.rmtree(run.folder / "checkpoints")
        await run.runs.end("study")
        await run.runs.put("study", RunSettings())
        await run.until(lambda: run.runs.get("study").phase.state == "sampling")
        assert run.compute.policies[study].version == 1
        await run.of_run("study").gateway.versions.save()
    branch(tmp_path / "d", "1", tmp_path / "b", "study")
    async with running(tmp_path / "b", policies={"p": {"model": "default@good"}}) as run:
        assert run.compute.policies[PolicyId(policy="p")].version == 1


def test_names_of_checkpoints_do_not_share_a_folder(tmp_path: Path) -> None:
    assert whole_model(tmp_path, "study/planner@40") != whole_model(tmp_path, "study-planner@40")


async def test_wrong_names_are_refused_with_the_right_ones(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await run.batch()
        await run.gateway.versions.save()
        for name, why in (
            ("other@1", "this data dir has no other run 'other'; others are default"),
            ("study@1", "no other run 'study'"),
            ("default@7", "has no checkpoint '7'; it has versions 1 and tags none"),
            ("default/coder@1", "has no such policy; give default@1"),
        ):
            with pytest.raises(Conflict, match=why):
                await run.runs.put("study", RunSettings(policies={"p": {"model": name}}))


# ---- origin ----------------------------------------------------------------------------------------------------------


async def test_other_base_weights_end_the_start(tmp_path: Path) -> None:
    card = replace(make_model_info(tmp_path / "tokenizer"), weights="a1")
    async with running(tmp_path / "d", card=card) as run:
        await run.batch()
        run.compute.fail_save = [CheckpointError("as if the gateway had been killed")]
    async with running(tmp_path / "d", card=replace(card, weights="b2"), wait_ready=False) as run:
        with pytest.raises(ConfigError, match=r"was created with model_weights = 'a1' .*; 'b2' would change"):
            await run.gateway.engine.wait_until_up()
        assert run.compute.starts == 1 and run.compute.learned == []
        assert run.gateway.phase.state == "failed"
    async with running(tmp_path / "d", card=card) as run:
        assert run.compute.learned == [0]


async def test_base_weights_that_change_under_a_running_server_end_it(tmp_path: Path) -> None:
    card = replace(make_model_info(tmp_path / "tokenizer"), weights="a1")
    async with running(tmp_path / "d", card=card) as run:
        await run.batch()
        run.compute.card = replace(card, weights="b2")
        run.compute.die()
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert isinstance(run.gateway.engine.fatal, ConfigError) and "'b2'" in run.gateway.phase.reason
        assert run.compute.starts == 2 and run.compute.learned == []


async def test_a_checkpoint_of_other_settings_is_not_passed_over(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        await run.batch()
        await run.batch()

    class Other(ScriptedCompute):
        async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
            raise ConfigError(f"checkpoint {path} has model.lora.rank = 4, this server 8")

    def become_other(compute: ScriptedCompute) -> None:
        compute.__class__ = Other

    card = replace(make_model_info(tmp_path / "tokenizer"), weights="b2")
    async with running(tmp_path / "d", card=card, prepare=become_other, wait_ready=False) as run:
        with pytest.raises(ConfigError, match=r"step_000002 has model.lora.rank = 4"):
            await run.gateway.engine.wait_until_up()
        assert run.compute.starts == 1
    async with running(tmp_path / "d", card=replace(card, weights="a1")) as run:
        assert run.gateway.swarm.policy_version == 2, "what was refused is not recorded"
