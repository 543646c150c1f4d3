"""The form of completions: the parser of reasoning, content and tool calls, and grammars that constrain a completion.

A tool format has the name of its first users: `hermes` is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
(Qwen, SmolLM2 with our template), `mistral` is `[TOOL_CALLS][{...}, ...]`, `llama3` is a bare
`{"name": ..., "parameters": {...}}`. The parser leaves malformed text as content.

A grammar is Lark text in `llguidance`'s dialect: `%json` is a JSON schema, `<[7]>` the token with that id, and a
`[lazy]` rule ends at its first match. It covers a completion without its end token: reasoning, if the template has it,
and then one of

* JSON;
* tool calls in the model's format;
* free text in which only tool calls are constrained.

JSON has its keys in the order of the schema. White space is one space, or one line break with indentation: a model
cannot fill a completion with it.

`GrammarTrials` writes and compiles grammars in a process with limits first, before a worker gets them. The schemas of
agents decide the cost of a grammar: `multipleOf = 9999991` takes 40 s or 3 GB to compile. A small child process forks
for each grammar; the fork has limits of CPU time and memory, so it ends without an effect on others. A compiled grammar
cannot be passed on: the worker compiles it again, which costs at most what the trial did.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import re
import resource
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from agentjet.errors import InvalidRequest, Unavailable
from agentjet.types import ANY_ANSWER, Constraint, Message, ToolCall

# ---- tool formats and the parser -------------------------------------------------------------------------------------

_JSON = json.JSONDecoder()
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Literals that the parser searches for. Some vocabularies have them as special tokens, which are normally hidden."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The syntax of tool calls."""

    opening: str
    """Text before a call, or before the list of calls. Empty if a call is the whole completion."""
    closing: str
    arguments: str
    """Key of the arguments in the JSON of a call."""
    listed: bool
    """True if all calls form one JSON list."""


TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "arguments", listed=False),
    "mistral": ToolFormat("[TOOL_CALLS]", "", "arguments", listed=True),
    "llama3": ToolFormat("", "", "parameters", listed=False),
}

Found = tuple[str, str]
"""Name and arguments (JSON text) of a tool call."""


def parse_completion(text: str, *, reasons: bool, in_reasoning: bool, tool_format: str, id_prefix: str) -> Message:
    """Returns the assistant message of a completion.

    With `reasons`, a leading `<think>` block is parsed; with `in_reasoning`, the prompt has already opened it. With an
    empty `tool_format`, tool calls are not parsed. The ids of tool calls are `<id_prefix>_0`, `<id_prefix>_1`, ...
    """
    reasoning = ""
    if reasons:
        reasoning, text = _split_reasoning(text, in_reasoning)
    content, found = _split_calls(text, TOOL_FORMATS[tool_format]) if tool_format else (text, [])
    calls = tuple(ToolCall(f"{id_prefix}_{i}", name, arguments) for i, (name, arguments) in enumerate(found))
    return Message("assistant", content, reasoning, calls)


def _split_reasoning(text: str, in_reasoning: bool) -> tuple[str, str]:
    """Returns the reasoning and the text after it. Truncated reasoning has no text after it."""
    opened = text.lstrip()
    if opened.startswith("<think>"):
        opened = opened.removeprefix("<think>")
    elif not in_reasoning:
        return "", text
    reasoning, _, rest = opened.partition("</think>")
    return reasoning.strip("\n"), rest.lstrip("\n")


def _split_calls(text: str, tool_format: ToolFormat) -> tuple[str, list[Found]]:
    if not tool_format.opening:
        found = _calls(text.strip().removeprefix("<|python_tag|>"), tool_format.arguments)
        return ("", found) if found else (text, [])
    found = []

    def take(block: re.Match[str]) -> str:
        calls = _calls(block[1].strip(), tool_format.arguments)
        found.extend(calls)
        return "" if calls else block[0]

    end = rf"(?:{re.escape(tool_format.closing)}|\Z)" if tool_format.closing else r"\Z"
    content = re.sub(rf"{re.escape(tool_format.opening)}(.*?){end}", take, text, flags=re.DOTALL)
    return (content.strip(), found) if found else (text, [])


def _calls(block: str, key: str) -> list[Found]:
    """Returns the calls of a JSON object or of a list of objects; none if one of them is malformed."""
    try:
        value = json.loads(block)
        return [_call(item, key, "") for item in value] if isinstance(value, list) else [_call(value, key, block)]
    except (ValueError, RecursionError):
        return []


def _call(value: Any, key: str, source: str) -> Found:
    """Raises `ValueError` for a malformed call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call is an object with a name")
    arguments = value.get(key, {})
    if isinstance(arguments, dict):
        arguments = _as_written(source, key, arguments)
    elif not isinstance(arguments, str) or not isinstance(json.loads(arguments), dict):  # some write a JSON string
        raise ValueError("arguments are an object")
    (value["name"] + arguments).encode()  # Raises for an unpaired surrogate, which JSON escapes can write.
    return value["name"], arguments


def _as_written(source: str, key: str, arguments: dict[str, Any]) -> str:
    """Returns the text of the arguments in `source`. If it cannot be found, returns them as new JSON."""
    for at in re.finditer(rf'"{key}"\s*:\s*', source):
        try:
            value, end = _JSON.raw_decode(source, at.end())
        except ValueError:
            continue
        if value == arguments:
            return source[at.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


# ---- grammars --------------------------------------------------------------------------------------------------------

WHITE_SPACE = r"(\n( {0,32}|\t{0,8})| )?"
MAX_GRAMMAR = 128 * 2**10
"""Maximum number of characters in a grammar with all its schemas. OpenAI allows 120,000 in names and values."""


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """Properties of a model that its grammars depend on. `control` has the ids of the control tokens by literal."""

    tool_format: str
    reasons: bool
    in_reasoning: bool
    control: Mapping[str, int]


def write_grammar(constraint: Constraint, tools: Sequence[Mapping[str, Any]], style: OutputStyle) -> str:
    """Returns the grammar of a completion in a conversation with `tools`, or "" without constraints.

    Raises `InvalidRequest` with the parameter if a schema is not supported.
    """
    if constraint == ANY_ANSWER:
        return ""
    functions = [_Function(i, tool["function"], constraint) for i, tool in enumerate(tools)]
    grammar = _Grammar(style)
    if functions and constraint.calls == "required":
        chosen = [function for function in functions if constraint.function in ("", function.name)]
        body = grammar.calls(chosen, constraint.parallel)
    elif constraint.schema is not None:
        body = grammar.json("answer", _checked(constraint.schema, constraint.schema_param, constraint.schema_param))
        if functions:
            body += " | " + grammar.calls(functions, constraint.parallel)
    elif functions and (constraint.strict or not constraint.parallel):
        body = grammar.text_with_calls(functions, constraint.parallel)
    else:
        return ""
    return grammar.written(body)


class _Function:
    """A function of the conversation, with the schema of its arguments.

    A strict function has its whole schema. Another function has its schema without unsupported keywords if a call is
    required, else any JSON object.
    """

    def __init__(self, index: int, function: Mapping[str, Any], constraint: Constraint) -> None:
        self.index, self.name = index, function["name"]
        strict = self.name in constraint.strict
        schema: dict[str, Any] = {"type": "object"}
        if strict or constraint.calls == "required":
            schema |= function.get("parameters") or {"additionalProperties": False}
        where = f"tools.{index}.function.parameters"
        if schema["type"] != "object":
            raise InvalidRequest(f"{where} of {self.name!r} must describe an object.", param=where)
        self.schema = _checked(schema, where, f"{where} of {self.name!r}", lenient=not strict)


class _Grammar:
    """The rules of a grammar by name, in the order in which they are needed."""

    def __init__(self, style: OutputStyle) -> None:
        self._style = style
        self._rules: dict[str, str] = {}

    @property
    def _format(self) -> ToolFormat:
        return TOOL_FORMATS[self._style.tool_format]

    def written(self, body: str) -> str:
        """Returns the grammar text: optional reasoning, then `body`."""
        start = "body"
        if self._style.reasons:
            closed = f"{self._up_to('</think>', 'thought')} BREAKS?"
            start = f"{closed} body" if self._style.in_reasoning else f"({self._literal('<think>')} {closed})? body"
            self._rules["BREAKS"] = r"/\n{1,2}/"
        rules = {"start": start, "body": body, **self._rules, "TEXT": r"/(.|\n)+/"}
        written = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        if len(written) > MAX_GRAMMAR:
            raise InvalidRequest(
                f"tools: the schemas have {len(written)} characters in all, above the limit of {MAX_GRAMMAR}: use "
                "fewer strict tools.",
                code="unsupported_schema",
                param="tools",
            )
        return written

    def json(self, name: str, schema: str) -> str:
        """Adds a rule for JSON and returns its name."""
        self._rules[name] = f"%json {schema}"
        return name

    def calls(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Returns an expression for tool calls without other text."""
        block = self._block(functions, parallel)
        if not self._format.opening:
            return block
        call = f"{self._literal(self._format.opening)} {block}"
        return call if self._format.listed or not parallel else f'{call} ("\\n" {call})*'

    def text_with_calls(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Returns an expression for free text in which every call is well-formed."""
        block = self._block(functions, parallel)
        if not self._format.opening:
            self._rules["PROSE"] = r"/\s*[^\s{\[](.|\n)*/"
            return f"({block} | PROSE)?"
        call = f"{self._up_to(self._format.opening, 'announced')} {block}"
        return f"(TEXT | {call})?" if self._format.listed or not parallel else f"({call})* TEXT?"

    def _block(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Returns an expression for the text after the opening."""
        for function in functions:
            head = json.dumps({"name": function.name}, ensure_ascii=False)[:-1] + f', "{self._format.arguments}": '
            arguments = self.json(f"arguments_{function.index}", function.schema)
            self._rules[f"call_{function.index}"] = f'{_quoted(head)} {arguments} "}}"'
        self._rules["call"] = " | ".join(f"call_{function.index}" for function in functions)
        if self._format.listed:
            more = ' (", " call)*' if parallel else ""
            return f'"[" call{more} "]"'
        if self._format.closing:
            return f'"\\n" call "\\n" {self._literal(self._format.closing)}'
        return "call"

    def _literal(self, literal: str) -> str:
        id = self._style.control.get(literal)
        return _quoted(literal) if id is None else f"<[{id}]>"

    def _up_to(self, literal: str, name: str) -> str:
        """Returns an expression for any text up to and including the first `literal`."""
        id = self._style.control.get(literal)
        if id is not None:
            return f"TEXT? <[{id}]>"
        escaped = re.escape(literal).replace("/", "\\/")
        self._rules[f"{name}[lazy]"] = rf"/(.|\n)*{escaped}/"
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _checked(schema: Mapping[str, Any], param: str, what: str, *, lenient: bool = False) -> str:
    """Returns a schema for use in a grammar; with `lenient`, without unsupported keywords. Raises `InvalidRequest`."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"{what}: this JSON schema has {len(text)} characters, above the limit of {MAX_GRAMMAR}: simplify it.",
            code="unsupported_schema",
            param=param,
        )
    if error := _error(text):
        raise InvalidRequest(
            f"{what}: this JSON schema is not supported: {error}.", code="unsupported_schema", param=param
        )
    return text


@lru_cache(maxsize=64)  # Of at most `MAX_GRAMMAR` characters each.
def _error(schema: str) -> str:
    """Returns why a schema is not supported, or ""."""
    message: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return " ".join(message.partition("<state>")[0].split()).rstrip(".")


# ---- trials ----------------------------------------------------------------------------------------------------------

CPU_SECONDS = 2
"""CPU time in which a grammar must be written and compiled."""
MEMORY_BYTES = 256 * 2**20
"""Memory that this may take."""
FAILED, NO_MEMORY = 1, 2
"""Exit codes of a fork. An allocation that fails outside of Python ends it by a signal."""
MOST_RESULTS = 64
SIZE = struct.Struct("!I")
CONTROL_TOKEN = re.compile(r"<\[\d+\]>")


class GrammarTrials:
    """Writes and tries grammars, one at a time. The child process starts with the first one. Close it at the end."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._is_closed = False
        self._results: OrderedDict[bytes, str | InvalidRequest] = OrderedDict()
        """By digest of the schemas, which may have megabytes."""
        self._one_at_a_time = asyncio.Lock()
        self._of_owner: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """An owner has one grammar in the queue, so that those of others wait for one of its grammars at most."""

    async def write(
        self, owner: str, constraint: Constraint, tools: Sequence[Mapping[str, Any]], style: OutputStyle
    ) -> str:
        """Returns the grammar of a constrained completion: see `write_grammar`. `owner` is the episode that asks.

        Raises `InvalidRequest` for a schema that is not supported or exceeds a limit, `Later` if the trial failed.
        """
        asked = pickle.dumps((constraint, list(tools), style))
        key = hashlib.blake2b(asked).digest()
        if key not in self._results:
            async with self._of_owner.setdefault(owner, asyncio.Lock()), self._one_at_a_time:
                if key not in self._results:
                    self._keep(key, await self._try(asked, constraint))
        result = self._results[key]
        self._results.move_to_end(key)
        if isinstance(result, InvalidRequest):
            raise InvalidRequest(str(result), code=result.code, param=result.param)
        return result

    def _keep(self, key: bytes, result: str | InvalidRequest) -> None:
        self._results[key] = result
        if len(self._results) > MOST_RESULTS:
            self._results.popitem(last=False)

    async def _try(self, asked: bytes, constraint: Constraint) -> str | InvalidRequest:
        try:
            answer = await self._ask(asked)
        except (OSError, asyncio.IncompleteReadError):
            await self._end_process()
            raise Unavailable(
                "The process that checks grammars ended.", code="grammar_check_failed", retry_after=1.0
            ) from None
        except BaseException:  # A cancelled trial would leave its answer in the pipe.
            await self._end_process()
            raise
        if "grammar" in answer:
            return str(answer["grammar"])
        param = constraint.schema_param if constraint.schema is not None else "tools"
        if not answer:
            return InvalidRequest(
                f"{param}: this JSON schema cannot be compiled.", code="unsupported_schema", param=param
            )
        if "limit" in answer:
            return InvalidRequest(
                f"{param}: this JSON schema takes more than {answer['limit']} to compile, the limit: simplify it. "
                "A large `multipleOf` costs the most.",
                code="unsupported_schema",
                param=param,
            )
        return InvalidRequest(answer["message"], code=answer["code"], param=answer["param"])

    async def _ask(self, asked: bytes) -> dict[str, Any]:
        self._check_open()
        if self._process is None:
            # Not `-m`: the package imports this module, and the process would have it twice.
            command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, start_new_session=True
            )
            self._check_open()  # It was perhaps closed meanwhile.
        sending, receiving = self._process.stdin, self._process.stdout
        assert sending is not None and receiving is not None
        sending.write(SIZE.pack(len(asked)) + asked)
        await sending.drain()
        (size,) = SIZE.unpack(await receiving.readexactly(SIZE.size))
        answer: dict[str, Any] = json.loads(await receiving.readexactly(size))
        return answer

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("The run was closed during the request.", code="run_closed", retry_after=1.0)

    async def close(self) -> None:
        """Ends the child process and refuses what waits for it. Idempotent."""
        self._is_closed = True
        await self._end_process()
        async with self._one_at_a_time:  # A trial may be starting the process.
            await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


# ---- the child process -----------------------------------------------------------------------------------------------


def main() -> None:
    """Answers requests on standard input until it ends."""
    os.nice(5)
    received, sent = sys.stdin.buffer, sys.stdout.buffer
    while head := received.read(SIZE.size):
        answer = _tried_in_a_fork(received.read(*SIZE.unpack(head)))
        sent.write(SIZE.pack(len(answer)) + answer)
        sent.flush()


def _tried_in_a_fork(asked: bytes) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                _limit()
                _tried(asked, pipe)
            os._exit(0)
        except MemoryError:
            os._exit(NO_MEMORY)
        finally:
            os._exit(FAILED)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return answer
    if code == FAILED:
        return b"{}"
    is_time = code in (-signal.SIGXCPU, -signal.SIGKILL)
    limit = f"{CPU_SECONDS} s of CPU time" if is_time else f"{MEMORY_BYTES // 2**20} MiB of memory"
    return json.dumps({"limit": limit}).encode()


def _limit() -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # The allocator reports that it failed.


def _tried(asked: bytes, pipe: BinaryIO) -> None:
    constraint, tools, style = pickle.loads(asked)
    try:
        grammar = write_grammar(constraint, tools, style)
    except InvalidRequest as error:
        answer = {"message": str(error), "code": error.code, "param": error.param}
    else:
        if grammar:
            _compile(grammar)
        answer = {"grammar": grammar}
    pipe.write(json.dumps(answer).encode())


def _compile(grammar: str) -> None:
    """Compiles a grammar over single bytes: its cost does not depend on the vocabulary. The worker reports errors."""
    known = CONTROL_TOKEN.sub("<[0]>", grammar)  # The ids of a model are unknown to a tokenizer of bytes.
    LLMatcher(LLTokenizer("byte"), known, log_level=0).compute_bitmask()
