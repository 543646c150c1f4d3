"""The order of a replica's messages, with a fake engine. Pinned here:

1. tokens of the old weights are sent before the answer to `adopt`, with the old version;
2. tokens of the new weights are sent after it, with the new version, also those that come before the probe is scored;
3. a fetch that fails changes nothing, and completions go on;
4. a token has the version that the engine noted for it, also if it arrives late; no piece has two versions;
5. tokens are sent when they are old enough, though the piece is not full;
6. tokens whose log-probability is not finite fail their completion;
7. an environment without vLLM is named, with the command that makes one;
8. an engine that dies ends the process, also while it loads weights;
9. a front gets its own tokens, those of new weights after the answer to `adopt`; it cannot change weights, and its end
   cancels its completions alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjet.compute.vllm import replica
from agentjet.compute.vllm.replica import ReplicaServer, start_vllm
from agentjet.compute.weights import Publication
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig, SamplerLimits
from agentjet.errors import ComputeError, ConfigError, WorkerDied
from agentjet.processes import guardian
from agentjet.processes.rpc import Answer, Link, Peer, ProcessRequest, dial
from agentjet.types import ModelInfo, PolicyId, Sampled, SamplingParams

pytestmark = pytest.mark.anyio

INFO = ModelInfo("tiny", "", "", 100, (2,))


@dataclass
class FakeDelta:
    tokens: list[int]
    logprobs: list[float]
    support: list[bytes]
    versions: list[int]
    ended: bool


def delta(*tokens: int, logprob: float = -1.0, version: int = 0, new: int = 0) -> FakeDelta:
    """Tokens of a version, the last `new` of them of version 7. Token 2 ends the completion."""
    count = len(tokens)
    versions = [version] * (count - new) + [7] * new
    return FakeDelta(list(tokens), [logprob] * count, [b""] * count, versions, tokens[-1] == 2)


class FakeEngine:
    """Yields the deltas that a test gives it. `score` waits for the test, too."""

    def __init__(self) -> None:
        self.deltas: asyncio.Queue[FakeDelta] = asyncio.Queue()
        self.running: set[int] = set()
        """Ids of the completions that are sampled."""
        self.may_score = asyncio.Event()
        self.death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.done: list[str] = []
        self.limits = SamplerLimits(64, 65_536)

    async def died(self) -> BaseException:
        return await self.death

    async def check(self, *_: Any) -> None:
        pass

    async def sample(self, id: int, *_: Any) -> AsyncGenerator[FakeDelta]:
        self.running.add(id)
        try:
            while True:
                found = await self.deltas.get()
                yield found
                if found.ended:
                    return
        finally:
            self.running.discard(id)

    async def queue_probe(self, tokens: Any) -> Coroutine[Any, Any, list[float]]:
        self.done.append("queue probe")

        async def logprobs() -> list[float]:
            await self.may_score.wait()
            return [-2.0] * (len(tokens) - 1)

        return logprobs()

    async def pause(self) -> None:
        self.done.append("pause")

    async def load(self, path: Path, adapter: str) -> None:
        self.done.append("load")

    async def resume(self, version: int) -> None:
        self.done.append(f"resume {version}")


class FakeLink(Link):
    """Keeps what the replica sends, in order."""

    def __init__(self) -> None:
        self.name, self.secret = "replica", b""
        self.sent: list[Any] = []
        self.deliver: Callable[[ProcessRequest], object] = lambda request: None
        self.changed = asyncio.Event()

    @property
    def local_host(self) -> str:
        return "127.0.0.1"

    def exit(self, code: int) -> None:
        self.send(f"exit code {code}")

    def read_forever(self, deliver: Callable[[ProcessRequest], object]) -> None:
        self.deliver = deliver

    def send(self, message: Any) -> None:
        self.sent += message if isinstance(message, list) else [message]
        self.changed.set()

    async def until(self, count: int) -> list[Any]:
        async with asyncio.timeout(60):
            while len(self.sent) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.sent


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.link, self.engine = FakeLink(), FakeEngine()
        self._num_asked = 0

    async def __aenter__(self) -> Scene:
        async def start(*_: Any) -> Any:
            return self.engine

        self._task = asyncio.create_task(ReplicaServer(self.link, start).run())
        await asyncio.sleep(0)
        self.ask("load", ModelConfig(), INFO, SamplerConfig(), ComputeConfig())
        self.engine.may_score.set()
        self.ask("adopt", self.publication(0))
        self.address, _ = (await self.link.until(2))[0].result
        self.link.sent.clear()
        self.engine.may_score.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    def ask(self, op: str, *args: Any) -> int:
        self._num_asked += 1
        self.link.deliver(ProcessRequest(op, self._num_asked, PolicyId(), args))
        return self._num_asked

    def sample(self, **params: Any) -> int:
        id = self._num_asked + 1
        return self.ask("sample", id, np.array([5, 6], np.int32), SamplingParams(**{"max_tokens": 50, **params}), 0)

    def publication(self, version: int) -> Publication:
        path = self.folder / f"{guardian.PREFIX}rank-0" / f"{version}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"weights")
        return Publication(version, "127.0.0.1:1", str(path), 7, "", "float32", (5, 6, 7), (-2.0, -2.0))

    async def front(self) -> Peer:
        """Connect as a front."""
        connection = await asyncio.to_thread(dial, self.address, "front", b"")
        return Peer("replica", *await asyncio.open_connection(sock=connection))

    async def yielded(self, *deltas: FakeDelta) -> None:
        """Let the engine yield these, and the replica handle them."""
        for one in deltas:
            self.engine.deltas.put_nowait(one)
        while not self.engine.deltas.empty():
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "SHARED_MEMORY", tmp_path)


@pytest.fixture(autouse=True)
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token gets old by accident."""
    monkeypatch.setattr(replica, "PIECE_SECONDS", 60)


async def test_tokens_stand_on_their_side_of_the_answer_to_adopt(tmp_path: Path) -> None:
    async with Scene(tmp_path) as scene:
        id = scene.sample(piece_tokens=4)
        await scene.yielded(delta(10, 11))
        assert scene.link.sent == []
        adopting = scene.ask("adopt", scene.publication(7))
        while scene.engine.done.count("resume 7") < 1:
            await asyncio.sleep(0)
        await scene.yielded(delta(12, 13, 14, 15, version=7))
        assert scene.link.sent == [(id, Sampled((10, 11), (-1.0, -1.0), 0))]
        scene.engine.may_score.set()
        await scene.link.until(3)
        await scene.yielded(delta(2, version=7))
        sent = await scene.link.until(4)
        assert sent[1] == Answer(adopting, [-2.0, -2.0])
        assert sent[2:] == [
            (id, Sampled((12, 13, 14, 15), (-1.0,) * 4, 7)),
            (id, Sampled((2,), (-1.0,), 7, "stop")),
        ]
        assert scene.engine.done[-4:] == ["pause", "load", "queue probe", "resume 7"]


async def test_fronts_get_their_tokens_after_the_answer_to_adopt_and_change_no_weights(tmp_path: Path) -> None:
    async with Scene(tmp_path) as scene, asyncio.timeout(60):
        front, other = [await scene.front() for _ in range(2)]

        async def begin(peer: Peer) -> tuple[AsyncGenerator[Sampled, None], asyncio.Task[Sampled]]:
            count, tokens = len(scene.engine.running), np.array([5, 6], np.int32)
            pieces = peer.sample(PolicyId(), tokens, SamplingParams(max_tokens=9, piece_tokens=2), 0)
            first = asyncio.create_task(pieces.__anext__())
            while len(scene.engine.running) == count:
                await asyncio.sleep(0)
            return pieces, first

        pieces, first = await begin(front)
        adopting = scene.ask("adopt", scene.publication(7))
        while scene.engine.done.count("resume 7") < 1:
            await asyncio.sleep(0)
        await scene.yielded(delta(10, 11, version=7))
        for op in ("load", "adopt", "suspend", "leave"):
            with pytest.raises(ComputeError, match=f"front may not request '{op}': only the server may"):
                await front.ask(op)
        assert not first.done() and scene.link.sent == []
        scene.engine.may_score.set()
        assert await scene.link.until(1) == [Answer(adopting, [-2.0, -2.0])]
        assert await first == Sampled((10, 11), (-1.0, -1.0), 7)
        _, theirs = await begin(other)
        other.close()
        with pytest.raises(WorkerDied):
            await theirs
        while scene.engine.running != set(front.pending):
            await asyncio.sleep(0)
        await scene.yielded(delta(2, version=7))
        assert await anext(pieces) == Sampled((2,), (-1.0,), 7, "stop")
        assert len(scene.link.sent) == 1
        front.close()


PIECES = {
    "one delta has several pieces": (2, [(10, 11, 12, 13, 2)], [(10, 11), (12, 13), (2,)]),
    "one more delta would not fit": (
        6,
        [(10,), (11, 12), (13, 14), (15, 16), (2,)],
        [(10, 11, 12, 13, 14), (15, 16, 2)],
    ),
    "the next delta fits": (5, [(10,), (11, 12), (13, 14), (2,)], [(10, 11, 12, 13, 14), (2,)]),
}


@pytest.mark.parametrize(("size", "deltas", "pieces"), PIECES.values(), ids=PIECES)
async def test_no_piece_is_longer_than_asked(
    tmp_path: Path, size: int, deltas: list[tuple[int, ...]], pieces: list[tuple[int, ...]]
) -> None:
    async with Scene(tmp_path) as scene:
        id = scene.sample(piece_tokens=size)
        for tokens in deltas:
            await scene.yielded(delta(*tokens))
        sent = await scene.link.until(len(pieces))
        assert [piece.tokens for _, piece in sent] == pieces
        reasons: list[str | None] = [None] * (len(pieces) - 1) + ["stop"]
        assert [(one, piece.finish_reason) for one, piece in sent] == [(id, reason) for reason in reasons]


async def test_tokens_are_sent_when_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Scene(tmp_path) as scene:
        id = scene.sample(piece_tokens=9)
        await scene.yielded(delta(10))
        assert scene.link.sent == []
        monkeypatch.setattr(replica, "PIECE_SECONDS", 0)
        await scene.yielded(delta(11))
        assert scene.link.sent == [(id, Sampled((10, 11), (-1.0, -1.0), 0))]


async def test_a_stream_begins_at_once_and_keeps_its_pace(tmp_path: Path) -> None:
    async with Scene(tmp_path) as scene:
        id = scene.sample(piece_tokens=9, stream_seconds=1e9)
        for token in (10, 11, 12, 2):
            await scene.yielded(delta(token))
        assert await scene.link.until(2) == [
            (id, Sampled((10,), (-1.0,), 0)),
            (id, Sampled((11, 12, 2), (-1.0,) * 3, 0, "stop")),
        ]


async def test_a_failed_fetch_changes_nothing(tmp_path: Path) -> None:
    async with Scene(tmp_path) as scene:
        id = scene.sample()
        await scene.yielded(delta(10))
        done = list(scene.engine.done)
        gone = dataclasses.replace(scene.publication(7), path=str(tmp_path / "removed"))
        scene.ask("adopt", gone)
        answer = (await scene.link.until(2))[1]
        assert isinstance(answer.error, ComputeError) and "cannot be fetched" in str(answer.error)
        assert not answer.ends and scene.engine.done == done
        await scene.yielded(delta(2))
        assert (await scene.link.until(3))[2] == (id, Sampled((2,), (-1.0,), 0, "stop"))


async def test_a_token_that_arrives_late_has_its_version(tmp_path: Path) -> None:
    async with Scene(tmp_path) as scene:
        id = scene.sample(piece_tokens=9)
        adopting = scene.ask("adopt", scene.publication(7))
        scene.engine.may_score.set()
        assert (await scene.link.until(1)) == [Answer(adopting, [-2.0, -2.0])]
        await scene.yielded(delta(10, 11, 12, new=1), delta(2, version=7))
        assert (await scene.link.until(3))[1:] == [
            (id, Sampled((10, 11), (-1.0, -1.0), 0)),
            (id, Sampled((12, 2), (-1.0, -1.0), 7, "stop")),
        ]


@pytest.mark.parametrize("logprob", [float("nan"), -float("inf")])
async def test_a_diverged_policy_fails_its_completions(tmp_path: Path, logprob: float) -> None:
    async with Scene(tmp_path) as scene:
        id = scene.sample(piece_tokens=9)
        await scene.yielded(delta(10, logprob=logprob))
        (answer,) = await scene.link.until(1)
        assert answer.id == id and "diverged" in str(answer.error) and not answer.ends


def test_an_environment_without_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="agentjet cluster install"):
        asyncio.run(start_vllm(FakeLink(), ModelConfig(), INFO, SamplerConfig(), ComputeConfig()))


def test_an_engine_that_dies_during_an_adoption_ends_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with Scene(tmp_path) as scene:
            scene.ask("adopt", scene.publication(7))
            while scene.engine.done.count("resume 7") < 1:  # The probe is never scored.
                await asyncio.sleep(0)
            scene.engine.death.set_result(RuntimeError("EngineCore was killed"))
            assert await scene.link.until(1) == ["exit code 1"]
            assert "the engine is dead: RuntimeError: EngineCore was killed" in caplog.text

    asyncio.run(asyncio.wait_for(run(), 30))
