"""Anthropic's Messages API: bodies to canonical requests. `messages_answers` is the way back.

Equality of messages is by meaning: a tool's input is the value of the arguments that were sampled, text blocks are
joined, results of tools become messages of their own, in the order they stand in.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallRequest
from agentjet.server.dialects.dialect import (
    UNREADABLE_PARTS,
    Dialect,
    check_choice,
    function_tool,
    placeholder_of,
    refuse_value,
)
from agentjet.server.dialects.messages_answers import ANTHROPIC_ERRORS, to_answer, to_events
from agentjet.server.dialects.messages_requests import (
    BLOCK_KEYS,
    BODY,
    KEYS,
    PROVIDER_TOOLS,
    ROLE_BLOCKS,
    TOOL_KEYS,
    ContentBlock,
    MessageAnswer,
    MessagesBody,
    PartKeys,
    PromptBody,
    ToolBlock,
    ToolChoice,
    TurnBody,
    TypedPart,
    from_tool_input,
)
from agentjet.types import Constraint, Conversation, Message, ToolCall


def to_request(body: MessagesBody) -> CallRequest:
    """The canonical request. Raises `InvalidRequest` naming the first thing that cannot be honoured."""
    if body.thread is not None:
        raise InvalidRequest(
            "thread is not supported: the server holds no history, send all of it.",
            code="thread_unsupported_request",
            param="thread",
        )
    conversation, notes = to_conversation(body)
    return CallRequest(
        conversation=conversation,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
        constraint=_constraint(body),
        stream=bool(body.stream),
        model=body.model,
        notes=notes,
    )


def to_conversation(body: PromptBody) -> tuple[Conversation, tuple[str, ...]]:
    """What the model reads of a request, and what is noted of it. Raises `InvalidRequest` like `to_request`."""
    notes = BODY.judge(body)
    _refuse_edits(body.context_management)
    system = _text(body.system or "", "system", notes)
    messages = [Message("system", system)] if system else []
    for i, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{i}", notes)
    if body.messages[-1].role == "assistant":
        where = f"messages.{len(body.messages) - 1}"
        raise InvalidRequest(
            f"{where}: the last message is the assistant's, and a prefilled answer cannot be continued: end with a "
            "user message.",
            code="unsupported_parameter",
            param=where,
        )
    tools = tuple(_tool(tool, i, notes) for i, tool in _offered(body, notes))
    return Conversation(tuple(messages), tools), tuple(dict.fromkeys(notes))


def _refuse_edits(context_management: Any) -> None:
    """Raises `InvalidRequest` for an edit of the history that the provider would make, unless it is about thinking:
    the template decides about that.
    """
    edits = context_management.get("edits", []) if isinstance(context_management, dict) else context_management or []
    for i, edit in enumerate(edits if isinstance(edits, list) else [edits]):
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not str(kind).startswith("clear_thinking_"):
            where = f"context_management.edits.{i}"
            raise InvalidRequest(
                f"{where} is of type {str(kind)[:80]!r}: the server edits no history, edit it before you send it.",
                code="unsupported_parameter",
                param=where,
            )


def _check_keys(part: TypedPart, keys: PartKeys, where: str, notes: list[str]) -> None:
    """Raises `InvalidRequest` for a key that is missing, unknown, or asks for what cannot be had."""
    given = {name for name in part.model_fields_set if getattr(part, name) is not None} - {"type"}
    for name in given & {"cache_control", *keys.noted}:
        notes.append(f"tools[].{name}" if keys is TOOL_KEYS else f"messages[].content[].{name}")
    given -= {"cache_control", *keys.noted}
    for name in keys.required:
        if name not in given:
            raise InvalidRequest(f"{where}.{name} is missing.", code="invalid_value", param=f"{where}.{name}")
    for name in sorted(given - {*keys.required, *keys.optional}):
        place = f"{where}.{name}"
        if name in keys.neutral:
            refuse_value(getattr(part, name), keys.neutral[name], place)
            continue
        near = get_close_matches(
            name, [*keys.required, *keys.optional, *keys.neutral, *keys.noted, "cache_control"], n=1
        )
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise InvalidRequest(f"{place!r} is not a key this server knows{hint}", code="unknown_parameter", param=place)


def _turn(turn: TurnBody, where: str, notes: list[str]) -> list[Message]:
    """The messages that a turn is: a user's may hold results of tools, each a message, and text around them."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    blocks = [_readable(block, notes) for block in turn.content]
    for i, block in enumerate(blocks):
        _check_block(block, f"{where}.content.{i}", ROLE_BLOCKS[turn.role], f"{turn.role} message", notes)
    if turn.role == "assistant":
        return [_answer(blocks)]
    if not blocks:
        raise InvalidRequest(
            f"{where}.content is empty: only an assistant message may have no content.", param=f"{where}.content"
        )
    messages: list[Message] = []
    after_text = False
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            messages.append(_result(block, f"{where}.content.{i}", notes))
        elif after_text:
            messages[-1] = Message(turn.role, messages[-1].content + (block.text or ""))
        else:
            messages.append(Message(turn.role, block.text or ""))
        after_text = block.type == "text"
    return messages


def _readable(block: ContentBlock, notes: list[str]) -> ContentBlock:
    """The block, or the text that stands for one that the policy cannot read."""
    return (
        ContentBlock(type="text", text=placeholder_of(block.type, notes)) if block.type in UNREADABLE_PARTS else block
    )


def _check_block(block: ContentBlock, where: str, allowed: Sequence[str], parent: str, notes: list[str]) -> None:
    if block.type in allowed:
        _check_keys(block, BLOCK_KEYS[block.type], where, notes)
        return
    why = (
        f"does not belong into a {parent}" if block.type in BLOCK_KEYS else "cannot be read: the policy reads text only"
    )
    raise InvalidRequest(f"{where} is of type {block.type!r}, which {why}.", code="unsupported_content", param=where)


def _answer(blocks: Sequence[ContentBlock]) -> Message:
    return Message(
        "assistant",
        content="".join(block.text or "" for block in blocks),
        reasoning="".join(block.thinking or "" for block in blocks),
        tool_calls=tuple(
            ToolCall(block.id or "", block.name or "", from_tool_input(block.input or {}))
            for block in blocks
            if block.type == "tool_use"
        ),
    )


def _result(block: ContentBlock, where: str, notes: list[str]) -> Message:
    """What a tool said. Templates have no place for `is_error`: it is put into words, unless the tool did so."""
    text = _text(block.content or "", f"{where}.content", notes)
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=block.tool_use_id or "")


def _text(content: str | list[ContentBlock], where: str, notes: list[str]) -> str:
    if isinstance(content, str):
        return content
    blocks = [_readable(block, notes) for block in content]
    for i, block in enumerate(blocks):
        _check_block(block, f"{where}.{i}", ("text",), where.rpartition(".")[2], notes)
    return "".join(block.text or "" for block in blocks)


def _tool(tool: ToolBlock, index: int, notes: list[str]) -> dict[str, Any]:
    where = f"tools.{index}"
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where} is of type {tool.type!r}: the policy does not know Anthropic's own tools, define one with an "
            "input_schema.",
            code="unsupported_parameter",
            param=where,
        )
    _check_keys(tool, TOOL_KEYS, where, notes)
    return function_tool(tool.name, tool.description, tool.input_schema)


def _offered(body: PromptBody, notes: list[str]) -> list[tuple[int, ToolBlock]]:
    """The tools that the policy is offered, by their places in the request."""
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    offered = []
    for i, tool in enumerate(body.tools or ()):
        if (tool.type or "").startswith(PROVIDER_TOOLS):
            notes.append(f"tool {tool.type} dropped")
        else:
            offered.append((i, tool))
    return offered


def _constraint(body: MessagesBody) -> Constraint:
    """What `output_config.format`, `tool_choice` and strict tools ask of the answer."""
    choice = body.tool_choice or ToolChoice(type="auto")
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "tool_choice: a choice of type 'tool', and only such a one, names a tool.", param="tool_choice.name"
        )
    wanted = body.output_config.format if body.output_config is not None else None
    tools = [tool for _, tool in _offered(body, [])]
    constraint = Constraint(
        schema=wanted.schema_ if wanted is not None else None,
        schema_param="output_config.format",
        calls="required" if choice.type in ("any", "tool") else "auto",
        function=choice.name or "",
        strict=frozenset(tool.name or "" for tool in tools if tool.strict),
        parallel=not choice.disable_parallel_tool_use,
    )
    return check_choice(constraint, [tool.name or "" for tool in tools])


DIALECT = Dialect(
    path="/v1/messages",
    keys=KEYS,
    answer=MessageAnswer,
    errors=ANTHROPIC_ERRORS,
    to_request=lambda body, past: to_request(body),
    to_answer=to_answer,
    to_events=to_events,
)
