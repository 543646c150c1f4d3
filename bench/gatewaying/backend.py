"""The model behind LiteLLM's proxy, as a process: an OpenAI-compatible server that gives the scripted answer.

As plain as it can be, so that the proxy is what is measured. Streams send a token an event, as the gateway does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentjet.server.http import listen
from bench.gatewaying.scripted import ANSWER, MODEL

HEAD: dict[str, Any] = {"id": "chatcmpl-scripted", "created": 1_700_000_000, "model": MODEL}
USAGE = {"prompt_tokens": 100, "completion_tokens": len(ANSWER) + 1, "total_tokens": 101 + len(ANSWER)}


def whole() -> bytes:
    """The body of a plain answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
    return json.dumps({**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()


def events() -> list[bytes]:
    """Those of a streamed answer, in order."""
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}, *({"content": letter} for letter in ANSWER)]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    chunks = [{**HEAD, "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    return [*(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


WHOLE, EVENTS = whole(), events()


async def complete(request: Request) -> Response:
    if json.loads(await request.body()).get("stream"):
        return StreamingResponse(_stream(), media_type="text/event-stream")
    return Response(WHOLE, media_type="application/json")


async def _stream() -> AsyncGenerator[bytes]:
    for event in EVENTS:
        yield event
        await asyncio.sleep(0)


def main() -> None:
    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    with listen("127.0.0.1", 0, backlog=4096) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        asyncio.run(
            uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")).serve([listener])
        )


if __name__ == "__main__":
    main()
