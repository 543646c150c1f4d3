"""Weights that reach another process without a file, on CPUs and without vLLM. Pinned here:

1. `ipc`: another process reads what the file would have, with its names and types, as often as it wants and by the same
   handles after a change; the learner computes as before, and learns to the same weights;
2. what was read stays readable after the rank is killed; its shared memory ends with its last reader;
3. `nccl`: every worker of a replica gets what the file has, also when two replicas adopt at once;
4. a replica that is killed in the middle, or never joins, ends its stream only: the rank's other threads go on, and the
   next replica gets the weights; a rank that is killed in the middle ends the connection of the replica;
5. a stream of a file that was removed, or of a rank that is gone, is refused with the reason;
6. settings that cannot work are refused.

`test_replica.py` has both with vLLM, `test_transfers_of_ranks.py` with ranks, too.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import active_count
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentjet.compute import transfers
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.compute.rank import base_model, file_weights, publish, write_weights
from agentjet.compute.transfers import SharedWeights, received, send, shared_weights
from agentjet.compute.weights import Publication, WeightsServer, weights_of
from agentjet.config import ComputeConfig
from agentjet.errors import ComputeError
from agentjet.processes import guardian
from tests.cluster.spawn import HOST, PRELOADED
from tests.compute.architectures import make_architecture
from tests.compute.conftest import make_policy
from tests.compute.test_locks import recorded_batch, settings, training_batch
from tests.e2e.server import is_running
from tests.tiny import make_model

SECRET = b"secret"
CPU = torch.device("cpu")
PATIENCE = 30.0
KINDS = ("tied", "packed", "lora")
"""A tied head; experts that transformers packs and the file does not; an adapter that is folded in."""
Facts = dict[str, tuple[str, tuple[int, ...], str]]


@contextmanager
def child(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, int]]:
    """A process that calls `function(end, *arguments)`; yields the other end of its pipe, and its id."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, function, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield ours, process.pid
    finally:
        process.kill()
        process.join()


def _run(end: Connection, function: Callable[..., None], *arguments: Any) -> None:
    os.setsid()  # As under a guardian, which kills the group.
    torch.set_num_threads(1)
    function(end, *arguments)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def facts(weights: Iterable[tuple[str, Tensor]]) -> Facts:
    """Returns type, shape and digest of weights by name."""
    found = {}
    for name, one in weights:
        content = one.contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = str(one.dtype), tuple(one.shape), hashlib.sha256(content).hexdigest()
    return found


def facts_of(path: Path) -> Facts:
    return facts(load_file(path).items())


# ---- ipc -------------------------------------------------------------------------------------------------------------


def policy_of(kind: str, folder: Path) -> Policy:
    path = make_architecture(folder / "model", "mixtral") if kind == "packed" else make_model(folder / "model")
    policy = make_policy(path, rank=4 if kind == "lora" else 0, dtype="float32")
    assert kind != "tied" or base_model(policy).config.tie_word_embeddings
    return change(policy, 0)


def change(policy: Policy, seed: int) -> Policy:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return policy


def read_shared(end: Connection) -> None:
    while True:
        end.send(facts(shared_weights(end.recv(), CPU)))


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_reads_what_the_file_has(kind: str, tmp_path: Path) -> None:
    policy, shared, known = policy_of(kind, tmp_path), SharedWeights(), []
    learner = PolicyLearner(policy)
    with child(read_shared) as (reader, _):
        for version in range(3):
            weights = learner.whole_weights()
            write_weights(policy, weights, path := tmp_path / f"{version}.safetensors")
            handles = shared.handles(file_weights(base_model(policy), weights), policy.model)
            known.append(pickle.loads(handles))
            assert known[version] == known[0]
            for _ in range(3):
                reader.send(handles)
                assert reader.poll(PATIENCE)
                assert reader.recv() == facts_of(path)
            change(policy, version + 1)
    assert bool(shared._copies) == (kind != "tied") and len(shared._copies) < len(weights)  # The rest is the model's.


def test_a_learner_whose_weights_are_shared_learns_the_same(tmp_path: Path) -> None:
    batch, loss = training_batch(recorded_batch(4), 0), settings(4)
    found = []
    for is_shared in (False, True):
        policy = policy_of("tied", tmp_path / str(is_shared))
        learner = PolicyLearner(policy)
        server, shared = WeightsServer(HOST, SECRET), SharedWeights()
        published = [publish(learner, server, 0, is_hot=False, shared=shared if is_shared else None)]
        for version in (1, 2):
            learner.forward_backward(batch, LossSpec.of(loss))
            learner.optim_step(loss.optimizer, version)
            published.append(publish(learner, server, version, is_hot=False, shared=shared if is_shared else None))
        found.append([one.probe_logprobs for one in published if one])
        assert all(one and bool(one.handles) == is_shared == (not one.path) for one in published)
        assert (server._folder is None) == is_shared
        server.close()
    assert found[0] == found[1] and len({*found[0]}) == 3


def share(end: Connection) -> None:
    shared, model = SharedWeights(), torch.nn.Linear(1000, 1000)
    end.send(shared.handles(dict(model.named_parameters()), model))
    signal.pause()


def hold_shared(end: Connection) -> None:
    weights = dict(shared_weights(end.recv(), CPU))
    while True:
        end.send(facts(weights.items()))
        end.recv()


def test_a_killed_rank_leaves_no_shared_memory() -> None:
    with child(share) as (rank, pid), child(hold_shared) as (reader, _):
        reader.send(handles := rank.recv())
        before = reader.recv()
        files = list(guardian.SHARED_MEMORY.glob(f"torch_{pid}_*"))
        assert len(files) == 2
        os.killpg(pid, signal.SIGKILL)
        until(lambda: not is_running(pid))
        reader.send("again")
        assert reader.poll(PATIENCE)
        assert reader.recv() == before
    until(lambda: not any(file.exists() for file in files))  # Torch's manager removes them, seconds after the reader.
    with pytest.raises(RuntimeError):
        dict(shared_weights(handles, CPU))


# ---- nccl ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightsServer]:
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(guardian, "SHARED_MEMORY", tmp_path / "shared")
    server = make_server()
    threads = active_count()
    yield server
    server.close()
    until(lambda: active_count() <= threads)  # No stream is left.


def make_server() -> WeightsServer:
    server = WeightsServer(HOST, SECRET)
    server.send = partial(send, host=HOST, device=CPU)
    return server


def publish_file(server: WeightsServer, version: int) -> Publication:
    """16 MB in tensors of several types and shapes: more than the sockets between two processes hold."""
    generator = torch.Generator().manual_seed(version)
    weights = {f"{i}": torch.randn(512, 1024, generator=generator) for i in range(8)}
    weights |= {"half": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(version), "empty": torch.empty(0, 7)}
    path, digest = server.write(version, 1 << 24, lambda path: save_file(weights, path))
    return Publication(version, server.address, str(path), path.stat().st_size, digest, "float32", (1,), ())


def receive(end: Connection, stream: dict[str, Any], worker: int, stop_after: int = 1000) -> None:
    """A worker of vLLM. It kills itself after some weights."""
    found = []
    for weight in received(**stream, worker=worker, device=CPU):
        found.append(weight)
        if len(found) == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)
    end.send(facts(found))


def adopt(end: Connection, publication: Publication, stop_after: int = 1000) -> None:
    """A replica with one worker."""
    with weights_of(publication, "replica", SECRET, 1) as (source, _):
        receive(end, source["stream"], 0, stop_after)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing joins the stream of a GPU here")
def test_a_gpu_without_a_number_begins_a_stream(server: WeightsServer) -> None:
    """A rank has one GPU, the present one of every thread. `resolve_device` names no number."""
    server.send = partial(send, host=HOST, device=torch.device("cuda"))
    with weights_of(publish_file(server, 0), "replica", SECRET, 1) as (source, _):
        assert source["stream"]["weights"]


def test_every_worker_gets_what_the_file_has(server: WeightsServer) -> None:
    for version in range(2):
        publication = publish_file(server, version)
        with (
            weights_of(publication, "replica", SECRET, 2) as (source, _),
            child(receive, source["stream"], 0) as (first, _),
            child(receive, source["stream"], 1) as (second, _),
        ):
            assert first.recv() == facts_of(Path(publication.path))
            assert second.recv() == facts_of(Path(publication.path))


def test_two_replicas_adopt_at_once(server: WeightsServer) -> None:
    publication = publish_file(server, 0)
    with child(adopt, publication) as (first, _), child(adopt, publication) as (second, _):
        assert first.recv() == facts_of(Path(publication.path))
        assert second.recv() == facts_of(Path(publication.path))


def test_a_replica_that_is_killed_in_the_middle_ends_its_stream_only(
    server: WeightsServer, caplog: pytest.LogCaptureFixture
) -> None:
    publication = publish_file(server, 0)
    with child(adopt, publication, 3) as (killed, _), child(adopt, publication) as (other, _):
        with pytest.raises(EOFError):
            killed.recv()
        until(lambda: "was not sent to a replica" in caplog.text)
        assert other.recv() == facts_of(Path(publication.path))
    with child(adopt, publication) as (later, _):
        assert later.recv() == facts_of(Path(publication.path))


def test_a_replica_that_never_joins_delays_nobody(
    server: WeightsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "LIMIT", transfers.LIMIT / 30)
    publication = publish_file(server, 0)
    began = time.monotonic()
    with weights_of(publication, "replica 0", SECRET, 1):
        pass
    with child(adopt, publication) as (other, _):
        assert other.recv() == facts_of(Path(publication.path))
    until(lambda: "was not sent to a replica" in caplog.text)
    assert time.monotonic() - began < 20


def serve(end: Connection, folder: Path) -> None:
    guardian.SHARED_MEMORY = folder
    server = make_server()
    end.send(publish_file(server, 0))
    signal.pause()


def test_a_rank_that_is_killed_in_the_middle_ends_the_connection(tmp_path: Path) -> None:
    """Its replica ends then, and does not rely on gloo, whose wait sometimes lasts until `LIMIT`."""
    with (
        child(serve, tmp_path) as (rank, pid),
        weights_of(publication := rank.recv(), "replica", SECRET, 1) as (source, connection),
    ):
        weights = received(**source["stream"], worker=0, device=CPU)
        assert next(weights) and connection is not None
        os.kill(pid, signal.SIGKILL)
        assert connection.recv(1) == b""
        weights.close()
    with pytest.raises(ComputeError, match=r"version 0 cannot be fetched from 127\.0\.0\.1"):
        weights_of(publication, "replica", SECRET, 1).__enter__()


def test_a_stream_of_a_removed_file_is_refused(server: WeightsServer) -> None:
    first = publish_file(server, 0)
    for version in (1, 2):
        publish_file(server, version)
    with pytest.raises(ComputeError, match="was removed, because two newer versions"):
        weights_of(first, "replica", SECRET, 1).__enter__()


# ---- settings --------------------------------------------------------------------------------------------------------

IPC = {"weight_transfer": "ipc", "colocated": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weight_transfer": "nccl", "colocated": True}, "'nccl' with colocated = true: .*set weight_transfer to 'file'"),
    ({"weight_transfer": "ipc"}, "'ipc' with colocated = false, .*set colocated to true"),
    ({**IPC, "ranks": 2}, "ranks = 2.* the numbers to 1, or weight_transfer to 'file'"),
    ({**IPC, "samplers": 2}, "samplers = 2"),
    ({**IPC, "tensor_parallel": 2}, "tensor_parallel = 2"),
    ({**IPC, "address": "auto"}, "leave address empty"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ComputeConfig.model_validate({"backend": "cluster", **changed})


@pytest.mark.parametrize("changed", [IPC, {"weight_transfer": "nccl", "ranks": 2, "samplers": "1..4"}])
def test_settings_that_work_are_accepted(changed: dict[str, Any]) -> None:
    ComputeConfig.model_validate({"backend": "cluster", **changed})
