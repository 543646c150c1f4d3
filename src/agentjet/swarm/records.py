"""Records of a run for people: steps, and episodes by filter. Reads a journal and changes nothing.

Pages are found by key, not by offset, so a page costs the same wherever it is. Filters without an index read rows until
the page is full.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from agentjet.errors import InvalidRequest
from agentjet.protocol import EpisodeQuery
from agentjet.swarm.journal import IS_NOT_NEEDED, Journal
from agentjet.swarm.state import NOT_NEEDED, Episode

EQUAL = {
    "mode": "body ->> 'mode'",
    "task_set": "body ->> 'task_set'",
    "task": "body ->> 'task_id'",
    "group": "body ->> 'group'",
    "group_id": "json_extract(body, '$.group_id')",
    "client": "body ->> 'client_id'",
    "code_version": "body ->> 'code_version'",
}
"""Filters for one value, and its SQL. That of `group_id` is the indexed one."""
REWARD = "json_extract(body, '$.reward')"
VERSION = "json_extract(body, '$.policy_version')"
ORDERS = {
    "newest": ("seq", "<"),
    "oldest": ("seq", ">"),
    "reward": (REWARD, ">"),
    "-reward": (REWARD, "<"),
    "-num_tokens": ("json_extract(body, '$.num_tokens')", "<"),
    "-num_calls": ("json_extract(body, '$.num_calls')", "<"),
}
"""SQL of each order, and how it goes on. Among equals, newer episodes come first."""


HAS_TEXT = (
    "(instr(body, :text) AND instr(body -> '$.reward_text', :text) OR "
    "EXISTS (SELECT 1 FROM calls WHERE calls.episode_id = episodes.id AND instr(calls.body, :text) AND "
    "(instr(calls.body -> '$[0].ask.messages', :text) OR instr(calls.body -> '$[0].response', :text))))"
)
"""SQL of `text`. The first condition of each part is the cheap one: most rows are not parsed."""
METRICS = TypeAdapter(dict[str, Any])
"""Reads the metrics of a step in a quarter of the time of `json.loads`."""


class Step(NamedTuple):
    """A learned batch."""

    version: int
    """The policy version after it."""
    composed: float
    """When its batch was composed."""
    metrics: dict[str, float]


def steps(journal: Journal, after: int | None, limit: int, names: Collection[str] = ()) -> list[Step]:
    """The oldest `limit` steps to versions above `after`, or the newest `limit`, in order.

    `names` are the metrics to return; empty for all.
    """
    order = "DESC" if after is None else "ASC"
    rows = journal.file.db.execute(
        "SELECT id + 1, json_extract(body, '$.composed'), metrics FROM batches "
        f"WHERE metrics IS NOT NULL AND id >= ? ORDER BY id {order} LIMIT ?",
        (0 if after is None else after, limit),
    ).fetchall()
    found = []
    for version, composed, metrics in sorted(rows):
        values = METRICS.validate_json(metrics)
        found.append(Step(version, composed, {n: v for n, v in values.items() if n in names} if names else values))
    return found


class Page(NamedTuple):
    """Episodes in the order that was asked for."""

    episodes: Sequence[Episode]
    next: str | None
    """The id of the last one if others follow, else None."""
    total: int | None
    """Number of matches on all pages, if asked for."""


def find_episodes(journal: Journal, query: EpisodeQuery) -> Page:
    """The episodes that match every filter of a query.

    Raises `NotFound` if `before` does not exist, and `InvalidRequest` if it has no place in the order.
    """
    conditions, values = _conditions(query)
    key, direction = ORDERS[query.sort]
    total = None
    if query.count:
        counting = f"SELECT count(*) FROM episodes WHERE {' AND '.join(conditions)}"
        total = journal.file.db.execute(counting, values).fetchone()[0]
    if query.before:
        conditions.append(
            f"seq {direction} :seq" if key == "seq" else f"({key} {direction} :key OR {key} = :key AND seq < :seq)"
        )
        values |= _place(journal, query.before, key)
    order = f"{key} {'DESC' if direction == '<' else 'ASC'}" + ("" if key == "seq" else ", seq DESC")
    rows = journal.file.db.execute(
        f"SELECT body FROM episodes WHERE {' AND '.join(conditions)} ORDER BY {order} LIMIT :limit",
        values | {"limit": query.limit + 1},
    )
    found = [journal.episode_of(body) for (body,) in rows]
    page = found[: query.limit]
    return Page(page, page[-1].id if len(found) > len(page) else None, total)


def _conditions(query: EpisodeQuery) -> tuple[list[str], dict[str, Any]]:
    """The SQL of the filters, and their values."""
    values = query.model_dump(exclude_defaults=True, exclude={"limit", "before", "sort", "count"})
    conditions = ["TRUE", *(f"{EQUAL[name]} = :{name}" for name in values if name in EQUAL)]
    if query.status == NOT_NEEDED:
        conditions.append(IS_NOT_NEEDED)
    elif query.status is not None:
        conditions.append("status = :status")
        conditions += [f"NOT {IS_NOT_NEEDED}"] if query.status == "aborted" else []
    if query.sort in ("reward", "-reward"):
        conditions.append(f"{REWARD} IS NOT NULL")
    bounds = {"min_version": f"{VERSION} >=", "max_version": f"{VERSION} <="}
    bounds |= {"min_reward": f"{REWARD} >=", "max_reward": f"{REWARD} <="}
    conditions += [f"{bound} :{name}" for name, bound in bounds.items() if name in values]
    if query.batch is not None:
        conditions.append(
            "id IN (SELECT member.value FROM batches, json_each(batches.body, '$.groups') AS members, "
            "json_each(members.value) AS member WHERE batches.id = :batch)"
        )
    if query.reason:
        conditions.append("(instr(body ->> 'reason', :reason) OR instr(body ->> 'dropped', :reason))")
    if query.search:
        conditions.append(
            "(instr(body ->> 'task_id', :search) OR instr(body ->> 'group', :search) OR instr(id, :search))"
        )
    if query.text:
        values["text"] = json.dumps(query.text, ensure_ascii=False)[1:-1]  # as it stands in JSON
        conditions.append(HAS_TEXT)
    return conditions, values


def _place(journal: Journal, episode_id: str, key: str) -> dict[str, Any]:
    seq = journal.known_episode(episode_id).seq
    [value] = journal.file.db.execute(f"SELECT {key} FROM episodes WHERE seq = ?", (seq,)).fetchone()
    if value is None:
        message = f"before = {episode_id!r}: it has no reward, so no page of this order follows it."
        raise InvalidRequest(message, code="invalid_value", status=422, param="before")
    return {"seq": seq, "key": value}
