"""`agentjet research start`, `resume` and `digest`, and the campaign of `agentjet research demo`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentjet.cli import example, load_example
from agentjet.cli.research.study import AdminTokenFiles, Local, Servers
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.campaign.campaign import Question
    from agentjet.research.campaign.models import Proposer
    from agentjet.research.journal import JournalEntry
    from agentjet.research.servers import ServerSlot

UNFENCED = "this kernel has no Landlock (Linux 5.13), so the arms' code runs with the rights of this user"
Folder = Annotated[Path, typer.Argument(metavar="CAMPAIGN", help="Folder of the campaign.")]
Llm = Annotated[
    str | None,
    typer.Option(
        "--llm",
        metavar="URL",
        help="A language model that is asked first (http://.../v1), or a record of answers to play (llm.jsonl).",
    ),
]
LlmModel = Annotated[str, typer.Option("--llm-model", metavar="NAME", help="Name of the model at that URL.")]
LlmApi = Annotated[Literal["openai", "anthropic"], typer.Option("--llm-api", help="The API of that URL.")]
LlmKeyFile = Annotated[Path | None, typer.Option("--llm-key-file", help="File with the API key of that URL.")]
Papers = Annotated[Path | None, typer.Option(help="Folder of papers (.md, .txt) that the language model reads.")]
AgentCli = Annotated[
    str | None, typer.Option("--agent-cli", metavar="COMMAND", help="A coding agent that is asked first for a patch.")
]
AgentEnv = Annotated[
    list[str] | None,
    typer.Option("--agent-env", metavar="NAME", help="Variable that the coding agent gets, such as that of its key."),
]


def start(
    topic: Annotated[str, typer.Option(help='The question, such as "why does it not learn?".')],
    subject: Annotated[Path, typer.Option(help="The subject.toml beside the agent's files.")],
    budget: Annotated[str, typer.Option(help="Full runs (500runs; at least 10) or hours (48h).")],
    out: Annotated[Path, typer.Option(help="Folder of the campaign, which must be new.")] = Path("campaign"),
    seed: Annotated[int, typer.Option(help="Seed from which all seeds of the campaign are derived.")] = 0,
    local: Local = 2,
    server: Servers = None,
    admin_token_file: AdminTokenFiles = None,
    llm: Llm = None,
    llm_model: LlmModel = "",
    llm_api: LlmApi = "openai",
    llm_key_file: LlmKeyFile = None,
    papers: Papers = None,
    agent_cli: AgentCli = None,
    agent_env: AgentEnv = None,
) -> None:
    """Start a campaign: find out why an agent does not learn better, and mend it. Ctrl-C stops it; `resume` continues.

    The folder of subject.toml is copied. Observations, tries and results are in the campaign's notebook. At the end
    the report is in the folder.
    """
    from agentjet.cli.research.execution import slots_of
    from agentjet.config.loader import check_model_name
    from agentjet.research.campaign.campaign import Question
    from agentjet.research.campaign.models import Budget
    from agentjet.research.campaign.subject_file import read_subject
    from agentjet.research.campaign.subject_repo import SubjectRepo
    from agentjet.research.journal import StudyFolder

    check_topic(topic, is_read=llm is not None or agent_cli is not None)
    question = Question(topic, Budget.parse(budget), seed)
    if (out / "notebook.sqlite").exists():
        raise ConfigError(
            f"--out {out}: a campaign is there: continue it with agentjet research resume {out}, or, if it has ended "
            "or cannot go on, start with another --out"
        )
    proposers = proposers_of(out, llm, llm_model, llm_api, llm_key_file, papers, agent_cli, agent_env or [])
    slots = slots_of(server, admin_token_file, local)
    check_model_name(read_subject(subject).model, f"{subject}: model =")
    StudyFolder(out).make()
    if any(out.iterdir()) and not (out / "source.json").exists():
        raise ConfigError(f"--out {out} is not an empty folder: choose another one")
    repo = SubjectRepo.create(out, subject)
    conduct(out, slots, proposers, replace(question, evaluator=repo.judge_hash, equal=repo.equal))


def check_topic(topic: str, is_read: bool) -> None:
    """Raises `ConfigError` for an empty topic, and for one in another script if no language model reads it."""
    from agentjet.research.campaign.campaign import OFFLINE

    letters = [character for character in topic if character.isalpha()]
    if not topic.strip():
        raise ConfigError("--topic is empty: give the question, such as 'why does it not learn?'")
    if not is_read and 2 * sum(map(str.isascii, letters)) < len(letters):
        raise ConfigError(f"--topic {topic!r}: {OFFLINE} Give an English title, or a language model (--llm)")


def resume(
    folder: Folder,
    local: Local = 2,
    server: Servers = None,
    admin_token_file: AdminTokenFiles = None,
    llm: Llm = None,
    llm_model: LlmModel = "",
    llm_api: LlmApi = "openai",
    llm_key_file: LlmKeyFile = None,
    papers: Papers = None,
    agent_cli: AgentCli = None,
    agent_env: AgentEnv = None,
) -> None:
    """Continue a campaign that was interrupted or killed. Give the options of servers and language models again."""
    from agentjet.cli.research.execution import slots_of

    if not (folder / "notebook.sqlite").exists():
        raise ConfigError(f"{folder}: there is no campaign: begin one with agentjet research start")
    if not (folder / "source.json").exists():
        raise ConfigError(f"{folder}: an archived campaign without its subject and runs: only its report can be read")
    proposers = proposers_of(folder, llm, llm_model, llm_api, llm_key_file, papers, agent_cli, agent_env or [])
    conduct(folder, slots_of(server, admin_token_file, local), proposers)


def conduct(
    folder: Path, slots: Sequence[ServerSlot], proposers: Sequence[Proposer], question: Question | None = None
) -> None:
    """Runs a campaign from where its notebook stands to the report. A new one has a `question`."""
    from agentjet.client.threads import raise_on_signals
    from agentjet.research import fence
    from agentjet.research.campaign.campaign import Campaign, Question
    from agentjet.research.campaign.notebook import Notebook
    from agentjet.research.campaign.report import build
    from agentjet.research.campaign.strategist import Strategist
    from agentjet.research.campaign.subject_repo import SubjectRepo
    from agentjet.research.swarm_runner import SwarmRunner

    again = f"agentjet research resume {shlex.quote(str(folder))}"
    repo = SubjectRepo(folder)

    def tell(entry: JournalEntry) -> None:
        if line := line_of(entry):
            typer.echo(repo.as_given(line))

    try:
        with (
            raise_on_signals(),
            Notebook(folder, notify=tell) as notebook,
            SwarmRunner(repo.subject_of, folder, slots, typer.echo) as runner,
        ):
            limits = [
                *(() if fence.version() else (UNFENCED,)),
                *filter(None, (getattr(p, "limit", "") for p in proposers)),
            ]
            for limit in limits:
                typer.echo(f"note: {limit}")
            asked = question or Question.from_json(notebook.entries[0].content["question"])
            proposers = [*proposers, Strategist()]
            if ended := notebook.known("ended"):
                tell(ended)
            ending = Campaign(asked, notebook, repo, runner, proposers, limits=limits).run()
    except ConfigError as error:
        raise ConfigError(repo.as_given(str(error))) from None
    except (KeyboardInterrupt, SystemExit) as ended:
        typer.echo(f"interrupted; continue with: {again}", err=True)
        raise typer.Exit(130 if isinstance(ended, KeyboardInterrupt) else 143) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}; then continue with: {again}") from error
    if ending["score"] is None:
        raise ConfigError(
            f"{folder}: no run of the subject has a score: mend the subject, and start with another --out"
        )
    for written in build(folder):
        typer.echo(f"The report is {written}.")


def line_of(entry: JournalEntry) -> str:
    """An entry in one line; empty for entries about the machinery."""
    from agentjet.cli.research.execution import in_a_line
    from agentjet.research.campaign.notebook import described

    return f"{entry.number:4d} {in_a_line(': '.join(step))}" if (step := described(entry)) else ""


def status(folder: Path, as_json: bool, day: int = 0) -> None:
    """Prints where a campaign stands, or stood at the end of a day."""
    from agentjet.research.campaign.notebook import Notebook, standing

    with Notebook(folder, writer=False) as notebook:
        found = standing(notebook, day)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        typer.echo(f"{name.capitalize()}:")
        for line in (value if isinstance(value, list) else [value]) or ["-"]:
            typer.echo(f"  {line}")


def digest(
    folder: Folder,
    day: Annotated[int, typer.Option(min=0, help="At the end of this day since the start; 0: now.")] = 0,
) -> None:
    """Print what a campaign tried, found and ruled out, what it does now, and what is spent and left."""
    if (folder / "study.json").exists():
        raise ConfigError(f"{folder} is a study, and digests are those of campaigns: use agentjet research status")
    status(folder, as_json=False, day=day)


def proposers_of(
    folder: Path,
    llm: str | None,
    llm_model: str,
    llm_api: Literal["openai", "anthropic"],
    llm_key_file: Path | None,
    papers: Path | None,
    agent_cli: str | None,
    agent_env: list[str],
) -> list[Proposer]:
    """The proposers that are asked before the strategist. Raises `ConfigError`."""
    from agentjet.research.campaign.coding_agent import CodingAgent
    from agentjet.research.campaign.llm import LanguageModel, LlmEndpoint, Played, replies_in

    found: list[Proposer] = []
    if papers is not None and not papers.is_dir():
        raise ConfigError(f"--papers {papers}: there is no such folder")
    if llm is None and (llm_model or llm_key_file is not None or papers is not None):
        raise ConfigError("--llm-model, --llm-key-file and --papers need --llm")
    record = folder / "llm.jsonl"
    if llm is not None and llm.endswith(".jsonl"):
        if llm_model or llm_key_file is not None:
            raise ConfigError(f"--llm {llm} is a record of answers: omit --llm-model and --llm-key-file")
        if not replies_in(Path(llm)):
            raise ConfigError(f"--llm {llm}: the record has no answers")
        played = Played(Path(llm), before=len(replies_in(record)) if record.exists() else 0)
        limit = f"the answers of the language model were played from a record, {Path(llm).name}; no model was asked"
        found.append(LanguageModel(played, record, papers, limit=limit))
    elif llm is not None:
        if not llm.startswith(("http://", "https://")):
            raise ConfigError(f"--llm {llm!r} is not a URL: give one such as http://127.0.0.1:8000/v1")
        if not llm_model:
            raise ConfigError(f"--llm {llm}: also give the model's name (--llm-model)")
        endpoint = LlmEndpoint(llm, llm_model, key_of(llm_key_file) if llm_key_file else "", llm_api)
        found.append(LanguageModel(endpoint, record, papers))
    if agent_env and agent_cli is None:
        raise ConfigError("--agent-env needs --agent-cli")
    if agent_cli is not None:
        missing = [name for name in agent_env if name not in os.environ]
        if missing:
            raise ConfigError(f"--agent-env {missing[0]}: this variable is not set")
        try:
            command = tuple(shlex.split(agent_cli)) or ("",)
        except ValueError as error:
            raise ConfigError(f"--agent-cli {agent_cli!r}: {error}; quote it as a shell would") from None
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"--agent-cli {agent_cli!r}: there is no program {command[0]!r}: install it, or correct it"
            )
        found.append(CodingAgent(command, environment={name: os.environ[name] for name in agent_env}))
    return found


def key_of(file: Path) -> str:
    """Reads the key without surrounding white space. Raises `ConfigError`, which never contains the key."""
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--llm-key-file {file}: {error.strerror}") from None
    if not re.fullmatch(rb"[!-~]+", key):
        raise ConfigError(
            f"--llm-key-file {file}: the file must hold only the key, on one line: it is empty, or has a blank, a line "
            "break or another character that is invalid in a header"
        )
    return key.decode("ascii")


DEFAULT_OUT = Path("research-demo")
TOPIC = "Why does the model not learn to answer in digits?"
BUDGET = "30runs"


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the campaign; an interrupted one is continued.")] = DEFAULT_OUT,
    local: Local = 2,
) -> None:
    """Run a whole campaign on a tiny model in a few minutes: a subject with two planted troubles.

    A model of random weights should answer in digits. Its agent allows three tokens and pays only answers without any
    other character. No change of a setting mends that.
    """
    from agentjet.cli.research.execution import local_slots
    from agentjet.research.campaign.campaign import Question
    from agentjet.research.campaign.models import Budget
    from agentjet.research.campaign.subject_repo import SubjectRepo
    from agentjet.research.journal import StudyFolder

    began = time.monotonic()
    if not (out / "notebook.sqlite").exists():
        StudyFolder(out).make()
        if any(out.iterdir()) and not (out / "given").exists():
            raise ConfigError(f"--out {out} is not an empty folder: choose another one")
        shutil.rmtree(out / "given", ignore_errors=True)
        shutil.copytree(example("digits") / "campaign", out / "given")
        load_example("digits", "random_model").make_random_model(out / "given" / "model")
    repo = SubjectRepo.create(out, out / "given" / "subject.toml")
    conduct(out, local_slots(local), [], Question(TOPIC, Budget.parse(BUDGET), evaluator=repo.judge_hash))
    typer.echo(f"{time.monotonic() - began:.0f} s in all")
