"""What the server does for teachers: contexts that only a teacher sees, and endpoints that grade tokens.

A recipe with a context says, for each episode and role of a batch, a text that only the teacher sees. The conversation
is then rendered again, with the text below the first message of the user. Earlier answers keep their sampled tokens.

An endpoint is an OpenAI-compatible server of a model with the tokenizer of the policy. One request for each path of the
forest returns the log-probabilities of a prompt of token ids. Invariants:

* a batch is learned with all its grades, or not yet: an endpoint that does not answer is asked again for ever;
* grades are in `grades/` on disk before the first operation of the batch. A replay reads them there;
* an endpoint of another model or tokenizer is refused, and nothing is learned from its answer. Each batch checks it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from agentjet.config import JobConfig
from agentjet.errors import ConfigError, ContextOverflow, InvalidRequest, Unavailable, redact
from agentjet.front.prompts import prepare_prompt
from agentjet.recipes import hooks
from agentjet.recipes.recipe import Attempt, Teaching
from agentjet.rendering import Renderer
from agentjet.server.checkpoints import flush
from agentjet.server.monitoring import Activity, Work
from agentjet.server.run_policies import RunPolicies, all_of
from agentjet.swarm import Batch, EpisodeRecord, Journal, SwarmState
from agentjet.swarm.facts import call_rows, load_trees, trained_calls
from agentjet.swarm.state import reward_of
from agentjet.timeline import ConversationTree
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, ancestors, build_forest
from agentjet.types import Call, Conversation, Message, beginning, metrics_prefix, policy_of

log = logging.getLogger(__name__)
Result = TypeVar("Result")
AskText = Callable[[Attempt, Sequence[Attempt]], str | None]

# ---- contexts --------------------------------------------------------------------------------------------------------


class _Spoken(NamedTuple):
    """The conversation of a role of an episode."""

    tree: ConversationTree
    calls: list[Call]
    """Those that train."""
    attempt: Attempt


def with_text(conversation: Conversation, text: str) -> Conversation:
    """Returns a conversation with a text below its first message of the user. Raises `InvalidRequest` without one."""
    messages = list(conversation.messages)
    at = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if at is None:
        raise InvalidRequest("it has no message of the user, below which the teacher would see the text")
    messages[at] = replace(messages[at], content=f"{messages[at].content}\n\n{text}")
    return replace(conversation, messages=tuple(messages))


def taught_forest(
    journal: Journal,
    batch: Batch,
    episodes: Mapping[str, EpisodeRecord],
    policy: str,
    policies: Sequence[str],
    renderer: Renderer,
    ask: AskText,
) -> tuple[Forest, dict[str, str]]:
    """Returns the targets of a policy in the context that the teacher sees, and the reason for each call that has none
    although `ask` returned a text. The column `target` counts those of the forest of `swarm.facts`.
    """
    rows, unrendered = [], dict[str, str]()
    sequence = first = target = 0
    for group in batch.groups:
        spoken = [_spoken(journal, episodes[member], policy, policies) for member in group]
        for number, own in enumerate(spoken):
            for role, one in own.items():
                others = [other[role].attempt for i, other in enumerate(spoken) if i != number and role in other]
                text, tree, refused = ask(one.attempt, others), one.tree, dict[str, str]()
                if text:
                    tree, refused = _replayed(renderer, one, text, batch.job.history)
                trained = {call.id: call for call in (tree.calls if text is not None else ())}
                known = [trained[call.id] for call in one.calls if call.id in trained and call.id not in refused]
                unrendered |= {call.id: refused[call.id] for call in one.calls if call.id in refused}
                row_of = dict(zip((call.id for call in known), call_rows(tree, known, {}), strict=True))
                for i, call in enumerate(one.calls, first):
                    stop = target + len(call.completion)
                    if call.id in row_of:
                        numbers = np.arange(target, stop)
                        rows.append(row_of[call.id].with_columns(sequence=sequence, call=i, target=numbers))
                    target = stop
                sequence, first = sequence + 1, first + len(one.calls)
    found = build_forest(rows)
    return found if rows else found.with_columns(target=np.zeros(0)), unrendered


def _spoken(journal: Journal, episode: EpisodeRecord, policy: str, policies: Sequence[str]) -> dict[str, _Spoken]:
    found, orphaned, reward = dict[str, _Spoken](), journal.orphans(episode.id), reward_of(episode, policy, policies)
    for role, tree in load_trees(journal, episode.id).items():
        if policy_of(role, policies) == policy and (calls := trained_calls(tree, orphaned, Counter())):
            attempt = Attempt(
                task_id=episode.task_id,
                task_set=episode.task_set,
                reward=math.nan if reward is None else reward,
                text=episode.reward_text,
                metrics=episode.metrics,
                answer=calls[-1].response.content,
            )
            found[role] = _Spoken(tree, calls, attempt)
    return found


def _replayed(renderer: Renderer, spoken: _Spoken, text: str, history: Any) -> tuple[ConversationTree, dict[str, str]]:
    """Returns the tree of a conversation with a text, and the reasons for calls that it cannot have."""
    tree, refused = ConversationTree(), dict[str, str]()
    for call in spoken.tree.calls:
        try:
            if call.after in refused:
                raise InvalidRequest(refused[str(call.after)])
            asked = with_text(spoken.tree.exchange(call.id)[0], text)
            prompt = prepare_prompt(renderer, tree, asked, history)
            if (length := len(prompt.tokens) + len(call.completion)) > renderer.context_length:
                raise ContextOverflow("messages", length, renderer.context_length)
        except InvalidRequest as error:
            refused[call.id] = str(error)
            continue
        placed = replace(call, parent=prompt.parent, kept=prompt.kept, suffix=prompt.suffix, fork=prompt.fork)
        placed = replace(placed, prompt_key=prompt.key, ask=prompt.ask)
        tree.add(placed, prompt.pieces, renderer.pieces(call.completion))
    return tree, refused


def check_template(renderer: Renderer) -> None:
    """Raises `ConfigError` if the template of the model cannot render a text below the message of a user."""
    mark = "what only the teacher sees"
    try:
        if mark.encode() in renderer.render(with_text(Conversation((Message("user", "question"),)), mark)):
            return
        reason = "it leaves the text out"
    except InvalidRequest as error:
        reason = str(error)
    raise ConfigError(
        f"the chat template of {renderer.model.name!r} cannot show the teacher a text below the user's message "
        f"({reason}): choose a recipe whose teacher sees the same context, or a model with another template"
    )


# ---- endpoints -------------------------------------------------------------------------------------------------------

KEY = "AGENTJET_TEACHER_KEY"
"""Environment variable of the server with the API key of endpoints."""
PARALLEL = 16
"""Requests at the same time, over all endpoints."""
ANSWER_SECONDS = 300.0
"""Time after which a request is sent again, to another endpoint if there is one."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds after failures of an endpoint in which it is not asked."""
PROBES = 256
"""Maximum number of control tokens, and of others, whose text is compared before a batch."""
IMPOSSIBLE = -1000.0
"""Log-probabilities below it, which endpoints send instead of minus infinity, are not grades."""
EXCLUDED = -100.0
"""Least log-probability of a likely token, as the learner has it."""
FORMS = ("prompt_logprobs", "echo")
"""Keys of a request that return log-probabilities of a prompt: of vLLM; of SGLang and others."""
TOO_LONG = re.compile(r"(?i)context.{0,20}(length|window|size)|too long|max\w*.{0,20}(length|len|tokens)")


class EndpointDown(Exception):
    """An endpoint did not return a usable answer. It may do so later."""


class NoLogprobs(Exception):
    """An answer lacks the log-probabilities of the prompt."""


class Graded(NamedTuple):
    """Grades of the n tokens of a prompt. Those of tokens without a grade, such as the first, are NaN."""

    logprobs: NDArray[np.float32]
    """[n]"""
    top_ids: NDArray[np.int32]
    """The k likeliest tokens at each position [n, k]."""
    top: NDArray[np.float32]
    """Their log-probabilities [n, k]."""

    @classmethod
    def none(cls, length: int, top_k: int) -> Graded:
        unknown = np.full((length, top_k + 1), np.nan, np.float32)
        return cls(unknown[:, 0], np.zeros((length, top_k), np.int32), unknown[:, 1:])


@dataclass(eq=False)
class Endpoint:
    """One of the replicas of a teacher."""

    url: str
    form: str = ""
    """One of `FORMS`; empty before it was checked."""
    longest: int = 0
    """Maximum length of a prompt in tokens; 0 if unknown."""
    waiting: int = 0
    """Requests that wait for its answer."""
    failures: int = 0
    """In a row."""
    failed: float = 0.0
    free: float = 0.0
    """Monotonic time of the last failure, and from which it is asked again."""
    error: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    @property
    def name(self) -> str:
        return redact(self.url)

    def fail(self, error: str, since: float) -> None:
        """Counts a failure of a request that began at `since`. Requests of one time are one failure."""
        if since >= self.failed or not self.failures:
            self.failures, self.form, self.error = self.failures + 1, "", error
            self.failed = time.monotonic()
            self.free = self.failed + PAUSES[min(self.failures, len(PAUSES)) - 1]
            (log.warning if self.failures == 1 else log.debug)("the teacher %s does not answer: %s", self.name, error)

    def sentence(self) -> str:
        times = "once" if self.failures == 1 else f"{self.failures} times"
        return f"the teacher {self.name} does not answer: {self.error}, tried {times}"


class Endpoints:
    """The endpoints of a teacher. Use it as a context. `is_patient`: statuses that a setting causes may pass, too."""

    def __init__(self, teaching: Teaching, renderer: Renderer, work: Work, *, is_patient: bool) -> None:
        self._endpoints = [Endpoint(url) for url in teaching.sources]
        self._model, self._top_k = teaching.model, teaching.top_k
        self._renderer = renderer
        self._work, self._text = work, work.text
        self._is_patient = is_patient
        self._room = asyncio.Semaphore(PARALLEL)
        self._http: httpx.AsyncClient

    async def __aenter__(self) -> Endpoints:
        key = os.environ.get(KEY, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = partial(httpx.AsyncClient, headers=headers, timeout=ANSWER_SECONDS, trust_env=False)
        self._http = await asyncio.to_thread(client)  # It reads the certificates of the system.
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def check(self, *, once: bool = False) -> None:
        """Checks the endpoints until one answers; with `once` each is asked once. Raises `ConfigError`."""
        while True:
            for endpoint in self._endpoints:
                with suppress(EndpointDown):
                    await self._try(endpoint, self._check)
            if once or any(one.form for one in self._endpoints):
                return
            await self._free()

    async def grade(self, prompts: Sequence[list[int]]) -> list[Graded]:
        """Returns the grades of prompts. Waits for an endpoint without end. Raises `ConfigError` for a wrong one."""
        self._work.total = len(prompts)

        async def graded(prompt: list[int]) -> Graded:
            async with self._room:
                while True:
                    with suppress(EndpointDown):
                        found = await self._try(await self._free(), partial(self._graded, prompt))
                        self._work.done += 1
                        return found

        return await all_of(map(graded, prompts))

    async def _free(self) -> Endpoint:
        """Returns the endpoint with the fewest requests, once one may be asked."""
        while True:
            now = time.monotonic()
            if free := [one for one in self._endpoints if one.free <= now]:
                return min(free, key=lambda one: one.waiting)
            await asyncio.sleep(min(one.free for one in self._endpoints) - now)

    async def _try(self, endpoint: Endpoint, request: Callable[[Endpoint], Awaitable[Result]]) -> Result:
        since = time.monotonic()
        endpoint.waiting += 1
        try:
            found = await request(endpoint)
            endpoint.failures = 0
            return found
        except EndpointDown as error:
            endpoint.fail(str(error), since)
            raise
        finally:
            endpoint.waiting -= 1
            self._work.text = "; ".join(one.sentence() for one in self._endpoints if one.failures) or self._text

    async def _graded(self, prompt: list[int], endpoint: Endpoint) -> Graded:
        async with endpoint.lock:
            if endpoint.free > time.monotonic():
                raise EndpointDown(endpoint.error)
            if not endpoint.form:
                await self._check(endpoint)
        kept = prompt[: endpoint.longest] if endpoint.longest else prompt
        try:
            found = await self._ask(endpoint, endpoint.form, kept) if len(kept) > 1 else None
        except NoLogprobs as error:
            raise EndpointDown(str(error)) from None
        whole = Graded.none(len(prompt), self._top_k)
        for values, part in zip(whole, found or (), strict=False):
            values[: len(kept)] = part
        return whole

    # ---- checks ------------------------------------------------------------------------------------------------------

    async def _check(self, endpoint: Endpoint) -> None:
        """Finds the form of the requests that an endpoint answers. Raises `ConfigError` for a wrong endpoint."""
        listed = await self._send(endpoint, "GET", "/models")
        if listed.status_code != 404:
            models = _json(self._good(endpoint, listed)).get("data") or []
            named = {str(one.get("id")): one for one in models if isinstance(one, dict)}
            if named and self._model not in named:
                self._refuse(endpoint, f"it has no model {self._model!r}; set teacher_model to one of {[*named]}")
            most = named.get(self._model, {}).get("max_model_len")
            endpoint.longest = most - 1 if isinstance(most, int) else 0
        ids = self._renderer.sample_ids(min(PROBES, max(2, (endpoint.longest or PROBES * 2) // 2 - 1)))
        reasons = []
        for form in FORMS:
            try:
                if await self._ask(endpoint, form, [ids[0], *ids]) is not None:
                    endpoint.form = form
                    return
                reasons.append("it refuses a short prompt as too long")
            except NoLogprobs as error:
                reasons.append(f"{form}: {error}")
        wanted = f"the {self._top_k} likeliest tokens with their ids" if self._top_k else "log-probabilities"
        self._refuse(
            endpoint,
            f"it does not return {wanted} for a prompt of token ids ({'; '.join(reasons)}): use one that does, such as "
            f"vLLM{f' with --max-logprobs {self._top_k}' if self._top_k > 20 else ''}, or another recipe",
        )

    def _refuse(self, endpoint: Endpoint, what: str) -> NoReturn:
        raise ConfigError(f"job.recipe.teacher = {endpoint.name!r}: {what}")

    def _good(self, endpoint: Endpoint, response: httpx.Response) -> httpx.Response:
        """Returns an answer with a good status. Raises `EndpointDown`, or `ConfigError` for a wrong setting."""
        if response.is_success:
            return response
        text = f"HTTP {response.status_code} {beginning(response.text, 200)!r}"
        if response.status_code in (401, 403, 404) and not self._is_patient:
            way_out = "check the URL" if response.status_code == 404 else f"set {KEY} in the server's environment"
            self._refuse(endpoint, f"it answers {text}: {way_out}")
        raise EndpointDown(text)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _send(self, endpoint: Endpoint, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            return await self._http.request(method, endpoint.base + path, json=body)
        except httpx.TimeoutException:
            raise EndpointDown(f"no answer within {ANSWER_SECONDS:g} s") from None
        except httpx.HTTPError as error:
            raise EndpointDown(_cause(error)) from None

    async def _ask(self, endpoint: Endpoint, form: str, prompt: list[int]) -> Graded | None:
        """Returns the grades of a prompt, or None if it is too long for the endpoint."""
        num = max(1, self._top_k)
        keys: dict[str, Any] = (
            {"prompt_logprobs": num} if form == "prompt_logprobs" else {"echo": True, "logprobs": num}
        )
        if form == "echo" and self._top_k:
            keys["return_tokens_as_token_ids"] = True
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, **keys}
        response = await self._send(endpoint, "POST", "/completions", body)
        if response.status_code in (400, 413, 422):
            text = beginning(response.text, 300)
            if TOO_LONG.search(text) and endpoint.form:
                return None
            raise NoLogprobs(f"HTTP {response.status_code} {text!r}")
        reader = partial(_read, self._renderer, self._model, self._top_k, form, prompt)
        try:
            return await asyncio.to_thread(reader, self._good(endpoint, response))
        except ValueError as error:
            self._refuse(endpoint, str(error))


def _json(response: httpx.Response) -> Any:
    try:
        found = response.json()
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise EndpointDown(f"its answer is not a JSON object: {beginning(response.text, 100)!r}")
    return found


def _cause(error: BaseException) -> str:
    """Returns the words of the operating system for a failed connection, or those of the library."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.strerror and at.errno:
            return os.strerror(at.errno).lower()
        at = at.__cause__ or at.__context__
    return f"{type(error).__name__} {error}".strip()


def _read(
    renderer: Renderer, model: str, top_k: int, form: str, prompt: Sequence[int], response: httpx.Response
) -> Graded:
    """Returns the grades in an answer. Raises `NoLogprobs`, `EndpointDown`, `ValueError` for a wrong teacher."""
    answer = _json(response)
    if answer.get("model", model) != model:
        raise ValueError(f"it answers as the model {answer['model']!r} instead of {model!r}: correct teacher_model")
    graded = Graded.none(len(prompt), top_k)
    try:
        entries = _entries(answer["choices"][0], form, prompt)
        if not len(prompt) <= len(entries) <= len(prompt) + (form == "echo"):
            raise ValueError(
                f"it returned log-probabilities of {len(entries)} tokens for a prompt of {len(prompt)}: an endpoint "
                "must use token ids unchanged"
            )
        for at in range(1, len(prompt)):
            logprob, text, likeliest = entries[at]
            _check_text(renderer, prompt[at], text)
            if not isinstance(logprob, int | float) or math.isnan(logprob) or logprob > 0.01:
                raise EndpointDown(f"the log-probability of token {at} is {logprob}")
            graded.logprobs[at] = logprob if logprob > IMPOSSIBLE else np.nan
            if top_k:
                best = sorted(likeliest.items(), key=lambda pair: -pair[1])[:top_k]
                if len(best) < top_k:
                    raise NoLogprobs(f"{len(best)} likely tokens with ids instead of {top_k}")
                graded.top_ids[at] = [token for token, _ in best]
                graded.top[at] = [max(EXCLUDED, value) for _, value in best]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoLogprobs(f"its answer lacks them ({type(error).__name__}: {error})") from None
    return graded


Entry = tuple[Any, Any, dict[int, float]]
"""The log-probability of a token, its text or `token_id:ID`, and the likely tokens in its place."""


def _entries(choice: Any, form: str, prompt: Sequence[int]) -> list[Entry]:
    """Returns an entry for each token of an answer."""
    if form == "prompt_logprobs":
        given = choice["prompt_logprobs"]
        if isinstance(given, list) and len(given) == len(prompt):
            found = [(at or {}).get(str(token)) for token, at in zip(prompt, given, strict=True)]
            if missing := [prompt[i] for i, one in enumerate(found) if i and one is None]:
                raise ValueError(f"its log-probabilities lack the token {missing[0]}: it has another vocabulary")
            return [
                (None, None, {})
                if own is None
                else (own["logprob"], own.get("decoded_token"), {int(id_): one["logprob"] for id_, one in at.items()})
                for own, at in zip(found, given, strict=True)
            ]
        return [(None, None, {})] * len(given)
    given = choice["logprobs"]
    tops = given.get("top_logprobs") or [None] * len(given["tokens"])
    return [
        (logprob, text, {int(name[9:]): value for name, value in (top or {}).items() if name.startswith("token_id:")})
        for logprob, text, top in zip(given["token_logprobs"], given["tokens"], tops, strict=True)
    ]


def _check_text(renderer: Renderer, token: int, text: Any) -> None:
    """Raises `ValueError` if a teacher shows another text for a token. Servers treat spaces in many ways, so these are
    not compared, nor are parts of characters.
    """
    if text is None or (isinstance(text, str) and text == f"token_id:{token}"):
        return
    own = renderer.token_bytes(token).decode(errors="replace")
    if "\N{REPLACEMENT CHARACTER}" in own + str(text) or (not text and token in renderer.control_tokens):
        return
    ours, theirs = (re.sub(r"[\s▁]", "", one) for one in (own, str(text)))
    if ours != theirs:
        raise ValueError(
            f"its token {token} is {text!r}, and that of {renderer.model.name!r} is {own!r}: it has another tokenizer, "
            "so it cannot grade tokens of the policy; use a teacher with the same tokenizer"
        )


# ---- teachers of a run -----------------------------------------------------------------------------------------------

COLUMNS = ("teacher", "top_ids", "teacher_top")


@dataclass(eq=False)
class Teachers:
    """The teachers of a run's batches."""

    policies: RunPolicies
    swarm: SwarmState
    activity: Activity

    def __post_init__(self) -> None:
        self.folder: Path = self.policies.folder / "grades"
        self._checked: Teaching | None = None

    async def check(self, job: JobConfig, *, waits: bool) -> None:
        """Raises `ConfigError` if the teacher of a job cannot grade the policies. `waits` until an endpoint answers."""
        teaching = await self._teaching(job)
        if teaching is None or (waits and teaching == self._checked):
            return
        if teaching.is_endpoint:
            _check_settings(job, teaching)
        for renderer in self.policies.renderers.values():
            if teaching.has_context:
                check_template(renderer)
            if teaching.is_endpoint:
                with self.activity.work("teacher check", f"checking the teacher {teaching.model}") as work:
                    async with Endpoints(teaching, renderer, work, is_patient=False) as endpoints:
                        await endpoints.check(once=not waits)
        self._checked = teaching

    async def taught(
        self, batch: Batch, training: Mapping[str, TrainingBatch]
    ) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        """Returns the forests of a batch by policy with what its teacher needs or says, and metrics.

        Waits without end for an endpoint that does not answer. Raises `RecipeError`, `ConfigError` for a wrong
        endpoint, and `Later` if the grades cannot be stored.
        """
        teaching = await self._teaching(batch.job)
        if teaching is None:
            return dict(training), {}
        found, metrics = dict[str, TrainingBatch](), dict[str, float]()
        for policy, own in training.items():
            path = self.folder / f"{batch.id:06d}-{policy}.npz"
            stored = await asyncio.to_thread(_stored, path, teaching, own.forest) if teaching.is_endpoint else None
            began, counts = time.monotonic(), {}
            if stored is None and teaching.has_context:
                forest, unrendered = await asyncio.to_thread(self._in_context, batch, policy)
                own, counts = replace(own, taught=forest), {"teacher/unrendered": float(len(unrendered))}
                _warn(batch, unrendered)
            if stored is None and teaching.is_endpoint:
                stored = await self._grades(teaching, policy, own)
                await asyncio.to_thread(self._store, path, teaching, own.forest, stored)
                counts["teacher/seconds"] = time.monotonic() - began
            if stored is not None:
                own = replace(own, forest=own.forest.with_columns(**stored), taught=None)
                graded = float(np.isfinite(stored["teacher"]).sum())
            else:
                graded = float((own.taught or own.forest).num_targets)
            counts["teacher/graded"] = graded / max(1, own.forest.num_targets)
            found[policy] = own
            metrics |= {f"{metrics_prefix(policy, self.policies.names)}{name}": n for name, n in counts.items()}
        return found, metrics

    async def _teaching(self, job: JobConfig) -> Teaching | None:
        return await self.policies.threads.wait_for("hook", partial(hooks.teaching, job.recipe))

    def _in_context(self, batch: Batch, policy: str) -> tuple[Forest, dict[str, str]]:
        recipe, threads = batch.job.recipe, self.policies.threads

        def ask(attempt: Attempt, others: Sequence[Attempt]) -> str | None:
            work = partial(hooks.teacher_context, recipe, attempt, others)
            return threads.call("hook", work) if hooks.is_plug_in(type(recipe)) else work()

        with self.swarm.batches.reading(batch) as (journal, members):
            names, renderer = self.policies.names, self.policies.renderers[policy]
            return taught_forest(journal, batch, members, policy, names, renderer, ask)

    async def _grades(self, teaching: Teaching, policy: str, own: TrainingBatch) -> dict[str, NDArray[Any]]:
        """Returns the columns of the forest of a policy that an endpoint gives."""
        present = await self._teaching(self.swarm.job)
        if present is not None and present.is_endpoint and present.model == teaching.model:
            teaching = teaching._replace(sources=present.sources)  # The same model at another address.
        forest = own.taught or own.forest
        target = np.arange(forest.num_targets) if own.taught is None else forest["target"]
        leaf, prompts = await asyncio.to_thread(_paths, forest)
        with self.activity.work("teacher", f"asking the teacher {teaching.model}") as work:
            async with Endpoints(teaching, self.policies.renderers[policy], work, is_patient=True) as endpoints:
                answers = dict(zip(prompts, await endpoints.grade([*prompts.values()]), strict=True))
        return await asyncio.to_thread(_columns, own.forest.num_targets, teaching.top_k, forest, target, leaf, answers)

    def _store(self, path: Path, teaching: Teaching, forest: Forest, grades: dict[str, Any]) -> None:
        """Stores grades durably, and removes those of batches that a checkpoint covers. Raises `Later`."""
        unnamed = path.with_name(f".{path.name}.partial")
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with unnamed.open("wb") as file:
                np.savez(file, stamp=_stamp(teaching, forest), **grades)
                file.flush()
                os.fsync(file.fileno())
            unnamed.replace(path)
            flush(self.folder)
            for old in self.folder.glob("*.npz"):
                if int(old.name.partition("-")[0]) < self.swarm.state.durable_version:
                    old.unlink(missing_ok=True)
        except OSError as error:
            message = f"The grades of the teacher cannot be stored in {path} ({error}): check the disk."
            log.error("%s", message)
            raise Unavailable(message, code="grades_not_stored", retry_after=5.0) from error


def _check_settings(job: JobConfig, teaching: Teaching) -> None:
    """Raises `ConfigError` for settings that an endpoint cannot grade."""
    for source in teaching.sources:
        start = f"job.recipe.teacher = {source!r}"
        try:
            is_url = bool(httpx.URL(source).host) and source.startswith(("http://", "https://"))
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise ConfigError(f"{start} is not a URL: several teachers are replicas of one model, each with its URL")
    if not teaching.model:
        raise ConfigError(f"{start}: an endpoint needs the name of its model: set job.recipe.teacher_model")
    if teaching.top_k and teaching.top_of == "policy":
        raise ConfigError(f"{start}: an endpoint returns its own likely tokens only, not those of the policy: use a "
                          "folder as the teacher")  # fmt: skip
    if job.temperature != 1:
        raise ConfigError(
            f"job.temperature = {job.temperature:g} with {start}: an endpoint grades at temperature 1: set "
            "job.temperature = 1, or use a folder as the teacher"
        )


def _warn(batch: Batch, unrendered: Mapping[str, str]) -> None:
    for call, reason in [*unrendered.items()][:1]:
        log.warning(
            "batch %d: the teacher does not grade %d calls, such as %s, because the text that it sees cannot be "
            "rendered: %s. They are not learned from it: shorten the text, or let agents send messages with a user",
            batch.id, len(unrendered), call, reason,
        )  # fmt: skip


def _paths(forest: Forest) -> tuple[NDArray[np.int64], dict[int, list[int]]]:
    """Returns the leaf [M] whose path grades each target, -1 for none, and the prompt of each leaf.

    A target of another temperature than 1, or of a set of tokens, is not graded, nor is a first token. The first leaf
    from a node on, in depth-first order, is below it.
    """
    leaves = np.flatnonzero(forest.end == np.arange(1, forest.num_nodes + 1))
    depth = forest.depth[forest.node]
    is_graded = (forest["temperature"] == 1) & (forest["support"] < 0) & (depth > 0)
    leaf = np.where(is_graded, leaves[np.searchsorted(leaves, forest.node)] if len(leaves) else -1, -1)
    prompts = {}
    for one in np.flatnonzero(np.bincount(leaf[leaf >= 0])).tolist():
        path = np.append(ancestors(forest, one), one)
        prompts[one] = forest.tokens[path[: int(depth[leaf == one].max()) + 1]].tolist()
    return leaf, prompts


def _columns(
    num_targets: int,
    top_k: int,
    forest: Forest,
    target: NDArray[Any],
    leaf: NDArray[np.int64],
    answers: Mapping[int, Graded],
) -> dict[str, NDArray[Any]]:
    """Returns the columns [M] of the main forest. `target` numbers the targets of `forest` in it."""
    graded = Graded.none(forest.num_targets, top_k)
    for one, answer in answers.items():
        own = np.flatnonzero(leaf == one)
        for values, given in zip(graded, answer, strict=True):
            values[own] = given[forest.depth[forest.node[own]]]
    whole = Graded.none(num_targets, top_k)
    for values, given in zip(whole, graded, strict=True):
        values[target] = given
    return dict(zip(COLUMNS[: 3 if top_k else 1], whole, strict=False))


def _stamp(teaching: Teaching, forest: Forest) -> NDArray[np.uint8]:
    """Returns a digest of the teacher and of what it graded."""
    digest = blake2b(json.dumps([teaching.model, teaching.top_k, teaching.has_context]).encode(), digest_size=16)
    for values in (forest.tokens, forest.parent, forest.node, forest["temperature"], forest["support"]):
        digest.update(np.ascontiguousarray(values).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def _stored(path: Path, teaching: Teaching, forest: Forest) -> dict[str, NDArray[Any]] | None:
    """Returns the stored grades of a batch; None if they are missing, damaged, or of another teacher or batch."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            found = {name: file[name] for name in COLUMNS[: 3 if teaching.top_k else 1]}
            if np.array_equal(file["stamp"], _stamp(teaching, forest)):
                return found
    except FileNotFoundError:
        return None
    except Exception as error:  # The boundary: a damaged file may raise anything. The teacher is asked again.
        log.warning("the grades in %s cannot be read, and the teacher is asked again: %s", path, error)
    return None
