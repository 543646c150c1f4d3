"""`agentjet research`: studies compare ways to train an agent (`new`, `run`), campaigns mend one (`start`, `resume`).

The functions of the commands import what they need, so that `agentjet --help` is fast.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from agentjet.cli import Json, example, load_example, new_path
from agentjet.cli.trial_servers import Local, Servers, check_arms, local_slots
from agentjet.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from agentjet.research.campaign.runs import Question
    from agentjet.research.campaign.strategist import Proposer
    from agentjet.research.journal import JournalEntry, StudyLog
    from agentjet.research.models import Finding, Outcome, Study, Subject
    from agentjet.research.swarm_runner import ServerSlot

Folder = Annotated[Path, Argument(metavar="FOLDER", help="Folder of the study or campaign.")]
CampaignFolder = Annotated[Path, Argument(metavar="CAMPAIGN", help="Folder of the campaign.")]
NOTEBOOK, STUDY, SOURCE = "notebook.sqlite", "study.json", "source.json"
"""Files that make a folder that of a campaign, of a study, and of a campaign that can be continued."""
app = typer.Typer(
    name="research",
    help="Find out what keeps an agent from learning, and mend it (start); or compare ways to train it (new, run).",
    no_args_is_help=True,
)


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
    from agentjet.research.campaign.report import build, chapters
    from agentjet.research.journal import Notebook, StudyFolder

    log, more = StudyFolder(folder).log(), {}
    if not is_campaign(folder) or log.study is not None:  # A campaign on a topic may end before its study begins.
        if is_campaign(folder):
            with Notebook(folder, writer=False) as notebook:
                more = chapters(notebook)
        if check is None:
            typer.echo(studies.build(log, folder, more))
            for again in sorted(folder.glob(f"study-*/{STUDY}")):
                typer.echo(studies.build(StudyFolder(again.parent).log(), again.parent))
        elif problems := studies.check(check, log, more):
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
    topic: Annotated[str, Argument(help="Title of the study.")],
    agent: Annotated[str, Option(help="FILE.py:FUNCTION or package.module:function, called with task, episode.")],
    tasks: Annotated[str, Option(help="Training tasks: FILE.jsonl, or a function that returns them.")],
    held_out: Annotated[str, Option("--held-out", help="Held-out tasks for scoring, in the same form.")],
    out: Annotated[Path, Option(help="Folder of the study.")],
    budget: Annotated[float, Option(help="Full runs that the study may cost.")],
    space: Annotated[Path, Option(help="Arms, knobs and claims (TOML).")],
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
    """Plan a study from a file: arms, claims, seeds, looks and budget. Nothing is run.

    `agentjet research start` plans one from a question. Read plan.md in the folder, then run it with `agentjet research
    run FOLDER`.
    """
    from agentjet.config.loader import parse_overrides
    from agentjet.research.journal import StudyFolder
    from agentjet.research.models import Subject
    from agentjet.research.plan import plan, read_space
    from agentjet.research.report import plan_page

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
    study = plan(topic, budget=budget, subject=subject, space=read_space(space), folder=space.parent, seed=seed)
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

    if (folder / NOTEBOOK).exists():
        raise ConfigError(f"{folder} is a campaign: continue it with agentjet research resume {folder}")
    if (folder / SOURCE).exists():
        raise ConfigError(f"{folder} has a plan that was not run: start again with agentjet research start ... --yes")
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
            SwarmRunner(study.subject, folder, slots, typer.echo, equal_machines=study.measures_seconds) as runner,
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
    topic: Annotated[str, Option(help='The question: "Does the KL penalty help?", "Why does it not learn?".')],
    subject: Annotated[Path, Option(help="The subject.toml beside the agent's files.")],
    budget: Annotated[str, Option(help="Full runs (500runs; at least 10) or hours (48h).")],
    servers: Servers,
    proposers: Proposers,
    out: Annotated[Path, Option(help="Folder of the campaign, which must be new.")] = Path("campaign"),
    level: Annotated[
        list[str] | None,
        Option(
            "--level",
            metavar="FACTOR=VALUE",
            help="A level of what the question is about, such as agent=team.py:agent or steps=80; can be repeated.",
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        Option(
            "--tune",
            metavar="SETTING=VALUE",
            help="A value of a setting that each arm tunes for itself, such as job.optimizer.lr=1e-5; repeated.",
        ),
    ] = None,
    sesoi: Annotated[
        float, Option(help="Smallest effect of interest: a difference of scores, as a share of the judge's scale.")
    ] = 0.05,
    yes: Annotated[bool, Option("--yes", help="Run the plan without asking.")] = False,
    seed: Annotated[int, Option(help="Seed from which all seeds of the campaign are derived.")] = 0,
    unsafe: Unsafe = False,
) -> None:
    """Start a campaign that answers a question. Ctrl-C stops it; `resume` continues.

    A question about something that can be changed becomes a study, whose plan is shown first. "Why does it not learn?"
    finds causes and mends them. The folder of subject.toml is copied. All runs and results are in the campaign's
    notebook. At the end the report is in the folder.
    """
    from agentjet.config.loader import check_model_name
    from agentjet.research.campaign.planner import GRAMMAR, PlanView, knobs_of, plan_study, question_of
    from agentjet.research.campaign.runs import Budget, Question
    from agentjet.research.campaign.subject_repo import SubjectRepo, read_subject, remove_parts
    from agentjet.research.journal import START, StudyFolder, one_start
    from agentjet.research.models import Study
    from agentjet.research.question import given_levels
    from agentjet.research.report import plan_page
    from agentjet.research.topic import read_topic

    if (out / NOTEBOOK).exists():
        raise ConfigError(
            f"--out {out}: a campaign is there: continue it with agentjet research resume {out}, or, if it has ended "
            "or cannot go on, start with another --out"
        )
    levels, tuned = given_levels(level or []), given_levels(tune or [], "--tune")
    question = Question(topic, Budget.parse(budget), seed, sesoi=sesoi)
    if proposers.llm is None and proposers.agent_cli is None:
        read_topic(topic)  # refused before anything is made
    asked, slots = proposers.of(out, unsafe), servers.slots()
    check_model_name(read_subject(subject).model, f"{subject}: model =")
    if out.is_dir() and any(path.name != START for path in out.iterdir()) and not (out / SOURCE).exists():
        raise ConfigError(f"--out {out} is not an empty folder: choose another one")
    check_sandbox(unsafe)
    StudyFolder(out).make()
    with one_start(out):
        remove_parts(out)  # of a start that was killed, or whose plan was not run
        repo = SubjectRepo.create(out, subject, unsafe=unsafe)
        question = replace(question, **repo.rules)
        if asked:
            typer.echo("asking for a plan, which may take minutes")
        asked_for = question_of(topic, asked, PlanView.of(repo))
        if yes and asked and asked_for.planner.startswith(GRAMMAR):
            raise ConfigError(f"the plan is not a model's but by {asked_for.planner}: see it without --yes")
        if asked_for.form == "diagnose" and (named := [*levels, *tuned]):
            raise ConfigError(f"{named[0]}: the question is about causes, not about levels: omit --level and --tune")
        if asked_for.form == "diagnose":
            conduct(out, slots, asked, question, unsafe=unsafe)
            return
        if asked_for.equal == "episodes":  # The usual amount: that of the subject is the more special one.
            asked_for = asked_for.model_copy(update={"equal": question.equal})
        question = replace(question, equal=asked_for.equal)
        plan = plan_study(question, asked_for, levels, repo, knobs_of(tuned))
        study = Study.from_json(plan["study"])
        if servers.server:
            check_arms(study)
        page = plan_page(study)
        write_plan(out, study, page)
        typer.echo(page)
        if not yes and not (sys.stdin.isatty() and typer.confirm("Run this plan?")):
            plan_file = f"nothing was run; the plan is {out / 'plan.md'}"
            raise ConfigError(f"{plan_file}: start again with --yes to run it, or ask with other words")
        conduct(out, slots, asked, question, plan, unsafe=unsafe)


def write_plan(folder: Path, study: Study, page: str) -> None:
    """Writes the plan of a campaign that has not begun, in place of an earlier one."""
    from agentjet.research.journal import StudyFolder

    for name in (STUDY, "plan.md"):
        (folder / name).unlink(missing_ok=True)
    StudyFolder(folder).write(study, page)


ADD = typer.Option("--add", metavar="20runs|12h", help="Full runs or hours, in the unit of the campaign's budget.")


def note(folder: CampaignFolder, text: Annotated[str, Argument(help="What those who propose should know.")]) -> None:
    """Tell a campaign something. Language models and coding agents read it with their next request."""
    send(folder, "note", text)


def veto(folder: CampaignFolder, name: Annotated[str, Argument(help="Name of a proposal, or of an arm.")]) -> None:
    """Exclude a proposal from a campaign, also one that is not made yet. Runs under way are finished."""
    send(folder, "veto", name)


def budget(folder: CampaignFolder, add: Annotated[str, ADD]) -> None:
    """Add to the budget of a campaign."""
    send(folder, "budget", add=add)


def reopen(folder: CampaignFolder, add: Annotated[str, ADD] = "") -> None:
    """Let a campaign go on that has ended. `resume` then continues it from there."""
    send(folder, "reopen", add=add)


def send(folder: Path, kind: Literal["note", "veto", "budget", "reopen"], text: str = "", add: str = "") -> None:
    """Puts a message into the inbox of a campaign. Raises `ConfigError`."""
    from agentjet.research.campaign.runs import Budget
    from agentjet.research.journal import HumanMessage, Notebook

    check_continues(folder)
    given = Budget.parse(add).to_json() if add or kind == "budget" else {}
    message = HumanMessage(kind, text, **{unit: amount for unit, amount in given.items() if amount})
    with Notebook(folder, writer=False) as notebook:
        notebook.check(message)
        if kind == "veto" and text.strip() not in (named := notebook.names()):
            hint = did_you_mean(text, named, "one that gets it later will be excluded")
            typer.echo(f"note: no proposal and no arm has the name {text.strip()!r} so far: {hint}")
        try:
            notebook.inbox.put(message)
        except OSError as error:
            raise ConfigError(f"{notebook.inbox.path}: {error.strerror}: nothing was sent") from None
        if notebook.has_writer():
            typer.echo("The campaign reads it before its next runs or proposals.")
        else:
            typer.echo(f"The campaign reads it when it goes on: agentjet research resume {shlex.quote(str(folder))}")


def check_continues(folder: Path) -> None:
    """Raises `ConfigError` for a folder without a campaign that can go on."""
    if not (folder / NOTEBOOK).exists():
        raise ConfigError(f"{folder}: there is no campaign: begin one with agentjet research start")
    if not (folder / SOURCE).exists():
        raise ConfigError(f"{folder}: an archived campaign without its subject and runs: only its report can be read")


def check_sandbox(unsafe: bool) -> None:
    """Raises `ConfigError` where no sandbox can be made, unless the user accepts that."""
    from agentjet.sandbox import missing

    if (reason := missing()) and not unsafe:
        raise ConfigError(f"a campaign runs code that nobody has read: {reason}; or run it with your rights (--unsafe)")


def resume(folder: CampaignFolder, servers: Servers, proposers: Proposers, unsafe: Unsafe = False) -> None:
    """Continue a campaign that was interrupted or killed. Give the options of servers and language models again."""
    check_continues(folder)
    asked = proposers.of(folder, unsafe)
    conduct(folder, servers.slots(), asked, unsafe=unsafe)


def conduct(
    folder: Path,
    slots: Sequence[ServerSlot],
    proposers: Sequence[Proposer],
    question: Question | None = None,
    plan: Mapping[str, Any] | None = None,
    *,
    unsafe: bool,
) -> None:
    """Runs a campaign from where its notebook stands to the report. A new one has a `question`."""
    from agentjet.client.threads import raise_on_signals
    from agentjet.research.campaign.campaign import Campaign
    from agentjet.research.campaign.report import PAGE, LivePage
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

    reason = missing()
    limits = [f"{UNSANDBOXED}{reason}"] if reason else []
    limits += filter(None, (getattr(proposer, "limit", "") for proposer in proposers))
    for limit in limits:
        typer.echo(f"note: {limit}")

    try:
        with raise_on_signals(), Notebook(folder, notify=tell) as notebook:
            begun = notebook.entries[0].content if notebook.entries else {}
            if question is None and not begun:
                raise ConfigError(f"{folder}: the campaign had not begun: remove the folder, and start it again")
            asked = question or Question.from_json(begun["question"])
            equal = compares_seconds(asked, plan or begun.get("planned"))
            if ended := notebook.over():
                tell(ended)
            else:
                check_sandbox(unsafe)
                typer.echo(f"What happens stands in {folder / PAGE}.")
            with (
                SwarmRunner(repo.subject_of, folder, slots, typer.echo, unsafe=unsafe, equal_machines=equal) as runner,
                LivePage(notebook, runner.running, repo.as_given),
            ):
                asking = [*proposers, Strategist()]
                ending = Campaign(asked, notebook, repo, runner, asking, limits=limits, planned=plan).run()
    except (KeyboardInterrupt, SystemExit) as ended:
        typer.echo(f"interrupted; continue with: {again}", err=True)
        raise typer.Exit(130 if isinstance(ended, KeyboardInterrupt) else 143) from None
    except (ConfigError, OSError) as error:
        if not (repo.folder / SOURCE).exists():  # Then any file seems to be missing, or changed.
            raise ConfigError(
                f"{repo.folder} was moved or removed while the campaign ran: continue it where it is now, with "
                "agentjet research resume FOLDER"
            ) from error
        if isinstance(error, ConfigError):
            raise ConfigError(repo.as_given(str(error))) from None
        raise ConfigError(f"{error.filename or folder}: {error.strerror}; then continue with: {again}") from error
    if ending["score"] is None:
        raise ConfigError(
            f"{folder}: no run of the subject has a score: mend the subject, and start with another --out"
        )
    report(folder)


def compares_seconds(question: Question, plan: Mapping[str, Any] | None) -> bool:
    """True if the runs of a campaign must be on machines of one kind. `plan` is that of its topic."""
    from agentjet.research.models import Study

    return question.equal == "seconds" or (plan is not None and Study.from_json(plan["study"]).measures_seconds)


def line_of(entry: JournalEntry) -> str:
    """An entry of a notebook in one line; empty for entries about the machinery."""
    from agentjet.research.journal import described

    return f"{entry.number:4d} {in_a_line(': '.join(step))}" if (step := described(entry)) else ""


def digest(
    folder: CampaignFolder,
    day: Annotated[int, Option(min=0, help="At the end of this day since the start; 0: now.")] = 0,
) -> None:
    """Print what a campaign tried, found and ruled out, what it does now, and what is spent and left."""
    if (folder / STUDY).exists() and not is_campaign(folder):
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


def apply(
    folder: CampaignFolder,
    to: Annotated[
        Path | None, Option(help="The subject's folder in a git repository; default: the one that `start` was given.")
    ] = None,
    branch: Annotated[str, Option(help="The branch to make; default: agentjet/ and the name of the campaign.")] = "",
    checkpoint: Annotated[
        Path | None, Option(help="Also write the trained policy, with a model card, to this new folder.")
    ] = None,
) -> None:
    """Put the confirmed changes of a campaign on a new branch of your git repository, and export the trained policy.

    The working tree stays as it is. Without a repository the changes are in confirmed.patch in the campaign's folder.
    """
    from agentjet.research.campaign.report import gather, model_card
    from agentjet.research.campaign.subject_repo import SubjectRepo, git, on_branch
    from agentjet.research.journal import Notebook, write_whole
    from agentjet.research.swarm_runner import POLICY, kept_policy

    with Notebook(folder, writer=False) as notebook:
        facts = gather(notebook)
    if not (folder / SOURCE).exists():
        raise ConfigError(f"{folder}: an archived campaign without its subject: its changes are in report.md")
    if not facts["accepted"]:
        raise ConfigError(f"{folder}: the campaign has confirmed no change, so there is nothing to apply")
    arm = next(one for one in reversed(facts["studies"]) if one["accepted"])["study"]["arms"][1]
    kept = kept_policy(folder, arm["code"], arm["changes"])
    if checkpoint is not None and not (kept / "run.json").exists():
        raise ConfigError(
            f"--checkpoint {checkpoint}: {folder} has no policy of the confirmed change, as after runs on --server, "
            "which stay there: train the branch with agentjet run, or omit --checkpoint"
        )
    repo, message = SubjectRepo(folder), "\n\n".join([facts["topic"], " ".join(facts["answer"])])
    patch, place = repo.patch_of(facts["base"]), to or repo.user_folder
    name = branch or f"agentjet/{folder.resolve().name}"
    write_whole(folder / "confirmed.patch", patch)
    with new_path(checkpoint) if checkpoint else nullcontext() as unfinished:
        if unfinished:
            shutil.copytree(kept / POLICY, unfinished)
            write_whole(unfinished / "README.md", model_card(facts, json.loads((kept / "run.json").read_text())))
        try:
            git(place, "rev-parse", "--git-dir")
        except ConfigError:
            patched = folder / "confirmed.patch"
            if to is not None:
                refused = f"--to {to} is not a folder in a git repository"
                raise ConfigError(f"{refused}: omit it, and apply {patched}") from None
            typer.echo(f"{place} is not in a git repository: the changes are in {patched}")
        else:
            commit = on_branch(patch, place, name, message)
            typer.echo(f"branch {name} of {place} is commit {commit[:12]}; see it with: git diff HEAD...{name}")
    if checkpoint:
        typer.echo(f"the policy is in {checkpoint}; score it with: agentjet eval {shlex.quote(str(checkpoint))}")


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


for command in (new, run, status, report, start, resume, note, veto, budget, reopen, digest, apply, demo):
    app.command()(command)
