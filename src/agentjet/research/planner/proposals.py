"""Proposals of a language model or a coding agent. Each is checked; neither can judge.

A language model is asked before the data about the plan, and after the findings about an annex. Answers are recorded
before they are read, so that a resumed study uses the same ones. An invalid answer is sent back twice, then refused.
Without an answer the study continues unchanged. `ChatEndpoint` limits the time and the size of an answer.

A coding agent writes another version of the trained agent. It works on copies of the Python files beside the agent,
without those of the tasks and the evaluator, and Landlock blocks the rest of the disk. Afterwards the files are
checked: forbidden changes, missing files, links or no change at all are refused, without another try.
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
    AddArm,
    Exchange,
    Finding,
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
"""Number of times an invalid answer is sent back."""
MAX_ACTIONS = 8
"""Per answer; further actions are ignored."""
Message = dict[str, str]
RULES = f"""You advise a study in reinforcement learning. You propose; code decides, runs and judges.
Answer with one JSON object {{"actions": [...]}}, at most {MAX_ACTIONS}, each by the schema. Or {{"actions": []}}.
Numbers come from trials: give no results and no numbers in "why". Name an arm by what it changes, not by how it does: a
name with a word such as "better" is refused. The smallest effect of interest, alpha, the looks,
the evaluator and the budget are fixed. After the data began every claim is exploratory."""


class LLMUnavailable(AgentJetError):
    """The language model gave no answer."""


class LLM(Protocol):
    """A language model: messages in, text out."""

    def answer(self, messages: Sequence[Message]) -> str:
        """Raises `LLMUnavailable`."""
        ...


@dataclass(frozen=True)
class ModelAdviser:
    """Asks a model for additions to a study that has its findings."""

    llm: LLM

    def advise(self, launcher: TrialLauncher, findings: list[Finding]) -> None:
        view = {**view_of(launcher.study), "runs_left": round(launcher.spending.left("confirm"), 2)}
        view["findings"] = [
            {"claim": hypothesis.claim, "verdict": found.verdict, "estimate": found.estimate, "seeds": found.seeds}
            for hypothesis, found in zip(launcher.study.hypotheses, findings, strict=True)
        ]
        for proposal in proposals(self.llm, launcher.log, f"after {launcher.study.id}", view):
            launcher.steering.take(proposal, "llm")


def refine(plan: Plan, llm: LLM, log: StudyLog) -> Plan:
    """Adds a model's proposals to a plan."""
    requests = plan_amendments(plan.study, log)
    for proposal in proposals(llm, log, "plan", view_of(plan.study)):
        requests.take(proposal, "llm")
    return plan.with_study(requests.amended.study)


def plan_amendments(study: Study, log: StudyLog, codes: frozenset[str] = frozenset()) -> AmendmentLog:
    """Requests to a plan, limited by its budget. `codes` are the hashes of code that arms may use."""

    def check_budget(amended: AmendedStudy) -> None:
        least, budget = estimate_cost(amended.study).least, amended.study.budget
        if least > budget:
            raise Refused(f"the study would need at least {least:.1f} full runs, of a budget of {budget:g}")

    return AmendmentLog(AmendedStudy(study, begun=False, codes=codes), log, lambda: study.budget, check_budget)


def view_of(study: Study) -> dict[str, object]:
    """Returns the description of a study for a model, without anything held out."""
    return {
        "topic": study.topic,
        "arms": [arm.to_json() for arm in study.arms],
        "hypotheses": [hypothesis.to_json() for hypothesis in study.hypotheses],
        "looks": study.looks,
        "budget": study.budget,
        "settings": sorted({*own_values(study), *(priors() if study.subject else ())}),
    }


# ---- the conversation -----------------------------------------------------------------------------------------------


def proposals(llm: LLM, log: StudyLog, moment: str, view: dict[str, object]) -> list[object]:
    """Returns the proposals of a model at a moment, valid or not."""
    schema = json.dumps(PROPOSAL.json_schema())
    messages = [
        {"role": "system", "content": f"{RULES}\nSchema of an action: {schema}"},
        {"role": "user", "content": json.dumps(view, ensure_ascii=False)},
    ]
    recorded = [exchange for exchange in log.exchanges if exchange.moment == moment]
    for attempt in range(1 + REPAIRS):
        exchange = recorded[attempt] if attempt < len(recorded) else ask(llm, log, moment, messages)
        if exchange.failed:
            return []
        actions, complaint = read_answer(exchange.answer)
        if not complaint or attempt == REPAIRS:
            return actions
        messages.append({"role": "assistant", "content": exchange.answer})
        messages.append({"role": "user", "content": f"That is not granted: {complaint}. Answer again, in full."})
    raise AssertionError("unreachable")


def ask(llm: LLM, log: StudyLog, moment: str, messages: Sequence[Message]) -> Exchange:
    """Asks a question and records the exchange."""
    question = as_text(messages[-1]["content"])
    try:
        exchange = Exchange(moment, question, as_text(llm.answer(messages), limit=20_000))
    except LLMUnavailable as silence:
        exchange = Exchange(moment, question, "", failed=as_text(str(silence)))
    log.append("exchange", exchange.to_json())
    return exchange


def read_answer(answer: str) -> tuple[list[object], str]:
    """Returns the raw actions of an answer, and its first error or ""."""
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
    """A model behind an OpenAI-compatible API. `url` is the part before `/chat/completions`, such as
    `http://127.0.0.1:8000/v1`.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    seconds: float = 120.0
    """Time limit for the whole answer, also if it arrives slowly."""

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
        """Removes the key, plain or escaped, because error messages go to the journal and may contain headers."""
        for key in filter(None, (self.api_key, repr(self.api_key)[1:-1])):
            text = text.replace(key, "(the key)")
        return text


def answer_format() -> dict[str, object]:
    """The `response_format` of the request."""
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
    """Returns the text of the first choice. Raises `LLMUnavailable`."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise LLMUnavailable(f"{url}: the answer is not a chat completion with text")
    return text


MOMENT = "agent-cli"
MAX_BYTES = 1 << 20
"""Limit for all files that a command leaves, and for its output."""
Files = dict[str, bytes]
"""Contents by name."""


@dataclass(frozen=True)
class CodingAgentSandbox:
    """A command that edits the files of its working directory and reads its task from standard input."""

    command: tuple[str, ...]
    allowed: tuple[str, ...] = ("*.py",)
    """Patterns of file names that it may change or add."""
    readable: tuple[Path, ...] = ()
    """Paths that it may read, besides its folder, the system's programs and the files in the command."""
    seconds: float = 1800.0


def propose_code(plan: Plan, against: str, sandbox: CodingAgentSandbox, code_folder: Path, log: StudyLog) -> Plan:
    """Returns the plan with an arm for the agent that the command wrote. A failure or refusal leaves the plan as it is
    and is recorded.

    The agent of the arm `against` is copied, and the new arm is compared with it. Accepted code is stored in
    `code_folder` under its hash. Raises `ConfigError` if the agent's file also holds the tasks or the evaluator.
    """
    subject = plan.study.subject
    if subject is None:
        raise ConfigError("--agent-cli: the study names no agent whose code could be changed")
    if not landlock.version():
        raise ConfigError("--agent-cli: this kernel cannot restrict a command (Landlock, Linux 5.13); omit the option")
    if any(exchange.moment == MOMENT for exchange in log.exchanges):
        return plan  # already answered
    agent = subject.agent_of(against)
    source, function = source_of(agent, option="agent"), agent.rpartition(":")[2]
    given, kept_back = files_beside(source, subject)
    with tempfile.TemporaryDirectory(prefix="agentjet-sandbox-") as name:
        workspace = Path(name).resolve()
        exchange = work(sandbox, task(source.name, function, sandbox), given, workspace)
        log.append("exchange", exchange.to_json())
        if exchange.failed:
            return plan
        try:
            files = read_workspace(workspace / "agent")
            code = hash_of(changes(given, files, kept_back, sandbox))
        except Refused as refusal:
            plan_amendments(plan.study, log).refuse({"command": list(sandbox.command)}, "llm", refusal)
            return plan
    requests = plan_amendments(plan.study, log, frozenset({code}))
    requests.skip_recorded("llm")
    arm = AddArm(arm=coded_name(code), against=against, changes=plan.study.arm(against).changes, code=code)
    if requests.take(arm.model_dump(), "llm").refused:
        return plan
    folder = code_folder / code
    write(kept_back | files, folder)
    subject = with_agents(subject, {arm.arm: f"{folder / source.name}:{function}"})
    return plan.with_study(replace(requests.amended.study, subject=subject))


def files_beside(source: Path, subject: Subject) -> tuple[Files, Files]:
    """Splits the Python files beside an agent: those for the command, and those with tasks or the evaluator."""
    named = [subject.tasks, subject.held_out, subject.evaluator or subject.agent]
    judges = {(Path(n) if n.endswith(".jsonl") else source_of(n, option="subject")).resolve() for n in named}
    if source.resolve() in judges:
        raise ConfigError(
            f"--agent-cli: {source} also holds the tasks or the evaluator: move those to separate files "
            "(--tasks, --held-out, --evaluator), which the coding agent cannot change"
        )
    beside = {path.name: path for path in sorted(source.parent.glob("*.py"))}
    given = {name: path.read_bytes() for name, path in beside.items() if path.resolve() not in judges}
    return given, {name: path.read_bytes() for name, path in beside.items() if name not in given}


def task(file: str, function: str, sandbox: CodingAgentSandbox) -> str:
    """Returns the task for the command."""
    return (
        f"Improve the agent {function!r} in {file}. It is trained by reinforcement learning, and judged elsewhere by "
        f"other code. You may change files named {' or '.join(sandbox.allowed)} in this folder, and touch nothing "
        "else: all of it is refused otherwise, and you are not asked again. Give no results: they come from trials.\n"
    )


def work(sandbox: CodingAgentSandbox, text: str, given: Files, workspace: Path) -> Exchange:
    """Runs the command on a copy of the files, in `workspace/agent`, and returns its output."""
    if shutil.which(sandbox.command[0]) is None:
        return Exchange(MOMENT, text, "", failed=f"command {sandbox.command[0]!r} was not found")
    write(given, workspace / "agent")
    (workspace / "home").mkdir()
    named = [Path(shutil.which(word) or word).resolve() for word in sandbox.command]
    readable = [str(path) for path in (*sandbox.readable, *named) if path.is_file() or path in sandbox.readable]
    home = str(workspace / "home")
    failed = ""
    with (workspace / "output").open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", landlock.__file__, str(workspace), *readable, "--", *sandbox.command],
            cwd=workspace / "agent",
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.communicate(text.encode(), timeout=sandbox.seconds)
        except subprocess.TimeoutExpired:
            failed = f"it did not end within {sandbox.seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children
            process.wait()
        output.seek(0)
        answer = output.read(MAX_BYTES).decode("utf-8", "replace")
    if process.returncode and not failed:
        failed = f"it ended with status {process.returncode}"
    return Exchange(MOMENT, text, as_text(answer, limit=20_000), failed=failed)


def read_workspace(folder: Path) -> Files:
    """Reads the files of a folder once. Raises `Refused` for links, subfolders and too many bytes."""
    files: Files = {}
    for path in sorted(folder.iterdir()):
        if path.name == "__pycache__":
            continue
        if path.is_symlink() or not path.is_file():
            raise Refused(f"{path.name!r} is not a regular file")
        if sum(map(len, files.values())) + path.stat().st_size > MAX_BYTES:
            raise Refused(f"the files are more than {MAX_BYTES} bytes")
        files[path.name] = path.read_bytes()
    return files


def changes(given: Files, files: Files, kept_back: Files, sandbox: CodingAgentSandbox) -> Files:
    """Returns the changed files. Raises `Refused` for a forbidden change."""
    for name in sorted(given.keys() - files.keys()):
        raise Refused(f"{name!r} was deleted")
    changed = {name: content for name, content in files.items() if given.get(name) != content}
    for name, content in changed.items():
        if name in kept_back:
            raise Refused(f"{name!r} is a file of the tasks or the evaluator")
        if not any(fnmatch(name, pattern) for pattern in sandbox.allowed):
            raise Refused(f"{name!r} is not one of {', '.join(sandbox.allowed)}")
        try:
            compile(content, name, "exec")
        except (SyntaxError, ValueError) as error:
            raise Refused(f"{name!r} is not valid Python: {error}") from None
    if not changed:
        raise Refused("nothing was changed")
    return changed


def write(files: Files, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
