"""A client as a process of its own: it knows address, key and model of an episode, and nothing of AgentJet.

Nothing phones home: telemetry is switched off, and the guard refuses every connection that leaves this machine and
writes it down.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = HERE.parent / ".venv-conformance" / "bin" / "python"
NODE = HERE / "node"
PATIENCE = 180.0
"""Seconds that a client may take; the slowest import for ten."""

SILENT = {
    "AGENTSCOPE_DISABLE_TELEMETRY": "1",
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
    """How a client's process ended; `reached` are the addresses outside this machine that it tried to reach."""

    code: int
    output: str
    errors: str
    reached: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The last line of its output."""
        return (self.output.strip().splitlines() or [""])[-1]


def is_node(script: str) -> bool:
    """Whether a script is one of `node/`."""
    return script.endswith(".mjs")


def command(script: str, *arguments: str) -> list[str]:
    """How a script of `clients/` or `node/` is run. The guard comes first."""
    if is_node(script):
        return ["node", "--require", str(NODE / "guard.cjs"), str(NODE / script), *arguments]
    return [str(PYTHON), str(HERE / "clients" / script), *arguments]


async def run(argv: list[str], episode: dict[str, Any], folder: Path) -> Ended:
    """Run a client on an episode, with `folder` as its home; it is killed when it takes too long."""
    folder.mkdir(parents=True, exist_ok=True)
    reached = folder / "reached"
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=_environment(episode, folder, reached),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        output, errors = b"", f"killed after {PATIENCE:.0f} s".encode()
        await process.wait()
    tried = tuple(reached.read_text(encoding="utf-8").split()) if reached.exists() else ()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(errors="replace"), errors.decode(errors="replace"), tried)


def _environment(episode: dict[str, Any], folder: Path, reached: Path) -> dict[str, str]:
    """Of this process's environment only the search path comes along."""
    url, key = episode["base_url"], episode["api_key"]
    return {
        **SILENT,
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
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
