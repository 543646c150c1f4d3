"""The canonical request of an agent, the chunks of its answer, and the calls in progress.

`server/dialects` translates requests and chunks from and to HTTP. The functions here apply the settings of the job:
sampling defaults, overrides, seeds and side-call rules.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from agentjet.config import JobConfig, SideCallRule
from agentjet.errors import Conflict, InvalidRequest, Later
from agentjet.gateway.prompts import Prompt
from agentjet.rendering import Renderer
from agentjet.swarm import Episode, SwarmState
from agentjet.timeline import ConversationTree
from agentjet.types import ANY_ANSWER, Call, Constraint, Conversation, SamplingParams

MAX_CHOICES = 64
PIECE_TOKENS = 64
"""Tokens that the worker sends at a time if the request neither streams nor has stop strings."""


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
    constraint: Constraint = ANY_ANSWER
    choices: int = 1
    stream: bool = False
    """True if text is sent while it is sampled. Else only the last chunk of each choice is sent, and a worker that
    crashes is replaced without an error.
    """
    num_bytes: int = 0
    """Size of the HTTP body."""
    id: str = ""
    """Id of the first choice's call. Generated if empty."""
    fingerprint: str = ""
    """Digest of the HTTP request. A retry has the same one."""
    retry: bool = False
    """True if the agent's SDK marks the request as a retry, or as one that it may retry under this `fingerprint`."""
    num_likeliest: int | None = None
    """If set, the last chunk of each choice has the scores of all prompt and completion tokens, with this many of the
    likeliest alternatives per position. Evaluation episodes only.
    """
    others: tuple[Conversation, ...] = ()
    """Further conversations that are answered with the same settings. Evaluation episodes only."""
    model: str = ""
    """Model name of the HTTP request."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template. The request is refused if they would change the prompt."""
    notes: tuple[str, ...] = ()
    """Request keys without effect, and other deviations from the request. They are counted on the episode."""
    untrained: str = ""
    """Name of the rule of `job.side_calls` that excludes the call from training, or ''."""

    @property
    def asked(self) -> str:
        """Name of the parameter that the model continues, for error messages."""
        return "messages" if self.conversation.prompt is None else "prompt"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token for display. `utf8` is exact; `text` may hold a replacement character."""

    text: str
    utf8: bytes
    logprob: float


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

    The `text` of all chunks, joined, is the content of the answer. The same holds for `reasoning` and `tokens`.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tokens: tuple[TokenLogprob, ...] = ()
    call: Call | None = None
    num_prompt_tokens: int = 0
    stop: str = ""
    """The stop string that ended the choice. Last chunk only."""
    scores: tuple[ScoredToken, ...] = ()
    """Scores of prompt and completion if the request asks for them. Last chunk only."""


UNSET: Mapping[str, Any] = {"temperature": None, "top_p": 1.0, "top_k": 0, "max_tokens": None, "seed": None}
"""Neutral values of the `CallRequest` fields that `job.sampling.override` can name."""


def with_overrides(request: CallRequest, job: JobConfig, episode: Episode) -> CallRequest:
    """Returns the request without the settings that `job.sampling.override` names. Each removed setting is noted.

    Requests of evaluation episodes are returned unchanged.
    """
    if episode.mode != "train":
        return request
    changed = {name: UNSET[name] for name in job.sampling.override if getattr(request, name) != UNSET[name]}
    notes = [f"{name} overridden by job.sampling.override" for name in changed]
    return replace(request, **changed, notes=(*request.notes, *notes)) if changed else request


def sampling_params(request: CallRequest, job: JobConfig, episode: Episode) -> SamplingParams:
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
        seed=request.seed or 0,
        piece_tokens=1 if request.stream or request.stop else PIECE_TOKENS,
    )


def with_choice_seed(
    params: SamplingParams, *, explicit: int | None, job_seed: int, episode_seq: int, ordinal: int, choice: int
) -> SamplingParams:
    """Returns `params` with the seed of one choice: the request's for the first choice, else a derived one.

    Derived seeds depend on the job's seed and on the number of the episode in the run, so that a run repeats. Episode
    ids are random and not part of them.
    """
    if explicit is not None and choice == 0:
        return replace(params, seed=explicit % 2**64)  # a generator takes no negative seed
    name = f"{job_seed}/ep{episode_seq:06d}/{ordinal}" if explicit is None else f"explicit/{explicit}"
    digest = hashlib.blake2b(f"{name}/{choice}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "little") >> 1)


def apply_side_call_rules(
    rules: Sequence[SideCallRule], role: str, request: CallRequest, policies: Sequence[str]
) -> tuple[str, CallRequest]:
    """Returns the role and the request after the first matching rule of `job.side_calls`.

    A side call is a model call beside the agent's work: a title, a summary, a sub-agent. Its rule gives it a role, or
    excludes it from training. The rule is stored with the call, so that later settings do not change it.
    """
    rule = matching_rule(rules, request.conversation, request.model)
    if rule is None:
        return role, request
    notes = (*request.notes, f"side call {rule.name}")
    return with_rule(role, rule, policies), replace(request, notes=notes, untrained="" if rule.train else rule.name)


def with_rule(role: str, rule: SideCallRule, policies: Sequence[str]) -> str:
    """Returns the role of a call to which `rule` applies. The request's own role takes precedence.

    A role of a run with named policies belongs to the policy of the request: `planner/title`.
    """
    if not policies:
        return role or rule.role
    return role if "/" in role or not rule.role else f"{role}/{rule.role}"


def matching_rule(rules: Sequence[SideCallRule], conversation: Conversation, model: str) -> SideCallRule | None:
    """Returns the first rule whose conditions all hold."""
    system = "\n".join(m.content for m in takewhile(lambda m: m.role == "system", conversation.messages))
    tools = "some" if conversation.tools else "none"
    for rule in rules:
        if (
            rule.tools in ("any", tools)
            and (not rule.model or fnmatchcase(model, rule.model))
            and (not rule.system or fnmatchcase(system, rule.system))
        ):
            return rule
    return None


@dataclass(slots=True, eq=False)
class ActiveCall:
    """One request, from its arrival until its whole answer was taken. All its choices share it."""

    episode_id: str
    role: str
    request: CallRequest
    hang_up: Callable[[], None]
    """Closes the connection. Unwritten parts of the answer are lost."""
    ordinal: int
    """Number of the call in its episode, unique among answered and failed calls. Seeds depend on it."""
    outbox: asyncio.Queue[CallChunk | BaseException] = field(default_factory=asyncio.Queue)
    recorded: list[str] = field(default_factory=list)
    """Ids of the recorded calls, one per finished choice."""
    being_read: bool = False
    """True while the agent has not taken the last chunk."""
    # `CallPath._prepare` sets the rest.
    episode: Episode = field(init=False)
    params: SamplingParams = field(init=False)
    prompt: Prompt = field(init=False)
    renderer: Renderer = field(init=False)
    tool_format: str = field(init=False)
    deadline: float = field(init=False)
    repeats: list[str] | None = None
    """Calls that this one repeats, for the choices that are not recorded yet. None before the first is recorded."""
    crashed_workers: set[int] = field(default_factory=set)
    """Numbers of the workers that crashed during the call."""

    @property
    def is_sampled(self) -> bool:
        return len(self.recorded) == self.request.choices


class ActiveCalls:
    """The calls whose answers are not delivered yet. One object per gateway.

    An answer is delivered once all of it was taken: for a stream, once its last event was written to the socket. If its
    client leaves, its episode ends or the server stops before that, its recorded calls are marked as undelivered and
    train nothing. A retry supersedes the recorded call that it repeats, so that only one of two answers trains.
    """

    def __init__(self, swarm: SwarmState) -> None:
        self._swarm = swarm
        self._open: dict[str, list[ActiveCall]] = {}
        self._next_ordinal: dict[str, int] = {}
        """By live episode. Ordinals only grow, because two calls with one ordinal would share a seed."""
        self._unanswered: dict[str, Counter[tuple[str, str]]] = {}
        """Requests that ended without a recorded call: counts by role and fingerprint, by live episode.

        A retry of such a request repeats no call. Without the counts it would supersede the answer to an equal request
        (a vote). A restart loses the counts.
        """
        swarm.store.undelivered_calls = self._undelivered_calls

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    @contextmanager
    def track(
        self, episode_id: str, role: str, request: CallRequest, hang_up: Callable[[], None]
    ) -> Iterator[ActiveCall]:
        """Context of one call. Its answer is delivered unless an exception or a cancellation ends the context."""
        episode = self._swarm.episode(episode_id)
        active = self._open.setdefault(episode_id, [])
        ordinal = episode.num_calls + sum(not other.is_sampled for other in active)
        ordinal = max(ordinal, self._next_ordinal.get(episode_id, 0))
        if episode.status == "live":
            self._next_ordinal[episode_id] = ordinal + 1
        call = ActiveCall(episode_id, role, request, hang_up, ordinal)
        active.append(call)
        try:
            yield call
        except BaseException:
            self._lose(call)
            raise
        self._remove(call)

    def repeated_calls(self, call: ActiveCall, tree: ConversationTree) -> list[str]:
        """Returns the calls of `tree` that `call` repeats, at most one per choice, oldest first."""
        if not call.request.retry:
            return []
        unanswered = self._unanswered.get(call.episode_id, Counter())
        if unanswered[call.role, call.request.fingerprint]:
            unanswered[call.role, call.request.fingerprint] -= 1
            return []
        repeated = {other.retry_of for other in tree.calls}
        fingerprint = call.request.fingerprint
        same = [other.id for other in tree.calls if other.ask.fingerprint == fingerprint and other.id not in repeated]
        return same[-call.request.choices :]

    def episode_ended(self, episode_id: str) -> None:
        """Ends the episode's answers, so that no batch waits for calls that will not be trained."""
        for call in list(self._open.get(episode_id, ())):
            if not self._hang_up_on_reader(call):
                call.outbox.put_nowait(
                    Conflict(f"Episode {episode_id} ended while it was answered.", code="episode_ended_meanwhile")
                )
        self._unanswered.pop(episode_id, None)
        self._next_ordinal.pop(episode_id, None)

    def close(self) -> None:
        """Marks all answers that were not taken yet as undelivered. The journal must still be open."""
        for call in [call for active in self._open.values() for call in active]:
            if not self._hang_up_on_reader(call):
                self._lose(call)

    def _hang_up_on_reader(self, call: ActiveCall) -> bool:
        """Closes the connection if its agent has not taken the last chunk. Returns True if it was closed."""
        if call.being_read:
            self._lose(call)
            call.hang_up()
        return call.being_read

    def _lose(self, call: ActiveCall) -> None:
        if not self._remove(call) or self._swarm.episode(call.episode_id).status != "live":
            return
        tree = self._swarm.tree(call.episode_id, call.role)  # Calls whose commit failed are not in the tree.
        if known := [call_id for call_id in call.recorded if tree.knows(call_id)]:
            with suppress(Later):
                self._swarm.undelivered(call.episode_id, known)
        else:
            self._unanswered.setdefault(call.episode_id, Counter())[call.role, call.request.fingerprint] += 1

    def _remove(self, call: ActiveCall) -> bool:
        """Returns False if the call was removed before."""
        active = self._open.get(call.episode_id, [])
        if call not in active:
            return False
        active.remove(call)
        if not active:
            del self._open[call.episode_id]
        return True

    def _undelivered_calls(self, episode_id: str) -> list[str]:
        return [call_id for call in self._open.get(episode_id, ()) for call_id in call.recorded]
