"""Episodes as a data set: one row for each conversation that an episode and role held, with its reward.

A conversation ends with a call whose answer no later call sends back. Answers that did not reach the agent are left
out. Messages have the shape of OpenAI's chat format, which `transformers` chat templates and `trl` read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentjet.protocol import CallView, EpisodeTree


def rows(episode: EpisodeTree) -> list[dict[str, Any]]:
    """The conversations of an episode, in the order their last calls were made; none if its calls are not kept.

    Every row has the same keys, and a key always has the same type: `tools` is JSON text, since schemas differ.
    """
    calls = {call.call_id: call for call in episode.calls}
    continued = {call.after for call in episode.calls}
    found = []
    timelines: dict[str, int] = {}
    for call in episode.calls:
        if call.orphan or call.call_id in continued:
            continue
        path = _path(calls, call)
        found.append(
            {
                "episode_id": episode.episode_id,
                "role": call.role,
                "timeline": timelines.get(call.role, 0),
                "task_id": episode.task_id,
                "task_set": episode.task_set,
                "group": episode.group,
                "mode": episode.mode,
                "status": episode.status,
                "reward": episode.by_role.get(call.role, episode.reward),
                "metrics": dict(episode.metrics),
                "policy_versions": sorted({v for one in path for v in one.versions if v is not None}),
                "trained_in": episode.trained_in,
                "client_id": episode.client_id,
                "code_version": episode.code_version,
                "messages": [_chat(message) for one in path for message in (*one.messages, one.response)],
                "tools": json.dumps(path[0].tools, ensure_ascii=False),
            }
        )
        timelines[call.role] = timelines.get(call.role, 0) + 1
    return found


def _path(calls: Mapping[str, CallView], last: CallView) -> list[CallView]:
    """The calls of a conversation, first to last."""
    path = [last]
    while path[0].after is not None:
        path.insert(0, calls[path[0].after])
    return path


def _chat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's chat format; reasoning is `reasoning_content`."""
    chat: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning"):
        chat["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        chat["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in message["tool_calls"]
        ]
    return chat | {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
