"""`agentjet research new`, `status`, `report` and `steer`: plan, inspect and amend a study."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentjet.cli import Json
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.research.amendments import AmendedStudy
    from agentjet.research.journal import StudyLog
    from agentjet.research.launcher import SteeringFile
    from agentjet.research.models import Request, Study
    from agentjet.research.planner.proposals import LLM, CodingAgentSandbox
    from agentjet.research.subject import Subject


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the study.")]
Local = Annotated[int, typer.Option("--local", min=1, help="Servers to start on this machine, side by side.")]

Llm = Annotated[
    str | None,
    typer.Option("--llm", metavar="URL", help="An OpenAI-compatible endpoint (http://.../v1) that may propose arms."),
]
LlmModel = Annotated[str, typer.Option("--llm-model", metavar="NAME", help="Name of the model at that endpoint.")]
LlmKeyFile = Annotated[Path | None, typer.Option("--llm-key-file", help="File with the API key of that endpoint.")]
AgentCli = Annotated[
    str | None,
    typer.Option("--agent-cli", metavar="COMMAND", help="A coding agent that may write another version of the agent."),
]


def new(
    topic: Annotated[str, typer.Argument(help='The question, such as "does a kl penalty help?".')],
    agent: Annotated[str, typer.Option(help="FILE.py:FUNCTION or package.module:function, called with task, episode.")],
    tasks: Annotated[str, typer.Option(help="Training tasks: FILE.jsonl, or a function that returns them.")],
    held_out: Annotated[str, typer.Option("--held-out", help="Held-out tasks for scoring, in the same form.")],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    budget: Annotated[str, typer.Option(help='Full runs ("60"), or time ("4h", with --run-minutes).')],
    run_minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Minutes of a full run, for a budget in time.")
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Servers at the same time, for a budget in time.")] = 2,
    model: Annotated[str, typer.Option(help="Hugging Face id, local folder, or smollm2-135m.")] = "smollm2-135m",
    evaluator: Annotated[str, typer.Option(help="Agent that plays the held-out tasks; default: the agent.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Batches of a full run.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Episodes per held-out task in an evaluation.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 32,
    base: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="A setting of every run; can be repeated."),
    ] = None,
    space: Annotated[Path | None, typer.Option(help="Arms, knobs and claims (TOML), in place of the topic's.")] = None,
    sesoi: Annotated[
        float | None, typer.Option(help="Smallest difference of scores that matters, above 0; default 0.02.")
    ] = None,
    floor: Annotated[float, typer.Option(help="Score of a diverged run whose policy cannot answer.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed from which all seeds of the study are derived.")] = 0,
    llm: Llm = None,
    llm_model: LlmModel = "",
    llm_key_file: LlmKeyFile = None,
    agent_cli: AgentCli = None,
) -> None:
    """Plan a study: question, arms, claims, what each arm tunes, seeds, looks and budget. Nothing is run.

    Read plan.md in the folder, then run it with `agentjet research run FOLDER`. No language model is needed. Proposals
    of a model are checked against the plan's rules, and the journal records them in full.
    """
    from agentjet.cli.research.execution import with_proposals
    from agentjet.research.journal import StudyFolder
    from agentjet.research.planner.plan import plan, read_space
    from agentjet.research.subject import Subject

    files, endpoint, sandbox = (
        StudyFolder(out),
        llm_endpoint(llm, llm_model, llm_key_file),
        coding_agent_sandbox(agent_cli),
    )
    files.check_new()
    subject = fixed(
        Subject(
            model=model,
            agent=agent,
            tasks=tasks,
            held_out=held_out,
            evaluator=evaluator,
            settings=overrides_of(base or []),
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
    made = with_proposals(made, out, endpoint, sandbox)
    files.write(made.study, made.to_markdown())
    typer.echo(made.to_markdown())
    typer.echo(f"The plan is {out / 'plan.md'}. Run it with: agentjet research run {shlex.quote(str(out))}")


def fixed(subject: Subject) -> Subject:
    """Returns the subject with the hash of its code. Raises `ConfigError` for an error that every trial would have."""
    check_model(subject.model)
    shared = {task.id for task in subject.training_tasks()} & {task.id for task in subject.held_out_tasks()}
    if shared:
        raise ConfigError(
            f"{len(shared)} held-out tasks are also training tasks, such as {min(shared)!r}: a score on them is "
            "meaningless; remove them from one of the two"
        )
    subject.load_arm_agent("")
    subject.load_evaluator()
    return subject.with_hashes()


def check_model(name: str) -> None:
    """Raises `ConfigError` for a model that no server could load. Does not ask the hub."""
    from agentjet.config.schema import ModelConfig

    bundled = ModelConfig().name
    if Path(name).is_dir() or name == bundled or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return
    raise ConfigError(
        f"--model {name!r} is neither a folder here, nor a Hugging Face id (owner/name), nor the bundled {bundled!r}"
    )


def overrides_of(overrides: list[str]) -> dict[str, Any]:
    """Parses `section.setting=value` without checks against other settings. Raises `ConfigError`."""
    from agentjet.config.loader import parse_value

    found = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override!r} is not of the form section.setting=value, such as job.batch_size=4")
        found[name.strip()] = parse_value(text)
    return found


def llm_endpoint(url: str | None, model: str, key_file: Path | None) -> LLM | None:
    """Returns the model that the options name. Raises `ConfigError`."""
    from agentjet.research.planner.proposals import ChatEndpoint

    if url is None:
        if model or key_file is not None:
            raise ConfigError("--llm-model and --llm-key-file need --llm")
        return None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--llm {url!r} is not a URL: give one such as http://127.0.0.1:8000/v1")
    if not model:
        raise ConfigError(f"--llm {url}: also give the model's name (--llm-model)")
    return ChatEndpoint(url, model, key_of(key_file) if key_file else "")


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


def coding_agent_sandbox(command: str | None) -> CodingAgentSandbox | None:
    """Returns the sandbox of the coding agent that the option names. Raises `ConfigError`."""
    from agentjet.research.planner.proposals import CodingAgentSandbox

    if command is None:
        return None
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--agent-cli {command!r}: {error}; quote it as a shell would") from None
    if not words:
        raise ConfigError(f"--agent-cli {command!r} is not a command: give one, or omit the option")
    return CodingAgentSandbox(tuple(words))


# ---- status and report ----------------------------------------------------------------------------------------------


def status(folder: Folder, as_json: Json = False) -> None:
    """Show the progress of a study, its spending and its findings so far."""
    from agentjet.research.journal import StudyFolder
    from agentjet.research.launcher import SteeringFile

    files = StudyFolder(folder)
    study, logs = files.study(), files.logs()
    found = summary(logs[0], seconds_at_work(folder))
    unread, when = (
        SteeringFile(files.steering_file).unread(logs),
        "never read" if found["stage"] == "finished" else "not read yet",
    )
    if unread:
        found[when] = unread if as_json else "; ".join(map(requested, unread))
    annexes = {f"annex-{n}": summary(log) for n, log in enumerate(logs[1:], 1) if log.study}
    if as_json:
        found |= {"annexes": annexes} if annexes else {}
        typer.echo(json.dumps({"study": study.id, "topic": study.topic, **found}, indent=2))
        return
    typer.echo(f"{study.topic}  (study {study.id})")
    print_summary(found)
    for name, annex in annexes.items():
        typer.echo(f"\n{folder / name}, added after the data")
        print_summary(annex)


def print_summary(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if name != "findings":
            typer.echo(f"{name:12} {plain(value)}")
    for finding in found.get("findings", []):
        typer.echo(f"{finding['verdict'].replace('_', ' '):24} {finding['claim']}: {finding['reason']}")


def plain(content: object) -> str:
    """Formats journal content as text. Nested mappings are listed with their names."""
    if isinstance(content, Mapping):
        known = {name: value for name, value in content.items() if value not in ("", {})}
        return "; ".join(
            f"{name}: {', '.join(f'{key} = {plain(inner)}' for key, inner in value.items())}"
            if isinstance(value, Mapping)
            else f"{name} = {plain(value)}"
            for name, value in known.items()
        )
    if isinstance(content, list | tuple):
        return ", ".join(map(plain, content))
    return f"{content:.4g}" if isinstance(content, float) else str(content)


def requested(line: str) -> str:
    """Formats a line of a steering file: the action, or the raw text if it is not an action."""
    from agentjet.research.report.caveats import action_text

    try:
        content = json.loads(line)
    except ValueError:
        return line
    return action_text(content) if isinstance(content, dict) and "kind" in content else line


def seconds_at_work(folder: Path) -> float:
    """Seconds from the first launch to the newest outcome, from the times of the runner's files; 0 without any."""
    launches = folder / "launches"
    begun = [path.stat().st_mtime for path in launches.glob("*/trial.json")]
    ended = [path.stat().st_mtime for path in launches.glob("*/outcome.json")]
    return max(ended) - min(begun) if begun and ended else 0.0


def time_left(seconds: float, spent: float, left: float) -> str:
    """Time for `left` full runs at the pace of the `spent` ones; empty before the first outcome."""
    if not (seconds and spent):
        return ""
    minutes = round(left * seconds / spent / 60)
    return f"at most {minutes // 60} h {minutes % 60} min, at the pace so far"


def summary(log: StudyLog, seconds: float = 0.0) -> dict[str, Any]:
    """Summary for `status --json`. `seconds` is the time that the study has run."""
    from agentjet.research.amendments import NOT_ADDED
    from agentjet.research.report.facts import StudyView

    if log.study is None:
        return {"stage": "planned"}
    view = StudyView(log)
    ends: dict[str, int] = {}
    for launched in view.launched:
        ends[launched.end] = ends.get(launched.end, 0) + 1
    finished = view.stage == "finished"
    left = "" if finished else time_left(seconds, view.spent, log.study.budget - view.spent)
    return {
        "stage": view.stage,
        "trials": ends,
        "spent": round(view.spent, 2),
        "running": round(view.spending.total - view.spent, 2),
        "budget": log.study.budget,
        **({"time left": left} if left else {}),
        **({NOT_ADDED: view.not_added} if view.not_added else {}),
        "findings": [
            {"claim": h.claim, **view.findings[h.id].to_json()} for h in log.study.hypotheses if h.id in view.findings
        ],
    }


def report(
    folder: Folder,
    check: Annotated[
        Path | None, typer.Option(help="Check this report against the journal instead of writing one.")
    ] = None,
) -> None:
    """Write report.html and report.md from a study's journal, finished or not, and those of its annexes."""
    from agentjet.research.journal import StudyFolder
    from agentjet.research.report import build_all, log_of
    from agentjet.research.report import check as compared

    logs = StudyFolder(folder).logs()
    if check is None:
        for written in build_all(logs, folder):
            typer.echo(written)
        return
    problems = compared(check, log_of(check, logs))
    if problems:
        raise ConfigError("\n".join([f"{check} differs from the journal:", *problems]))
    typer.echo(f"{check} agrees with the journal")


# ---- steering -------------------------------------------------------------------------------------------------------

Action = Literal["pause", "resume", "cap", "veto", "add-arm", "add-hypothesis"]


def steer(
    folder: Folder,
    action: Annotated[Action, typer.Argument(help="The request.")],
    value: Annotated[
        str, typer.Argument(metavar="[RUNS|ARM]", help="For cap: full runs in total. Otherwise: the arm.")
    ] = "",
    against: Annotated[str, typer.Option(help="With add-arm and add-hypothesis: the arm to compare with.")] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="With add-arm: a change; can be repeated."),
    ] = None,
    why: Annotated[str, typer.Option(help="For the report.")] = "",
) -> None:
    """Pause or resume a study, cap its budget, veto an arm, or add an arm or a claim.

    A running study takes the request before its next batch of trials and records it in its journal and its report.
    Additions after the data began are exploratory. The rules of the verdicts cannot be changed.
    """
    from agentjet.research.journal import StudyFolder
    from agentjet.research.launcher import SteeringFile

    files = StudyFolder(folder)
    asked = request(action, value, against, change or [], why)
    steering_file = SteeringFile(files.steering_file)
    check(asked, files.study(), files.logs(), steering_file)
    steering_file.append(asked)
    typer.echo(f"requested: {action} {value}".rstrip())


def check(asked: Request, study: Study, logs: list[StudyLog], steering_file: SteeringFile) -> None:
    """Raises `ConfigError` for a request that the study would refuse, as far as that is known now."""
    from agentjet.research.amendments import EVERYTHING, grant
    from agentjet.research.models import Cap, Refused, Resume
    from agentjet.research.report.facts import StudyView

    kind, log = asked.kind.replace("_", "-"), logs[-1]
    if log.study is not None:
        view = StudyView(log)
        if view.stage == "finished":
            raise ConfigError(f"{kind}: the study is finished; plan another with `agentjet research new`")
        spent = view.spending.total
        if isinstance(asked, Cap) and asked.runs < spent:
            raise ConfigError(f"cap {asked.runs:g}: {spent:.1f} full runs are spent or running; give a larger number")
    amended = amended_study(log.study or study, log, steering_file.unread(logs))
    if isinstance(asked, Resume) and not amended.paused:
        raise ConfigError("resume: the study is not paused")
    try:
        grant(amended, asked, "human", EVERYTHING)
    except Refused as refusal:
        raise ConfigError(f"{kind}: {refusal}") from None


def amended_study(study: Study, log: StudyLog, waiting: list[str]) -> AmendedStudy:
    """Applies all granted requests and those that the study has not read yet."""
    from agentjet.research.amendments import EVERYTHING, AmendedStudy, grant, parse_action
    from agentjet.research.models import Refused, loads

    amended = AmendedStudy(study, begun=True)
    for amendment in log.amendments:
        if not amendment.refused and amendment.point >= 0:
            amended = grant(amended, parse_action(amendment.origin, amendment.asked), amendment.origin, EVERYTHING)
    for line in waiting:
        with suppress(Refused):
            amended = grant(amended, parse_action("human", loads(line)), "human", EVERYTHING)
    return amended


def request(action: Action, value: str, against: str, changes: list[str], why: str) -> Request:
    """Raises `ConfigError` for an invalid request."""
    from agentjet.research.models import REQUEST, Refused, parse

    if value.startswith("--"):
        raise ConfigError(f"{value}: unknown option; the options are --against, --set and --why")
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
        fields["changes"] = overrides_of(changes)
    try:
        return parse(REQUEST, fields)
    except Refused as refusal:
        raise ConfigError(f"{action}: {refusal}") from None
