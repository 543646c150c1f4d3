"""Endpoints: OpenAI-compatible servers of a model that grades the tokens of a policy. `Endpoints` asks them.

One request returns the log-probabilities of a prompt of token ids: of vLLM with `prompt_logprobs`, of SGLang and others
with `echo`. An endpoint is checked before it grades, and again after each failure: its model, its tokenizer, and what
it returns. A wrong one raises `ConfigError`. One that does not answer is asked again, without end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from agentjet.config import JobConfig, teacher_key
from agentjet.config.loader import TEACHER_VARIABLE
from agentjet.errors import ConfigError, redact
from agentjet.recipes.recipe import Teaching
from agentjet.rendering import Renderer
from agentjet.server.monitoring import Work
from agentjet.server.run_policies import all_of
from agentjet.types import beginning

log = logging.getLogger(__name__)
Result = TypeVar("Result")

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


class WrongTeacher(Exception):
    """An answer is of another model, or of one with other tokens."""


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
class TeacherReplica:
    """One of the endpoints of a teacher."""

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


def check_settings(job: JobConfig, teaching: Teaching) -> None:
    """Raises `ConfigError` for settings that an endpoint cannot grade."""
    for source in teaching.sources:
        start = f"job.recipe.teacher = {source!r}"
        try:
            is_url = bool(httpx.URL(source).host) and source.startswith(("http://", "https://"))
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise ConfigError(
                f"{start} is not a URL of an endpoint, such as http://127.0.0.1:8001; several are replicas of one model"
            )
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


class Endpoints:
    """The endpoints of a teacher, from `open`."""

    def __init__(
        self, teaching: Teaching, renderer: Renderer, work: Work, http: httpx.AsyncClient, *, is_patient: bool
    ) -> None:
        self._endpoints = [TeacherReplica(url) for url in teaching.sources]
        self._model, self._top_k = teaching.model, teaching.top_k
        self._renderer = renderer
        self._work = work
        self._http = http
        self._is_patient = is_patient
        self._room = asyncio.Semaphore(PARALLEL)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, teaching: Teaching, renderer: Renderer, work: Work, *, is_patient: bool
    ) -> AsyncIterator[Endpoints]:
        """Context with endpoints. `is_patient`: also those that answer 401, 403 or 404 are asked again."""
        headers = {"Authorization": f"Bearer {key}"} if (key := teacher_key()) else {}
        client = partial(httpx.AsyncClient, headers=headers, timeout=ANSWER_SECONDS, trust_env=False)
        async with await asyncio.to_thread(client) as http:  # It reads the certificates of the system.
            yield cls(teaching, renderer, work, http, is_patient=is_patient)

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

    async def _free(self) -> TeacherReplica:
        """Returns the endpoint with the fewest requests, once one may be asked."""
        while True:
            now = time.monotonic()
            if free := [one for one in self._endpoints if one.free <= now]:
                return min(free, key=lambda one: one.waiting)
            await asyncio.sleep(min(one.free for one in self._endpoints) - now)

    async def _try(self, endpoint: TeacherReplica, request: Callable[[TeacherReplica], Awaitable[Result]]) -> Result:
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
            self._work.problem = "; ".join(one.sentence() for one in self._endpoints if one.failures)

    async def _graded(self, prompt: list[int], endpoint: TeacherReplica) -> Graded:
        async with endpoint.lock:
            if endpoint.free > time.monotonic():
                raise EndpointDown(endpoint.error)
            if not endpoint.form:
                await self._check(endpoint)
        kept = prompt[: endpoint.longest] if endpoint.longest else prompt
        try:
            found = await self._ask(endpoint, endpoint.form, kept, self._top_k) if len(kept) > 1 else None
        except NoLogprobs as error:
            raise EndpointDown(str(error)) from None
        whole = Graded.none(len(prompt), self._top_k)
        for values, part in zip(whole, found[0] if found is not None else (), strict=False):
            values[: len(kept)] = part
        return whole

    # ---- checks ------------------------------------------------------------------------------------------------------

    async def _check(self, endpoint: TeacherReplica) -> None:
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
                for top_k in sorted({self._top_k, 0} if form == "echo" else {self._top_k}):  # Ids replace texts.
                    found = await self._ask(endpoint, form, [ids[0], *ids], top_k)
                    if found is not None and not (found[1] or (form, top_k) == ("echo", self._top_k or -1)):
                        raise NoLogprobs("it shows no texts of tokens, so its tokenizer cannot be compared")
                endpoint.form = form
                return
            except NoLogprobs as error:
                reasons.append(f"{form}: {error}")
        wanted = f"the {self._top_k} likeliest tokens with their ids" if self._top_k else "log-probabilities"
        self._refuse(
            endpoint,
            f"it does not return {wanted} for a prompt of token ids ({'; '.join(reasons)}): use one that does, such as "
            f"vLLM{f' with --max-logprobs {self._top_k}' if self._top_k > 20 else ''}, or another recipe",
        )

    def _refuse(self, endpoint: TeacherReplica, what: str) -> NoReturn:
        raise ConfigError(f"job.recipe.teacher = {endpoint.name!r}: {what}")

    def _good(self, endpoint: TeacherReplica, response: httpx.Response) -> httpx.Response:
        """Returns an answer with a good status. Raises `EndpointDown`, or `ConfigError` for a wrong setting."""
        if response.is_success:
            return response
        text = f"HTTP {response.status_code} {_said(response, 200)!r}"
        is_elsewhere = response.status_code == 404 or response.is_redirect
        if (is_elsewhere or response.status_code in (401, 403)) and not self._is_patient:
            way_out = "check the URL" if is_elsewhere else f"set {TEACHER_VARIABLE} in the server's environment"
            self._refuse(endpoint, f"it answers {text}: {way_out}")
        raise EndpointDown(text)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _send(self, endpoint: TeacherReplica, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            return await self._http.request(method, endpoint.base + path, json=body)
        except httpx.TimeoutException:
            raise EndpointDown(f"no answer within {ANSWER_SECONDS:g} s") from None
        except httpx.HTTPError as error:
            raise EndpointDown(_cause(error)) from None

    async def _ask(
        self, endpoint: TeacherReplica, form: str, prompt: list[int], top_k: int
    ) -> tuple[Graded, int] | None:
        """Returns the grades of a prompt and the number of its texts that were compared; None if it is too long."""
        num = max(1, top_k)
        keys: dict[str, Any] = {"prompt_logprobs": num}
        if form == "echo":
            keys = {"echo": True, "logprobs": num} | ({"return_tokens_as_token_ids": True} if top_k else {})
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, **keys}
        response = await self._send(endpoint, "POST", "/completions", body)
        if response.status_code in (400, 413, 422):
            text = _said(response, 300)
            if TOO_LONG.search(text) and endpoint.form:
                return None
            raise NoLogprobs(f"HTTP {response.status_code} {text!r}")
        reader = partial(_read, self._renderer, self._model, top_k, form, prompt)
        try:
            return await asyncio.to_thread(reader, self._good(endpoint, response))
        except WrongTeacher as error:
            self._refuse(endpoint, str(error))


def _said(response: httpx.Response, length: int) -> str:
    """Returns the beginning of an answer, without the key: some endpoints repeat it."""
    key = teacher_key()
    return beginning(response.text.replace(key, "…") if key else response.text, length)


def _json(response: httpx.Response) -> Any:
    try:
        found = response.json()
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise EndpointDown(f"its answer is not a JSON object: {_said(response, 100)!r}")
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
) -> tuple[Graded, int]:
    """Returns the grades in an answer, and the number of texts that were compared.

    Raises `NoLogprobs`, `EndpointDown`, and `WrongTeacher`.
    """
    answer = _json(response)
    if answer.get("model", model) != model:
        raise WrongTeacher(f"it answers as the model {answer['model']!r} instead of {model!r}: correct teacher_model")
    graded, num_texts = Graded.none(len(prompt), top_k), 0
    try:
        entries = (_vllm if form == "prompt_logprobs" else _echoed)(answer["choices"][0], prompt)
        for at, (token, (logprob, text, likeliest)) in enumerate(zip(prompt, entries, strict=True)):
            num_texts += _is_compared(renderer, token, text)
            if not at:
                continue
            if not isinstance(logprob, int | float) or math.isnan(logprob) or logprob > 0.01:
                raise EndpointDown(f"the log-probability of token {at} is {logprob}")
            graded.logprobs[at] = logprob if logprob > IMPOSSIBLE else np.nan
            if top_k:
                best = sorted(likeliest.items(), key=lambda pair: -pair[1])[:top_k]
                if len(best) < top_k:
                    raise NoLogprobs(f"{len(best)} likely tokens with ids instead of {top_k}")
                graded.top_ids[at] = [id_ for id_, _ in best]
                graded.top[at] = [max(EXCLUDED, value) for _, value in best]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise NoLogprobs(f"its answer lacks them ({type(error).__name__}: {error})") from None
    return graded, num_texts


Entry = tuple[Any, Any, Mapping[int, float]]
"""The log-probability of a token, its text or `token_id:ID`, and the likely tokens in its place."""
FIRST: Entry = (None, None, {})


def _vllm(choice: Any, prompt: Sequence[int]) -> list[Entry]:
    given = choice["prompt_logprobs"]
    _check_length(prompt, len(given))
    entries = [FIRST]
    for token, at in zip(prompt[1:], given[1:], strict=True):
        if (own := at.get(str(token))) is None:
            raise WrongTeacher(f"its log-probabilities lack the token {token}: it has another vocabulary")
        likely = {int(id_): one["logprob"] for id_, one in at.items()}
        entries.append((own["logprob"], own.get("decoded_token"), likely))
    return entries


def _echoed(choice: Any, prompt: Sequence[int]) -> list[Entry]:
    """The answer has the prompt, and one sampled token or none."""
    given = choice["logprobs"]
    num, tops = len(given["tokens"]), given.get("top_logprobs")
    if num < 2 < len(prompt):
        raise NoLogprobs("its answer has no prompt")
    _check_length(prompt, num if num < len(prompt) else max(len(prompt), num - 1))
    return [
        (logprob, text, {int(name[9:]): value for name, value in (top or {}).items() if name.startswith("token_id:")})
        for _, logprob, text, top in zip(prompt, given["token_logprobs"], given["tokens"], tops or [None] * num)  # noqa: B905
    ]


def _check_length(prompt: Sequence[int], num: int) -> None:
    """Raises `NoLogprobs` for an answer that is cut, `WrongTeacher` for one with more tokens."""
    text = f"it returned log-probabilities of {num} tokens for a prompt of {len(prompt)}"
    if num < len(prompt):
        raise NoLogprobs(text)
    if num > len(prompt):
        raise WrongTeacher(f"{text}: an endpoint must use token ids unchanged")


def _is_compared(renderer: Renderer, token: int, text: Any) -> bool:
    """True if a teacher shows the text of a token. Raises `WrongTeacher` for another one.

    Servers treat spaces in many ways, so these are not compared, nor are parts of characters. Some hide control tokens.
    """
    if not text or text == f"token_id:{token}":
        return False
    own = renderer.token_bytes(token).decode(errors="replace")
    if own == text:
        return True
    if "\N{REPLACEMENT CHARACTER}" in own + str(text):
        return False
    ours, theirs = (re.sub(r"[\s▁]", "", one) for one in (own, str(text)))
    if ours != theirs:
        raise WrongTeacher(
            f"its token {token} is {text!r}, and that of {renderer.model.name!r} is {own!r}: it has another tokenizer, "
            "so it cannot grade tokens of the policy; use a teacher with the same tokenizer"
        )
    return True
