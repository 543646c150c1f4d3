"""Operations on a policy. Pinned here:

1. each is applied once and in order: a repeated one returns its result, any other number or body is a conflict;
2. gradients accumulate over calls until the optimiser step;
3. a recipe computes advantages from facts as swarms did: within groups and roles;
4. a target need not have been sampled;
5. the sampler pauses from an optimiser step to its publication;
6. a batch is sent once, in parts, and gives the weights of one that is given directly;
7. an operation that fails changes nothing: no gradient, no state.
"""

from __future__ import annotations

import asyncio
import io
import queue
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import MAX_RESULTS, LossSpec, OperationLog
from agentjet.compute.rank import PolicyHost, Rank
from agentjet.config import JobConfig, OptimizerConfig, SamplerConfig
from agentjet.errors import ComputeError, OperationConflict, RecipeError
from agentjet.processes.rpc import LargeRequest, Part, ProcessRequest, encode, requests
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Row, build_forest
from agentjet.types import Op, PolicyId, SamplingParams
from tests.compute.baseline import Double, row_logprobs
from tests.compute.conftest import make_policy, model_config, sampled_rows, tokens
from tests.compute.direct import learn_directly
from tests.compute.test_locks import digest
from tests.recipes.batches import advantages, make_batch

POLICY = PolicyId()


def test_operations_are_applied_once_and_in_order() -> None:
    log = OperationLog()
    first, second = Op.of(POLICY, 0), Op.of(POLICY, 1)
    applied: list[str] = []

    def apply(op: Op, body: str) -> int:
        return log.apply(op, (body,), lambda: len(applied) if applied.append(body) is None else -1)

    with pytest.raises(OperationConflict, match=r"operation 1 .* the next one is 0"):
        apply(second, "b")
    assert apply(first, "a") == 1 == apply(first, "a") and applied == ["a"] and log.next == 1
    with pytest.raises(OperationConflict, match="another body"):
        apply(first, "c")
    for number in range(1, MAX_RESULTS + 2):
        assert apply(Op.of(POLICY, number), "d") == number + 1
    with pytest.raises(OperationConflict, match="no longer stored"):
        apply(first, "a")
    assert applied == ["a", *"d" * (MAX_RESULTS + 1)]


def test_gradients_accumulate_until_the_optimiser_step(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    batches = [TrainingBatch(0, build_forest(sampled_rows(policy, seed=seed))) for seed in (1, 2)]
    loss = LossSpec.of(JobConfig())

    def gradient(learner: PolicyLearner) -> torch.Tensor:
        found = torch.cat([master.grad.flatten().clone() for master in learner.masters() if master.grad is not None])
        for master in learner.masters():
            master.grad = None
        return found

    learner = PolicyLearner(policy)
    alone = []
    for batch in batches:
        learner.forward_backward(batch, loss)
        assert learner.has_gradient
        alone.append(gradient(learner))
    for batch in batches:
        learner.forward_backward(batch, loss)
    assert torch.allclose(gradient(learner), alone[0] + alone[1], atol=1e-7)
    assert not learner.has_gradient
    learner.forward_backward(batches[0], loss)
    learner.optim_step(OptimizerConfig(), 0)
    assert not learner.has_gradient


def test_a_batch_without_a_contributing_target_moves_nothing(tiny_folder: Path) -> None:
    """Momentum of the batch before would move the weights."""
    policy = make_policy(tiny_folder)
    learner = PolicyLearner(policy)
    learn_directly(learner, build_forest(sampled_rows(policy, seed=1)), JobConfig(), 0)
    assert learner.weights_changed()["weights/learner"] == 1.0
    forest = build_forest(sampled_rows(policy, seed=2))
    metrics = learn_directly(learner, forest.with_columns(advantage=0 * forest["advantage"]), JobConfig(), 1)
    assert learner.weights_changed()["weights/learner"] == 0.0
    assert (metrics["optim/steps"], metrics["optim/grad_norm"], metrics["optim/skipped_steps"]) == (0.0, 0.0, 0.0)


def test_a_later_step_of_a_batch_needs_its_first_one(policy: Policy) -> None:
    batch = TrainingBatch(0, build_forest(sampled_rows(policy)))
    learner = PolicyLearner(policy)
    job = JobConfig(recipe=make_recipe({"epochs": 2}))
    with pytest.raises(ComputeError, match="without step 0"):
        learner.forward_backward(batch, LossSpec.of(job, 1))
    assert learner.forward_backward(batch, LossSpec.of(job, 0)).num_steps == 2
    with pytest.raises(ComputeError, match="not one of its 2 steps"):
        learner.forward_backward(batch, LossSpec.of(job, 2))
    learner.forward_backward(batch, LossSpec.of(job, 1))
    with pytest.raises(ComputeError, match="without step 0"):
        learner.forward_backward(batch, LossSpec.of(job, 1))


@pytest.mark.parametrize(
    ("by_role", "named", "expected"),
    [
        (False, {}, [0.5, 0.5, -0.5, -0.5, -1, -1, 1]),
        (True, {}, [0.5, 0.5, -0.5, -0.5, -1, 0, 1]),
        (False, {(0, 1): 7.0, (1, 1): 3.0}, [0.5, 2, -0.5, -2, -1, -1, 1]),
        (False, {(0, 1): 7.0}, [0.5, 0, -0.5, 0, -1, -1, 1]),
    ],
)
def test_advantages_compare_groups_and_roles(
    by_role: bool, named: dict[tuple[int, int], float], expected: list[float]
) -> None:
    """Two groups of two episodes; the planner speaks in all, the critic in all but the last."""
    role_rewards = np.full((4, 2), np.nan)
    for at, reward in named.items():
        role_rewards[at] = reward
    batch = make_batch([[1, 0], [3, 5]], calls=[[2, 2], [2, 2], [2, 2], [2]])
    roles = np.array([0, 1, 0, 1, 0, 1, 0], np.int32)
    spoke = np.array([[True, True]] * 3 + [[True, False]])
    own = {"roles": ("planner", "critic"), "role_rewards": role_rewards, "spoke": spoke, "call_role": roles}
    assert advantages(replace(batch, facts=replace(batch.facts, **own)), "dr_grpo", by_role=by_role) == expected


def test_a_target_need_not_have_been_sampled(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    policy.model.double()
    sequence = tokens(1, 12)
    forest = build_forest([Row(sequence, np.array([3, 7, 11]), {})])
    assert "logprob" not in forest.targets and forest.num_sequences == 1
    with pytest.raises(KeyError, match="no column 'logprob'; they have sequence, support, temperature"):
        forest["logprob"]
    whole = build_forest([Row(sequence, slice(1, 12), {"logprob": 0.0})])
    with Double():
        learner = PolicyLearner(policy)
        every, some = learner.logprobs(whole), learner.logprobs(forest)
    assert torch.allclose(some, every[[2, 6, 10]])


def test_a_row_with_targets_of_several_calls_is_their_forest(policy: Policy) -> None:
    rows = sampled_rows(policy, groups=1, repeats=1)
    first, second = rows
    starts = [len(row.tokens) - row.num_targets for row in rows]
    at = np.concatenate([np.arange(start, len(row.tokens)) for start, row in zip(starts, rows, strict=True)])
    columns = {
        name: np.concatenate([np.broadcast_to(row[name], row.num_targets) for row in rows]) for name in first.columns
    }
    one = build_forest([Row(second.tokens, at, columns)])
    two = build_forest(rows)
    assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.node, two.node)
    assert all(np.array_equal(one[name], two[name]) for name in two.targets)
    assert row_logprobs(policy, first).shape == (first.num_targets,)


def test_the_sampler_pauses_until_the_weights_are_published(tiny_folder: Path, tmp_path: Path) -> None:
    worker, hosted = hosted_policy(tiny_folder)
    worker.handle("sample", POLICY, 1, tokens(1, 5), SamplingParams(max_tokens=50, temperature=3.0))
    assert worker.next_request(0.0) is None, "time for a step of the sampler"
    batch = TrainingBatch(0, build_forest(sampled_rows(hosted.policy)))
    hosted.load_batch(batch)
    hosted.forward_backward(Op.of(POLICY, 0), batch.id, LossSpec.of(JobConfig()))
    assert worker.next_request(0.0) is None, "a gradient changes no weights"
    with pytest.raises(OperationConflict, match="pending gradient"):
        hosted.save(tmp_path / "never")
    hosted.optim_step(Op.of(POLICY, 1), OptimizerConfig())
    publish = ProcessRequest("publish", 2, POLICY, (1,))
    worker.inbox.put(publish)
    assert worker.next_request(0.0) == publish
    worker.inbox = queue.SimpleQueue()
    hosted.publish(1)
    assert worker.next_request(0.0) is None and hosted.version == 1


JOB = JobConfig(
    recipe=make_recipe({"epochs": 2, "mini_batches": 2, "kl_coef": 0.05}), optimizer=OptimizerConfig(lr=1e-2)
)


def hosted_policy(folder: Path) -> tuple[Rank, PolicyHost]:
    worker = Rank(lambda message: None)
    worker.handle("add", POLICY, model_config(folder), SamplerConfig())
    return worker, worker.policies[POLICY]


def passed_through_a_pipe(batch: TrainingBatch) -> TrainingBatch:
    """The batch as the parts of a large request carry it, between the parts of another request that was given up."""
    large = asyncio.run(LargeRequest.encoded(ProcessRequest("load_batch", 1, POLICY, (batch,))))
    cut = [
        encode(Part(2, 0, b"half", False)),
        encode(Part(2, -1, b"", True)),
        encode(ProcessRequest("cancel", 3, POLICY, ())),
    ]
    parts = list(large.parts())
    received = requests(io.BytesIO(b"".join([*parts[:1], *cut, *parts[1:]])))
    other, last = next(received), next(received)
    assert (other.op, last.op) == ("cancel", "load_batch")
    return last.args[0]  # type: ignore[no-any-return]


def test_a_large_request_may_be_given_up_after_its_last_part() -> None:
    """The task that sends it may be cancelled while it waits for the pipe to take that part."""
    large = asyncio.run(LargeRequest.encoded(ProcessRequest("load_batch", 1, POLICY, ())))
    given_up, later = encode(Part(1, -1, b"", True)), encode(ProcessRequest("cancel", 2, POLICY, ()))
    received = requests(io.BytesIO(b"".join([*large.parts(), given_up, later])))
    assert [next(received).op, next(received).op] == ["load_batch", "cancel"]


def test_a_batch_that_is_loaded_once_gives_the_same_weights(tiny_folder: Path) -> None:
    """The lock of the way over the pipe: bit by bit the weights of a learner that gets the batches directly."""
    direct = PolicyLearner(make_policy(tiny_folder))
    _, hosted = hosted_policy(tiny_folder)
    op = Op.of(POLICY, 0)
    for number in range(3):
        batch = TrainingBatch(number, build_forest(sampled_rows(direct.policy, seed=number)))
        learn_directly(direct, batch.forest, JOB, number)
        hosted.load_batch(passed_through_a_pipe(batch))
        for step in range(4):
            outputs = hosted.forward_backward(op, number, LossSpec.of(JOB, step))
            assert outputs.num_steps == 4 and outputs == hosted.forward_backward(op, number, LossSpec.of(JOB, step))
            hosted.optim_step(op.next(), JOB.optimizer)
            op = op.next().next()
        hosted.publish(number + 1)
        assert hosted._batch is None, "its memory is free"
        assert digest(direct.masters()) == digest(hosted.learner.masters())


class Failing(Grpo):
    """Fails in a hook: at a call, or with a loss that is not finite, which is found after the gradient."""

    where: ClassVar[str] = ""
    calls: ClassVar[int] = 0

    def token_loss(self, logp: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> Any:
        Failing.calls += 1
        loss, metrics = super().token_loss(logp, columns)
        if Failing.where == "second call" and Failing.calls == 2:
            raise ValueError("a bug")
        return (loss * float("nan") if Failing.where == "not finite" else loss), metrics

    def next_state(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {"x": 1 / 0} if Failing.where == "next_state" else {"x": 1.0}


@pytest.mark.parametrize("where", ["second call", "not finite", "next_state"])
def test_an_operation_that_fails_changes_nothing(
    tiny_folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobConfig(recipe=Failing(), micro_batch_tokens=20, optimizer=OptimizerConfig(lr=1e-2))
    loss, optimizer = LossSpec.of(job), job.optimizer
    batches = [TrainingBatch(0, build_forest(sampled_rows(make_policy(tiny_folder), seed=seed))) for seed in (1, 2)]

    def weights(fails: bool, earlier: bool) -> str:
        learner = PolicyLearner(make_policy(tiny_folder))
        monkeypatch.setattr(Failing, "where", "")
        if earlier:
            learner.forward_backward(batches[1], loss)
        if fails:
            monkeypatch.setattr(Failing, "where", where)
            monkeypatch.setattr(Failing, "calls", 0)
            with pytest.raises(RecipeError):
                learner.forward_backward(batches[0], loss)
            monkeypatch.setattr(Failing, "where", "")
        assert learner.has_gradient == earlier
        learner.forward_backward(batches[0], loss)
        learner.optim_step(optimizer, 0)
        return digest(learner.masters())

    assert weights(fails=True, earlier=False) == weights(fails=False, earlier=False)
    assert weights(fails=True, earlier=True) == weights(fails=False, earlier=True)
