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
from agentjet.protocol.records import REWARD, EpisodeQuery
from agentjet.swarm.journal import IS_NOT_NEEDED, Journal
from agentjet.swarm.state import NOT_NEEDED, Episode

ORDERS = {
    "newest": ("seq", "<"),
    "oldest": ("seq", ">"),
    "reward": (REWARD, ">"),
    "-reward": (REWARD, "<"),
    "-num_tokens": ("json_extract(body, '$.num_tokens')", "<"),
    "-num_calls": ("json_extract(body, '$.num_calls')", "<"),
}
"""SQL of each order, and how it goes on. Among equals, newer episodes come first."""
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
    filters = EpisodeQuery.filters()
    values = query.model_dump(exclude_defaults=True, include=filters.keys())
    conditions = ["TRUE", *(filters[name].sql for name in values)]
    if query.status == NOT_NEEDED:
        conditions = [IS_NOT_NEEDED if one == filters["status"].sql else one for one in conditions]
    elif query.status == "aborted":
        conditions.append(f"NOT {IS_NOT_NEEDED}")
    if query.sort in ("reward", "-reward"):
        conditions.append(f"{REWARD} IS NOT NULL")
    if query.text:
        values["text"] = json.dumps(query.text, ensure_ascii=False)[1:-1]  # as it stands in JSON
    return conditions, values


def _place(journal: Journal, episode_id: str, key: str) -> dict[str, Any]:
    seq = journal.known_episode(episode_id).seq
    [value] = journal.file.db.execute(f"SELECT {key} FROM episodes WHERE seq = ?", (seq,)).fetchone()
    if value is None:
        message = f"before = {episode_id!r}: it has no reward, so no page of this order follows it."
        raise InvalidRequest(message, code="invalid_value", status=422, param="before")
    return {"seq": seq, "key": value}
