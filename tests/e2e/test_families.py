"""Tiny models of five families train an agent with a tool: a real server, OpenAI's SDK, forced calls.

1. Calls in the own syntax of each family come back as tool calls with arguments by their schema.
2. No turn forks: a turn that follows has the tokens that were sampled, so an episode is one timeline.
3. The batch trains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compute.every_architecture import make_any
from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]

FAMILIES = {
    "Qwen3.5": ("AutoModelForImageTextToText", "qwen3_5", "qwen3_5", "tools: qwen3-coder, reasoning: <think>"),
    "gpt-oss": (
        "AutoModelForCausalLM",
        "gpt_oss",
        "gpt_oss",
        "tools: harmony, reasoning: <|channel|>analysis",
    ),
    "GLM": ("AutoModelForCausalLM", "glm4_moe_lite", "glm4_7", "tools: glm-4.7, reasoning: <think>"),
    "Kimi": ("AutoModelForCausalLM", "deepseek_v3", "kimi_k2", "tools: kimi-k2, reasoning: <think>"),
    "Gemma": ("AutoModelForImageTextToText", "gemma4", "gemma4", "tools: gemma4, reasoning: <|channel>thought"),
}
"""Class and type of the model, template, and what the server prints."""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks into a room",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"type": "integer", "minimum": 0, "maximum": 9},
                "way": {"type": "string", "enum": ["left", "right"]},
                "more": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False},
            },
            "required": ["room", "way"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "look"}}


def play(server: Server, task: str) -> None:
    """Plays one episode: two turns of forced calls with results, then an answer."""
    episode = server.begin(task_id=task)
    messages: list[Any] = [{"role": "user", "content": f"Find {task}"}]
    with server.agent(episode) as client:
        for choice in ("required", NAMED, "auto"):
            answer = client.chat.completions.create(
                model=episode["model"], messages=messages, tools=[TOOL], tool_choice=choice
            ).choices[0]
            message = answer.message
            messages.append(message.model_dump(exclude_none=True))
            if choice == "auto":
                break
            assert answer.finish_reason == "tool_calls" and message.tool_calls, answer
            for call in message.tool_calls:
                assert call.type == "function" and call.function.name == "look"
                arguments = json.loads(call.function.arguments)
                assert arguments["room"] in range(10) and arguments["way"] in ("left", "right"), arguments
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Room {arguments['room']}: ø"})
    server.post(f"/episodes/{episode['episode_id']}/finish", reward=float(arguments["way"] == "left"))


@pytest.mark.parametrize("history", ["template", "as_sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_trains_an_agent_with_a_tool_without_a_fork(family: str, history: str, tmp_path: Path) -> None:
    auto, model_type, template, printed = FAMILIES[family]
    model = make_any(tmp_path / "model", auto, model_type, template=template, favoured=5.0)
    settings = {"job__history": history, "job__max_tokens": 400, "model__context_length": 4096}
    with Server(model, tmp_path / "run", **settings, sampler__cache_tokens=16384) as server:
        assert printed in server.output
        for member in range(4):
            play(server, f"t{member // 2}")
        server.until(lambda: server.get("/status")["policy_version"] == 1)
        metrics = {name: values[-1] for name, values in server.get("/steps")["metrics"].items()}
        forks = {name: value for name, value in metrics.items() if name.startswith("forest/forks_") and value}
        assert not forks, forks
        assert metrics["episode/timelines"] == 1 and metrics["episode/num_turns"] == 3
        assert metrics["forest/drift"] == 0 and metrics["forest/orphans"] == 0
