"""Whole products, run headless with one task each: correct a word in a file, then run a command.

The policy calls the product's own tools, and the run checks the files that they leave.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from conformance.conversation import WORK, Turn, calling, told
from conformance.episode import Exercise

CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
PROMPT = "The word in greeting.txt is misspelt. Correct it, then run: cp greeting.txt copy.txt"
ANSWER = "The word is corrected."
FILE, COPY = f"{WORK}/greeting.txt", "cp greeting.txt copy.txt"
MISSPELT, CORRECTED = "helo world\n", "hello world\n"


def task(
    client: str, dialect: str, script: str, *turns: Turn, answer: str = ANSWER, remark: str = "", **more: Any
) -> Exercise:
    """The task of every product."""
    return Exercise(
        client,
        "edit a file, run a command",
        dialect,
        (script, PROMPT),
        turns,
        answer,
        remark,
        files={"greeting.txt": MISSPELT},
        leaves={"greeting.txt": CORRECTED, "copy.txt": CORRECTED},
        **more,
    )


def use(name: str, **arguments: Any) -> str:
    """An answer that calls a tool, spaced as no library would."""
    return calling((name, json.dumps(arguments, separators=(",", ":  "))))


def search_and_replace(old: str, new: str) -> str:
    """A block that edits the file, as aider wants it."""
    return f"greeting.txt\n```\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```"


OPENCODE = task(
    "opencode",
    CHAT,
    "opencode.sh",
    Turn("A misspelt word", asked_by="You are a title generator", sees=(PROMPT,), fork="tools"),
    Turn(use("read", filePath=FILE), sees=("You are opencode", PROMPT), fork="tools"),
    Turn(use("edit", filePath=FILE, oldString="helo", newString="hello"), sees=("1: helo world",)),
    Turn(use("bash", command=COPY, description="copies"), sees=("Edit applied successfully.",)),
    Turn(ANSWER, sees=(COPY, "(no output)")),
    remark="its title is a side call, trained like the rest; it requests a plugin from npm with any settings",
    reaches=("registry.npmjs.org",),
)
TITLE_RULE = {"name": "title", "system": "You are a title generator*", "train": False}
OPENCODE_WITHOUT_TITLE = replace(
    OPENCODE,
    name="the same, its title left out by a rule of the job",
    turns=(replace(OPENCODE.turns[0], is_trained=False), *OPENCODE.turns[1:]),
    job={"side_calls": [TITLE_RULE]},
    remark="`[[job.side_calls]]`",
)
QWEN_CODE = task(
    "qwen-code",
    CHAT,
    "qwen-code.sh",
    Turn(use("read_file", file_path=FILE), sees=("You are Qwen Code", PROMPT)),
    Turn(use("edit", file_path=FILE, old_string="helo", new_string="hello"), sees=("helo world",)),
    Turn(use("run_shell_command", command=COPY, is_background=False), sees=("hello world",)),
    Turn(ANSWER, sees=(COPY, "Exit Code: 0")),
)
RAN = told('{\n  "returncode": 0,\n  "output": ""\n}')
MINI_SWE_AGENT = task(
    "mini-swe-agent",
    CHAT,
    "mini-swe-agent.sh",
    Turn(use("bash", command="sed -i s/helo/hello/ greeting.txt"), sees=(PROMPT,)),
    Turn(use("bash", command=COPY), adds=RAN),
    Turn(use("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {ANSWER}"), adds=RAN),
)
INSPECT = task(
    "inspect-ai",
    CHAT,
    "inspect.sh",
    Turn(
        use("text_editor", command="str_replace", path=FILE, old_str="helo", new_str="hello"), sees=("submit", PROMPT)
    ),
    Turn(use("bash", command=f"cd {WORK} && {COPY}"), sees=("str_replace",)),
    Turn(use("submit", answer=ANSWER)),
    answer="accuracy  1.000",
)
OPENHANDS = task(
    "openhands-sdk",
    CHAT,
    "openhands_agent.py",
    Turn(use("file_editor", command="str_replace", path=FILE, old_str="helo", new_str="hello"), sees=(PROMPT,)),
    Turn(use("terminal", command=COPY), sees=("hello world",)),
    Turn(use("finish", message=ANSWER)),
)
CLAUDE_CODE = task(
    "claude-code",
    MESSAGES,
    "claude-code.sh",
    Turn(use("Read", file_path=FILE), sees=(PROMPT,)),
    Turn(use("Edit", file_path=FILE, old_string="helo", new_string="hello"), sees=("helo world",)),
    Turn(use("Bash", command=COPY, description="copies"), sees=("has been updated",)),
    Turn(ANSWER),
)
CODEX = task(
    "codex",
    RESPONSES,
    "codex.sh",
    Turn(use("exec_command", cmd="sed -i s/helo/hello/ greeting.txt"), sees=(PROMPT,)),
    Turn(use("exec_command", cmd=COPY), sees=("exited with code 0",)),
    Turn(ANSWER),
)
AIDER = replace(
    task(
        "aider",
        CHAT,
        "aider.sh",
        Turn(search_and_replace("helo world", "hallo world"), sees=("*SEARCH/REPLACE block*", "helo world", PROMPT)),
        Turn(
            f"{search_and_replace('hallo world', 'hello world')}\n\n{ANSWER}",
            sees=("hallo world", "hello is missing"),
            fork="edit",
        ),
        remark="moves what the files hold behind the conversation after each edit: every answer begins a timeline",
    ),
    name="edit a file, correct it after a failed test",
    command=(
        "aider.sh",
        PROMPT,
        "grep hello greeting.txt && cp greeting.txt copy.txt || { echo hello is missing; exit 1; }",
    ),
)

PRODUCTS = (OPENCODE, OPENCODE_WITHOUT_TITLE, QWEN_CODE, MINI_SWE_AGENT, INSPECT, OPENHANDS, CLAUDE_CODE, CODEX, AIDER)
OF_NODE = ("opencode", "qwen-code", "claude-code", "codex")
"""Products that npm installs."""
PACKAGES = {
    "opencode": ("npm opencode-linux-x64",),
    "qwen-code": ("npm @qwen-code/qwen-code",),
    "claude-code": ("npm @anthropic-ai/claude-code",),
    "codex": ("npm @openai/codex",),
    "aider": ("aider-chat",),
    "openhands-sdk": ("openhands-sdk", "openhands-tools"),
}
