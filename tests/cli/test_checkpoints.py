"""Tags, the best checkpoint, rollback and branch, on a scripted worker whose checkpoints are sealed like real ones.

Pinned here:
1. a checkpoint with a tag outlives rotation, holds back no pruning, and is rotated once the tag is removed;
2. the best recorded evaluation's checkpoint is saved and kept, the one before is not;
3. a rollback gives the old weights a new version; every episode is counted once, and what follows is recovered;
4. a rollback that cannot be right changes nothing; one that was interrupted is repeated;
5. a branch begins at the version, with the same weights, and leaves the original as it was;
6. the policies of a run go back and branch together; other runs of a data dir are left as they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli import new_path
from agentjet.cli.checkpoints import branch, roll_back
from agentjet.client import Swarm
from agentjet.compute.checkpoint import seal
from agentjet.errors import CheckpointError, ConfigError, Conflict, InvalidRequest, Later, NotFound
from agentjet.protocol import BeginRequest, EvaluationRequest, RunSettings
from agentjet.server.run_policies import BEST
from agentjet.swarm.journal_file import create_segment, segment_of
from agentjet.types import PolicyId
from tests.cli.test_commands import at, run
from tests.fakes import Running, recent_episodes, running
from tests.server.serving import Served

pytestmark = pytest.mark.anyio


def versions(up: Running) -> list[int]:
    return [info.policy_version for info in up.gateway.store.listing()]


def folder(data_dir: Path) -> Path:
    return data_dir / "runs" / "default"


def checkpoint(data_dir: Path, version: int) -> Path:
    return folder(data_dir) / "checkpoints" / f"step_{version:06d}"


def weights(data_dir: Path, version: int, policy: str = "") -> str:
    return str(json.loads((checkpoint(data_dir, version) / policy / "state.json").read_text())["weights"])


async def trained(data_dir: Path, batches: int, **job: Any) -> None:
    """A run with a checkpoint of every version from 1 on."""
    async with running(data_dir, job={"checkpoint_every": 1, "keep_checkpoints": 100, **job}) as up:
        for _ in range(batches):
            await up.batch()


# ---- 1. tags ------------------------------------------------------------------------------------------------------


async def test_a_tagged_checkpoint_outlives_rotation(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 2}) as up:
        await up.batch()
        [named] = up.gateway.versions.tag("good", 1)
        assert named.tags == ["good"]
        for _ in range(4):
            await up.batch()
        assert versions(up) == [1, 4, 5]
        assert up.gateway.swarm.state.durable_version == 4, "a tag holds back no pruning"
        up.gateway.versions.untag("good")
        await up.batch()
        assert versions(up) == [5, 6]
    async with running(tmp_path / "d") as up:
        assert up.gateway.swarm.policy_version == 6


async def test_a_damaged_tags_file_removes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1}) as up:
        await up.batch()
        (up.folder / "checkpoints" / "tags.json").write_text("[1]")
        await up.batch()
        assert versions(up) == [1, 2] and "no checkpoint is removed: " in caplog.text
        with pytest.raises(CheckpointError, match=r"tags\.json is damaged .* or remove the file"):
            up.gateway.versions.tag("good", 1)


def test_tags_on_the_command_line(served: Served) -> None:
    run("checkpoints", "create", *at(served))
    assert "untag good" in run("checkpoints", "tag", "0", "good", *at(served))
    run("checkpoints", "tag", "0", "good", *at(served))
    assert "[good]" in run("checkpoints", "list", *at(served))
    for name, said in (("1st", "not the name"), ("best", "job.keep_best"), ("a/b", "not the name|Not Found")):
        with pytest.raises((InvalidRequest, NotFound), match=said):
            run("checkpoints", "tag", "0", name, *at(served))
    with pytest.raises(NotFound, match="no checkpoint of policy version 7; there are: 0"):
        run("checkpoints", "tag", "7", "new", *at(served))
    tags = served.run.gateway.store.tags
    tags.write({**tags.read(), "taken": 3})
    with pytest.raises(Conflict, match="'taken' belongs to policy version 3: remove it first"):
        run("checkpoints", "tag", "0", "taken", *at(served))
    run("checkpoints", "untag", "good", *at(served))
    with pytest.raises(NotFound, match="no tag 'good'; there are: taken"):
        run("checkpoints", "untag", "good", *at(served))
    with Swarm(served.url, at(served)[3]) as swarm:
        assert swarm.tag(0, "python")[0].tags == ["python"]
        assert swarm.untag("python")[0].tags == []


# ---- 2. the best --------------------------------------------------------------------------------------------------


async def evaluate(up: Running, score: float) -> None:
    version = up.gateway.swarm.policy_version
    await up.gateway.versions.record_evaluation(
        EvaluationRequest(policy_version=version, score=score, num_tasks=1, num_episodes=1)
    )
    await up.gateway.versions.close()  # The answer did not wait for the checkpoint.


async def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"keep_checkpoints": 1}) as up:
        for score in (0.2, 0.8, 0.8, 0.5):
            await up.batch()
            await evaluate(up, score)
        await up.gateway.versions.save()
        listed = up.gateway.versions.checkpoints()
        assert [(info.policy_version, info.tags, info.score) for info in listed] == [(2, ["best"], 0.8), (4, [], 0.5)]
        await up.batch()
        await evaluate(up, 0.9)
        assert versions(up) == [5] and up.gateway.store.tags.read() == {"best": 5}


async def test_what_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path / "d", job={"keep_best": False}) as up:
        await up.batch()
        await evaluate(up, 0.2)
        assert versions(up) == []
    async with running(tmp_path / "e") as up:
        await up.batch()
        up.compute.fail_save = [CheckpointError("No space left on device")]
        await evaluate(up, 0.2)
        up.compute.fail_save = [RuntimeError("unexpected")]
        await evaluate(up, 0.3)
        for reason in ("No space left", "unexpected"):
            assert f"the best one, could not be kept: {reason}" in caplog.text
        assert len(up.gateway.swarm.queries.journal.evaluations()) == 2 and up.gateway.store.tags.read() == {}
        await up.batch()
        late = EvaluationRequest(policy_version=1, score=0.9, num_tasks=1, num_episodes=1)
        await up.gateway.versions.record_evaluation(late)
        assert up.gateway.store.tags.read() == {} and versions(up) == [], "the present version is another one"
    assert BEST == "best"


# ---- 3. rollback --------------------------------------------------------------------------------------------------


async def test_a_rollback_gives_the_old_weights_a_new_version(tmp_path: Path) -> None:
    data = tmp_path / "d"
    async with running(data, job={"checkpoint_every": 1, "keep_checkpoints": 100}) as up:
        for _ in range(4):
            await up.batch()
        waiting = await up.episode(1.0, task="waits")
        live = await up.gateway.begin(BeginRequest(task_id="lives", client_id="c"))
        before = up.gateway.swarm.queries.journal.outcomes()
        assert (before["trained"], before["waiting"], before["live"]) == (16, 1, 1)
        assert up.gateway.swarm.journal.task("", "t0").num_groups == 4
        with pytest.raises(ConfigError, match="in use by another server"):
            roll_back(data, "1")
    done, _ = roll_back(data, "1")
    assert (done.to, done.policy_version, done.batches, done.trained, done.waiting, done.live) == (1, 5, 3, 12, 1, 1)
    assert weights(data, 5) == weights(data, 1)
    async with running(data) as up:
        swarm = up.gateway.swarm
        assert (swarm.policy_version, up.compute.version, up.compute.weights) == (5, 5, weights(data, 1))
        assert up.compute.learned == [], "nothing that was undone is learned again"
        assert swarm.journal.task("", "t0").num_groups == 0, "statistics of the undone policy"
        counts = swarm.queries.journal.outcomes()
        assert (counts["trained"], counts["dropped"], counts["waiting"], counts["live"]) == (4, 13, 0, 0)
        assert swarm.queries.journal.counts("dropped") == {"rolled_back": 13}
        assert counts["finished"] == before["finished"]
        undone = recent_episodes(swarm, 5)[-1]
        assert (undone.status, undone.trained_in, undone.dropped) == ("finished", None, "rolled_back")
        assert (swarm.episode(waiting).dropped, swarm.episode(live.id).status) == ("rolled_back", "aborted")
        with pytest.raises(Conflict, match="rolled back"):
            await up.say(live.id)
        await up.batch()
        assert swarm.policy_version == 6 and up.compute.learned == [5]
        assert swarm.last_step["groups/dropped_rolled_back"] == 3 * 2 + 1
        [event] = [event.body for event in swarm.queries.journal.events() if event.kind == "rollback"]
        assert event == {"to": 1, "policy_version": 5, "batches": 3, "trained": 12, "waiting": 1, "live": 1}
        after = up.compute.weights
    shutil.rmtree(checkpoint(data, 6))
    async with running(data) as up:
        assert (up.compute.learned, up.compute.weights) == ([5], after), "replayed to the same weights"
        counts = up.gateway.swarm.queries.journal.outcomes()
        assert counts["trained"] + counts["dropped"] + counts["waiting"] == counts["finished"]


async def test_a_rollback_keeps_transcripts_of_calls_in_the_files_of_fronts(tmp_path: Path) -> None:
    data = tmp_path / "d"
    async with running(data, job={"checkpoint_every": 1}) as up:
        await up.batch()
        await up.batch()
        waiting, path = await up.episode(1.0, task="waits"), up.gateway.swarm.journal.path
    create_segment(segment_of(path, 0))
    with closing(sqlite3.connect(path)) as file:
        file.execute("ATTACH ? AS front", (str(segment_of(path, 0)),))
        file.executescript("INSERT INTO front.calls SELECT * FROM main.calls; DELETE FROM main.calls;")
    roll_back(data, "1")
    with closing(sqlite3.connect(path)) as file:
        kept = file.execute("SELECT reason FROM transcripts WHERE episode_id = ?", (waiting,)).fetchall()
    assert kept == [("dropped rolled_back",)]


async def test_rollbacks_of_rollbacks(tmp_path: Path) -> None:
    data = tmp_path / "d"
    await trained(data, 3)
    assert roll_back(data, "1")[0].policy_version == 4
    await trained(data, 1)
    with pytest.raises(CheckpointError, match=r"version 2 was undone by the rollback to version 1.*checkpoints branch"):
        roll_back(data, "2")
    again, _ = roll_back(data, "1")
    assert (again.policy_version, again.batches, again.trained) == (6, 1, 4)
    async with running(data) as up:
        assert up.compute.weights == weights(data, 1)
        assert up.gateway.swarm.queries.journal.outcomes()["trained"] == 4
        up.gateway.versions.tag("start", 1)
    assert roll_back(data, "start")[0].policy_version == 7


async def compose_without_learning(up: Running) -> None:
    """A batch is pending, and stays so."""
    up.compute.fail_learn = [Later("The journal cannot be written.", retry_after=0.01)] * 10_000
    for number in range(4):
        await up.episode(float(number % 2), task=f"t{number // 2}")
    await up.until(lambda: up.gateway.swarm.pending is not None)


async def test_a_batch_that_was_composed_but_not_learned_is_undone_too(tmp_path: Path) -> None:
    data = tmp_path / "d"
    await trained(data, 2)
    async with running(data) as up:
        await compose_without_learning(up)
    done, _ = roll_back(data, "1")
    assert (done.policy_version, done.batches, done.trained, done.waiting) == (3, 1, 4, 4)
    async with running(data) as up:
        assert up.gateway.swarm.pending is None
        await up.batch()


async def test_a_version_that_only_samplers_had_is_not_used_again(tmp_path: Path) -> None:
    data = tmp_path / "d"
    await trained(data, 2)
    async with running(data) as up:
        await compose_without_learning(up)
        assert up.gateway.swarm.pending is not None
        up.gateway.swarm.batches.offered(up.gateway.swarm.pending)
    assert roll_back(data, "1")[0].policy_version == 4, "samplers had a version 3"
    async with running(data) as up:
        await up.batch()
        assert (up.gateway.swarm.policy_version, up.compute.learned) == (5, [4])
    assert roll_back(data, "4")[0].policy_version == 6


async def test_a_rollback_out_of_divergence(tmp_path: Path) -> None:
    data = tmp_path / "d"
    async with running(data, job={"checkpoint_every": 1}) as up:
        await up.batch()
        up.compute.metrics = {"weights/finite": 0.0}
        await up.batch()
        assert "diverged" in up.gateway.status().waiting_for
    roll_back(data, "1")
    async with running(data) as up:
        assert "diverged" not in up.gateway.status().waiting_for
        await up.batch()
        assert (await up.gateway.versions.save()).policy_version == 4


# ---- 4. what is refused -------------------------------------------------------------------------------------------


def digest(top: Path) -> dict[str, str]:
    """The digest of each file, except for the lock and SQLite's own files."""
    files = [path for path in sorted(top.rglob("*")) if path.is_file() and not path.name.startswith("journal")]
    return {str(path.relative_to(top)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


async def test_a_rollback_that_cannot_be_right_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "d"
    await trained(data, 2)
    with pytest.raises(ConfigError, match=r"is not a data dir of AgentJet: there is no such folder"):
        roll_back(tmp_path / "nowhere", "1")
    with pytest.raises(CheckpointError, match="has no checkpoint '7'; it has versions 1, 2 and tags none"):
        roll_back(data, "7")
    with pytest.raises(CheckpointError, match="has no checkpoint 'best'"):
        roll_back(data, "best")
    with pytest.raises(CheckpointError, match="version 2 is not before the present one, 2"):
        roll_back(data, "2")
    state = checkpoint(data, 1) / "state.json"
    whole = state.read_text()
    state.write_text(whole.replace('"weights": "', '"weights": "x'))
    before = digest(data)
    with pytest.raises(CheckpointError, match=r"damaged: state\.json"):
        roll_back(data, "1")
    assert digest(data) == before
    state.write_text(whole)
    (checkpoint(data, 3) / "x").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"step_000003 exists: move it away"):
        roll_back(data, "1")
    shutil.rmtree(checkpoint(data, 3))
    async with running(data) as up:
        assert up.gateway.swarm.policy_version == 2 and up.gateway.swarm.queries.journal.outcomes()["trained"] == 8


async def test_a_rollback_to_before_the_oldest_episode_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentjet.swarm.journal.EPISODES_KEPT", 2)
    await trained(tmp_path / "d", 3)
    done, _ = roll_back(tmp_path / "d", "1")
    assert (done.batches, done.trained) == (2, 8)
    async with running(tmp_path / "d") as up:
        assert up.gateway.swarm.queries.journal.outcomes()["dropped"] == 8


async def test_an_interrupted_rollback_is_repeated(tmp_path: Path) -> None:
    """The machine fails between the commit and the checkpoint's name."""
    data = tmp_path / "d"
    await trained(data, 2)
    roll_back(data, "1")
    whole = checkpoint(data, 3).rename(folder(data) / "checkpoints" / ".step_000003.new")
    with pytest.raises(CheckpointError, match="cannot replay"):
        async with running(data):
            pass
    assert not whole.exists()
    assert roll_back(data, "1")[0].policy_version == 4
    async with running(data) as up:
        assert up.compute.weights == weights(data, 1) and up.gateway.swarm.queries.journal.outcomes()["dropped"] == 4
        await up.batch()


def test_what_a_command_writes_takes_no_name_that_a_user_may_have(tmp_path: Path) -> None:
    own = tmp_path / ".mine.new" / "notes.txt"
    own.parent.mkdir()
    own.write_text("keep")
    with new_path(tmp_path / "mine") as first:
        first.mkdir()
        with pytest.raises(ConfigError, match="disk"), new_path(tmp_path / "mine") as second:
            second.write_text("")
            raise OSError("disk")
    assert own.read_text() == "keep" and (tmp_path / "mine").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.new", "mine"]


async def test_a_checkpoint_of_another_run_is_neither_gone_back_to_nor_branched_from(tmp_path: Path) -> None:
    data, other = tmp_path / "d", tmp_path / "other"
    await trained(data, 3)
    await trained(other, 3)
    shutil.rmtree(checkpoint(data, 2))
    with sqlite3.connect(folder(data) / "journal.sqlite") as journal:
        journal.execute("DELETE FROM checkpoints WHERE policy_version = 2")
    shutil.copytree(checkpoint(other, 2), checkpoint(data, 2))
    shutil.copytree(checkpoint(other, 3), checkpoint(data, 7))
    seal(checkpoint(data, 7), {"policy_version": 7})
    seal(checkpoint(data, 1), {"policy_version": 1, "weights": "others"})
    before = digest(data)
    for version, why in ("2", "did not record a checkpoint"), ("1", "another digest"):
        with pytest.raises(CheckpointError, match=why):
            roll_back(data, version)
        with pytest.raises(CheckpointError, match=why):
            branch(data, version, tmp_path / "new")
    with pytest.raises(ConfigError, match="newer than the journal, which ends at 3"):
        branch(data, "7", tmp_path / "new")
    (folder(data) / "metrics.jsonl").write_text('{"step": 4}')
    with pytest.raises(ConfigError, match=r"has policy version 4, .* ends at 3"):
        roll_back(data, "1")
    (folder(data) / "metrics.jsonl").unlink()
    assert digest(data) == {name: sha for name, sha in before.items() if not name.endswith("metrics.jsonl")}
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("made_with", [{"model_weights": "b2"}, {"adapters": False}, {"dtype": "float16"}])
async def test_a_checkpoint_of_another_origin_is_refused_though_its_digest_is_right(
    tmp_path: Path, made_with: dict[str, Any]
) -> None:
    data = tmp_path / "d"
    await trained(data, 2)
    same = {"policy_version": 1, "weights": "w", "model_weights": "a1", "adapters": True, "dtype": "float32"}
    origin = {"model_weights": "a1", "model.lora.rank": 8, "model.dtype": "float32"}
    for state, refused in ((same | made_with, True), (same, False)):
        with sqlite3.connect(folder(data) / "journal.sqlite") as journal:
            stamp = (seal(checkpoint(data, 1), state),)
            journal.execute("UPDATE checkpoints SET digest = ? WHERE policy_version = 1", stamp)
            journal.execute("UPDATE meta SET value = ? WHERE key = 'origin'", (json.dumps(origin),))
        if refused:
            for change in (lambda: roll_back(data, "1"), lambda: branch(data, "1", tmp_path / "new")):
                with pytest.raises(ConfigError, match=f"{next(iter(made_with))} = .*: they belong to different runs"):
                    change()
            assert not checkpoint(data, 3).exists() and not (tmp_path / "new").exists()
        else:
            assert branch(data, "1", tmp_path / "new") == 1 and roll_back(data, "1")[0].policy_version == 3


# ---- 5. branch ----------------------------------------------------------------------------------------------------


async def test_a_branch_begins_at_the_version(tmp_path: Path) -> None:
    data, new = tmp_path / "d", tmp_path / "new"
    await trained(data, 3)
    before = digest(data)
    assert branch(data, "2", new) == 2
    assert digest(data) == before, "the original is only read"
    async with running(data) as up:
        up.gateway.store.tags.write({"named": 1})
        assert branch(data, "named", tmp_path / "other") == 1, "its server may be running"
    async with running(new, card=None) as up:
        assert (up.gateway.swarm.policy_version, up.compute.weights) == (2, weights(data, 2))
        assert up.gateway.status().branched_from == f"{data}@2"
        assert up.gateway.swarm.queries.journal.outcomes()["finished"] == 0
        await up.batch()
    async with running(new) as up:
        assert up.gateway.swarm.policy_version == 3 and up.gateway.status().branched_from == f"{data}@2"
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


TEAM: dict[str, Any] = {"planner": {}, "coder": {}}


async def test_the_policies_of_a_run_go_back_and_branch_together(tmp_path: Path) -> None:
    data, new, job = tmp_path / "d", tmp_path / "new", {"checkpoint_every": 1}
    async with running(data, job=job) as up:
        await up.runs.put("team", RunSettings(policies=TEAM))
        team = up.of_run("team")
        await team.gateway.engine.wait_until_up()
        for _ in range(2):
            await up.batch()
            await team.batch()
    before = digest(folder(data))
    for wrong, name in (("no run 'teams'; its runs are default, team", "teams"), ("is not the name of a run", "../d")):
        for change in (lambda: roll_back(data, "1", name), lambda: branch(data, "1", new, name)):  # noqa: B023
            with pytest.raises((ConfigError, InvalidRequest), match=wrong):
                change()
    step = data / "runs" / "team" / "checkpoints" / "step_000001"
    weights = {policy: json.loads((step / policy / "state.json").read_text())["weights"] for policy in TEAM}
    whole = (step / "coder" / "state.json").read_text()
    (step / "coder" / "state.json").write_text(whole.replace('"weights": "', '"weights": "x'))
    with pytest.raises(CheckpointError, match=r"coder is damaged: state\.json"):
        roll_back(data, "1", "team")
    (step / "coder" / "state.json").write_text(whole)
    shutil.copytree(step / "planner", tmp_path / "swapped")
    shutil.rmtree(step / "coder")
    with pytest.raises(CheckpointError, match="another digest"):
        roll_back(data, "1", "team")
    shutil.move(tmp_path / "swapped", step / "coder")
    with pytest.raises(CheckpointError, match="another digest"):
        branch(data, "1", new, "team")
    (step / "coder" / "state.json").write_text(whole)
    assert branch(data, "1", new, "team") == 1
    assert roll_back(data, "1", "team")[0].policy_version == 3
    assert digest(folder(data)) == before
    async with running(new, policies=TEAM) as up:
        assert up.gateway.swarm.policy_version == 1
        assert {policy: up.compute.policies[PolicyId(policy=policy)].weights for policy in TEAM} == weights
        assert up.gateway.status().branched_from == f"{data}/runs/team@1"
    async with running(data, job=job) as up:
        await up.of_run("team").gateway.engine.wait_until_up()
        assert {policy: up.compute.policies[PolicyId("team", policy)].weights for policy in TEAM} == weights
        await up.of_run("team").batch()
    with pytest.raises(ConfigError, match="created with the policies coder, planner; the settings have no named"):
        async with running(new):
            pass


async def test_what_cannot_be_branched(tmp_path: Path) -> None:
    data = tmp_path / "d"
    await trained(data, 1)
    with pytest.raises(ConfigError, match="d exists: move it away"):
        branch(data, "1", data)
    for inside in (data / "new", folder(data) / "new"):
        with pytest.raises(ConfigError, match=r"new would be inside the data dir .*d: give a folder outside it"):
            branch(data, "1", inside)
    with pytest.raises(CheckpointError, match="has no checkpoint '5'; it has versions 1"):
        branch(data, "5", tmp_path / "new")
    with pytest.raises(ConfigError, match="'d' is not of the form DATA_DIR@VERSION"):
        run("checkpoints", "branch", "d", str(tmp_path / "new"))
    (checkpoint(data, 1) / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        branch(data, "1", tmp_path / "new")
    assert not (tmp_path / "new").exists()


async def test_the_commands_say_how_to_go_on(tmp_path: Path) -> None:
    data, new = tmp_path / "d", tmp_path / "a new one"
    await trained(data, 2, max_steps=3)
    said = run("checkpoints", "branch", f"{data}@1", str(new))
    assert "begins at policy version 1" in said and f"--data-dir '{new}'" in said
    said = run("checkpoints", "rollback", "1", "--data-dir", str(data))
    assert "Policy version 3 has the weights of version 1. Undone: 1 batches" in said
    assert "job.max_steps = 3 is reached at version 3: raise it to continue training" in said
