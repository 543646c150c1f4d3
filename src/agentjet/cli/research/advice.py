"""Who may propose something to a study: a language model, a coding agent. Neither is needed, and neither judges."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.errors import ConfigError

if TYPE_CHECKING:
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
    try:
        return Endpoint(url, model, key_file.read_text(encoding="utf-8").strip() if key_file else "")
    except OSError as error:
        raise ConfigError(f"--llm-key-file {key_file}: {error.strerror}") from None


def advised(plan: Plan, out: Path, voice: Voice | None, agent_cli: str | None) -> Plan:
    """The plan with what was proposed and granted; what was said is in the study's journal."""
    from agentjet.cli.research.telling import Told
    from agentjet.research.folder import StudyFolder
    from agentjet.research.planner.agent_cli import Workshop, propose_code
    from agentjet.research.planner.consult import refine

    if voice is None and agent_cli is None:
        return plan
    with Told(StudyFolder(out).journal, typer.echo) as journal:
        if voice is not None:
            plan = refine(plan, voice, journal)
        if agent_cli is not None:
            workshop = Workshop(tuple(shlex.split(agent_cli)))
            plan = propose_code(plan, plan.study.arms[0].name, workshop, out / "code", journal)
    return plan
