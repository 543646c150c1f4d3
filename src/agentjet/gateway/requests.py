"""What a call asks for and what comes back, in no dialect. `server/dialects` translates to and from HTTP bodies.

The rules of `job.side_calls`: calls beside the agent's work get a role of their own, or are not trained.

A product asks its model for titles, summaries and sub-agents beside the work that the reward is about. The rule that a
call followed is written down with the call, so that later settings change nothing about it.
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
from agentjet.swarm import Episode
from agentjet.types import ANY_ANSWER, Call, Constraint, Conversation, SamplingParams

MAX_CHOICES = 64
PIECE_TOKENS = 64
"""Tokens the worker sends at a time where nobody reads along and no stop string waits for them."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One request of an agent: `choices` completions of one conversation. None means: as the job says."""

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
    """Text is wanted as it is sampled.

    Without it only the last chunk of each choice comes, so a dead worker is never noticed.
    """
    num_bytes: int = 0
    """Size of the request as it was sent."""
    id: str = ""
    """Of the call that its first choice becomes; without it one is made up."""
    fingerprint: str = ""
    """Names the request as it was sent: sent again, it has the same one."""
    retry: bool = False
    """The agent's SDK says that it sends this request again, or may do so under the same `fingerprint`."""

    num_likeliest: int | None = None
    """With a number, the last chunk of each choice has the scores of the prompt's and the completion's tokens, with so
    many of the likeliest tokens in each place. In evaluation episodes only."""
    others: tuple[Conversation, ...] = ()
    """Further conversations, each to be answered like the first. In evaluation episodes only."""
    model: str = ""
    """The name by which the agent asked for the model."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template. The request is refused unless they change nothing in the prompt."""
    notes: tuple[str, ...] = ()
    """Request keys that have no effect, and other deviations from the request: counted on the episode."""

    untrained: str = ""
    """Name of the rule of `job.side_calls` that excludes the call from training; empty for none."""

    @property
    def asked(self) -> str:
        """What the model is asked to continue, by the name that errors give it."""
        return "messages" if self.conversation.prompt is None else "prompt"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token for people: its text may be a piece of a character, `utf8` is exact."""

    text: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a prompt or a completion for people. The first one of a prompt has no log-probability."""

    text: str
    utf8: bytes
    logprob: float | None
    likeliest: tuple[tuple[str, float], ...] = ()
    """The text and the log-probability of the likeliest tokens in its place, this one included."""


@dataclass(frozen=True, slots=True)
class CallChunk:
    """A piece of one choice. The chunks' `text` joined is the answer's content, their `reasoning` its reasoning;
    the last one has `call`.

    `tokens` are the sampled tokens this piece adds; together those of the whole completion.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tokens: tuple[TokenLogprob, ...] = ()
    call: Call | None = None
    num_prompt_tokens: int = 0
    stop: str = ""
    """The stop string that ended the choice, on its last chunk."""
    scores: tuple[ScoredToken, ...] = ()
    """Of the prompt and the completion, on the last chunk, where the request asks for them."""


def with_overrides(request: CallRequest, job: JobConfig, episode: Episode) -> CallRequest:
    """`request` with the settings of `job.sampling.override` as the job has them; each change is noted.

    Evaluation episodes are sampled as they ask.
    """
    if episode.mode != "train":
        return request
    changed: dict[str, Any] = {}
    for name in job.sampling.override:
        neutral = UNSET[name]
        if getattr(request, name) != neutral:
            changed[name] = neutral
    notes = [f"{name} with_overrides by job.sampling.override" for name in changed]
    return replace(request, **changed, notes=(*request.notes, *notes)) if changed else request


UNSET: Mapping[str, Any] = {"temperature": None, "top_p": 1.0, "top_k": 0, "max_tokens": None, "seed": None}
"""The values of a `CallRequest` that ask for nothing, for each setting that can be with_overrides."""


def sampling_params(request: CallRequest, job: JobConfig, episode: Episode) -> SamplingParams:
    """What the worker is asked for, before `max_tokens` is cut to the context, the grammar is written and the seed is
    given to each choice.

    Raises `InvalidRequest` for what a training episode cannot use: greedy tokens were not sampled from anything.
    """
    asked = request.temperature if episode.temperature is None else episode.temperature
    temperature = job.temperature if asked is None else asked
    if not 1 <= request.choices <= MAX_CHOICES:
        raise InvalidRequest(f"n = {request.choices} is outside 1 to {MAX_CHOICES}.", param="n")
    if episode.mode == "train" and (request.num_likeliest is not None or request.others):
        raise InvalidRequest(
            "echo, logprobs above 0 and several prompts in one request are for evaluation: begin the episode with mode "
            "'eval'.",
            code="unsupported_in_training",
            param="prompt" if request.others else "logprobs" if request.num_likeliest else "echo",
        )
    if episode.mode == "train" and temperature == 0:
        raise InvalidRequest(
            "temperature = 0 is not possible in a training episode, because the learner could not recompute what was "
            "sampled: use a positive one, begin the episode with mode 'eval', or set job.sampling.override = "
            '["temperature"] on the server, which then uses job.temperature.',
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
    """`params` with the seed of one choice: the caller's own for the first, else drawn from what names the call, so
    that a run repeats. Episodes are named by their number in the run, because their ids are random.
    """
    if explicit is not None and choice == 0:
        return replace(params, seed=explicit % 2**64)  # a generator takes no negative seed
    name = f"{job_seed}/ep{episode_seq:06d}/{ordinal}" if explicit is None else f"explicit/{explicit}"
    digest = hashlib.blake2b(f"{name}/{choice}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "little") >> 1)


def apply_side_call_rules(rules: Sequence[SideCallRule], role: str, request: CallRequest) -> tuple[str, CallRequest]:
    """The role that a request speaks as, and the request with what its rule says."""
    rule = matching_rule(rules, request.conversation, request.model)
    if rule is None:
        return role, request
    notes = (*request.notes, f"side call {rule.name}")
    return role or rule.role, replace(request, notes=notes, untrained="" if rule.train else rule.name)


def matching_rule(rules: Sequence[SideCallRule], conversation: Conversation, model: str) -> SideCallRule | None:
    """The first rule that a call meets all conditions of."""
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
