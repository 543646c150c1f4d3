"""Calls.

A call whose worker crashes.

1. It is sampled again, with the same parameters, and recorded once.
2. If a part of the answer was sent, it fails with a 503.
3. The second worker that crashes during the call ends it, and nothing else.
4. A worker that hung is replaced like one that crashed, and counted.
5. A journal that refuses writes while the policies are brought up is no failure of the worker.
6. An engine recovers and stops also if its policy cannot be removed from the worker.
7. A call that the backend cannot serve fails with the reason.
8. A hook that does not return stops its run with the reason. Its batch is kept, and other runs of the worker recover.
9. An error in the recovery itself fails the engine with the reason. It can be started again.

The maximum of turns that a recipe chose holds for calls side by side, and counts no answer that did not arrive.

Seeds of calls. They follow from the seeds of the job and of the episode and from the number of the call; without a
seed of the episode, from its number in the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import (
    AgentJetError,
    ComputeError,
    ConfigError,
    HookHung,
    InvalidRequest,
    Later,
    RequestError,
    Unavailable,
    WorkerHung,
)
from agentjet.front.calls import choice_seed
from agentjet.protocol import BeginRequest, RunSettings, status_of
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.server.training import MAX_FAILURES
from agentjet.swarm.state import EpisodeRecord
from agentjet.types import SamplingParams
from tests.fakes import Running, running

pytestmark = pytest.mark.anyio


# ---- workers that crash ----------------------------------------------------------------------------------------------


async def test_a_call_whose_worker_dies_is_sampled_again(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        run.compute.may_sample.clear()
        call = asyncio.create_task(run.say(episode.id))
        await run.until(lambda: len(run.compute.asked) == 1)
        run.compute.die()
        run.compute.may_sample.set()
        assert (await call).response.content == "hi"
        first, second = run.compute.asked
        assert (first.prompt, first.params) == (second.prompt, second.params)
        assert run.gateway.swarm.episode(episode.id).num_calls == 1


async def test_a_call_under_which_two_workers_die_is_given_up_alone(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        deadly = await run.gateway.begin(BeginRequest(task_id="t"))
        run.compute.may_sample.clear()
        call = asyncio.create_task(run.say(deadly.id, choices=2))
        for tried in (1, 2):
            await run.until(lambda tried=tried: len(run.compute.asked) == 2 * tried)
            run.compute.die()
        with pytest.raises(RequestError) as refusal:
            await call
        assert (status_of(refusal.value), refusal.value.code) == (500, "call_killed_workers")
        run.compute.may_sample.set()
        other = await run.gateway.begin(BeginRequest(task_id="t"))
        assert (await run.say(other.id)).response.content == "hi"
        assert run.compute.starts == 3 and run.gateway.phase.state == "sampling"


@pytest.mark.parametrize(("is_stopped", "code"), [(False, "worker_died"), (True, "engine_stopped")])
async def test_a_streamed_call_whose_worker_dies_fails_once_text_is_out(
    tmp_path: Path, is_stopped: bool, code: str
) -> None:
    async with running(tmp_path / "d") as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        stream = run.stream(episode.id)
        assert (await anext(stream)).delta.text == "h"
        run.compute.may_sample.clear()
        if is_stopped:
            run.gateway.phase.gate.shut(run.gateway.phase.refusal)
        run.compute.die()
        with pytest.raises(Later) as broken:
            async for _ in stream:
                pass
        assert (status_of(broken.value), broken.value.code) == (503, code)
        assert run.gateway.swarm.episode(episode.id).num_calls == 0


async def test_a_worker_that_hung_is_replaced_and_counted(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        run.compute.may_start.clear()
        run.compute.die(WorkerHung("no sign of work for 120 s"))
        await run.until(lambda: run.gateway.phase.state == "loading")
        status = run.gateway.status()
        assert "no sign of work" in status.waiting_for and status.workers_hung == 1
        run.compute.may_start.set()
        await run.until(lambda: run.gateway.phase.state == "sampling")
        status = run.gateway.status()
        assert (status.workers_started, status.workers_hung) == (2, 1)


async def test_a_disk_that_refuses_while_the_worker_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d") as run:
        refused: list[Later] = []
        record = run.gateway.swarm.record_origin

        def refuse() -> None:
            if len(refused) <= MAX_FAILURES:
                refused.append(Unavailable("the disk is full", code="journal_unavailable", retry_after=2.0))
                raise refused[-1]
            record()

        monkeypatch.setattr(run.gateway.swarm, "record_origin", refuse)
        await run.gateway.engine.stop()
        run.gateway.engine.start()
        await run.gateway.engine.wait_until_up()
        assert len(refused) > MAX_FAILURES
        await run.batch()


async def test_a_policy_that_cannot_be_removed_is_added_again(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        run.compute.fail_learn = [RuntimeError("a bug")]
        run.compute.fail_remove = [RuntimeError("the sampler is broken")]
        await run.batch()
        assert run.gateway.status().workers_started == 2
        run.compute.fail_remove = [RuntimeError("again")]
        await run.gateway.engine.stop()
        assert run.gateway.phase.state == "offline"
        run.gateway.engine.start()
        await run.gateway.engine.wait_until_up()
        await run.batch()


@pytest.mark.parametrize("kind", [ComputeError, ConfigError])
async def test_a_call_that_the_backend_cannot_serve_fails_with_the_reason(
    kind: type[AgentJetError], tmp_path: Path
) -> None:
    def fail(token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        raise kind("no replica can start")

    async with running(tmp_path / "d", script=fail) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        with pytest.raises(RequestError, match="The worker failed: no replica can start"):
            await run.say(episode.id)


async def test_a_hook_that_does_not_return_stops_its_run_alone(tmp_path: Path) -> None:
    reason = "the recipe 'x': `token_loss` did not return within 20 s"
    async with running(tmp_path / "d") as run:
        await run.runs.put("other", RunSettings())
        other = run.of_run("other")
        await other.until(lambda: other.gateway.phase.state == "sampling")
        run.compute.may_learn.clear()
        await run.fill_batch()
        await run.until(lambda: run.compute.begun == [0])
        run.compute.die(HookHung(reason, during="default/policy"))
        await run.until(lambda: run.gateway.phase.state == "failed")
        run.compute.may_learn.set()
        assert reason in run.gateway.phase.reason and run.gateway.hosted.num_starts == 1
        pending = run.gateway.swarm.pending
        assert pending is not None and pending.id == 0, "it is not quarantined"
        await other.batch()
        assert other.gateway.hosted.num_starts == 2
        run.gateway.engine.start()
        await run.until(lambda: run.gateway.swarm.policy_version == 1)


async def test_an_error_in_the_recovery_fails_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> bool:
        raise AssertionError("a bug")

    async with running(tmp_path / "d") as run:
        with monkeypatch.context() as patch:
            patch.setattr(run.gateway.engine, "_recover", broken)
            run.compute.die()
            await run.until(lambda: run.gateway.phase.state == "failed")
        assert run.gateway.phase.reason == "AssertionError('a bug')"
        run.gateway.engine.start()
        await run.gateway.engine.wait_until_up()
        await run.batch()


# ---- the limit of turns ----------------------------------------------------------------------------------------------


class OneTurn(Grpo):
    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        return replace(default, max_turns=1)


async def refused(run: Running, episode_id: str, **request: object) -> str:
    with pytest.raises(InvalidRequest) as refusal:
        await run.say(episode_id, **request)
    return refusal.value.code


async def test_calls_side_by_side_are_turns_and_lost_answers_are_none(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"recipe": f"{__name__}:OneTurn"}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        lost = run.stream(episode.id, fingerprint="lost")
        async for chunk in lost:
            if chunk.call is not None:
                break
        await lost.aclose()
        run.compute.may_sample.clear()
        num_asked = len(run.compute.asked)
        first = asyncio.create_task(run.say(episode.id, fingerprint="first"))
        await run.until(lambda: len(run.compute.asked) > num_asked)
        assert await refused(run, episode.id, text="side by side", fingerprint="second") == "turn_limit"
        run.compute.may_sample.set()
        await first
        assert await refused(run, episode.id, text="later", fingerprint="third") == "turn_limit"
        await run.say(episode.id, fingerprint="first", retry=True)
        turns = [call for call, *_ in run.gateway.swarm.queries.journal.calls(episode.id)]
        assert len(turns) == 3 and len(run.gateway.swarm.queries.journal.orphans(episode.id)) == 2


# ---- seeds -----------------------------------------------------------------------------------------------------------


def episode(**fields: Any) -> EpisodeRecord:
    whole = {"id": "ep", "seq": 1, "client_id": "c", "task_id": "t", "task_set": "", "group": "g", "group_id": 1}
    return EpisodeRecord(**{**whole, "mode": "train", "policy_version": 0, "begun": 0.0, **fields})


def test_a_call_of_a_seeded_episode_does_not_depend_on_when_it_began() -> None:
    first, later = episode(seed=5), episode(seed=5, id="other", seq=9, policy_version=3)
    assert choice_seed(None, 0, 7, first, 0) == choice_seed(None, 0, 7, later, 0)
    others = [(8, first, 0, 0), (7, episode(seed=6), 0, 0), (7, first, 1, 0), (7, first, 0, 1), (7, episode(), 0, 0)]
    drawn = {choice_seed(None, choice, job, of, number) for job, of, number, choice in [*others, (7, first, 0, 0)]}
    assert len(drawn) == 6


def test_without_a_seed_the_number_of_the_episode_counts() -> None:
    assert choice_seed(None, 0, 7, episode(), 0) == choice_seed(None, 0, 7, episode(id="other"), 0)
    assert choice_seed(None, 0, 7, episode(), 0) != choice_seed(None, 0, 7, episode(seq=2), 0)
    assert choice_seed(3, 0, 7, episode(seed=5), 0) == 3, "the request's own seed comes first"


async def test_only_a_named_seed_is_to_be_reproduced(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        plain = await run.gateway.begin(BeginRequest(task_id="t"))
        seeded = await run.gateway.begin(BeginRequest(task_id="u", seed=5))
        for episode, seed in [(plain, None), (plain, 0), (seeded, None)]:
            await run.say(episode.id, seed=seed, choices=2)
        named = [asked.params.is_reproducible for asked in run.compute.asked]
        assert named == [False, False, True, True, True, True]
        assert len({asked.params.seed for asked in run.compute.asked}) == 6
