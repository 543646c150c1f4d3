"""Rows of the journal as values, and values as what its columns hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from agentjet.swarm.records import Episode
from agentjet.types import Ask, Call, Message, ToolCall

EPISODES_FROM = """
FROM episodes e
LEFT JOIN finishes f ON f.episode_id = e.id
LEFT JOIN aborts a ON a.episode_id = e.id
LEFT JOIN promises p ON p.episode_id = e.id
LEFT JOIN groups g ON g.id = e.group_id
LEFT JOIN batch_members m ON m.episode_id = e.id
LEFT JOIN steps s ON s.batch_id = m.batch_id
LEFT JOIN notes n ON n.episode_id = e.id
"""

STATUS = """
CASE WHEN f.episode_id IS NOT NULL THEN 'finished' WHEN a.episode_id IS NOT NULL THEN a.status
    WHEN p.episode_id IS NOT NULL THEN 'prepared' ELSE 'live' END
"""

SELECT_EPISODES = f"""
SELECT e.id, e.seq, e.client_id, e.task_id, e.task_set, e.group_name, e.group_id, e.mode, e.policy_version, e.begun,
    {STATUS}, COALESCE(f.ended, a.ended),
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.reward, p.reward) END,
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.by_role, p.by_role, '{{}}') ELSE '{{}}' END,
    CASE WHEN a.episode_id IS NULL THEN COALESCE(f.metrics, p.metrics, '{{}}') ELSE '{{}}' END,
    COALESCE(a.reason, ''),
    COALESCE(f.num_calls, a.num_calls, (SELECT COUNT(*) FROM calls c WHERE c.episode_id = e.id)),
    COALESCE(f.num_tokens, a.num_tokens,
        (SELECT SUM(length(c.completion)) / 4 FROM calls c WHERE c.episode_id = e.id AND c.untrained = ''), 0),
    s.batch_id,
    CASE WHEN f.episode_id IS NOT NULL AND g.state = 'dropped' THEN g.reason ELSE '' END,
    e.code_version, e.team, e.at_version, e.temperature, e.instance_id,
    COALESCE(n.noted, '{{}}'), COALESCE(n.refused, '{{}}')
{EPISODES_FROM}
"""

SELECT_CALLS = """
SELECT id, episode_id, role, parent, kept, suffix, completion, logprobs, versions, temperature, finish_reason, response,
    prompt_key, created, pieces, piece_lengths, ask, fork, retry_of, context, allowed, untrained
FROM calls
"""

_EPISODE_FIELDS = [field.name for field in fields(Episode)]

RecordedCall = tuple[Call, tuple[bytes, ...], tuple[bytes, ...]]
"""A call with the encoded bytes of each token of its suffix and of its completion."""


def read_episode(row: Sequence[Any]) -> Episode:
    """From a row of `SELECT_EPISODES`."""
    values = [*row[:13], json.loads(row[13]), json.loads(row[14]), *row[15:-2], *map(json.loads, row[-2:])]
    return Episode(**dict(zip(_EPISODE_FIELDS, values, strict=True)))


def read_call(row: Sequence[Any]) -> RecordedCall:
    """From a row of `SELECT_CALLS`."""
    suffix, completion = unpack_ints(row[5]), unpack_ints(row[6])
    call = Call(
        id=row[0],
        episode_id=row[1],
        role=row[2],
        parent=row[3],
        kept=row[4],
        suffix=suffix,
        completion=completion,
        logprobs=tuple(np.frombuffer(row[7], "<f8").tolist()),
        versions=unpack_ints(row[8]),
        temperature=row[9],
        finish_reason=row[10],
        response=_message(json.loads(row[11])),
        prompt_key=row[12],
        created=row[13],
        ask=_ask(json.loads(row[16])),
        fork=row[17],
        retry_of=row[18],
        context=row[19],
        allowed=row[20],
        untrained=row[21],
    )
    pieces: list[bytes] = []
    start = 0
    for length in unpack_ints(row[15]):
        pieces.append(row[14][start : start + length])
        start += length
    return call, tuple(pieces[: len(suffix)]), tuple(pieces[len(suffix) :])


def _message(value: Mapping[str, Any]) -> Message:
    return Message(**{**value, "tool_calls": tuple(ToolCall(**tool_call) for tool_call in value["tool_calls"])})


def _ask(value: Mapping[str, Any]) -> Ask:
    if not value:
        return Ask()
    messages, tools = tuple(map(_message, value["messages"])), tuple(value["tools"])
    return Ask(messages, value["after"], tools, value["fingerprint"], value.get("instructed", False))


def to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def pack_ints(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def unpack_ints(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())


def pack_floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, "<f8").tobytes()
