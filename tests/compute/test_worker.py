"""The worker process, with real processes and real kills. Pinned here:

1. requests work across the pipe, several at a time; closing a sample cancels it;
2. operations are idempotent: a gap, or another body under the same number, is refused;
3. a killed worker is reported at once to every caller, and restarts from a checkpoint to the same weights, bit by
   bit; so does one that was stopped (SIGSTOP), after `server.worker_timeout`;
4. a worker that uses a whole core and makes no step is found, and one that makes slow steps, loads or compiles is not;
5. a failed checkpoint keeps the last good one and removes its partial folder.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from agentjet.compute import checkpoint
from agentjet.compute.backend import ProcessCompute
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import learn
from agentjet.compute.rank import Rank, _Piece
from agentjet.config import JobConfig, SamplerConfig, ServeConfig
from agentjet.errors import (
    CheckpointError,
    ComputeError,
    ConfigError,
    GrammarError,
    OperationConflict,
    OutOfCache,
    WorkerDied,
    WorkerHung,
)
from agentjet.processes.rpc import Message, Peer, ProcessRequest
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import EVERYTHING, Forest, build_forest, call_row, split
from agentjet.types import Op, PolicyId, SamplingParams
from tests.compute.conftest import model_config, pid_of, tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


POLICY = PolicyId()
RESTRICTIONS: tuple[dict[str, Any], ...] = ({"grammar": "start: /[a-z]+/\n", "piece_tokens": 4}, {"top_p": 0.8}, {})


def config(folder: Path, data_dir: Path) -> ServeConfig:
    return ServeConfig.model_validate(
        {
            "model": {"name": str(folder), "device": "cpu", "dtype": "bfloat16", "threads": 1},
            "server": {"data_dir": data_dir},
            "job": {"optimizer": {"lr": 1e-3}, "group_size": 4},
        }
    )


async def completion(
    compute: ProcessCompute, prompt: np.ndarray, params: SamplingParams
) -> tuple[list[int], list[float], set[int], list[bytes]]:
    chosen: list[int] = []
    logprobs: list[float] = []
    versions: set[int] = set()
    support: list[bytes] = []
    async for piece in compute.sample(POLICY, prompt.tolist(), params):
        chosen += piece.tokens
        logprobs += piece.logprobs
        versions.add(piece.policy_version)
        support += piece.support or (EVERYTHING,) * len(piece.tokens)
    return chosen, logprobs, versions, support


async def learn_batch(compute: ProcessCompute, version: int, forest: Forest, job: JobConfig) -> dict[str, float]:
    """Train on a batch whose operations are `2 * version` and the next one, and publish."""
    metrics, _ = await learn(compute, Op.of(POLICY, 2 * version), TrainingBatch(version, forest), job)
    await compute.publish(POLICY, version + 1)
    return metrics


async def batch(compute: ProcessCompute, seed: int) -> Forest:
    """Two groups of three: one completion under a grammar, one truncated, one free."""
    prompts = [np.concatenate([tokens(1, 5), tokens(seed + g, 6)]) for g in range(2) for _ in range(3)]
    outs = await asyncio.gather(
        *(
            completion(compute, p, SamplingParams(max_tokens=6, seed=seed * 10 + i, **RESTRICTIONS[i % 3]))
            for i, p in enumerate(prompts)
        )
    )
    assert [any(support) for *_, support in outs] == [True, True, False] * 2
    rng = np.random.default_rng(seed)
    return build_forest(
        [
            call_row(
                np.concatenate([p, np.array(chosen, np.int32)]),
                np.array(logprobs, np.float32),
                np.zeros(len(chosen), np.int32),
                float(rng.normal()),
                1.0,
                i,
                tuple(support),
            )
            for i, (p, (chosen, logprobs, _, support)) in enumerate(zip(prompts, outs, strict=True))
        ]
    )


def weights(folder: Path) -> bytes:
    return (folder / "policy" / "model.safetensors").read_bytes()


def test_a_piece_has_a_set_for_each_token_or_none() -> None:
    hosted: Any = SimpleNamespace(policy=SimpleNamespace(info=SimpleNamespace(routes=None)), version=4)
    piece = _Piece(hosted, SamplingParams(3), tokens=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0], support={1: b"set"})
    assert piece.sampled(None).support == (EVERYTHING, b"set", EVERYTHING)
    piece.clear()
    piece.tokens.append(5)
    assert piece.sampled("stop").support == () and piece.sampled("stop").tokens == (5,)


def test_the_environment_of_the_user_wins(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    async def scenario() -> None:
        compute = ProcessCompute(settings := config(tiny_folder, tmp_path))
        await compute.add(POLICY, settings.model)
        given = Path(f"/proc/{pid_of(compute, POLICY)}/environ").read_bytes().split(b"\0")
        assert {b"CUBLAS_WORKSPACE_CONFIG=:16:8", b"OMP_WAIT_POLICY=PASSIVE"} <= set(given)
        await compute.close()

    if sys.platform == "linux":
        asyncio.run(scenario())


def test_verbs_refusals_and_idempotent_learning(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("queue", "secrets", "agentjet"):  # Beside the user's own files: no business of the worker's.
        (tmp_path / f"{module}.py").write_text("raise SystemExit('a file of the current folder was run')")
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        delivered = set[int]()
        receive = Peer._receive

        def recorded(peer: Peer, message: Message) -> None:
            delivered.update(id for id, _ in (message if isinstance(message, list) else ()))
            receive(peer, message)

        monkeypatch.setattr(Peer, "_receive", recorded)
        compute = ProcessCompute(settings := config(tiny_folder, tmp_path))
        assert (await compute.add(POLICY, settings.model)).num_parameters > 0
        with pytest.raises(OutOfCache):
            await completion(compute, tokens(0, 5), SamplingParams(max_tokens=10**6))
        with pytest.raises(ComputeError, match="token ids between 0 and"):
            await completion(compute, np.array([10**6]), SamplingParams(max_tokens=2))
        for grammar in ("start: nothing\n", 'start: "a" NEVER\nNEVER: /b/ & /c/\n'):
            with pytest.raises(GrammarError):
                await completion(compute, tokens(0, 5), SamplingParams(max_tokens=9, grammar=grammar))
        scores = await compute.score(POLICY, tokens(0, 5).tolist(), 2)
        assert len(scores) == 4 and all(len(one.likeliest) == 2 and one.logprob < 0 for one in scores)
        with pytest.raises(CheckpointError, match="cannot be read"):
            await compute.load(POLICY, tmp_path / "nothing")
        stream = compute.sample(POLICY, tokens(0, 5).tolist(), SamplingParams(max_tokens=400, temperature=3.0))
        first = await anext(stream)
        assert first.policy_version == 0
        await stream.aclose()
        forest = await batch(compute, 1)
        delivered.clear()
        job = settings.job
        with pytest.raises(OperationConflict, match=r"operation 6 .* out of order: the next one is 0"):
            await learn_batch(compute, 3, forest, job)
        metrics = await learn_batch(compute, 0, forest, job)
        await compute.save(POLICY, tmp_path / "once")
        assert await learn_batch(compute, 0, forest, job) == metrics
        await compute.save(POLICY, tmp_path / "twice")
        assert weights(tmp_path / "once") == weights(tmp_path / "twice")
        with pytest.raises(OperationConflict, match=r"operation 0 .* with another body"):
            await learn_batch(compute, 0, forest.with_columns(advantage=-forest["advantage"]), job)
        with pytest.raises(ComputeError, match="no worker has the policy other/policy"):
            await compute.publish(PolicyId("other"), 7)
        assert (await completion(compute, tokens(0, 5), SamplingParams(max_tokens=3)))[2] == {1}
        assert len(delivered) == 1, "what was closed is sampled no further"
        await compute.close()
        await compute.close()
        assert compute.processes(POLICY) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("key", ["max_concurrent", "cache_tokens"])
def test_numbers_that_the_memory_does_not_hold_are_refused(
    tiny_folder: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(total=3 * 10**8, available=10**8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    value = 4096 if key == "max_concurrent" else 10**9
    rank = Rank(lambda message: None)
    with pytest.raises(ConfigError, match=rf"^sampler.{key} = {value} does not fit the memory .* holds \d+: lower it"):
        rank.handle("add", POLICY, model_config(tiny_folder), SamplerConfig.model_validate({key: value}))
    rank.handle("add", POLICY, model_config(tiny_folder), SamplerConfig())
    assert rank.policies[POLICY].sampler is not None


def test_a_stream_has_the_tokens_of_a_plain_completion_in_pieces_of_equal_times(tiny_folder: Path) -> None:
    sent: list[Any] = []
    rank = Rank(sent.append)
    rank.handle("add", POLICY, model_config(tiny_folder), SamplerConfig(cache_tokens=4096, max_concurrent=8))
    rank.policies[POLICY].policy.end_tokens = frozenset()
    seconds = {1: None, 2: 1e9, 3: 1e-9}
    for id, pace in seconds.items():
        params = SamplingParams(max_tokens=12, seed=5, piece_tokens=8, stream_seconds=pace)
        rank.answer(ProcessRequest("sample", id, POLICY, (id, tokens(1, 9), params)))
    for _ in range(12):
        rank.sample_step()
    pieces = {id: [piece for message in sent for to, piece in message if to == id] for id in seconds}
    assert {id: [len(piece.tokens) for piece in of_id] for id, of_id in pieces.items()} == {
        1: [8, 4],
        2: [1, 8, 3],
        3: [1] * 12,
    }
    answers = [
        [(piece.tokens[i], piece.logprobs[i]) for piece in of_id for i in range(len(piece.tokens))]
        for of_id in pieces.values()
    ]
    assert answers[0] == answers[1] == answers[2]
    assert [piece.finish_reason for piece in pieces[2]] == [None, None, "length"]


@pytest.mark.parametrize(
    "moments",
    [("stopped",), pytest.param(("idle", "sampling", "learning", "saving"), marks=pytest.mark.thorough)],
    ids=["at-work", "elsewhere"],
)
@pytest.mark.usefixtures("workers_start_quickly")
def test_killed_workers_are_reported_and_replay_to_the_same_weights(
    tiny_folder: Path, tmp_path: Path, moments: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        server = {"data_dir": tmp_path, "worker_timeout": 4.0}
        settings = ServeConfig.model_validate({**config(tiny_folder, tmp_path).model_dump(), "server": server})
        compute = ProcessCompute(settings)
        await compute.add(POLICY, settings.model)
        job = settings.job
        forests = []
        for version in range(4):
            forests.append(await batch(compute, version))
            await learn_batch(compute, version, forests[-1], job)
            if version == 1:
                await compute.save(POLICY, tmp_path / "step_000002")
        await compute.save(POLICY, tmp_path / "undisturbed")

        for moment in moments:
            doomed = {
                "idle": lambda: asyncio.sleep(0),
                "stopped": lambda: learn_batch(compute, 4, forests[0], job),
                "sampling": lambda: completion(compute, tokens(3, 9), SamplingParams(max_tokens=400, temperature=3.0)),
                "learning": lambda: learn_batch(compute, 4, forests[0], job),
                "saving": lambda: compute.save(POLICY, tmp_path / "never"),
            }[moment]()
            pid = pid_of(compute, POLICY)
            if moment == "stopped":
                os.kill(pid, signal.SIGSTOP)
            waiting = asyncio.ensure_future(doomed)
            await asyncio.sleep(0.02)
            if moment != "stopped":
                os.kill(pid, signal.SIGKILL)
            death = await compute.died([POLICY])
            (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
            if moment == "stopped":
                assert isinstance(death, WorkerHung) and isinstance(outcome, WorkerHung)
                assert "made no progress for 4 s (server.worker_timeout)" in str(death)
            else:
                assert "ended by SIGKILL" in str(death)
                assert outcome is None or isinstance(outcome, WorkerDied) or moment in ("learning", "saving")
            with pytest.raises(WorkerDied):
                await compute.export(POLICY, tmp_path / "never")
            await compute.add(POLICY, settings.model)
            version = (await compute.load(POLICY, tmp_path / "step_000002")).policy_version
            for v in range(version, 4):
                await learn_batch(compute, v, forests[v], job)
            await compute.save(POLICY, tmp_path / f"after-{moment}")
            assert weights(tmp_path / f"after-{moment}") == weights(tmp_path / "undisturbed")
        await compute.close()

    asyncio.run(scenario())


HINDERED_SECONDS = 3.0
"""`server.worker_timeout` of a worker that is hindered."""


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        ("learner spins", 0.0),
        ("sampler spins", 0.0),
        pytest.param("learner is slow", 1.0, marks=pytest.mark.thorough),
        pytest.param("model loads long", 6.0, marks=pytest.mark.thorough),
        pytest.param("learner compiles long", 6.0, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.usefixtures("workers_start_quickly")
def test_a_worker_without_steps_is_found_and_a_slow_one_is_not(
    way: str, seconds: float, tiny_folder: Path, tmp_path: Path
) -> None:
    sign = tmp_path / "sign"
    recipe = {"name": "tests.plugins.hindered:Hindered", "way": way, "seconds": seconds, "sign": str(sign)}
    job = JobConfig.model_validate({"recipe": recipe, "group_size": 4, "micro_batch_tokens": 16})

    async def scenario() -> None:
        server = {"data_dir": tmp_path, "worker_timeout": HINDERED_SECONDS}
        settings = ServeConfig.model_validate({**config(tiny_folder, tmp_path).model_dump(), "server": server})
        compute = ProcessCompute(settings)
        await compute.add(POLICY, settings.model)
        forest = await batch(compute, 0)
        assert len(split(forest, job.micro_batch_tokens)) * seconds > HINDERED_SECONDS or not seconds

        async def life() -> tuple[bytes, Any]:
            await learn_batch(compute, 0, forest, job)
            await compute.add(PolicyId("other"), settings.model)
            again = await batch(compute, 0)
            await compute.save(POLICY, tmp_path / "saved")
            return weights(tmp_path / "saved"), again.tokens.tolist()

        sign.touch()
        hindered = asyncio.ensure_future(life())
        if "spins" in way:
            with pytest.raises(WorkerHung, match=r"made no progress for 3 s \(server\.worker_timeout\)"):
                await hindered
            await compute.add(POLICY, settings.model)
            hindered = asyncio.ensure_future(life())
        found = await hindered
        assert not sign.exists()
        for policy in (POLICY, PolicyId("other")):
            await compute.remove(policy)
        await compute.add(POLICY, settings.model)
        assert found == await life(), "undisturbed"
        await compute.close()

    asyncio.run(scenario())


@contextmanager
def full_disk() -> Iterator[None]:
    """A limit on file size stands in for it: writing beyond it fails with an OSError."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_keeps_the_last_good_checkpoint(policy: Policy, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    target = folder / "step_000000"
    checkpoint.save(target, PolicyLearner(policy), {"policy_version": 0})
    good = weights(target)
    with full_disk(), pytest.raises(CheckpointError, match=r"could not be written: .*File too large"):
        checkpoint.save(target, PolicyLearner(policy), {"policy_version": 1})
    assert weights(target) == good
    assert [path.name for path in folder.iterdir()] == ["step_000000"]


def test_an_unreadable_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder here, nor a Hugging Face id"):
        load_policy(config(tmp_path / "nowhere", tmp_path).model)
