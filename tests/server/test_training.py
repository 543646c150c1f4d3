"""The training loop: batches are learned in order, calls are held, and a new worker gets the same weights.

1. A full batch is learned, and the version grows by one.
2. Calls of live episodes are held while the worker learns. `begin` is refused, or waits if it asks to.
3. A held call becomes a 503 after `call_timeout`.
4. A worker that crashes while it is idle is replaced and reaches the same weights. While it learns:
   11 and `test_policies.py`; during a call: `tests/front/test_calls.py`.
5. A restart of the whole gateway on the same data dir reaches the same weights.
6. Without disk space for a checkpoint the last good one stays, training continues, and an event reports it.
7. The engine gives up on a batch that kills every worker, and reports it.
8. With separate samplers and `max_staleness`, calls are let in while a dead learner is replaced.
9. A version names one batch: a batch that separate samplers may have is not given up, also after a restart.
10. Each batch records the limit that cut its answers: the job's, the agent's or the context.

Batches as operations on the policy.

11. A batch is a `forward_backward` and an `optim_step` per optimiser step. The journal has each of them, in order. The
    policy gets the batch once. A worker that dies between the two is replaced and reaches the weights of an
    undisturbed run.
12. A batch that is learned again because the journal refused it applies nothing twice.
13. The learner gets facts: groups, rewards, roles and turns.
14. A batch that is learned again and leads to other weights is reported, with batch and policy.
15. A setting that needs a missing capability of the backend is refused by name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import CheckpointError, ConfigError, Conflict, InvalidRequest, Later, Unavailable, WorkerDied
from agentjet.protocol import AbortRequest, BeginRequest, FinishRequest, JobBody, status_of
from agentjet.server.health import cutting_limit
from agentjet.server.training import MAX_FAILURES
from agentjet.swarm import Batch
from tests.fakes import RUN, ScriptedCompute, job_body, running, saying
from tests.tiny import make_model_info

pytestmark = pytest.mark.anyio


async def reference_weights(folder: Path, batches: int, num_steps: int = 1, **request: Any) -> str:
    """Returns the weights of an undisturbed run."""
    async with running(folder / "reference") as run:
        run.compute.num_steps = num_steps
        for _ in range(batches):
            await run.batch(**request)
        return run.compute.weights


async def test_a_full_batch_is_learned(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        assert run.gateway.status().state == "sampling"
        await run.batch()
        await run.batch()
        assert run.compute.learned == [0, 1]
        status = run.gateway.status()
        assert (status.policy_version, status.episodes["trained"]) == (2, 8)
        assert status.last_step["policy/loss"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "d" / RUN / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["reward/mean"] == 0.5
    assert {"time/sample", "time/learn", "time/wait", "perf/tokens_per_second"} <= lines[0].keys()


@pytest.mark.parametrize(
    ("asked", "limit", "is_chosen"),
    [
        ({}, "job.max_tokens = 32", False),
        ({"max_tokens": 5}, "max_tokens = 5 of the agent's own requests, not at job.max_tokens = 32", True),
        ({"max_tokens": 1000}, "the end of the context (model.context_length), not at job.max_tokens = 32", False),
    ],
)
async def test_the_limit_that_cut_the_answers_is_known(
    tmp_path: Path, asked: dict[str, int], limit: str, is_chosen: bool
) -> None:
    card = replace(make_model_info(tmp_path / "tokenizer"), context_length=100)
    async with running(tmp_path / "d", saying(lambda prompt: "no end " * 100), card=card) as run:
        await run.batch(**asked)
        step = run.gateway.swarm.last_step
        assert step["completion/truncated"] == 1.0
        assert cutting_limit([step], run.gateway.swarm.job) == (limit, is_chosen)


async def test_calls_are_held_while_the_worker_learns(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        watcher = await run.gateway.begin(BeginRequest(task_id="e", mode="eval"))
        run.compute.may_learn.clear()
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "learning")
        held = asyncio.create_task(run.say(watcher.id))
        refused = BeginRequest(task_id="t")
        with pytest.raises(Later) as refusal:
            await run.gateway.begin(refused)
        assert (refusal.value.code, status_of(refusal.value)) == ("not_sampling", 429)
        waiting = asyncio.create_task(run.gateway.begin(refused.model_copy(update={"wait": 5.0})))
        await asyncio.sleep(0.01)
        assert not held.done() and not waiting.done() and run.gateway.status().calls_active == 1
        run.compute.may_learn.set()
        assert (await held).versions[0] == 1
        assert (await waiting).policy_version == 1


async def test_learning_waits_for_the_calls_being_sampled(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        watcher = await run.gateway.begin(BeginRequest(task_id="e", mode="eval"))
        for member in range(3):
            await run.episode(float(member), task=f"t{member // 2}")
        last = await run.gateway.begin(BeginRequest(task_id="t1", client_id="c"))
        run.compute.may_sample.clear()
        sampling = asyncio.create_task(run.say(watcher.id))
        await run.until(lambda: len(run.compute.asked) == 4)
        await run.gateway.finish(last.id, FinishRequest(reward=0.0))
        await asyncio.sleep(0.02)
        assert run.compute.learned == []
        run.compute.may_sample.set()
        assert set((await sampling).versions) == {0}
        await run.until(lambda: run.compute.learned == [0])


async def test_a_call_held_too_long_is_asked_to_come_later(tmp_path: Path) -> None:
    def slow_start(compute: ScriptedCompute) -> None:
        compute.may_start.clear()

    async with running(tmp_path / "d", call_timeout=0.05, prepare=slow_start, wait_ready=False) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        with pytest.raises(Later) as refusal:
            await run.say(episode.id)
        assert (status_of(refusal.value), refusal.value.code) == (503, "held_too_long")
        run.compute.may_start.set()
        await run.gateway.engine.wait_until_up()
        assert (await run.say(episode.id)).response.content == "hi"


async def test_a_worker_that_dies_between_batches_is_replaced(tmp_path: Path) -> None:
    expected = await reference_weights(tmp_path, 3)
    async with running(tmp_path / "d", job={"checkpoint_every": 2}) as run:
        await run.batch()
        await run.batch()
        run.compute.die()
        await run.until(lambda: run.compute.starts == 2)
        await run.batch()
        assert run.compute.weights == expected
        assert run.compute.learned == [2], "the checkpoint of version 2 was loaded, nothing replayed"


@pytest.mark.parametrize(("checkpoint_every", "request_"), [(0, {}), (1, {}), (2, {}), (0, {"top_p": 0.9})])
async def test_a_restart_carries_on_with_the_same_weights(
    tmp_path: Path, checkpoint_every: int, request_: dict[str, float]
) -> None:
    """Also with tokens that were chosen among sets: the weights depend on them."""
    expected = await reference_weights(tmp_path, 4, **request_)
    job = {"checkpoint_every": checkpoint_every}
    async with running(tmp_path / "d", job=job) as run:
        for _ in range(3):
            await run.batch(**request_)
        # Killed: nothing is saved at the end.
        run.compute.fail_save = [CheckpointError("no time")]
    async with running(tmp_path / "d", job=job) as run:
        assert run.gateway.swarm.policy_version == run.compute.version == 3
        await run.batch(**request_)
        assert run.compute.weights == expected
        if request_:
            assert expected != await reference_weights(tmp_path / "free", 4)
        assert run.gateway.status().episodes["trained"] == 16


async def test_a_live_episode_survives_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        first = await run.say(episode.id)
    async with running(tmp_path / "d") as run:
        again = await run.say(episode.id)
        assert again.parent == first.id or again.kept == 0
        assert run.gateway.swarm.episode(episode.id).num_calls == 2
        assert run.compute.asked[0].prompt == first.suffix, "the same conversation is the same tokens"


@pytest.mark.parametrize("damaged", [False, True])
async def test_an_empty_journal_beside_a_checkpoint_starts_there(tmp_path: Path, damaged: bool) -> None:
    async with running(tmp_path / "a", job={"checkpoint_every": 1}) as run:
        for _ in range(2):
            await run.batch()
        weights = run.compute.weights
    (tmp_path / "d" / RUN).mkdir(parents=True)
    (tmp_path / "a" / RUN / "checkpoints").rename(tmp_path / "d" / RUN / "checkpoints")
    if damaged:
        (tmp_path / "d" / RUN / "checkpoints" / "step_000002" / "state.json").write_text("{")
    async with running(tmp_path / "d") as run:
        assert run.gateway.swarm.policy_version == (1 if damaged else 2)
        assert damaged or run.compute.weights == weights
        await run.batch()


async def test_an_episode_that_begins_before_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    async with running(tmp_path / "a", job={"checkpoint_every": 1}) as run:
        await run.batch()
    (tmp_path / "d" / RUN).mkdir(parents=True)
    (tmp_path / "a" / RUN / "checkpoints").rename(tmp_path / "d" / RUN / "checkpoints")
    async with running(tmp_path / "d", wait_ready=False, prepare=lambda compute: compute.may_start.clear()) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        assert episode.policy_version == 1
        run.compute.may_start.set()
        await run.gateway.engine.wait_until_up()
        assert (await run.say(episode.id)).versions[0] == 1
    async with running(tmp_path / "d") as run:
        assert run.gateway.swarm.episode(episode.id).num_calls == 1


async def test_no_disk_space_for_a_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        await run.batch()
        run.compute.fail_save = [CheckpointError("No space left on device")]
        await run.batch()
        assert [info.policy_version for info in run.gateway.store.listing()] == [1]
        failed = [event.body for event in run.gateway.swarm.queries.journal.events() if event.kind == "checkpoint"][-1]
        assert failed == {"ok": False, "policy_version": 2, "error": "No space left on device"}
        await run.batch()
        assert [info.policy_version for info in run.gateway.store.listing()] == [1, 3]


async def test_checkpoints_rotate_and_one_is_saved_at_the_stop(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 2}) as run:
        for _ in range(3):
            await run.batch()
        assert [info.policy_version for info in run.gateway.store.listing()] == [2, 3]
    async with running(tmp_path / "e") as run:
        await run.batch()
        assert run.gateway.store.listing() == []
    assert (tmp_path / "e" / RUN / "checkpoints" / "step_000001" / "state.json").exists()


async def test_training_ends_at_max_steps_with_a_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"max_steps": 1}) as run:
        await run.batch()
        await run.until(lambda: run.gateway.phase.state == "sampling")
        assert [info.policy_version for info in run.gateway.store.listing()] == [1]
        with pytest.raises(Later, match="max_steps"):
            await run.gateway.begin(BeginRequest(task_id="t"))
        episode = await run.gateway.begin(BeginRequest(task_id="t", mode="eval"))
        assert (await run.say(episode.id)).versions[0] == 1


async def test_a_batch_that_kills_every_worker_ends_in_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "d") as run:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        monkeypatch.setattr(run.gateway.engine, "_sleep", sleep)
        await run.fill_batch()
        await run.until(lambda: run.gateway.swarm.policy_version == 1)
        run.compute.fail_start = [WorkerDied("out of memory") for _ in range(5)]
        run.compute.die()
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert slept == [0, 1, 2, 4, 8]
        assert "out of memory" in run.gateway.status().waiting_for
        with pytest.raises(Later) as refusal:
            await run.gateway.begin(BeginRequest(task_id="t"))
        assert (status_of(refusal.value), refusal.value.code) == (503, "engine_failed")
        run.gateway.engine.start()
        await run.gateway.engine.wait_until_up()
        assert run.gateway.swarm.policy_version == 1, "nothing of the batch was lost"


async def test_a_batch_that_kills_two_workers_is_set_aside(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await run.batch()
        weights = run.compute.weights
        run.compute.deadly = {("default", 1)}
        members = await run.fill_batch()
        await run.until(lambda: run.gateway.status().episodes["dropped"] == 4)
        await run.until(lambda: run.gateway.phase.state == "sampling")
        swarm = run.gateway.swarm
        assert (run.compute.weights, swarm.policy_version, swarm.pending) == (weights, 1, None)
        assert {swarm.episode(member).dropped for member in members} == {"poisoned"}
        [event] = [event for event in swarm.queries.journal.events() if event.kind == "batch"]
        assert event.body["reason"] == "out of memory" and event.body["episodes"] == members
        run.compute.deadly.clear()
        await run.batch()
        assert swarm.last_step["groups/dropped_poisoned"] == 2
        assert run.gateway.status().episodes["trained"] == 8


async def test_training_goes_on_if_the_journal_refuses_to_set_a_batch_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d") as run:
        batches, refused = run.gateway.swarm.batches, list[Batch]()
        set_aside = batches.quarantine

        def refusing(batch: Batch, reason: str) -> None:
            if refused:
                return set_aside(batch, reason)
            refused.append(batch)
            raise Unavailable("The disk is full.", code="journal_unavailable", retry_after=0.1)

        monkeypatch.setattr(batches, "quarantine", refusing)
        run.compute.deadly = {("default", 0)}
        await run.fill_batch()
        await run.until(lambda: run.gateway.status().episodes["dropped"] == 4)
        assert refused
        run.compute.deadly.clear()
        await run.batch()


async def test_a_batch_whose_end_was_undone_is_given_up_by_the_next_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d") as run:
        batches, store, crashes = run.gateway.swarm.batches, run.gateway.swarm, run.compute
        set_aside, given_up = batches.quarantine, list[int]()

        def undone_once(batch: Batch, reason: str) -> None:
            given_up.append(crashes.starts)
            set_aside(batch, reason)
            if len(given_up) == 1:
                store.abandon(OSError("full"))

        monkeypatch.setattr(batches, "quarantine", undone_once)
        crashes.deadly = {("default", 0)}
        await run.fill_batch()
        await run.until(lambda: run.gateway.status().episodes["dropped"] == 4 and len(given_up) == 2)
        assert given_up[1] == given_up[0] + 1


async def test_an_engine_that_cannot_give_a_batch_up_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d") as run:

        def cannot(batch: Batch, reason: str) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(run.gateway.swarm.batches, "quarantine", cannot)
        run.compute.deadly = {("default", 0)}
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert run.compute.starts == MAX_FAILURES + 1


@pytest.mark.parametrize("moment", ["training_batches", "learned_in_slices"])
async def test_a_batch_that_the_gateway_cannot_work_with_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async with running(tmp_path / "d") as run:
        swarm = run.gateway.swarm
        work = getattr(swarm.batches, moment)

        def cannot(batch: Batch, *more: Any) -> Any:
            if batch.id == 1 and members[0] in batch.episode_ids:
                raise OverflowError("too much")
            return work(batch, *more)

        monkeypatch.setattr(swarm.batches, moment, cannot)
        await run.batch()
        members = await run.fill_batch()
        await run.until(lambda: run.gateway.status().episodes["dropped"] == 4)
        assert {swarm.episode(member).dropped for member in members} == {"poisoned"}
        await run.batch()
        assert run.gateway.status().episodes["trained"] == 8


async def test_a_worker_that_dies_while_it_loads_what_was_learned_is_started_again(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 0}) as run:
        await run.batch()
        run.compute.fail_save = [CheckpointError("as if the gateway had been killed")]

    def dying(compute: ScriptedCompute) -> None:
        compute.fail_start = [WorkerDied("killed")]

    async with running(tmp_path / "d", prepare=dying) as run:
        assert (run.compute.starts, run.gateway.swarm.policy_version) == (2, 1)


async def test_a_stop_ends_the_batch_being_learned_first(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        run.compute.may_learn.clear()
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "learning")
        stopping = asyncio.create_task(run.gateway.engine.stop())
        await asyncio.sleep(0.01)
        assert not stopping.done()
        run.compute.may_learn.set()
        await stopping
        assert [info.policy_version for info in run.gateway.store.listing()] == [1]


async def test_the_call_of_an_ended_episode_is_cut_off(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"max_episode_seconds": 60}) as run:
        aborted = await run.gateway.begin(BeginRequest(task_id="t"))
        outlived = await run.gateway.begin(BeginRequest(task_id="t"))
        run.compute.may_sample.clear()
        calls = [asyncio.create_task(run.say(episode.id)) for episode in (aborted, outlived)]
        await run.until(lambda: len(run.compute.asked) == 2)
        await run.gateway.abort(aborted.id, AbortRequest(reason="crashed"))
        run.clock.advance(61)
        for call in calls:
            with pytest.raises(Conflict):
                await asyncio.wait_for(call, 5)
        assert run.gateway.status().calls_active == 0


async def test_with_stale_tokens_allowed_calls_go_on_while_the_policy_learns(tmp_path: Path) -> None:
    job = {"max_staleness": 1, "batch_size": 1}
    async with running(tmp_path / "d", job=job) as run:
        run.compute.may_learn.clear()
        for reward in (0.0, 1.0):
            await run.episode(reward)
        await run.until(lambda: run.gateway.phase.state == "learning")
        late = await run.gateway.begin(BeginRequest(task_id="late", wait=1))
        call = await run.say(late.id)
        assert set(call.versions) == {0} and run.gateway.phase.state == "learning"
        run.compute.may_learn.set()
        await run.until(lambda: run.gateway.swarm.policy_version == 1)
        assert set((await run.say(late.id)).versions) == {1}
        await run.gateway.finish(late.id, FinishRequest(reward=1))
        await run.gateway.finish(
            (await run.gateway.begin(BeginRequest(task_id="late", wait=1))).id, FinishRequest(reward=0)
        )
        await run.until(lambda: run.gateway.swarm.policy_version == 2)
        assert run.gateway.swarm.last_step["batch/staleness_max"] == 1


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_separate_samplers_take_calls_while_the_learner_recovers(tmp_path: Path, max_staleness: int) -> None:
    def separate(compute: ScriptedCompute) -> None:
        compute.declared = replace(compute.declared, separate_samplers=True)

    async with running(tmp_path / "d", job={"max_staleness": max_staleness}, prepare=separate) as run:
        await run.batch()
        run.compute.may_start.clear()
        run.compute.die()
        await run.until(lambda: run.gateway.status().state == "loading")
        assert run.gateway.phase.gate.is_open is bool(max_staleness)
        run.compute.may_start.set()
        await run.batch()
        assert run.compute.learned == [0, 1]


async def test_a_batch_that_samplers_may_have_is_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def separate(compute: ScriptedCompute) -> None:
        compute.declared = replace(compute.declared, separate_samplers=True)

    def deadly(compute: ScriptedCompute) -> None:
        separate(compute)
        compute.deadly = {("default", 1)}

    def cannot(batch: Batch, *more: Any) -> Any:
        raise OverflowError("after the samplers got the weights")

    async with running(tmp_path / "d", prepare=separate) as run:
        await run.batch()
        monkeypatch.setattr(run.gateway.swarm.batches, "learned_in_slices", cannot)
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "failed")
    async with running(tmp_path / "d", prepare=deadly, wait_ready=False) as run:
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert "out of memory" in run.gateway.status().waiting_for
        run.compute.deadly.clear()
        run.gateway.engine.start()
        await run.until(lambda: run.gateway.swarm.policy_version == 2)
        assert run.gateway.status().episodes["dropped"] == 0


# ---- batches as operations -------------------------------------------------------------------------------------------


async def test_the_journal_has_the_operations_of_each_batch(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await run.batch()
        run.compute.num_steps = 2
        await run.batch()
        kinds = ["forward_backward", "optim_step"] * 3
        assert run.gateway.swarm.journal.operations("policy") == [
            *zip(range(6), kinds, [0, 0, 1, 1, 1, 1], strict=True)
        ]
        assert run.compute.applied == list(range(6))
        assert [batch.id for batch in run.compute.loaded] == [0, 1], "a batch is sent once, not for each optimiser step"


@pytest.mark.parametrize("num_steps", [1, 2])
async def test_a_worker_that_dies_between_gradient_and_update_is_replaced(tmp_path: Path, num_steps: int) -> None:
    expected = await reference_weights(tmp_path, 2, num_steps)
    async with running(tmp_path / "d", job={"checkpoint_every": 0}) as run:
        run.compute.num_steps = num_steps
        await run.batch()
        run.compute.die_after = ["forward_backward policy"]
        await run.batch()
        assert (run.compute.starts, run.compute.learned) == (2, [0, 1])
        assert run.compute.weights == expected
        assert len(run.gateway.swarm.journal.operations("policy")) == 4 * num_steps


async def test_the_operations_after_a_checkpoint_continue_its_numbers(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        run.compute.num_steps = 3
        await run.batch()
        run.compute.die()
        await run.until(lambda: run.compute.starts == 2 and run.gateway.phase.state == "sampling")
        await run.batch()
        assert run.compute.applied == list(range(12)), "nothing is replayed"


async def test_a_batch_that_the_journal_refused_is_not_applied_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await reference_weights(tmp_path, 2)
    async with running(tmp_path / "d") as run:
        learned, refusals = run.gateway.swarm.batches.learned_in_slices, [Later("disk full", retry_after=0.001)] * 2

        def refusing(*arguments: object) -> Iterator[dict[str, float]]:
            if refusals:
                raise refusals.pop()
            return learned(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(run.gateway.swarm.batches, "learned_in_slices", refusing)
        await run.batch()
        await run.batch()
        assert (run.compute.starts, run.compute.applied, run.compute.weights) == (1, [0, 1, 2, 3], expected)


async def test_the_learner_gets_facts(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 1}) as run:
        for reward in (1.0, 0.0):
            episode = await run.gateway.begin(BeginRequest(task_id="t", wait=5))
            await run.say(episode.id, "plan", role="planner")
            await run.say(episode.id, "judge", role="critic")
            await run.say(episode.id, "judge again", role="critic")
            await run.gateway.finish(episode.id, FinishRequest(reward=reward, by_role={"critic": 0.5 - reward}))
        await run.until(lambda: run.gateway.swarm.policy_version == 1)
    [batch] = run.compute.loaded
    facts = batch.facts
    assert facts is not None and "advantage" not in batch.forest.targets
    assert (facts.roles, facts.groups.tolist(), facts.rewards.tolist()) == (("planner", "critic"), [0, 0], [1.0, 0.0])
    assert facts.role_rewards[:, 1].tolist() == [-0.5, 0.5] and facts.spoke.all()
    assert facts.call_episode.tolist() == [0, 0, 0, 1, 1, 1]
    assert facts.call_role.tolist() == [0, 1, 1] * 2 and facts.call_turn.tolist() == [0, 0, 1] * 2
    assert set(batch.forest["call"].tolist()) == set(range(6))


async def test_a_missing_capability_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.recipe = 'ppo' needs values, and the embedded backend has none"):
        async with running(tmp_path / "d", job={"recipe": "ppo"}):
            pass
    async with running(tmp_path / "e") as run:
        await run.batch()
        body = job_body(run.gateway)
        body.job["recipe"] = "ppo"
        with pytest.raises(InvalidRequest, match="needs values"):
            await run.gateway.replace_job(JobBody(revision=body.revision, job=body.job))


async def test_a_replay_that_leads_to_other_weights_says_so(tmp_path: Path) -> None:
    policies = {"planner": {}, "coder": {}}
    async with running(tmp_path / "d", policies=policies) as run:
        await run.batch()
        known = run.gateway.swarm.journal.fingerprints(0)
        assert known.keys() == policies.keys() and known["planner"] != 0
        run.compute.die()
        await run.until(lambda: run.compute.starts == 2 and run.gateway.phase.state == "sampling")
        assert run.gateway.status().replay_difference == "", "the same weights"
        run.compute.noise = "a seed of the clock"
        run.compute.die()
        await run.until(lambda: run.compute.starts == 3 and run.gateway.phase.state == "sampling")
        reported = run.gateway.status().replay_difference
        assert "batch 0 was learned again" in reported and "other weights of planner, coder" in reported
        assert run.gateway.swarm.journal.fingerprints(0) == known
        assert not any("fingerprint" in name for name in run.gateway.swarm.last_step)
