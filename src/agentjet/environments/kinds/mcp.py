"""MCP: `mcp:COMMAND` starts a server that speaks MCP on its standard input and output, `mcp:URL` connects to one.

A task is a question of a file. The model calls the server's tools until it answers without a call. A tool's own error
is text for the model. A server that ends, or a tool that hangs, aborts the episode.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

from pydantic import Field, PrivateAttr

from agentjet.client.agent_source import file_and_function, load_function
from agentjet.client.inputs import read_json_lines
from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Kind, Split
from agentjet.environments.model import ContextFull, Message, Model
from agentjet.errors import ConfigError, did_you_mean
from agentjet.types import Reward, shown

if TYPE_CHECKING:
    import mcp_types
    from anyio.from_thread import BlockingPortal
    from mcp import Client

KEPT_BYTES = 1000
"""Bytes of what a server printed last, for the reason of an abort."""
END_SECONDS = 1.0
"""Time for a server that ended to print its last line."""
SPLITS: dict[Any, Split] = {None: "", "": "", "train": "train", "held_out": "held_out", "test": "held_out"}


@dataclass(frozen=True, slots=True)
class McpToolCall:
    """A call of a tool, and its result as the model reads it."""

    name: str
    arguments: Any
    result: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class ToolConversation:
    """A played episode, for the reward function."""

    answer: str
    """Text of the last message; empty if it was a call."""
    messages: Sequence[Message]
    calls: Sequence[McpToolCall]


class Mcp(Kind):
    """Questions that a model answers with the tools of an MCP server."""

    requires: ClassVar[str] = "mcp>=2,<3"
    about: ClassVar[str] = "command of an MCP server, such as `python server.py`, or its URL"

    task_file: Path = Path()
    """JSON lines with `question` (or `messages`), `answer`, and optionally `id` and `split` ("train" or "held_out")."""
    reward: str = "exact"
    """`exact`: the answer is the task's; `contains`: it has it as a word; or `FILE.py:FUNCTION`."""
    tools: tuple[str, ...] = ()
    """Tools that the model gets; default: all."""
    tool_choice: Literal["auto", "required"] = "auto"
    """`required`: the first answer is a call, which the sampler enforces."""
    strict: bool = False
    """The sampler enforces the schemas of the arguments."""
    tool_seconds: float = Field(60.0, gt=0)
    """Maximum duration of a tool's call, and of the server's start."""
    result_characters: int = Field(20_000, ge=1)
    """Maximum length of a tool's result. The rest is cut."""
    variables: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of the server, beside PATH, HOME and the like."""
    shared: bool = False
    """Keep the server for the next episode of the process. Default: each episode starts a new one."""

    _kept: ExitStack | None = PrivateAttr(None)
    _server: McpServer | None = PrivateAttr(None)

    @property
    def keeps_processes(self) -> bool:  # type: ignore[override]
        return self.shared

    def tasks(self) -> Iterator[EnvironmentTask]:
        if not self.target.strip():
            raise ConfigError("the target is empty: give a command or a URL, such as mcp:python server.py")
        if self.task_file == Path():
            raise ConfigError("task_file is missing: give a file of JSON lines with question and answer")
        self._score()  # A reward that cannot be loaded is an error before the run,
        with self._open():  # and so is a server that does not start, or lacks the tools.
            pass
        for number, row in read_json_lines(_from_caller(self.task_file)):
            yield self._task(row, f"{self.task_file} line {number}")

    def _task(self, row: Any, place: str) -> EnvironmentTask:
        if not isinstance(row, dict) or not (_question(row) or row.get("messages")):
            raise ConfigError(f'{place}: {shown(row)} has no question: give {{"question": "...", "answer": "..."}}')
        for key, is_right, expected in FORMS:
            if row.get(key) is not None and not is_right(row[key]):
                raise ConfigError(f"{place}: {key} = {shown(row[key])}: give {expected}")
        if self.reward in MATCHES and not _expected(row):
            raise ConfigError(
                f"{place}: {shown(row)} has no answer, which reward = {self.reward!r} needs: give a text, or a list of "
                "texts, as answer, or "
                "reward = FILE.py:FUNCTION"
            )
        digest = hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=8).hexdigest()
        task_id = row.get("id")
        return EnvironmentTask(digest if task_id is None else str(task_id), row, SPLITS[row.get("split")])

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        score = self._score()
        with self._open() as server:
            conversation = self._talk(task.payload, model, server)
        result = score(dict(task.payload), conversation)
        metrics = {
            "calls": len(conversation.calls),
            "call_errors": sum(call.is_error for call in conversation.calls),
            "answered": bool(conversation.answer.strip()),
        }
        if not isinstance(result, Reward):
            if not isinstance(result, int | float):
                raise EnvironmentFailed(
                    f"reward = {self.reward}: it returned {shown(result)}; return a number or a Reward"
                )
            result = Reward(result)
        return Reward(
            result.value, result.by_role, metrics | dict(result.metrics), result.by_turn, result.by_call, result.text
        )

    def close(self) -> None:
        kept, self._kept, self._server = self._kept, None, None
        if kept is not None:
            kept.close()

    def _score(self) -> Callable[[dict[str, Any], ToolConversation], Any]:
        if self.reward in MATCHES:
            return MATCHES[self.reward]
        place, function = file_and_function(self.reward)
        if not function:
            raise ConfigError(f"reward = {self.reward}: expected {', '.join(MATCHES)}, or FILE.py:FUNCTION")
        named = str(_from_caller(Path(place))) if place.endswith(".py") else place
        return load_function(f"{named}:{function}", option="reward =")

    def _talk(self, row: Mapping[str, Any], model: Model, server: McpServer) -> ToolConversation:
        messages, calls = self._first_messages(row, server), list[McpToolCall]()
        most = min(self.max_turns, model.max_turns or self.max_turns)
        for turn in range(most):
            choice = self.tool_choice if turn == 0 else "auto"
            try:
                message = model.chat(messages, tools=server.functions, tool_choice=choice)
            except ContextFull:
                if turn == 0:
                    raise  # The question alone is too long: nothing was played.
                break
            messages.append(message)
            if not message.get("tool_calls"):
                return ToolConversation(message.get("content") or "", messages, calls)
            for asked in message["tool_calls"]:
                calls.append(server.call(asked["function"]["name"], asked["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": asked["id"], "content": calls[-1].result})
        return ToolConversation("", messages, calls)

    def _first_messages(self, row: Mapping[str, Any], server: McpServer) -> list[Message]:
        question = _question(row)
        messages = [*(row.get("messages") or ()), *([{"role": "user", "content": question}] if question else [])]
        system = self.system_prompt or server.instructions
        has_system = messages[0].get("role") in ("system", "developer")
        return messages if has_system or not system else [{"role": "system", "content": system}, *messages]

    @contextmanager
    def _open(self) -> Iterator[McpServer]:
        """The server of an episode. A server that is kept is replaced after a failure."""
        try:
            if self._server is None:
                self._kept = ExitStack()
                # Not within the connection: its end would turn an error into an ExceptionGroup.
                self._server = McpServer(self, *self._kept.enter_context(_connected(self)))
            yield self._server
        except BaseException:
            self.close()
            raise
        if not self.shared:
            self.close()


# ---- the server ------------------------------------------------------------------------------------------------------


class McpServer:
    """A connected server, with calls that wait for their result."""

    def __init__(self, kind: Mcp, client: Client, portal: BlockingPortal, printed: Printed) -> None:
        self._kind, self._client, self._portal, self._printed = kind, client, portal, printed
        with printed.failures("its list of tools"):
            listed = portal.call(self._list)
        self.instructions = client.instructions or ""
        self.functions = [self._function(tool) for tool in listed if not kind.tools or tool.name in kind.tools]
        """The tools as OpenAI's API has them."""
        names = [tool.name for tool in listed]
        if unknown := [name for name in kind.tools if name not in names]:
            raise ConfigError(f"tools = {unknown[0]!r}: {did_you_mean(unknown[0], names, f'it has {names}')}")
        if not names:
            raise EnvironmentFailed(f"the server {kind.target!r} has no tools: give another command")

    def call(self, name: str, arguments: str) -> McpToolCall:
        """Calls a tool. Its error is a result. Raises `EnvironmentFailed` if the server ended, or is too slow."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            values = json.loads(arguments or "{}")
            if not isinstance(values, dict):
                raise ValueError
        except ValueError:
            return McpToolCall(name, arguments, "error: the arguments must be a JSON object", True)
        with self._printed.failures(f"the tool {name!r}"):
            try:
                result = self._portal.call(self._client.call_tool, name, values)
            except MCPError as error:
                if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                    raise
                return McpToolCall(name, values, f"error: {error.message}", True)
        text = _text(result)
        if len(text) > self._kind.result_characters:
            text = f"{text[: self._kind.result_characters]}\n[cut: {len(text)} characters in all]"
        return McpToolCall(name, values, text, bool(result.is_error))

    async def _list(self) -> list[mcp_types.Tool]:
        page = await self._client.list_tools()
        tools = [*page.tools]
        while page.next_cursor:
            page = await self._client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools

    def _function(self, tool: mcp_types.Tool) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        return {"type": "function", "function": function | ({"strict": True} if self._kind.strict else {})}


@contextmanager
def _connected(kind: Mcp) -> Iterator[tuple[Client, BlockingPortal, Printed]]:
    """Starts a server, or connects to its URL. Raises `EnvironmentFailed` with the end of what it printed."""
    from anyio.from_thread import start_blocking_portal
    from mcp import Client, stdio_client

    printed = Printed(kind)
    with ExitStack() as opened:
        portal = opened.enter_context(start_blocking_portal())
        with printed.failures("its start"), printed.file() as file:
            is_url = re.match(r"https?://", kind.target)
            place = kind.target if is_url else stdio_client(_parameters(kind), file)
            client = Client(place, read_timeout_seconds=kind.tool_seconds)
            opened.enter_context(portal.wrap_async_context_manager(client))
        yield client, portal, printed


def _parameters(kind: Mcp) -> Any:
    """The command with absolute paths, because each process runs in an empty folder."""
    from mcp import StdioServerParameters

    words = [str(_from_caller(Path(word))) if "/" in word or "." in word else word for word in _words(kind.target)]
    # Programs of this Python environment are found, as if it were activated.
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    variables = {"PATH": path, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **kind.variables}
    return StdioServerParameters(command=words[0], args=words[1:], env=variables, cwd=Path.cwd())


class Printed:
    """The end of what a server printed on standard error. All of it counts for the limit of the process."""

    def __init__(self, kind: Mcp) -> None:
        self._kind = kind
        self._end = b""
        self._reading: threading.Thread | None = None

    @contextmanager
    def file(self) -> Iterator[TextIO]:
        """A file for a program that starts within the context."""
        output, file = os.pipe()
        self._reading = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reading.start()
        with os.fdopen(file, "w") as opened:
            yield opened

    def _read(self, output: int) -> None:
        while content := os.read(output, 1 << 16):
            self._end = (self._end + content)[-KEPT_BYTES:]
            os.write(2, content)
        os.close(output)

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Turns exceptions of the connection into `EnvironmentFailed`."""
        from mcp import MCPError
        from mcp_types import REQUEST_TIMEOUT

        try:
            yield
        except Exception as raised:
            error: BaseException = raised
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT:
                reason = f"no answer within tool_seconds = {self._kind.tool_seconds:g}"
            else:
                reason = str(error) or type(error).__name__
            raise EnvironmentFailed(f"the server {self._kind.target!r}: {what}: {reason}{self._last()}") from raised

    def _last(self) -> str:
        if self._reading is not None:
            self._reading.join(END_SECONDS)
        printed = self._end.decode(errors="replace").strip()
        return f"; it printed last: {printed}" if printed else ""


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the command {command!r}: {error}") from None


def _from_caller(path: Path) -> Path:
    """A path of the folder in which the user started the program, if it exists there."""
    place = Path(os.environ.get("AGENTJET_CALLER", "")).absolute() / path
    return place if place.exists() else path


def _text(result: mcp_types.CallToolResult) -> str:
    """The result as text. Other content is named."""
    parts = [_part(content) for content in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)


def _part(content: Any) -> str:
    if content.type == "text":
        return str(content.text)
    if content.type == "resource" and hasattr(content.resource, "text"):
        return str(content.resource.text)
    if content.type == "resource_link":
        return f"[resource {content.uri}]"
    kind = getattr(content, "mime_type", None) or content.type
    return f"[{content.type} of type {kind}: it cannot be shown]"


# ---- the rows of the task file ---------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value)


FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("id", _is_text, "a text"),
    ("question", lambda value: isinstance(value, str), "a text"),
    ("prompt", lambda value: isinstance(value, str), "a text"),
    ("messages", _are_messages, 'a list such as [{"role": "user", "content": "..."}]'),
    ("split", lambda value: isinstance(value, str) and value in SPLITS, "train or held_out"),
)
"""Keys of a row, with their check and what they must be."""


def _question(row: Mapping[str, Any]) -> Any:
    return row.get("question") or row.get("prompt")


# ---- rewards ---------------------------------------------------------------------------------------------------------


def _expected(row: Mapping[str, Any]) -> list[str]:
    """The right answers of a task: one, or a list of which each is right."""
    answer = row.get("answer", row.get("expected"))
    answers = answer if isinstance(answer, list) else [answer]
    if not all(answer is None or _is_text(answer) for answer in answers):
        return []
    return [str(answer).strip() for answer in answers if answer is not None and str(answer).strip()]


def _matched(row: Mapping[str, Any], is_right: Callable[[str], bool]) -> Reward:
    expected = _expected(row)
    return Reward(float(any(map(is_right, expected))), text=f"expected {' or '.join(expected)}")


def exact(row: Mapping[str, Any], conversation: ToolConversation) -> Reward:
    """1 if the answer is the expected one, without regard to case and to space around it."""
    answer = conversation.answer.strip().casefold()
    return _matched(row, lambda expected: expected.casefold() == answer)


def contains(row: Mapping[str, Any], conversation: ToolConversation) -> Reward:
    """1 if the answer has the expected one in it, not as part of a longer word or number."""
    return _matched(
        row, lambda expected: bool(re.search(rf"(?<![\w.]){re.escape(expected)}(?!\w|\.\d)", conversation.answer, re.I))
    )


MATCHES: dict[str, Callable[[Mapping[str, Any], ToolConversation], Reward]] = {"exact": exact, "contains": contains}
