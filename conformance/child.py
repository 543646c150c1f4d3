"""A client as a separate process: it gets address, key and model of an episode, and nothing else of AgentJet.

Telemetry is switched off. The guard refuses every connection that leaves this machine and records it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = HERE.parent / ".venv-conformance" / "bin" / "python"
AIDER = HERE.parent / ".venv-conformance-aider" / "bin"
OPENHANDS = HERE.parent / ".venv-conformance-openhands" / "bin"
CREWAI = HERE.parent / ".venv-conformance-crewai" / "bin"
VERIFIERS = HERE.parent / ".venv-conformance-verifiers" / "bin"
"""Environments of clients whose pins clash with those of the others, or that need a newer Python."""
NODE = HERE / "node"
PRODUCTS = HERE / "products"
PATIENCE = 180.0
"""Seconds that a client may take; the slowest import for ten."""

SILENT = {
    "AGENTSCOPE_DISABLE_TELEMETRY": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}


@dataclass(frozen=True)
class Ended:
    """The end of a client's process; `reached` are the addresses outside this machine that it tried to reach."""

    code: int
    output: str
    errors: str
    reached: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The last line of its output."""
        return (self.output.strip().splitlines() or [""])[-1]

    @property
    def lines(self) -> list[str]:
        """Lines of its output without the spaces around them."""
        return [line.strip() for line in self.output.splitlines()]


def is_node(script: str) -> bool:
    """True if a script is one of `node/`."""
    return script.endswith(".mjs")


def is_product(script: str) -> bool:
    """True if a script is one of `products/`."""
    return (PRODUCTS / script).is_file()


def command(script: str, *arguments: str) -> list[str]:
    """The command line of a script of `clients/`, `node/` or `products/`. The guard comes first."""
    if is_node(script):
        return ["node", "--require", str(NODE / "guard.cjs"), str(NODE / script), *arguments]
    if script.endswith(".sh"):
        return ["sh", "-eu", str(PRODUCTS / script), *arguments]
    if is_product(script):
        return [str(OPENHANDS / "python"), str(PRODUCTS / script), *arguments]
    python = CREWAI / "python" if "CrewAI" in arguments else PYTHON
    python = VERIFIERS / "python" if script.startswith("verifiers") else python
    return [str(python), str(HERE / "clients" / script), *arguments]


async def run(argv: list[str], episode: dict[str, Any], folder: Path, *, product: bool = False) -> Ended:
    """Run a client on an episode in `folder`; it is killed with its children when it takes too long.

    Its home is `folder/home`. A product works in `folder/work`, and its proxy is one that writes down what it is asked
    to reach: a native program has no guard.
    """
    home, work, reached = folder / "home", folder / "work", folder / "reached"
    for made in (home, work, folder / "tmp"):
        made.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        environment = _environment(episode, folder, reached)
        if product:
            proxy = await stack.enter_async_context(_refusing_proxy(reached))
            environment |= _of_products(proxy)
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=environment,
            cwd=work,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(PATIENCE):
                output, errors = await process.communicate()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = await process.communicate()
            errors += f"\nkilled after {PATIENCE:.0f} s".encode()
    tried = tuple(reached.read_text(encoding="utf-8").split()) if reached.exists() else ()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(errors="replace"), errors.decode(errors="replace"), tried)


@asynccontextmanager
async def _refusing_proxy(reached: Path) -> AsyncIterator[str]:
    """The address of an HTTP proxy that refuses everything and appends the targets to `reached`."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = (await reader.readline()).decode(errors="replace").split()
        with reached.open("a", encoding="utf-8") as file:
            file.write(f"{words[1] if len(words) > 1 else '?'}\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _of_products(proxy: str) -> dict[str, str]:
    local = "127.0.0.1,localhost"
    bins = (NODE / "node_modules" / ".bin", NODE / "node_modules" / "opencode-linux-x64" / "bin", PYTHON.parent, AIDER)
    return {
        "PATH": os.pathsep.join([*map(str, bins), os.environ["PATH"]]),
        "NODE_OPTIONS": f"--require {NODE / 'guard.cjs'}",
        **{name: proxy for each in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for name in (each, each.lower())},
        **dict.fromkeys(("NO_PROXY", "no_proxy"), local),
    }


def _environment(episode: dict[str, Any], folder: Path, reached: Path) -> dict[str, str]:
    """The environment of `agentjet run`, and of this process's environment the search path only."""
    url, key = episode["base_url"], episode["api_key"]
    return {
        **SILENT,
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(HERE / "guard"),
        "PYTHONUTF8": "1",
        "CONFORMANCE_REACHED": str(reached),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": episode["model"],
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": episode["model"],
    }
