"""`agentjet serve`: its options, and `ChildServer`, which runs it as a child process for other commands.

The server's libraries are imported by `server_process` only, after the options were read.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from typer import Option

from agentjet.cli import Config, Override, progress
from agentjet.errors import AgentJetError

if TYPE_CHECKING:
    from agentjet.client import Swarm

ADDRESS = re.compile(r"listens on (http://[^,\s]+),")
READY = "\nReady: "
"""Start of the line that a server prints when its models are loaded."""
POLL_SECONDS = 0.1
STOP_SECONDS = 120.0
"""Limit of a stop, which writes a checkpoint."""
NUM_LOG_LINES = 20


def serve(
    config: Config = None,
    override: Override = None,
    model: Annotated[
        str | None, Option(help="Hugging Face id, local folder, or smollm2-135m. Short for --set model.name=…")
    ] = None,
    data_dir: Annotated[
        str | None, Option(help="Folder of the journal, the checkpoints and the tokens; an existing one is continued.")
    ] = None,
    port: Annotated[int | None, Option(help="Port to listen on; 0 takes a free one.")] = None,
    host: Annotated[
        str | None, Option(help="Address to listen on; a non-loopback one needs TLS (server.tls_cert) or --insecure.")
    ] = None,
    insecure: Annotated[bool, Option("--insecure", help="Allow plain HTTP on a non-loopback address.")] = False,
    end_with_input: Annotated[
        bool,
        Option(
            "--end-with-input", help="End when standard input ends, so that the server ends with its parent process."
        ),
    ] = False,
) -> None:
    """Serve a model for agents to use, and train it with the rewards they send back.

    Ctrl-C saves a checkpoint and ends the server; the same command continues from there.
    """
    from agentjet.cli.server_process import run
    from agentjet.config import load_config

    short = {
        "model.name": model,
        "server.data_dir": data_dir,
        "server.port": port,
        "server.host": host,
        "server.insecure": insecure or None,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in short.items() if value is not None]
    run(load_config(config, [*(override or ()), *overrides]), ends_with_input=end_with_input)


class ServerEnded(AgentJetError):
    """The child process ended by itself."""


def address_when_ready(log: Path, check: Callable[[], None]) -> str:
    """Returns the URL of the server that writes this log, once its model is loaded. `check` is called until then, and
    may raise.
    """
    while READY not in (text := log.read_text(encoding="utf-8", errors="replace")):
        check()
        time.sleep(POLL_SECONDS)
    found = ADDRESS.search(text)
    assert found is not None
    return found[1]


def serve_on_node() -> None:
    """`agentjet serve` with the options of the command line, on the address at which a node reaches the head of its Ray
    cluster. Plain HTTP: Ray itself, which starts this process, needs a network that can be trusted.
    """
    from agentjet.cli.main import main
    from agentjet.processes.guardian import RAY_HEAD

    address, _, port = os.environ[RAY_HEAD].rpartition(":")
    with socket.create_connection((address.strip("[]"), int(port))) as connection:
        host = connection.getsockname()[0]
    for name in [name for name in os.environ if name.startswith("AGENTJET_")]:
        del os.environ[name]
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, for an actor that asks for no core
    sys.argv[1:1] = ["serve", "--host", host, "--insecure"]
    main()


class ChildServer:
    """A server on a free loopback port, with its own data dir and log; leaving the context ends it.

    It runs in a new session, so Ctrl-C reaches this process only: this process first aborts its live episodes,
    then asks the child to save a checkpoint and end. A second Ctrl-C kills the child. A child whose parent was killed
    ends, too.
    """

    def __init__(
        self, settings: Path | None, overrides: Sequence[str], data_dir: Path, *, is_one_of_many: bool = False
    ) -> None:
        """With `is_one_of_many` its start and stop show no progress: several lines would overwrite each other."""
        self.data_dir = data_dir
        self._progress: Callable[..., AbstractContextManager[None]] = (
            (lambda *_: nullcontext()) if is_one_of_many else progress
        )
        self.log = data_dir / "serve.log"
        self.url = ""
        data_dir.mkdir(0o700, parents=True, exist_ok=True)
        arguments = ["--data-dir", str(data_dir), "--host", "127.0.0.1", "--port", "0", "--end-with-input"]
        arguments += [] if settings is None else ["--config", str(settings)]
        arguments += [f"--set={override}" for override in overrides]
        self.log.touch(0o600)
        os.truncate(self.log, 0)
        with self.log.open("ab") as log:  # To append: the server may shorten it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentjet.cli", "serve", *arguments],
                stdin=subprocess.PIPE,  # Never written to: it closes when this process ends.
                stdout=log,
                stderr=subprocess.STDOUT,
                # A token or an address in the environment belongs to another server.
                env={name: value for name, value in os.environ.items() if not name.startswith("AGENTJET_")},
                start_new_session=True,
            )

    def connect(self, check: Callable[[], None] = lambda: None) -> Swarm:
        """A client with the admin token, once the model is loaded. Raises `ServerEnded` with the end of the log.

        `check` is called while the model loads, and may raise to give up.
        """
        from agentjet.client import Retry, Swarm

        def both() -> None:
            check()
            self.check()

        with self._progress("starting a server", self._last_line):
            self.url = address_when_ready(self.log, both)
        token = (self.data_dir / "admin-token").read_text().strip()
        # This server is never restarted, so a long wait for it is useless.
        return Swarm(self.url, token, retry=Retry(patience=10.0, first_patience=10.0))

    def check(self) -> None:
        """Raises `ServerEnded` if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServerEnded(
                f"the server ended with exit code {code}. The end of its log, {self.log}:\n{self._log_tail()}"
            )

    def stop(self) -> None:
        """Asks the server to save a checkpoint and end; idempotent. Kills it after `STOP_SECONDS`, or on a second
        Ctrl-C."""
        self._process.terminate()
        try:
            with self._progress("the server finishes its batch, saves a checkpoint and ends"):
                self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise ServerEnded(
                f"the server did not end within {STOP_SECONDS:.0f} s and was killed; see {self.log}"
            ) from None
        finally:
            self._process.kill()  # Does nothing if the process has ended.
            self._process.communicate()

    def _log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _last_line(self) -> str:
        """The newest line of the log, which has the progress of the start."""
        return (self._log_text().splitlines() or [""])[-1]

    def _log_tail(self) -> str:
        return "\n".join("    " + line for line in self._log_text().splitlines()[-NUM_LOG_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
