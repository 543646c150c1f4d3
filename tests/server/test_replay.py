"""Whole conversations over HTTP, with OpenAI's SDK and a worker that samples recorded answers.

Pinned here, for every chat template that can hold the conversations:
1. the answers have the meaning of the recorded ones, including tool calls; plain and streamed;
2. a conversation is one tree in which every call continues the previous one at its end, unless the template changes
   the previous prompt: no false fork;
3. the journal has the prompts and completions of the worker.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from openai import AsyncOpenAI

from agentjet.front.dialects.completions import CHAT, ChatBody
from agentjet.timeline import ConversationTree
from agentjet.types import SamplingParams
from tests.server.conversations import TOOLS, Body, as_text, real, synthetic
from tests.server.serving import Served, serving
from tests.timeline.models import TEMPLATES, Model, make_model

pytestmark = pytest.mark.anyio

HELD = tuple(name for name in TEMPLATES if name != "qwen3_open")
"""Templates that can hold conversations without thinking."""
REPLAYED = ("smollm2",)
"""Templates on which every run of the tests replays recorded conversations; the others in `make thorough`."""

Ask = Callable[..., Awaitable[Body]]
"""Sends a history and tools, with limits if any, and returns the answer as an agent would send it back."""


async def ask_plainly(client: AsyncOpenAI, history: list[Body], tools: list[Any], **limits: Any) -> Body:
    offered: dict[str, Any] = {"tools": tools, **limits} if tools else limits
    answer = await client.chat.completions.create(model="policy", messages=history, **offered)  # type: ignore[call-overload]
    sent_back: Body = answer.choices[0].message.model_dump()
    return sent_back


async def ask_streaming(client: AsyncOpenAI, history: list[Body], tools: list[Any], **limits: Any) -> Body:
    offered: dict[str, Any] = {"tools": tools, **limits} if tools else limits
    joined: Body = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    async for chunk in await client.chat.completions.create(  # type: ignore[call-overload]
        model="policy", messages=history, stream=True, **offered
    ):
        delta = chunk.choices[0].delta.model_dump()
        for key in ("content", "reasoning_content"):
            joined[key] += delta.get(key) or ""
        joined["tool_calls"] += delta.get("tool_calls") or []
    return joined


@dataclass
class Recital:
    """A worker that samples the text it was given last."""

    model: Model
    text: str = ""
    said: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
        completion = (*self.model.ids(self.text), self.model.end)
        self.said.append((*prompt, *completion))
        return completion

    def hand(self, message: Body) -> None:
        """The next answer: an assistant message as this model would write it."""
        functions = [call["function"] for call in message.get("tool_calls", ())]
        self.text = message["content"] or ""
        if functions:
            self.text = self.model.calling([(f["name"], f["arguments"]) for f in functions], self.text)


@dataclass
class Replay:
    """One conversation, sent turn by turn."""

    served: Served
    recital: Recital
    ask: Ask
    tools: list[Any]

    async def run(self, recorded: list[Body]) -> ConversationTree:
        """Replays it, checks its tree and returns it."""
        episode = await self.served.begin()
        client = self.served.openai(episode)
        history: list[Body] = []
        prompts: list[bytes] = []
        self.recital.said.clear()
        open_calls: list[str] = []
        for message in recorded:
            if message["role"] == "assistant":
                self.recital.hand(message)
                prompts.append(self._written(history))
                answer = await self.ask(client, history, self.tools)
                check_meaning(answer, message, self.recital.model)
                open_calls = [call["id"] for call in answer["tool_calls"] or ()]
                history.append(answer)
            elif message["role"] == "tool":
                history.append({**message, "tool_call_id": open_calls.pop(0)})
            else:
                history.append(message)
        tree = self.served.run.gateway.swarm.tree(episode["episode_id"], "")
        check_tree(tree, prompts, self.recital)
        await self.served.http.post(f"/swarm/v1/episodes/{episode['episode_id']}/abort", json={"reason": "seen"})
        return tree

    def _written(self, history: list[Body]) -> bytes:
        """Returns the template's text of a prompt, independent of the journal."""
        body = ChatBody.model_validate({"model": "policy", "messages": history, "tools": self.tools or None})
        return self.recital.model.renderer.render(CHAT.decode(body, lambda _: None).conversation)


def check_meaning(answer: Body, recorded: Body, model: Model) -> None:
    calls = [call["function"] for call in recorded.get("tool_calls", ())]
    content = (recorded["content"] or "") if not calls else (recorded["content"] or "").strip()
    if calls and model.card.tool_format == "llama3":
        content = ""  # Llama 3 answers or calls, never both
    assert (answer["content"] or "") == content
    told = [call["function"] for call in answer["tool_calls"] or ()]
    assert [(f["name"], json.loads(f["arguments"])) for f in told] == [
        (f["name"], json.loads(f["arguments"])) for f in calls
    ]


def check_tree(tree: ConversationTree, prompts: list[bytes], recital: Recital) -> None:
    calls = tree.calls
    assert [tree.tokens(call.id) for call in calls] == recital.said
    assert [call.id for call in calls if call.parent is None] == [calls[0].id], "one tree"
    num_rewritten = 0
    for last, call, before, after in zip(calls, calls[1:], prompts, prompts[1:], strict=False):
        if after.startswith(before):
            assert (call.parent, call.kept, call.fork) == (last.id, tree.num_tokens(last.id), ""), "a false fork"
        else:
            assert call.fork == "template"
            num_rewritten += 1
    assert len(tree.leaves()) == 1 + num_rewritten


async def replay_all(folder: Path, name: str, ask: Ask, conversations: list[list[Body]]) -> int:
    """Replays them on a template. Returns how many of their trees have one timeline."""
    model = make_model(folder, name)
    recital = Recital(model)
    tools = TOOLS if model.card.tool_format else []

    async with serving(
        folder / "data",
        recital,
        card=model.card,
        job={"max_tokens": 100_000},
        prepare=lambda compute: setattr(compute, "piece", 64),
    ) as served:
        replay = Replay(served, recital, ask, tools)
        trees = []
        for recorded in conversations:
            plain = recorded if tools else as_text(recorded, system=name != "strict")
            trees.append(await replay.run(plain))
    assert len(trees) == len(conversations)
    return sum(len(tree.leaves()) == 1 for tree in trees)


@pytest.mark.parametrize(
    ("name", "ask"), [*((name, ask_plainly) for name in HELD), ("qwen3", ask_streaming), ("mistral", ask_streaming)]
)
async def test_ten_conversations_are_ten_trees_without_a_false_fork(name: str, ask: Ask, tmp_path: Path) -> None:
    num_straight = await replay_all(tmp_path, name, ask, synthetic())
    assert name == "mistral" or num_straight == 10  # Mistral's template moves tools and system to the last user message


@pytest.mark.slow
@pytest.mark.skipif(real() is None, reason="AGENTJET_CONVERSATIONS names no file of tau-bench trajectories")
@pytest.mark.parametrize(
    "name", [name if name in REPLAYED else pytest.param(name, marks=pytest.mark.thorough) for name in HELD]
)
async def test_real_conversations_are_a_tree_each(name: str, tmp_path: Path) -> None:
    """Every tenth of the hundred; all of them, ten minutes' work, with `--hypothesis-profile=thorough`."""
    conversations = (real() or [])[:: 1 if settings.get_current_profile_name() == "thorough" else 10]
    num_straight = await replay_all(tmp_path, name, ask_plainly, conversations)
    assert name == "mistral" or num_straight == len(conversations)
