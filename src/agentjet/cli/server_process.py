"""The process of `agentjet serve`: gateway, worker and HTTP wired together, from the bound port to the last checkpoint.

Nothing slow happens before everything cheap that can be wrong (port, data dir, journal) was found to be right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

import uvicorn

from agentjet import __version__
from agentjet.compute.embedded import EmbeddedCompute
from agentjet.config import ServeConfig, ServerConfig, server_token
from agentjet.errors import ConfigError
from agentjet.gateway import Gateway
from agentjet.server import Keys, create_app
from agentjet.types import Conversation, Message

GRACE_SECONDS = 5
"""How long open connections may take to end at the stop, once the engine has stopped."""
LOG_BYTES = 10_000_000


def run(config: ServeConfig) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises `ConfigError` when it cannot begin."""
    listener = _listen(config.server)
    with contextlib.closing(listener):
        asyncio.run(_serve(config, listener))


async def _serve(config: ServeConfig, listener: socket.socket) -> None:
    gateway = Gateway(config, EmbeddedCompute(config))
    data_dir = config.server.data_dir.resolve()
    _log_to(data_dir / "logs")
    keys = Keys.open(data_dir, token=server_token())
    http = _Http(
        uvicorn.Config(
            create_app(gateway, keys),
            log_config=None,
            access_log=False,  # Request lines may carry keys.
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    stop = _stop_on_signals()
    await gateway.start()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    narrator = asyncio.create_task(_narrate(gateway))
    try:
        _say(f"AgentJet {__version__} listens on {_url(listener)}, loading {config.model.name} …")
        if await _ready(gateway, stop):
            _greet(gateway, _url(listener), data_dir)
            await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
        _say("Stopping: the batch being learned is finished and a checkpoint saved (Ctrl-C again: at once) …")
        await gateway.drain()
        newest = gateway.store.newest()
        if newest is not None:
            _say(f"Checkpoint of policy version {newest}: {gateway.store.path(newest)}")
    finally:
        http.should_exit = True
        await asyncio.wait([serving])
        await gateway.close()
        narrator.cancel()
    serving.result()


async def _ready(gateway: Gateway, stop: asyncio.Future[None]) -> bool:
    """Wait for the worker; False when told to stop before. Raises what made it impossible."""
    ready = asyncio.create_task(gateway.ready())
    await asyncio.wait([ready, stop], return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()
        return True
    ready.cancel()
    return False


def _greet(gateway: Gateway, url: str, data_dir: Path) -> None:
    card = gateway.engine.card
    assert card is not None
    _say(
        f"Ready: {card.num_parameters / 1e6:.0f}M parameters on {card.device} in {card.dtype}, "
        f"context {card.context_length}, policy version {gateway.swarm.policy_version}."
    )
    renderer = gateway.engine.renderer
    assert renderer is not None
    prompt = renderer.text(renderer.tokenize(renderer.render(Conversation((Message("user", "Hello"),)))))
    _say(f"The model's own chat template makes of the message 'Hello': {prompt!r}")
    _say(f"Token of clients: {data_dir / 'token'}   of admins: {data_dir / 'admin-token'}")
    _say(
        "Next, in another terminal:\n"
        f"  export AGENTJET_URL={url} AGENTJET_TOKEN=$(cat {data_dir / 'token'})\n"
        "  agentjet status"
    )


async def _narrate(gateway: Gateway) -> None:
    """One line a batch, and one for what went wrong."""
    async for event in gateway.events(gateway.last_event):
        if event is None:
            continue
        body = event.body
        if event.kind == "step":
            metrics = body["metrics"]
            _say(
                f"step {body['policy_version']}  reward {metrics.get('reward/mean', 0.0):.3f}  "
                f"{metrics.get('perf/tokens_per_second', 0.0):.0f} tokens/s"
            )
        elif event.kind == "checkpoint" and not body["ok"]:
            _say(f"No checkpoint of policy version {body['policy_version']}: {body['error']}. The last good one stays.")
        elif event.kind == "state" and body["reason"]:
            _say(f"{body['state']}: {body['reason']}")


class _Http(uvicorn.Server):
    """Leaves signals alone: the gateway is stopped first, and this server by it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop_on_signals() -> asyncio.Future[None]:
    """Done at the first SIGINT or SIGTERM; the second ends the process at once (the worker sees that and ends, too)."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def asked(number: signal.Signals) -> None:
        if stop.done():
            os._exit(128 + number)
        stop.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked, number)
    return stop


def _listen(server: ServerConfig) -> socket.socket:
    """The bound port. Raises `ConfigError` when it is in use."""
    host = "127.0.0.1" if server.host == "localhost" else server.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, server.port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"server.port = {server.port} on {host} cannot be had ({error.strerror or error}): stop what listens "
            "there, or choose another (--port 0 takes a free one)"
        ) from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_to(folder: Path) -> None:
    """Everything from INFO on into `server.log`; warnings on standard error, too."""
    folder.mkdir(parents=True, exist_ok=True)
    file = RotatingFileHandler(folder / "server.log", maxBytes=LOG_BYTES, backupCount=3, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[file, console])


def _say(line: str) -> None:
    print(line, flush=True)
