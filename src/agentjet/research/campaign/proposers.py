"""The proposers that need another program: `LanguageModel`, and `CodingAgent`.

`LanguageModel` talks to a language model behind an OpenAI- or Anthropic-compatible URL, by the SDK of that API. The
model reads the campaign by the tools of `ProposalTools`, and proposes interventions by a tool. It cannot start a run,
judge or spend. An invalid call is answered with the reason; a model that answers prose is asked again twice. Each
answer is written to a record before it is used, and `ReplayedModel` gives the answers of a record again.

`CodingAgent` is a command, such as Claude Code, Codex CLI or mini-swe-agent. It works in a scratch folder: `subject/`
has the files of the base, `campaign/` the newest run and the notebook. It reads its task from standard input, and edits
files in `subject/`. The difference is the patch of one intervention; `hypothesis.json` gives its reasons. It runs in a
sandbox, where held-out tasks are not.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import getdoc
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, TypeAdapter

from agentjet.client.command import CapturedProcess
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.arm_process import sandbox_for
from agentjet.research.campaign.strategist import Intervention, Proposer, ProposerAway, View, facts_of
from agentjet.research.campaign.subject_repo import git, read_folder, write_files
from agentjet.research.diagnosis import toml_of
from agentjet.research.models import Message, Record, adapter, refuse, shortened
from agentjet.sandbox import ProgramFolder, missing, programs

# ---- a language model ------------------------------------------------------------------------------------------------

MAX_TURNS = 40
"""Maximum answers of the model to one request for proposals."""
REPAIRS = 2
"""Number of times that prose, or an invalid proposal, is sent back."""
MAX_ANSWER_BYTES = 1 << 20
LONGEST_RESULT = 20_000
"""Maximum characters of a tool's result."""
PROMPTS: Mapping[str, str] = toml_of("agentjet.research.campaign", "prompts.toml")
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
    read: Annotated[int, Field(ge=0)] = 0
    """Tokens of the request."""
    written: Annotated[int, Field(ge=0)] = 0
    """Tokens of the answer."""


class ChatModel(Protocol):
    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        """Raises `ProposerAway`. Messages have OpenAI's chat format; tools have a name, a description and a schema."""


@dataclass
class LanguageModel(Proposer):
    model: ChatModel
    record: Path
    """Gets a line for each answer."""
    papers: Mapping[str, str] = field(default_factory=dict)
    """Texts by the name of their file."""
    seconds: float = 900.0
    """Time limit for one request for proposals, or for a plan."""
    name: str = "llm"
    limit: str = ""
    """A sentence for the report about the origin of its answers."""
    prices: tuple[float, float] = (0.0, 0.0)
    """Prices of a million tokens that the model reads, and of a million that it writes."""
    used: Mapping[str, float] = field(default_factory=dict)
    """Tokens `read` and `written` in the newest request, and their `price`."""

    def propose(self, view: View, most: int) -> Sequence[Intervention | str]:
        """Raises `ProposerAway` if the model does not answer."""
        tools = ProposalTools(texts_of(view.files, view.judge_source, self.papers), most, view=view)
        rules = PROMPTS["propose"].format(most=most, topic=view.topic)
        try:
            prose = self.converse(tools, rules, f"The newest run is entry {view.observed}. Begin.{view.remarks()}")
        except ProposerAway:
            if not tools.proposals:
                raise
            return tools.proposals
        return [*tools.proposals, prose] if prose else tools.proposals

    def converse(self, tools: ModelTools, rules: str, begin: str) -> str:
        """Lets a model call tools until they are done; the prose of one that calls none. Raises `ProposerAway`."""
        messages: list[Message] = [{"role": "system", "content": rules}, {"role": "user", "content": begin}]
        deadline, prose, read, written = time.monotonic() + self.seconds, 0, 0, 0
        self.used = {}
        for _ in range(MAX_TURNS):
            if time.monotonic() > deadline:
                break
            reply = self.model.reply(messages, tools.definitions())
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"asked": messages[-1], "reply": reply.to_json()}) + "\n")
            read, written = read + reply.read, written + reply.written
            price = (read * self.prices[0] + written * self.prices[1]) / 1e6
            self.used = {"read": read, "written": written} | ({"price": price} if price else {})
            calls = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.calls
            ]
            messages.append({"role": "assistant", "content": reply.text} | ({"tool_calls": calls} if calls else {}))
            for call in reply.calls:
                messages.append({"role": "tool", "tool_call_id": call.call_id, "content": tools.use(call)})
            if tools.finished:
                return ""
            if not reply.calls:
                prose += 1
                if prose > REPAIRS:
                    return shortened(reply.text or "(an empty answer)")
                messages.append({"role": "user", "content": f"Use the tools: {' or '.join(tools.LAST)}."})
        raise ProposerAway(f"no call of {tools.LAST[0]} within {MAX_TURNS} answers and {self.seconds:g} s")


# ---- tools ----------------------------------------------------------------------------------------------------------


REQUIRED = ("name", "kind", "why", "predicts", "refutes")
"""Fields of a proposal that a model must give."""


@dataclass
class ModelTools:
    """Files to read, and the proposals made so far. Docstrings of the tools are what the model reads about them."""

    TOOLS: ClassVar[tuple[str, ...]]
    """Methods that a model may call."""
    LAST: ClassVar[tuple[str, ...]]
    """The tool that proposes, and one that ends."""
    texts: Mapping[str, Mapping[str, str]]
    """Files by name: of the subject, the evaluator (judge), and of papers."""
    most: int = 1
    proposals: list[Any] = field(default_factory=list)
    """Those that are valid, and texts with the reason where too many were not."""
    ended: bool = False
    invalid: int = 0

    @property
    def finished(self) -> bool:
        return self.ended or len(self.proposals) >= self.most

    def schema(self) -> Tool:
        """The JSON schema of a proposal."""
        raise NotImplementedError

    def definitions(self) -> list[Tool]:
        schemas = {name: TypeAdapter(getattr(self, name)).json_schema() for name in self.TOOLS}
        schemas[self.LAST[0]] = self.schema()
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
            if call.name not in self.TOOLS:
                raise ValueError(f"there is no tool {call.name!r}; the tools are {', '.join(self.TOOLS)}")
            result = getattr(self, call.name)(**arguments)
            return shortened(result if isinstance(result, str) else json.dumps(result, default=str), LONGEST_RESULT)
        except Exception as error:  # the boundary: a model may call with anything
            if call.name == self.LAST[0]:
                self.invalid += 1
                if self.invalid > REPAIRS:
                    self.proposals.append(shortened(f"{error}: {call.arguments}"))
            return f"invalid: {shortened(str(error))}"

    def files(self) -> object:
        """Names and sizes of the subject's files, of the evaluator (judge), and of papers."""
        return {of: {name: len(text) for name, text in texts.items()} for of, texts in self.texts.items()}

    def read(self, name: str, start: int = 0) -> str:
        """Up to 20,000 characters of a file, from `start` on."""
        files = {file: text for texts in self.texts.values() for file, text in texts.items()}
        if name not in files:
            raise ValueError(f"there is no file {name!r}; call files for the names")
        return files[name][start : start + LONGEST_RESULT]


@dataclass
class ProposalTools(ModelTools):
    TOOLS = ("notebook", "files", "read", "curves", "transcripts", "propose", "finish")
    LAST = ("propose", "finish")
    view: View = field(kw_only=True)

    def schema(self) -> Tool:
        return adapter(Intervention).json_schema() | {"required": [*REQUIRED]}

    def notebook(self, first: int = 1, last: int = 1_000_000) -> object:
        """Entries of the notebook by their numbers, oldest first."""
        listed = [entry for entry in self.view.notebook if int(first) <= entry.number <= int(last)]
        return [[e.number, e.kind, shortened(json.dumps(e.content, default=str), 1500)] for e in listed]

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
        self.ended = True
        return "finished"


def texts_of(files: Mapping[str, str], judge: str, papers: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    return {"papers": papers, "judge": {"judge": judge}, "subject": files}


def papers_in(folder: Path) -> dict[str, str]:
    """The papers of a folder by the name of their file. Raises `ConfigError` with the first file that is not text."""
    found = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            refuse(
                path.suffix not in (".md", ".txt") or not path.is_file(),
                f"--papers {path}: papers are .md and .txt files: convert it to text, or move it elsewhere",
            )
            found[path.name] = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--papers {path}: it is not UTF-8 text: convert it, or move it elsewhere") from None
    except OSError as error:
        raise ConfigError(f"--papers {error.filename}: {error.strerror}: give a folder of .md and .txt files") from None
    refuse(not found, f"--papers {folder}: no .md or .txt file is in this folder: put papers there, or omit --papers")
    return found


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
        return replace(reply, read=0, written=0)


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
    """A model behind an API. `url` is the part before `/chat/completions` or `/messages`, such as `http://.../v1`."""

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    kind: Literal["openai", "anthropic"] = "openai"
    seconds: float = 180.0
    """Time limit for a whole answer, also if it arrives slowly."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the SDK's client. Without a key the SDK would send that of the environment."""
        return {"api_key": self.api_key or "none", "max_retries": 0, "timeout": None}

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        ask = openai_reply if self.kind == "openai" else anthropic_reply
        try:
            reply = asyncio.run(asyncio.wait_for(ask(self, messages, tools), self.seconds))
            return Reply.from_json(reply.to_json())  # Checks the types.
        except TimeoutError:
            why = f"the answer took longer than {self.seconds:g} s"
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, AgentJetError):
            why = f"the answer is not one of the {self.kind} API"
        except Exception as error:  # the boundary: an SDK and a server. The text of an answer may hold the key.
            status = getattr(error, "status_code", None)
            why = f"answered with status {status}" if status else str(error.__cause__ or error or type(error).__name__)
        raise ProposerAway(f"{self.url}: {why}")


async def answer_of(http: Any, client: Any, create: Any, body: Mapping[str, Any]) -> Any:
    """The JSON of an answer. Raises `RuntimeError` for one that is too long."""
    content = b""
    async with http, client, create(**body) as response:
        async for part in response.iter_bytes():
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                raise RuntimeError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    return json.loads(content)


async def openai_reply(endpoint: LlmEndpoint, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    http = DefaultAsyncHttpxClient(follow_redirects=False)
    client = AsyncOpenAI(base_url=endpoint.url, http_client=http, **endpoint.options)
    functions = [{"type": "function", "function": tool} for tool in tools]
    body = {"model": endpoint.model, "messages": [*messages], "tools": functions}
    content = await answer_of(http, client, client.chat.completions.with_streaming_response.create, body)
    message, usage = content["choices"][0]["message"], content.get("usage") or {}
    calls = [
        LlmToolCall(str(call["id"]), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    read, written = (usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens"))
    return Reply(message.get("content") or "", tuple(calls), read, written)


async def anthropic_reply(endpoint: LlmEndpoint, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
    from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

    named = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools]
    turns: list[Message] = []
    for message in messages[1:]:
        role, blocks = ("assistant" if message["role"] == "assistant" else "user"), anthropic_blocks(message)
        if turns and turns[-1]["role"] == role:  # results of several calls are one turn
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    http, url = DefaultAsyncHttpxClient(follow_redirects=False), endpoint.url.rstrip("/").removesuffix("/v1")
    client = AsyncAnthropic(base_url=url, http_client=http, **endpoint.options)
    body: dict[str, Any] = {"model": endpoint.model, "max_tokens": 8192, "system": messages[0]["content"]}
    body |= {"messages": turns, "tools": named}
    content = await answer_of(http, client, client.messages.with_streaming_response.create, body)
    blocks, usage = content["content"], content.get("usage") or {}
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [
        LlmToolCall(block["id"], block["name"], json.dumps(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    read = sum(value or 0 for name, value in usage.items() if name.endswith("input_tokens"))  # also those of caches
    return Reply(text, tuple(calls), read, usage.get("output_tokens") or 0)


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


# ---- a coding agent --------------------------------------------------------------------------------------------------

REASONS = ("name", "why", "predicts", "refutes")
LONGEST_REASONS = 2**20
"""Bytes of a file that a command writes."""


@dataclass
class CodingAgent(Proposer):
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
        with self._worked(view.files, facts(view), PROMPTS["edit"].format(topic=view.topic) + view.remarks()) as folder:
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
            given = object_in(folder / "work" / "hypothesis.json")
            reasons = {key: str(given.get(key, ""))[:2000] for key in REASONS}
            reasons["name"] = reasons["name"][:80] or "a patch of the coding agent"
            try:
                return [Intervention.from_json({"kind": "agent", "patch": patch, **reasons})]
            except ConfigError as error:
                return [str(error)]

    def written(self, name: str, files: Mapping[str, str], others: Mapping[str, bytes], task: str) -> dict[str, Any]:
        """Returns the object in the file that the command writes, empty without one. Raises `ProposerAway`."""
        with self._worked(files, others, task) as folder:
            return object_in(folder / "work" / name)

    @contextmanager
    def _worked(self, files: Mapping[str, str], others: Mapping[str, bytes], task: str) -> Iterator[Path]:
        """Yields a folder with the files as given (`a`), and as the command left them (`work/subject`)."""
        with ProgramFolder(prefix="agentjet-coding-agent-") as name:
            folder = Path(name).resolve()
            for place in ("a", "work/subject"):
                write_files({path: text.encode() for path, text in files.items()}, folder / place)
            write_files(others, folder / "work" / "campaign")
            self._run(folder, task)
            yield folder

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
            readable = (*self.readable, *files, *programs(self.command[0]))
            options["sandbox"] = sandbox_for(self.url, work, readable, {**own, **self.environment})
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


def object_in(file: Path) -> dict[str, Any]:
    """The JSON object that a command wrote; empty if it wrote none."""
    try:
        is_plain = file.is_file() and not file.is_symlink() and file.stat().st_size <= LONGEST_REASONS
        given = json.loads(file.read_text(encoding="utf-8")) if is_plain else {}
    except (OSError, ValueError, RecursionError):
        given = {}
    return given if isinstance(given, dict) else {}
