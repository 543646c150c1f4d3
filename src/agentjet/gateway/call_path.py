"""`CallPath`: one model call from its request to its delivered answer.

Prompt, gate, sampler, journal, chunks: `ActiveCall` is the state of one call on that path.

* A call is in memory and on disk before its last chunk is yielded. If the client leaves earlier, sampling stops and
  nothing is recorded: an answer that did not arrive is not trained.
* Sampling runs in its own task, so a slow reader delays neither the sampler nor a batch. The lease stands still while
  the server works, and runs while the agent reads. Each chunk that the agent takes renews it.
* An answer that was not delivered, or that a retry repeats, is an orphan: it trains nothing. See `ActiveCalls`.
* A worker that crashes during a call is replaced without an error, unless a part of the answer was sent. A call that
  `MAX_CRASHES` workers crashed on is given up, because it may cause the crashes. Crashes during an operation of another
  run do not count, and neither does the end of a completion because its policy was removed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace

from agentjet.errors import (
    ComputeError,
    ContextOverflow,
    GrammarError,
    InvalidRequest,
    Later,
    OutOfCache,
    PolicyRemoved,
    RequestError,
    WorkerDied,
)
from agentjet.gateway import observability
from agentjet.gateway.completion_parser import CompletionParser
from agentjet.gateway.concurrency import CallLimits, offload
from agentjet.gateway.engine import Engine, LoadedModel
from agentjet.gateway.prompts import num_characters, prepare_prompt
from agentjet.gateway.requests import (
    ActiveCall,
    ActiveCalls,
    CallChunk,
    CallRequest,
    ScoredToken,
    sampling_params,
    with_choice_seed,
    with_overrides,
)
from agentjet.gateway.training_loop import OpenRun
from agentjet.swarm import Episode
from agentjet.timeline.identity import context_hash
from agentjet.timeline.support import pack_sets
from agentjet.types import Call, Conversation

RESAMPLE_SECONDS = 0.05
"""Wait before a call whose worker crashed enters the gate again. The gate is held by then."""

MAX_CRASHES = 2
"""Workers that may crash during one call before it is given up."""


class CallPath:
    """Answers calls. One object per gateway."""

    def __init__(self, run: OpenRun, engine: Engine, *, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._swarm = run.swarm
        self._compute = run.compute
        self._engine = engine
        self._call_timeout = run.config.server.call_timeout
        """Maximum of the seconds that a call is held in all. Sampling does not count."""
        self._clock = clock
        self._limits = CallLimits(run.config.server)
        self.active = ActiveCalls(run.swarm)

    async def run(
        self, episode_id: str, role: str, request: CallRequest, hang_up: Callable[[], None]
    ) -> AsyncGenerator[CallChunk]:
        """Yields the chunks of an answer. See `Gateway.call`."""
        observability.run.set(self._run.name)
        observability.episode_id.set(episode_id)
        with (
            self.active.track(episode_id, role, request, hang_up) as call,
            self._limits.calling(self._swarm.episode(episode_id)),
        ):
            with self._swarm.calling(episode_id) as episode:
                await self._prepare(call, episode)
            tasks = [asyncio.create_task(self._choice(call, index)) for index in range(request.choices)]
            try:
                ended = 0
                while ended < request.choices:
                    item = await call.outbox.get()
                    if isinstance(item, BaseException):
                        raise item
                    ended += item.call is not None
                    call.being_read = True
                    yield item
                    call.being_read = False
                    self._swarm.heartbeat(episode_id)  # Raises if the episode ended while this was read.
            finally:
                if left := [task for task in tasks if not task.done()]:
                    for task in left:
                        task.cancel()
                    await asyncio.gather(*left, return_exceptions=True)

    async def run_all(
        self, episode_id: str, role: str, request: CallRequest, hang_up: Callable[[], None]
    ) -> AsyncGenerator[CallChunk]:
        """Yields the answers to several conversations, one call each. All are sampled before the first chunk."""
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
            tasks = [asyncio.create_task(_last_chunks(stream, request.choices)) for stream in streams]
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
        """Returns the prompt length of a call with `conversation`. Nothing is sampled or recorded."""
        with self._swarm.calling(episode_id):
            renderer = (await self._loaded_model(role)).renderer
            tree = self._swarm.tree(episode_id, role)
            size = num_bytes + num_characters(conversation)
            return len(
                (await offload(size, prepare_prompt, renderer, tree, conversation, self._swarm.job.history)).tokens
            )

    async def _loaded_model(self, role: str) -> LoadedModel:
        """Returns the model of a role's policy. Waits until the policies were up once."""
        if not self._engine.models:
            async with self._run.gate.enter(self._call_timeout):
                pass
        return self._engine.models[self._run.policy_id(role).policy]

    async def _prepare(self, call: ActiveCall, episode: Episode) -> None:
        """Checks the request and prepares its prompt, so that every error shows before the call is held for a batch."""
        job = self._swarm.job
        call.episode = episode
        call.deadline = asyncio.get_running_loop().time() + self._call_timeout
        call.request = request = with_overrides(call.request, job, episode)
        params = sampling_params(request, job, episode)
        loaded = await self._loaded_model(call.role)
        model, renderer = loaded.info, loaded.renderer
        call.renderer, call.tool_format = renderer, model.tool_format
        if request.template_kwargs and not renderer.ignores(request.conversation, request.template_kwargs):
            raise InvalidRequest(
                f"chat_template_kwargs: {dict(request.template_kwargs)!r:.200} would change the prompt that this "
                "model's template writes: leave it out.",
                code="unsupported_parameter",
                param="chat_template_kwargs",
            )
        tree = self._swarm.tree(episode.id, call.role)
        is_new_role = not tree.calls and episode.num_calls
        size = request.num_bytes + num_characters(request.conversation)
        prompt = await offload(
            size, prepare_prompt, renderer, tree, request.conversation, job.history, fingerprint=request.fingerprint
        )
        call.prompt = replace(prompt, fork="role") if is_new_role else prompt
        room = model.context_length - len(prompt.tokens)
        if room < 1:
            raise ContextOverflow(request.asked, len(prompt.tokens), model.context_length)
        grammar = await offload(size, renderer.grammar, request.conversation, request.constraint)
        call.params = replace(params, max_tokens=min(params.max_tokens, room), grammar=grammar)
        self._swarm.note(episode.id, noted=request.notes)

    async def _choice(self, call: ActiveCall, index: int) -> None:
        """Samples and records one choice. Puts its chunks, or the error, into the outbox."""
        try:
            with self._swarm.calling(call.episode_id), self._run.tracing.call(call.episode_id, call.role):
                while not await self._try_choice(call, index):
                    await asyncio.sleep(RESAMPLE_SECONDS)
        except Exception as error:  # `run` raises it in the caller's task.
            call.outbox.put_nowait(error)

    async def _try_choice(self, call: ActiveCall, index: int) -> bool:
        """Returns False if the worker crashed before a part of the answer was sent."""
        sent = False
        async with self._run.gate.enter(max(0.0, call.deadline - asyncio.get_running_loop().time())):
            self._swarm.heartbeat(call.episode_id)  # Raises if the episode ended while its call was held.
            worker = self._engine.num_workers
            call_id = (index == 0 and call.request.id) or uuid.uuid4().hex
            parser = CompletionParser(
                call.renderer,
                call.request.conversation,
                stop=call.request.stop,
                tool_format=call.tool_format,
                id_prefix=f"call_{call_id[:12]}",
            )
            try:
                async for chunk in self._sample(call, index, parser):
                    call.outbox.put_nowait(chunk)
                    sent = True
                scores = await self._score(call, parser)
            except WorkerDied as error:
                if sent:
                    raise Later(
                        "The worker died in the middle of the answer.",
                        code="worker_died",
                        status=503,
                        retry_after=5.0,
                    ) from error
                if not (isinstance(error, PolicyRemoved) or self._engine.is_of_another_run(error)):
                    call.crashed_workers.add(worker)
                if len(call.crashed_workers) >= MAX_CRASHES:
                    raise RequestError(
                        f"{MAX_CRASHES} workers in a row crashed while serving this call; giving up.",
                        code="call_killed_workers",
                        status=500,
                    ) from error
                return False
            recorded = await self._record(call, index, call_id, parser)
            call.outbox.put_nowait(replace(recorded, scores=scores))
        return True

    async def _sample(self, call: ActiveCall, index: int, parser: CompletionParser) -> AsyncGenerator[CallChunk]:
        """Samples into `parser`. Yields chunks of stable text if the request streams."""
        params = with_choice_seed(
            call.params,
            explicit=call.request.seed,
            job_seed=self._swarm.job.seed,
            episode_seq=call.episode.seq,
            ordinal=call.ordinal,
            choice=index,
        )
        with _request_errors(call.request):
            async with aclosing(
                self._compute.sample(self._run.policy_id(call.role), call.prompt.tokens, params)
            ) as pieces:
                async for piece in pieces:
                    parser.push(piece)
                    if parser.stopped or piece.finish_reason is not None:
                        return
                    if call.request.stream:
                        reasoning, text = parser.stable_delta()
                        if reasoning or text:
                            yield CallChunk(
                                *(index, text, reasoning, parser.new_tokens()),
                                num_prompt_tokens=len(call.prompt.tokens),
                            )

    async def _score(self, call: ActiveCall, parser: CompletionParser) -> tuple[ScoredToken, ...]:
        """Returns the scores of prompt and completion if the request asks for them."""
        num_likeliest, tokens = call.request.num_likeliest, (*call.prompt.tokens, *parser.tokens)
        if num_likeliest is None:
            return ()
        with _request_errors(call.request):
            scores = await self._compute.score(self._run.policy_id(call.role), tokens, num_likeliest)
        texts = [call.renderer.token_bytes(token) for token in tokens]
        shown = [ScoredToken(texts[0].decode(errors="replace"), texts[0], None)]
        for utf8, token, score in zip(texts[1:], tokens[1:], scores, strict=True):
            likeliest = dict([*score.likeliest, (token, score.logprob)]) if num_likeliest else {}
            named = tuple((call.renderer.token_bytes(t).decode(errors="replace"), p) for t, p in likeliest.items())
            shown.append(ScoredToken(utf8.decode(errors="replace"), utf8, score.logprob, named))
        return tuple(shown)

    async def _record(self, call: ActiveCall, index: int, call_id: str, parser: CompletionParser) -> CallChunk:
        """Records one choice durably and returns its last chunk. Raises `Conflict` if the episode ended."""
        message, reasoning, text = parser.message()
        completion, prompt = tuple(parser.tokens), call.prompt
        if call.repeats is None:  # Looked up this late because the repeated call may have been recorded since.
            call.repeats = self.active.repeated_calls(call, self._swarm.tree(call.episode_id, call.role))
        retry_of = call.repeats.pop() if call.repeats else None
        record = Call(
            id=call_id,
            episode_id=call.episode_id,
            role=call.role,
            parent=prompt.parent,
            kept=prompt.kept,
            suffix=prompt.suffix,
            completion=completion,
            logprobs=tuple(parser.logprobs),
            versions=tuple(parser.versions),
            temperature=call.params.temperature,
            finish_reason=parser.finish_reason(message),
            response=message,
            prompt_key=prompt.key,
            created=self._clock(),
            ask=prompt.ask,
            fork="retry" if retry_of is not None else prompt.fork,
            retry_of=retry_of,
            context=context_hash(prompt.tokens, completion).digest(),
            # Support sets serve training only.
            support=pack_sets(parser.support) if call.episode.mode == "train" else b"",
            untrained=call.request.untrained,
        )
        self._swarm.record_call(record, prompt.pieces, call.renderer.pieces(completion))
        call.recorded.append(call_id)
        await self._run.commits.durable()
        self._run.tracing.recorded(record)
        return CallChunk(
            *(index, text, reasoning, parser.new_tokens(), record, len(prompt.tokens)), stop=parser.stopped_by
        )


@contextmanager
def _request_errors(request: CallRequest) -> Iterator[None]:
    """Turns the errors of the backend into `RequestError`. `WorkerDied` passes."""
    try:
        yield
    except WorkerDied:
        raise
    except OutOfCache as error:
        raise InvalidRequest(
            f"{error}: shorten the {request.asked} or max_tokens, or raise sampler.cache_tokens.",
            code="context_length_exceeded",
            param=request.asked,
        ) from error
    except GrammarError as error:
        raise InvalidRequest(
            f"{error}: no answer can be guaranteed to follow {request.constraint.schema_param} and the tools; simplify "
            "their schemas.",
            code="unsupported_schema",
            param=request.constraint.schema_param,
        ) from error
    except ComputeError as error:
        raise RequestError(f"The worker failed: {error}", code="worker_failed", status=500) from error


async def _last_chunks(stream: AsyncGenerator[CallChunk], choices: int) -> list[CallChunk]:
    """Returns the last chunk of each choice of an answer that does not stream."""
    return [await anext(stream) for _ in range(choices)]
