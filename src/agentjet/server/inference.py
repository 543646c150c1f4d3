"""Inference routes: every dialect's path, and the same under `/k/{episode key}` for agents that can set a URL but no
key.

What is common to all dialects is here: the key, the role, what tells a retry, whether the answer was delivered, the
stream. Each route is written once and included twice.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

from fastapi import APIRouter, Depends, Header, Request
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse

from agentjet.errors import NotFound, RequestError
from agentjet.gateway.concurrency import LARGE, from_thread, offload
from agentjet.gateway.requests import CallChunk, CallRequest
from agentjet.server.deps import EPISODE_KEY, AppDeps, Deps, GuardedRoute, key_in_headers, key_in_path
from agentjet.server.dialects import DIALECTS, Dialect, ErrorShape, chat, completions, messages, responses
from agentjet.server.dialects.chat import ChatBody
from agentjet.server.dialects.completions import CompletionBody
from agentjet.server.dialects.dialect import (
    MAX_ROLE,
    OPENAI_ERRORS,
    AnswerHead,
    AnswerT,
    CallLookup,
    RequestT,
    StreamEvent,
    role_of,
)
from agentjet.server.dialects.messages_requests import MessagesBody, PromptBody, TokenCount
from agentjet.server.dialects.responses_bodies import ResponsesBody
from agentjet.server.disconnect import ClientGone, hang_up_of, until_disconnect
from agentjet.server.error_handlers import count_refusal

log = logging.getLogger(__name__)


async def _episode_id(request: Request) -> str:
    episode_id = request.state.episode_id
    assert isinstance(episode_id, str)
    return episode_id


EpisodeId = Annotated[str, Depends(_episode_id)]
"""The episode whose key the request has: `EPISODE_KEY` found it."""
AgentRole = Annotated[str, Header(alias="X-AgentJet-Role", max_length=MAX_ROLE)]


class RouteOptions(TypedDict):
    """What a route says of itself in `/openapi.json`."""

    response_model: type[BaseModel]
    responses: dict[int | str, dict[str, Any]]


def errors_of(shape: ErrorShape) -> dict[int | str, dict[str, Any]]:
    """The statuses an inference route may answer, but for the good one."""
    return {status: {"model": shape.model} for status in (400, 401, 403, 404, 409, 413, 429, 500, 503)}


def route_of(dialect: Dialect[Any, Any]) -> RouteOptions:
    """The documentation of a dialect's route."""
    good = {"description": "The answer, or its server-sent events.", "content": {"text/event-stream": {}}}
    return {"response_model": dialect.answer, "responses": {200: good, **errors_of(dialect.errors)}}


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["agentjet"] = "agentjet"


class ModelList(BaseModel):
    """The one model this server has."""

    object: Literal["list"] = "list"
    data: list[Model]


routes = APIRouter(tags=["inference"], route_class=GuardedRoute)
keyed = [Depends(EPISODE_KEY)]


@routes.post(chat.DIALECT.path, dependencies=keyed, **route_of(chat.DIALECT))
async def chat_completions(
    body: ChatBody, request: Request, wired: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> Any:
    """OpenAI's chat completions. The key is an episode's; what cannot be honoured is refused by name."""
    return await respond(chat.DIALECT, body, request, wired, episode_id, role)


@routes.post(completions.DIALECT.path, dependencies=keyed, **route_of(completions.DIALECT))
async def text_completions(
    body: CompletionBody, request: Request, wired: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> Any:
    """OpenAI's legacy text completions: a raw prompt, as text or token ids, is continued without the chat template."""
    return await respond(completions.DIALECT, body, request, wired, episode_id, role)


@routes.post(responses.DIALECT.path, dependencies=keyed, **route_of(responses.DIALECT))
async def create_response(
    body: ResponsesBody, request: Request, wired: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> Any:
    """OpenAI's Responses API. The key is an episode's; what cannot be honoured is refused by name."""
    return await respond(responses.DIALECT, body, request, wired, episode_id, role)


@routes.post(messages.DIALECT.path, dependencies=keyed, **route_of(messages.DIALECT))
async def create_message(
    body: MessagesBody, request: Request, wired: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> Any:
    """Anthropic's Messages API. The key is an episode's; what cannot be honoured is refused by name."""
    return await respond(messages.DIALECT, body, request, wired, episode_id, role)


@routes.post(f"{messages.DIALECT.path}/count_tokens", dependencies=keyed, responses=errors_of(messages.DIALECT.errors))
async def count_tokens(
    body: PromptBody, request: Request, wired: Deps, episode_id: EpisodeId, role: AgentRole = ""
) -> TokenCount:
    """The exact length of a prompt. Nothing is sampled, and nothing recorded."""
    role = _role_of(body.model, wired, role)
    num_bytes = len(await request.body())
    conversation, _ = await offload(num_bytes, messages.to_conversation, body)
    asked = CallRequest(conversation, model=body.model, num_bytes=num_bytes)
    return TokenCount(input_tokens=await wired.gateway.count_tokens(episode_id, role, asked))


@routes.get("/v1/models", dependencies=keyed, responses=errors_of(OPENAI_ERRORS))
async def list_models(wired: Deps, episode_id: EpisodeId) -> ModelList:
    """The model that is served, for the key of an episode."""
    return ModelList(data=[_model(wired)])


@routes.get("/v1/models/{name:path}", dependencies=keyed, responses=errors_of(OPENAI_ERRORS))
async def get_model(name: str, wired: Deps, episode_id: EpisodeId) -> Model:
    """The model of that name."""
    _role_of(name, wired, "")
    return _model(wired)


@routes.head("/", include_in_schema=False)
async def probe() -> Response:
    """An agent asks whether its base URL leads anywhere, before it has a request. Needs no key."""
    return Response()


@routes.api_route("/v1/{path:path}", methods=["GET", "POST"], include_in_schema=False)
async def unknown_route(path: str) -> None:
    """What is not spoken here gets its answer in the shape of the nearest dialect."""
    served = ", ".join(["/v1/models", *(dialect.path for dialect in DIALECTS)])
    raise NotFound(f"/v1/{path} is not served here: there are {served}.", code="unknown_route")


router = APIRouter()
router.include_router(routes, dependencies=[Depends(key_in_headers)])
router.include_router(routes, prefix="/k/{key}", dependencies=[Depends(key_in_path)])


def _role_of(model: str, wired: AppDeps, header: str) -> str:
    return role_of(model, wired.gateway.model_name, header, wired.gateway.config.server.model_aliases)


async def respond(
    dialect: Dialect[RequestT, AnswerT], body: RequestT, request: Request, wired: AppDeps, episode_id: str, role: str
) -> Response:
    """The answer to a request of any dialect, whole or streamed. Raises `RequestError`, or `ClientGone`."""
    gateway = wired.gateway
    role = _role_of(body.model, wired, role)
    head = AnswerHead(uuid.uuid4().hex, gateway.model_name, int(time.time()))
    content = await request.body()
    past: CallLookup = partial(gateway.lookup_call, episode_id, role)
    past = past if len(content) < LARGE else from_thread(past)
    call = await offload(len(content), _to_call, dialect, body, past, content, request.headers, head)
    chunks = gateway.call(episode_id, role, call, hang_up=hang_up_of(request))
    choices = call.choices * (1 + len(call.others))
    if not call.stream:
        async with aclosing(chunks):
            answer = await until_disconnect(request, _whole(dialect, chunks, choices, body, head))
            if not await _handed_out(request, chunks):
                raise ClientGone
            return Response(answer.model_dump_json(), media_type="application/json")
    # What is wrong with a request shows before the first chunk, while the status can still say so.
    first = await until_disconnect(request, _first(chunks))
    events = dialect.to_events(_all_of(first, chunks, choices), body, head)
    return StreamingResponse(
        _stream(request, chunks, events, dialect.errors),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


def _to_call(
    dialect: Dialect[RequestT, AnswerT],
    body: RequestT,
    past: CallLookup,
    content: bytes,
    headers: Headers,
    head: AnswerHead,
) -> CallRequest:
    """The canonical request, with what tells that it is sent again: its bytes, and how the SDKs mark a retry."""
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


async def _whole(
    dialect: Dialect[RequestT, AnswerT],
    chunks: AsyncGenerator[CallChunk],
    choices: int,
    body: RequestT,
    head: AnswerHead,
) -> AnswerT:
    return await dialect.to_answer(_all_of(await anext(chunks), chunks, choices), body, head)


async def _first(chunks: AsyncGenerator[CallChunk]) -> CallChunk:
    return await anext(chunks)


async def _all_of(first: CallChunk, rest: AsyncGenerator[CallChunk], choices: int) -> AsyncGenerator[CallChunk]:
    """Up to the end of the last choice, and no further: asking for more is what `_handed_out` does."""
    chunk = first
    while True:
        yield chunk
        choices -= chunk.call is not None
        if not choices:
            return
        chunk = await anext(rest)


async def _handed_out(request: Request, chunks: AsyncGenerator[CallChunk]) -> bool:
    """Tell the call that its answer was delivered, unless the client is gone: what is written to nobody looks as if it
    were sent. Raises `Conflict` when the episode ended before.
    """
    if await request.is_disconnected():
        return False
    await anext(chunks, None)
    return True


async def _stream(
    request: Request, chunks: AsyncGenerator[CallChunk], events: AsyncGenerator[StreamEvent], errors: ErrorShape
) -> AsyncGenerator[str]:
    """The stream as text. Leaving it, by its end or a disconnect, closes the call; an error becomes its last event."""
    num_sent = 0
    async with aclosing(chunks), aclosing(events):
        try:
            async for event in events:
                yield event.text
                num_sent += 1
            await _handed_out(request, chunks)
        except RequestError as error:
            await count_refusal(request, error)
            yield errors.event(error, num_sent)
        except Exception as error:  # The boundary of a stream, whose status is sent already: recorded here, once.
            log.error("a stream broke", exc_info=error)
            broken = RequestError("The server failed; its log says why.", code="internal_error", status=500)
            await count_refusal(request, broken)
            yield errors.event(broken, num_sent)


def _model(wired: AppDeps) -> Model:
    return Model(id=wired.gateway.model_name, created=int(wired.gateway.began))
