"""The inference routes: the paths of all dialects, and the same paths under `/k/{episode key}`.

The second form is for agents that can set a URL but no key. This module has the steps that all dialects share: key,
role, detection of retries, delivery of the answer, streaming.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentjet.errors import InvalidRequest, NotFound, RequestError, nearest_name
from agentjet.front.calls import CallChunk, CallRequest, Calls
from agentjet.front.concurrency import LARGE, from_thread, offload
from agentjet.front.dialects import DIALECTS, MESSAGES
from agentjet.front.dialects.dialect import (
    OPENAI_ERRORS,
    AnswerHead,
    CallLookup,
    Dialect,
    Encoder,
    ErrorShape,
    RequestT,
    sse,
)
from agentjet.front.dialects.messages import PromptBody, TokenCount, prompt_to_count
from agentjet.front.http import (
    EPISODE_KEY,
    KEY_PATH,
    METHODS,
    ClientGone,
    GuardedRoute,
    Handler,
    Presence,
    calls_of,
    count_refusal,
    error_response,
    internal_error,
    key_in_headers,
    key_in_path,
    method_not_allowed,
    route_path,
)
from agentjet.front.run import FrontPolicies
from agentjet.types import policy_of

log = logging.getLogger(__name__)

MAX_ROLE = 128
COUNT_PATH = f"{MESSAGES.path}/count_tokens"
CALL_PATHS = (*(dialect.path for dialect in DIALECTS), COUNT_PATH)
POLICY_ALIAS = "policy"
"""A name of the model of every run without named policies."""


async def _calls(request: Request) -> Calls:  # async, so that FastAPI does not call it in a thread
    return calls_of(request)


RunCalls = Annotated[Calls, Depends(_calls)]
Documentation = dict[int | str, dict[str, Any]]
"""The responses of a route in `/openapi.json`."""


def errors_of(shape: ErrorShape) -> Documentation:
    """`default` also stands for FastAPI's 422: a malformed body is answered with 400."""
    return {status: {"model": shape.model} for status in (400, 401, 403, 404, 409, 413, 429, 500, 503, "default")}


def answers_of(dialect: Dialect[Any]) -> Documentation:
    good = {"description": "The answer, or its server-sent events.", "content": {"text/event-stream": {}}}
    return {200: good, **errors_of(dialect.errors)}


class CallRoute(GuardedRoute):
    """A route that answers calls. Its endpoint takes the body, the request and the calls of the run."""

    def handler(self) -> Handler:
        of_fastapi = super().handler()

        async def handle(request: Request) -> Response:
            if (body := getattr(request, "_json", None)) is None:  # FastAPI describes what is wrong with it.
                return await of_fastapi(request)
            response: Response = await self.endpoint(body, request, calls_of(request))
            return response

        return handle


routes = APIRouter(tags=["inference"], route_class=GuardedRoute)


@routes.post(COUNT_PATH, dependencies=EPISODE_KEY, responses=errors_of(MESSAGES.errors))
async def count_tokens(body: PromptBody, request: Request, calls: RunCalls) -> TokenCount:
    """Return the exact length of a prompt in tokens. Nothing is sampled or recorded."""
    role = role_of(body.model, calls.policies)
    num_bytes = len(await request.body())
    await calls.read(request.state.episode_id)
    conversation = await offload(num_bytes, prompt_to_count, body, calls.swarm.job.images)
    asked = CallRequest(conversation, model=body.model, num_bytes=num_bytes)
    return TokenCount(input_tokens=await calls.count_tokens(request.state.episode_id, role, asked))


@routes.get("/v1/models", dependencies=EPISODE_KEY, responses=errors_of(OPENAI_ERRORS))
async def list_models(calls: RunCalls) -> dict[str, Any]:
    """List the policies of the run, or its one model. Needs an episode key."""
    names = calls.policies.names or (calls.policies.model_name,)
    return {"object": "list", "data": [_model(name, calls) for name in names]}


@routes.get("/v1/models/{name:path}", dependencies=EPISODE_KEY, responses=errors_of(OPENAI_ERRORS))
async def get_model(name: str, calls: RunCalls) -> dict[str, Any]:
    """Return the model if the run accepts the name. Needs an episode key."""
    policies = calls.policies
    role = role_of(name, policies)
    return _model(policies.model_name or policy_of(role, policies.names), calls)


@routes.api_route("/v1/{path:path}", methods=[*METHODS], include_in_schema=False)
@routes.api_route("/inference/v1/{path:path}", methods=[*METHODS], include_in_schema=False)
async def unknown_route(request: Request) -> Response:
    """Refuse unknown paths, and other methods of a known one, with an error in the shape of the nearest dialect."""
    path = KEY_PATH.sub("", route_path(request.scope), count=1)
    if path in CALL_PATHS:
        raise method_not_allowed(path, ["POST"])
    if f"{path}/".startswith("/v1/models/"):
        raise method_not_allowed(path, ["GET"])
    if (once := path.removeprefix("/v1")) in CALL_PATHS:
        return wrong_path(path, once, "leave /v1 out of the base URL, because this client adds it by itself")
    if (bare := path.replace("//", "/").rstrip("/")) in CALL_PATHS:
        return wrong_path(path, bare, "leave out the slash that is too many")
    raise NotFound(
        f"{path} is not served here. Available: {', '.join(['/v1/models', *CALL_PATHS])}.", code="unknown_route"
    )


def wrong_path(path: str, right: str, way_out: str) -> Response:
    """Returns the refusal of a call at `path` that belongs at `right`, in the shape of that dialect."""
    return error_response(
        right, NotFound(f"{path} is not served here, but {right} is: {way_out}.", code="unknown_route")
    )


def _add_route(dialect: Dialect[Any], to: APIRouter) -> None:
    async def answer(body: Any, request: Request, calls: RunCalls) -> Any:
        """A request of the provider's API. Needs an episode key. Unsupported parameters are refused by name."""
        return await respond(dialect, body, request, calls)

    answer.__annotations__["body"] = dialect.request
    to.add_api_route(dialect.path, answer, methods=["POST"], dependencies=EPISODE_KEY, responses=answers_of(dialect))


router = APIRouter()
for _prefix, _key in (("", key_in_headers), ("/k/{key}", key_in_path)):
    # Calls have routes of their own in `router`. A router inside another one would cost 3 % of a call.
    _calls_routes = APIRouter(prefix=_prefix, tags=["inference"], route_class=CallRoute, dependencies=[Depends(_key)])
    for _dialect in DIALECTS:
        _add_route(_dialect, _calls_routes)
    router.routes.extend(_calls_routes.routes)
    router.include_router(routes, prefix=_prefix, dependencies=[Depends(_key)])


async def respond(dialect: Dialect[RequestT], body: RequestT, request: Request, calls: Calls) -> Response:
    """Returns the response to a call in any dialect, whole or streamed. Raises `RequestError` or `ClientGone`."""
    policies, episode_id = calls.policies, request.state.episode_id  # stored by the guard `EPISODE_KEY`
    role = role_of(body.model, policies)
    policy = policy_of(role, policies.names)
    head = AnswerHead(uuid.uuid4().hex, policies.model_name or policy, int(time.time()), policy)
    content = await request.body()
    await calls.read(episode_id)
    past: CallLookup = partial(calls.lookup, episode_id, role)
    past = past if len(content) < LARGE else from_thread(past)
    decode = partial(dialect.decode, body, past, calls.swarm.job.images)
    call = await offload(len(content), _to_call, decode, content, request.headers, head)
    chunks, client = calls.answer(episode_id, role, call), Presence(request)
    choices = call.choices * (1 + len(call.others))
    encoder = dialect.encoder(body, head)
    if not call.stream:
        async with aclosing(chunks):
            await client.during(_collect(chunks, choices, encoder))
            if not await _mark_delivered(client, chunks):
                raise ClientGone
            return Response(to_json(encoder.answer()), media_type="application/json")
    # Waits for the first chunk, because errors of the request can only set the status before the stream starts.
    first = await client.during(anext(chunks))
    return EventStream(client, _stream(request, client, chunks, first, choices, dialect, encoder))


class EventStream(Response):
    """Sends events until the client disconnects. Starlette's `StreamingResponse` starts two tasks for that."""

    media_type = "text/event-stream"

    def __init__(self, client: Presence, events: AsyncGenerator[str]) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["Content-Length"]
        self._client = client
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with suppress(ClientGone):
                await self._client.during(self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _to_call(decode: Callable[..., CallRequest], content: bytes, headers: Headers, head: AnswerHead) -> CallRequest:
    """Returns the canonical request, with a fingerprint of its bytes and the retry marks of the SDKs."""
    key = headers.get("idempotency-key", "")
    count = headers.get("x-stainless-retry-count", "0")
    digest = hashlib.blake2b(content, digest_size=16, key=hashlib.sha256(key.encode()).digest())
    return decode(
        id=head.id,
        num_bytes=len(content),
        fingerprint=digest.hexdigest(),
        retry=bool(key) or (count.isdecimal() and int(count[:9]) > 0),
    )


async def _collect(chunks: AsyncGenerator[CallChunk], choices: int, encoder: Encoder[Any]) -> None:
    """Encodes the chunks up to the end of the last choice. `_mark_delivered` reads the chunks further."""
    while choices:
        chunk = await anext(chunks)
        choices -= chunk.call is not None
        deque(encoder.encode(chunk), maxlen=0)


async def _mark_delivered(client: Presence, chunks: AsyncGenerator[CallChunk]) -> bool:
    """Marks the answer as delivered, or returns False if the client has disconnected.

    Raises `Conflict` if the episode has ended.
    """
    if await client.has_ended():
        return False
    await anext(chunks, None)
    return True


async def _stream(
    request: Request,
    client: Presence,
    chunks: AsyncGenerator[CallChunk],
    chunk: CallChunk,
    choices: int,
    dialect: Dialect[Any],
    encoder: Encoder[Any],
) -> AsyncGenerator[str]:
    """Yields the events of the first `chunk` and of the others, and closes the call at the end. An error becomes the
    last event.
    """
    async with aclosing(chunks):
        try:
            while choices := choices - (chunk.call is not None):
                yield encoder.stream(chunk)
                chunk = await anext(chunks)
            yield encoder.stream(chunk) + encoder.finish()
            await _mark_delivered(client, chunks)
        except Exception as error:  # The boundary of a stream whose status is already sent.
            if not isinstance(error, RequestError):
                log.error("a stream failed", exc_info=error)
                error = internal_error()
            await count_refusal(request, error)
            yield sse(dialect.errors.event(dialect.errors.body(error), encoder.num_events))


def _model(name: str, calls: Calls) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(calls.began), "owned_by": "agentjet"}


def role_of(model: str, run: FrontPolicies) -> str:
    """Returns the agent role of a request: what follows `@` in the model's name.

    In a run with named policies it is `POLICY` or `POLICY/ROLE`. Raises `NotFound` for a model that the run does not
    have, and `InvalidRequest` for an invalid role.
    """
    policies, served = run.names, run.model_name
    names = list(policies or (served, POLICY_ALIAS))
    base = model.partition("@")[0]
    aliases = run.config.server.model_aliases.split(",")
    if not policies and any(fnmatchcase(base, alias.strip()) for alias in aliases if alias.strip()):
        names.append(base)
    name = next((name for name in names if model == name or model.startswith(f"{name}@")), None)
    if name is None:
        near = nearest_name(base if policies else model, names)
        hint = f"; did you mean {near!r}?" if near else "."
        if policies:
            message = f"This run has no policy {base[:100]!r}{hint} Its policies are {', '.join(policies)}."
        else:
            message = f"The model {model!r} is not served here{hint} It is {served!r}, also called {POLICY_ALIAS!r}; "
            message += "server.model_aliases lets it answer to other names."
        raise NotFound(message, code="model_not_found", param="model")
    role = model[len(name) + 1 :]
    if model == f"{name}@":
        raise InvalidRequest(f"The model {model!r} names no role after '@': use {name!r}, or add one.", param="model")
    if len(role) > MAX_ROLE:
        message = f"The role in the model's name has {len(role)} characters; the maximum is {MAX_ROLE}."
        raise InvalidRequest(message, param="model")
    if not policies:
        return role
    if "/" in role:
        raise InvalidRequest(f"The role {role!r} has a '/': choose a name without it.", param="model")
    return f"{name}/{role}" if role else name
