"""`agentjet research`: studies compare ways to train an agent (`new`, `run`), campaigns mend one (`start`, `resume`).

The functions of the commands import what they need, so that `agentjet --help` is fast.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from agentjet.cli import Json, example, load_example
from agentjet.cli.serve import STOP_SECONDS, ChildServer, ServerEnded
from agentjet.errors import ConfigError
from agentjet.types import DEFAULT_RUN, JOURNAL

if TYPE_CHECKING:
    from agentjet.research.campaign.runs import Question
    from agentjet.research.campaign.strategist import Proposer
    from agentjet.research.journal import JournalEntry, StudyLog
    from agentjet.research.models import Finding, Outcome, Setting, Subject
    from agentjet.research.swarm_runner import RunningServer, ServerSlot

Folder = Annotated[Path, Argument(metavar="FOLDER", help="Folder of the study or campaign.")]
CampaignFolder = Annotated[Path, Argument(metavar="CAMPAIGN", help="Folder of the campaign.")]
Local = Annotated[int, Option("--local", min=1, help="Servers to start on this machine, side by side.")]
NOTEBOOK, STUDY, SOURCE = "notebook.sqlite", "study.json", "source.json"
"""Files that make a folder that of a campaign, of a study, and of a campaign that can be continued."""
app = typer.Typer(
    name="research",
    help="Find out what keeps an agent from learning, and mend it (start); or compare ways to train it (new, run).",
    no_args_is_help=True,
)


@dataclass(frozen=True)
class Servers:
    """The options of the servers that carry out trials."""

    local: Local = 2
    server: Annotated[
        list[str] | None,
        Option("--server", metavar="URL", help="Run trials on this server instead of starting any; can be repeated."),
    ] = None
    admin_token_file: Annotated[
        list[Path] | None,
        Option("--admin-token-file", help="`admin-token` in that server's data dir; one for each --server."),
    ] = None

    def slots(self) -> Sequence[ServerSlot]:
        """The servers of `--server`, which must answer; or those to start on this machine. Raises `ConfigError`."""
        from agentjet.research.swarm_runner import SharedServerSlot

        urls, token_files = self.server or [], self.admin_token_file or []
        if len(urls) != len(token_files):
            raise ConfigError(f"{len(urls)} --server and {len(token_files)} --admin-token-file: give one for each")
        try:
            tokens = [file.read_text(encoding="utf-8").strip() for file in token_files]
        except OSError as error:
            raise ConfigError(f"--admin-token-file {error.filename}: {error.strerror}") from None
        shared = [SharedServerSlot(url, token, typer.echo) for url, token in zip(urls, tokens, strict=True)]
        for slot in shared:
            slot.check()
        return shared or local_slots(self.local)


def in_a_line(note: str) -> str:
    """A note for the terminal, of at most 400 characters."""
    from agentjet.research.models import shortened

    return shortened(" ".join(note.split()), 400)


# ---- both ------------------------------------------------------------------------------------------------------------


def is_campaign(folder: Path) -> bool:
    """True for a campaign, False for a study. Raises `ConfigError` for another folder."""
    if not (folder / NOTEBOOK).exists() and not (folder / STUDY).exists():
        raise ConfigError(f"{folder}: there is neither a campaign ({NOTEBOOK}) nor a study ({STUDY}) in this folder")
    return (folder / NOTEBOOK).exists()


def status(folder: Folder, as_json: Json = False) -> None:
    """Show the progress of a study or of a campaign, its spending and its findings so far."""
    from agentjet.research.journal import StudyFolder

    if is_campaign(folder):
        print_standing(folder, as_json)
        return
    files = StudyFolder(folder)
    study, log = files.study(), files.log()
    found = summary(log)
    if as_json:
        typer.echo(json.dumps({"study": study.id, "topic": study.topic, **found}, indent=2))
        return
    typer.echo(f"{study.topic}  (study {study.id})")
    for name, value in found.items():
        if name != "findings":
            typer.echo(f"{name:12} {plain(value)}")
    for finding in found.get("findings", []):
        typer.echo(f"{finding['verdict'].replace('_', ' '):24} {finding['claim']}: {finding['reason']}")


def report(
    folder: Folder,
    check: Annotated[
        Path | None, Option(help="Check this report of a study against its journal instead of writing one.")
    ] = None,
) -> None:
    """Write the report of a study or of a campaign, finished or not."""
    from agentjet.research import report as studies
    from agentjet.research.campaign.report import build
    from agentjet.research.journal import StudyFolder

    if not is_campaign(folder):
        log = StudyFolder(folder).log()
        if check is None:
            typer.echo(studies.build(log, folder))
        elif problems := studies.check(check, log):
            raise ConfigError("\n".join([f"{check} differs from the journal:", *problems]))
        else:
            typer.echo(f"{check} agrees with the journal")
        return
    if check is not None:
        raise ConfigError(f"--check {check}: {folder} is a campaign, and only reports of studies are checked: omit it")
    for written in build(folder):
        typer.echo(written)


# ---- studies ---------------------------------------------------------------------------------------------------------


def new(
    topic: Annotated[str, Argument(help='The question, such as "Does the KL penalty matter?"; with --space a title.')],
    agent: Annotated[str, Option(help="FILE.py:FUNCTION or package.module:function, called with task, episode.")],
    tasks: Annotated[str, Option(help="Training tasks: FILE.jsonl, or a function that returns them.")],
    held_out: Annotated[str, Option("--held-out", help="Held-out tasks for scoring, in the same form.")],
    out: Annotated[Path, Option(help="Folder of the study.")],
    budget: Annotated[float, Option(help="Full runs that the study may cost.")],
    space: Annotated[
        Path | None, Option(help="Arms, knobs and claims (TOML). Default: those by which the question is answered.")
    ] = None,
    level: Annotated[
        list[str] | None,
        Option(
            "--level",
            metavar="FACTOR=VALUE",
            help="A level of what the question is about, such as agent=team.py:agent or steps=80; can be repeated.",
        ),
    ] = None,
    model: Annotated[str, Option(help="Hugging Face id, local folder, or smollm2-135m.")] = "smollm2-135m",
    evaluator: Annotated[str, Option(help="Agent that plays the held-out tasks; default: the agent.")] = "",
    steps: Annotated[int, Option(min=1, max=1_000_000, help="Batches of a full run.")] = 40,
    repeats: Annotated[int, Option(min=1, help="Episodes per held-out task in an evaluation.")] = 1,
    concurrency: Annotated[int, Option(min=1, help="Episodes at the same time.")] = 32,
    base: Annotated[
        list[str] | None,
        Option("--set", metavar="SECTION.SETTING=VALUE", help="A setting of every run; can be repeated."),
    ] = None,
    floor: Annotated[float, Option(help="Score of a diverged run whose policy cannot answer.")] = 0.0,
    seed: Annotated[int, Option(help="Seed from which all seeds of the study are derived.")] = 0,
) -> None:
    """Plan a study from a question: arms, claims, seeds, looks and budget. Nothing is run.

    The plan has the reading of the question. A question that no study answers is refused with near ones. Read plan.md
    in the folder, then run it with `agentjet research run FOLDER`.
    """
    from agentjet.config.loader import parse_overrides
    from agentjet.research.journal import StudyFolder
    from agentjet.research.models import Subject
    from agentjet.research.plan import plan, read_space
    from agentjet.research.report import plan_page
    from agentjet.research.topic import given_levels, read_topic, space_of

    if not topic.strip():
        raise ConfigError("the title is empty: give the question, such as 'Does a KL penalty help?'")
    files = StudyFolder(out)
    files.check_new()
    subject = fixed(
        Subject(
            model=model,
            agent=agent,
            tasks=tasks,
            held_out=held_out,
            evaluator=evaluator,
            settings=dict(parse_overrides(base or [])),
            steps=steps,
            evaluations=min(4, steps),
            repeats=repeats,
            concurrency=concurrency,
            floor=floor,
        )
    )
    if space is not None:
        if level:
            raise ConfigError(
                "--level belongs to a question that the planner reads: leave it out, or leave out --space"
            )
        study = plan(topic, budget=budget, subject=subject, space=read_space(space), folder=space.parent, seed=seed)
    else:
        question = read_topic(topic)
        found = space_of(question, given_levels(level or []), subject)
        study = plan(topic, budget=budget, subject=subject, space=found, seed=seed)
        study = replace(study, form=question.form, reading=question.reading())
    page = plan_page(study)
    files.write(study, page)
    typer.echo(page)
    typer.echo(f"The plan is {out / 'plan.md'}. Run it with: agentjet research run {shlex.quote(str(out))}")


def fixed(subject: Subject) -> Subject:
    """Returns the subject with the hash of its code. Raises `ConfigError` for an error that every trial would have."""
    from agentjet.config.loader import check_model_name

    check_model_name(subject.model, "--model")
    shared = {task.id for task in subject.training_tasks()} & {task.id for task in subject.held_out_tasks()}
    if shared:
        raise ConfigError(
            f"{len(shared)} held-out tasks are also training tasks, such as {min(shared)!r}: a score on them is "
            "meaningless; remove them from one of the two"
        )
    subject.load_arm_agent("")
    subject.load_evaluator()
    return subject.with_hashes()


def run(folder: Folder, servers: Servers) -> None:
    """Run a study, or continue one that was interrupted or killed. Ctrl-C stops it; the same command continues.

    Servers are started on this machine, one per trial; or each trial is a run on a server of --server, beside others.
    At the end the report is in the folder.
    """
    from agentjet.research.journal import StudyFolder
    from agentjet.research.swarm_runner import check_arms

    slots = servers.slots()
    if servers.server:
        check_arms(StudyFolder(folder).study())
    carry_out(folder, slots)


def carry_out(folder: Path, slots: Sequence[ServerSlot]) -> None:
    """Runs a study from the plan to the report. Raises `ConfigError`."""
    from agentjet.client.threads import raise_on_signals
    from agentjet.research.journal import StudyFolder, StudyLog
    from agentjet.research.report import build
    from agentjet.research.scheduler import conduct
    from agentjet.research.swarm_runner import ServerUnavailable, SwarmRunner

    files, again = StudyFolder(folder), f"agentjet research run {shlex.quote(str(folder))}"
    study = files.study()
    if study.subject is None:
        raise ConfigError(f"{folder}: the study names no subject to train; plan it with --agent")
    study.subject.check_code()
    try:
        with (
            raise_on_signals(),
            StudyLog(files.journal) as journal,
            SwarmRunner(study.subject, folder, slots, typer.echo) as runner,
        ):
            journal.notify = console(typer.echo, journal)
            conduct(study, journal, runner)
        written = build(journal, folder)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except ServerUnavailable as gone:
        raise ConfigError(f"{gone}. No trial was lost. Continue with: {again}") from None
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}. The journal is intact: free disk space, or restore the "
            f"study's folder, and continue with: {again}"
        ) from error
    typer.echo(f"The report is {written}, and {written.with_suffix('.md')}.")


def summary(log: StudyLog) -> dict[str, Any]:
    """Summary for `status --json`."""
    from agentjet.research.report import StudyView

    if log.study is None:
        return {"stage": "planned"}
    view = StudyView(log)
    budget, launches, ends = log.study.budget, log.of("intent"), log.of("outcome")
    left = {}
    if ends and view.spent and view.stage != "finished":
        minutes = round((budget - view.spent) * (ends[-1].at - launches[0].at) / view.spent / 60)
        left = {"time left": f"at most {minutes // 60} h {minutes % 60} min, at the pace so far"}
    return {
        "stage": view.stage,
        "trials": dict(Counter(launched.end for launched in view.launched)),
        "spent": round(view.spent, 2),
        "launched": round(view.spending.total - view.spent, 2),
        "budget": budget,
        **left,
        "findings": [
            {"claim": h.claim, **view.findings[h.id].to_json()} for h in log.study.hypotheses if h.id in view.findings
        ],
    }


def plain(content: object) -> str:
    """Formats journal content as text. Nested mappings are listed with their names."""
    if isinstance(content, Mapping):
        nested = any(isinstance(value, Mapping) for value in content.values())
        parts = [f"{name}{': ' if nested else ' = '}{plain(value)}" for name, value in content.items()]
        return ("; " if nested else ", ").join(parts)
    if isinstance(content, list | tuple):
        return ", ".join(map(plain, content))
    return f"{content:.4g}" if isinstance(content, float) else str(content)


def console(tell: Callable[[str], None], log: StudyLog) -> Callable[[JournalEntry], None]:
    """Prints new entries, and after each outcome the budget and the time that are left: the `notify` of a journal."""

    def notify(entry: JournalEntry) -> None:
        if line := entry_message(log, entry):
            tell(line)
        if entry.kind == "outcome":
            found = summary(log)
            left = f"; left: {found['time left']}" if "time left" in found else ""
            tell(f"spent {found['spent']:g} of {found['budget']:g} full runs{left}")

    return notify


SHOWN = ("rungs", "setting of ", "frozen")
"""Beginnings of names of decisions that are printed."""


def entry_message(log: StudyLog, entry: JournalEntry) -> str:
    """Returns a line about the newest entry; empty if it is of no interest to people."""
    from agentjet.research.models import Finding, Outcome

    body = entry.content
    match entry.kind:
        case "study":
            return f"study {log.study.id if log.study else ''}: {body['topic']}"
        case "outcome":
            return outcome_message(log, Outcome.from_json(body))
        case "decision" if body["name"].startswith(SHOWN):
            return f"decided: {body['name']}: {plain(body['content'])}"
        case "finding":
            return finding_message(log, Finding.from_json(body["content"]))
        case "diagnosis":
            return f"diagnosed: {trial_name(log, body['trial'])}: {body['cause'].replace('_', ' ')}: {body['seen']}"
    return ""


def outcome_message(log: StudyLog, outcome: Outcome) -> str:
    score = "no score" if outcome.score is None else f"score {outcome.score:.4g}"
    note = f" ({in_a_line(outcome.note)})" if outcome.note else ""
    return f"{trial_name(log, outcome.trial)}: {outcome.end.replace('_', ' ')}, {score}{note}"


def trial_name(log: StudyLog, trial_id: str) -> str:
    """Trials are numbered from 1, in the order of their intents."""
    trial = log.trials[trial_id]
    return f"trial {list(log.trials).index(trial_id) + 1}, {trial.phase} {trial.arm!r}, seed {trial.seed}"


def finding_message(log: StudyLog, finding: Finding) -> str:
    claims = {hypothesis.id: hypothesis.claim for hypothesis in log.study.hypotheses} if log.study else {}
    interval = ""
    if finding.estimate is not None and finding.confidence is not None:
        bounds = f"{finding.confidence:.1%} interval {finding.low:+.4g} to {finding.high:+.4g}"
        interval = f": {finding.estimate:+.4g}, {bounds}"
    verdict = finding.verdict.replace("_", " ")
    return f"{claims.get(finding.hypothesis, finding.hypothesis)}: {verdict}{interval} ({finding.reason})"


# ---- campaigns -------------------------------------------------------------------------------------------------------

UNSANDBOXED = "the arms' code runs with the rights of this user (--unsafe): "
Unsafe = Annotated[
    bool, Option("--unsafe", help="Where no sandbox can be made, run arms and coding agents with your rights.")
]


@dataclass(frozen=True)
class Proposers:
    """The options of the language model and the coding agent that are asked before the strategist."""

    llm: Annotated[
        str | None,
        Option(
            "--llm",
            metavar="URL",
            help="A language model that is asked first (http://.../v1), or a record of answers to play (llm.jsonl).",
        ),
    ] = None
    llm_model: Annotated[str, Option("--llm-model", metavar="NAME", help="Name of the model at that URL.")] = ""
    llm_api: Annotated[Literal["openai", "anthropic"], Option("--llm-api", help="The API of that URL.")] = "openai"
    llm_key_file: Annotated[Path | None, Option("--llm-key-file", help="File with the API key of that URL.")] = None
    llm_price: Annotated[
        str, Option("--llm-price", metavar="READ,WRITTEN", help="Prices of a million tokens, for the report: 3,15.")
    ] = ""
    papers: Annotated[Path | None, Option(help="Folder of papers (.md, .txt) that the language model reads.")] = None
    agent_cli: Annotated[
        str | None, Option("--agent-cli", metavar="COMMAND", help="A coding agent that is asked first for a patch.")
    ] = None
    agent_env: Annotated[
        list[str] | None,
        Option("--agent-env", metavar="NAME", help="Variable that the coding agent gets, such as that of its key."),
    ] = None
    agent_url: Annotated[
        str,
        Option(
            "--agent-url",
            metavar="URL",
            help="The only server that the coding agent reaches; variables with this URL lead there. Default: any.",
        ),
    ] = ""

    def of(self, folder: Path, unsafe: bool = False) -> list[Proposer]:
        """The proposers of the campaign in a folder. Raises `ConfigError`."""
        return [*self._language_models(folder), *self._coding_agents(unsafe)]

    def _language_models(self, folder: Path) -> Iterator[Proposer]:
        from agentjet.research.campaign.proposers import (
            LanguageModel,
            LlmEndpoint,
            ReplayedModel,
            papers_in,
            replies_in,
        )

        llm, record = self.llm, folder / "llm.jsonl"
        papers = papers_in(self.papers) if self.papers is not None else {}
        of_url = self.llm_model or self.llm_key_file is not None or self.llm_price
        if llm is None:
            if of_url or papers:
                raise ConfigError("--llm-model, --llm-key-file, --llm-price and --papers need --llm")
        elif llm.endswith(".jsonl"):
            if of_url:
                raise ConfigError(f"--llm {llm} is a record of answers: omit --llm-model, --llm-key-file, --llm-price")
            if not replies_in(Path(llm)):
                raise ConfigError(f"--llm {llm}: the record has no answers")
            played = ReplayedModel(Path(llm), before=len(replies_in(record)) if record.exists() else 0)
            limit = f"the answers of the language model were played from a record, {Path(llm).name}; no model was asked"
            yield LanguageModel(played, record, papers, limit=limit)
        elif not llm.startswith(("http://", "https://")):
            raise ConfigError(f"--llm {llm!r} is not a URL: give one such as http://127.0.0.1:8000/v1")
        elif not self.llm_model:
            raise ConfigError(f"--llm {llm}: also give the model's name (--llm-model)")
        else:
            key = key_of(self.llm_key_file) if self.llm_key_file else ""
            model = LlmEndpoint(llm, self.llm_model, key, self.llm_api)
            yield LanguageModel(model, record, papers, prices=prices_of(self.llm_price))

    def _coding_agents(self, unsafe: bool) -> Iterator[Proposer]:
        from agentjet.research.campaign.proposers import CodingAgent

        names = self.agent_env or []
        if self.agent_cli is None:
            if names or self.agent_url:
                raise ConfigError("--agent-env and --agent-url need --agent-cli")
            return
        if missing := [name for name in names if name not in os.environ]:
            raise ConfigError(f"--agent-env {missing[0]}: this variable is not set")
        given = f"--agent-cli {self.agent_cli!r}"
        try:
            command = tuple(shlex.split(self.agent_cli)) or ("",)
        except ValueError as error:
            raise ConfigError(f"{given}: {error}; quote it as a shell would") from None
        if shutil.which(command[0]) is None:
            raise ConfigError(f"{given}: there is no program {command[0]!r}: install it, or correct it")
        if self.agent_url and not self.agent_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--agent-url {self.agent_url!r} is not a URL: give one such as https://api.anthropic.com"
            )
        environment = {name: os.environ[name] for name in names}
        yield CodingAgent(command, environment=environment, url=self.agent_url, unsafe=unsafe)


def prices_of(text: str) -> tuple[float, float]:
    """Prices of a million tokens that are read and written. Raises `ConfigError`."""
    if not re.fullmatch(r"(\d+(\.\d+)?,\d+(\.\d+)?)?", text):
        raise ConfigError(f"--llm-price {text!r}: give the prices of a million tokens read and written, such as 3,15")
    read, _, written = text.partition(",")
    return float(read or 0), float(written or 0)


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


def start(
    topic: Annotated[str, Option(help='The question, such as "why does it not learn?".')],
    subject: Annotated[Path, Option(help="The subject.toml beside the agent's files.")],
    budget: Annotated[str, Option(help="Full runs (500runs; at least 10) or hours (48h).")],
    servers: Servers,
    proposers: Proposers,
    out: Annotated[Path, Option(help="Folder of the campaign, which must be new.")] = Path("campaign"),
    seed: Annotated[int, Option(help="Seed from which all seeds of the campaign are derived.")] = 0,
    unsafe: Unsafe = False,
) -> None:
    """Start a campaign: find out why an agent does not learn better, and mend it. Ctrl-C stops it; `resume` continues.

    The folder of subject.toml is copied. Observations, tries and results are in the campaign's notebook. At the end
    the report is in the folder.
    """
    from agentjet.config.loader import check_model_name
    from agentjet.research.campaign.runs import Budget, Question
    from agentjet.research.campaign.subject_repo import SubjectRepo, read_subject
    from agentjet.research.journal import StudyFolder

    check_topic(topic, is_read=proposers.llm is not None or proposers.agent_cli is not None)
    question = Question(topic, Budget.parse(budget), seed)
    if (out / NOTEBOOK).exists():
        raise ConfigError(
            f"--out {out}: a campaign is there: continue it with agentjet research resume {out}, or, if it has ended "
            "or cannot go on, start with another --out"
        )
    asked, slots = proposers.of(out, unsafe), servers.slots()
    check_model_name(read_subject(subject).model, f"{subject}: model =")
    if out.is_dir() and any(out.iterdir()) and not (out / SOURCE).exists():
        raise ConfigError(f"--out {out} is not an empty folder: choose another one")
    check_sandbox(unsafe)
    StudyFolder(out).make()
    repo = SubjectRepo.create(out, subject, unsafe=unsafe)
    conduct(out, slots, asked, replace(question, **repo.rules), unsafe=unsafe)


def check_sandbox(unsafe: bool) -> None:
    """Raises `ConfigError` where no sandbox can be made, unless the user accepts that."""
    from agentjet.sandbox import missing

    if (reason := missing()) and not unsafe:
        raise ConfigError(f"a campaign runs code that nobody has read: {reason}; or run it with your rights (--unsafe)")


def check_topic(topic: str, is_read: bool) -> None:
    """Raises `ConfigError` for an empty topic, and for one in another script if no language model reads it."""
    from agentjet.research.campaign.campaign import OFFLINE

    letters = [character for character in topic if character.isalpha()]
    if not topic.strip():
        raise ConfigError("--topic is empty: give the question, such as 'why does it not learn?'")
    if not is_read and 2 * sum(map(str.isascii, letters)) < len(letters):
        raise ConfigError(f"--topic {topic!r}: {OFFLINE} Give an English title, or a language model (--llm)")


def resume(folder: CampaignFolder, servers: Servers, proposers: Proposers, unsafe: Unsafe = False) -> None:
    """Continue a campaign that was interrupted or killed. Give the options of servers and language models again."""
    if not (folder / NOTEBOOK).exists():
        raise ConfigError(f"{folder}: there is no campaign: begin one with agentjet research start")
    if not (folder / SOURCE).exists():
        raise ConfigError(f"{folder}: an archived campaign without its subject and runs: only its report can be read")
    asked = proposers.of(folder, unsafe)
    conduct(folder, servers.slots(), asked, unsafe=unsafe)


def conduct(
    folder: Path,
    slots: Sequence[ServerSlot],
    proposers: Sequence[Proposer],
    question: Question | None = None,
    *,
    unsafe: bool,
) -> None:
    """Runs a campaign from where its notebook stands to the report. A new one has a `question`."""
    from agentjet.client.threads import raise_on_signals
    from agentjet.research.campaign.campaign import Campaign
    from agentjet.research.campaign.report import build
    from agentjet.research.campaign.runs import Question
    from agentjet.research.campaign.strategist import Strategist
    from agentjet.research.campaign.subject_repo import SubjectRepo
    from agentjet.research.journal import Notebook
    from agentjet.research.swarm_runner import SwarmRunner
    from agentjet.sandbox import missing

    again = f"agentjet research resume {shlex.quote(str(folder))}"
    repo = SubjectRepo(folder, unsafe=unsafe)

    def tell(entry: JournalEntry) -> None:
        if line := line_of(entry):
            typer.echo(repo.as_given(line))

    try:
        with (
            raise_on_signals(),
            Notebook(folder, notify=tell) as notebook,
            SwarmRunner(repo.subject_of, folder, slots, typer.echo, unsafe=unsafe) as runner,
        ):
            limits = [
                *((f"{UNSANDBOXED}{reason}",) if (reason := missing()) else ()),
                *filter(None, (getattr(p, "limit", "") for p in proposers)),
            ]
            for limit in limits:
                typer.echo(f"note: {limit}")
            asked = question or Question.from_json(notebook.entries[0].content["question"])
            if ended := notebook.known("ended"):
                tell(ended)
            else:
                check_sandbox(unsafe)
            ending = Campaign(asked, notebook, repo, runner, [*proposers, Strategist()], limits=limits).run()
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
    """An entry of a notebook in one line; empty for entries about the machinery."""
    from agentjet.research.journal import described

    return f"{entry.number:4d} {in_a_line(': '.join(step))}" if (step := described(entry)) else ""


def digest(
    folder: CampaignFolder,
    day: Annotated[int, Option(min=0, help="At the end of this day since the start; 0: now.")] = 0,
) -> None:
    """Print what a campaign tried, found and ruled out, what it does now, and what is spent and left."""
    if (folder / STUDY).exists():
        raise ConfigError(f"{folder} is a study, and digests are those of campaigns: use agentjet research status")
    print_standing(folder, as_json=False, day=day)


def print_standing(folder: Path, as_json: bool, day: int = 0) -> None:
    """Prints where a campaign stands, or stood at the end of a day."""
    from agentjet.research.journal import Notebook

    with Notebook(folder, writer=False) as notebook:
        found = notebook.standing(day)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        typer.echo(f"{name.capitalize()}:")
        for line in (value if isinstance(value, list) else [value]) or ["-"]:
            typer.echo(f"  {line}")


def demo(
    out: Annotated[Path, Option(help="Folder of the campaign; an interrupted one is continued.")] = Path(
        "research-demo"
    ),
    local: Local = 2,
) -> None:
    """Run a whole campaign on a tiny model in a few minutes: a subject with two planted troubles.

    A model of random weights should answer in digits. Its agent allows three tokens and pays only answers without any
    other character. No change of a setting mends that.
    """
    from agentjet.research.campaign.runs import Budget, Question
    from agentjet.research.campaign.subject_repo import SubjectRepo
    from agentjet.research.journal import StudyFolder

    began = time.monotonic()
    if not (out / NOTEBOOK).exists():
        StudyFolder(out).make()
        if any(out.iterdir()) and not (out / "given").exists():
            raise ConfigError(f"--out {out} is not an empty folder: choose another one")
        shutil.rmtree(out / "given", ignore_errors=True)
        shutil.copytree(example("digits") / "campaign", out / "given")
        load_example("digits", "random_model").make_random_model(out / "given" / "model")
    # Only code of this repository runs, so the demo needs no sandbox.
    repo = SubjectRepo.create(out, out / "given" / "subject.toml", unsafe=True)
    topic, budget = "Why does the model not learn to answer in digits?", Budget.parse("30runs")
    conduct(out, local_slots(local), [], Question(topic, budget, **repo.rules), unsafe=True)
    typer.echo(f"{time.monotonic() - began:.0f} s in all")


for command in (new, run, status, report, start, resume, digest, demo):
    app.command()(command)

# ---- servers of this machine -----------------------------------------------------------------------------------------

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalServerSlot:
    """A slot for one server on this machine. The data dir of a run is `server/` in its folder."""

    number: int
    threads: int
    """Default number of threads of its worker."""

    @property
    def name(self) -> str:
        return f"local server {self.number}"

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[RunningServer]:
        from agentjet.research.models import Address
        from agentjet.research.swarm_runner import RunningServer, check_not_stopping

        data_dir = run / "server"
        wait_until_free(data_dir, stopping)
        chosen = {"model.threads": self.threads, "job.keep_checkpoints": 1, **settings}
        overrides = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
        with ChildServer(None, overrides, data_dir, is_one_of_many=True) as server:
            server.connect(lambda: check_not_stopping(stopping)).close()
            token = (data_dir / "token").read_text(encoding="utf-8").strip()
            yield RunningServer(Address(server.url, token), server.check)

    def check(self) -> None:
        """Does nothing: each trial starts a new server."""

    def run_finished(self, run: Path) -> None:
        shutil.rmtree(run / "server" / "runs" / DEFAULT_RUN / "checkpoints", ignore_errors=True)


def local_slots(count: int) -> list[LocalServerSlot]:
    """Slots that share the machine's cores."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return [LocalServerSlot(number, threads) for number in range(1, count + 1)]


def wait_until_free(data_dir: Path, stopping: Event) -> None:
    """Waits until the server of a killed researcher has saved its policy and ended. Raises `ServerEnded`."""
    lock = data_dir / "runs" / DEFAULT_RUN / f"{JOURNAL}.lock"
    if not lock.exists():
        return
    deadline = time.monotonic() + STOP_SECONDS
    with lock.open("r+") as file:
        while time.monotonic() < deadline and not stopping.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                stopping.wait(POLL_SECONDS)
            else:
                return
    raise ServerEnded(f"{data_dir} is still in use, after {STOP_SECONDS:.0f} s at most: end the server that has it")
