"""`agentjet episodes export`: each conversation of an episode and role once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from agentjet.client import Swarm
from agentjet.client.report import rows
from agentjet.errors import ConfigError, NotFound
from agentjet.protocol import CallView, EpisodeTree
from agentjet.types import Reward
from tests.cli.test_commands import at, run
from tests.server.serving import TOKEN, Served


def play(swarm: Swarm, task: str, reward: float | None, *, mode: Any = "train") -> str:
    """An episode of two turns and a vote on the first."""
    with swarm.episode(task, mode=mode) as episode:
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
        if reward is None:
            episode.abort("over")
        else:
            episode.finish(Reward(reward, text=f"{reward:g} for {task}"))
        return episode.id


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_conversations_with_rewards(served: Served, tmp_path: Path) -> None:
    with Swarm(served.url, TOKEN) as swarm:
        first = play(swarm, "a", 1.0)
        play(swarm, "b", 0.25, mode="eval")
        play(swarm, "c", None)
    out = tmp_path / "all.jsonl"
    assert "conversations: 4, of episodes: 2, in" in run("episodes", "export", str(out), *at(served))
    found = read(out)
    assert [(row["task_id"], row["timeline"], row["reward"]) for row in found] == [
        ("a", 0, 1.0), ("a", 1, 1.0), ("b", 0, 0.25), ("b", 1, 0.25),
    ]  # fmt: skip
    assert found[0] | {"metrics": {}} == {
        "episode_id": first,
        "role": "",
        "timeline": 0,
        "task_id": "a",
        "task_set": "",
        "group": "a",
        "mode": "train",
        "status": "finished",
        "reward": 1.0,
        "metrics": {},
        "reward_text": "1 for a",
        "policy_versions": [0],
        "trained_in": None,
        "client_id": found[0]["client_id"],
        "code_version": "",
        "messages": [
            {"role": "user", "content": "What is 1 + 2"},
            {"role": "assistant", "content": "1 + 2 = 3"},
            {"role": "user", "content": "What is 3 + 4"},
            {"role": "assistant", "content": "3 + 4 = 7"},
        ],
        "tools": "[]",
    }
    assert out.stat().st_mode & 0o777 == 0o600
    columns = [[(key, type(value)) for key, value in row.items() if value is not None] for row in found]
    assert all(row == columns[0] for row in columns), "readers of JSON lines take the columns from the first row"
    run("episodes", "export", str(tmp_path / "good.jsonl"), "--min-reward", "0.5", *at(served))
    assert read(tmp_path / "good.jsonl") == found[:2]
    run("episodes", "export", str(tmp_path / "eval.jsonl"), "--mode", "eval", *at(served))
    assert read(tmp_path / "eval.jsonl") == found[2:]
    run("episodes", "export", str(tmp_path / "lost.jsonl"), "--status", "aborted", *at(served))
    assert {(row["task_id"], row["reward"]) for row in read(tmp_path / "lost.jsonl")} == {("c", None)}


def test_what_cannot_be_exported(served: Served, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(ConfigError, match="exists: move it away"):
        run("episodes", "export", str(tmp_path / "there"), *at(served))
    with pytest.raises(ConfigError, match="nothing to export: of 0 episodes"):
        run("episodes", "export", str(tmp_path / "none.jsonl"), *at(served))
    assert [path.name for path in tmp_path.iterdir() if "none" in path.name] == []
    with Swarm(served.url, TOKEN) as swarm, pytest.raises(NotFound):
        swarm.episodes(before="nothing")


def test_messages_that_a_checkpoint_covers_are_gone(served: Served, tmp_path: Path) -> None:
    with Swarm(served.url, TOKEN) as swarm:
        play(swarm, "old", 1.0, mode="eval")
        store = served.run.gateway.swarm.store
        store.transcript_bytes = 0
        for rows in store.unneeded():
            store.journal.delete(rows)
        play(swarm, "new", 1.0, mode="eval")
    out = tmp_path / "out.jsonl"
    assert "conversations: 2, of episodes: 1, in" in (said := run("episodes", "export", str(out), *at(served)))
    assert "1 more have no messages, since a checkpoint covers them" in said
    assert {row["task_id"] for row in read(out)} == {"new"}


def test_pages(served: Served) -> None:
    with Swarm(served.url, TOKEN) as swarm:
        ids = [swarm.begin(f"t{i}", mode="eval").id for i in range(5)]
        page = swarm.episodes(2)
        assert [episode.episode_id for episode in page.episodes] == ids[:2:-1]
        rest = swarm.episodes(20, before=ids[3])
        assert [episode.episode_id for episode in rest.episodes] == ids[2::-1]


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
