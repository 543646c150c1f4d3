"""Batches as operations on the policy.

1. A batch is a `forward_backward` and an `optim_step` per optimiser step. The journal has each of them, in order. The
   policy gets the batch once.
2. A worker that dies between the two is replaced and reaches the weights of an undisturbed run.
3. A batch that is learned again because the journal refused it applies nothing twice.
4. The learner gets facts: groups, rewards, roles and turns.
5. A batch that is learned again and leads to other weights is reported, with batch and policy.
6. A setting that needs a missing capability of the backend is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentjet.errors import ConfigError, InvalidRequest, Later
from agentjet.protocol import BeginRequest, FinishRequest, JobBody
from tests.fakes import job_body, running

pytestmark = pytest.mark.anyio


async def undisturbed(folder: Path, batches: int, num_steps: int = 1) -> str:
    """Returns the weights after some batches."""
    async with running(folder / "undisturbed") as run:
        run.compute.num_steps = num_steps
        for _ in range(batches):
            await run.batch()
        return run.compute.weights


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
    expected = await undisturbed(tmp_path, 2, num_steps)
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
    expected = await undisturbed(tmp_path, 2)
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
