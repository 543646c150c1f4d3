"""Who may propose something to a study: a language model, a coding agent. Neither is needed, and neither judges."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.planner.agent_cli import Workshop
    from agentjet.research.planner.consult import Voice
    from agentjet.research.planner.plan import Plan

Llm = Annotated[
    str | None,
    typer.Option("--llm", metavar="URL", help="An OpenAI-compatible endpoint (http://.../v1) that may propose arms."),
]
LlmModel = Annotated[str, typer.Option("--llm-model", metavar="NAME", help="The model's name there.")]
LlmKeyFile = Annotated[Path | None, typer.Option("--llm-key-file", help="File with that endpoint's API key.")]
AgentCli = Annotated[
    str | None,
    typer.Option("--agent-cli", metavar="COMMAND", help="A coding agent that may write another version of the agent."),
]


def voice_of(url: str | None, model: str, key_file: Path | None) -> Voice | None:
    """The model that the options name. Raises `ConfigError`."""
    from agentjet.research.planner.endpoint import Endpoint

    if url is None:
        if model or key_file is not None:
            raise ConfigError("--llm-model and --llm-key-file are for an --llm")
        return None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--llm {url!r} is no address: give one such as http://127.0.0.1:8000/v1")
    if not model:
        raise ConfigError(f"--llm {url}: give the model's name there, too (--llm-model)")
    return Endpoint(url, model, key_of(key_file) if key_file else "")


def key_of(file: Path) -> str:
    """Without the white space around it. Raises `ConfigError`, which never holds any of it."""
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--llm-key-file {file}: {error.strerror}") from None
    if not re.fullmatch(rb"[!-~]+", key):
        raise ConfigError(
            f"--llm-key-file {file}: give a file with the key alone, in one line: it is empty, or has a blank, a line "
            "break or another character inside that no header can carry"
        )
    return key.decode("ascii")


def workshop_of(command: str | None) -> Workshop | None:
    """Where the coding agent that the option names works. Raises `ConfigError`."""
    from agentjet.research.planner.agent_cli import Workshop

    if command is None:
        return None
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--agent-cli {command!r}: {error}; quote it as a shell would") from None
    if not words:
        raise ConfigError(f"--agent-cli {command!r} is no command: give one, or leave it out")
    return Workshop(tuple(words))


def advised(plan: Plan, out: Path, voice: Voice | None, workshop: Workshop | None) -> Plan:
    """The plan with what was proposed and granted; what was said is in the study's journal."""
    from agentjet.cli.research.telling import Told
    from agentjet.research.folder import StudyFolder
    from agentjet.research.planner.agent_cli import propose_code
    from agentjet.research.planner.consult import refine

    if voice is None and workshop is None:
        return plan
    with Told(StudyFolder(out).journal, typer.echo) as journal:
        if voice is not None:
            plan = refine(plan, voice, journal)
        if workshop is not None:
            plan = propose_code(plan, plan.study.arms[0].name, workshop, out / "code", journal)
    return plan
