"""`agentjet episodes`: exports and the colours of overlays. `tests.locks` has exported files and texts of overlays.

1. An export has each conversation of an episode and role once.
2. `agentjet episodes show --overlay` colours tokens and calls.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from agentjet.cli.episodes import NEGATIVE, NOTE, POSITIVE, VERSIONS, Overlay, advantage_bar, episode_lines, overlaid
from agentjet.client import Swarm
from agentjet.client.report import rows
from agentjet.errors import ConfigError
from agentjet.protocol import CallView
from agentjet.types import Reward
from tests.cli.test_commands import at, run
from tests.fakes import call_view, episode_tree
from tests.server.serving import TOKEN, Served


def play(swarm: Swarm, task: str) -> None:
    """An episode of two turns and a vote on the first."""
    with swarm.episode(task, mode="eval") as episode:
        with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as agent:

            def ask(*texts: str) -> str:
                messages: Any = [
                    {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)
                ]
                answer = agent.chat.completions.create(model="policy", messages=messages)
                return answer.choices[0].message.content or ""

            first = "What is 1 + 2"
            answer = ask(first)
            ask(first, answer, "What is 3 + 4")
            ask(first, answer, "What is 5 + 6")
        episode.finish(Reward(1.0, text=f"1 for {task}"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_cannot_be_exported(served: Served, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(ConfigError, match="exists: move it away"):
        run("episodes", "export", str(tmp_path / "there"), *at(served))
    with pytest.raises(ConfigError, match="nothing to export: of 0 episodes"):
        run("episodes", "export", str(tmp_path / "none.jsonl"), *at(served))
    assert [path.name for path in tmp_path.iterdir() if "none" in path.name] == []


def test_messages_that_a_checkpoint_covers_are_gone(served: Served, tmp_path: Path) -> None:
    with Swarm(served.url, TOKEN) as swarm:
        play(swarm, "old")
        store = served.run.gateway.swarm
        store.transcript_bytes = 0
        for rows in store.unneeded():
            store.journal.delete(rows)
        play(swarm, "new")
    out = tmp_path / "out.jsonl"
    assert "conversations: 2, of episodes: 1, in" in (said := run("episodes", "export", str(out), *at(served)))
    assert "1 more have no messages: a checkpoint covers them" in said
    found = read(out)
    assert [(row["task_id"], row["timeline"], row["reward"]) for row in found] == [("new", 0, 1.0), ("new", 1, 1.0)]
    columns = [[(key, type(value)) for key, value in row.items()] for row in found]
    assert columns[0] == columns[1], "readers of JSON lines take the columns from the first row"
    assert out.stat().st_mode & 0o777 == 0o600


def call(call_id: str, after: str | None, **more: Any) -> CallView:
    """A call of policy version 3."""
    usual: dict[str, Any] = {"messages": [{"role": "user", "content": f"to {call_id}"}], "versions": [None, 3]}
    response = {"role": "assistant", "content": call_id}
    return call_view(call_id, **{"after": after, "response": response, **usual, **more})


def test_roles_tools_and_what_nobody_received() -> None:
    tool_call = {"id": "c1", "name": "add", "arguments": '{"a": 1}'}
    spoken = {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [tool_call]}
    tree = episode_tree(
        call("one", None, tools=[{"type": "function"}], response=spoken),
        call("lost", "one", orphan="undelivered"),
        call("two", "one", messages=[{"role": "tool", "content": "2", "tool_call_id": "c1"}], versions=[4]),
        call("word", None, role="critic"),
        policy_version=3,
        reward=1.0,
        by_role={"critic": 0.5},
    )
    first, second = rows(tree)
    assert (first["role"], first["reward"], first["policy_versions"]) == ("", 1.0, [3, 4])
    assert (second["role"], second["reward"], second["timeline"]) == ("critic", 0.5, 0)
    assert first["tools"] == '[{"type": "function"}]'
    assert first["messages"] == [
        {"role": "user", "content": "to one"},
        {
            "role": "assistant", "content": "", "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "two"},
    ]  # fmt: skip


# ---- overlays --------------------------------------------------------------------------------------------------------


def sampled_call(call_id: str = "c1", **more: Any) -> CallView:
    """A call with one token of context and four sampled ones."""
    logprobs = [None, 0.0, math.log(0.004), math.log(0.07), math.log(0.6)]
    tokens = {"tokens": [1, 2, 3, 4, 5], "texts": ["Q", "sure", "rare", "odd\x1b", "!"], "mask": [0, 1, 1, 1, 1]}
    return call_view(call_id, **{**tokens, "logprobs": logprobs, "versions": [None, 7, 7, 8, 8], **more})


@pytest.mark.parametrize(
    ("overlay", "advantage", "more", "text", "styles"),
    [
        ("logprob", None, {}, "Qsurerare⟨0.4%⟩odd\\x1b⟨7%⟩!",
         [NOTE, "color(25)", "color(226) underline", NOTE, "color(220) underline", NOTE, "color(103)"]),
        ("version", None, {}, "Q⟨v7⟩surerare⟨v8⟩odd\\x1b!",
         [NOTE, "bold", VERSIONS[3], VERSIONS[3], "bold", VERSIONS[0], VERSIONS[0]]),
        ("version", None, {"texts": []}, "<1>⟨v7⟩<2><3>⟨v8⟩<4><5>",
         [NOTE, "bold", VERSIONS[3], VERSIONS[3], "bold", VERSIONS[0], VERSIONS[0]]),
        ("advantage", 1.2, {}, "Qsurerareodd\\x1b!", [NOTE] + [POSITIVE] * 4),
        ("advantage", -0.5, {}, "Qsurerareodd\\x1b!", [NOTE] + [NEGATIVE] * 4),
        ("advantage", None, {}, "Qsurerareodd\\x1b!", [NOTE]),
        ("advantage", 1.2, {"orphan": "retry"}, "Qsurerareodd\\x1b!", [NOTE] + ["strike dim"] * 4),
    ],
)  # fmt: skip
def test_styles_of_tokens(
    overlay: Overlay, advantage: float | None, more: dict[str, Any], text: str, styles: list[str]
) -> None:
    shown = overlaid(sampled_call(**more), overlay, advantage)
    assert shown.plain == text
    assert [str(span.style) for span in shown.spans] == styles


def test_bars() -> None:
    bars = {1.5: "+1.5 ▇▇▇▇▇▇", -30.0: "-30 " + "░" * 12, 0.0: "+0", None: "unknown"}
    assert {advantage: advantage_bar(advantage) for advantage in bars} == {k: f"advantage {v}" for k, v in bars.items()}


def test_the_advantage_of_a_call_is_that_of_its_role_then_of_its_policy_then_of_the_episode() -> None:
    roles = {"planner": 1.0, "planner/critic": -2.0, "planner/other": 1.0, "coder": None}
    tree = episode_tree(*(sampled_call(role, role=role) for role in roles))
    member = SimpleNamespace(episode_id="e", advantage=None, advantages={"planner": 1.0, "planner/critic": -2.0})
    group: Any = SimpleNamespace(episodes=[member], advantages_note="the batch is gone")
    bars = [line.plain for line in episode_lines(tree, "advantage", group) if line.plain.startswith("advantage ")][1:]
    expected = [advantage_bar(advantage) for advantage in roles.values()]
    assert bars == [*expected[:3], f"{expected[3]}: the batch is gone"]
