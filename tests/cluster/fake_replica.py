"""A replica without a model: a real process over real TCP that speaks the protocol of `compute.vllm.replica`.

Its tokens are a function of the context, the seed and the version, and its log-probabilities of the context, the token
and the version. So `mistakes` finds every token with a wrong context, seed or version.

As a program it serves the gateway that its environment names: `python tests/cluster/fake_replica.py`. `Hooks` in its
environment make it fail: at the nth passage of a point of its code it dies, hangs, or raises.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Self

import numpy as np

from agentjet.compute.weights import Publication
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig, SamplerLimits
from agentjet.errors import AgentJetError, ComputeError, GrammarError, OutOfCache
from agentjet.processes.rpc import LEAVE, Answer, Link, ProcessRequest, admit_fronts
from agentjet.timeline.forest import encode_set
from agentjet.timeline.routes import Routes, unpack
from agentjet.types import FinishReason, ModelInfo, PolicyId, RouteShape, Sampled, SamplingParams, TokenScore

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, str(Path(__file__)))
FIRST_TOKEN, VOCABULARY = 3, 259
"""Tokens drawn: the 256 bytes of the tokenizer of `tests.tiny`."""
Point = Literal[
    "load",
    "adopt",
    "paused",
    "adopted",
    "resumed",
    "suspend",
    "suspended",
    "sample",
    "token",
    "sent",
    "score",
    "cancel",
    "leave",
]
"""Places in the code. `adopt`: the request arrived. `paused`: nothing is sampled, the old version is loaded. `adopted`:
the new version is loaded, nothing is answered. `resumed`: the answer was sent. `suspended`: no weights are loaded,
nothing is answered. `token`: sampled, not sent. `leave`: the connection of a front ended."""


@dataclass(frozen=True)
class Hooks:
    """The faults of a process. A fault `POINT:N` comes at the Nth passage of the point; `POINT` is the first one."""

    VARIABLE = "AGENTJET_FAKE_REPLICA"

    die: str = ""
    """SIGKILL."""
    hang: str = ""
    """Stop at the point for ever. The connection stays open."""
    fail: str = ""
    """Answer the request with a `ComputeError` (`load`, `adopt`, `score`, `sample`)."""
    fail_from: str = ""
    fail_to: str = ""
    """First and last passage of a point (`POINT:N`) at which it fails so."""
    poison: int = -1
    """A token that kills the process when it is part of a prompt."""
    lies: tuple[int, ...] = ()
    """Versions that it claims and does not load: its probe and its tokens are those of the version before."""
    routes: str = ""
    """A fault of all routes that it reports: `stale` version, `wide` experts, or a `repeated` token."""
    step_seconds: float = 0.0
    """Time of a step, which samples one token of every running completion."""
    adopt_seconds: float = 0.0
    """Time between `paused` and `adopted`."""
    piece_seconds: float = 1e9
    """Age of its first token at which a piece is sent; a piece that is full is sent anyway."""

    def environment(self) -> dict[str, str]:
        return {self.VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        values = json.loads(environment.get(cls.VARIABLE, "{}"))
        return cls(**values | {"lies": tuple(values.get("lies", ()))})


def draw(context: bytes, seed: int, version: int) -> int:
    """Returns the token after a context, the bytes of its int32 ids."""
    return FIRST_TOKEN + _number(context, "token", seed, version) % (VOCABULARY - FIRST_TOKEN)


def logprob(context: bytes, token: int, version: int) -> float:
    return -(1 + _number(context, "logprob", token, version) % 5000) / 1000


def _number(context: bytes, *what: object) -> int:
    digest = hashlib.blake2b(context, digest_size=8, key=repr(what).encode()[:64]).digest()
    return int.from_bytes(digest, "little")


def mistakes(
    prompt: Sequence[int], params: SamplingParams, pieces: Sequence[Sampled], derived: Callable[[int, int], int]
) -> list[str]:
    """Returns the first token of a completion that cannot be sampled in its context, or its wrong end; else nothing.

    `derived(seed, position)` is the seed of a completion that continues at a position after a replica died.
    """
    context, seeds, position = _bytes(prompt), {params.seed}, 0
    for piece in pieces:
        for token, reported in zip(piece.tokens, piece.logprobs, strict=True):
            version = piece.policy_version
            if token >= FIRST_TOKEN:  # Else it ends the completion, with every seed.
                seeds |= {derived(params.seed, position)}
                seeds = {seed for seed in seeds if token == draw(context, seed, version)}
            if not seeds:
                return [f"token {position} is not that of version {version} in its context"]
            if reported != logprob(context, token, version):
                return [f"the log-probability of token {position} is not that of version {version}"]
            context += _bytes([token])
            position += 1
    reasons = [piece.finish_reason for piece in pieces]
    if params.routes_from is not None:
        known = params.routes_from
        for routes in (one for piece in pieces for one in unpack(piece.routes)):
            if routes.first != known or (routes.choices != routes.version % ROUTES.experts).any():
                return [f"routes from {routes.first} of version {routes.version} after {known}"]
            known = routes.stop
        if known != len(prompt) + position - 1:
            return [f"routes of {known} of {len(prompt) + position} tokens"]
    if any(reasons[:-1]) or not reasons or reasons[-1] is None:
        return [f"finish reasons {reasons}"]
    if position > params.max_tokens or (position < params.max_tokens) != (reasons[-1] == "stop"):
        return [f"{reasons[-1]} after {position} of {params.max_tokens} tokens"]
    return []


def publication(version: int) -> Publication:
    """Returns a publication that a fake replica adopts."""
    probe = tuple(range(FIRST_TOKEN, FIRST_TOKEN + 64))
    scores = probe_scores(probe, version)
    return Publication(version, "127.0.0.1:9", "/nowhere", 0, f"digest of {version}", "float32", probe, scores)


def probe_scores(probe: Sequence[int], version: int) -> tuple[float, ...]:
    return tuple(logprob(_bytes(probe[:i]), probe[i], version) for i in range(1, len(probe)))


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


@dataclass(eq=False)
class _Completion:
    id: int
    link: Link
    context: bytes
    params: SamplingParams
    num_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    """Tokens that were sampled and not sent."""
    since: float = 0.0
    """Time of the first of them."""
    logprobs: list[float] = field(default_factory=list)
    num_routed: int = 0


class FakeReplica:
    """The process: one loop that samples, and handles the other requests in between."""

    def __init__(self, link: Link, hooks: Hooks) -> None:
        self._link = link
        self._hooks = hooks
        self._inbox: queue.SimpleQueue[tuple[Link, ProcessRequest]] = queue.SimpleQueue()
        self._passages: Counter[str] = Counter()
        self._info: ModelInfo | None = None
        self._settings = SamplerConfig()
        self._version: int | None = None
        self._weights = 0
        """The version of the weights that it really has: an older one after a lie."""
        self._running: deque[_Completion] = deque()
        self._is_suspended = False

    def run(self) -> None:
        def deliver(link: Link, request: ProcessRequest) -> None:
            self._inbox.put((link, request))

        self._address = admit_fronts(self._link, deliver).address
        self._link.read_forever(partial(deliver, self._link))
        while True:
            while self._running and self._inbox.empty() and not self._is_suspended:
                self._step()
            link, request = self._inbox.get()
            is_about_completions = request.op in ("sample", "cancel", LEAVE)
            args = (link, *request.args) if is_about_completions else request.args
            try:
                result = getattr(self, f"_{request.op}")(*args)
            except AgentJetError as error:
                link.send(Answer(request.id, error=error))
            else:
                if not is_about_completions:
                    link.send(Answer(request.id, result))
                    if request.op == "adopt":
                        self._pass("resumed")

    def _pass(self, point: Point) -> None:
        self._passages[point] += 1
        here = {f"{point}:{self._passages[point]}", *([point] if self._passages[point] == 1 else [])}
        if self._hooks.die in here:
            os.kill(os.getpid(), signal.SIGKILL)
        while self._hooks.hang in here:
            signal.pause()
        if self._hooks.fail in here or self._fails_between(point):
            raise ComputeError(f"failed at {point}")

    def _fails_between(self, point: Point) -> bool:
        first, _, begin = self._hooks.fail_from.partition(":")
        return first == point and int(begin) <= self._passages[point] <= int(self._hooks.fail_to.partition(":")[2])

    def _load(
        self, model: ModelConfig, info: ModelInfo, sampler: SamplerConfig, compute: ComputeConfig
    ) -> tuple[str, SamplerLimits]:
        self._pass("load")
        self._info, self._settings = info, sampler
        return self._address, sampler.limits

    def _adopt(self, publication: Publication) -> list[float]:
        self._pass("adopt")
        for completion in self._running:
            self._flush(completion)  # The tokens of the old version.
        self._pass("paused")
        time.sleep(self._hooks.adopt_seconds)
        self._version, self._is_suspended = publication.version, False
        self._weights = publication.version - (publication.version in self._hooks.lies)
        self._pass("adopted")
        if self._weights != self._version:
            return list(probe_scores(publication.probe_tokens, self._weights))
        return list(publication.probe_logprobs)

    def _suspend(self) -> None:
        self._pass("suspend")
        for completion in self._running:
            self._flush(completion)
        self._is_suspended = True
        self._pass("suspended")

    def _sample(self, link: Link, id: int, tokens: np.ndarray, params: SamplingParams, num_sampled: int) -> None:
        self._pass("sample")
        assert self._info is not None and self._version is not None, "sampled before it was loaded and adopted"
        assert 0 <= num_sampled < len(tokens) and params.max_tokens > 0
        if self._hooks.poison in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(tokens) + params.max_tokens > self._info.context_length:
            raise OutOfCache(f"{len(tokens)} prompt tokens + max_tokens = {params.max_tokens} exceed the context")
        if params.grammar == "bad":
            raise GrammarError("the sampler cannot follow the grammar")
        self._running.append(_Completion(id, link, _bytes(tokens), params, num_routed=params.routes_from or 0))

    def _cancel(self, link: Link, id: int) -> None:
        self._pass("cancel")
        self._running = deque(one for one in self._running if (one.link, one.id) != (link, id))

    def _leave(self, link: Link) -> None:
        self._pass("leave")
        self._running = deque(one for one in self._running if one.link is not link)

    def _score(self, tokens: np.ndarray, num_likeliest: int) -> tuple[int, list[TokenScore]]:
        self._pass("score")
        assert self._version is not None
        found = probe_scores(tokens.tolist(), self._weights)
        return self._version, [TokenScore(one, ((FIRST_TOKEN, -0.5),)[:num_likeliest]) for one in found]

    def _step(self) -> None:
        """Sample a token for each completion that has a place."""
        time.sleep(self._hooks.step_seconds)
        for completion in list(self._running)[: self._settings.limits.max_concurrent]:
            token = draw(completion.context, completion.params.seed, self._weights)
            if not completion.tokens:
                completion.since = time.monotonic()
            completion.tokens.append(token)
            completion.logprobs.append(logprob(completion.context, token, self._weights))
            completion.context += _bytes([token])
            completion.num_tokens += 1
            self._pass("token")
            reason: FinishReason | None = "length" if completion.num_tokens == completion.params.max_tokens else None
            is_old = time.monotonic() - completion.since >= self._hooks.piece_seconds
            if reason or is_old or len(completion.tokens) == completion.params.piece_tokens:
                self._flush(completion, reason)
            if reason:
                self._running.remove(completion)

    def _flush(self, completion: _Completion, reason: FinishReason | None = None) -> None:
        if not completion.tokens and reason is None:
            return
        assert self._version is not None
        support = tuple(_support(token, completion.params) for token in completion.tokens)
        piece = Sampled(tuple(completion.tokens), tuple(completion.logprobs), self._version, reason)
        piece = piece._replace(support=support if any(support) else (), routes=self._routes(completion))
        completion.link.send([(completion.id, piece)])
        completion.tokens, completion.logprobs = [], []
        self._pass("sent")

    def _routes(self, completion: _Completion) -> bytes:
        """Returns the routes of the tokens before the last one: the number of the version, as experts."""
        if completion.params.routes_from is None:
            return b""
        fault, version, first = self._hooks.routes, self._weights, completion.num_routed
        completion.num_routed = stop = len(completion.context) // np.int32().itemsize - 1
        experts = ROUTES.experts if fault == "wide" else version % ROUTES.experts
        choices = np.full((stop - first, len(ROUTES.layers), ROUTES.choices), experts, np.int16)
        return Routes(first - (fault == "repeated"), version - (fault == "stale"), choices).pack(256)


def _support(token: int, params: SamplingParams) -> bytes:
    """Returns the set of a token: everything, or two tokens if the parameters exclude tokens."""
    if not (params.grammar or params.top_k or params.top_p < 1):
        return b""
    members = np.zeros(VOCABULARY, bool)
    members[[token, FIRST_TOKEN if token != FIRST_TOKEN else FIRST_TOKEN + 1]] = True
    return encode_set(members)


POLICY = PolicyId()
ROUTES = RouteShape((0, 3), 1, 5)
INFO = ModelInfo("fake", "", "", context_length=4096, end_tokens=(2,), routes=ROUTES)


def fork_forever() -> None:
    """Fork a replica for each line of standard input, the JSON of its environment; answer with its process id.

    A forked replica starts in milliseconds, because everything is imported. All of them end with standard input.
    """
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # No zombies.
    for line in sys.stdin:
        environment = json.loads(line)
        if (pid := os.fork()) == 0:
            serve(environment)
        print(pid, flush=True)
    os.killpg(0, signal.SIGKILL)


def serve(environment: Mapping[str, str] = os.environ) -> None:
    """Be a replica. A gateway that closes the connection early is not worth a message."""
    try:
        link = Link.from_environment(environment)
    except (OSError, ComputeError):
        os._exit(1)
    FakeReplica(link, Hooks.from_environment(environment)).run()


if __name__ == "__main__":
    fork_forever() if sys.argv[1:] == ["nursery"] else serve()
