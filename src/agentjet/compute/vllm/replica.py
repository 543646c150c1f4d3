"""A replica: the process that samples one policy with vLLM. Started as `python -m agentjet.compute.vllm.replica`.

Its virtual environment is separate, because vLLM's pins exclude ours. It imports the server's copy of AgentJet. It
connects to the gateway, answers requests, and ends with the connection. Fronts connect to it, and have it sample, too.

A replica samples nothing before its first `adopt`. Each token has the version of the weights that sampled it: an
`adopt` pauses the engine and sends the tokens sampled before with the old version. The probe is scored right after the
engine resumes. Tokens of the new weights are sent after the answer to `adopt`, to fronts, too. So the gateway can
refuse the replica before it receives any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentjet.compute.weights import USE_FILE, Publication, SharedFolder, weights_of
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig, SamplerLimits
from agentjet.errors import AgentJetError, ComputeError, ConfigError, WorkerDied
from agentjet.processes.guardian import places
from agentjet.processes.rpc import LEAVE, Answer, Link, ProcessRequest, admit_fronts, answering
from agentjet.types import FinishReason, ModelInfo, Sampled, SamplingParams, TokenScore

if TYPE_CHECKING:
    from agentjet.compute.vllm.engine import Delta, VllmEngine

log = logging.getLogger(__name__)

LLGUIDANCE = 1, 9
"""Lowest version of the library that follows grammars. vLLM itself installs a lower one."""
PIECE_SECONDS = 1.0
"""Age of its first token at which a piece is sent. Pieces are signs of work; tokens not sent end with the replica."""
_OF_CONNECTION = ("sample", "cancel", LEAVE)
"""Requests about the completions of a connection. Their tokens are the answers."""
_SLOW = ("score", "adopt", "suspend")
"""Requests beside which others are handled."""


@dataclass(slots=True)
class Completion:
    """A running completion, and its tokens that are not sent yet."""

    id: int
    outbox: Outbox
    params: SamplingParams
    end_tokens: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[bytes] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_sampled: int = 0
    num_new: int = 0
    """Tokens of the last delta."""
    since: float = 0.0
    """Time of the first token that is not sent yet."""
    sent_at: float = -1.0
    """Time of the last piece; -1 before the first."""
    task: asyncio.Task[None] | None = None

    def add(self, delta: Delta) -> None:
        """Add new tokens. Raises `ComputeError` for a log-probability that is not finite."""
        if not all(map(math.isfinite, delta.logprobs)):
            raise ComputeError("the policy has diverged: its logits are not finite")
        if not self.tokens:
            self.since = time.monotonic()
        self.num_new = len(delta.tokens)
        self.num_sampled += self.num_new
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.support += delta.support
        self.versions += delta.versions

    def is_due(self) -> bool:
        """Returns whether a piece must be sent now, also because one more delta might not fit into it."""
        now, num_tokens = time.monotonic(), len(self.tokens) + self.num_new - 1
        return self.params.is_due(num_tokens, self.sent_at, now) or now - self.since >= PIECE_SECONDS

    def finish_reason(self) -> FinishReason | None:
        """Returns why the completion ends with its last token; None if it goes on."""
        if self.tokens and self.tokens[-1] in self.end_tokens:
            return "stop"
        return "length" if self.num_sampled >= self.params.max_tokens else None

    def pieces(self, reason: FinishReason | None) -> Iterator[Sampled]:
        """Yields the tokens that are not sent yet, in pieces of one version and at most `params.piece_tokens`."""
        size, count = self.params.piece_tokens, len(self.tokens)
        start, self.sent_at = 0, time.monotonic()
        while start < count:
            version = self.versions[start]
            stop = next((i for i in range(start, count) if self.versions[i] != version), count)
            part = slice(start, start := min(stop, start + size))
            support = tuple(self.support[part]) if any(self.support[part]) else ()
            last = reason if start == count else None
            yield Sampled(tuple(self.tokens[part]), tuple(self.logprobs[part]), version, last, support)
        self.tokens, self.logprobs, self.support, self.versions = [], [], [], []


class Outbox:
    """Sends answers and pieces of a connection in order. Pieces of one turn of the event loop are one message."""

    def __init__(self, link: Link, *, is_held: bool = False) -> None:
        self._link = link
        self._waiting: list[Answer | tuple[int, Sampled]] = []
        self._is_scheduled = False
        self._is_held = is_held

    def put(self, message: Answer | tuple[int, Sampled]) -> None:
        self._waiting.append(message)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_soon)

    def hold(self) -> None:
        """Send what waits, and nothing further until `release`."""
        self.send()
        self._is_held = True

    def release(self) -> None:
        """Send what waits, from now on at once."""
        self._is_held = False
        self.send()

    def send(self) -> None:
        if self._is_held:
            return
        pieces: list[tuple[int, Sampled]] = []
        for message in self._waiting:
            if not isinstance(message, Answer):
                pieces.append(message)
                continue
            if pieces:
                self._link.send(pieces)
                pieces = []
            self._link.send(message)
        if pieces:
            self._link.send(pieces)
        self._waiting = []

    def _send_soon(self) -> None:
        self._is_scheduled = False
        self.send()


StartEngine = Callable[[Link, ModelConfig, ModelInfo, SamplerConfig, ComputeConfig], "Awaitable[VllmEngine]"]


async def start_vllm(
    link: Link, model: ModelConfig, info: ModelInfo, sampler: SamplerConfig, compute: ComputeConfig
) -> VllmEngine:
    """Start vLLM, whose processes end with this one (`replica_path`). Raises `ConfigError`."""
    try:
        from agentjet.compute.vllm.engine import VllmEngine
    except ImportError as error:
        raise ConfigError(
            f"the sampler's environment {sys.prefix} lacks {error.name}: run `agentjet cluster install`, or set "
            "compute.sampler_python to an interpreter with vLLM"
        ) from error
    if tuple(map(int, version("llguidance").split(".")[:2])) < LLGUIDANCE:
        raise ConfigError(
            f"the sampler's environment {sys.prefix} has llguidance {version('llguidance')}, whose grammars differ "
            "from the server's: run `agentjet cluster install`, or `pip install --no-deps 'llguidance>=1.9,<2'` there"
        )
    folder = SharedFolder(places()[0])  # It removes what killed replicas left, too.
    link.before_exit = folder.close
    return await VllmEngine.start(model, info, sampler, compute, folder.path)


class ReplicaServer:
    """The state of the process."""

    def __init__(self, link: Link, start: StartEngine) -> None:
        self._link = link
        self._start = start
        self._outboxes = {link: Outbox(link)}
        """By connection: that of the server, and those of fronts."""
        self._is_holding = False
        """True from the load of weights to the answer of `adopt`. All outboxes are held."""
        self._completions: dict[int, Completion] = {}
        self._loaded: VllmEngine | None = None
        self._info: ModelInfo | None = None
        self._num_streamed = 0
        """vLLM's workers that get weights as a stream of rank 0; 0 without one."""
        self._places = asyncio.Semaphore(0)
        self._scoring = asyncio.Lock()
        self._adopting = asyncio.Lock()
        self._version: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve requests until the connection to the server ends, which ends the process."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[tuple[Link, ProcessRequest]]()

        def deliver(link: Link, request: ProcessRequest) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: the process ends.
                loop.call_soon_threadsafe(inbox.put_nowait, (link, request))

        self._address = admit_fronts(self._link, deliver).address
        self._link.read_forever(partial(deliver, self._link))
        while True:
            link, request = await inbox.get()
            outbox = self._outboxes.setdefault(link, Outbox(link, is_held=self._is_holding))
            if request.op in _SLOW:
                task = asyncio.create_task(self._answer(request, outbox))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                await self._answer(request, outbox)
            if request.op == LEAVE:
                del self._outboxes[link]

    async def _answer(self, request: ProcessRequest, outbox: Outbox) -> None:
        op, id, _, args = request
        with self._answering(request, outbox):
            if op in _OF_CONNECTION:
                await getattr(self, f"_{op}")(outbox, *args)
                return
            result = await getattr(self, f"_{op}")(*args)
            if op == "adopt":
                self._link.send(Answer(id, result))
                self._is_holding = False
                for held in self._outboxes.values():
                    held.release()
            else:
                outbox.put(Answer(id, result))

    @contextlib.contextmanager
    def _answering(self, request: ProcessRequest, outbox: Outbox) -> Iterator[None]:
        """As `rpc.answering`. An engine that is dead, or has half of its weights, ends the process."""

        def send(answer: Answer) -> None:
            (self._link.send if answer.ends else outbox.put)(answer)

        def ends(error: Exception) -> bool:
            return request.op == "adopt" or type(error).__name__ == "EngineDeadError"

        try:
            with answering(request, send, ends=ends, fatal=WorkerDied):
                yield
        except Exception:  # It is answered.
            self._link.exit(1)

    async def _end_with(self, engine: VllmEngine) -> None:
        """End the process when its engine is dead. vLLM fails completions then, and an adoption would wait for ever."""
        error = await engine.died()
        log.error("the engine is dead: %s: %s", type(error).__name__, error)
        self._link.exit(1)

    async def _load(
        self, model: ModelConfig, info: ModelInfo, sampler: SamplerConfig, compute: ComputeConfig
    ) -> tuple[str, SamplerLimits]:
        """Start the engine; returns the address at which fronts connect, and the numbers that the engine chose."""
        self._loaded = await self._start(self._link, model, info, sampler, compute)
        self._tasks.add(asyncio.create_task(self._end_with(self._loaded)))
        self._info = info
        self._num_streamed = compute.tensor_parallel if compute.weight_transfer == "nccl" else 0
        self._places = asyncio.Semaphore(self._loaded.limits.max_concurrent)
        return self._address, self._loaded.limits

    async def _adopt(self, publication: Publication) -> list[float]:
        engine = self._loaded
        assert engine is not None, "the gateway loads a model first"
        weights = weights_of(publication, self._link.name, self._link.secret, self._num_streamed)
        async with self._adopting:
            started = time.monotonic()
            with contextlib.ExitStack() as held:
                source, rank_0 = await asyncio.to_thread(held.enter_context, weights)
                fetched = time.monotonic()
                loop, task = asyncio.get_running_loop(), asyncio.current_task()
                if rank_0 is not None and task is not None:  # vLLM's workers may notice its end a minute later.
                    loop.add_reader(rank_0, task.cancel, f"the stream of rank 0 ended early. {USE_FILE}")
                    held.callback(loop.remove_reader, rank_0)
                try:
                    return await self._change_weights(engine, publication, source)
                except (AgentJetError, asyncio.CancelledError) as error:
                    # The weights may be half changed: it must end the process.
                    raise RuntimeError(str(error)) from error
                finally:
                    log.info(
                        "version %d: fetched in %.2f s, adopted in %.2f s",
                        publication.version, fetched - started, time.monotonic() - fetched,
                    )  # fmt: skip

    async def _change_weights(
        self, engine: VllmEngine, publication: Publication, source: Mapping[str, Any]
    ) -> list[float]:
        """Pause, load, resume, and score the probe; returns its log-probabilities. Outboxes are held from then on.

        The probe is requested during the pause, so the engine computes it before the contexts of running completions.
        """
        started = time.monotonic()
        await engine.pause()
        for completion in self._completions.values():
            self._put(completion, None)
        paused = time.monotonic()
        await engine.load(source, publication.adapter)
        loaded = time.monotonic()
        self._is_holding = True
        for outbox in self._outboxes.values():
            outbox.hold()
        self._version = publication.version
        probe = await engine.queue_probe(np.array(publication.probe_tokens, np.int32))
        await engine.resume(publication.version)
        logprobs = await probe
        log.info(
            "version %d: paused in %.2f s, loaded in %.2f s, probe scored in %.2f s",
            publication.version, paused - started, loaded - paused, time.monotonic() - loaded,
        )  # fmt: skip
        return logprobs

    async def _suspend(self) -> None:
        """Stop sampling and free the memory of the GPUs, until the next `adopt`."""
        assert self._loaded is not None, "the gateway loads a model first"
        async with self._adopting:
            await self._loaded.suspend()
            for completion in self._completions.values():
                self._put(completion, None)

    async def _score(self, tokens: Any, num_likeliest: int) -> tuple[int | None, list[TokenScore]]:
        """Returns the version of the weights, which counts when it passed the probe, and the scores."""
        engine = self._sampling_engine()
        async with self._scoring:
            scores = await engine.score(np.asarray(tokens, np.int32), num_likeliest)
            return self._version, scores

    async def _sample(self, outbox: Outbox, id: int, tokens: Any, params: SamplingParams, num_sampled: int = 0) -> None:
        engine = self._sampling_engine()
        assert self._info is not None
        completion = self._completions[id] = Completion(id, outbox, params, frozenset(self._info.end_tokens))
        prompt = np.asarray(tokens, np.int32)
        completion.task = asyncio.create_task(self._complete(engine, completion, prompt, num_sampled))

    async def _cancel(self, outbox: Outbox, id: int) -> None:
        """Drop a completion of a connection, unless it has ended."""
        completion = self._completions.get(id)
        if completion is not None and completion.outbox is outbox and completion.task is not None:
            del self._completions[id]
            completion.task.cancel()

    async def _leave(self, outbox: Outbox) -> None:
        """Drop all completions of a connection that ended."""
        for id in [id for id, completion in self._completions.items() if completion.outbox is outbox]:
            await self._cancel(outbox, id)

    async def _complete(
        self, engine: VllmEngine, completion: Completion, prompt: NDArray[np.int32], num_sampled: int
    ) -> None:
        """Sample one completion. Its failure ends this completion, or the process if the engine is dead."""
        id = completion.id
        with self._answering(ProcessRequest("sample", id, None, ()), completion.outbox):
            try:
                await engine.check(prompt, completion.params, num_sampled)
                async with self._places:
                    async for delta in engine.sample(id, prompt, completion.params, num_sampled):
                        completion.add(delta)
                        reason = completion.finish_reason()
                        assert (reason is not None) == delta.ended, (reason, delta)
                        if reason is not None or completion.is_due():
                            self._put(completion, reason)
            finally:
                self._completions.pop(id, None)

    def _put(self, completion: Completion, reason: FinishReason | None) -> None:
        for piece in completion.pieces(reason):
            completion.outbox.put((completion.id, piece))

    def _sampling_engine(self) -> VllmEngine:
        if self._loaded is None or self._version is None:
            raise ComputeError("the replica has no weights yet: it must adopt a publication first")
        return self._loaded


async def serve() -> None:
    """Serve the server until its connection ends."""
    await ReplicaServer(Link.of_program(), start_vllm).run()


if __name__ == "__main__":  # vLLM's processes import this module again.
    asyncio.run(serve())
