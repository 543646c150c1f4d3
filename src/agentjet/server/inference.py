"""Inference routes: OpenAI's `/v1/`, and the same under `/k/{episode key}/v1/`.

The latter are for agents that can set a URL but no key.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from agentjet.errors import NotFound, RequestError
from agentjet.gateway.requests import CallChunk
from agentjet.server.dialects import chat
from agentjet.server.dialects.chat_bodies import ChatBody, ChatCompletion
from agentjet.server.disconnect import ClientGone, until_disconnect
from agentjet.server.problems import OpenAIError, openai_error
from agentjet.server.wiring import Token, Wired, Wiring

log = logging.getLogger(__name__)

_ERROR: dict[str, Any] = {"model": OpenAIError}
_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys((400, 401, 403, 404, 409, 413, 429, 500, 503), _ERROR)
router = APIRouter(tags=["inference"], responses=_ERRORS)
AgentRole = Annotated[str, Header(alias="X-AgentJet-Role", max_length=128)]


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


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={
        200: {"description": "The answer, or its chunks as server-sent events.", "content": {"text/event-stream": {}}}
    },
)
async def chat_completions(body: ChatBody, request: Request, wired: Wired, token: Token, role: AgentRole = "") -> Any:
    """OpenAI's chat completions. The key is an episode's; what cannot be honoured is refused by name."""
    return await _chat(body, request, wired, token, role)


@router.post(
    "/k/{key}/v1/chat/completions",
    response_model=ChatCompletion,
    responses={
        200: {"description": "The answer, or its chunks as server-sent events.", "content": {"text/event-stream": {}}}
    },
)
async def chat_completions_by_url(
    key: str, body: ChatBody, request: Request, wired: Wired, role: AgentRole = ""
) -> Any:
    """The same, with the episode's key in the path."""
    return await _chat(body, request, wired, key, role)


@router.get("/v1/models")
async def list_models(wired: Wired, token: Token) -> ModelList:
    """The model that is served, for the key of an episode."""
    wired.keys.episode(token)
    return ModelList(data=[_model(wired)])


@router.get("/k/{key}/v1/models")
async def list_models_by_url(key: str, wired: Wired) -> ModelList:
    """The same, with the episode's key in the path."""
    wired.keys.episode(key)
    return ModelList(data=[_model(wired)])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, wired: Wired, token: Token) -> Model:
    """The model of that name."""
    wired.keys.episode(token)
    chat.role_of(name, wired.gateway.model_name, "")
    return _model(wired)


@router.api_route("/v1/{path:path}", methods=["GET", "POST"], include_in_schema=False)
@router.api_route("/k/{key}/v1/{path:path}", methods=["GET", "POST"], include_in_schema=False)
async def unknown_route(path: str) -> None:
    """Dialects that are not spoken here get their answer in OpenAI's shape."""
    raise NotFound(
        f"/v1/{path} is not served here: there are /v1/models and /v1/chat/completions.", code="unknown_route"
    )


async def _chat(body: ChatBody, request: Request, wired: Wiring, key: str, role: str) -> Any:
    gateway = wired.gateway
    episode_id = wired.keys.episode(key)
    role = chat.role_of(body.model, gateway.model_name, role)
    call = replace(chat.to_request(body), **await _sent(request))
    created = int(time.time())
    delivery = _Delivery(partial(gateway.undelivered, episode_id, role, call))
    chunks = delivery.noting(gateway.call(episode_id, role, call))
    if not call.stream:
        with delivery:
            answer = await until_disconnect(request, _whole(chunks, body, gateway.model_name, created))
            if await request.is_disconnected():
                raise ClientGone
            return Response(answer.model_dump_json(), media_type="application/json")
    # What is wrong with a request shows before the first chunk, while the status can still say so.
    with delivery:
        first = await until_disconnect(request, _first(chunks))
    events = chat.to_events(_with(first, chunks), body, gateway.model_name, created, f"chatcmpl-{uuid.uuid4().hex}")
    return StreamingResponse(
        _sse(chunks, events, delivery), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def _sent(request: Request) -> dict[str, Any]:
    """What tells a request that is sent again: its bytes, and how the SDKs mark a retry."""
    key = request.headers.get("idempotency-key", "")
    count = request.headers.get("x-stainless-retry-count", "0")
    digest = hashlib.blake2b(await request.body(), digest_size=16, key=hashlib.sha256(key.encode()).digest())
    return {"fingerprint": digest.hexdigest(), "retry": bool(key) or (count.isdecimal() and int(count) > 0)}


class _Delivery:
    """Within it an answer is given out; leaving it by an exception, or being closed, means that it did not arrive."""

    def __init__(self, undelivered: Callable[[list[str]], None]) -> None:
        self._undelivered = undelivered
        self._recorded: list[str] = []

    async def noting(self, chunks: AsyncGenerator[CallChunk]) -> AsyncGenerator[CallChunk]:
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.call is not None:
                    self._recorded.append(chunk.call.id)
                yield chunk

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._undelivered(self._recorded)


async def _whole(chunks: AsyncGenerator[CallChunk], body: ChatBody, model: str, created: int) -> ChatCompletion:
    async with aclosing(chunks):
        return await chat.to_answer(chunks, body, model, created)


async def _first(chunks: AsyncGenerator[CallChunk]) -> CallChunk:
    return await anext(chunks)


async def _with(first: CallChunk, rest: AsyncGenerator[CallChunk]) -> AsyncGenerator[CallChunk]:
    yield first
    async for chunk in rest:
        yield chunk


async def _sse(
    chunks: AsyncGenerator[CallChunk], events: AsyncGenerator[dict[str, Any]], delivery: _Delivery
) -> AsyncGenerator[str]:
    """The stream as text. Leaving it, by its end or a disconnect, closes the call; an error becomes its last event."""
    async with aclosing(chunks):
        try:
            with delivery:
                async for event in events:
                    yield chat.sse(event)
            yield chat.DONE
        except RequestError as error:
            yield chat.sse(openai_error(error))
        except Exception as error:  # The boundary of a stream, whose status is sent already: recorded here, once.
            log.error("a stream broke", exc_info=error)
            yield chat.sse(
                openai_error(RequestError("The server failed; its log says why.", code="internal_error", status=500))
            )


def _model(wired: Wiring) -> Model:
    return Model(id=wired.gateway.model_name, created=int(wired.gateway.began))
