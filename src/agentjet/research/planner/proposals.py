"""A language model is consulted: before the data, about the plan, and when a study has its findings, about an annex.

It proposes, and is believed nothing. Every answer goes to the journal before it is read, so that a study that is
resumed hears the same; what is not an action of the schema is sent back twice, then refused. No answer is no harm: the
plan stands, and the study ends without it.

`ChatEndpoint`: a language model behind an OpenAI-compatible API, and how long and how much it may talk.

A coding agent writes another version of the agent that is trained, and never comes near what judges it.

It works on copies of the Python files beside the agent, without those that hold the tasks or the evaluator, and the
kernel keeps it from the rest of the disk (`fence`). What it left is looked at afterwards: a file that it may not
change, one taken away, a link, nothing changed at all, and the answer is no. A denial is final: it is not asked again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from agentjet.client.agent_source import hash_of, source_of
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.amendments import AmendedStudy, AmendmentLog
from agentjet.research.journal import StudyLog
from agentjet.research.launcher import TrialLauncher
from agentjet.research.models import (
    PROPOSAL,
    Action,
    AddArm,
    Exchange,
    Finding,
    Origin,
    Refused,
    Study,
    Subject,
    as_text,
    loads,
    parse,
)
from agentjet.research.planner import landlock
from agentjet.research.planner.plan import Plan, coded_name, with_agents
from agentjet.research.planner.priors import own_values, priors
from agentjet.research.scheduler import estimate_cost

REPAIRS = 2
"""Times an answer that is not as it should be is sent back."""
MAX_ACTIONS = 8
"""Of one answer; the rest of a longer one is not read."""
Message = dict[str, str]
RULES = f"""You advise a study in reinforcement learning. You propose; code decides, runs and judges.
Answer with one JSON object {{"actions": [...]}}, at most {MAX_ACTIONS}, each by the schema. Or {{"actions": []}}.
Numbers come from trials: give no results and no numbers in "why". Name an arm by what it changes, not by how it does: a
name with a word such as "better" is refused. The smallest effect of interest, alpha, the looks,
the evaluator and the budget are fixed. After the data began every claim is exploratory."""


class LLMUnavailable(AgentJetError):
    """A language model gave no answer."""


class LLM(Protocol):
    """A language model: messages in, text out."""

    def answer(self, messages: Sequence[Message]) -> str:
        """Raises `LLMUnavailable`."""
        ...


@dataclass(frozen=True)
class ModelAdviser:
    """Asks a model what to add to a study that has its findings."""

    voice: LLM

    def advise(self, desk: TrialLauncher, findings: list[Finding]) -> None:
        view = {**view_of(desk.study), "runs_left": round(desk.ledger.left("confirm"), 2)}
        view["findings"] = [
            {"claim": hypothesis.claim, "verdict": found.verdict, "estimate": found.estimate, "seeds": found.seeds}
            for hypothesis, found in zip(desk.study.hypotheses, findings, strict=True)
        ]
        for said in proposals(self.voice, desk.book, f"after {desk.study.id}", view):
            desk.helm.take(said, "llm")


def refine(plan: Plan, voice: LLM, book: StudyLog) -> Plan:
    """The plan with what a model adds to it. The book is the study's, which is fixed when it is first run."""
    draft = PlanAmendments(plan.study, book)
    for said in proposals(voice, book, "plan", view_of(plan.study)):
        draft.take(said, "llm")
    return plan.with_study(draft.course.study)


class PlanAmendments(AmendmentLog):
    """A plan that may still be added to, as long as its budget suffices."""

    def __init__(self, study: Study, book: StudyLog, codes: frozenset[str] = frozenset()) -> None:
        super().__init__(AmendedStudy(study, begun=False, codes=codes), book, lambda: study.budget)

    def granted(self, action: Action, origin: Origin) -> AmendedStudy:
        course = super().granted(action, origin)
        least = estimate_cost(course.study).least
        if least > course.study.budget:
            budget = course.study.budget
            raise Refused(f"the study would take {least:.1f} full runs where all is plain, of a budget of {budget:g}")
        return course


def view_of(study: Study) -> dict[str, object]:
    """What a model is told of a study: nothing that was held out."""
    return {
        "topic": study.topic,
        "arms": [arm.to_json() for arm in study.arms],
        "hypotheses": [hypothesis.to_json() for hypothesis in study.hypotheses],
        "looks": study.looks,
        "budget": study.budget,
        "settings": sorted({*own_values(study), *(priors() if study.subject else ())}),
    }


# ---- the conversation -----------------------------------------------------------------------------------------------


def proposals(voice: LLM, book: StudyLog, moment: str, view: dict[str, object]) -> list[object]:
    """What a model proposes at a moment, well-formed or not, each to be judged."""
    schema = json.dumps(PROPOSAL.json_schema())
    messages = [
        {"role": "system", "content": f"{RULES}\nSchema of an action: {schema}"},
        {"role": "user", "content": json.dumps(view, ensure_ascii=False)},
    ]
    recorded = [exchange for exchange in book.exchanges if exchange.moment == moment]
    for attempt in range(1 + REPAIRS):
        exchange = recorded[attempt] if attempt < len(recorded) else asked(voice, book, moment, messages)
        if exchange.failed:
            return []
        actions, complaint = read_answer(exchange.answer)
        if not complaint or attempt == REPAIRS:
            return actions
        messages.append({"role": "assistant", "content": exchange.answer})
        messages.append({"role": "user", "content": f"That is not granted: {complaint}. Answer again, in full."})
    raise AssertionError("unreachable")


def asked(voice: LLM, book: StudyLog, moment: str, messages: Sequence[Message]) -> Exchange:
    """A question put and its answer, on record."""
    question = as_text(messages[-1]["content"])
    try:
        exchange = Exchange(moment, question, as_text(voice.answer(messages), limit=20_000))
    except LLMUnavailable as silence:
        exchange = Exchange(moment, question, "", failed=as_text(str(silence)))
    book.append("exchange", exchange.to_json())
    return exchange


def read_answer(answer: str) -> tuple[list[object], str]:
    """The actions of an answer as they were said, and the first thing that is wrong about it, or nothing."""
    fenced = re.search(r"```(?:json)?\n(.*?)```", answer, re.DOTALL)
    try:
        content = loads(fenced[1] if fenced else answer)
    except Refused as refusal:
        return [answer], str(refusal)
    actions = content.get("actions") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(actions, list) or set(content) != {"actions"}:
        return [answer], 'the answer is one object with one key, "actions", a list'
    complaint = f"{len(actions)} actions are more than {MAX_ACTIONS}" if len(actions) > MAX_ACTIONS else ""
    for action in actions[:MAX_ACTIONS]:
        try:
            parse(PROPOSAL, action)
        except Refused as refusal:
            complaint = complaint or str(refusal)
    return actions[:MAX_ACTIONS], complaint


MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class ChatEndpoint:
    """`url` ends where `/chat/completions` begins, such as `http://127.0.0.1:8000/v1`."""

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    seconds: float = 120.0
    """For the whole answer, however it trickles in."""

    def answer(self, messages: Sequence[Message]) -> str:
        import httpx

        body = {"model": self.model, "messages": list(messages), "temperature": 0, "response_format": answer_format()}
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        address = f"{self.url.rstrip('/')}/chat/completions"
        deadline = time.monotonic() + self.seconds
        parts: list[bytes] = []
        try:
            with (
                httpx.Client(timeout=self.seconds, follow_redirects=False) as client,
                client.stream("POST", address, json=body, headers=headers) as response,
            ):
                for part in response.iter_bytes():
                    parts.append(part)
                    if sum(map(len, parts)) > MAX_ANSWER_BYTES:
                        raise LLMUnavailable(f"{self.url}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise LLMUnavailable(f"{self.url}: the answer took longer than {self.seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LLMUnavailable(f"{self.url}: {self._without_key(str(error)) or type(error).__name__}") from None
        if response.status_code != 200:
            raise LLMUnavailable(f"{self.url}: answered with status {response.status_code}")
        return content_of(b"".join(parts), self.url)

    def _without_key(self, text: str) -> str:
        """What a failure says goes to a journal, and some say what was in the headers: as it is, or with escapes."""
        for key in filter(None, (self.api_key, repr(self.api_key)[1:-1])):
            text = text.replace(key, "(the key)")
        return text


def answer_format() -> dict[str, object]:
    """As `response_format` wants it."""
    schema = PROPOSAL.json_schema()
    actions = {
        "type": "object",
        "properties": {"actions": {"type": "array", "maxItems": MAX_ACTIONS, "items": {"$ref": "#/$defs/Proposal"}}},
        "required": ["actions"],
        "additionalProperties": False,
        "$defs": {**schema.pop("$defs"), "Proposal": schema},
    }
    return {"type": "json_schema", "json_schema": {"name": "actions", "schema": actions}}


def content_of(body: bytes, url: str) -> str:
    """The text of the first choice. Raises `LLMUnavailable`."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise LLMUnavailable(f"{url}: the answer is no chat completion with text")
    return text


MOMENT = "agent-cli"
MAX_BYTES = 1 << 20
"""Of all files that a command leaves, and of what is heard of it."""
Files = dict[str, bytes]
"""Contents by name."""


@dataclass(frozen=True)
class CodingAgentSandbox:
    """A command that edits the files of the folder it is started in, and reads its task from its input."""

    command: tuple[str, ...]
    allowed: tuple[str, ...] = ("*.py",)
    """Patterns of the names it may change or add."""
    readable: tuple[Path, ...] = ()
    """What it may read besides its folder, the system's programs, and the files that the command itself names."""
    seconds: float = 1800.0


def propose_code(plan: Plan, against: str, workshop: CodingAgentSandbox, keeping: Path, book: StudyLog) -> Plan:
    """The plan with an arm whose agent is as the command left it; or the plan, with the failure or refusal in the book.

    `against` is the arm whose agent is copied, and which the new one is held against. Code that is accepted is kept in
    `keeping`, in a folder named by its hash. Raises `ConfigError` where the agent cannot be taken apart from its judge.
    """
    subject = plan.study.subject
    if subject is None:
        raise ConfigError("--agent-cli: the study names no agent whose code could be changed")
    if not landlock.version():
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
            PlanAmendments(plan.study, book).refuse({"command": list(workshop.command)}, "llm", refusal)
            return plan
    draft = PlanAmendments(plan.study, book, frozenset({code}))
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


def task(file: str, function: str, workshop: CodingAgentSandbox) -> str:
    """What the command reads."""
    return (
        f"Improve the agent {function!r} in {file}. It is trained by reinforcement learning, and judged elsewhere by "
        f"other code. You may change files named {' or '.join(workshop.allowed)} in this folder, and touch nothing "
        "else: all of it is refused otherwise, and you are not asked again. Give no results: they come from trials.\n"
    )


def work(workshop: CodingAgentSandbox, said: str, given: Files, room: Path) -> Exchange:
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
            [sys.executable, "-I", landlock.__file__, str(room), *readable, "--", *workshop.command],
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


def changes(given: Files, files: Files, kept_back: Files, workshop: CodingAgentSandbox) -> Files:
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
