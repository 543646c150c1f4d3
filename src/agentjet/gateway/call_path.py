"""The path of a call: conversation to tokens, through the gate, to the sampler and back, into the journal, to the
agent.

* A call is recorded, in memory and on disk, before its last chunk is given out. One that is closed earlier (its
  client left) is sampled no further and leaves no trace: an answer that nobody heard is not trained on.
* Sampling runs in a task of its own: a slow reader delays neither the sampler nor a batch. The lease stands still while
  the server is at work, and runs while the agent reads: each chunk that it takes is a sign of life.
* What was recorded and did not arrive trains nothing: see `deliveries`. A request sent again as a retry says of which
  answer that is true: see `retries`.
* A worker that dies under a call is not noticed by the agent, unless part of the answer was given out already. A call
  under which `MAX_CRASHES` workers died is given up: it may be what killed them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from agentjet.compute import Compute
from agentjet.errors import (
    ComputeError,
    ContextOverflow,
    GrammarError,
    InvalidRequest,
    Later,
    OutOfCache,
    RequestError,
    WorkerDied,
)
from agentjet.gateway import observability
from agentjet.gateway.completion_parser import CompletionParser
from agentjet.gateway.concurrency import CallLimits, Gate, GroupCommit, offload
from agentjet.gateway.deliveries import Deliveries, Delivery, Outbox
from agentjet.gateway.observability import Tracing
from agentjet.gateway.prompts import Prompt, num_characters, prepare_prompt
from agentjet.gateway.requests import (
    CallChunk,
    CallRequest,
    ScoredToken,
    sampling_params,
    with_choice_seed,
    with_overrides,
)
from agentjet.rendering import Renderer
from agentjet.swarm import Episode, SwarmState
from agentjet.timeline.identity import context_digest
from agentjet.timeline.support import pack_sets
from agentjet.types import Call, Conversation, ModelInfo, SamplingParams

RESAMPLE_DELAY = 0.05
"""Seconds before a call whose worker died looks at the gate again, which holds it from then on."""

MAX_CRASHES = 2
"""So many workers may die under a call before it is given up."""


class Model(Protocol):
    """What a call must know of the model; there is none before the worker was up once."""

    card: ModelInfo | None
    renderer: Renderer | None
    num_workers: int
    """Started so far."""


@dataclass(slots=True)
class _Order:
    """A call under way, common to its choices."""

    episode: Episode
    role: str
    request: CallRequest
    params: SamplingParams
    prompt: Prompt
    renderer: Renderer
    tool_format: str
    deadline: float
    delivery: Delivery
    repeats: list[str] | None = None
    """Calls that this one repeats, for the choices not yet recorded; None until the first is."""
    workers_lost: set[int] = field(default_factory=set)
    """Those that died under it, as `Model.num_workers` counts them."""


class CallPath:
    """Answers calls. One for a gateway."""

    def __init__(
        self,
        swarm: SwarmState,
        commits: GroupCommit,
        compute: Compute,
        gate: Gate,
        model: Model,
        call_timeout: float,
        *,
        limits: CallLimits,
        tracing: Tracing,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A call is held at most `call_timeout` seconds in all; sampling does not count."""
        self._swarm = swarm
        self._commits = commits
        self._compute = compute
        self._gate = gate
        self._model = model
        self._call_timeout = call_timeout
        self._clock = clock
        self._limits = limits
        self._tracing = tracing
        self.deliveries = Deliveries(swarm)
        """Of the calls that are held, sampled or read."""

    async def run(
        self, episode_id: str, role: str, request: CallRequest, hang_up: Callable[[], None]
    ) -> AsyncGenerator[CallChunk]:
        """The chunks of an answer. See `Gateway.call`."""
        observability.episode_id.set(episode_id)
        with (
            self.deliveries.delivering(episode_id, role, request, hang_up) as delivery,
            self._limits.calling(self._swarm.episode(episode_id)),
        ):
            with self._swarm.calling(episode_id) as episode:
                order = await self._order(episode, delivery)
            tasks = [asyncio.create_task(self._choice(order, index)) for index in range(request.choices)]
            try:
                ended = 0
                while ended < request.choices:
                    item = await delivery.outbox.get()
                    if isinstance(item, BaseException):
                        raise item
                    ended += item.call is not None
                    delivery.being_read = True
                    yield item
                    delivery.being_read = False
                    self._swarm.heartbeat(episode_id)  # Raises when the episode ended while this was read.
            finally:
                if left := [task for task in tasks if not task.done()]:
                    for task in left:
                        task.cancel()
                    await asyncio.gather(*left, return_exceptions=True)

    async def run_all(
        self, episode_id: str, role: str, request: CallRequest, hang_up: Callable[[], None]
    ) -> AsyncGenerator[CallChunk]:
        """The answers to several conversations, one call each: all are sampled before the first chunk comes."""
        single = replace(request, others=())
        sampling_params(request, self._swarm.job, self._swarm.episode(episode_id))  # Raises in a training episode.
        requests = [single]
        for i, conversation in enumerate(request.others, 1):
            fingerprint = f"{request.fingerprint}/{i}"
            requests.append(replace(single, conversation=conversation, id="", fingerprint=fingerprint))
        streams = [self.run(episode_id, role, one, hang_up) for one in requests]
        async with AsyncExitStack() as stack:
            for stream in streams:
                await stack.enter_async_context(aclosing(stream))
            tasks = [asyncio.create_task(_ends(stream, request.choices)) for stream in streams]
            try:
                answers = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for i, chunks in enumerate(answers):
                for chunk in chunks:
                    yield replace(chunk, index=i * request.choices + chunk.index)
            for stream in streams:
                await anext(stream, None)

    async def count_tokens(self, episode_id: str, role: str, conversation: Conversation, num_bytes: int) -> int:
        """Length of the prompt that a call with `conversation` would have just now. Nothing is sampled or recorded."""
        with self._swarm.calling(episode_id):
            _, renderer = await self._known_model()
            tree = self._swarm.tree(episode_id, role)
            size = num_bytes + num_characters(conversation)
            return len(
                (await offload(size, prepare_prompt, renderer, tree, conversation, self._swarm.job.history)).tokens
            )

    async def _known_model(self) -> tuple[ModelInfo, Renderer]:
        """Waits for the worker where none was up yet."""
        if self._model.renderer is None:
            async with self._gate.enter(self._call_timeout):
                pass
        card, renderer = self._model.card, self._model.renderer
        assert card is not None and renderer is not None, "the gate opens for a worker that is up"
        return card, renderer

    async def _order(self, episode: Episode, delivery: Delivery) -> _Order:
        """Everything that can be wrong with a request is found here, before it is held for a batch."""
        job, role = self._swarm.job, delivery.role
        request = with_overrides(delivery.request, job, episode)
        params = sampling_params(request, job, episode)
        deadline = asyncio.get_running_loop().time() + self._call_timeout
        card, renderer = await self._known_model()
        if request.template_kwargs and not renderer.ignores(request.conversation, request.template_kwargs):
            raise InvalidRequest(
                f"chat_template_kwargs: with {dict(request.template_kwargs)!r:.200} this model's template would write "
                "another prompt: leave it out.",
                code="unsupported_parameter",
                param="chat_template_kwargs",
            )
        tree = self._swarm.tree(episode.id, role)
        is_new_role = not tree.calls and episode.num_calls
        size = request.num_bytes + num_characters(request.conversation)
        prompt = await offload(
            size, prepare_prompt, renderer, tree, request.conversation, job.history, fingerprint=request.fingerprint
        )
        if is_new_role:
            prompt = replace(prompt, fork="role")
        room = card.context_length - len(prompt.tokens)
        if room < 1:
            raise ContextOverflow(request.asked, len(prompt.tokens), card.context_length)
        grammar = await offload(size, renderer.grammar, request.conversation, request.constraint)
        params = replace(params, max_tokens=min(params.max_tokens, room), grammar=grammar)
        self._swarm.note(episode.id, noted=request.notes)
        return _Order(episode, role, request, params, prompt, renderer, card.tool_format, deadline, delivery)

    async def _choice(self, order: _Order, index: int) -> None:
        """One choice, from the gate to the journal; what goes wrong is put into the outbox."""
        outbox = order.delivery.outbox
        try:
            with self._swarm.calling(order.episode.id), self._tracing.call(order.episode.id, order.role):
                await self._sample_until_done(order, index, outbox)
        except Exception as error:  # Raised again by `run`, in the caller's task.
            outbox.put_nowait(error)

    async def _sample_until_done(self, order: _Order, index: int, outbox: Outbox) -> None:
        loop = asyncio.get_running_loop()
        params = with_choice_seed(
            order.params,
            explicit=order.request.seed,
            job_seed=self._swarm.job.seed,
            episode_seq=order.episode.seq,
            ordinal=order.delivery.ordinal,
            choice=index,
        )
        while True:
            sent = False
            async with self._gate.enter(max(0.0, order.deadline - loop.time())):
                self._swarm.heartbeat(order.episode.id)  # Raises when the episode ended while its call was held.
                worker = self._model.num_workers
                call_id = (index == 0 and order.request.id) or uuid.uuid4().hex
                answer = CompletionParser(
                    order.renderer,
                    order.request.conversation,
                    stop=order.request.stop,
                    tool_format=order.tool_format,
                    id_prefix=f"call_{call_id[:12]}",
                )
                try:
                    async for chunk in self._sampled(order, index, params, answer):
                        outbox.put_nowait(chunk)
                        sent = True
                    scores = await self._scored(order, answer)
                except WorkerDied as error:
                    if sent:
                        raise Later(
                            "The worker died in the middle of the answer.",
                            code="worker_died",
                            status=503,
                            retry_after=5.0,
                        ) from error
                    order.workers_lost.add(worker)
                    if len(order.workers_lost) >= MAX_CRASHES:
                        raise RequestError(
                            f"{MAX_CRASHES} workers in a row crashed while serving this call; giving up.",
                            code="call_killed_workers",
                            status=500,
                        ) from error
                else:
                    recorded = await self._record(order, index, call_id, params, answer)
                    outbox.put_nowait(replace(recorded, scores=scores))
                    return
            await asyncio.sleep(RESAMPLE_DELAY)

    async def _sampled(
        self, order: _Order, index: int, params: SamplingParams, answer: CompletionParser
    ) -> AsyncGenerator[CallChunk]:
        """Sample into `answer`; chunks only when the request streams, and only what is certain."""
        try:
            async with aclosing(self._compute.sample(order.prompt.tokens, params)) as pieces:
                async for piece in pieces:
                    answer.push(piece)
                    if answer.stopped or piece.finish_reason is not None:
                        return
                    if order.request.stream:
                        reasoning, text = answer.certain()
                        if reasoning or text:
                            yield CallChunk(
                                *(index, text, reasoning, answer.new_tokens()),
                                num_prompt_tokens=len(order.prompt.tokens),
                            )
        except OutOfCache as error:
            raise InvalidRequest(
                f"{error}: shorten the {order.request.asked} or max_tokens, or raise sampler.cache_tokens.",
                code="context_length_exceeded",
                param=order.request.asked,
            ) from error
        except GrammarError as error:
            raise InvalidRequest(
                f"{error}: the answer cannot be held to {order.request.constraint.schema_param} and tools; "
                "simplify their schemas.",
                code="unsupported_schema",
                param=order.request.constraint.schema_param,
            ) from error
        except WorkerDied:
            raise
        except ComputeError as error:
            raise RequestError(f"The worker failed: {error}", code="worker_failed", status=500) from error

    async def _scored(self, order: _Order, answer: CompletionParser) -> tuple[ScoredToken, ...]:
        """The scores of prompt and completion, where the request asks for them. Raises as `_sampled`."""
        num_likeliest, tokens = order.request.num_likeliest, (*order.prompt.tokens, *answer.tokens)
        if num_likeliest is None:
            return ()
        try:
            scores = await self._compute.score(tokens, num_likeliest)
        except WorkerDied:
            raise
        except ComputeError as error:
            raise RequestError(f"The worker failed: {error}", code="worker_failed", status=500) from error
        texts = [order.renderer.token_bytes(token) for token in tokens]
        shown = [ScoredToken(texts[0].decode(errors="replace"), texts[0], None)]
        for utf8, token, score in zip(texts[1:], tokens[1:], scores, strict=True):
            likeliest = dict([*score.likeliest, (token, score.logprob)]) if num_likeliest else {}
            named = tuple((order.renderer.token_bytes(t).decode(errors="replace"), p) for t, p in likeliest.items())
            shown.append(ScoredToken(utf8.decode(errors="replace"), utf8, score.logprob, named))
        return tuple(shown)

    async def _record(
        self, order: _Order, index: int, call_id: str, params: SamplingParams, answer: CompletionParser
    ) -> CallChunk:
        """Write the call down, then say so. Raises `Conflict` when the episode ended meanwhile."""
        message, reasoning, text = answer.message()
        completion = tuple(answer.tokens)
        retry_of = self._repeated(order)
        call = Call(
            id=call_id,
            episode_id=order.episode.id,
            role=order.role,
            parent=order.prompt.parent,
            kept=order.prompt.kept,
            suffix=order.prompt.suffix,
            completion=completion,
            logprobs=tuple(answer.logprobs),
            versions=tuple(answer.versions),
            temperature=params.temperature,
            finish_reason=answer.finish_reason(message),
            response=message,
            prompt_key=order.prompt.key,
            created=self._clock(),
            ask=order.prompt.ask,
            fork="retry" if retry_of is not None else order.prompt.fork,
            retry_of=retry_of,
            context=context_digest(order.prompt.tokens, completion),
            # Nobody recomputes what an eval episode was sampled from.
            support=pack_sets(answer.support) if order.episode.mode == "train" else b"",
            untrained=order.request.untrained,
        )
        self._swarm.record_call(call, order.prompt.pieces, order.renderer.pieces(completion))
        order.delivery.recorded.append(call.id)
        await self._commits.durable()
        self._tracing.recorded(call)
        return CallChunk(
            *(index, text, reasoning, answer.new_tokens(), call, len(order.prompt.tokens)), stop=answer.stopped_by
        )

    def _repeated(self, order: _Order) -> str | None:
        """The call whose place the next choice takes. Looked up as late as this: the first try may have ended since."""
        if order.repeats is None:
            tree = self._swarm.tree(order.episode.id, order.role)
            order.repeats = self.deliveries.repeated(order.delivery, tree)
        return order.repeats.pop() if order.repeats else None


async def _ends(stream: AsyncGenerator[CallChunk], choices: int) -> list[CallChunk]:
    """The last chunks of an answer that does not stream, one a choice."""
    return [await anext(stream) for _ in range(choices)]
