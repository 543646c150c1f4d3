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
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from agentjet.errors import InvalidRequest, Unavailable, run_closed
from agentjet.rendering.arguments import MAX_GRAMMAR, NONEMPTY, ArgumentRules, Rules, checked_schema, quoted
from agentjet.rendering.formats import HARMONY, HOLE, TOOL_FORMATS, OutputStyle, ParsedCall, write_calls
from agentjet.rendering.parser import split_calls
from agentjet.types import ANY_ANSWER, Constraint

# ---- grammars --------------------------------------------------------------------------------------------------------

LINK = TOOL_FORMATS[HARMONY].separator
"""Text between two messages in channels."""


def write_grammar(constraint: Constraint, tools: Sequence[Mapping[str, Any]], style: OutputStyle) -> str:
    """Returns the grammar of a completion in a conversation with `tools`, or "" without constraints.

    Raises `InvalidRequest` with the parameter if a schema is not supported.
    """
    if constraint == ANY_ANSWER:
        return ""
    is_required = bool(tools) and constraint.calls == "required"
    if not is_required and constraint.schema is None and not (tools and (constraint.strict or not constraint.parallel)):
        return ""
    functions = [_Function(i, tool["function"], constraint) for i, tool in enumerate(tools)]
    if is_required:
        functions = [function for function in functions if constraint.function in ("", function.name)]
    grammar = _Grammar(style, functions, parallel=constraint.parallel)
    if is_required:
        body = grammar.calls()
    elif constraint.schema is not None:
        body = grammar.json(checked_schema(constraint.schema, constraint.schema_param, constraint.schema_param))
        body += f" | {grammar.calls()}" if functions else ""
    else:
        body = grammar.text_with_calls()
    return grammar.written(body, grammar.announced() if functions else "")


class _Function:
    """A function of the conversation, with the schema of its arguments.

    A strict function has its whole schema. Another function has its schema without unsupported keywords if a call is
    required, else any JSON object.
    """

    def __init__(self, index: int, function: Mapping[str, Any], constraint: Constraint) -> None:
        self.index, self.name = index, function["name"]
        self.is_strict = self.name in constraint.strict
        self.schema: dict[str, Any] = {"type": "object"}
        if self.is_strict or constraint.calls == "required":
            self.schema |= function.get("parameters") or {"additionalProperties": False}
        self.param = f"tools.{index}.function.parameters"
        self.what = f"{self.param} of {self.name!r}"
        if self.schema["type"] != "object":
            raise InvalidRequest(f"{self.what} must describe an object.", param=self.param)
        checked_schema(self.schema, self.param, self.what, lenient=not self.is_strict)


class _Grammar:
    """The grammar of a completion. A format is followed literal by literal and hole by hole."""

    def __init__(self, style: OutputStyle, functions: Sequence[_Function], *, parallel: bool) -> None:
        self._style, self._functions, self._parallel = style, functions, parallel
        self._rules = Rules(style.control)
        self._reasoning = style.reasoning
        self._has_channels = style.tool_format == HARMONY or (self._reasoning is not None and self._reasoning.channels)
        self._calls = ""
        """An expression for the calls after their marker."""
        if functions:
            self._form = TOOL_FORMATS[style.tool_format]
            self._calls = self._after_marker()

    # -- completions

    def written(self, body: str, unannounced: str = "") -> str:
        """Returns the grammar text: reasoning, then `body`. `unannounced` may end reasoning that has no opening."""
        start = "body"
        if reasoning := self._reasoning:
            closed = self._rules.up_to(reasoning.closing, "thought")
            opening = self._rules.text(reasoning.opening)
            if self._has_channels:
                linked = f"{closed} {self._rules.text(LINK)}"
                start = f"({opening} {linked})* body"
                start = f"{linked} {start}" if self._style.in_reasoning else start
            elif self._style.in_reasoning:
                start = f"{closed} BREAKS? body" + (f" | {unannounced}" if unannounced and not opening else "")
            else:
                start = f"BREAKS? ({opening} {closed} BREAKS?)? body"
        rules = {"start": start, "body": body, "BREAKS": r"/\n{1,3}/", "TEXT": NONEMPTY}
        written = "".join(f"{name}: {rule}\n" for name, rule in rules.items()) + str(self._rules)
        if len(written) > MAX_GRAMMAR:
            raise InvalidRequest(
                f"tools: the schemas have {len(written)} characters in all, above the limit of {MAX_GRAMMAR}: use "
                "fewer strict tools.",
                code="unsupported_schema",
                param="tools",
            )
        return written

    def json(self, schema: str) -> str:
        """Returns an expression for an answer in JSON."""
        return self._answer(self._rules.add("answer", f"%json {schema}"))

    def _answer(self, content: str) -> str:
        """Returns an expression for an answer with the text around it."""
        before, after = self._reasoning.answer if self._reasoning else ("", "")
        if self._has_channels:  # Its end is an end token.
            before, after = before.removeprefix(LINK), ""
        return " ".join((self._rules.text(before), content, self._rules.text(after))).strip()

    def calls(self) -> str:
        """Returns an expression for tool calls without other text, with the token that ends a turn with calls."""
        form, control = self._form, self._style.control
        lead = "BREAKS? " if form.marker and not (self._has_channels or self._reasoning) else ""
        ends = [end for end in form.ends if form.marker and end in control and end not in form.call + form.closing]
        end = f" ({' | '.join(map(self._rules.text, ends))})" if ends else ""
        return f"{lead}{self._rules.text(form.marker)} {self._calls}{end}"

    def announced(self) -> str:
        """Returns an expression for text that ends with tool calls. It is empty if nothing announces these."""
        if not self._form.marker or self._has_channels:
            return ""
        return f"{self._rules.up_to(self._form.marker, 'announced')} {self._calls}"

    def text_with_calls(self) -> str:
        """Returns an expression for free text in which every call is well-formed."""
        if self._has_channels and self._reasoning:
            preamble = self._reasoning.opening.replace("analysis", "commentary")
            closed = self._rules.up_to(self._reasoning.closing, "preamble")
            messages = f"({self._rules.text(preamble)} {closed} {self._rules.text(LINK)})*"
            return f"{messages} ({self._answer('TEXT?')} | {self.calls()})"
        text = "TEXT?"
        if (answer := self._answer(text)) != text:
            text = f"(TEXT | {answer})?"
        if not self._form.marker:
            return self._unmarked(text)
        if self._parallel and not self._form.opening:
            return f"({self.announced()})* {text}"
        return f"{text} | {self.announced()}"

    def _unmarked(self, text: str) -> str:
        """Returns the expression for a format whose calls begin as text does."""
        if self._form.is_json:  # They are at the beginning of the completion.
            prose = self._rules.add("PROSE", r"/\s*[^\s{\[](.|\n)*/")
            return f"({self._calls} | {prose})?"
        first = [self._first(function) for function in self._functions]
        return f"{text} | ({' | '.join(first)}) {self._more()}"

    # -- calls

    def _after_marker(self) -> str:
        form = self._form
        for function in self._functions:
            self._refuse_unreadable(function)
            self._rules.add(f"call_{function.index}", self._call(function, form.call, form.marker))
        self._rules.add("call", " | ".join(f"call_{function.index}" for function in self._functions))
        if not form.opening:
            return f"call {self._more()}"
        opening = form.opening.removeprefix(form.marker)
        space = '" "? ' if opening.startswith("[") and form.marker else ""
        return f"{space}{self._rules.text(opening)} call {self._more()}"

    def _more(self) -> str:
        """Returns an expression for what follows the first call."""
        form, separator = self._form, self._rules.text(self._form.separator)
        separator = f"({separator})?" if form.separator.isspace() else separator
        marker = "" if form.opening else self._rules.text(form.marker)
        more = f"({separator} {marker} call)*" if self._parallel else ""
        closing = form.closing.lstrip()  # White space before it may be a separator.
        space = form.closing.removesuffix(closing)
        return f"{more} {self._rules.text(space)} {self._rules.text(closing)}"

    def _first(self, function: _Function) -> str:
        """Returns an expression for text up to the arguments of a first call, and these."""
        before, _, after = self._form.call.partition("{name}")
        between = HOLE.split(after)[0]
        head = f"{self._form.opening}{before}{function.name}{between}"
        announced = self._rules.up_to(head, f"announced_{function.index}")
        return f"{announced} {self._call(function, after, between)}"

    def _call(self, function: _Function, text: str, marker: str) -> str:
        """Returns an expression for a call of a function, or for the end of one, after the text `marker`."""
        arguments = ArgumentRules(
            self._rules,
            self._form,
            function.schema,
            f"arguments_{function.index}",
            param=function.param,
            what=function.what,
            lenient=not function.is_strict,
        )
        name = quoted(function.name)[1:-1] if self._form.is_json else function.name
        parts, written = HOLE.split(text.removeprefix(marker)), list[str]()
        for i, part in enumerate(parts):
            if i % 2 == 0:
                written.append(self._rules.text(part))
            elif part == "name":
                written.append(quoted(name))
            elif part == "index":
                written.append(self._rules.add("INDEX", r"/0|[1-9][0-9]{0,3}/"))
            elif part == "id":
                written.append(self._rules.add("ID", r"/[a-zA-Z0-9]{9}/"))
            else:
                written.append(arguments.write(part))
        return " ".join(filter(None, written)) or '""'

    def _refuse_unreadable(self, function: _Function) -> None:
        """Raises `InvalidRequest` if a call with all arguments cannot be read in this format."""
        tool = {"function": {"name": function.name, "parameters": {"type": "object"}}}
        texts = [(function.name, f"tools.{function.index}.function.name", "{}")]
        texts += [(key, function.param, json.dumps({key: 1})) for key in function.schema.get("properties") or ()]
        for text, param, arguments in texts:
            written = write_calls(self._form, [ParsedCall(function.name, arguments)])
            found = split_calls(written, self._style.tool_format, [tool])[1]
            is_read = [(call.name, json.loads(call.arguments)) for call in found] == [
                (function.name, json.loads(arguments))
            ]
            if not is_read or self._rules.has_control(text):
                raise InvalidRequest(
                    f"{param}: {text!r} cannot be written in the model's format of calls, {self._style.tool_format}: "
                    "use letters, digits and underscores.",
                    code="unsupported_schema",
                    param=param,
                )


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
        self.process: asyncio.subprocess.Process | None = None
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
        if self.process is None:
            command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
            pipe = asyncio.subprocess.PIPE
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, start_new_session=True
            )
            self._check_open()  # It was perhaps closed meanwhile.
        sending, receiving = self.process.stdin, self.process.stdout
        assert sending is not None and receiving is not None
        sending.write(SIZE.pack(len(asked)) + asked)
        await sending.drain()
        (size,) = SIZE.unpack(await receiving.readexactly(SIZE.size))
        answer: dict[str, Any] = json.loads(await receiving.readexactly(size))
        return answer

    def _check_open(self) -> None:
        if self._is_closed:
            raise run_closed()

    async def close(self) -> None:
        """Ends the child process and refuses what waits for it. Idempotent."""
        self._is_closed = True
        await self._end_process()
        async with self._one_at_a_time:  # A trial may be starting the process.
            await self._end_process()

    async def _end_process(self) -> None:
        process, self.process = self.process, None
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
