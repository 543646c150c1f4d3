"""The proposers that need another program: `LanguageModel`, and `CodingAgent`.

`LanguageModel` talks to a language model behind an OpenAI- or Anthropic-compatible URL. The model reads the campaign by
the tools of `ProposalTools`, and proposes interventions by a tool. It cannot start a run, judge or spend. An invalid
call is answered with the reason; a model that answers prose is asked again twice. Each answer is written to a record
before it is used, and `ReplayedModel` gives the answers of a record again.

`CodingAgent` is a command, such as Claude Code, Codex CLI or mini-swe-agent. It works in a scratch folder: `subject/`
has the files of the base, `campaign/` the newest run and the notebook. It reads its task from standard input, and edits
files in `subject/`. The difference is the patch of one intervention; `hypothesis.json` gives its reasons. It runs in a
sandbox, where held-out tasks are not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getdoc
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter

from agentjet.client.command import CapturedProcess
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.campaign.strategist import Intervention, ProposerAway, View, facts_of
from agentjet.research.campaign.subject_repo import git, read_folder, write_files
from agentjet.research.models import Message, Record, adapter, shortened
from agentjet.sandbox import Limits, ProgramFolder, Sandbox, missing, programs

# ---- a language model ------------------------------------------------------------------------------------------------

MAX_TURNS = 40
"""Maximum answers of the model to one request for proposals."""
REPAIRS = 2
"""Number of times that prose, or an invalid proposal, is sent back."""
MAX_ANSWER_BYTES = 1 << 20
LONGEST_RESULT = 20_000
"""Maximum characters of a tool's result."""
RULES = """You are a researcher who improves an agent that is trained by reinforcement learning. Code runs, measures and
judges; you read and propose. First read what was observed, then propose changes of the subject's files or settings,
each as a testable hypothesis: why (refer to entries of the notebook), what it predicts, what would refute it. Give no
results: they come from runs. The model, the held-out tasks, the evaluator and the budget are fixed. Propose at most
{most} interventions, the most promising first, then call finish. Question: {topic}"""


Tool = dict[str, Any]


@dataclass(frozen=True)
class LlmToolCall(Record):
    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True)
class Reply(Record):
    """An answer of a model: text, and calls of tools."""

    text: str = ""
    calls: tuple[LlmToolCall, ...] = ()


class ChatModel(Protocol):
    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        """Raises `ProposerAway`. Messages have OpenAI's chat format; tools have a name, a description and a schema."""
        ...


@dataclass
class LanguageModel:
    """A `Proposer`."""

    model: ChatModel
    record: Path
    """Gets a line for each answer."""
    papers: Path | None = None
    seconds: float = 900.0
    """Time limit for one request for proposals."""
    name: str = "llm"
    limit: str = ""
    """A sentence for the report about the origin of its answers."""

    def propose(self, view: View, most: int) -> Sequence[Intervention | str]:
        """Raises `ProposerAway` if the model does not answer."""
        tools = ProposalTools(view, most, self.papers)
        messages: list[Message] = [{"role": "system", "content": RULES.format(most=most, topic=view.topic)}]
        messages.append({"role": "user", "content": f"The newest run is entry {view.observed}. Begin.{view.remarks()}"})
        deadline, prose = time.monotonic() + self.seconds, 0
        for _ in range(MAX_TURNS):
            if time.monotonic() > deadline:
                break
            try:
                reply = self.model.reply(messages, tools.definitions())
            except ProposerAway:
                if tools.proposals:
                    return tools.proposals
                raise
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"asked": messages[-1], "reply": reply.to_json()}) + "\n")
            messages.append(said(reply))
            for call in reply.calls:
                messages.append({"role": "tool", "tool_call_id": call.call_id, "content": tools.use(call)})
            if tools.finished or len(tools.proposals) >= most:
                return tools.proposals
            if not reply.calls:
                prose += 1
                if prose > REPAIRS:
                    return [*tools.proposals, shortened(reply.text or "(an empty answer)")]
                messages.append({"role": "user", "content": "Use the tools: propose, or finish with the reason."})
        if not tools.proposals:
            raise ProposerAway(f"no proposal within {MAX_TURNS} answers and {self.seconds:g} s")
        return tools.proposals


def said(reply: Reply) -> Message:
    """An answer as a message."""
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]
    return {"role": "assistant", "content": reply.text} | ({"tool_calls": calls} if calls else {})


# ---- tools ----------------------------------------------------------------------------------------------------------


TOOLS = ("notebook", "files", "read", "curves", "transcripts", "propose", "finish")
"""Methods of `ProposalTools` that a model may call. Their docstrings are what it reads about them."""
REQUIRED = ("name", "kind", "why", "predicts", "refutes")
"""Fields of a proposal that a model must give."""


@dataclass
class ProposalTools:
    """The tools over a campaign's view, and the proposals made so far."""

    view: View
    most: int
    papers: Path | None = None
    proposals: list[Intervention | str] = field(default_factory=list)
    finished: bool = False
    invalid: int = 0

    def definitions(self) -> list[Tool]:
        schemas = {name: TypeAdapter(getattr(self, name)).json_schema() for name in TOOLS}
        schemas["propose"] = adapter(Intervention).json_schema() | {"required": [*REQUIRED]}
        return [
            {"name": name, "description": getdoc(getattr(self, name)), "parameters": schema}
            for name, schema in schemas.items()
        ]

    def use(self, call: LlmToolCall) -> str:
        """The result of a tool, or the reason why the call is invalid."""
        try:
            arguments = json.loads(call.arguments or "{}", parse_constant=str)
            if not isinstance(arguments, dict):
                raise ValueError("the arguments are not an object")
            if call.name not in TOOLS:
                raise ValueError(f"there is no tool {call.name!r}; the tools are {', '.join(TOOLS)}")
            result = getattr(self, call.name)(**arguments)
            return shortened(result if isinstance(result, str) else json.dumps(result, default=str), LONGEST_RESULT)
        except Exception as error:  # the boundary: a model may call with anything
            if call.name == "propose":
                self.invalid += 1
                if self.invalid > REPAIRS:
                    self.proposals.append(shortened(f"{error}: {call.arguments}"))
            return f"invalid: {shortened(str(error))}"

    def notebook(self, first: int = 1, last: int = 1_000_000) -> object:
        """Entries of the notebook by their numbers, oldest first."""
        listed = [entry for entry in self.view.notebook if int(first) <= entry.number <= int(last)]
        return [[e.number, e.kind, shortened(json.dumps(e.content, default=str), 1500)] for e in listed]

    def files(self) -> object:
        """Names and sizes of the subject's files at the present base, and of the papers."""
        papers = [path.name for path in self._papers()]
        return {"subject": {name: len(text) for name, text in self.view.files.items()}, "papers": papers}

    def read(self, name: str) -> str:
        """A file of the subject, the evaluator (judge), or a paper."""
        papers = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in self._papers()}
        files = {**papers, "judge": self.view.judge_source, **self.view.files}
        if name not in files:
            raise ValueError(f"there is no file {name!r}; call files for the names")
        return files[name]

    def curves(self, name: str = "") -> object:
        """A signal of the newest run, a value a step. Without a name: all names, the score and the facts."""
        run = self.view.observation
        if name:
            return run.signals.get(name) or f"there is no signal {name!r}; call curves without a name"
        return {"signals": sorted(run.signals), "curve": run.curve, "facts": facts_of(run), "by_task": run.by_task}

    def transcripts(self) -> object:
        """Best, median and worst training episodes of the newest run."""
        return [one.to_json() for one in self.view.observation.transcripts]

    def propose(self, **fields: Any) -> str:
        """Proposes an intervention. `changes` are settings by dotted name, such as {"job.optimizer.lr": 1e-5}; `patch`
        is a unified diff of the subject's files, with a/ and b/ prefixes; `why` is the reason in the evidence,
        `predicts` the expected result, `refutes` a result that would refute it; `evidence` are numbers of entries.
        """
        proposal = Intervention.from_json(fields)
        if len(self.proposals) >= self.most:
            raise ValueError(f"{self.most} proposals are the most; call finish")
        self.proposals.append(proposal)
        return f"noted as proposal {len(self.proposals)} of at most {self.most}"

    def finish(self, reason: str) -> str:
        """Ends the proposals, with the reason why nothing further is worth a try."""
        self.finished = True
        return "finished"

    def _papers(self) -> list[Path]:
        return sorted(path for path in self.papers.glob("*") if path.suffix in (".md", ".txt")) if self.papers else []


# ---- models ---------------------------------------------------------------------------------------------------------


@dataclass
class ReplayedModel:
    """A model that gives the answers of a record, after the first `before`."""

    record: Path
    before: int = 0

    def __post_init__(self) -> None:
        self._replies = iter(replies_in(self.record)[self.before :])

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        reply = next(self._replies, None)
        if reply is None:
            raise ProposerAway(f"{self.record.name}: the record ends here")
        return reply


def replies_in(record: Path) -> list[Reply]:
    """The answers of a record, one a line. Raises `ConfigError` for a line that has none."""
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{record}: {getattr(error, 'strerror', error)}: give a record of answers") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(Reply.from_json(json.loads(line)["reply"]))
        except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
            raise ConfigError(f"{record} line {number} has no answer of a model ({error!r}): correct it") from None
    return found


@dataclass(frozen=True)
class LlmEndpoint:
    """A model behind an API. `url` is the part before `/chat/completions` (openai) or `/messages` (anthropic), such as
    `http://127.0.0.1:8000/v1`.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    kind: Literal["openai", "anthropic"] = "openai"
    seconds: float = 180.0
    """Time limit for a whole answer, also if it arrives slowly."""

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        path, body, headers = (openai_request if self.kind == "openai" else anthropic_request)(self, messages, tools)
        content = self._post(f"{self.url.rstrip('/')}{path}", body, headers)
        try:
            return (openai_reply if self.kind == "openai" else anthropic_reply)(json.loads(content))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, AgentJetError):
            raise ProposerAway(f"{self.url}: the answer is not one of the {self.kind} API") from None

    def _post(self, address: str, body: object, headers: Mapping[str, str]) -> bytes:
        """Raises `ProposerAway` for an answer that is late, too long or an error."""
        import httpx

        deadline, content = time.monotonic() + self.seconds, b""
        try:
            with httpx.stream("POST", address, json=body, headers=dict(headers), timeout=self.seconds) as response:
                for part in response.iter_bytes():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise ProposerAway(f"{self.url}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise ProposerAway(f"{self.url}: the answer took longer than {self.seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProposerAway(f"{self.url}: {error or type(error).__name__}") from None
        if response.status_code != 200:
            raise ProposerAway(f"{self.url}: answered with status {response.status_code}")
        return content


Request = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers."""


def openai_request(endpoint: LlmEndpoint, messages: Sequence[Message], tools: Sequence[Tool]) -> Request:
    functions = [{"type": "function", "function": tool} for tool in tools]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return "/chat/completions", {"model": endpoint.model, "messages": [*messages], "tools": functions}, headers


def openai_reply(content: Any) -> Reply:
    message = content["choices"][0]["message"]
    calls = [
        LlmToolCall(str(call["id"]), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return checked(Reply(message.get("content") or "", tuple(calls)))


def anthropic_request(endpoint: LlmEndpoint, messages: Sequence[Message], tools: Sequence[Tool]) -> Request:
    named = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools]
    turns: list[Message] = []
    for message in messages[1:]:
        role, blocks = ("assistant" if message["role"] == "assistant" else "user"), anthropic_blocks(message)
        if turns and turns[-1]["role"] == role:  # results of several calls are one turn
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    system = messages[0]["content"]
    body = {"model": endpoint.model, "max_tokens": 8192, "system": system, "messages": turns, "tools": named}
    return "/messages", body, {"x-api-key": endpoint.api_key, "anthropic-version": "2023-06-01"}


def anthropic_blocks(message: Message) -> list[Message]:
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
    blocks: list[Message] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = {"text": function["arguments"]}
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks or [{"type": "text", "text": "(empty)"}]


def anthropic_reply(content: Any) -> Reply:
    blocks = content["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [
        LlmToolCall(block["id"], block["name"], json.dumps(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return checked(Reply(text, tuple(calls)))


def checked(reply: Reply) -> Reply:
    """Raises `ConfigError` for an answer with values of other types."""
    return Reply.from_json(reply.to_json())


# ---- a coding agent --------------------------------------------------------------------------------------------------

LIMITS = Limits(processes=1024)
REASONS = ("name", "why", "predicts", "refutes")
LONGEST_REASONS = 2**20
"""Bytes of `hypothesis.json`."""
TASK = """Question: {topic}
The agent in subject/ is trained by reinforcement learning and judged elsewhere by other code. Read campaign/run.json
(curves, signals, transcripts), campaign/notebook.json and campaign/judge.txt. Edit the files in subject/ so that the
trained agent scores higher: one change, as a testable hypothesis. Model, held-out tasks, evaluator and lengths in
subject.toml are fixed: a change of them is refused. Then write hypothesis.json with the keys name, why, predicts and
refutes. Give no results: they come from runs. If nothing is worth a try, change no file.
"""


@dataclass
class CodingAgent:
    """A `Proposer`."""

    command: tuple[str, ...]
    readable: tuple[Path, ...] = ()
    """Paths that it may read, besides its folder, the system's programs and the files in the command."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for the command, such as the key of its model."""
    url: str = ""
    """The only server that the command reaches: that of its model. Empty: it has the network of this machine."""
    unsafe: bool = False
    """Run without a sandbox where none can be made."""
    seconds: float = 1800.0
    name: str = "coding agent"

    def __post_init__(self) -> None:
        if (reason := missing()) and not self.unsafe:
            raise ConfigError(f"--agent-cli: {reason}; or give it the rights of this user (--unsafe)")

    def propose(self, view: View, most: int) -> Sequence[Intervention | str]:
        """Returns one proposal, a text with the reason why it cannot be used, or nothing if no file was changed."""
        with ProgramFolder(prefix="agentjet-coding-agent-") as name:
            folder = Path(name).resolve()
            files = {path: text.encode() for path, text in view.files.items()}
            write_files(files, folder / "a")
            write_files(files, folder / "work" / "subject")
            write_files(facts(view), folder / "work" / "campaign")
            self._run(folder, TASK.format(topic=view.topic) + view.remarks())
            if odd := odd_file(folder / "work" / "subject"):
                return [f"the coding agent left {odd!r}, which is not a regular file"]
            try:
                read_folder(folder / "work" / "subject", folder / "model")  # Checks its size before git reads it.
            except ConfigError as error:
                return [str(error)]
            (folder / "work" / "subject").rename(folder / "b")
            patch = git(
                folder, "diff", "--no-index", "--no-prefix", "--no-color", "--no-ext-diff", "a", "b", codes=(0, 1)
            ).decode("utf-8", "replace")
            if not patch:
                return []
            try:
                given = {"kind": "agent", "patch": patch, **reasons(folder / "work" / "hypothesis.json")}
                return [Intervention.from_json(given)]
            except ConfigError as error:
                return [str(error)]

    def _run(self, folder: Path, task: str) -> None:
        """Raises `ProposerAway` for a command that fails or takes too long."""
        work, home = folder / "work", folder / "work" / "home"
        home.mkdir()
        options: dict[str, Any] = {"merged": True, "cwd": work}
        own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
        if missing():
            options["env"] = {**own, **self.environment}
        else:
            files = [Path(word).resolve() for word in self.command[1:] if Path(word).is_file()]
            options["sandbox"] = Sandbox(
                folder=work,
                readable=(*self.readable, *files, *programs(self.command[0])),
                network="model" if self.url else "open",
                model_url=self.url,
                paths=("/",),
                limits=LIMITS,
                variables={**own, **self.environment},
            )
        with TemporaryFile() as given:
            given.write(task.encode())
            given.seek(0)
            command = CapturedProcess(self.command, stdin=given, **options)
        try:
            status = command.wait(self.seconds)
        finally:
            command.signal(signal.SIGKILL)  # and its children
        if status is None:
            command.wait()
        how = f"did not end within {self.seconds:g} s" if status is None else status and f"ended with status {status}"
        if how := command.excess or how:
            end = shortened(command.text().strip(), 500)
            raise ProposerAway(f"--agent-cli: {self.command[0]} {how}: {end}")


def facts(view: View) -> dict[str, bytes]:
    """Files about the campaign for the command."""
    entries = [[e.number, e.kind, list(e.because), e.content] for e in view.notebook]
    return {
        "run.json": json.dumps(view.observation.to_json(), indent=1).encode(),
        "notebook.json": json.dumps(entries, indent=1).encode(),
        "judge.txt": view.judge_source.encode(),
    }


def odd_file(folder: Path) -> str:
    """Name of a file that is missing, a link or a device, or "". Removes caches of Python."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            return path.name
    for cache in [*folder.rglob("__pycache__")]:
        shutil.rmtree(cache, ignore_errors=True)
    return ""


def reasons(file: Path) -> dict[str, str]:
    """Name and reasons of the command's change; defaults if it gave none."""
    try:
        is_plain = file.is_file() and not file.is_symlink() and file.stat().st_size <= LONGEST_REASONS
        given = json.loads(file.read_text(encoding="utf-8")) if is_plain else {}
    except (OSError, ValueError, RecursionError):
        given = {}
    given = given if isinstance(given, dict) else {}
    found = {key: str(given.get(key, ""))[:2000] for key in REASONS}
    return {**found, "name": found["name"][:80] or "a patch of the coding agent"}
