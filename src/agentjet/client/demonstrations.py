"""Demonstrations: conversations with given answers, from the lines of data sets and files.

| recipe | a line has |
|---|---|
| `sft` | `messages` |
| `dpo` | `prompt` or `messages`, `chosen` and `rejected`; or whole conversations in `chosen` and `rejected` |
| `kto` | `prompt` or `messages`, `completion` and `label` |

A line of `sft` is one demonstration. A line of `dpo` is two in one group, the chosen one with the higher reward. A line
of `kto` is two, too: the answer with its label as reward, and a mismatched one without a reward, which is the answer of
another line. The demonstrations of a line are learned in one batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from agentjet.client.inputs import read_json_lines
from agentjet.errors import ConfigError
from agentjet.protocol import DemonstrationBody

EXAMPLE = '{"messages": [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "5"}]}'
PAIR = '{"messages": [{"role": "user", "content": "2 + 3"}], "chosen": "5", "rejected": "6"}'
LABELLED = '{"messages": [{"role": "user", "content": "2 + 3"}], "completion": "5", "label": true}'
Example = tuple[DemonstrationBody, ...]
"""The demonstrations of a line."""
Messages = list[Mapping[str, Any]]
KEYS = {
    "sft": {"messages", "tools"},
    "dpo": {"messages", "prompt", "chosen", "rejected", "tools"},
    "kto": {"messages", "prompt", "completion", "label", "tools"},
}
"""The keys that are read, by recipe. Other recipes read those of `sft`."""


def recipe_name(recipe: str | Mapping[str, Any]) -> str:
    """Returns the name of the recipe of a request; `sft` if it names none."""
    return str(recipe if isinstance(recipe, str) else recipe.get("name", "")) or "sft"


def read_demonstrations(path: Path, recipe: str = "sft") -> tuple[list[Example], set[str]]:
    """Returns the examples of a file of JSON lines, and the names of the keys that were ignored.

    Raises `ConfigError` for a file that cannot be read, is empty, or has a wrong line.
    """
    rows = [(f"{path.name[-200:]}:{number}", row) for number, row in read_json_lines(path)]
    if not rows:
        raise ConfigError(f"{path}: the file has no demonstrations")
    try:
        found = _examples(rows, recipe)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return found, {key for _, row in rows for key in row} - KEYS.get(recipe, KEYS["sft"])


def checked_demonstrations(
    given: Iterable[Mapping[str, Any] | DemonstrationBody | Example], recipe: str = "sft"
) -> list[Example]:
    """Returns the examples. Raises `ValueError` for a wrong one, or if there is none."""
    rows = [(f"demonstration-{number}", one) for number, one in enumerate(given, 1)]
    if not rows:
        raise ValueError("there are no demonstrations: give objects with messages")
    made = [(one,) if isinstance(one, DemonstrationBody) else one for _, one in rows if not isinstance(one, Mapping)]
    lines = [(task_id, one) for task_id, one in rows if isinstance(one, Mapping)]
    return [*made, *(_examples(lines, recipe) if lines else ())]


def _examples(rows: Sequence[tuple[str, Any]], recipe: str) -> list[Example]:
    if recipe == "dpo":
        return [_pair(row, task_id) for task_id, row in rows]
    if recipe == "kto":
        return _with_mismatched([_labelled(row, task_id) for task_id, row in rows])
    return [(demonstration(row, task_id),) for task_id, row in rows]


def demonstration(line: Any, task_id: str) -> DemonstrationBody:
    """Returns the demonstration of a dataset's line, whose further keys are ignored. Raises `ValueError`.

    `tools`, and `arguments` of tool calls, may be JSON text or JSON values.
    """
    if not isinstance(line, Mapping) or not isinstance(line.get("messages"), list) or not line["messages"]:
        keys = line.keys() if isinstance(line, Mapping) else set()
        other = next((name for name in ("dpo", "kto") if keys & (KEYS[name] - KEYS["sft"] - {"prompt"})), "")
        hint = f"; preferences and labelled answers need the recipe {other} (--recipe {other})" if other else ""
        raise ValueError(f"{task_id}: a demonstration is an object with messages, such as {EXAMPLE}{hint}")
    tools = line.get("tools") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{task_id}: tools is text that is not JSON ({error})") from None
    if not all(isinstance(one, Mapping) for one in line["messages"]):
        raise ValueError(f"{task_id}: every message is an object with role and content, such as in {EXAMPLE}")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"{task_id}: tools is a list of tool definitions")
    messages = [_openai_form(message) for message in line["messages"]]
    try:
        json.dumps([messages, tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{task_id}: {half} is half of a character, which UTF-8 cannot encode") from None
    except RecursionError:
        raise ValueError(f"{task_id}: the messages or tools are nested too deeply for JSON") from None
    return DemonstrationBody(task_id=task_id, messages=messages, tools=tools)


def _openai_form(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have ids, and arguments as JSON text. Hugging Face data sets omit the ids."""
    calls = message.get("tool_calls")
    known = {key: value for key, value in message.items() if value is not None}
    if message.get("role") == "tool":
        known.setdefault("tool_call_id", "")
    if not isinstance(calls, list):
        return known
    return known | {"tool_calls": [_with_text_arguments(call) for call in calls]}


def _with_text_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if not isinstance(function.get("arguments", ""), str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": "", **call, "function": function}


# ---- preferences ---------------------------------------------------------------------------------------------------


class _Labelled(NamedTuple):
    """A line of `kto`."""

    task_id: str
    prompt: Messages
    completion: Messages
    tools: object
    is_good: bool


def _check_keys(line: Any, keys: tuple[str, ...], form: str, task_id: str) -> None:
    if not isinstance(line, Mapping):
        raise ValueError(f"{task_id}: {form}")
    if missing := [key for key in keys if key not in line]:
        raise ValueError(f"{task_id}: it lacks {' and '.join(missing)}: {form}")


def _pair(line: Any, task_id: str) -> Example:
    form = f"a preference is an object with chosen and rejected, such as {PAIR}"
    _check_keys(line, ("chosen", "rejected"), form, task_id)
    answers = [_messages(line[key], key, "assistant", task_id) for key in ("chosen", "rejected")]
    prompt = _prompt(line, task_id)
    if all(answer[0].get("role") != "assistant" for answer in answers):  # whole conversations
        shared = _shared(*answers) if prompt is None else prompt
        if not shared or any(answer[: len(shared)] != shared for answer in answers):
            raise ValueError(
                f"{task_id}: chosen and rejected do not begin with the same prompt: give it as messages, and in chosen "
                "and rejected the answers alone"
            )
        prompt, answers = shared, [answer[len(shared) :] for answer in answers]
    if prompt is None:
        raise ValueError(f"{task_id}: there is no prompt: give it as messages or prompt, such as in {PAIR}")
    if not all(answers) or answers[0] == answers[1]:
        raise ValueError(f"{task_id}: chosen and rejected are equal, or one is the beginning of the other")
    return tuple(
        _answered(prompt, answer, line.get("tools"), f"{task_id}:{key}").model_copy(
            update={"group": task_id, "reward": reward}
        )
        for answer, key, reward in zip(answers, ("chosen", "rejected"), (1.0, 0.0), strict=True)
    )


def _labelled(line: Any, task_id: str) -> _Labelled:
    form = f"an answer is an object with completion and label, such as {LABELLED}"
    _check_keys(line, ("completion", "label"), form, task_id)
    if line["label"] not in (True, False):
        raise ValueError(f"{task_id}: label = {line['label']!r:.40}: it is true for a good answer, or false")
    completion = _messages(line["completion"], "completion", "assistant", task_id)
    if (prompt := _prompt(line, task_id)) is None:
        raise ValueError(f"{task_id}: there is no prompt: give it as messages or prompt, such as in {LABELLED}")
    return _Labelled(task_id, prompt, completion, line.get("tools"), bool(line["label"]))


def _with_mismatched(lines: Sequence[_Labelled]) -> list[Example]:
    """Each line with its mismatched answer: that of the next line with another prompt."""
    if all(line.prompt == lines[0].prompt for line in lines):
        raise ValueError(
            f"{lines[0].task_id}: kto compares an answer with those to other prompts, and there is no other: give two "
            "lines or more, with two prompts or more"
        )
    found: list[Example] = []
    for number, line in enumerate(lines):
        after = [*lines[number + 1 :], *lines[:number]]
        other = next(one for one in after if one.prompt != line.prompt)
        answer = _answered(line.prompt, line.completion, line.tools, line.task_id)
        mismatched = _answered(line.prompt, other.completion, other.tools, f"{line.task_id}+{other.task_id}"[-250:])
        found.append((answer.model_copy(update={"reward": float(line.is_good)}), mismatched))
    return found


def _prompt(line: Mapping[str, Any], task_id: str) -> Messages | None:
    key = "prompt" if line.get("prompt") is not None else "messages"
    return None if line.get(key) is None else _messages(line[key], key, "user", task_id)


def _shared(one: Messages, other: Messages) -> Messages:
    """The messages with which both begin."""
    return [mine for mine, _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))]


def _messages(value: Any, key: str, role: str, task_id: str) -> Messages:
    """A conversation, or a part of one: messages, one message, or its text."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not messages or not all(isinstance(one, Mapping) for one in messages):
        raise ValueError(f"{task_id}: {key} is text, a message or a list of messages with role and content")
    return messages


def _answered(prompt: Messages, answer: Messages, tools: object, task_id: str) -> DemonstrationBody:
    """The demonstration whose prompt is context, also the answers in it."""
    context = [{**message, "weight": 0} if message.get("role") == "assistant" else message for message in prompt]
    return demonstration({"messages": [*context, *answer], "tools": tools}, task_id)
