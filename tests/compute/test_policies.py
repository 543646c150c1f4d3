"""Several policies in one worker. Pinned here:

1. a policy that is trained beside others has the weights of one that is trained alone, bit by bit;
2. a mixed batch gives the log-probabilities of each policy alone, within rounding, and shares no prefix between them;
3. learning or publishing one policy pauses and invalidates that policy only, and a diverged one fails alone;
4. adapters of a worker share one base model and one cache; another base is refused, and `remove` frees memory;
5. operations are numbered per policy;
6. a worker that dies names the policy whose request it handled, also if an operation failed with an exception, or the
   only run that it sampled for; its policies recover independently of each other (thorough);
7. a worker whose completions wait for a `publish`, or that waits for a core, is not taken for one that hangs.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import socket
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentjet.compute import sampler as sampler_module
from agentjet.compute.backend import ProcessCompute
from agentjet.compute.model import BaseModel
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import LossSpec, learn
from agentjet.compute.rank import Rank
from agentjet.compute.ranks import Ranks
from agentjet.compute.sampler import ModelSampler
from agentjet.config import JobConfig, LoraConfig, ModelConfig, OptimizerConfig, SamplerConfig, ServeConfig
from agentjet.errors import (
    ComputeError,
    ConfigError,
    HookHung,
    OperationConflict,
    PolicyRemoved,
    WorkerDied,
    WorkerHung,
)
from agentjet.processes import supervisor
from agentjet.processes.guardian import ProcessEnd
from agentjet.processes.rpc import Answer, Peer, ProcessRequest, encode
from agentjet.processes.supervisor import CHECKS_PER_TIMEOUT, Watchdog
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import build_forest
from agentjet.types import Op, PolicyId, SamplingParams
from tests.compute.architectures import make_architecture
from tests.compute.conftest import (
    check_same,
    make_policy,
    model_config,
    pid_of,
    run,
    sampled_rows,
    tokens,
    with_random_adapter,
)
from tests.compute.test_locks import digest
from tests.recipes.batches import make_batch
from tests.tiny import make_model

pytestmark = pytest.mark.anyio

A, B = PolicyId("default", "a"), PolicyId("other", "b")
OTHERS = (B, PolicyId("other", "c"), PolicyId("third"))


model_of = partial(model_config, rank=4)


def add(worker: Rank, policy: PolicyId, model: ModelConfig) -> None:
    worker.handle("add", policy, model, SamplerConfig(cache_tokens=4096))


def sample(worker: Rank, policy: PolicyId, id: int, max_tokens: int = 6) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=id, temperature=2.0)
    worker.handle("sample", policy, id, tokens(1, 30), params)


def train(worker: Rank, policy: PolicyId, version: int, batch: TrainingBatch, job: JobConfig) -> None:
    worker.handle("load_batch", policy, batch)
    worker.handle("forward_backward", policy, Op.of(policy, 2 * version), batch.id, LossSpec.of(job))
    worker.handle("optim_step", policy, Op.of(policy, 2 * version + 1), job.optimizer)
    worker.handle("publish", policy, version + 1)


SIX = SamplingParams(max_tokens=6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_beside_other_policies_is_bit_equal_to_training_alone(tiny_folder: Path, dtype: str) -> None:
    job = JobConfig(optimizer=OptimizerConfig(lr=1e-2))
    batches = [
        TrainingBatch(version, build_forest(sampled_rows(make_policy(tiny_folder), seed=version)))
        for version in range(3)
    ]

    def trained(others: tuple[PolicyId, ...], *, last: bool) -> str:
        worker = Rank(lambda message: None)
        policies = (*others, A) if last else (A, *others)
        for policy in policies:
            add(worker, policy, model_of(tiny_folder, dtype=dtype))
        for version, batch in enumerate(batches):
            for number, policy in enumerate(policies):
                sample(worker, policy, 10 * version + number)
                worker.sample_step()
                train(worker, policy, version, batch if policy is A else batches[0], job)
                worker.sample_step()
        hosted = worker.policies[A]
        return digest([*hosted.learner.masters(), *hosted.policy.trainable().values()])

    alone = trained((), last=False)
    assert trained(OTHERS, last=False) == alone
    assert trained(OTHERS, last=True) == alone, "random weights of later adapters differ"


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral", "qwen3_moe", "lfm2"])
def test_a_mixed_batch_samples_as_each_policy_alone(tmp_path: Path, kind: str) -> None:
    base = BaseModel(model_of(make_architecture(tmp_path / kind, kind, tie_word_embeddings=False)))
    policies = [with_random_adapter(base.adapted(LoraConfig(rank=rank)), rank) for rank in (2, 4, 3)]
    policies.append(with_random_adapter(base.adapted(LoraConfig(rank=2, target_modules="lm_head")), 5))
    prompts = [tokens(1, 30), tokens(2, 9)]
    requests = {i: (prompts[i // 4 % 2], SamplingParams(max_tokens=6, seed=i), policies[i % 4]) for i in range(16)}
    mixed = ModelSampler(base.policy, 64, 8192)
    found = run(mixed, requests)
    if kind == "llama":
        assert [bool(policy.mixable_layers) for policy in policies] == [True, True, True, False]
    computed = 0
    for policy in policies:
        alone = ModelSampler(base.policy, 64, 8192)
        own = {id: request for id, request in requests.items() if request[2] is policy}
        for id, (chosen, logprobs) in run(alone, own).items():
            assert found[id][0] == chosen
            assert found[id][1] == pytest.approx(logprobs, abs=2e-4)
        computed += alone.num_computed
    assert mixed.num_computed == computed, "a prefix was shared between policies"
    assert len({tuple(found[i][1]) for i in range(4)}) == 4, "the adapters do not differ"


def test_a_diverged_adapter_fails_alone(tiny_folder: Path) -> None:
    base = BaseModel(model_of(tiny_folder))
    good, bad = (with_random_adapter(base.adapted(LoraConfig(rank=4)), seed) for seed in (1, 2))
    prompt = tokens(1, 9)
    expected = run(ModelSampler(base.policy, 8, 4096), {1: (prompt, SIX, good)})
    next(iter(bad.trainable().values())).data.fill_(torch.inf)
    list(bad.trainable().values())[-1].data.fill_(torch.nan)
    sampler = ModelSampler(base.policy, 8, 4096)
    found = run(sampler, {1: (prompt, SIX, good), 2: (prompt, SIX, bad)})
    assert found[1][0] == expected[1][0] and found[1][1] == pytest.approx(expected[1][1], abs=1e-4)
    assert len(found[2][0]) == 1 and not np.isfinite(found[2][1]).any()


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_a_step_of_one_policy_pauses_and_invalidates_that_policy_only(tmp_path: Path, kind: str) -> None:
    worker = Rank(lambda message: None)
    folder = make_architecture(tmp_path / kind, kind)
    for policy in (A, B):
        add(worker, policy, model_of(folder))
        worker.policies[policy].policy.end_tokens = frozenset()
    for id, policy in enumerate((A, B)):
        sample(worker, policy, id, max_tokens=20)
    sampler = worker.policies[A].sampler
    assert sampler is worker.policies[B].sampler
    assert {new.id for new in sampler.step()} == {0, 1}
    before = sampler.num_computed
    worker.handle("optim_step", A, Op.of(A, 0), OptimizerConfig())
    assert {new.id for new in sampler.step()} == {1} and not sampler.is_idle
    sample(worker, A, 2)
    assert {new.id for new in sampler.step()} == {1}, "a waiting completion is paused, too"
    worker.handle("publish", A, 1)
    assert {new.id for new in sampler.step()} >= {0, 1}
    assert sampler.num_computed - before == 3 + 31, "keys of the other were dropped"
    worker.handle("cancel", B, 1)
    worker.handle("optim_step", A, Op.of(A, 1), OptimizerConfig())
    assert sampler.is_idle and not sampler.step()


def test_a_prompt_cut_to_one_token_in_a_pass_alone_is_not_sampled_from(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "PROMPT_TOKENS", 48)
    base = BaseModel(model_of(tiny_folder))
    one, other = (with_random_adapter(base.adapted(LoraConfig(rank=2)), seed) for seed in (1, 2))
    other.mixable_layers = {}
    requests = {i: (tokens(i, 47 - i), SIX, policy) for i, policy in enumerate((one, other, one))}
    found = run(ModelSampler(base.policy, 8, 4096), requests)
    for id, request in requests.items():
        check_same(found, run(ModelSampler(base.policy, 8, 4096), {id: request}), 1e-4)


def test_paused_completions_that_hold_the_cache_let_the_worker_wait(tiny_folder: Path) -> None:
    base = BaseModel(model_of(tiny_folder))
    one, other = (with_random_adapter(base.adapted(LoraConfig(rank=2)), seed) for seed in (1, 2))
    sampler = ModelSampler(base.policy, 8, 256)
    sampler.submit(1, tokens(1, 150), SamplingParams(max_tokens=20), one)
    sampler.step()
    sampler.paused.add(one)
    sampler.submit(2, tokens(1, 150), SamplingParams(max_tokens=20), other)
    assert not sampler.step() and sampler.is_idle
    sampler.invalidate(one)
    while not sampler.is_idle:
        last = sampler.step()[-1]
    assert last.id == 2 and last.finish_reason == "length"


def test_adapters_share_a_base_and_a_cache_that_are_freed_with_the_last(tiny_folder: Path) -> None:
    worker = Rank(lambda message: None)
    full = PolicyId("full")
    add(worker, full, model_of(tiny_folder, rank=0))
    for policy in (A, B):
        add(worker, policy, model_of(tiny_folder))
    one, other, own = (worker.policies[policy].policy for policy in (A, B, full))
    weights = [{p.data_ptr() for p in policy.model.parameters()} for policy in (one, other, own)]
    assert len(weights[0] & weights[1]) == len(weights[2]) and not weights[0] & weights[2]
    assert worker.policies[A].sampler is worker.policies[B].sampler is not worker.policies[full].sampler
    kept = [weakref.ref(worker.policies[A].policy.model), weakref.ref(worker.policies[A].sampler._cache)]
    del one, other, own
    sample(worker, A, 1)
    sample(worker, B, 2)
    worker.sample_step()
    worker.handle("remove", A)
    worker.handle("remove", A)
    assert kept[0]() is None and kept[1]() is not None
    assert [new.id for new in worker.policies[B].sampler.step()] == [2]
    with pytest.raises(PolicyRemoved, match="no policy default/a"):
        sample(worker, A, 3)
    worker.handle("remove", B)
    gc.collect()
    assert kept[1]() is None and list(worker.policies) == [full]


def test_a_free_place_goes_to_the_policy_with_the_fewest_completions(tiny_folder: Path) -> None:
    worker = Rank(lambda message: None)
    for policy in (A, B):
        worker.handle("add", policy, model_of(tiny_folder), SamplerConfig(cache_tokens=4096, max_concurrent=2))
    sampler = worker.policies[A].sampler
    for id, policy in enumerate([A, A, A, A, B, B]):
        sample(worker, policy, id, max_tokens=2 if policy is A else 20)
    order: list[int] = []
    while not sampler.is_idle:
        order += [new.id for new in sampler.step() if new.id not in order]
    assert order == [0, 4, 1, 2, 3, 5]


def test_adapters_over_another_base_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    of_other_tests = {id(one): one for one in gc.get_objects() if isinstance(one, BaseModel)}
    worker = Rank(lambda message: None)
    add(worker, A, model_of(tiny_folder))
    add(worker, B, model_of(tiny_folder, dtype="auto"))
    other = make_model(tmp_path / "second", seed=1)
    for changes, named in (
        ({"name": str(other)}, r"model\.name = '.*second' differs from the '.*tiny'"),
        ({"dtype": "bfloat16"}, r"model\.dtype = 'bfloat16' differs from the 'float32'"),
        ({"context_length": 64}, r"model\.context_length = 64 differs from the 0"),
    ):
        with pytest.raises(ConfigError, match=rf"policy third/c: {named} of another run; .* policies\.c\.worker"):
            add(worker, PolicyId("third", "c"), model_of(tiny_folder, **changes))
        with pytest.raises(ConfigError, match=rf"policy default/c: {named} of policy default/a; "):
            add(worker, PolicyId(A.run, "c"), model_of(tiny_folder, **changes))
    add(worker, PolicyId("other", "c"), model_of(other, rank=0))
    assert list(worker.policies) == [A, B, PolicyId("other", "c")]
    for policy in (A, B):
        worker.handle("remove", policy)
    refused = model_of(other).model_copy(update={"lora": LoraConfig(rank=4, target_modules="nothing")})
    with pytest.raises(ConfigError, match="target_modules"):
        add(worker, A, refused)
    worker.handle("remove", A)
    alive = [one for one in gc.get_objects() if isinstance(one, BaseModel) and id(one) not in of_other_tests]
    assert not alive, "a failed `add` leaves nothing behind"
    add(worker, A, model_of(other))


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"correction": "tis"},
        {"kl_coef": 0.1},
        {"loss": "gspo", "by_role": True},
        {"epochs": 2, "mini_batches": 2},
        {"aggregation": "constant", "constant": 8.0},
    ],
)
def test_a_policy_without_calls_in_a_batch_does_its_step(tiny_folder: Path, recipe: dict[str, Any]) -> None:
    """The other policies of its run have calls. Its gradient is zero."""
    worker = Rank(lambda message: None)
    add(worker, A, model_of(tiny_folder))
    weights = {name: weight.clone() for name, weight in worker.policies[A].policy.trainable().items()}
    batch = make_batch([[1.0, 0.0]], calls=[[], []])
    train(worker, A, 0, batch, JobConfig.model_validate({"recipe": recipe}))
    after = worker.policies[A].policy.trainable()
    assert all(torch.equal(weight, after[name]) for name, weight in weights.items())


def test_operations_are_numbered_per_policy(tiny_folder: Path) -> None:
    worker = Rank(lambda message: None)
    for policy in (A, B):
        add(worker, policy, model_of(tiny_folder))
    batch = TrainingBatch(0, build_forest(sampled_rows(make_policy(tiny_folder))))
    train(worker, A, 0, batch, job := JobConfig())
    with pytest.raises(OperationConflict, match="operation 2 of policy other/b is out of order: the next one is 0"):
        train(worker, B, 1, batch, job)
    train(worker, B, 0, batch, job)
    with pytest.raises(ComputeError, match="policy default/a does not have batch 0: load it first"):
        worker.handle("forward_backward", A, Op.of(A, 2), batch.id, LossSpec.of(job))
    for policy in (A, B):
        worker.handle("load_batch", policy, batch)
    first = worker.handle("forward_backward", A, Op.of(A, 2), batch.id, LossSpec.of(job))
    assert worker.handle("forward_backward", A, Op.of(A, 2), batch.id, LossSpec.of(job)) == first
    with pytest.raises(OperationConflict, match="operation 0 of policy other/b was applied with another body"):
        worker.handle("forward_backward", B, Op.of(B, 0), batch.id, LossSpec.of(job, 1))


async def _drain(compute: ProcessCompute, policy: PolicyId) -> None:
    async for _ in compute.sample(policy, [7, 8], SamplingParams(max_tokens=900)):
        pass


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.usefixtures("workers_start_quickly")
async def test_policies_recover_independently_and_workers_have_names(tiny_folder: Path, tmp_path: Path) -> None:
    config = ServeConfig.model_validate({"server": {"data_dir": tmp_path}, "sampler": {"cache_tokens": 1024}})
    model, far = model_of(tiny_folder), PolicyId("other", "far")
    compute = ProcessCompute(config)
    await asyncio.gather(*(compute.add(policy, model) for policy in (A, B)), compute.add(far, model, worker="two"))
    first, second = pid_of(compute, A), pid_of(compute, far)
    assert 0 != first == pid_of(compute, B) != second
    forest = build_forest(sampled_rows(make_policy(tiny_folder)))
    with pytest.raises(ConfigError, match=r"model\.name"):
        await compute.add(PolicyId("third"), model_of(tmp_path, rank=0), worker="two")
    assert not compute.processes(PolicyId("third")) and pid_of(compute, far) == second
    os.kill(first, signal.SIGSTOP)
    learning = asyncio.ensure_future(learn(compute, Op.of(B, 0), TrainingBatch(0, forest), JobConfig()))
    completion = asyncio.ensure_future(anext(compute.sample(A, [7, 8], SamplingParams(max_tokens=9))))
    await asyncio.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    death = await compute.died([A, far])
    for outcome in (death, *await asyncio.gather(learning, completion, return_exceptions=True)):
        assert isinstance(outcome, WorkerDied) and outcome.during == "other/b" and "by SIGKILL" in str(outcome)
    await compute.add(A, model)
    assert pid_of(compute, A) not in (0, first) and pid_of(compute, B) == 0
    assert [piece async for piece in compute.sample(A, [7, 8], SamplingParams(max_tokens=2))]
    with pytest.raises(WorkerDied, match="by SIGKILL"):
        await compute.publish(B, 1)
    await compute.remove(B)
    with pytest.raises(ComputeError, match="no worker has the policy other/b"):
        await compute.publish(B, 1)
    await compute.add(B, model)
    assert pid_of(compute, B) == pid_of(compute, A) and pid_of(compute, far) == second
    cut = [asyncio.ensure_future(_drain(compute, policy)) for policy in (A, far)]
    await asyncio.sleep(0.05)
    await asyncio.gather(compute.remove(A), compute.remove(far))
    for error in await asyncio.gather(*cut, return_exceptions=True):
        assert isinstance(error, PolicyRemoved), "neither worker crashed, also if it ended"
    await compute.close()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"worker.log", "worker-two.log"}


@pytest.mark.e2e
@pytest.mark.usefixtures("workers_start_quickly")
async def test_a_wait_for_a_publish_is_no_hang_and_a_failed_operation_is_of_its_policy_alone(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = ServeConfig.model_validate(
        {"server": {"data_dir": tmp_path, "worker_timeout": 2.0}, "sampler": {"cache_tokens": 1024}}
    )
    compute = ProcessCompute(config)
    await asyncio.gather(*(compute.add(policy, model_of(tiny_folder)) for policy in (A, B)))
    batch = TrainingBatch(0, build_forest(sampled_rows(make_policy(tiny_folder))))
    await learn(compute, Op.of(A, 0), batch, JobConfig())
    completion = asyncio.ensure_future(anext(compute.sample(A, [7, 8], SamplingParams(max_tokens=9))))
    await asyncio.sleep(4)  # Two timeouts.
    await compute.publish(A, 1)
    assert (await completion).policy_version == 1
    await compute.load_batch(A, batch)
    failing = asyncio.ensure_future(compute.policies[A].ranks.ask("forward_backward", A, Op.of(A, 2), batch.id, None))
    waiting = asyncio.ensure_future(learn(compute, Op.of(B, 0), batch, JobConfig()))
    failed, waited, death = await asyncio.gather(failing, waiting, compute.died([B]), return_exceptions=True)
    assert isinstance(failed, ComputeError) and not isinstance(failed, WorkerDied)
    for error in (waited, death):
        assert isinstance(error, WorkerDied) and error.during == "default/a", "B must not count it"
    await compute.close()


@pytest.mark.e2e
@pytest.mark.usefixtures("workers_start_quickly")
async def test_a_hook_that_does_not_return_ends_the_worker_with_its_name(tiny_folder: Path, tmp_path: Path) -> None:
    """It uses CPU time, or waits; the policies of other runs see whose hook it was."""
    config = ServeConfig.model_validate(
        {"server": {"data_dir": tmp_path, "hook_timeout": 0.5}, "sampler": {"cache_tokens": 1024}}
    )
    compute = ProcessCompute(config)
    batch = TrainingBatch(0, build_forest(sampled_rows(make_policy(tiny_folder))))
    plug_ins = {"EndlessLoss": "token_loss", "EndlessColumns": "columns", "EndlessReads": "reads"}
    for name, hook in plug_ins.items():
        await asyncio.gather(*(compute.add(policy, model_of(tiny_folder)) for policy in (A, B)))
        job = JobConfig.model_validate({"recipe": f"tests.plugins.endless:{name}"})
        failed, died = await asyncio.gather(
            learn(compute, Op.of(A, 0), batch, job), compute.died([B]), return_exceptions=True
        )
        for error in (failed, died):
            assert isinstance(error, HookHung) and error.during == "default/a", "B must not count it"
            assert f"`{hook}` did not return within 0.5 s (server.hook_timeout); it was at " in str(error)
            assert "endless.py:" in str(error)
    await compute.close()


def test_a_policy_that_cannot_be_removed_ends_the_worker(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sampler: ModelSampler, policy: Policy) -> None:
        raise RuntimeError("a bug")

    sent: list[Any] = []
    worker = Rank(sent.append)
    add(worker, A, model_of(tiny_folder))
    monkeypatch.setattr(ModelSampler, "invalidate", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        worker.answer(ProcessRequest("remove", 1, A, ()))
    (answer,) = sent
    assert isinstance(answer.error, ComputeError) and answer.ends


class Stubborn:
    """A process of one rank, which takes every request and answers none."""

    pid, place, log_path = 0, "", Path("worker.log")

    def __init__(self) -> None:
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        if not self.ended.done():
            self.ended.set_result(ProcessEnd("ended by SIGKILL"))


async def started(process: Stubborn, timeout: float) -> tuple[Ranks, socket.socket]:
    """One rank of this process, and the process's end of its connection."""
    ours, theirs = socket.socketpair()

    async def launch(name: str) -> Peer:
        return Peer(name, *await asyncio.open_connection(sock=ours), process)

    ranks = Ranks(["the worker process"], launch, Watchdog(timeout))
    await ranks.start()
    return ranks, theirs


async def test_a_worker_that_hangs_is_killed_at_once() -> None:
    """Not when its last policy leaves it: it has the memory that its successor needs."""
    process = Stubborn()
    ranks, theirs = await started(process, 0.1)
    with theirs, pytest.raises(WorkerHung, match=r"made no progress for 0.1 s .* and was killed; see worker\.log"):
        await ranks.ask("score", A)
    await asyncio.wait_for(process.ended, 10)
    await ranks.close()


@pytest.mark.parametrize("end", ["publish", "close", "crash"])
async def test_a_score_waits_while_an_update_is_not_published(end: str) -> None:
    """Its weights have no version."""
    process = Stubborn()
    ranks, theirs = await started(process, 60.0)
    pending = ranks._peers[0].pending

    def answer() -> None:
        theirs.sendall(encode(Answer(next(iter(pending)))))

    with theirs:
        step = asyncio.ensure_future(ranks.ask("optim_step", A))
        await asyncio.sleep(0)
        scoring = asyncio.ensure_future(ranks.ask("score", A))
        other = asyncio.ensure_future(ranks.ask("score", OTHERS[0]))
        while len(pending) < 2:
            await asyncio.sleep(0)
        answer()
        await step
        assert {one.op for one in pending.values()} == {"score"} and len(pending) == 1
        answer()
        await other
        if end == "publish":
            publishing = asyncio.ensure_future(ranks.ask("publish", A))
            for asked in (publishing, scoring):
                while not pending:
                    await asyncio.sleep(0)
                answer()
                await asked
        elif end == "close":
            await ranks.close()
        else:
            await process.stop()
            theirs.close()
        if end != "publish":
            with pytest.raises(PolicyRemoved if end == "close" else WorkerDied):
                await scoring
    await ranks.close()


async def test_a_worker_that_waits_for_a_core_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, checks, checked = asyncio.get_running_loop(), itertools.count(), asyncio.Event()

    def core_queues(*pids: int) -> dict[int, float]:
        if next(checks) == 4 * CHECKS_PER_TIMEOUT:
            checked.set()
        return dict.fromkeys(pids, loop.time())

    monkeypatch.setattr(supervisor, "core_queues", core_queues)
    ranks, theirs = await started(Stubborn(), 0.1)
    with theirs:
        asked = asyncio.ensure_future(ranks.ask("score", A))
        await asyncio.wait([asked, asyncio.ensure_future(checked.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not asked.done()
        await ranks.close()
        with pytest.raises(PolicyRemoved):
            await asked


@pytest.mark.parametrize(
    ("sampled", "scored", "during"),
    [([], [], ""), (OTHERS[:2], [], "other/b"), ((*OTHERS[:2], A), [], ""), ((*OTHERS[:2], A), [A], "default/a")],
    ids=["idle", "one run samples", "it may be the fault of either run", "an operation"],
)
async def test_a_crash_while_sampling_is_of_the_only_run_that_samples(
    sampled: Sequence[PolicyId], scored: Sequence[PolicyId], during: str
) -> None:
    process = Stubborn()
    ranks, theirs = await started(process, 60.0)
    asked: list[asyncio.Future[Any]] = [asyncio.ensure_future(anext(ranks.sample(one))) for one in sampled]
    asked += [asyncio.ensure_future(ranks.ask("score", one)) for one in scored]
    while len(ranks._peers[0].pending) < len(asked):
        await asyncio.sleep(0)
    await process.stop()
    theirs.close()
    died = await ranks.died
    assert str(died) == "the worker process ended by SIGKILL" and died.during == during
    for error in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(error, WorkerDied) and error.during == during
    await ranks.close()
