"""The worst case known in this field: a coding agent's harness on a template that removes reasoning.

Elsewhere, 8 rollouts became 64 rows. The harness calls several tools at once, sends JSON back with other spacing, and
puts reminders as user messages between tool results. The template then removes the reasoning of all earlier turns; most
harnesses do not even send it back. From HTTP to the forest that the worker learns:

1. 8 rollouts are 8 trees and 8 sequences with every template. Every sampled token is trained in its context.
2. With `history = "as_sampled"`, they are 8 timelines.
3. With `history = "template"`, a tree forks only where reasoning was removed, and counts it: at the reminders, or at
   every turn if the harness drops reasoning.

Three more failures of other systems between HTTP and the tree: sibling choices, stop strings, half characters.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentjet.timeline import ConversationTree, Forest
from tests.server.conversations import TOOLS, Body
from tests.server.serving import Served, serving
from tests.server.test_replay import Recital, ask_plainly, ask_streaming
from tests.timeline.models import make_model
from tests.timeline.training import count_prefixes

pytestmark = pytest.mark.anyio

ROLLOUTS, TURNS = 8, 9
REMIND_AT = (3, 6)
"""Turns before which the harness slips in a reminder."""


class Harness:
    """One rollout of the coding agent."""

    def __init__(
        self, served: Served, recital: Recital, number: int, episode: dict[str, Any], *, forgets: bool
    ) -> None:
        self.recital, self.number, self.episode, self.forgets = recital, number, episode, forgets
        self.client: AsyncOpenAI = served.openai(episode)
        self.history: list[Body] = [
            {"role": "system", "content": "You are a coding agent. " * 20},
            {"role": "user", "content": "<system-reminder>Use the tools.</system-reminder>"},
            {"role": "user", "content": "Mend the failing test."},
        ]

    async def turn(self, number: int) -> None:
        """One call of the model, its tools, and the history as the harness changes it."""
        if number in REMIND_AT:
            self.history.append({"role": "user", "content": f"<system-reminder>turn {number}</system-reminder>"})
        self.recital.text = self._saying(number)
        answer = await ask_plainly(self.client, self.history, TOOLS)
        assert answer["reasoning_content"] == f"rollout {self.number} thinks\nabout turn {number}"
        if self.forgets:
            del answer["reasoning_content"]
        for call in answer["tool_calls"] or ():
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        self.history.append(answer)
        for call in answer["tool_calls"] or ():
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": f"ok {number}\n"})

    def _saying(self, number: int) -> str:
        thought = f"rollout {self.number} thinks\nabout turn {number}\n</think>\n\n"
        if not self.recital.model.renderer.generation_tail:
            thought = f"<think>\n{thought}"
        if number == TURNS - 1:
            return f"{thought}Done."
        calls = [("look_up", f'{{"id":"{self.number}.{number}.{i}",  "n": 1.0}}') for i in range(1 + number % 3)]
        return thought + self.recital.model.calling(calls, "So." if number % 2 else "")


async def rollouts(
    folder: Path, name: str, history: str, *, forgets: bool
) -> tuple[list[ConversationTree], Forest, Recital]:
    """Runs all rollouts turn by turn, and returns their batch."""
    model = make_model(folder, name)
    recital = Recital(model)
    async with serving(
        folder / "data",
        recital,
        card=model.card,
        job={"max_tokens": 10_000, "batch_size": 1, "group_size": ROLLOUTS, "history": history},
        prepare=lambda compute: setattr(compute, "piece", 64),
    ) as served:
        harnesses = [
            Harness(served, recital, i, await served.begin(group="g"), forgets=forgets) for i in range(ROLLOUTS)
        ]
        for number in range(TURNS):
            for harness in harnesses:
                await harness.turn(number)
        trees = [served.run.gateway.swarm.tree(harness.episode["episode_id"], "") for harness in harnesses]
        for harness in harnesses:
            url = f"/swarm/v1/episodes/{harness.episode['episode_id']}/finish"
            assert (await served.http.post(url, json={"reward": harness.number % 2})).status_code == 200
        await served.run.until(lambda: bool(served.run.compute.loaded))
        [batch] = served.run.compute.loaded
    return trees, batch.forest, recital


def check_forest(forest: Forest, trees: list[ConversationTree]) -> None:
    """Every sampled token is trained once, in its context; nothing else is in the forest."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(forest.tokens.tolist(), forest.parent.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    trained = Counter(paths[node] for node in forest.node.tolist())
    told = [(tree.tokens(call.id), len(call.completion)) for tree in trees for call in tree.calls]
    assert trained == Counter(tokens[: len(tokens) - i] for tokens, length in told for i in range(length))
    assert forest.num_nodes == count_prefixes(tokens for tokens, _ in told)
    assert forest.num_sequences == ROLLOUTS


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "history", "forgets"),
    [
        ("qwen3", "template", False),
        ("qwen3", "template", True),
        ("qwen3", "as_sampled", True),
        ("qwen3_open", "as_sampled", True),
    ],
)
async def test_eight_rollouts_of_a_coding_agent(name: str, history: str, forgets: bool, tmp_path: Path) -> None:
    trees, forest, recital = await rollouts(tmp_path, name, history, forgets=forgets)
    assert len(trees) == ROLLOUTS
    assert sorted(tree.tokens(call.id) for tree in trees for call in tree.calls) == sorted(recital.said)
    check_forest(forest, trees)
    stripped_at = set() if history == "as_sampled" else set(range(1, TURNS)) if forgets else set(REMIND_AT)
    for tree in trees:
        assert [call.fork for call in tree.calls] == ["template" if i in stripped_at else "" for i in range(TURNS)]
        assert sum(call.parent is None for call in tree.calls) == 1
        assert len(tree.leaves()) == 1 + len(stripped_at)


async def test_sibling_choices_go_on_apart(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3")
    said = iter([model.calling([("look_up", f'{{"id": "{i}"}}')]) for i in range(2)] + ["zero", "one"])

    def script(prompt: object, params: object) -> tuple[int, ...]:
        return (*model.ids(next(said)), model.end)

    async with serving(tmp_path / "d", script, card=model.card, job={"max_tokens": 100}) as served:
        episode = await served.begin()
        client = served.openai(episode)
        asked: list[Any] = [{"role": "user", "content": "hello"}]
        both = await client.chat.completions.create(model="policy", messages=asked, tools=TOOLS, n=2)
        for choice in both.choices:
            assert not choice.message.content
            [call] = choice.message.tool_calls or []
            told = {"role": "tool", "tool_call_id": call.id, "content": f"found {choice.index}"}
            history: Any = [*asked, choice.message.model_dump(), told]
            await client.chat.completions.create(model="policy", messages=history, tools=TOOLS)
        tree = served.run.gateway.swarm.tree(episode["episode_id"], "")
        zero, one, after_zero, after_one = tree.calls
        assert [json.loads(c.response.tool_calls[0].arguments)["id"] for c in (zero, one)] == ["0", "1"]
        for first, then in ((zero, after_zero), (one, after_one)):
            assert (then.parent, then.kept) == (first.id, tree.num_tokens(first.id))
        assert len(tree.leaves()) == 2


@pytest.mark.parametrize("ask", [ask_plainly, ask_streaming])
@pytest.mark.parametrize(
    ("text", "limits", "heard", "not_fed"),
    [("42hello the", {"stop": "el"}, "42h", 1), ("so €", {"max_tokens": 4}, "so \ufffd", 0), ("so €", {}, "so €", 0)],
    ids=["stop within a token", "half a character", "a character of two tokens"],
)
async def test_what_agents_hear_differs_from_what_was_sampled(
    text: str, limits: dict[str, Any], heard: str, not_fed: int, ask: Any, tmp_path: Path
) -> None:
    model = make_model(tmp_path, "chatml")
    recital = Recital(model, text)
    async with serving(tmp_path / "d", recital, card=model.card) as served:
        episode = await served.begin()
        client = served.openai(episode)
        history: list[Body] = [{"role": "user", "content": "hello"}]
        answer = await ask(client, history, [], **limits)
        assert answer["content"] == heard
        await ask(client, [*history, answer, {"role": "user", "content": "42"}], [])
        tree = served.run.gateway.swarm.tree(episode["episode_id"], "")
        first, second = tree.calls
        assert (second.parent, second.kept) == (first.id, tree.num_tokens(first.id) - not_fed)
