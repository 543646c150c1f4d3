"""LiteLLM's proxy with one worker, over a scripted backend: the peer of `python -m bench.gateway --peer`.

The proxy is installed on first use, in an environment of its own, because its pins exclude ours. It is set up as its
documentation recommends for production: no debug output, no database, a master key that every request must bring, no
telemetry. `litellm[proxy]` brings uvloop and orjson.

`python -m bench.litellm_peer` is the backend: as plain as it can be, so that the proxy is what is measured. It streams
a token an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentjet.config.loader import cache_dir
from agentjet.front.http import listen
from bench.machine import READY_SECONDS, free_port, started
from bench.scripted import ANSWER, MODEL

PACKAGE = "litellm[proxy]==1.106.2"
KEY = "sk-bench-bench-bench"
CONFIG = """
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "{backend}/v1", api_key: unused}}
litellm_settings: {{telemetry: false, num_retries: 0, set_verbose: false}}
general_settings: {{master_key: {key}, disable_spend_logs: true}}
"""
ENVIRONMENT = {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

HEAD: dict[str, Any] = {"id": "chatcmpl-scripted", "created": 1_700_000_000, "model": MODEL}
USAGE = {"prompt_tokens": 100, "completion_tokens": len(ANSWER) + 1, "total_tokens": 101 + len(ANSWER)}
MESSAGE = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
WHOLE = json.dumps({**HEAD, "object": "chat.completion", "choices": [MESSAGE], "usage": USAGE}).encode()
DELTAS = [
    ({"role": "assistant", "content": ""}, None),
    *(({"content": letter}, None) for letter in ANSWER),
    ({}, "stop"),
]


def event(delta: dict[str, str], reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


EVENTS = [*(event(*delta) for delta in DELTAS), b"data: [DONE]\n\n"]


async def complete(request: Request) -> Response:
    if json.loads(await request.body()).get("stream"):
        return StreamingResponse(stream(), media_type="text/event-stream")
    return Response(WHOLE, media_type="application/json")


async def stream() -> AsyncGenerator[bytes]:
    for one in EVENTS:
        yield one
        await asyncio.sleep(0)


def install() -> Path:
    """The proxy's program. Raises `CalledProcessError` with pip's output before it."""
    folder = cache_dir() / "bench-litellm"
    if not (done := folder / f".{PACKAGE}").exists():
        print(f"installing {PACKAGE} into {folder} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", PACKAGE], check=True)
        done.touch()
    return folder / "bin" / "litellm"


@contextlib.contextmanager
def proxy(folder: Path) -> Iterator[str]:
    """While inside, the proxy runs. Yields its address; raises `DidNotStart`."""
    program, port = install(), free_port()
    with started([sys.executable, "-m", "bench.litellm_peer"], folder / "backend.log") as backend:
        settings = folder / "litellm.yaml"
        settings.write_text(CONFIG.format(model=MODEL, backend=backend, key=KEY))
        command = [str(program), "--config", str(settings), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--num_workers", "1"]
        # An address, a key or a proxy of the caller's is meant for something else.
        clean = {name: "" for name in os.environ if name.startswith(("LITELLM_", "OPENAI_", "DATABASE_"))}
        log = folder / "litellm.log"
        with started(command, log, ready="Proxy initialized", environment={**clean, **ENVIRONMENT}):
            for _ in range(int(READY_SECONDS / 0.1)):  # It logs that its settings are loaded, but not that it listens.
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"


def main() -> None:
    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    with listen("127.0.0.1", 0, backlog=4096) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        asyncio.run(uvicorn.Server(config).serve([listener]))


if __name__ == "__main__":
    main()
