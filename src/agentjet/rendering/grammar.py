"""Grammars that constrain a completion, and their trials in a process with limits.

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
from functools import lru_cache
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from agentjet.errors import InvalidRequest, Unavailable
from agentjet.rendering.formats import TOOL_FORMATS, OutputStyle, ToolFormat
from agentjet.types import ANY_ANSWER, Constraint

# ---- grammars --------------------------------------------------------------------------------------------------------

WHITE_SPACE = r"(\n( {0,32}|\t{0,8})| )?"
MAX_GRAMMAR = 128 * 2**10
"""Maximum number of characters in a grammar with all its schemas. OpenAI allows 120,000 in names and values."""


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
        form = TOOL_FORMATS[self._style.tool_format]
        if self._style.tool_format not in ("hermes", "mistral", "llama3"):
            raise InvalidRequest(f"calls cannot be forced in the format {self._style.tool_format}", param="tools")
        return form

    @property
    def _is_list(self) -> bool:
        return bool(self._format.opening)

    def written(self, body: str) -> str:
        """Returns the grammar text: optional reasoning, then `body`."""
        start = "body"
        if reasoning := self._style.reasoning:
            closed = f"{self._up_to(reasoning.closing, 'thought')} BREAKS?"
            start = (
                f"{closed} body" if self._style.in_reasoning else f"({self._literal(reasoning.opening)} {closed})? body"
            )
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
        if not self._format.marker:
            return block
        call = f"{self._literal(self._format.marker)} {block}"
        return call if self._is_list or not parallel else f'{call} ("\\n" {call})*'

    def text_with_calls(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Returns an expression for free text in which every call is well-formed."""
        block = self._block(functions, parallel)
        if not self._format.marker:
            self._rules["PROSE"] = r"/\s*[^\s{\[](.|\n)*/"
            return f"({block} | PROSE)?"
        call = f"{self._up_to(self._format.marker, 'announced')} {block}"
        return f"(TEXT | {call})?" if self._is_list or not parallel else f"({call})* TEXT?"

    def _block(self, functions: Sequence[_Function], parallel: bool) -> str:
        """Returns an expression for the text after the opening."""
        key = "parameters" if self._style.tool_format == "llama3" else "arguments"
        for function in functions:
            head = json.dumps({"name": function.name}, ensure_ascii=False)[:-1] + f', "{key}": '
            arguments = self.json(f"arguments_{function.index}", function.schema)
            self._rules[f"call_{function.index}"] = f'{_quoted(head)} {arguments} "}}"'
        self._rules["call"] = " | ".join(f"call_{function.index}" for function in functions)
        if self._is_list:
            more = ' (", " call)*' if parallel else ""
            return f'"[" call{more} "]"'
        if self._format.marker:
            return f'"\\n" call "\\n" {self._literal("</tool_call>")}'
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
