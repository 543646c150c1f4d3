"""The inference routes: the paths of all dialects, and the same paths under `/k/{episode key}`.

The second form is for agents that can set a URL but no key. This module has the steps that all dialects share: key,
role, detection of retries, delivery of the answer, streaming.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

from fastapi import APIRouter, Depends, Header, Request
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse

from agentjet.errors import InvalidRequest, NotFound, RequestError
from agentjet.gateway.concurrency import LARGE, from_thread, offload
from agentjet.gateway.requests import CallChunk, CallRequest
from agentjet.server.deps import (
    EPISODE_KEY,
    ClientGone,
    Deps,
    GuardedRoute,
    key_in_headers,
    key_in_path,
    until_disconnect,
)
from agentjet.server.dialects import CHAT, COMPLETIONS, DIALECTS, MESSAGES, RESPONSES
from agentjet.server.dialects.chat import ChatBody
from agentjet.server.dialects.completions import CompletionBody
from agentjet.server.dialects.dialect import (
    AnswerHead,
    CallLookup,
    Dialect,
    RequestT,
    collect,
)
from agentjet.server.dialects.error_shapes import OPENAI_ERRORS, ErrorShape
from agentjet.server.dialects.messages import MessagesBody, PromptBody, TokenCount, to_conversation
from agentjet.server.dialects.responses import ResponsesBody
from agentjet.server.error_handlers import count_refusal
from agentjet.server.runs import AppDeps
from agentjet.types import policy_of

log = logging.getLogger(__name__)


async def _episode_id(request: Request) -> str:
    episode_id = request.state.episode_id
    assert isinstance(episode_id, str)
    return episode_id


MAX_ROLE = 128
POLICY_ALIAS = "policy"
"""A name of the model of every run without named policies."""
EpisodeId = Annotated[str, Depends(_episode_id)]
"""The episode of the request's key, stored by the guard `EPISODE_KEY`."""
AgentRole = Annotated[str, Header(alias="X-AgentJet-Role", max_length=MAX_ROLE)]


class RouteOptions(TypedDict):
    """The documentation of a route in `/openapi.json`."""

    responses: dict[int | str, dict[str, Any]]


def errors_of(shape: ErrorShape) -> dict[int | str, dict[str, Any]]:
    """Returns the error statuses of an inference route."""
    return {status: {"model": shape.model} for status in (400, 401, 403, 404, 409, 413, 429, 500, 503)}


def route_of(dialect: Dialect[Any]) -> RouteOptions:
    """Returns the documentation of a dialect's route."""
    good = {"description": "The answer, or its server-sent events.", "content": {"text/event-stream": {}}}
    return {"responses": {200: good, **errors_of(dialect.errors)}}


class ServedModel(BaseModel):
    """An entry of `/v1/models`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["agentjet"] = "agentjet"


class ModelList(BaseModel):
    """The answer of `/v1/models`: the policies of the run by name, or its one model."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


routes = APIRouter(tags=["inference"], route_class=GuardedRoute)
keyed = [Depends(EPISODE_KEY)]


@routes.post(CHAT.path, dependencies=keyed, **route_of(CHAT))
async def chat_completions(
    body: ChatBody, request: Request, deps: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> Any:
    """OpenAI's chat completions. Needs an episode key. Unsupported parameters are refused by name."""
    return await respond(CHAT, body, request, deps, episode_id, role)


@routes.post(COMPLETIONS.path, dependencies=keyed, **route_of(COMPLETIONS))
async def text_completions(
    body: CompletionBody, request: Request, deps: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> Any:
    """OpenAI's legacy text completions: continues a raw prompt, text or token ids, without the chat template."""
    return await respond(COMPLETIONS, body, request, deps, episode_id, role)


@routes.post(RESPONSES.path, dependencies=keyed, **route_of(RESPONSES))
async def create_response(
    body: ResponsesBody, request: Request, deps: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> Any:
    """OpenAI's Responses API. Needs an episode key. Unsupported parameters are refused by name."""
    return await respond(RESPONSES, body, request, deps, episode_id, role)


@routes.post(MESSAGES.path, dependencies=keyed, **route_of(MESSAGES))
async def create_message(
    body: MessagesBody, request: Request, deps: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> Any:
    """Anthropic's Messages API. Needs an episode key. Unsupported parameters are refused by name."""
    return await respond(MESSAGES, body, request, deps, episode_id, role)


@routes.post(f"{MESSAGES.path}/count_tokens", dependencies=keyed, responses=errors_of(MESSAGES.errors))
async def count_tokens(
    body: PromptBody, request: Request, deps: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> TokenCount:
    """Return the exact length of a prompt in tokens. Nothing is sampled or recorded."""
    role = _role_of(body.model, deps, role)
    num_bytes = len(await request.body())
    conversation, _ = await offload(num_bytes, to_conversation, body)
    asked = CallRequest(conversation, model=body.model, num_bytes=num_bytes)
    return TokenCount(input_tokens=await deps.gateway.count_tokens(episode_id, role, asked))


@routes.get("/v1/models", dependencies=keyed, responses=errors_of(OPENAI_ERRORS))
async def list_models(deps: Deps, episode_id: EpisodeId) -> ModelList:
    """List the policies of the run, or its one model. Needs an episode key."""
    return ModelList(data=[_model(name, deps) for name in deps.gateway.policies or (deps.gateway.model_name,)])


@routes.get("/v1/models/{name:path}", dependencies=keyed, responses=errors_of(OPENAI_ERRORS))
async def get_model(name: str, deps: Deps, episode_id: EpisodeId) -> ServedModel:
    """Return the model if the run accepts the name. Needs an episode key."""
    role = _role_of(name, deps, "")
    return _model(deps.gateway.model_name or policy_of(role, deps.gateway.policies), deps)


@routes.head("/", include_in_schema=False)
async def probe() -> Response:
    """Answer agents that check their base URL before the first request. Needs no key."""
    return Response()


@routes.api_route("/v1/{path:path}", methods=["GET", "POST"], include_in_schema=False)
async def unknown_route(path: str) -> None:
    """Refuse unknown paths with an error in the shape of the nearest dialect."""
    served = ", ".join(["/v1/models", *(dialect.path for dialect in DIALECTS)])
    raise NotFound(f"/v1/{path} is not served here. Available: {served}.", code="unknown_route")


router = APIRouter()
router.include_router(routes, dependencies=[Depends(key_in_headers)])
router.include_router(routes, prefix="/k/{key}", dependencies=[Depends(key_in_path)])


async def respond(
    dialect: Dialect[RequestT], body: RequestT, request: Request, deps: AppDeps, episode_id: str, role: str
) -> Response:
    """Returns the response to a call in any dialect, whole or streamed. Raises `RequestError` or `ClientGone`."""
    gateway = deps.gateway
    role = _role_of(body.model, deps, role)
    policy = policy_of(role, gateway.policies)
    head = AnswerHead(uuid.uuid4().hex, gateway.model_name or policy, int(time.time()), policy)
    content = await request.body()
    past: CallLookup = partial(gateway.lookup_call, episode_id, role)
    past = past if len(content) < LARGE else from_thread(past)
    call = await offload(len(content), _to_call, dialect, body, past, content, request.headers, head)
    chunks = gateway.call(episode_id, role, call)
    choices = call.choices * (1 + len(call.others))
    if not call.stream:
        async with aclosing(chunks):
            ended = await until_disconnect(request, collect(_answer_chunks(chunks, choices)))
            answer = dialect.to_answer(ended, body, head)
            if not await _mark_delivered(request, chunks):
                raise ClientGone
            return Response(to_json(answer), media_type="application/json")
    # Waits for the first chunk, because errors of the request can only set the status before the stream starts.
    first = await until_disconnect(request, anext(chunks))
    events = dialect.to_events(_answer_chunks(chunks, choices, first), body, head)
    return StreamingResponse(
        _stream(request, chunks, events, dialect.errors),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


def _to_call(
    dialect: Dialect[RequestT],
    body: RequestT,
    past: CallLookup,
    content: bytes,
    headers: Headers,
    head: AnswerHead,
) -> CallRequest:
    """Returns the canonical request, with a fingerprint of its bytes and the retry marks of the SDKs."""
    key = headers.get("idempotency-key", "")
    count = headers.get("x-stainless-retry-count", "0")
    digest = hashlib.blake2b(content, digest_size=16, key=hashlib.sha256(key.encode()).digest())
    return replace(
        dialect.to_request(body, past),
        id=head.id,
        num_bytes=len(content),
        fingerprint=digest.hexdigest(),
        retry=bool(key) or (count.isdecimal() and int(count[:9]) > 0),
    )


async def _answer_chunks(
    chunks: AsyncGenerator[CallChunk], choices: int, first: CallChunk | None = None
) -> AsyncGenerator[CallChunk]:
    """Yields the chunks up to the end of the last choice. `_mark_delivered` reads further."""
    while choices:
        chunk, first = (await anext(chunks) if first is None else first), None
        choices -= chunk.call is not None
        yield chunk


async def _mark_delivered(request: Request, chunks: AsyncGenerator[CallChunk]) -> bool:
    """Marks the answer as delivered, or returns False if the client has disconnected.

    The check is needed because writing to a closed connection does not fail. Raises `Conflict` if the episode has
    ended.
    """
    if await request.is_disconnected():
        return False
    await anext(chunks, None)
    return True


async def _stream(
    request: Request, chunks: AsyncGenerator[CallChunk], events: AsyncGenerator[str], errors: ErrorShape
) -> AsyncGenerator[str]:
    """Yields the events as text and closes the call at the end. An error becomes the last event."""
    num_sent = 0
    async with aclosing(chunks), aclosing(events):
        try:
            async for event in events:
                yield event
                num_sent += 1
            await _mark_delivered(request, chunks)
        except RequestError as error:
            await count_refusal(request, error)
            yield errors.event(error, num_sent)
        except Exception as error:  # The boundary of a stream whose status is already sent; logged once, here.
            log.error("a stream failed", exc_info=error)
            broken = RequestError("Internal error: see the server's log.", code="internal_error", status=500)
            await count_refusal(request, broken)
            yield errors.event(broken, num_sent)


def _model(name: str, deps: AppDeps) -> ServedModel:
    return ServedModel(id=name, created=int(deps.gateway.began))


# --- the model's name in requests


def _role_of(model: str, deps: AppDeps, header: str) -> str:
    gateway = deps.gateway
    if gateway.policies:
        return role_of_policy(model, gateway.policies, header)
    return role_of(model, gateway.model_name, header, gateway.config.server.model_aliases)


def role_of(model: str, served: str, header: str, aliases: str) -> str:
    """Returns the agent role of a request: the header, or what follows `@` in the model's name.

    `aliases` are other accepted names, comma-separated; `*` matches any text. Raises `NotFound` for another model.
    """
    name = model.partition("@")[0]
    patterns = (pattern.strip() for pattern in aliases.split(","))
    accepted = [name] if any(fnmatchcase(name, pattern) for pattern in patterns if pattern) else []
    for known in (served, POLICY_ALIAS, *accepted):
        if model == known or model.startswith(known + "@"):
            return _one_role(model.removeprefix(known), header)
    near = get_close_matches(model, [served, POLICY_ALIAS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f": it serves {served!r}, also called {POLICY_ALIAS!r}."
    hint += " server.model_aliases lets it answer to other names."
    raise NotFound(f"The model {model!r} is not served here{hint}", code="model_not_found", param="model")


def role_of_policy(model: str, policies: Sequence[str], header: str) -> str:
    """Returns the role of a request in a run with named policies: `POLICY` or `POLICY/ROLE`.

    Raises `NotFound` for an unknown policy, and `InvalidRequest` for an invalid role.
    """
    policy = model.partition("@")[0]
    if policy not in policies:
        near = get_close_matches(policy, policies, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise NotFound(
            f"This run has no policy {policy[:100]!r}{hint} Its policies are {', '.join(policies)}.",
            code="model_not_found",
            param="model",
        )
    role = _one_role(model.removeprefix(policy), header)
    if "/" in role:
        raise InvalidRequest(f"The role {role!r} has a '/': choose a name without it.", param="model")
    return f"{policy}/{role}" if role else policy


def _one_role(in_model: str, header: str) -> str:
    """Returns the role from `@ROLE` behind the model's name, or from the header. Raises `InvalidRequest`."""
    role = in_model.removeprefix("@")
    if not in_model:
        return header
    if len(role) > MAX_ROLE:
        raise InvalidRequest(
            f"The role in the model's name has {len(role)} characters; the maximum is {MAX_ROLE}.", param="model"
        )
    if header and header != role:
        raise InvalidRequest(f"The model's name has role {role!r}, the header has {header!r}.", param="model")
    return role
