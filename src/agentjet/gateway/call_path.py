"""`CallPath`: one model call from its request to its delivered answer.

Prompt, gate, sampler, journal, chunks: `ActiveCall` is the state of one call on that path.

* A call is on disk before its last chunk is yielded. If the client leaves earlier, sampling stops.
* Sampling runs in its own task, so a slow reader delays neither the sampler nor a batch. The lease stands still while
  the server works, and runs while the agent reads. Each chunk that the agent takes renews it.
* An answer is delivered once all of it was taken: for a stream, once its last event was written. If its client leaves,
  its episode ends or the server stops before that, its recorded calls are undelivered. A retry supersedes the recorded
  call that it repeats. Both are orphans, which train nothing.
* A worker that crashes during a call is replaced without an error, unless a part of the answer was sent. A call that
  `MAX_CRASHES` workers crashed on is given up, because it may cause the crashes. Crashes during an operation of another
  run do not count, and neither does the end of a completion because its policy was removed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace

from agentjet.errors import (
    ComputeError,
    ConfigError,
    Conflict,
    ContextOverflow,
    GrammarError,
    InvalidRequest,
    Later,
    OutOfCache,
    PolicyRemoved,
    ServerFailed,
    Unavailable,
    WorkerDied,
)
from agentjet.gateway import observability
from agentjet.gateway.completion_parser import CompletionParser
from agentjet.gateway.concurrency import offload
from agentjet.gateway.engine import Engine
from agentjet.gateway.prompts import Prompt, num_characters, prepare_prompt
from agentjet.gateway.requests import CallChunk, CallRequest, ScoredToken, choice_seed, sampling_params, with_overrides
from agentjet.gateway.training_loop import OpenRun
from agentjet.rendering import Renderer
from agentjet.rendering.grammar_trial import GrammarTrials
from agentjet.swarm import EpisodeRecord
from agentjet.swarm.journal import encode_call
from agentjet.timeline.identity import context_hash
from agentjet.timeline.support import pack_sets
from agentjet.types import Call, Conversation, SamplingParams

RESAMPLE_SECONDS = 0.05
"""Wait before a call whose worker crashed enters the gate again. The gate is held by then."""
MAX_CRASHES = 2
"""Workers that may crash during one call before it is given up."""
RETRY_AFTER_CALLS = 1.0
TOKEN_BYTES = 4
"""Bytes of a token's text, about: a call of 16,000 new tokens is encoded in a thread."""


@dataclass(slots=True, eq=False)
class ActiveCall:
    """One request, from its arrival until its whole answer was taken."""

    episode: EpisodeRecord
    role: str
    request: CallRequest
    ordinal: int
    """Number of the call in its episode, unique among answered and failed calls. Seeds depend on it."""
    deadline: float
    """Time of the event loop until which it may be held."""
    arrived: float
    """Unix seconds."""
    outbox: asyncio.Queue[CallChunk | BaseException] = field(default_factory=asyncio.Queue)
    recorded: list[str] = field(default_factory=list)
    """Ids of the recorded calls, one per finished choice."""
    repeats: list[str] | None = None
    """Calls that the choices not recorded yet repeat. None before the first is recorded."""
    num_unanswered: int = 0
    """Choices without which a request stays `unanswered`: all of a first try, and those that a retry is to answer."""
    crashed_workers: set[int] = field(default_factory=set)
    """Numbers of the workers that crashed during the call."""
    # `CallPath._prepare` sets the rest.
    renderer: Renderer = field(init=False)
    prompts: list[tuple[Prompt, SamplingParams]] = field(init=False)
    """One per conversation of the request."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a call, on its way from one worker."""

    index: int
    call_id: str
    prompt: Prompt
    params: SamplingParams
    parser: CompletionParser


@dataclass(slots=True)
class EpisodeCalls:
    """The calls of a live episode."""

    open: list[ActiveCall] = field(default_factory=list)
    """Calls whose answers are not delivered yet."""
    next_ordinal: int = 0
    """Ordinals only grow, because two calls with one ordinal would share a seed."""
    unanswered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Choices of requests that ended before they were recorded, by role and fingerprint. A retry of one repeats no
    call, and must not supersede the answer to an equal request (a vote).
    """


class CallPath:
    """Answers calls. One object per gateway."""

    def __init__(self, run: OpenRun, engine: Engine, *, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._swarm = run.swarm
        self._compute = run.compute
        self._engine = engine
        self._clock = clock
        self._episodes: dict[str, EpisodeCalls] = {}
        self._calls_by_client: Counter[str] = Counter()
        self._reading = asyncio.Lock()
        self.grammars = GrammarTrials()
        run.swarm.store.undelivered_calls = self._undelivered_calls

    @property
    def num_open(self) -> int:
        """Number of calls of live episodes whose answers are not delivered yet."""
        return sum(len(calls.open) for calls in self._episodes.values())

    async def read(self, episode_id: str) -> None:
        """Reads the calls of an episode that was live before a restart, in a thread: they may have megabytes."""
        if self._swarm.is_unread(episode_id):
            async with self._reading:
                await self._run.commits.durable()  # The thread reads committed calls only.
                if self._swarm.is_unread(episode_id):
                    trees = await asyncio.to_thread(self._swarm.read_trees, episode_id)
                    self._swarm.keep_trees(episode_id, trees)

    async def run(self, episode_id: str, role: str, request: CallRequest) -> AsyncGenerator[CallChunk]:
        """Yields the chunks of an answer. See `Gateway.call`."""
        observability.run.set(self._run.name)
        observability.episode_id.set(episode_id)
        with self._track(self._swarm.heartbeat(episode_id), role, request) as call:
            with self._swarm.calling(episode_id):
                await self._prepare(call)
            num_left = request.num_answers
            tasks = [asyncio.create_task(self._answer(call, index)) for index in range(num_left)]
            try:
                while num_left:
                    item = await call.outbox.get()
                    if isinstance(item, BaseException):
                        raise item
                    num_left -= item.call is not None
                    yield item
                    self._swarm.heartbeat(episode_id)  # Raises if the episode ended while this was read.
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def count_tokens(self, episode_id: str, role: str, request: CallRequest) -> int:
        """Returns the prompt length of a call. Nothing is sampled or recorded."""
        with self._swarm.calling(episode_id):
            renderer = await self._renderer(role)
            return len((await self._prompt(renderer, episode_id, role, request, request.conversation)).tokens)

    def episode_ended(self, episode_id: str) -> None:
        """Ends the episode's answers: they will not be trained."""
        ended = self._episodes.pop(episode_id, None)
        for call in ended.open if ended is not None else ():
            call.outbox.put_nowait(
                Conflict(f"Episode {episode_id} ended while it was answered.", code="episode_ended_meanwhile")
            )

    def close(self) -> None:
        """Marks all answers that were not taken yet as undelivered. The journal must still be open."""
        for call in [call for calls in self._episodes.values() for call in calls.open]:
            self._lose(call)
        self._episodes.clear()

    # ---- delivery and retries ---------------------------------------------------------------------------------------

    @contextmanager
    def _track(self, episode: EpisodeRecord, role: str, request: CallRequest) -> Iterator[ActiveCall]:
        """Context of one call. Its answer is delivered unless an exception or a cancellation ends the context.

        Raises `Later` if the episode or the client has too many calls, held ones included.
        """
        calls = self._episodes.setdefault(episode.id, EpisodeCalls())
        ordinal = max(calls.next_ordinal, episode.num_calls)
        calls.next_ordinal = ordinal + 1
        server, client = self._run.config.server, episode.client_id
        deadline = asyncio.get_running_loop().time() + server.call_timeout
        call = ActiveCall(episode, role, request, ordinal, deadline, self._clock())
        call.num_unanswered = 0 if request.retry else request.num_answers
        calls.open.append(call)
        self._calls_by_client[client] += 1
        try:
            _check_limit(len(calls.open), server.max_calls_per_episode, "episode", episode.id)
            _check_limit(self._calls_by_client[client], server.max_calls_per_client, "client", client)
            yield call
        except BaseException:
            self._lose(call)
            raise
        finally:
            calls.open.remove(call)
            self._calls_by_client[client] -= 1
            if not self._calls_by_client[client]:
                del self._calls_by_client[client]

    def _lose(self, call: ActiveCall) -> None:
        """Marks an answer as undelivered. The end of an episode and `close` have done it for their calls."""
        calls = self._episodes.get(call.episode.id)
        if calls is None:
            return
        tree = self._swarm.tree(call.episode.id, call.role)  # Calls whose commit failed are not in the tree.
        if known := [call_id for call_id in call.recorded if tree.knows(call_id)]:
            with suppress(Later):
                self._swarm.undelivered(call.episode.id, known)
        # The loss of a retry adds none: the next retry repeats the same calls.
        if missing := min(call.num_unanswered, call.request.num_answers - len(known)):
            calls.unanswered[call.role, call.request.fingerprint] += missing

    def _undelivered_calls(self, episode_id: str) -> list[str]:
        calls = self._episodes.get(episode_id, EpisodeCalls())
        return [call_id for call in calls.open for call_id in call.recorded]

    def _repeated_calls(self, call: ActiveCall) -> list[str]:
        """Returns the recorded calls that `call` repeats, at most one per choice, oldest first. Choices that answer
        unanswered ones repeat none.
        """
        if not call.request.retry:
            return []
        fingerprint, calls = call.request.fingerprint, self._episodes.get(call.episode.id, EpisodeCalls())
        num_left = call.request.num_answers
        if (num := min(calls.unanswered[call.role, fingerprint], num_left)) > 0:
            calls.unanswered[call.role, fingerprint] -= num
            call.num_unanswered = num
            num_left -= num
        known = self._swarm.tree(call.episode.id, call.role).calls
        repeated = {other.retry_of for other in known}
        same = [other.id for other in known if other.ask.fingerprint == fingerprint and other.id not in repeated]
        return same[max(0, len(same) - num_left) :]

    # ---- prompt -----------------------------------------------------------------------------------------------------

    async def _renderer(self, role: str) -> Renderer:
        """Returns the renderer of a role's policy. Waits until the policies were up once."""
        if not self._engine.renderers:
            async with self._run.gate.enter(self._run.config.server.call_timeout):
                pass
        return self._engine.renderers[self._run.policy_id(role).policy]

    async def _prompt(
        self, renderer: Renderer, episode_id: str, role: str, request: CallRequest, conversation: Conversation
    ) -> Prompt:
        tree, history = self._swarm.tree(episode_id, role), self._swarm.job.history
        size = request.num_bytes + num_characters(conversation)
        return await offload(
            size, prepare_prompt, renderer, tree, conversation, history, fingerprint=request.fingerprint
        )

    async def _prepare(self, call: ActiveCall) -> None:
        """Checks the request and prepares its prompts, so that every error shows before the call is held."""
        episode, job = call.episode, self._swarm.job
        self._check_turns(call)
        call.request = request = with_overrides(call.request, job, episode)
        params = sampling_params(request, job, episode)
        call.renderer = renderer = await self._renderer(call.role)
        limit = renderer.context_length
        if request.template_kwargs and not renderer.ignores(request.conversation, request.template_kwargs):
            raise InvalidRequest(
                f"chat_template_kwargs: {dict(request.template_kwargs)!r:.200} would change the prompt that this "
                "model's template writes: leave it out.",
                code="unsupported_parameter",
                param="chat_template_kwargs",
            )
        is_new_role = not self._swarm.tree(episode.id, call.role).calls and episode.num_calls
        call.prompts = []
        for conversation in request.conversations:
            prompt = await self._prompt(renderer, episode.id, call.role, request, conversation)
            room = limit - len(prompt.tokens)
            if room < 1:
                raise ContextOverflow(request.asked, len(prompt.tokens), limit)
            grammar = await self.grammars.write(episode.id, request.constraint, conversation.tools, renderer.style)
            limited = replace(params, max_tokens=min(params.max_tokens, room), grammar=grammar)
            call.prompts.append((replace(prompt, fork="role") if is_new_role else prompt, limited))
        self._swarm.note(episode.id, noted=request.notes)

    def _check_turns(self, call: ActiveCall) -> None:
        """Raises `InvalidRequest` (`turn_limit`) for a turn beyond those of the episode.

        A turn is an answer that is trained, or that is not given yet. A retry is not a turn.
        """
        most, request = call.episode.max_turns, call.request
        if not most or request.untrained:
            return
        known = [one for one in self._swarm.tree(call.episode.id, call.role).calls if not one.untrained]
        orphaned = self._swarm.queries.orphans(call.episode.id)
        turns, asked = sum(one.id not in orphaned for one in known), {one.ask.fingerprint for one in known}

        def is_retry(request: CallRequest) -> bool:
            return request.retry and request.fingerprint in asked

        for other in self._episodes[call.episode.id].open:
            if other is call or other.role != call.role or other.request.untrained or is_retry(other.request):
                continue
            turns += other.request.num_answers - len(other.recorded)
            asked.add(other.request.fingerprint)
        if turns >= most and not is_retry(request):
            raise InvalidRequest(
                f"The episode has its {most} turns, the maximum that the recipe {self._swarm.job.recipe.name!r} has "
                "chosen for it: end the agent's loop after episode.max_turns answers (AGENTJET_MAX_TURNS), and finish "
                "with the reward.",
                code="turn_limit",
            )

    # ---- one choice -------------------------------------------------------------------------------------------------

    async def _answer(self, call: ActiveCall, index: int) -> None:
        """Samples and records one choice. Puts its chunks, or the error, into the outbox."""
        episode_id = call.episode.id
        try:
            with self._swarm.calling(episode_id), self._run.tracing.span("call", episode_id=episode_id, role=call.role):
                while not await self._try_choice(call, index):
                    await asyncio.sleep(RESAMPLE_SECONDS)
        except Exception as error:  # `run` raises it in the caller's task.
            call.outbox.put_nowait(error)

    async def _try_choice(self, call: ActiveCall, index: int) -> bool:
        """Returns False if the worker crashed before a part of the answer was sent."""
        sent = False
        async with self._run.gate.enter(max(0.0, call.deadline - asyncio.get_running_loop().time())):
            self._swarm.heartbeat(call.episode.id)  # Raises if the episode ended while its call was held.
            worker, choice = self._engine.num_workers, self._new_choice(call, index)
            try:
                async for chunk in self._sample(call, choice):
                    call.outbox.put_nowait(chunk)
                    sent = True
                scores = await self._score(call, choice)
            except WorkerDied as error:
                if sent:
                    raise Unavailable(
                        "The worker died in the middle of the answer.", code="worker_died", retry_after=5.0
                    ) from error
                if not (isinstance(error, PolicyRemoved) or self._engine.is_of_another_run(error)):
                    call.crashed_workers.add(worker)
                if len(call.crashed_workers) >= MAX_CRASHES:
                    raise ServerFailed(
                        f"{MAX_CRASHES} workers in a row crashed while serving this call; giving up.",
                        code="call_killed_workers",
                    ) from error
                return False
            recorded = await self._record(call, choice)
            call.outbox.put_nowait(replace(recorded, scores=scores))
        return True

    def _new_choice(self, call: ActiveCall, index: int) -> Choice:
        request = call.request
        which, number = divmod(index, request.choices)
        prompt, params = call.prompts[which]
        seed = choice_seed(
            request.seed, index if request.seed is None else number, self._swarm.job.seed, call.episode, call.ordinal
        )
        call_id = (index == 0 and request.id) or uuid.uuid4().hex
        parser = CompletionParser(
            call.renderer,
            request.conversations[which],
            stop=request.stop,
            id_prefix=f"call_{call_id[:12]}",
        )
        return Choice(index, call_id, prompt, replace(params, seed=seed), parser)

    async def _sample(self, call: ActiveCall, choice: Choice) -> AsyncGenerator[CallChunk]:
        """Samples into the choice's parser. Yields chunks of stable text if the request streams."""
        policy, prompt, parser = self._run.policy_id(call.role), choice.prompt.tokens, choice.parser
        with _request_errors(call.request):
            async with aclosing(self._compute.sample(policy, prompt, choice.params)) as pieces:
                async for piece in pieces:
                    parser.push(piece)
                    if parser.stopped or piece.finish_reason is not None:
                        return
                    if call.request.stream:
                        reasoning, text = parser.stable_delta()
                        if reasoning or text:
                            tokens = parser.new_tokens()
                            yield CallChunk(choice.index, text, reasoning, tokens, num_prompt_tokens=len(prompt))

    async def _score(self, call: ActiveCall, choice: Choice) -> tuple[ScoredToken, ...]:
        """Returns the scores of prompt and completion if the request asks for them."""
        num_likeliest, tokens = call.request.num_likeliest, (*choice.prompt.tokens, *choice.parser.tokens)
        if num_likeliest is None:
            return ()
        with _request_errors(call.request):
            scores = await self._compute.score(self._run.policy_id(call.role), tokens, num_likeliest)
        token_bytes = call.renderer.token_bytes
        texts = [token_bytes(token) for token in tokens]
        shown = [ScoredToken(texts[0].decode(errors="replace"), texts[0], None)]
        for utf8, token, score in zip(texts[1:], tokens[1:], scores, strict=True):
            likeliest = dict([*score.likeliest, (token, score.logprob)]) if num_likeliest else {}
            named = tuple((token_bytes(t).decode(errors="replace"), p) for t, p in likeliest.items())
            shown.append(ScoredToken(utf8.decode(errors="replace"), utf8, score.logprob, named))
        return tuple(shown)

    async def _record(self, call: ActiveCall, choice: Choice) -> CallChunk:
        """Records one choice durably and returns its last chunk. Raises `Conflict` if the episode ended."""
        prompt, parser = choice.prompt, choice.parser
        message, reasoning, text = parser.message()
        completion = tuple(parser.tokens)
        if call.repeats is None:  # Looked up this late because the repeated call may have been recorded since.
            call.repeats = self._repeated_calls(call)
        retry_of = call.repeats.pop() if call.repeats else None
        now = self._clock()
        record = Call(
            id=choice.call_id,
            episode_id=call.episode.id,
            role=call.role,
            parent=prompt.parent,
            kept=prompt.kept,
            suffix=prompt.suffix,
            completion=completion,
            logprobs=tuple(parser.logprobs),
            versions=tuple(parser.versions),
            temperature=choice.params.temperature,
            finish_reason=parser.finish_reason(message),
            response=message,
            prompt_key=prompt.key,
            created=now,
            seconds=max(0.0, now - call.arrived),
            ask=prompt.ask,
            fork="retry" if retry_of is not None else prompt.fork,
            retry_of=retry_of,
            context=context_hash(prompt.tokens, completion).digest(),
            # Support sets serve training only.
            support=pack_sets(parser.support) if call.episode.mode == "train" else b"",
            untrained=call.request.untrained,
        )
        pieces = call.renderer.pieces(completion)
        size = TOKEN_BYTES * (len(prompt.suffix) + len(completion))
        body = await offload(size, encode_call, record, prompt.pieces, pieces)
        self._swarm.record_call(record, prompt.pieces, pieces, body)
        call.recorded.append(choice.call_id)
        await self._run.commits.durable()
        self._run.tracing.annotate(
            call_id=record.id,
            policy_version=record.versions[-1] if record.versions else -1,
            completion_tokens=len(completion),
            finish_reason=record.finish_reason,
        )
        num_tokens, tokens = len(prompt.tokens), parser.new_tokens()
        return CallChunk(choice.index, text, reasoning, tokens, record, num_tokens, stop=parser.stopped_by)


def _check_limit(count: int, most: int, kind: str, name: str) -> None:
    if count > most:
        raise Later(
            f"{count - 1} calls of {kind} {name} are in progress, the maximum of server.max_calls_per_{kind}: "
            "wait for one to end.",
            retry_after=RETRY_AFTER_CALLS,
            code="too_many_calls",
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
    except (ComputeError, ConfigError) as error:
        raise ServerFailed(f"The worker failed: {error}", code="worker_failed") from error
