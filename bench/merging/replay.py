"""Conversations through the gateway's own renderer and tree, with a sampler that answers the recorded messages.

Each assistant message becomes a call. Its prompt is prepared as in `gateway.calls`. Its completion is the text that
the chat template writes for that message up to the end token, in the tokenizer's own tokens.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.gateway.prompts import Prompt, prepare_prompt
from agentjet.rendering import Renderer
from agentjet.timeline import ConversationTree, Row, call_row
from agentjet.timeline.identity import context_hash
from agentjet.types import Call, Conversation, Message, ModelInfo, ToolCall

LOGPROB = -10.0
LONGEST = 2**20
"""Context length: nothing is sampled, and what was recorded may be longer than the model's."""


@dataclass(frozen=True, slots=True)
class Played:
    """A call as it was replayed: tokens of its prompt, bytes of its rendered conversation, the gateway's seconds."""

    prompt_tokens: int
    prompt_bytes: int
    seconds: float


class Replay:
    """One conversation after the other, each into a separate tree."""

    def __init__(self, card: ModelInfo) -> None:
        self._renderer = Renderer(replace(card, context_length=LONGEST))
        self._end = card.end_tokens

    def play(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[ConversationTree, list[Played]]:
        """The tree of a conversation and what its calls cost the gateway: match, render, tokenise, append."""
        tree = ConversationTree()
        played = []
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            conversation = Conversation(tuple(messages[:i]), tuple(tools))
            completion = self._recorded(conversation, message)
            began = time.perf_counter()
            prompt = prepare_prompt(self._renderer, tree, conversation, "template", fingerprint=str(i))
            call = _call(str(i), prompt, completion, message)
            tree.add(call, prompt.pieces, self._renderer.pieces(completion))
            seconds = time.perf_counter() - began
            num_bytes = len(self._renderer.render(conversation))
            played.append(Played(len(prompt.tokens), num_bytes, seconds))
        return tree, played

    def rows(self, messages: Sequence[Message], sequence: int, advantage: float) -> list[Row]:
        """One row per call of the conversation."""
        tree, _ = self.play(messages)
        return [
            call_row(
                tokens=np.asarray(tree.tokens(call.id), np.int32),
                logprobs=np.asarray(call.logprobs, np.float32),
                versions=np.asarray(call.versions, np.int32),
                advantage=advantage,
                temperature=call.temperature,
                sequence=sequence,
            )
            for call in tree.calls
        ]

    def _recorded(self, conversation: Conversation, answer: Message) -> tuple[int, ...]:
        """The tokens that a policy would have sampled for this message, with its end token."""
        asked = self._renderer.render(conversation)
        said = self._renderer.render(Conversation((*conversation.messages, answer), conversation.tools))
        assert said.startswith(asked), "the template rewrites what it was asked with"
        tokens = self._renderer.tokenize(said[len(asked) :])
        return tokens[: 1 + next(i for i, token in enumerate(tokens) if token in self._end)]


def read_conversations(path: Path) -> dict[int, list[list[Message]]]:
    """Recorded conversations by task: JSON lines with `task_id` and `messages` in OpenAI's chat format, gzipped."""
    found: dict[int, list[list[Message]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            found.setdefault(record["task_id"], []).append([_message(m) for m in record["messages"]])
    return found


def conversation_rows(card: ModelInfo, path: Path, num_tasks: int, vocabulary: int) -> list[Row]:
    """A seeded sample of whole tasks, as one batch: every trial of a task, one row per call.

    Token ids are folded into the vocabulary of the model that is measured; a fold could hide a fork once in
    `vocabulary` forks.
    """
    tasks = read_conversations(path)
    chosen = random.Random(0).sample(sorted(tasks), min(num_tasks, len(tasks)))
    replay = Replay(card)
    rng = random.Random(0)
    trials = [trial for task in chosen for trial in tasks[task]]
    rows = [row for i, trial in enumerate(trials) for row in replay.rows(trial, i, rng.choice((-1.0, 1.0)))]
    return [replace(row, tokens=row.tokens % vocabulary) for row in rows]


def _call(id_: str, prompt: Prompt, completion: tuple[int, ...], response: Message) -> Call:
    return Call(
        id=id_,
        episode_id="replay",
        role="",
        parent=prompt.parent,
        kept=prompt.kept,
        suffix=prompt.suffix,
        completion=completion,
        logprobs=(LOGPROB,) * len(completion),
        versions=(0,) * len(completion),
        temperature=1.0,
        finish_reason="stop",
        response=response,
        prompt_key=prompt.key,
        created=0.0,
        ask=prompt.ask,
        fork=prompt.fork,
        context=context_hash(prompt.tokens, completion).digest(),
    )


def _message(raw: Mapping[str, Any]) -> Message:
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in raw.get("tool_calls") or ()
    ]
    return Message(
        role=raw["role"],
        content=raw.get("content") or "",
        tool_calls=tuple(calls),
        tool_call_id=raw.get("tool_call_id") or "",
        name=raw.get("name") or "",
    )


def made_up(num_turns: int) -> tuple[list[Message], list[dict[str, Any]]]:
    """A tool-using conversation with `num_turns` answers, about 400 tokens a turn, and its tools."""
    rng = random.Random(0)
    messages = [Message("system", _prose(rng, 120)), Message("user", _prose(rng, 40))]
    for turn in range(num_turns):
        arguments = json.dumps({"query": _prose(rng, 6), "limit": rng.randrange(100)})
        messages.append(Message("assistant", _prose(rng, 30), tool_calls=(ToolCall(f"c{turn}", "search", arguments),)))
        found = [{"id": rng.randrange(10**6), "title": _prose(rng, 8), "price": rng.random()} for _ in range(7)]
        messages.append(Message("tool", json.dumps(found), tool_call_id=f"c{turn}", name="search"))
    return messages, list(_tools())


def _prose(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words)).capitalize() + "."


def _tools() -> Iterator[dict[str, Any]]:
    for name in ("search", "open", "order"):
        properties = {"query": {"type": "string", "description": "what is looked for"}, "limit": {"type": "integer"}}
        parameters = {"type": "object", "properties": properties, "required": ["query"]}
        function = {"name": name, "description": f"Calls {name}.", "parameters": parameters}
        yield {"type": "function", "function": function}


_WORDS = [
    "the",
    "flight",
    "on",
    "that",
    "day",
    "leaves",
    "from",
    "another",
    "airport",
    "and",
    "your",
    "bag",
    "must",
    "be",
    "checked",
    "before",
    "noon",
    "so",
    "please",
    "confirm",
    "which",
    "of",
    "these",
    "seats",
    "you",
    "would",
    "like",
    "to",
    "reserve",
    "because",
    "prices",
    "change",
    "quickly",
    "when",
    "many",
    "people",
    "book",
    "at",
    "once",
    "we",
    "can",
    "also",
    "refund",
    "a",
    "part",
    "of",
    "what",
    "was",
    "paid",
    "if",
    "the",
    "airline",
    "cancelled",
    "or",
    "delayed",
    "it",
    "for",
    "more",
    "than",
    "three",
    "hours",
]
