"""`agentjet episodes export`: each conversation of an episode and role once. `tests.locks` has exported files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from agentjet.client import Swarm
from agentjet.client.report import rows
from agentjet.errors import ConfigError
from agentjet.protocol import CallView, EpisodeTree
from agentjet.types import Reward
from tests.cli.test_commands import at, run
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
    assert "1 more have no messages, since a checkpoint covers them" in said
    found = read(out)
    assert [(row["task_id"], row["timeline"], row["reward"]) for row in found] == [("new", 0, 1.0), ("new", 1, 1.0)]
    columns = [[(key, type(value)) for key, value in row.items()] for row in found]
    assert columns[0] == columns[1], "readers of JSON lines take the columns from the first row"
    assert out.stat().st_mode & 0o777 == 0o600


def call(call_id: str, after: str | None, **more: Any) -> CallView:
    fields: dict[str, Any] = {
        "call_id": call_id, "role": "", "parent": None, "kept": 0, "fork": "", "retry_of": None, "orphan": "",
        "after": after, "messages": [{"role": "user", "content": f"to {call_id}"}], "tools": [],
        "response": {"role": "assistant", "content": call_id}, "tokens": [], "texts": [], "mask": [], "logprobs": [],
        "versions": [None, 3], "temperature": 1.0, "finish_reason": "stop", "created": 0.0,
    }  # fmt: skip
    return CallView(**(fields | more))


def test_roles_tools_and_what_nobody_received() -> None:
    tool_call = {"id": "c1", "name": "add", "arguments": '{"a": 1}'}
    tree = EpisodeTree(
        episode_id="e", status="finished", mode="train", task_id="t", task_set="", group="t", client_id="c",
        policy_version=3, reward=1.0, by_role={"critic": 0.5}, calls=[
            call("one", None, tools=[{"type": "function"}],
                 response={"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [tool_call]}),
            call("lost", "one", orphan="undelivered"),
            call("two", "one", messages=[{"role": "tool", "content": "2", "tool_call_id": "c1"}], versions=[4]),
            call("word", None, role="critic"),
        ],
    )  # fmt: skip
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
