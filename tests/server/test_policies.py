"""A run with named policies, each with its own weights, optimiser and operations.

1. A batch is learned by each policy, in several workers at the same time. Its metrics have the policy's name in front.
2. A worker that dies between two policies is replaced, and all policies reach the weights of an undisturbed run.
3. A checkpoint has a folder for each policy. One damaged policy makes it unusable for all.
4. A call uses the policy of its role. A side call is a role below the policy of its request.
5. An export is of one policy; the divergence of one policy is reported with its name.
6. A disk that refuses a write between two policies delays the batch, and stops neither calls nor maintenance for good.
7. A save of one worker survives the death of another.
8. Checkpoints of other policies are refused, and keep their names.
9. A first start that failed fixes nothing.
10. A call does not count the crashes of a worker that its policy is not in.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import CheckpointError, ConfigError, Conflict, InvalidRequest, Later, Unavailable
from agentjet.front.calls import CallRequest
from agentjet.protocol import BeginRequest, EpisodeTree
from agentjet.types import Conversation, Message, PolicyId
from tests.fakes import RUN, Running, running

pytestmark = pytest.mark.anyio

TEAM = {"planner": {}, "coder": {"worker": "second"}}
PLANNER, CODER = PolicyId(policy="planner"), PolicyId(policy="coder")


def weights(run: Running) -> list[str]:
    return [run.compute.policies[policy].weights for policy in (PLANNER, CODER)]


async def undisturbed(folder: Path, batches: int, **options: Any) -> list[str]:
    """Returns the weights after some batches."""
    async with running(folder / "undisturbed", policies=TEAM, **options) as run:
        for _ in range(batches):
            await run.batch()
        return weights(run)


async def test_a_batch_is_learned_by_each_policy(tmp_path: Path) -> None:
    job = {"optimizers": {"coder": {"lr": 1e-3}}}
    async with running(tmp_path / "d", policies=TEAM, job=job) as run:
        status = run.gateway.status()
        assert (status.run, status.policies, status.model) == ("default", ("planner", "coder"), "")
        await run.batch()
        for name in TEAM:
            recorded = run.gateway.swarm.journal.operations(name)
            assert recorded == [(0, "forward_backward", 0), (1, "optim_step", 0)]
        assert run.compute.policies[PLANNER].version == run.compute.policies[CODER].version == 1
        step = run.gateway.swarm.last_step
        assert {"planner/policy/loss", "coder/optim/grad_norm", "reward/mean", "time/learn"} <= step.keys()
        assert "policy/loss" not in step
        found = weights(run)
    assert len({*found, *await undisturbed(tmp_path, 1)}) == 3, "only the planner has the same optimiser"


async def test_workers_learn_at_the_same_time(tmp_path: Path) -> None:
    async with running(tmp_path / "d", policies={**TEAM, "critic": {}}) as run:
        run.compute.may_learn.clear()
        batch = asyncio.create_task(run.batch())
        async with asyncio.timeout(10):
            while len(run.compute.begun) < 2:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(run.compute.begun) == 2, "planner and critic have the same worker"
        run.compute.may_learn.set()
        await batch
        assert len(run.compute.begun) == 3 and run.gateway.swarm.policy_version == 1


@pytest.mark.parametrize("moment", ["optim_step planner", "forward_backward coder", "optim_step coder"])
async def test_a_worker_that_dies_between_two_policies_is_replaced(tmp_path: Path, moment: str) -> None:
    expected = await undisturbed(tmp_path, 3)
    async with running(tmp_path / "d", policies=TEAM, job={"checkpoint_every": 1}) as run:
        await run.batch()
        run.compute.die_after = [moment]
        await run.batch()
        assert run.gateway.status().workers_started == 2
        await run.batch()
        assert (weights(run), run.gateway.status().episodes["trained"]) == (expected, 12)
        assert len(run.gateway.swarm.journal.operations("coder")) == 6


async def test_one_damaged_policy_makes_a_checkpoint_unusable(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path, 3)
    checkpoints = tmp_path / "d" / RUN / "checkpoints"
    async with running(tmp_path / "d", policies=TEAM, job={"checkpoint_every": 1}) as run:
        for _ in range(3):
            await run.batch()
    states = {path.name: (path / "state.json").exists() for path in (checkpoints / "step_000003").iterdir()}
    assert states == {"planner": True, "coder": True}
    async with running(tmp_path / "d", policies=TEAM) as run:
        assert run.compute.policies[CODER].learned == []
    (checkpoints / "step_000003" / "coder" / "state.json").write_text("{")
    async with running(tmp_path / "d", policies=TEAM) as run:
        assert [run.compute.policies[policy].learned for policy in (PLANNER, CODER)] == [[2], [2]]
        assert weights(run) == expected and len(run.gateway.store.unusable()) == 1
    shutil.rmtree(checkpoints / "step_000003" / "planner")
    shutil.copytree(checkpoints / "step_000002" / "coder", checkpoints / "step_000003" / "planner")
    async with running(tmp_path / "d", policies=TEAM) as run:
        assert weights(run) == expected and len(run.gateway.store.unusable()) == 2


async def test_a_failed_save_of_one_policy_leaves_no_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path / "d", policies=TEAM) as run:
        await run.batch()
        save, calls = run.compute.save, []

        async def failing(policy: PolicyId, path: Path) -> Any:
            calls.append(policy)
            if policy == CODER and len(calls) == 2:
                raise CheckpointError("No space left on device")
            return await save(policy, path)

        run.compute.save = failing  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match="No space"):
            await run.gateway.versions.save()
        assert list((run.folder / "checkpoints").iterdir()) == []
        assert (await run.gateway.versions.save()).policy_version == 1


async def test_a_call_uses_the_policy_of_its_role(tmp_path: Path) -> None:
    rule = {"name": "title", "system": "Write a title*", "role": "titles"}
    async with running(tmp_path / "d", policies=TEAM, job={"side_calls": [rule]}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        plan = await run.say(episode.id, role="planner")
        code = await run.say(episode.id, role="coder/critic")
        conversation = Conversation((Message("system", "Write a title."), Message("user", "hello")))
        asked = CallRequest(conversation)
        titles = [run.gateway.calls.answer(episode.id, role, asked) for role in ("planner", "coder/critic")]
        first, second = [[chunk.call async for chunk in title][-1] for title in titles]
        assert first is not None and second is not None
        assert [call.role for call in (plan, code, first, second)] == [
            *("planner", "coder/critic", "planner/titles", "coder/critic")
        ]
        assert [asked.policy for asked in run.compute.asked] == [PLANNER, CODER, PLANNER, CODER]
        assert run.gateway.calls.lookup(episode.id, "planner", first.id) is not None
        assert run.gateway.calls.lookup(episode.id, "coder", first.id) is None
        hello = CallRequest(Conversation((Message("user", "hello"),)))
        assert await run.gateway.calls.count_tokens(episode.id, "coder", hello) == len(plan.suffix)
        tree = EpisodeTree.model_validate_json(await run.gateway.reader.episode(episode.id))
        assert tree.calls[0].texts and {call.role for call in tree.calls} == {
            "planner",
            "planner/titles",
            "coder/critic",
        }


async def test_an_export_is_of_one_policy(tmp_path: Path) -> None:
    async with running(tmp_path / "d", policies=TEAM) as run:
        await run.batch()
        exported = await run.gateway.versions.export(policy="coder")
        assert Path(exported.path) == (run.folder / "exports" / "coder" / "step_000001").resolve()
        assert (Path(exported.path) / "model.txt").read_text() == weights(run)[1]
        for policy, hint in (("", "planner, coder"), ("codr", "did you mean 'coder'")):
            with pytest.raises(InvalidRequest, match=hint):
                await run.gateway.versions.export(policy=policy)
        with pytest.raises(InvalidRequest, match=r"policies\.coder\.lora"):
            await run.gateway.versions.export(policy="coder", adapter=True)


async def test_the_divergence_of_one_policy_is_reported(tmp_path: Path) -> None:
    async with running(tmp_path / "d", policies=TEAM) as run:
        step = run.compute.optim_step

        async def diverging(op: Any, optimizer: Any) -> dict[str, float]:
            return {**await step(op, optimizer), "weights/finite": float(op.policy != "coder")}

        run.compute.optim_step = diverging  # type: ignore[method-assign]
        await run.batch()
        assert "the policy coder has diverged" in run.gateway.status().waiting_for
        with pytest.raises(Conflict, match="the policy coder has diverged"):
            await run.gateway.versions.save()
    assert json.loads((tmp_path / "d" / RUN / "metrics.jsonl").read_text())["planner/weights/finite"] == 1


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_full_disk_between_two_policies_delays_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    one_worker = {"planner": {}, "coder": {}}
    async with running(tmp_path / "d", policies=one_worker, job={"max_staleness": max_staleness}) as run:
        evaluated = await run.gateway.begin(BeginRequest(task_id="e", client_id="v", mode="eval"))
        batches = run.gateway.swarm.batches
        record = batches.record_operation
        refused: list[Later] = []

        def refuse_once(policy: str, *rest: Any) -> None:
            if policy == "coder" and not refused:
                refused.append(Unavailable("full", code="journal_unavailable", retry_after=0.1))
                raise refused[0]
            record(policy, *rest)

        monkeypatch.setattr(batches, "record_operation", refuse_once)
        await run.fill_batch()
        await run.until(lambda: bool(refused))
        call = asyncio.create_task(run.say(evaluated.id, role="planner"))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            assert (await run.gateway.versions.save()).policy_version == 1
            assert (await call).versions[0] == 1


async def test_a_save_survives_the_death_of_another_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "d", policies=TEAM) as run:
        await run.batch()
        save, entered = run.compute.save, asyncio.Event()

        async def save_slowly(policy: PolicyId, path: Path) -> Any:
            if not entered.is_set():
                entered.set()
                await asyncio.Event().wait()
            return await save(policy, path)

        monkeypatch.setattr(run.compute, "save", save_slowly)
        saving = asyncio.create_task(run.gateway.versions.save())
        await entered.wait()
        run.compute.die(worker="second")
        async with asyncio.timeout(5):
            assert (await saving).policy_version == 1


async def test_a_first_start_that_failed_fixes_nothing(tmp_path: Path) -> None:
    async with running(
        tmp_path / "d", policies=TEAM, prepare=lambda compute: compute.may_start.clear(), wait_ready=False
    ) as run:
        await run.gateway.begin(BeginRequest(task_id="e", client_id="v", mode="eval"))
        run.compute.fail_start = [ConfigError("there is no such model")]
    async with running(tmp_path / "d", policies=TEAM) as run:
        await run.batch()


@pytest.mark.parametrize("theirs", [{}, {"writer": {}}])
async def test_checkpoints_of_other_policies_keep_their_names(tmp_path: Path, theirs: dict[str, Any]) -> None:
    async with running(tmp_path / "theirs", policies=theirs, job={"checkpoint_every": 1}) as run:
        await run.batch()
    shutil.copytree(tmp_path / "theirs" / RUN / "checkpoints", tmp_path / "d" / RUN / "checkpoints")
    with pytest.raises(ConfigError, match=r"step_000001 has the policies .* settings have planner"):
        async with running(tmp_path / "d", policies=TEAM):
            pass
    async with running(tmp_path / "d", policies=theirs) as run:
        assert run.gateway.swarm.policy_version == 1


async def test_crashes_of_another_worker_are_not_those_of_a_call(tmp_path: Path) -> None:
    async with running(tmp_path / "d", policies=TEAM) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        run.compute.may_sample.clear()
        call = asyncio.create_task(run.say(episode.id, role="coder"))
        for crashes in range(3):
            await run.until(lambda crashes=crashes: len(run.compute.asked) == crashes + 1)
            run.compute.die()
        run.compute.may_sample.set()
        assert (await call).response.content == "hi"
        assert [asked.policy for asked in run.compute.asked] == [CODER] * 4
