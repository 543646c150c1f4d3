"""The process of `agentjet serve`: gateway, worker and HTTP wired together, from the bound port to the last checkpoint.

Nothing slow happens before everything cheap that can be wrong (port, data dir, journal) was found to be right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from errno import EADDRNOTAVAIL
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from agentjet import __version__
from agentjet.cli.data_dir import check_data_dir
from agentjet.cli.runs import RunSwitcher
from agentjet.cli.tracing import tracer_provider
from agentjet.client.threads import exit_with_parent
from agentjet.config import ServeConfig, ServerConfig, server_token
from agentjet.errors import ConfigError
from agentjet.gateway import Gateway
from agentjet.server import Keys, create_app
from agentjet.server.http import check_certificate, listen, tune_gc, uvicorn_config
from agentjet.server.monitoring import LogFile, LogFormat, configure_handler
from agentjet.types import Conversation, Message

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

LOG_BYTES = 10_000_000
CHANGE_SECONDS = 0.2
"""Between two looks at which run is served, while it is changed."""


def run(config: ServeConfig, *, ends_with_input: bool = False) -> None:
    """Serve until Ctrl-C or SIGTERM, or until standard input ends, where that counts. Raises `ConfigError` when it
    cannot begin, `SystemExit` when the engine gave up on the model, which its log has said by then.
    """
    check_data_dir(config.server.data_dir)
    check_certificate(config.server)
    with contextlib.ExitStack() as stack:
        tracer = None
        if config.server.trace_endpoint:
            provider = tracer_provider(config.server.trace_endpoint)
            stack.callback(provider.shutdown)
            tracer = provider.get_tracer("agentjet", __version__)
        listener = stack.enter_context(contextlib.closing(_listen(config.server)))
        exit_code = asyncio.run(_serve(config, listener, tracer, ends_with_input))
    if exit_code:
        raise SystemExit(exit_code)


def steady_clock() -> Callable[[], float]:
    """Unix seconds that never jump while the process lives: a clock set back would hold leases open, one set forward
    would end them all at once.
    """
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


async def _serve(config: ServeConfig, listener: socket.socket, tracer: Tracer | None, ends_with_input: bool) -> int:
    """Returns the exit code."""
    clock = steady_clock()
    runs = RunSwitcher(config, clock)
    runs.gateway.tracing.tracer = tracer
    data_dir = config.server.data_dir.resolve()
    _log_to(data_dir / "logs", config.server.log_format)
    url = _url(listener, config.server)
    keys = Keys.open(data_dir, token=server_token(), clock=clock)
    http = _Http(uvicorn_config(create_app(runs, keys), config.server))
    stop = _stop_on_signals()
    if ends_with_input:
        exit_with_parent(signal.SIGTERM)
    await runs.gateway.start()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    narrator = asyncio.create_task(_narrate(runs))
    try:
        _say(f"AgentJet {__version__} listens on {url}, loading {config.model.name} …")
        if bound := all_addresses_line(listener):
            _say(bound)
        if await _ready(runs.gateway, stop):
            tune_gc()
            _greet(runs.gateway, url, data_dir)
            await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
        elif runs.gateway.engine.fatal is not None:
            return 2
        _say("Stopping: the batch being learned is finished and a checkpoint saved (Ctrl-C again: at once) …")
        await runs.gateway.drain()
        newest = runs.gateway.store.newest()
        if newest is not None:
            _say(f"Checkpoint of policy version {newest}: {runs.gateway.store.path(newest)}")
    finally:
        http.should_exit = True
        await asyncio.wait([serving])
        await runs.close()
        narrator.cancel()
    serving.result()
    return 0


async def _ready(gateway: Gateway, stop: asyncio.Future[None]) -> bool:
    """Wait for the worker; False when the engine gave up, or was told to stop before."""
    ready = asyncio.create_task(gateway.ready())
    await asyncio.wait([ready, stop], return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        return ready.exception() is None
    ready.cancel()
    return False


def _greet(gateway: Gateway, url: str, data_dir: Path) -> None:
    card = gateway.engine.model
    assert card is not None
    _say(
        f"Ready: {card.num_parameters / 1e6:.0f}M parameters on {card.device} in {card.dtype}, "
        f"context {card.context_length}, policy version {gateway.swarm.policy_version}."
    )
    renderer = gateway.engine.renderer
    assert renderer is not None
    tokens = renderer.tokenize(renderer.render(Conversation((Message("user", "Hello"),))))
    prompt = b"".join(map(renderer.token_bytes, tokens)).decode(errors="replace")
    _say(f"The model's own chat template makes of the message 'Hello': {prompt!r}")
    _say(f"Token of clients: {data_dir / 'token'}   of admins: {data_dir / 'admin-token'}")
    _say(
        "Next, in another terminal:\n"
        f"  export AGENTJET_URL={url} AGENTJET_TOKEN=$(cat {shlex.quote(str(data_dir / 'token'))})\n"
        "  agentjet status"
    )


async def _narrate(runs: RunSwitcher) -> None:
    """One line a batch, of whichever run is served. What goes wrong is in the log, whose warnings are shown, too."""
    while True:
        await _narrate_run(runs.gateway)
        await asyncio.sleep(CHANGE_SECONDS)


async def _narrate_run(gateway: Gateway) -> None:
    is_first = True
    async for event in gateway.events(gateway.last_event):
        if event is None or event.kind != "step":
            continue
        metrics = event.body["metrics"]
        # The first batch's time began with the process, perhaps long before the first client came.
        speed = "" if is_first else f"  {metrics.get('perf/tokens_per_second', 0.0):.0f} tokens/s"
        is_first = False
        _say(f"step {event.body['policy_version']}  reward {metrics.get('reward/mean', 0.0):.3f}{speed}")


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
    """The bound port. Raises `ConfigError` when it is in use, or the host is no address here."""
    host = "127.0.0.1" if server.host == "localhost" else server.host
    try:
        return listen(host, server.port)
    except OSError as error:
        if error.errno == EADDRNOTAVAIL or (error.errno or 0) < 0:  # negative: from looking up the name
            raise ConfigError(
                f"server.host = {host!r} is no address of this machine: give 127.0.0.1, 0.0.0.0, or one that its "
                "network has"
            ) from None
        raise ConfigError(
            f"server.port = {server.port} on {host} cannot be had ({error.strerror or error}): stop what listens "
            "there, or choose another (--port 0 takes a free one)"
        ) from None


def _url(listener: socket.socket, server: ServerConfig) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.tls_cert else "http"
    if not (server.tls_cert or ip_address(host).is_loopback):
        log.warning("everybody on the way to %s can read tokens, keys and episodes (server.insecure = true)", host)
    if ip_address(host).is_unspecified:  # Every address; this one works from here.
        host = "::1" if ":" in host else "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def all_addresses_line(listener: socket.socket) -> str:
    """What to say of a server that is bound to every address of its machine; empty for any other."""
    host, port = listener.getsockname()[:2]
    if not ip_address(host).is_unspecified:
        return ""
    return f"Bound to {host} port {port}: every address of this machine, under which others reach it, too."


def _log_to(folder: Path, log_format: LogFormat) -> None:
    """Everything from INFO on into `server.log`; warnings on standard error, too."""
    folder.mkdir(parents=True, exist_ok=True)
    file = LogFile(folder / "server.log", maxBytes=LOG_BYTES, backupCount=3, encoding="utf-8")
    configure_handler(file, log_format, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    configure_handler(console, "text", "%(levelname)s: %(message)s")
    logging.basicConfig(level=logging.INFO, handlers=[file, console])


def _say(line: str) -> None:
    print(line, flush=True)
