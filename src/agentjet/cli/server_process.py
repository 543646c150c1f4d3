"""The process of `agentjet serve`: runs, workers and HTTP wired together, from the bound port to the last checkpoints.

The cheap checks (port, data dir, journal, interpreters) come before the slow work: an error is reported at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from errno import EADDRNOTAVAIL
from functools import partial
from ipaddress import ip_address
from logging.handlers import MemoryHandler
from pathlib import Path

import anyio.lowlevel

from agentjet import __version__
from agentjet.cli import LOOK_SECONDS, ProgressLine
from agentjet.cli.checkpoints import METRICS
from agentjet.client.report import given_text
from agentjet.client.threads import exit_with_parent
from agentjet.compute.backend import ProcessCompute
from agentjet.compute.samplers import check_sampler_python
from agentjet.config import ServeConfig, ServerConfig, check_models, server_token
from agentjet.errors import ConfigError
from agentjet.front.http import HttpServer, listen, tune_python, uvicorn_config
from agentjet.front.keys import Keys
from agentjet.front.tracing import Tracing
from agentjet.fronts.supervision import FrontProcesses
from agentjet.server.app import create_app
from agentjet.server.gateway import Gateway
from agentjet.server.monitoring import LogFile, configure_handler, limit_process_logs
from agentjet.server.runs import Runs
from agentjet.types import DEFAULT_RUN, JOURNAL

log = logging.getLogger(__name__)
_print = partial(print, flush=True)

LOG_BYTES = 10_000_000
EARLY_RECORDS = 1000
NEW_RUN_SECONDS = 0.2
"""Seconds between two looks for runs that were opened."""


def run(config: ServeConfig, *, ends_with_input: bool = False) -> None:
    """Serves until Ctrl-C or SIGTERM, and with `ends_with_input` until standard input ends.

    Raises `ConfigError` if the server cannot start, and `SystemExit` if the engine could not load the model.
    """
    check_models(config)
    check_data_dir(config.server.data_dir)
    check_certificate(config.server)
    computes = [config.compute_of(policy) for policy in config.policy_names]
    for compute in {one.sampler_python: one for one in computes if one.backend == "cluster"}.values():
        check_sampler_python(compute)
    with contextlib.ExitStack() as stack:
        tracing = Tracing()
        stack.callback(tracing.connect(config.server.trace_endpoint))
        listener = stack.enter_context(contextlib.closing(_listen(config.server)))
        fronts = [
            stack.enter_context(contextlib.closing(_listen(config.server, front)))
            for front in range(config.server.fronts)
        ]
        is_served = asyncio.run(_serve(config, listener, fronts, tracing, ends_with_input))
    if not is_served:
        raise SystemExit(2)


def check_certificate(server: ServerConfig) -> None:
    """Raises `ConfigError` if the certificate or its key is unreadable, or if they do not belong together."""
    if not server.tls_cert:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The empty password stops OpenSSL from asking for a passphrase on the terminal.
        context.load_cert_chain(server.tls_cert, server.tls_key, password=lambda: b"")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"server.tls_cert = {server.tls_cert!r} and server.tls_key = {server.tls_key!r} cannot be used together "
            f"({why}): use a certificate chain and its key without a passphrase, both PEM"
        ) from None


def check_data_dir(folder: Path) -> None:
    """Raises `ConfigError` if the default run lost its journal. `checkpoints/` alone is allowed."""
    run = folder / "runs" / DEFAULT_RUN
    if (run / METRICS).exists() and (run / "checkpoints").is_dir() and not (run / JOURNAL).exists():
        raise ConfigError(
            f"server.data_dir = {str(folder)!r} has checkpoints and no {JOURNAL}. Restore the journal; or move "
            "only checkpoints/ to runs/default/ of a new server.data_dir, which starts at the newest good one"
        )


def steady_clock() -> Callable[[], float]:
    """Unix seconds that never jump during the process.

    A clock that is set back would keep leases open; one that is set forward would end all of them at once.
    """
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


async def _serve(
    config: ServeConfig,
    listener: socket.socket,
    front_listeners: list[socket.socket],
    tracing: Tracing,
    ends_with_input: bool,
) -> bool:
    """Returns False if the engine could not load the model; the log has the reason."""
    clock = steady_clock()
    compute = ProcessCompute(config)
    fronts = FrontProcesses(config, compute, front_listeners, clock) if front_listeners else None
    logging.getLogger().addHandler(earlier := MemoryHandler(EARLY_RECORDS, logging.CRITICAL + 1))
    runs = Runs(config, compute, clock=clock, tracing=tracing, fronts=fronts)
    data_dir = config.server.data_dir.resolve()
    _log_to(data_dir / "logs", earlier)
    url = _url(listener, config.server)
    keys = Keys.open(data_dir, token=server_token(), clock=clock)
    http = HttpServer(uvicorn_config(create_app(runs, keys), config.server))
    stop = _stop_on_signals()
    await anyio.lowlevel.checkpoint()  # The first stream would import anyio's backend in the event loop: 20 ms.
    if ends_with_input:
        exit_with_parent(signal.SIGTERM)
    await runs.start()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    printer = asyncio.create_task(print_runs(runs))
    limiter = asyncio.create_task(limit_process_logs(data_dir))
    ready = asyncio.create_task(runs.default.engine.wait_until_up())
    try:
        models = dict.fromkeys(config.model_of(policy).name for policy in config.policy_names)
        _print(f"AgentJet {__version__} listens on {url}, loading {', '.join(models)} …")
        if bound := all_addresses_line(listener):
            _print(bound)
        async with _shown(lambda: start_text(runs.default)):
            await asyncio.wait([ready, stop], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            if ready.exception() is not None:
                return False
            tune_python()
            runs.lag.start()  # The start does not count.
            greet(runs.default, url, data_dir)
            await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
        _print("Stopping: the present batch is finished and a checkpoint saved (Ctrl-C again: at once) …")
        async with _shown(lambda: next(filter(None, (one.doing() for one in runs.open_gateways())), "")):
            await runs.drain()
        for gateway in runs.open_gateways():
            newest = gateway.store.newest()
            if newest is not None:
                _print(f"{_of(gateway)}Checkpoint of policy version {newest}: {gateway.store.path(newest)}")
    finally:
        ready.cancel()
        http.should_exit = True
        await asyncio.wait([serving])
        await runs.close()
        printer.cancel()
        limiter.cancel()
    serving.result()
    return True


@contextlib.asynccontextmanager
async def _shown(doing: Callable[[], str]) -> AsyncIterator[None]:
    """Context in which the slow work of the server is shown each second."""
    line = ProgressLine()

    async def look() -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            line.show(doing())

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        line.clear()


def start_text(gateway: Gateway) -> str:
    """A phrase for what the start waits for."""
    return gateway.doing() or f"waiting for {gateway.waiting_for()}"


def greet(gateway: Gateway, url: str, data_dir: Path) -> None:
    version = f"policy version {gateway.swarm.policy_version}"
    if gateway.hosted.names:
        _print(f"Ready: policies {', '.join(gateway.hosted.names)}, {version}.")
    for policy, renderer in gateway.hosted.renderers.items():
        model = renderer.model
        millions = model.num_parameters / 1e6
        size = f"{millions:.0f}M parameters" if millions >= 1 else f"{model.num_parameters:,} parameters"
        facts = f"{size} on {model.device} in {model.dtype}, context {model.context_length}"
        if gateway.hosted.names:
            lora = gateway.config.model_of(policy).lora
            trained = f"adapter of rank {lora.rank}" if lora.rank else "all weights"
            _print(f"  {policy}: {model.name}, {facts}, {trained}")
        else:
            _print(f"Ready: {facts}, {version}.")
        _print(f"  {renderer.style}")
    _print(f"Token of clients: {data_dir / 'token'}   of admins: {data_dir / 'admin-token'}")
    _print(
        "Next, in another terminal:\n"
        f"  export AGENTJET_URL={url} AGENTJET_TOKEN=$(cat {shlex.quote(str(data_dir / 'token'))})\n"
        "  agentjet status   # or, in a browser: agentjet open"
    )


async def print_runs(runs: Runs) -> None:
    printed: set[Gateway] = set()
    async with asyncio.TaskGroup() as printers:
        while True:
            now = set(runs.open_gateways())
            for gateway in now - printed:
                printers.create_task(_print_steps(gateway))
            printed = now
            await asyncio.sleep(NEW_RUN_SECONDS)


async def _print_steps(gateway: Gateway) -> None:
    logged = ""
    while not gateway.closing:
        try:
            await _print_new_steps(gateway)
        except Exception as error:  # The boundary: standard output may be closed. A repeated failure is logged once.
            if repr(error) != logged:
                log.exception("a step of run %s could not be printed", gateway.run)
            logged = repr(error)
            await asyncio.sleep(NEW_RUN_SECONDS)


async def _print_new_steps(gateway: Gateway) -> None:
    is_first = True
    async for event in gateway.events(gateway.last_event):
        if event.kind != "step":
            continue
        metrics = event.body["metrics"]
        # The first batch's time includes the wait for the first client.
        speed = "" if is_first else f"  {metrics.get('perf/tokens_per_second', 0.0):.0f} tokens/s"
        is_first = False
        own = ", ".join(f"{policy} {metrics.get(f'{policy}/reward/mean', 0.0):.3f}" for policy in gateway.hosted.names)
        reward = f"{metrics.get('reward/mean', 0.0):.3f}" + (f" ({own})" if own else "")
        result = given_text(metrics) or f"reward {reward}"
        _print(f"{_of(gateway)}step {event.body['policy_version']}  {result}{speed}")


def _of(gateway: Gateway) -> str:
    """The name of a run in front of its lines; empty for the default run."""
    return "" if gateway.run == DEFAULT_RUN else f"{gateway.run}: "


def _stop_on_signals() -> asyncio.Future[None]:
    """Done at the first SIGINT or SIGTERM. The second ends the process at once, and the worker with it."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if stop.done():
            os._exit(128 + number)
        stop.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _listen(server: ServerConfig, front: int | None = None) -> socket.socket:
    """The bound port of the server, or of a front.

    Raises `ConfigError` if it is in use, or the host is not an address of this machine.
    """
    host = "127.0.0.1" if server.host == "localhost" else server.host
    port = server.port if front is None or not server.port else server.port + 1 + front
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno == EADDRNOTAVAIL or (error.errno or 0) < 0:  # negative: from looking up the name
            raise ConfigError(
                f"server.host = {host!r} is not an address of this machine: give 127.0.0.1, 0.0.0.0, or one that its "
                "network has"
            ) from None
        if front is not None:
            raise ConfigError(
                f"the port {port} of front {front} on {host} is not available ({error.strerror or error}): fronts use "
                f"the {server.fronts} ports after server.port = {server.port}; stop the program that listens there, or "
                "choose another server.port"
            ) from None
        raise ConfigError(
            f"server.port = {server.port} on {host} is not available ({error.strerror or error}): stop the "
            "program that listens there, or choose another port (--port 0 takes a free one)"
        ) from None


def _url(listener: socket.socket, server: ServerConfig) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.tls_cert else "http"
    if not (server.tls_cert or ip_address(host).is_loopback):
        log.warning(
            "without TLS, the network can read tokens, keys and episodes sent to %s (server.insecure = true)", host
        )
    if ip_address(host).is_unspecified:  # Bound to every address; the loopback address works from here.
        host = "::1" if ":" in host else "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def all_addresses_line(listener: socket.socket) -> str:
    """The line for a server that is bound to every address of its machine; otherwise empty."""
    host, port = listener.getsockname()[:2]
    if not ip_address(host).is_unspecified:
        return ""
    return f"Bound to {host} port {port}: every address of this machine, reachable from other machines, too."


def _log_to(folder: Path, earlier: MemoryHandler) -> None:
    """Logs to `server.log` from INFO on, and warnings to standard error, too; first what was logged `earlier`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = LogFile(folder / "server.log", maxBytes=LOG_BYTES, backupCount=3, encoding="utf-8")
    configure_handler(file, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    configure_handler(console, "%(levelname)s: %(message)s")
    logging.basicConfig(level=logging.INFO, handlers=[file, console], force=True)
    for record in earlier.buffer:
        logging.getLogger().handle(record)
