"""Bodies of episodes, groups, batches and steps, from a journal alone. Needs no tokenizer and no recipe.

`batch` and `group` return an `Unfinished` view, because advantages are computed by the recipe, after the journal was
read.

Texts of tokens come from the encoded bytes in the journal (see `types.ESCAPE`). A character can span tokens: an emoji
is often two tokens of two bytes each. It is shown once, at its first token.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from agentjet.errors import NotFound
from agentjet.protocol import (
    BatchGroup,
    BatchList,
    BatchMember,
    BatchSummary,
    BatchView,
    CallRuns,
    CallView,
    EpisodeForm,
    EpisodeList,
    EpisodeQuery,
    EpisodeRuns,
    EpisodeTree,
    EpisodeView,
    GroupView,
    Kept,
    LostEpisode,
    MemberView,
    SettingChangeView,
    StepList,
    flatten,
)
from agentjet.swarm import EpisodeRecord, Journal
from agentjet.swarm.facts import Advantages, Members, is_uniform
from agentjet.swarm.journal import BatchRecord, unpack_sets
from agentjet.timeline.forest import num_members
from agentjet.types import ESCAPE, ESCAPED_BYTE, SOLE_POLICY, Call, GroupState, Message

View = TypeVar("View")
Value = TypeVar("Value")
Leases = Mapping[str, float]
"""The time at which the lease of each live episode ends."""
MOST_LOST = 1000
"""Unscored and dropped episodes that are listed with a batch."""
_UTF8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Unfinished(Generic[View]):
    """A view that lacks its advantages."""

    advantages: Members | Advantages
    """The episodes whose advantages it needs, or a note."""
    finish: Callable[[Advantages], View]


def steps(journal: Journal, after: int | None, limit: int, names: Collection[str] = ()) -> StepList:
    """Returns steps by column: see `Journal.steps`. A step of another recipe may lack metrics."""
    found = journal.steps(after, limit, names)
    metrics = dict.fromkeys(name for step in found for name in step.metrics)
    return StepList(
        versions=[step.version for step in found],
        times=[step.composed for step in found],
        metrics={name: [step.metrics.get(name) for step in found] for name in metrics},
    )


# ---- episodes --------------------------------------------------------------------------------------------------------


def view(episode: EpisodeRecord, *, expires_at: float | None = None) -> EpisodeView:
    """Returns the view of an episode without its calls. `expires_at` is the end of the lease of a live one."""
    return EpisodeView(**_facts(episode), expires_at=expires_at)


def _facts(episode: EpisodeRecord) -> dict[str, Any]:
    same = EpisodeView.model_fields.keys() - {"episode_id", "reason", "expires_at"}
    renamed = {"episode_id": episode.id, "reason": episode.reason or episode.dropped}
    return renamed | {name: getattr(episode, name) for name in same}


def episodes(journal: Journal, query: EpisodeQuery, leases: Leases) -> EpisodeList:
    """Returns a page of episodes. Raises `NotFound` or `InvalidRequest` for a wrong `before`."""
    page = journal.find_episodes(query)
    views = [view(episode, expires_at=leases.get(episode.id)) for episode in page.episodes]
    return EpisodeList(episodes=views, next=page.next, total=page.total)


def episode(journal: Journal, episode_id: str, form: EpisodeForm, leases: Leases) -> EpisodeTree | EpisodeRuns:
    """Returns an episode with its calls, by role, in recorded order. Raises `NotFound`. Slow for long episodes."""
    found = journal.known_episode(episode_id)
    kept, shown = _shown_calls(journal, found)
    common = {**_facts(found), "expires_at": leases.get(episode_id), "kept": kept}
    if form == "runs":
        return EpisodeRuns(**common, calls=list(map(_call_runs, shown)))
    return EpisodeTree(**common, calls=list(map(_call_view, shown)))


@dataclass(frozen=True, slots=True)
class _ShownCall:
    """A call, why it is not trained, and the texts of its tokens."""

    call: Call
    orphan: str
    texts: Sequence[str]


def _shown_calls(journal: Journal, episode: EpisodeRecord) -> tuple[Kept, list[_ShownCall]]:
    calls, names, orphaned = journal.calls(episode.id), journal.control_tokens(), journal.orphans(episode.id)
    shown = [
        _ShownCall(
            call, orphaned.get(call.id, ""), token_texts([*suffix, *completion], control_names(names, call.role))
        )
        for call, suffix, completion in calls
    ]
    roles = list(dict.fromkeys(one.call.role for one in shown))
    is_gone = episode.is_settled and episode.num_calls and not calls
    return "gone" if is_gone else "journal", sorted(shown, key=lambda one: roles.index(one.call.role))


def _call_view(shown: _ShownCall) -> CallView:
    call = shown.call
    context = [None] * len(call.suffix)
    return CallView(
        **_facts_of_call(shown),
        tokens=[*call.suffix, *call.completion],
        texts=list(shown.texts),
        mask=[0] * len(call.suffix) + [0 if shown.orphan else 1] * len(call.completion),
        logprobs=[*context, *_logprobs(call)],
        versions=[*context, *call.versions],
    )


def _call_runs(shown: _ShownCall) -> CallRuns:
    call, sampled = shown.call, len(shown.call.completion)
    return CallRuns(
        **_facts_of_call(shown),
        text="".join(shown.texts),
        lengths=[utf16_length(text) for text in shown.texts],
        num_context=len(call.suffix),
        logprobs=[None if value is None else round(value, 3) for value in _logprobs(call)],
        mask=[(0 if shown.orphan else 1, sampled)] if sampled else [],
        versions=runs(call.versions),
        allowed=runs(map(num_members, unpack_sets(call.support, sampled))),
    )


def _logprobs(call: Call) -> Sequence[float | None]:
    return call.logprobs or [None] * len(call.completion)


def _facts_of_call(shown: _ShownCall) -> dict[str, Any]:
    call = shown.call
    return {
        "call_id": call.id,
        "role": call.role,
        "parent": call.parent,
        "kept": call.kept,
        "fork": call.fork,
        "retry_of": call.retry_of,
        "orphan": shown.orphan,
        "after": call.ask.after,
        "messages": [_message(message) for message in call.ask.messages],
        "tools": [json.loads(json.dumps(tool, default=dict)) for tool in call.ask.tools],
        "response": _message(call.response),
        "temperature": call.temperature,
        "finish_reason": call.finish_reason,
        "created": call.created,
        "seconds": call.seconds,
    }


def _message(message: Message) -> dict[str, object]:
    return {name: value for name, value in asdict(message).items() if value or name in ("role", "content")}


# ---- batches and groups ----------------------------------------------------------------------------------------------


def batches(journal: Journal, before: int | None, limit: int) -> BatchList:
    found = journal.batch_records(before, limit + 1)
    page = [
        BatchSummary(
            id=record.id,
            state=record.state,
            composed=record.composed,
            groups=len(record.groups),
            episodes=sum(map(len, record.groups)),
            reward_mean=(record.metrics or {}).get("reward/mean"),
        )
        for record in found[:limit]
    ]
    return BatchList(batches=page, next=page[-1].id if len(found) > len(page) else None)


def batch(journal: Journal, batch_id: int) -> Unfinished[BatchView]:
    newest = journal.batch_records(min(batch_id + 1, 2**63 - 1), 2)  # SQLite has no larger integers.
    if not newest or newest[0].id != batch_id:
        raise NotFound(f"There is no batch {batch_id} in this run.", code="batch_not_found")
    record, before = newest[0], newest[1] if len(newest) > 1 else None
    groups, policies = journal.members_of(record.groups), journal.origin.named
    uniform = [
        all(one.reward is not None for one in members) and is_uniform(journal, members, policies, of_turns=False)
        for members in groups
    ]
    dropped = _lost_episodes(journal, record, before)

    def finish(found: Advantages) -> BatchView:
        return BatchView(
            id=record.id,
            state=record.state,
            composed=record.composed,
            metrics=dict(record.metrics or {}),
            groups=[_group(members, same, found) for members, same in zip(groups, uniform, strict=True) if members],
            dropped=dropped,
            job_changes=[] if before is None else _job_changes(before, record),
            advantages_note=found.note,
        )

    return Unfinished(members_with_recipe(journal, record, groups), finish)


def _group(members: Sequence[EpisodeRecord], zero_variance: bool, found: Advantages) -> BatchGroup:
    first = members[0]
    return BatchGroup(
        id=first.group_id,
        task_set=first.task_set,
        task_id=first.task_id,
        zero_variance=zero_variance,
        members=[BatchMember(episode_id=one.id, reward=one.reward, **_advantage(found, one)) for one in members],
    )


def _lost_episodes(journal: Journal, record: BatchRecord, before: BatchRecord | None) -> list[LostEpisode]:
    """Training episodes that ended while the batch was filled and never train. The newest `MOST_LOST`, newest first."""
    start = 0.0 if before is None else before.composed
    longest = float(record.job.get("max_episode_seconds", 0.0))
    return [
        LostEpisode(
            episode_id=one.id,
            task_set=one.task_set,
            task_id=one.task_id,
            status=one.status,
            reason=one.reason or one.dropped,
        )
        for one in journal.never_trained(start, record.composed, longest, MOST_LOST)
    ]


def _job_changes(before: BatchRecord, after: BatchRecord) -> list[SettingChangeView]:
    """The job settings that differ. One that a batch lacks is None there."""
    old, new = dict(flatten(before.job)), dict(flatten(after.job))
    return [
        SettingChangeView(key=key, before=old.get(key), after=new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


def group(journal: Journal, group_id: int, leases: Leases) -> Unfinished[GroupView]:
    members = journal.episodes_of_group(group_id)
    if not members:
        raise NotFound(f"There is no group {group_id} in this run.", code="group_not_found")
    first = members[0]
    state: GroupState = "dropped"
    reason = next((episode.dropped for episode in members if episode.dropped), "")
    size, in_batch = 0, None
    of: Members | Advantages = Advantages({}, "the group was dropped")
    filling = next((one for one in journal.groups() if one.id == group_id), None)
    if filling is not None:
        settings = journal.job_settings()
        state, reason = filling.state, filling.reason
        size = filling.size or (settings.job.group_size if settings is not None else 0)
        of = Advantages({}, "the group is in no batch yet")
    elif not reason and (in_batch := _batch_of(journal, members)) is not None:
        state, of = "batched", members_with_recipe(journal, in_batch, journal.members_of(in_batch.groups))

    def finish(found: Advantages) -> GroupView:
        return GroupView(
            id=group_id,
            name=first.group,
            task_set=first.task_set,
            task_id=first.task_id,
            client_id=first.client_id,
            code_version=first.code_version,
            state=state,
            reason="no_members" if state == "dropped" and not reason else reason,
            size=size,
            batch=None if in_batch is None else in_batch.id,
            episodes=[
                MemberView(**_facts(one), expires_at=leases.get(one.id), **_advantage(found, one)) for one in members
            ],
            advantages_note=found.note,
        )

    return Unfinished(of, finish)


def _batch_of(journal: Journal, episodes: Sequence[EpisodeRecord]) -> BatchRecord | None:
    """The batch that trained episodes of a group, or the newest one if it has some."""
    trained = next((episode.trained_in for episode in episodes if episode.trained_in is not None), None)
    ids = {episode.id for episode in episodes}
    newest = journal.batch_records(None if trained is None else trained + 1, 1)
    return next((one for one in newest if any(ids.intersection(members) for members in one.groups)), None)


def members_with_recipe(
    journal: Journal, record: BatchRecord, groups: Sequence[Sequence[EpisodeRecord]]
) -> Members | Advantages:
    """The members of a batch, with the recipe of the job it was composed with. A note if members are gone."""
    if sum(map(len, groups)) < sum(map(len, record.groups)):
        return Advantages({}, "the journal no longer has all episodes of the batch")
    return Members(groups, journal.origin.named, record.job.get("recipe"), journal.stored_batch(record.id))


def _advantage(found: Advantages, episode: EpisodeRecord) -> dict[str, Any]:
    """Returns the fields about the advantage of an episode: one number, or those by policy and role."""
    of = found.of.get(episode.id, {})
    if of.keys() == {""}:
        return {"advantage": of[""]}
    return {"advantages": {role: value for role, value in of.items() if role}}


# ---- texts of tokens -------------------------------------------------------------------------------------------------


def token_texts(pieces: Sequence[bytes], control: Mapping[int, str]) -> list[str]:
    """Returns the text of each token. The tokens that only continue a character of an earlier one have none.

    `pieces` is the encoded text of each token. `control` has the names of control tokens; others are shown as `<id>`.
    Bytes that are not UTF-8 become U+FFFD.
    """
    decoder = _UTF8("replace")
    texts: list[str] = []
    start = 0  # The token that began the incomplete character.
    for token, piece in enumerate(pieces):
        was_incomplete = bool(decoder.getstate()[0])
        text = decoder.decode(_displayed(piece, control))
        began = token if decoder.getstate()[0] and (text or not was_incomplete) else start
        if was_incomplete and text:
            texts[start] += text[0]
            text = text[1:]
        start = began
        texts.append(text)
    if texts:
        texts[start] += decoder.decode(b"", final=True)
    return texts


def control_names(names: Mapping[str, Mapping[int, str]], role: str) -> Mapping[int, str]:
    return names.get(role.partition("/")[0]) or names.get(SOLE_POLICY, {})


def utf16_length(text: str) -> int:
    """Returns the number of UTF-16 code units, by which JavaScript counts."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def runs(values: Iterable[Value]) -> list[tuple[Value, int]]:
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def _displayed(piece: bytes, control: Mapping[int, str]) -> bytes:
    if not piece.startswith(ESCAPE) or len(piece) != len(ESCAPED_BYTE) or piece == ESCAPED_BYTE:
        return piece.replace(ESCAPED_BYTE, ESCAPE)
    token_id = int.from_bytes(piece[1:], "big")
    return control.get(token_id, f"<{token_id}>").encode()
