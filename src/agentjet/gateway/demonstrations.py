"""Demonstrations as calls: the tokens that the policy would see and sample, from conversations with given answers.

A prompt is made as that of an agent's call. The answer is what the chat template writes after it, with the end token.
An answer that would be read back differently is refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentjet.errors import ContextOverflow, InvalidRequest
from agentjet.gateway.prompts import prepare_prompt
from agentjet.rendering import Renderer
from agentjet.swarm.demonstrations import Answered
from agentjet.swarm.journal import RecordedCall
from agentjet.timeline import ConversationTree
from agentjet.timeline.identity import context_hash
from agentjet.types import Call, Conversation, Message

CONTEXT_ONLY = "weight"
"""The call's reason not to train for an answer with weight 0."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation with given answers. `learned` are the indices of the assistant messages that are learned."""

    task_id: str
    conversation: Conversation
    learned: frozenset[int]


def answer_all(
    renderer: Renderer,
    demonstrations: Sequence[Demonstration],
    role: str,
    history: Literal["template", "as_sampled"],
    now: float,
) -> list[Answered]:
    """Returns the calls of each demonstration. Raises `InvalidRequest` that names the first wrong one."""
    return [_answer(renderer, one, role, history, now) for one in demonstrations]


def _answer(
    renderer: Renderer, given: Demonstration, role: str, history: Literal["template", "as_sampled"], now: float
) -> Answered:
    if not given.learned:
        raise InvalidRequest(
            f"{given.task_id}: no answer to learn: a demonstration needs an assistant message without weight 0.",
            code="no_answer",
            param="messages",
        )
    tree, calls = ConversationTree(), list[RecordedCall]()
    for i, message in enumerate(given.conversation.messages):
        if message.role != "assistant":
            continue
        where = f"{given.task_id}: messages.{i}"
        try:
            call, suffix, completion = _call(renderer, tree, given.conversation, i, role, history, now)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}", code=error.code, param=error.param) from None
        call = call if i in given.learned else replace(call, untrained=CONTEXT_ONLY)
        tree.add(call, suffix, completion)
        calls.append((call, suffix, completion))
    return Answered(given.task_id, tuple(calls))


def _call(
    renderer: Renderer,
    tree: ConversationTree,
    conversation: Conversation,
    at: int,
    role: str,
    history: Literal["template", "as_sampled"],
    now: float,
) -> RecordedCall:
    """Returns the call whose answer is message `at`."""
    asked, answer = replace(conversation, messages=conversation.messages[:at]), conversation.messages[at]
    if not asked.messages:
        raise InvalidRequest("an answer without a question: begin with a user or system message", param="messages")
    if answer.tool_calls and not conversation.tools:
        raise InvalidRequest("the answer calls tools, and the demonstration offers none: add tools", param="tools")
    offered = [tool["function"]["name"] for tool in conversation.tools]
    for called in answer.tool_calls:
        if called.name not in offered:
            raise InvalidRequest(
                f"the answer calls {called.name!r}, and the demonstration offers {', '.join(offered)}", param="tools"
            )
    prompt = prepare_prompt(renderer, tree, asked, history)
    completion = renderer.tokenize_answer(asked, answer)
    if len(prompt.tokens) + len(completion) > renderer.context_length:
        raise ContextOverflow("messages", len(prompt.tokens) + len(completion), renderer.context_length)
    _check_reading(renderer.parse(completion, asked), answer)
    call = Call(
        id=uuid.uuid4().hex,
        episode_id="",
        role=role,
        parent=prompt.parent,
        kept=prompt.kept,
        suffix=prompt.suffix,
        completion=completion,
        logprobs=(),
        versions=(),
        temperature=1.0,
        finish_reason="tool_calls" if answer.tool_calls else "stop",
        response=answer,
        prompt_key=prompt.key,
        created=now,
        ask=prompt.ask,
        fork=prompt.fork,
        context=context_hash(prompt.tokens, completion).digest(),
    )
    return call, prompt.pieces, tuple(renderer.pieces(completion))


def _check_reading(read: Message, given: Message) -> None:
    """Raises `InvalidRequest` if the tokens of an answer mean another message to agents."""
    for part, ours, theirs in (
        ("content", read.content.strip(), given.content.strip()),
        ("reasoning_content", read.reasoning.strip(), given.reasoning.strip()),
        ("tool_calls", _meaning(read), _meaning(given)),
    ):
        if ours != theirs:
            raise InvalidRequest(
                f"the chat template of this model writes the answer so that its {part} would be read as {ours!r:.200}, "
                f"not as {theirs!r:.200}",
                code="template_error",
                param=f"messages.{part}",
            )


def _meaning(message: Message) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for call in message.tool_calls:
        try:
            arguments = call.value()
        except ValueError as error:
            raise InvalidRequest(
                f"the arguments of the tool call {call.name!r} are not JSON ({error})", param="messages.tool_calls"
            ) from None
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(
                f"the arguments of the tool call {call.name!r} are not an object", param="messages.tool_calls"
            )
        found.append((call.name, arguments))
    return found
