"""`Calls`: the model calls of a run. `ActiveCall` is one call, from its request to its delivered answer.

A request becomes prompts, enters the gate, is sampled, journalled and answered in chunks. `dialects` translates
requests and chunks from and to HTTP.

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
import hashlib
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from agentjet.compute.protocol import Sampler
from agentjet.config import JobConfig, SideCallRule
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
    RequestError,
    ServerFailed,
    Unavailable,
    WorkerDied,
)
from agentjet.front.concurrency import Gate, GroupCommit, StreamPace, offload
from agentjet.front.prompts import AnswerDelta, CompletionParser, Prompt, TokenLogprob, num_characters, prepare_prompt
from agentjet.front.tracing import Tracing, present_episode, present_run
from agentjet.rendering import Renderer
from agentjet.rendering.grammar import GrammarTrials
from agentjet.swarm import EpisodeRecord
from agentjet.swarm.conversations import Conversations
from agentjet.swarm.journal import encode_call, pack_sets
from agentjet.timeline import ConversationTree
from agentjet.timeline.routes import joined
from agentjet.timeline.tree import context_hash
from agentjet.types import ANY_ANSWER, Call, Constraint, Conversation, Message, PolicyId, SamplingParams, policy_of

if TYPE_CHECKING:  # A run has calls.
    from agentjet.front.run import FrontPolicies

RESAMPLE_SECONDS = 0.05
"""Wait before a call whose worker crashed enters the gate again. The gate is held by then."""
MAX_CRASHES = 2
"""Workers that may crash during one call before it is given up."""
RETRY_AFTER_CALLS = 1.0
TOKEN_BYTES = 4
"""Bytes of a token's text, about: a call of 16,000 new tokens is encoded in a thread."""
MAX_CHOICES = 64
PIECE_TOKENS = 64
"""Most tokens that a sampler sends at a time."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One request of an agent: `choices` completions of one conversation. None means the job's default."""

    conversation: Conversation
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the end tokens of the model."""
    constraint: Constraint = ANY_ANSWER
    choices: int = 1
    stream: bool = False
    """True if text is sent while it is sampled. Else only the last chunk of each choice is sent."""
    shows_tokens: bool = False
    """True if chunks have their tokens."""
    num_bytes: int = 0
    """Size of the HTTP body."""
    id: str = ""
    """Id of the first choice's call. Generated if empty."""
    fingerprint: str = ""
    """Digest of the HTTP request. A retry has the same one."""
    retry: bool = False
    """True if the agent's SDK marks the request as a retry, or as one that it may retry."""
    num_likeliest: int | None = None
    """If set, last chunks have the scores of all prompt and completion tokens, with this many alternatives each."""
    others: tuple[Conversation, ...] = ()
    """Further conversations that are answered with the same settings. Evaluation episodes only."""
    model: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template. The request is refused if they would change the prompt."""
    notes: tuple[str, ...] = ()
    """Request keys without effect, and other deviations from the request. They are counted on the episode."""
    untrained: str = ""
    """Name of the rule of `job.side_calls` that excludes the call from training, or ''."""

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        return (self.conversation, *self.others)

    @property
    def num_answers(self) -> int:
        return self.choices * len(self.conversations)

    @property
    def asked(self) -> str:
        """Name of the parameter that the model continues, for error messages."""
        raw = "token_ids" if self.conversation.is_exact else "prompt"
        return "messages" if self.conversation.prompt is None else raw


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt or completion token for display. The first prompt token has no log-probability."""

    text: str
    utf8: bytes
    logprob: float | None
    likeliest: tuple[tuple[str, float], ...] = ()
    """Texts and log-probabilities of the likeliest tokens at this position, and of this token."""


@dataclass(frozen=True, slots=True)
class CallChunk:
    """A piece of one choice. The last chunk of a choice has its `call`.

    The sum of all deltas is the answer. The same holds for `tokens`, if the request asks for them.
    """

    index: int
    delta: AnswerDelta = AnswerDelta()  # noqa: RUF009
    tokens: tuple[TokenLogprob, ...] = ()
    call: Call | None = None
    num_prompt_tokens: int = 0
    stop: str = ""
    """The stop string that ended the choice. Last chunk only."""
    scores: tuple[ScoredToken, ...] = ()
    """Scores of prompt and completion if the request asks for them. Last chunk only."""


# ---- the calls of a run ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class EpisodeCalls:
    """The calls of a live episode."""

    open: list[ActiveCall] = field(default_factory=list)
    """Calls whose answers are not delivered yet."""
    undelivered: list[str] = field(default_factory=list)
    """Recorded calls whose answers were lost. The end of the episode marks them again: the disk may have refused it."""
    next_ordinal: int = 0
    """Ordinals only grow, because two calls with one ordinal would share a seed."""
    unanswered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Choices of requests that ended before they were recorded, by role and fingerprint. A retry of one repeats no
    call, and must not supersede the answer to an equal request (a vote).
    """


@dataclass(eq=False)
class Calls:
    """Answers the calls of a run's live episodes."""

    policies: FrontPolicies
    commits: GroupCommit[Any]
    gate: Gate
    tracing: Tracing
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.pace = StreamPace()
        self.began = self.clock()
        self.swarm: Conversations = self.commits.swarm
        self.grammars = GrammarTrials()
        self._episodes: dict[str, EpisodeCalls] = {}
        self._num_open = 0
        self._reading = asyncio.Lock()

    def of(self, episode_id: str) -> EpisodeCalls:
        """Returns the calls of an episode; new ones, which are not kept, if it has none."""
        return self._episodes.get(episode_id) or EpisodeCalls()

    @property
    def active(self) -> list[ActiveCall]:
        """The calls of live episodes whose answers are not delivered yet."""
        return [call for calls in self._episodes.values() for call in calls.open]

    @property
    def num_active(self) -> int:
        return len(self.active)

    async def read(self, episode_id: str) -> None:
        """Reads the calls of an episode that was live before a restart, in a thread: they may have megabytes. Await it
        before `lookup`, `answer` and `count_tokens`.
        """
        if self.swarm.is_unread(episode_id):
            async with self._reading:
                await self.commits.durable()  # The thread reads committed calls only.
                if self.swarm.is_unread(episode_id):
                    trees = await asyncio.to_thread(self.swarm.read_trees, episode_id)
                    self.swarm.keep_trees(episode_id, trees)

    def lookup(self, episode_id: str, role: str, call_id: str) -> tuple[Conversation, Message] | None:
        """Returns conversation and answer of a call of a live episode. None if there is none, or of a raw prompt."""
        rules = self.swarm.job.side_calls
        roles = dict.fromkeys([role, *(with_rule(role, rule, self.policies.names) for rule in rules)])
        trees = (self.swarm.tree(episode_id, name) for name in roles)
        exchange = next((tree.exchange(call_id) for tree in trees if tree.knows(call_id)), None)
        return None if exchange is None or exchange[0].messages[0].role == "prompt" else exchange

    async def answer(self, episode_id: str, role: str, request: CallRequest) -> AsyncGenerator[CallChunk]:
        """Yields the chunks of an answer. Asking for one more chunk after the last marks it as delivered.

        Closing the iterator earlier stops sampling, and recorded calls of the answer are not trained. Errors of the
        request are raised before the first chunk. Later errors are `Later`, or `Conflict` if the episode ended.
        """
        present_run.set(self.policies.run)
        present_episode.set(episode_id)
        role, request = self._apply_rules(role, request)
        with self._track(self.swarm.heartbeat(episode_id), role, request) as call:
            with self.swarm.calling(episode_id):
                await call.prepare()
            num_left = request.num_answers
            tasks = [asyncio.create_task(call.answer(index)) for index in range(num_left)]
            try:
                while num_left:
                    item = await call.outbox.get()
                    if isinstance(item, BaseException):
                        raise item
                    num_left -= item.call is not None
                    yield item
                    self.swarm.heartbeat(episode_id)  # Raises if the episode ended while this was read.
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def count_tokens(self, episode_id: str, role: str, request: CallRequest) -> int:
        """Returns the prompt length of `request` in tokens. Nothing is sampled or recorded. Raises like `answer`."""
        role, request = self._apply_rules(role, request)
        with self.swarm.calling(episode_id):
            renderer = await self.renderer(role)
            return len((await self.prompt(renderer, episode_id, role, request, request.conversation)).tokens)

    async def refused(self, episode_id: str, error: RequestError) -> None:
        """Counts a refused request on its episode, if that is live here and the journal accepts writes."""
        param = re.sub(r"\.\d+", "[]", error.param or "")
        with suppress(RequestError):
            self.swarm.note(episode_id, refused=[f"{error.code}: {param}" if param else error.code])
            await self.commits.durable()

    def undelivered(self, episode_id: str) -> list[str]:
        """Returns the recorded calls of an episode that did not reach its agent, or are still on their way."""
        calls = self.of(episode_id)
        return [*calls.undelivered, *(call_id for call in calls.open for call_id in call.recorded)]

    def episode_ended(self, episode_id: str) -> None:
        """Ends the episode's answers: they will not be trained."""
        ended = self._episodes.pop(episode_id, EpisodeCalls())
        for call in ended.open:
            call.outbox.put_nowait(
                Conflict(f"Episode {episode_id} ended while it was answered.", code="episode_ended_meanwhile")
            )

    async def close(self) -> None:
        """Marks all answers that were not taken yet as undelivered. The journal must still be open."""
        for call in self.active:
            self._lose(call)
        self._episodes.clear()
        await self.grammars.close()

    async def renderer(self, role: str) -> Renderer:
        """Returns the renderer of a role's policy. Waits until the policies were up once."""
        if not self.policies.renderers:
            async with self.gate.enter(self.policies.config.server.call_timeout):
                pass
        return self.policies.renderers[policy_of(role, self.policies.names)]

    async def prompt(
        self, renderer: Renderer, episode_id: str, role: str, request: CallRequest, conversation: Conversation
    ) -> Prompt:
        tree, history = self.swarm.tree(episode_id, role), self.swarm.job.history
        size = request.num_bytes + num_characters(conversation)
        return await offload(
            size, prepare_prompt, renderer, tree, conversation, history, fingerprint=request.fingerprint
        )

    @contextmanager
    def _track(self, episode: EpisodeRecord, role: str, request: CallRequest) -> Iterator[ActiveCall]:
        """Context of one call. Its answer is delivered unless an exception or a cancellation ends the context.

        Raises `Later` if the episode or the client has too many calls, held ones included.
        """
        calls = self._episodes.setdefault(episode.id, EpisodeCalls())
        ordinal = max(calls.next_ordinal, episode.num_calls)
        calls.next_ordinal = ordinal + 1
        call = ActiveCall(self, episode, role, request, ordinal)
        calls.open.append(call)
        self._num_open += 1
        try:
            self._check_limits(call)
            yield call
        except BaseException:
            self._lose(call)
            raise
        finally:
            calls.open.remove(call)
            self._num_open -= 1

    def _check_limits(self, call: ActiveCall) -> None:
        server, client = self.policies.config.server, call.episode.client_id
        _check_limit(len(self.of(call.episode.id).open), server.max_calls_per_episode, "episode", call.episode.id)
        if self._num_open > server.max_calls_per_client:  # Counting by client takes longer.
            num = sum(other.episode.client_id == client for other in self.active)
            _check_limit(num, server.max_calls_per_client, "client", client)

    def _lose(self, call: ActiveCall) -> None:
        """Marks an answer as undelivered. The end of an episode and `close` have done it for their calls."""
        calls = self._episodes.get(call.episode.id)
        if calls is None:
            return
        if call.recorded:
            calls.undelivered += call.recorded
            with suppress(RequestError):  # The episode may be ending, and its end may fail.
                self.swarm.undelivered(call.episode.id, call.recorded)
        # The loss of a retry adds none: the next retry repeats the same calls.
        if missing := min(call.num_unanswered, call.request.num_answers - len(call.recorded)):
            calls.unanswered[call.role, call.request.fingerprint] += missing

    def _apply_rules(self, role: str, request: CallRequest) -> tuple[str, CallRequest]:
        """Returns the role and the request after the first rule of `job.side_calls` whose conditions all hold.

        A side call is a model call beside the agent's work: a title, a summary, a sub-agent. Its rule gives it a role,
        or excludes it from training. The rule is stored with the call, so that later settings do not change it.
        """
        messages, tools = request.conversation.messages, "some" if request.conversation.tools else "none"
        system = "\n".join(message.content for message in takewhile(lambda m: m.role == "system", messages))
        for rule in self.swarm.job.side_calls:
            if (
                rule.tools in ("any", tools)
                and (not rule.model or fnmatchcase(request.model, rule.model))
                and (not rule.system or fnmatchcase(system, rule.system))
            ):
                notes = (*request.notes, f"side call {rule.name}")
                request = replace(request, notes=notes, untrained="" if rule.train else rule.name)
                return with_rule(role, rule, self.policies.names), request
        return role, request


# ---- one call --------------------------------------------------------------------------------------------------------


class ActiveCall:
    """One request, from its arrival until its whole answer was taken."""

    def __init__(self, calls: Calls, episode: EpisodeRecord, role: str, request: CallRequest, ordinal: int) -> None:
        """`ordinal` is the number of the call in its episode, unique among answered and failed calls. Seeds depend on
        it.
        """
        self.episode = episode
        self.role = role
        self.request = request
        self.outbox: asyncio.Queue[CallChunk | BaseException] = asyncio.Queue()
        """Chunks that the agent has not taken, or the error that ends the answer."""
        self.recorded: list[str] = []
        """Ids of the recorded calls, one per finished choice."""
        self.num_unanswered = 0 if request.retry else request.num_answers
        """Choices without which a request stays unanswered: all of a first try, and those that a retry is to answer."""
        self._calls = calls
        self._swarm = calls.swarm
        self._ordinal = ordinal
        self.policy = PolicyId(calls.policies.run, policy_of(role, calls.policies.names))
        self._deadline = asyncio.get_running_loop().time() + calls.policies.config.server.call_timeout
        """Time of the event loop until which it may be held."""
        self.arrived = calls.clock()
        self._repeats: list[str] | None = None
        """Calls that the choices not recorded yet repeat. None before the first is recorded."""
        self._crashed_workers: set[int] = set()
        """Numbers of the workers that crashed during the call."""
        self.prompts: list[tuple[Prompt, SamplingParams]] = []
        """One per conversation of the request, after `prepare`."""

    @property
    def _tree(self) -> ConversationTree:
        return self._swarm.tree(self.episode.id, self.role)

    async def prepare(self) -> None:
        """Checks the request and prepares its prompts, so that every error shows before the call is held."""
        episode, job = self.episode, self._swarm.job
        self._check_turns()
        self.request = request = with_overrides(self.request, job, episode)
        params = sampling_params(request, job, episode)
        self.renderer = renderer = await self._calls.renderer(self.role)
        if request.template_kwargs and not renderer.ignores(request.conversation, request.template_kwargs):
            raise InvalidRequest(
                f"chat_template_kwargs: {dict(request.template_kwargs)!r:.200} would change the prompt that this "
                "model's template writes: leave it out.",
                code="unsupported_parameter",
                param="chat_template_kwargs",
            )
        renderer.check_ids(request.stop_ids, "sampling_params.stop_token_ids")
        pace = self._calls.pace
        if request.stream:
            params = replace(params, stream_seconds=pace.seconds())
        elif request.stop or not set(request.stop_ids) <= set(renderer.model.end_tokens):
            # The sampler ends with end tokens by itself. What it samples behind the others is of no use.
            params = replace(params, stream_seconds=pace.FASTEST)
        is_new_role = not self._tree.calls and episode.num_calls
        for conversation in request.conversations:
            prompt = await self._calls.prompt(renderer, episode.id, self.role, request, conversation)
            room = renderer.context_length - len(prompt.tokens)
            if room < 1:
                raise ContextOverflow(request.asked, len(prompt.tokens), renderer.context_length)
            limited = replace(params, max_tokens=min(params.max_tokens, room))
            if request.constraint != ANY_ANSWER:
                write = self._calls.grammars.write
                grammar = await write(episode.id, request.constraint, conversation.tools, renderer.style)
                limited = replace(limited, grammar=grammar)
            self.prompts.append((replace(prompt, fork="role") if is_new_role else prompt, limited))
        self._swarm.note(episode.id, noted=request.notes)

    def _check_turns(self) -> None:
        """Raises `InvalidRequest` (`turn_limit`) for a turn beyond those of the episode.

        A turn is an answer that is trained, or that is not given yet. A retry is not a turn.
        """
        most = self.episode.max_turns
        if not most or self.request.untrained:
            return
        known = [one for one in self._tree.calls if not one.untrained]
        orphaned = self._swarm.journal.orphans(self.episode.id)
        turns, asked = sum(one.id not in orphaned for one in known), {one.ask.fingerprint for one in known}

        def is_retry(request: CallRequest) -> bool:
            return request.retry and request.fingerprint in asked

        for other in self._calls.of(self.episode.id).open:
            if other is self or other.role != self.role or other.request.untrained or is_retry(other.request):
                continue
            turns += other.request.num_answers - len(other.recorded)
            asked.add(other.request.fingerprint)
        if turns >= most and not is_retry(self.request):
            raise InvalidRequest(
                f"The episode has its {most} turns, the maximum of job.max_turns or of the recipe "
                f"{self._swarm.job.recipe.name!r}: end the agent's loop after episode.max_turns answers "
                "(AGENTJET_MAX_TURNS), and finish with the reward.",
                code="turn_limit",
            )

    async def answer(self, index: int) -> None:
        """Samples and records one choice. Puts its chunks, or the error, into the outbox."""
        episode_id = self.episode.id
        try:
            span = self._calls.tracing.span("call", episode_id=episode_id, role=self.role)
            with self._swarm.calling(episode_id), span:
                while not await self._try_choice(index):
                    await asyncio.sleep(RESAMPLE_SECONDS)
        except Exception as error:  # `Calls.answer` raises it in the caller's task.
            self.outbox.put_nowait(error)

    async def _try_choice(self, index: int) -> bool:
        """Returns False if the worker crashed before a part of the answer was sent."""
        sent, policies = False, self._calls.policies
        async with self._calls.gate.enter(max(0.0, self._deadline - asyncio.get_running_loop().time())):
            self._swarm.heartbeat(self.episode.id)  # Raises if the episode ended while its call was held.
            worker, completion = policies.num_starts, ActiveChoice(self, index)
            try:
                async for chunk in completion.sample(policies.compute):
                    self.outbox.put_nowait(chunk)
                    sent = True
                scores = await completion.score(policies.compute)
            except WorkerDied as error:
                if sent:
                    text = "The worker died in the middle of the answer."
                    died = Unavailable(text, code="worker_died", retry_after=5.0)
                    raise (self._calls.gate.refusal() or died) from error  # A stop ends workers, too.
                if not (isinstance(error, PolicyRemoved) or policies.is_of_another_run(error)):
                    self._crashed_workers.add(worker)
                if len(self._crashed_workers) >= MAX_CRASHES:
                    raise ServerFailed(
                        f"{MAX_CRASHES} workers in a row crashed while serving this call; giving up.",
                        code="call_killed_workers",
                    ) from error
                return False
            self.outbox.put_nowait(await completion.record(self._calls, scores))
        return True

    def seed(self, choice: int) -> int:
        return choice_seed(self.request.seed, choice, self._swarm.job.seed, self.episode, self._ordinal)

    def next_repeated(self) -> str | None:
        """Returns the recorded call that the next recorded choice repeats, or None."""
        if self._repeats is None:  # Looked up this late because the repeated call may have been recorded since.
            self._repeats = self._repeated_calls()
        return self._repeats.pop() if self._repeats else None

    def _repeated_calls(self) -> list[str]:
        """Returns the recorded calls that this one repeats, at most one per choice, oldest first. Choices that answer
        unanswered ones repeat none.
        """
        if not self.request.retry:
            return []
        fingerprint, calls = self.request.fingerprint, self._calls.of(self.episode.id)
        num_left = self.request.num_answers
        if (num := min(calls.unanswered[self.role, fingerprint], num_left)) > 0:
            calls.unanswered[self.role, fingerprint] -= num
            self.num_unanswered = num
            num_left -= num
        repeated = {other.retry_of for other in self._tree.calls}
        same = [one.id for one in self._tree.calls if one.ask.fingerprint == fingerprint and one.id not in repeated]
        return same[max(0, len(same) - num_left) :]


class ActiveChoice:
    """One choice of a call, on its way from one worker."""

    def __init__(self, call: ActiveCall, index: int) -> None:
        request, (which, number) = call.request, divmod(index, call.request.choices)
        self._call = call
        self._index = index
        self._id = (index == 0 and request.id) or uuid.uuid4().hex
        self._prompt, params = call.prompts[which]
        routes = call.renderer.model.routes if call.episode.mode == "train" else None
        self._num_experts = 0 if routes is None else routes.experts
        self._params = replace(
            params,
            seed=call.seed(index if request.seed is None else number),
            # The call before did not compute its last token.
            routes_from=None if routes is None else max(0, self._prompt.kept - 1),
        )
        self._parser = CompletionParser(
            call.renderer,
            request.conversations[which],
            stop=request.stop,
            stop_ids=request.stop_ids,
            id_prefix=f"call_{self._id[:12]}",
        )

    async def sample(self, compute: Sampler) -> AsyncGenerator[CallChunk]:
        """Samples into the parser. Yields chunks of stable parts if the request streams."""
        call, prompt, parser = self._call, self._prompt.tokens, self._parser
        with _request_errors(call.request):
            async with aclosing(compute.sample(call.policy, prompt, self._params)) as pieces:
                async for piece in pieces:
                    parser.push(piece)
                    if parser.stopped or piece.finish_reason is not None:
                        return
                    if call.request.stream:
                        delta = parser.delta()
                        if delta.parts:
                            yield CallChunk(self._index, delta, self._new_tokens(), num_prompt_tokens=len(prompt))

    def _new_tokens(self) -> tuple[TokenLogprob, ...]:
        return self._parser.new_tokens() if self._call.request.shows_tokens else ()

    async def score(self, compute: Sampler) -> tuple[ScoredToken, ...]:
        """Returns the scores of prompt and completion if the request asks for them."""
        num_likeliest, tokens = self._call.request.num_likeliest, (*self._prompt.tokens, *self._parser.tokens)
        if num_likeliest is None:
            return ()
        with _request_errors(self._call.request):
            scores = await compute.score(self._call.policy, tokens, num_likeliest)
        token_bytes = self._call.renderer.token_bytes
        texts = [token_bytes(token) for token in tokens]
        shown = [ScoredToken(texts[0].decode(errors="replace"), texts[0], None)]
        for utf8, token, score in zip(texts[1:], tokens[1:], scores, strict=True):
            likeliest = dict([*score.likeliest, (token, score.logprob)]) if num_likeliest else {}
            named = tuple((token_bytes(t).decode(errors="replace"), p) for t, p in likeliest.items())
            shown.append(ScoredToken(utf8.decode(errors="replace"), utf8, score.logprob, named))
        return tuple(shown)

    async def record(self, calls: Calls, scores: tuple[ScoredToken, ...]) -> CallChunk:
        """Records the completion durably and returns its last chunk. Raises `Conflict` if the episode ended."""
        call, prompt, parser = self._call, self._prompt, self._parser
        message, delta = parser.message()
        completion = tuple(parser.tokens)
        retry_of = call.next_repeated()
        now = calls.clock()
        record = Call(
            id=self._id,
            episode_id=call.episode.id,
            role=call.role,
            parent=prompt.parent,
            kept=prompt.kept,
            suffix=prompt.suffix,
            completion=completion,
            logprobs=tuple(parser.logprobs),
            versions=tuple(parser.versions),
            temperature=self._params.temperature,
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
        num_computed = len(prompt.tokens) + len(completion) - 1
        routes = b""
        if parser.routes:
            routes = await offload(sum(map(len, parser.routes)), joined, parser.routes, num_computed, self._num_experts)
        calls.swarm.record_call(record, prompt.pieces, pieces, body, routes)
        call.recorded.append(record.id)
        calls.swarm.restores.append(lambda: call.recorded.remove(record.id))
        await calls.commits.durable()
        calls.tracing.annotate(
            call_id=record.id,
            policy_version=record.versions[-1] if record.versions else -1,
            completion_tokens=len(completion),
            finish_reason=record.finish_reason,
        )
        num_tokens, tokens = len(prompt.tokens), self._new_tokens()
        return CallChunk(self._index, delta, tokens, record, num_tokens, parser.stopped_by, scores)


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


# ---- settings of the job that apply to a request ---------------------------------------------------------------------

UNSET: Mapping[str, Any] = {"temperature": None, "top_p": 1.0, "top_k": 0, "max_tokens": None, "seed": None}
"""Neutral values of the `CallRequest` fields that `job.sampling.override` can name."""


def with_overrides(request: CallRequest, job: JobConfig, episode: EpisodeRecord) -> CallRequest:
    """Returns a training request without the settings that `job.sampling.override` names, and without a temperature if
    the recipe has chosen one. Each one is noted.
    """
    if episode.mode != "train":
        return request
    changed = {name: UNSET[name] for name in job.sampling.override if getattr(request, name) != UNSET[name]}
    notes = [f"{name} overridden by job.sampling.override" for name in changed]
    if episode.temperature is not None and "temperature" not in changed and request.temperature is not None:
        changed["temperature"] = None
        notes.append(f"temperature overridden by the recipe {job.recipe.name}")
    return replace(request, **changed, notes=(*request.notes, *notes)) if changed else request


def sampling_params(request: CallRequest, job: JobConfig, episode: EpisodeRecord) -> SamplingParams:
    """Returns the sampling parameters, not yet limited to the context, without grammar and without a choice's seed.

    Raises `InvalidRequest` for settings that a training episode cannot use. Greedy tokens are one of them: they are not
    drawn from a distribution that the learner could recompute.
    """
    asked = request.temperature if episode.temperature is None else episode.temperature
    temperature = job.temperature if asked is None else asked
    if not 1 <= request.choices <= MAX_CHOICES:
        raise InvalidRequest(f"n = {request.choices} is outside 1 to {MAX_CHOICES}.", param="n")
    if episode.mode == "train" and (request.num_likeliest is not None or request.others):
        raise InvalidRequest(
            "echo, logprobs above 0 and several prompts in one request need an evaluation episode: begin the episode "
            "with mode 'eval'.",
            code="unsupported_in_training",
            param="prompt" if request.others else "logprobs" if request.num_likeliest else "echo",
        )
    if episode.mode == "train" and temperature == 0:
        raise InvalidRequest(
            "temperature = 0 is not possible in a training episode, because the learner cannot recompute the "
            "log-probabilities of greedy tokens: use a positive one, begin the episode with mode 'eval', or set "
            'job.sampling.override = ["temperature"] on the server, which then uses job.temperature.',
            code="unsupported_in_training",
            param="temperature",
        )
    return SamplingParams(
        max_tokens=request.max_tokens or job.max_tokens,
        temperature=temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        is_reproducible=request.seed is not None or episode.seed is not None,
        piece_tokens=PIECE_TOKENS,
    )


def choice_seed(explicit: int | None, choice: int, job_seed: int, episode: EpisodeRecord, ordinal: int) -> int:
    """Returns the seed of one choice: the request's for the first choice, else a derived one.

    Derived seeds depend on the job's seed, on the seed of the episode or its number in the run, and on the number of
    the call, so that a run repeats. Episode ids are random and not part of them.
    """
    if explicit is not None and choice == 0:
        return explicit % 2**64  # A generator takes no negative seed.
    of_episode = f"ep{episode.seq:06d}" if episode.seed is None else f"seed{episode.seed}"
    name = f"{job_seed}/{of_episode}/{ordinal}" if explicit is None else f"explicit/{explicit}"
    digest = hashlib.blake2b(f"{name}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def with_rule(role: str, rule: SideCallRule, policies: Sequence[str]) -> str:
    """Returns the role of a call to which `rule` applies. The request's own role takes precedence.

    A role of a run with named policies belongs to the policy of the request: `planner/title`.
    """
    if not policies:
        return role or rule.role
    return role if "/" in role or not rule.role else f"{role}/{rule.role}"
