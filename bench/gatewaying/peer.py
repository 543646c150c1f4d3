"""LiteLLM's proxy with one worker, installed on first use in a separate virtual environment.

Its dependencies conflict with ours. It is set up as its documentation recommends for production: no debug output, no
database, a master key that every request must bring, usage telemetry off. `litellm[proxy]` brings uvloop and orjson.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentjet.config.loader import cache_dir
from bench.gatewaying.processes import DidNotStart, module, started
from bench.gatewaying.scripted import MODEL
from bench.readme import free_port

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


class NotInstalled(Exception):
    """LiteLLM cannot be installed here. The message has the reason and the way out."""


def install() -> Path:
    """The virtual environment with LiteLLM in it. Raises `NotInstalled`."""
    folder = cache_dir() / "bench-litellm"
    done = folder / f".{PACKAGE}"
    if done.exists():
        return folder
    print(f"installing {PACKAGE} into {folder} ...", file=sys.stderr)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]
    for command in ([sys.executable, "-m", "venv", str(folder)], pip):
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
            raise NotInstalled(f"{last} ({' '.join(command)}); run that by hand, or leave the peer out with --no-peer")
    done.touch()
    return folder


@contextmanager
def proxy(folder: Path) -> Iterator[str]:
    """While inside, the proxy runs in front of a scripted backend. Yields its address; raises `DidNotStart`."""
    venv = install()
    with started(module("backend"), folder / "backend.log") as backend:
        settings = folder / "litellm.yaml"
        settings.write_text(CONFIG.format(model=MODEL, backend=backend, key=KEY))
        port = free_port()
        command = [str(venv / "bin" / "litellm"), "--config", str(settings), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--num_workers", "1"]
        # An address, a key or a proxy of the caller's is meant for something else.
        clean = {name: "" for name in os.environ if name.startswith(("LITELLM_", "OPENAI_", "DATABASE_"))}
        quiet = {**clean, **ENVIRONMENT}
        with started(command, folder / "litellm.log", ready="Proxy initialized", environment=quiet):
            _until_listening(port)
            yield f"http://127.0.0.1:{port}"


def _until_listening(port: int) -> None:
    """Waits for the port: the proxy logs that its settings are loaded, but not that it listens."""
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.1)
        else:
            return
    raise DidNotStart(f"nothing listens on port {port}")
