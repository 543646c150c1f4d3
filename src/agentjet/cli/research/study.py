"""`agentjet research new`: from a topic to a plan that a person can read, before anything is run.

`agentjet research status` and `report`: what a study's journal holds, also while it is being written.

`agentjet research steer`: what a person asks of a running study.
"""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentjet.cli import Json
from agentjet.cli.research.run import (
    AgentCli,
    Folder,
    Llm,
    LlmKeyFile,
    LlmModel,
    advised,
    plain,
    requested,
    voice_of,
    workshop_of,
)
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.amendments import AmendedStudy
    from agentjet.research.journal import StudyLog
    from agentjet.research.launcher import SteeringFile
    from agentjet.research.models import Request, Study
    from agentjet.research.subject import Subject


def new(
    topic: Annotated[str, typer.Argument(help='The question, such as "does a kl penalty help?".')],
    agent: Annotated[str, typer.Option(help="FILE.py:FUNCTION or package.module:function, called with task, episode.")],
    tasks: Annotated[str, typer.Option(help="FILE.jsonl, or a function that returns tasks: what is trained on.")],
    held_out: Annotated[str, typer.Option("--held-out", help="The same: what is scored, and never trained on.")],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    budget: Annotated[str, typer.Option(help='Full runs ("60"), or time ("4h", with --run-minutes).')],
    run_minutes: Annotated[
        float | None, typer.Option(min=0.01, help="What a full run takes, for a budget in time.")
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="How many run at the same time, for a budget in time.")] = 2,
    model: Annotated[str, typer.Option(help="Hugging Face id, local folder, or smollm2-135m.")] = "smollm2-135m",
    evaluator: Annotated[str, typer.Option(help="What plays the held-out tasks; default: the agent.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Batches of a full run.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Episodes of each held-out task in a scoring.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 32,
    base: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="A setting of every run; can be repeated."),
    ] = None,
    space: Annotated[Path | None, typer.Option(help="Arms, knobs and claims (TOML), in place of the topic's.")] = None,
    sesoi: Annotated[
        float | None, typer.Option(help="Smallest difference of scores that matters, above 0; default 0.02.")
    ] = None,
    floor: Annotated[
        float, typer.Option(help="Lowest score there is: what a run that diverged gets once it answers no more.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Where all seeds of the study come from.")] = 0,
    llm: Llm = None,
    llm_model: LlmModel = "",
    llm_key_file: LlmKeyFile = None,
    agent_cli: AgentCli = None,
) -> None:
    """Plan a study: question, arms, claims, what each arm tunes, seeds, looks and budget. Nothing is run.

    Read plan.md in the folder; `agentjet research run FOLDER` does what it says. No language model is needed; what one
    proposes is held against the plan's rules, and the journal has every word of it.
    """
    from agentjet.research.journal import StudyFolder
    from agentjet.research.planner.plan import plan, read_space
    from agentjet.research.subject import Subject

    files, voice, workshop = StudyFolder(out), voice_of(llm, llm_model, llm_key_file), workshop_of(agent_cli)
    files.check_new()
    subject = fixed(
        Subject(
            model=model,
            agent=agent,
            tasks=tasks,
            held_out=held_out,
            evaluator=evaluator,
            settings=settings(base or []),
            steps=steps,
            evaluations=min(4, steps),
            repeats=repeats,
            concurrency=concurrency,
            floor=floor,
        )
    )
    made = plan(
        topic,
        budget=budget,
        subject=subject,
        space=None if space is None else read_space(space),
        folder=Path() if space is None else space.parent,
        sesoi=sesoi,
        run_seconds=None if run_minutes is None else 60 * run_minutes,
        servers=servers,
        seed=seed,
    )
    files.make()
    made = advised(made, out, voice, workshop)
    files.write(made.study, made.to_markdown())
    typer.echo(made.to_markdown())
    typer.echo(f"The plan is {out / 'plan.md'}. Run it with: agentjet research run {shlex.quote(str(out))}")


def fixed(subject: Subject) -> Subject:
    """With the hash of its code. Raises `ConfigError` for what every trial would fail with."""
    check_model(subject.model)
    shared = {task.id for task in subject.training_tasks()} & {task.id for task in subject.held_out_tasks()}
    if shared:
        raise ConfigError(
            f"{len(shared)} held-out tasks are trained on, too, such as {min(shared)!r}: a score on them says nothing; "
            "take them out of one of the two"
        )
    subject.player("")
    subject.judge()
    return subject.hashed()


def check_model(name: str) -> None:
    """Raises `ConfigError` for what no server could load. Whether the hub has an id is not asked."""
    from agentjet.config.schema import ModelConfig

    bundled = ModelConfig().name
    if Path(name).is_dir() or name == bundled or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return
    raise ConfigError(
        f"--model {name!r} is neither a folder here, nor a Hugging Face id (owner/name), nor the bundled {bundled!r}"
    )


def settings(overrides: list[str]) -> dict[str, Any]:
    """`section.setting=value`, checked as far as that goes without the other settings. Raises `ConfigError`."""
    from agentjet.config.loader import parse_value

    found = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override!r} is not of the form section.setting=value, such as job.batch_size=4")
        found[name.strip()] = parse_value(text)
    return found


def status(folder: Folder, as_json: Json = False) -> None:
    """Show how far a study is, what it has spent, and what it found so far."""
    from agentjet.research.journal import StudyFolder
    from agentjet.research.launcher import SteeringFile

    files = StudyFolder(folder)
    study, books = files.study(), files.books()
    found = summary(books[0], seconds_at_work(folder))
    unread, when = (
        SteeringFile(files.steering).unread(books),
        "never read" if found["stage"] == "finished" else "not read yet",
    )
    if unread:
        found[when] = unread if as_json else "; ".join(map(requested, unread))
    annexes = {f"annex-{n}": summary(book) for n, book in enumerate(books[1:], 1) if book.study}
    if as_json:
        found |= {"annexes": annexes} if annexes else {}
        typer.echo(json.dumps({"study": study.id, "topic": study.topic, **found}, indent=2))
        return
    typer.echo(f"{study.topic}  (study {study.id})")
    tell(found)
    for name, annex in annexes.items():
        typer.echo(f"\n{folder / name}, added after the data")
        tell(annex)


def tell(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if name != "findings":
            typer.echo(f"{name:12} {plain(value)}")
    for finding in found.get("findings", []):
        typer.echo(f"{finding['verdict'].replace('_', ' '):24} {finding['claim']}: {finding['reason']}")


def seconds_at_work(folder: Path) -> float:
    """From the first launch of a study to its newest outcome, by the times of the runner's files; 0 without any."""
    launches = folder / "launches"
    begun = [path.stat().st_mtime for path in launches.glob("*/trial.json")]
    ended = [path.stat().st_mtime for path in launches.glob("*/outcome.json")]
    return max(ended) - min(begun) if begun and ended else 0.0


def time_left(seconds: float, spent: float, left: float) -> str:
    """The time that `left` full runs take at the pace of the `spent` ones; empty where there is no pace yet."""
    if not (seconds and spent):
        return ""
    minutes = round(left * seconds / spent / 60)
    return f"at most {minutes // 60} h {minutes % 60} min, at the pace so far"


def summary(book: StudyLog, seconds: float = 0.0) -> dict[str, Any]:
    """As `status --json` prints it. `seconds` is the time that the study has been at work."""
    from agentjet.research.amendments import NOT_ADDED
    from agentjet.research.report.facts import StudyView

    if book.study is None:
        return {"stage": "planned"}
    done = StudyView(book)
    ends: dict[str, int] = {}
    for launched in done.launched:
        ends[launched.end] = ends.get(launched.end, 0) + 1
    over = done.stage == "finished"
    left = "" if over else time_left(seconds, done.spent, book.study.budget - done.spent)
    return {
        "stage": done.stage,
        "trials": ends,
        "spent": round(done.spent, 2),
        "running": round(done.ledger.total - done.spent, 2),
        "budget": book.study.budget,
        **({"time left": left} if left else {}),
        **({NOT_ADDED: done.not_added} if done.not_added else {}),
        "findings": [
            {"claim": h.claim, **done.findings[h.id].to_json()} for h in book.study.hypotheses if h.id in done.findings
        ],
    }


def report(
    folder: Folder,
    check: Annotated[
        Path | None, typer.Option(help="Instead of writing one: whether this report says what the journal does.")
    ] = None,
) -> None:
    """Write report.html and report.md from a study's journal, finished or not, and those of its annexes."""
    from agentjet.research.journal import StudyFolder
    from agentjet.research.report import book_of, build_all
    from agentjet.research.report import check as compared

    books = StudyFolder(folder).books()
    if check is None:
        for written in build_all(books, folder):
            typer.echo(written)
        return
    problems = compared(check, book_of(check, books))
    if problems:
        raise ConfigError("\n".join([f"{check} is not what the journal says:", *problems]))
    typer.echo(f"{check} says what the journal does")


Action = Literal["pause", "resume", "cap", "veto", "add-arm", "add-hypothesis"]


def steer(
    folder: Folder,
    action: Annotated[Action, typer.Argument(help="What is asked.")],
    value: Annotated[str, typer.Argument(metavar="[RUNS|ARM]", help="Of cap: full runs in all. Else: the arm.")] = "",
    against: Annotated[str, typer.Option(help="With add-arm and add-hypothesis: the arm it is compared with.")] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="With add-arm: what it changes; can be repeated."),
    ] = None,
    why: Annotated[str, typer.Option(help="For the report.")] = "",
) -> None:
    """Pause or resume a study, cap its budget, veto an arm, or add an arm or a claim.

    A running study takes it before its next batch of trials, and says in its journal and its report what it took. What
    is added after the data began is exploratory; the rules of the verdicts cannot be changed.
    """
    from agentjet.research.journal import StudyFolder
    from agentjet.research.launcher import SteeringFile

    files = StudyFolder(folder)
    asked = request(action, value, against, change or [], why)
    steering = SteeringFile(files.steering)
    check(asked, files.study(), files.books(), steering)
    steering.append(asked)
    typer.echo(f"asked: {action} {value}".rstrip())


def check(asked: Request, study: Study, books: list[StudyLog], steering: SteeringFile) -> None:
    """Raises `ConfigError` for what the study would refuse, as far as that is known now."""
    from agentjet.research.amendments import EVERYTHING, grant
    from agentjet.research.models import Cap, Refused, Resume
    from agentjet.research.report.facts import StudyView

    kind, book = asked.kind.replace("_", "-"), books[-1]
    if book.study is not None:
        done = StudyView(book)
        if done.stage == "finished":
            raise ConfigError(f"{kind}: the study has its findings; plan another with `agentjet research new`")
        spent = done.ledger.total
        if isinstance(asked, Cap) and asked.runs < spent:
            raise ConfigError(f"cap {asked.runs:g}: {spent:.1f} full runs are spent or under way; give more than that")
    course = course_of(book.study or study, book, steering.unread(books))
    if isinstance(asked, Resume) and not course.paused:
        raise ConfigError("resume: the study is not paused")
    try:
        grant(course, asked, "human", EVERYTHING)
    except Refused as refusal:
        raise ConfigError(f"{kind}: {refusal}") from None


def course_of(study: Study, book: StudyLog, waiting: list[str]) -> AmendedStudy:
    """What a study becomes by all that was granted, and by what it has still to read."""
    from agentjet.research.amendments import EVERYTHING, AmendedStudy, grant, parsed
    from agentjet.research.models import Refused, loads

    course = AmendedStudy(study, begun=True)
    for amendment in book.amendments:
        if not amendment.refused and amendment.point >= 0:
            course = grant(course, parsed(amendment.origin, amendment.asked), amendment.origin, EVERYTHING)
    for line in waiting:
        with suppress(Refused):
            course = grant(course, parsed("human", loads(line)), "human", EVERYTHING)
    return course


def request(action: Action, value: str, against: str, changes: list[str], why: str) -> Request:
    """Raises `ConfigError` for what is no request."""
    # moved import
    from agentjet.research.models import REQUEST, Refused, parse

    if value.startswith("--"):
        raise ConfigError(f"{value}: there is no such option; those are --against, --set and --why")
    if not value and action in ("veto", "add-arm", "add-hypothesis"):
        raise ConfigError(f"{action}: name the arm, as in: agentjet research steer FOLDER {action} ARM")
    fields: dict[str, object] = {"kind": action.replace("-", "_")}
    if action == "cap":
        try:
            runs = float(value)
        except ValueError:
            runs = 0.0
        if not runs > 0:
            raise ConfigError(f"cap {value!r}: give a number of full runs above 0, such as 40")
        fields["runs"] = runs
    elif action in ("veto", "add-arm", "add-hypothesis"):
        fields["arm"] = value
    if action in ("add-arm", "add-hypothesis"):
        fields |= {"against": against, "why": why}
    if action == "add-arm":
        fields["changes"] = settings(changes)
    try:
        return parse(REQUEST, fields)
    except Refused as refusal:
        raise ConfigError(f"{action}: {refusal}") from None
