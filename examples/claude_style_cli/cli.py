"""A coding assistant for the command line, written with Anthropic's SDK: a folder, three tools, a loop.

It does not depend on AgentJet. With ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ANTHROPIC_MODEL set:

    python examples/claude_style_cli/cli.py FOLDER "The function in add.py is wrong. Repair it."

FOLDER holds the files to work on; `run_tests` runs its `tests.py`. Each tool call is printed, and at the end the
result of the tests. Python code from the model is executed in a process with limits and without an environment, which
is not a sandbox. Run the program in a container.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anthropic
from anthropic.types import Message, MessageParam, ToolParam, ToolResultBlockParam

SYSTEM = "You are a coding assistant. Read files, write them and run the tests until they pass."
MAX_TURNS = 3
MAX_TOKENS = 64
TESTS = "tests.py"
SECONDS = 10
"""That the tests may take."""
LIMITS = """
import resource, sys
for what, most in ((resource.RLIMIT_CPU, 5), (resource.RLIMIT_AS, 2**29), (resource.RLIMIT_FSIZE, 2**20)):
    resource.setrlimit(what, (most, most))
sys.path.insert(0, ".")
"""
PARAMETERS: dict[str, tuple[str, ...]] = {"read_file": ("path",), "write_file": ("path", "content"), "run_tests": ()}
"""Parameters of each tool: texts, all required."""
DESCRIPTIONS = {
    "read_file": "Read a file.",
    "write_file": "Replace what a file holds.",
    "run_tests": "Run the tests.",
}


def tool(name: str) -> ToolParam:
    """A tool as the API wants it described. A strict one is called with what it takes and nothing else."""
    texts = {key: {"type": "string"} for key in PARAMETERS[name]}
    schema = {"type": "object", "properties": texts, "required": list(texts), "additionalProperties": False}
    return {"name": name, "description": DESCRIPTIONS[name], "input_schema": schema, "strict": True}


def use(call_id: str, name: str, **arguments: object) -> MessageParam:
    """An assistant's message that calls a tool."""
    return {"role": "assistant", "content": [{"type": "tool_use", "id": call_id, "name": name, "input": arguments}]}


def said(call_id: str, content: str) -> MessageParam:
    """The message with the result of a tool call."""
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}]}


def asked(instruction: str, files: Mapping[str, str]) -> MessageParam:
    """The user's message: the instruction and the files."""
    shown = "".join(f"\n\n{name}:\n{text}" for name, text in files.items())
    return {"role": "user", "content": instruction + shown}


TOOLS = [tool(name) for name in PARAMETERS]
EXAMPLE: Sequence[MessageParam] = (
    asked("The function in half.py is wrong. Repair it.", {"half.py": "def half(x):\n    return x * 2\n"}),
    use("example_0", "write_file", path="half.py", content="def half(x):\n    return x / 2\n"),
    said("example_0", "wrote half.py"),
    use("example_1", "run_tests"),
    said("example_1", "the tests passed"),
    {"role": "assistant", "content": "The function is repaired."},
    asked("The function in least.py is wrong. Repair it.", {"least.py": "def least(items):\n    return max(items)\n"}),
    use("example_2", "write_file", path="least.py", content="def least(items):\n    return min(items)\n"),
    said("example_2", "wrote least.py"),
    use("example_3", "run_tests"),
    said("example_3", "the tests passed"),
    {"role": "assistant", "content": "The function is repaired."},
)
"""Opens every conversation: a small model would not find out by itself what is wanted."""


class ToolError(Exception):
    """Something the model did wrong, and should read."""


@dataclass(frozen=True)
class Workspace:
    """A folder that tools work in, and tests that they cannot reach."""

    folder: Path
    tests: str

    def call(self, name: str, arguments: dict[str, object]) -> str:
        """Returns the result of a tool. Raises `ToolError` and `OSError`."""
        texts = {key: value for key, value in arguments.items() if isinstance(value, str)}
        if name not in PARAMETERS:
            raise ToolError(f"there is no tool {name!r}")
        if not set(PARAMETERS[name]) == texts.keys() == arguments.keys():
            raise ToolError(f"{name} takes these texts: {', '.join(PARAMETERS[name]) or 'none'}")
        if name == "run_tests":
            return self.run_tests()
        path = texts["path"]
        if Path(path).name != path or len(path) > 100 or "\0" in path:
            raise ToolError(f"{path!r} is not the name of a file in this folder")
        file = self.folder / path
        if not file.is_file():
            raise ToolError(f"there is no file {path!r}")
        held = file.read_text(encoding="utf-8")
        if name == "read_file":
            return held
        try:
            compile(texts["content"], path, "exec")
        except (SyntaxError, ValueError) as error:
            raise ToolError(f"that is no Python: {error}") from None
        if texts["content"] == held:
            raise ToolError(f"{path} holds that already")
        file.write_text(texts["content"], encoding="utf-8")
        return f"wrote {path}"

    def files(self) -> dict[str, str]:
        """The files that the model sees: all except the tests."""
        found = sorted(path for path in self.folder.iterdir() if path.is_file() and path.name != TESTS)
        return {path.name: path.read_text(encoding="utf-8") for path in found}

    def run_tests(self) -> str:
        """Raises `ToolError` when they fail. Ending the process early passes nothing: the last line must be printed."""
        passed = secrets.token_hex(8)
        program = f"{LIMITS}\n{self.tests}\nprint({passed!r})"
        command = [sys.executable, "-I", "-B", "-c", program]
        try:
            ended = subprocess.run(command, cwd=self.folder, env={}, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise ToolError("the tests took too long") from None
        if ended.returncode or not ended.stdout.decode(errors="replace").endswith(f"{passed}\n"):
            lines = ended.stderr.decode(errors="replace").strip().splitlines()
            raise ToolError(f"the tests failed: {lines[-1] if lines else 'they did not end'}")
        return "the tests passed"

    def passes(self) -> bool:
        """True if the tests pass."""
        try:
            self.run_tests()
        except ToolError:
            return False
        return True


def work(llm: anthropic.Anthropic, model: str, workspace: Workspace, instruction: str) -> Iterator[tuple[str, str]]:
    """Let the model use a tool at a time until the tests pass or it has had its turns.

    Yields each tool used, and what went wrong. An answer that was cut short uses none, and ends the work.
    """
    messages: list[MessageParam] = [*EXAMPLE, asked(instruction, workspace.files())]
    for _ in range(MAX_TURNS):
        answer = llm.messages.create(
            model=model,
            system=SYSTEM,
            tools=TOOLS,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            messages=messages,
            max_tokens=MAX_TOKENS,
        )
        messages.append(answer.to_param())
        used = list(use_tools(workspace, answer))
        for name, result in used:
            yield name, str(result.get("content")) if result.get("is_error") else ""
        if not used or any(name == "run_tests" and not result.get("is_error") for name, result in used):
            return
        messages.append({"role": "user", "content": [result for _, result in used]})


def use_tools(workspace: Workspace, answer: Message) -> Iterator[tuple[str, ToolResultBlockParam]]:
    """The results of the tools that an answer calls, each with its tool's name."""
    for block in answer.content:
        if block.type != "tool_use":
            continue
        try:
            content, failed = workspace.call(block.name, block.input), False
        except (ToolError, OSError, UnicodeError) as error:
            content, failed = str(error), True
        yield block.name, {"type": "tool_result", "tool_use_id": block.id, "content": content, "is_error": failed}


def main(folder: str, instruction: str) -> None:
    """Work in a folder."""
    workspace = Workspace(Path(folder), Path(folder, TESTS).read_text(encoding="utf-8"))
    with anthropic.Anthropic() as llm:
        for name, error in work(llm, os.environ["ANTHROPIC_MODEL"], workspace, instruction):
            print(f"{name}: {error or 'ok'}")
    print("the tests pass" if workspace.passes() else "the tests fail")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: cli.py FOLDER INSTRUCTION")
    main(*sys.argv[1:])
