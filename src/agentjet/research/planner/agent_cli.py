"""A coding agent writes another version of the agent that is trained, and never comes near what judges it.

It works on copies of the Python files beside the agent, without those that hold the tasks or the evaluator, and the
kernel keeps it from the rest of the disk (`fence`). What it left is looked at afterwards: a file that it may not
change, one taken away, a link, nothing changed at all, and the answer is no. A denial is final: it is not asked again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from agentjet.client.code import hash_of
from agentjet.client.loading import source_of
from agentjet.errors import ConfigError
from agentjet.research.journal import Book
from agentjet.research.models import Exchange, Subject
from agentjet.research.planner import fence
from agentjet.research.planner.actions import AddArm, Refused, as_text
from agentjet.research.planner.consult import Draft
from agentjet.research.planner.offline import with_agents
from agentjet.research.planner.plan import Plan, coded_name

MOMENT = "agent-cli"
MAX_BYTES = 1 << 20
"""Of all files that a command leaves, and of what is heard of it."""
Files = dict[str, bytes]
"""Contents by name."""


@dataclass(frozen=True)
class Workshop:
    """A command that edits the files of the folder it is started in, and reads its task from its input."""

    command: tuple[str, ...]
    allowed: tuple[str, ...] = ("*.py",)
    """Patterns of the names it may change or add."""
    readable: tuple[Path, ...] = ()
    """What it may read besides its folder, the system's programs, and the files that the command itself names."""
    seconds: float = 1800.0


def propose_code(plan: Plan, against: str, workshop: Workshop, keeping: Path, book: Book) -> Plan:
    """The plan with an arm whose agent is as the command left it; or the plan, with the failure or refusal in the book.

    `against` is the arm whose agent is copied, and which the new one is held against. Code that is accepted is kept in
    `keeping`, in a folder named by its hash. Raises `ConfigError` where the agent cannot be taken apart from its judge.
    """
    subject = plan.study.subject
    if subject is None:
        raise ConfigError("--agent-cli: the study names no agent whose code could be changed")
    if not fence.version():
        raise ConfigError("--agent-cli: this kernel cannot fence a command in (Landlock, Linux 5.13); leave it out")
    if any(exchange.moment == MOMENT for exchange in book.exchanges):
        return plan  # heard already
    agent = subject.agent_of(against)
    source, function = source_of(agent, option="agent"), agent.rpartition(":")[2]
    given, kept_back = files_beside(source, subject)
    with tempfile.TemporaryDirectory(prefix="agentjet-workshop-") as name:
        room = Path(name).resolve()
        exchange = work(workshop, task(source.name, function, workshop), given, room)
        book.append("exchange", exchange.to_json())
        if exchange.failed:
            return plan
        try:
            files = left_in(room / "agent")
            code = hash_of(changes(given, files, kept_back, workshop))
        except Refused as refusal:
            Draft(plan.study, book).refuse({"command": list(workshop.command)}, "llm", refusal)
            return plan
    draft = Draft(plan.study, book, frozenset({code}))
    draft.pass_over("llm")
    arm = AddArm(arm=coded_name(code), against=against, changes=plan.study.arm(against).changes, code=code)
    if draft.take(arm.model_dump(), "llm").refused:
        return plan
    folder = keeping / code
    write(kept_back | files, folder)
    subject = with_agents(subject, {arm.arm: f"{folder / source.name}:{function}"})
    return plan.with_study(replace(draft.course.study, subject=subject))


def files_beside(source: Path, subject: Subject) -> tuple[Files, Files]:
    """The Python files beside an agent: those that may be given away, and those that hold tasks or the evaluator."""
    named = [subject.tasks, subject.held_out, subject.evaluator or subject.agent]
    judges = {(Path(n) if n.endswith(".jsonl") else source_of(n, option="subject")).resolve() for n in named}
    if source.resolve() in judges:
        raise ConfigError(
            f"--agent-cli: {source} holds the tasks or the evaluator, too: put those into files of their own "
            "(--tasks, --held-out, --evaluator), which nobody who is judged can touch"
        )
    beside = {path.name: path for path in sorted(source.parent.glob("*.py"))}
    given = {name: path.read_bytes() for name, path in beside.items() if path.resolve() not in judges}
    return given, {name: path.read_bytes() for name, path in beside.items() if name not in given}


def task(file: str, function: str, workshop: Workshop) -> str:
    """What the command reads."""
    return (
        f"Improve the agent {function!r} in {file}. It is trained by reinforcement learning, and judged elsewhere by "
        f"other code. You may change files named {' or '.join(workshop.allowed)} in this folder, and touch nothing "
        "else: all of it is refused otherwise, and you are not asked again. Give no results: they come from trials.\n"
    )


def work(workshop: Workshop, said: str, given: Files, room: Path) -> Exchange:
    """Run the command on a copy of the files, in `room/agent`, and say what it said."""
    if shutil.which(workshop.command[0]) is None:
        return Exchange(MOMENT, said, "", failed=f"there is no command {workshop.command[0]!r}")
    write(given, room / "agent")
    (room / "home").mkdir()
    named = [Path(shutil.which(word) or word).resolve() for word in workshop.command]
    readable = [str(path) for path in (*workshop.readable, *named) if path.is_file() or path in workshop.readable]
    home = str(room / "home")
    failed = ""
    with (room / "heard").open("w+b") as heard:
        process = subprocess.Popen(
            [sys.executable, "-I", fence.__file__, str(room), *readable, "--", *workshop.command],
            cwd=room / "agent",
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=heard,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.communicate(said.encode(), timeout=workshop.seconds)
        except subprocess.TimeoutExpired:
            failed = f"it was still at work after {workshop.seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it left running
            process.wait()
        heard.seek(0)
        answer = heard.read(MAX_BYTES).decode("utf-8", "replace")
    if process.returncode and not failed:
        failed = f"it ended with status {process.returncode}"
    return Exchange(MOMENT, said, as_text(answer, limit=20_000), failed=failed)


def left_in(folder: Path) -> Files:
    """The files of a folder, read once. Raises `Refused` for links, folders of folders and too much."""
    files: Files = {}
    for path in sorted(folder.iterdir()):
        if path.name == "__pycache__":
            continue
        if path.is_symlink() or not path.is_file():
            raise Refused(f"{path.name!r} is no plain file")
        if sum(map(len, files.values())) + path.stat().st_size > MAX_BYTES:
            raise Refused(f"the files are more than {MAX_BYTES} bytes")
        files[path.name] = path.read_bytes()
    return files


def changes(given: Files, files: Files, kept_back: Files, workshop: Workshop) -> Files:
    """What is not as it was given. Raises `Refused` for what the command may not touch."""
    for name in sorted(given.keys() - files.keys()):
        raise Refused(f"{name!r} was taken away")
    changed = {name: content for name, content in files.items() if given.get(name) != content}
    for name, content in changed.items():
        if name in kept_back:
            raise Refused(f"{name!r} is a file of the tasks or the evaluator")
        if not any(fnmatch(name, pattern) for pattern in workshop.allowed):
            raise Refused(f"{name!r} is none of {', '.join(workshop.allowed)}")
        try:
            compile(content, name, "exec")
        except (SyntaxError, ValueError) as error:
            raise Refused(f"{name!r} is no Python: {error}") from None
    if not changed:
        raise Refused("nothing was changed")
    return changed


def write(files: Files, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
