"""Views for the control API: an episode with its calls and tokens, and the parts of the status."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from agentjet.gateway.observability import divergence
from agentjet.protocol import (
    REPORTED_BATCHES,
    CallView,
    EpisodeTree,
    EpisodeView,
    ScoredAnswer,
    ZeroVariance,
    batches_without_variance,
)
from agentjet.rendering import Renderer
from agentjet.swarm import Episode, Journal, SwarmState
from agentjet.timeline.tree import orphans
from agentjet.types import Call, EngineState, Message, ProcessStatus

WAITING_FOR = {
    "offline": "a start of the engine",
    "loading": "the worker, which loads the model",
    "draining": "the stop of the engine",
    "failed": "another start of the engine",
}
SHOWN_CHARACTERS = 200
"""Maximum length of a prompt or an answer in a report."""


def view(episode: Episode) -> EpisodeView:
    """Returns the view of an episode without its calls."""
    return EpisodeView(**_facts(episode))


def zero_variance(swarm: SwarmState) -> ZeroVariance | None:
    """Returns the report if the newest batches had no reward variance, with the first group of the newest batch."""
    batches = batches_without_variance(swarm.queries.recent_steps)
    newest = swarm.queries.last_batch if batches >= REPORTED_BATCHES else None
    if newest is None:
        return None
    members = [swarm.episode(episode_id) for episode_id in newest.groups[0]]
    calls = [swarm.queries.calls(member.id) for member in members]
    asked = calls[0][0].ask.messages if calls[0] else ()
    answers = Counter(
        (_answer_text(made[-1].response) if made else "", member.reward or 0.0)
        for member, made in zip(members, calls, strict=True)
    )
    return ZeroVariance(
        batches=batches,
        truncated=swarm.last_step.get("completion/truncated", 0.0),
        task_id=members[0].task_id,
        prompt=_shortened(asked[-1].content) if asked else "",
        answers=[ScoredAnswer(answer=a, reward=r, count=count) for (a, r), count in answers.most_common()],
    )


def waiting_for(swarm: SwarmState, state: EngineState, reason: str, process: str) -> str:
    """Returns the cause that training waits for, or ''. `process`: see `waiting_for_process`."""
    if swarm.store.file.refusal:
        return f"the disk. {swarm.store.file.refusal}"
    if state == "loading":
        return "; ".join(filter(None, [reason, process or WAITING_FOR[state]]))
    if state not in ("sampling", "learning"):
        return reason or WAITING_FOR[state]
    if state == "sampling" and process:
        return process
    return divergence(swarm.last_step) or swarm.queries.waiting_for()


def waiting_for_process(processes: Sequence[ProcessStatus]) -> str:
    """Returns the rank or replica without which a policy cannot learn or sample, or ''. `processes` are its own."""
    ranks = [one for one in processes if one.kind == "rank"]
    replicas = [one for one in processes if one.kind == "replica"]
    for process in ranks:
        if not process.is_ready:
            return f"{process.name}, which {process.state}"
    if not replicas and ranks:
        return "a sampler replica"
    if replicas and not any(one.is_ready for one in replicas):
        return f"a sampler replica: {replicas[0].name} {replicas[0].state}"
    return ""


def _answer_text(response: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in response.tool_calls]
    return _shortened(" ".join([response.content, *calls]).strip())


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def tree(journal: Journal, episode: Episode, renderer_of: Callable[[str], Renderer | None]) -> EpisodeTree:
    """Returns an episode with its calls, by role, in recorded order.

    `renderer_of` returns the renderer of a role's policy. Without one the texts are left out.

    Slow for long episodes: run it in a thread, with a separate journal connection.
    """
    calls = [call for call, _, _ in journal.calls(episode.id)]
    orphaned = orphans(calls, journal.undelivered(episode.id))
    roles = list(dict.fromkeys(call.role for call in calls))
    calls.sort(key=lambda call: roles.index(call.role))
    views = [_call(call, orphaned.get(call.id, ""), renderer_of(call.role)) for call in calls]
    return EpisodeTree(**_facts(episode), calls=views)


def _facts(episode: Episode) -> dict[str, object]:
    same = EpisodeView.model_fields.keys() - {"episode_id", "reason"}
    renamed = {"episode_id": episode.id, "reason": episode.reason or episode.dropped}
    return renamed | {name: getattr(episode, name) for name in same}


def _call(call: Call, orphan: str, renderer: Renderer | None) -> CallView:
    tokens = [*call.suffix, *call.completion]
    context = [None] * len(call.suffix)
    return CallView(
        call_id=call.id,
        role=call.role,
        parent=call.parent,
        kept=call.kept,
        fork=call.fork,
        retry_of=call.retry_of,
        orphan=orphan,
        after=call.ask.after,
        messages=[_message(message) for message in call.ask.messages],
        tools=[json.loads(json.dumps(tool, default=dict)) for tool in call.ask.tools],
        response=_message(call.response),
        tokens=tokens,
        texts=[renderer.token_bytes(t).decode(errors="replace") for t in tokens] if renderer is not None else [],
        mask=[0] * len(call.suffix) + [0 if orphan else 1] * len(call.completion),
        logprobs=[*context, *(call.logprobs or [None] * len(call.completion))],
        versions=[*context, *call.versions],
        temperature=call.temperature,
        finish_reason=call.finish_reason,
        created=call.created,
    )


def _message(message: Message) -> dict[str, object]:
    """Returns the non-empty fields of a message."""
    return {name: value for name, value in asdict(message).items() if value or name in ("role", "content")}
