"""The canonical request of an agent and the chunks of its answer; settings of the job that apply to a request.

`server/dialects` translates requests and chunks from and to HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from agentjet.config import JobConfig, SideCallRule
from agentjet.errors import InvalidRequest
from agentjet.swarm import EpisodeRecord
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
    """True if text is sent while it is sampled. Else only the last chunk of each choice is sent."""
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
        piece_tokens=1 if request.stream or request.stop else PIECE_TOKENS,
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


def apply_side_call_rules(
    rules: Sequence[SideCallRule], role: str, request: CallRequest, policies: Sequence[str]
) -> tuple[str, CallRequest]:
    """Returns the role and the request after the first rule of `job.side_calls` whose conditions all hold.

    A side call is a model call beside the agent's work: a title, a summary, a sub-agent. Its rule gives it a role, or
    excludes it from training. The rule is stored with the call, so that later settings do not change it.
    """
    messages, tools = request.conversation.messages, "some" if request.conversation.tools else "none"
    system = "\n".join(message.content for message in takewhile(lambda m: m.role == "system", messages))
    for rule in rules:
        if (
            rule.tools in ("any", tools)
            and (not rule.model or fnmatchcase(request.model, rule.model))
            and (not rule.system or fnmatchcase(system, rule.system))
        ):
            notes = (*request.notes, f"side call {rule.name}")
            untrained = "" if rule.train else rule.name
            return with_rule(role, rule, policies), replace(request, notes=notes, untrained=untrained)
    return role, request


def with_rule(role: str, rule: SideCallRule, policies: Sequence[str]) -> str:
    """Returns the role of a call to which `rule` applies. The request's own role takes precedence.

    A role of a run with named policies belongs to the policy of the request: `planner/title`.
    """
    if not policies:
        return role or rule.role
    return role if "/" in role or not rule.role else f"{role}/{rule.role}"
