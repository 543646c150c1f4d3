"""Teachers of a run: contexts that only a teacher sees, and the grades of endpoints.

A recipe with a context returns, for each episode and role of a batch, a text that only the teacher sees. The
conversation is then rendered again, with the text below the first message of the user. Earlier answers keep their
sampled tokens.

An endpoint is asked once for each path of the forest. Invariants:

* a batch is learned with all its grades, or not yet: an endpoint that does not answer is asked again for ever;
* grades are in `grades/` on disk before the first operation of the batch. A replay reads them there;
* an endpoint of another model or tokenizer is refused, and nothing is learned from its answer. Each batch checks it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentjet.config import JobConfig
from agentjet.errors import ConfigError, ContextOverflow, InvalidRequest, Unavailable
from agentjet.front.prompts import prepare_prompt
from agentjet.recipes import hooks
from agentjet.recipes.recipe import Attempt, Teaching
from agentjet.rendering import Renderer
from agentjet.server.checkpoints import flush
from agentjet.server.endpoints import Endpoints, Graded, check_settings
from agentjet.server.monitoring import Activity
from agentjet.server.run_policies import RunPolicies
from agentjet.swarm import Batch, EpisodeRecord, Journal, SwarmState
from agentjet.swarm.facts import call_rows, load_trees, trained_calls
from agentjet.swarm.state import reward_of
from agentjet.timeline import ConversationTree
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, ancestors, build_forest
from agentjet.types import Call, Conversation, Message, metrics_prefix, policy_of

log = logging.getLogger(__name__)
Result = TypeVar("Result")
AskText = Callable[[Attempt, Sequence[Attempt]], str | None]

# ---- contexts --------------------------------------------------------------------------------------------------------


class _Spoken(NamedTuple):
    """The conversation of a role of an episode."""

    tree: ConversationTree
    calls: list[Call]
    """Those that train."""
    attempt: Attempt


def with_text(conversation: Conversation, text: str) -> Conversation:
    """Returns a conversation with a text below its first message of the user. Raises `InvalidRequest` without one."""
    messages = list(conversation.messages)
    at = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if at is None:
        raise InvalidRequest("it has no message of the user, below which the teacher would see the text")
    messages[at] = replace(messages[at], content=f"{messages[at].content}\n\n{text}")
    return replace(conversation, messages=tuple(messages))


def taught_forest(
    journal: Journal,
    batch: Batch,
    episodes: Mapping[str, EpisodeRecord],
    policy: str,
    policies: Sequence[str],
    renderer: Renderer,
    ask: AskText,
) -> tuple[Forest, dict[str, str]]:
    """Returns the targets of a policy in the context that the teacher sees, and the reason for each call that has none
    although `ask` returned a text. The column `target` counts those of the forest of `swarm.facts`.
    """
    rows, unrendered = [], dict[str, str]()
    sequence = first = target = 0
    for group in batch.groups:
        spoken = [_spoken(journal, episodes[member], policy, policies) for member in group]
        for number, own in enumerate(spoken):
            for role, one in own.items():
                others = [other[role].attempt for i, other in enumerate(spoken) if i != number and role in other]
                text, tree, refused = ask(one.attempt, others), one.tree, dict[str, str]()
                if text:
                    tree, refused = _replayed(renderer, one, text, batch.job.history)
                trained = {call.id: call for call in (tree.calls if text is not None else ())}
                known = [trained[call.id] for call in one.calls if call.id in trained and call.id not in refused]
                unrendered |= {call.id: refused[call.id] for call in one.calls if call.id in refused}
                row_of = dict(zip((call.id for call in known), call_rows(tree, known, {}), strict=True))
                for i, call in enumerate(one.calls, first):
                    stop = target + len(call.completion)
                    if call.id in row_of:
                        numbers = np.arange(target, stop)
                        rows.append(row_of[call.id].with_columns(sequence=sequence, call=i, target=numbers))
                    target = stop
                sequence, first = sequence + 1, first + len(one.calls)
    found = build_forest(rows)
    return found if rows else found.with_columns(target=np.zeros(0)), unrendered


def _spoken(journal: Journal, episode: EpisodeRecord, policy: str, policies: Sequence[str]) -> dict[str, _Spoken]:
    found, orphaned, reward = dict[str, _Spoken](), journal.orphans(episode.id), reward_of(episode, policy, policies)
    for role, tree in load_trees(journal, episode.id).items():
        if policy_of(role, policies) == policy and (calls := trained_calls(tree, orphaned, Counter())):
            attempt = Attempt(
                task_id=episode.task_id,
                task_set=episode.task_set,
                reward=math.nan if reward is None else reward,
                text=episode.reward_text,
                metrics=episode.metrics,
                answer=calls[-1].response.content,
            )
            found[role] = _Spoken(tree, calls, attempt)
    return found


def _replayed(renderer: Renderer, spoken: _Spoken, text: str, history: Any) -> tuple[ConversationTree, dict[str, str]]:
    """Returns the tree of a conversation with a text, and the reasons for calls that it cannot have."""
    tree, refused = ConversationTree(), dict[str, str]()
    for call in spoken.tree.calls:
        try:
            if call.after in refused:
                raise InvalidRequest(refused[str(call.after)])
            asked = with_text(spoken.tree.exchange(call.id)[0], text)
            prompt = prepare_prompt(renderer, tree, asked, history)
            if (length := len(prompt.tokens) + len(call.completion)) > renderer.context_length:
                raise ContextOverflow("messages", length, renderer.context_length)
        except InvalidRequest as error:
            refused[call.id] = str(error)
            continue
        placed = replace(call, parent=prompt.parent, kept=prompt.kept, suffix=prompt.suffix, fork=prompt.fork)
        placed = replace(placed, prompt_key=prompt.key, ask=prompt.ask)
        tree.add(placed, prompt.pieces, renderer.pieces(call.completion))
    return tree, refused


def check_template(renderer: Renderer) -> None:
    """Raises `ConfigError` if the template of the model cannot render a text below the message of a user."""
    mark = "what only the teacher sees"
    try:
        if mark.encode() in renderer.render(with_text(Conversation((Message("user", "question"),)), mark)):
            return
        reason = "it leaves the text out"
    except InvalidRequest as error:
        reason = str(error)
    raise ConfigError(
        f"the chat template of {renderer.model.name!r} cannot show the teacher a text below the user's message "
        f"({reason}): choose a recipe whose teacher sees the same context, or a model with another template"
    )


# ---- teachers of a run -----------------------------------------------------------------------------------------------

COLUMNS = ("teacher", "top_ids", "teacher_top")


@dataclass(eq=False)
class Teachers:
    """The teachers of a run's batches."""

    policies: RunPolicies
    swarm: SwarmState
    activity: Activity

    def __post_init__(self) -> None:
        self.folder: Path = self.policies.folder / "grades"
        self._checked: Teaching | None = None

    async def check(self, job: JobConfig, *, waits: bool) -> None:
        """Raises `ConfigError` if the teacher of a job cannot grade the policies. `waits` until an endpoint answers."""
        await self.policies.threads.wait_for("hook", partial(hooks.declared, job.recipe, "reference_moves"))
        teaching = await self._teaching(job)
        if teaching is None or (self.policies.num_starts > 1 and teaching == self._checked):
            return
        if teaching.is_endpoint:
            check_settings(job, teaching)
        for renderer in self.policies.renderers.values():
            if teaching.top_k > renderer.num_tokens:
                raise ConfigError(
                    f"job.recipe.top_k = {teaching.top_k}: {renderer.model.name!r} has {renderer.num_tokens} tokens: "
                    "lower it"
                )
            if teaching.has_context:
                check_template(renderer)
            if teaching.is_endpoint:
                with self.activity.work("teacher check", f"checking the teacher {teaching.model}") as work:
                    async with Endpoints.open(teaching, renderer, work, is_patient=False) as endpoints:
                        await endpoints.check(once=not waits)
        self._checked = teaching

    async def taught(
        self, batch: Batch, training: Mapping[str, TrainingBatch]
    ) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        """Returns the forests of a batch by policy, with contexts for its teacher or grades of endpoints, and metrics.

        Waits without end for an endpoint that does not answer. Raises `RecipeError`, `ConfigError` for a wrong
        endpoint, and `Later` if the grades cannot be stored.
        """
        teaching = await self._teaching(batch.job)
        if teaching is None:
            return dict(training), {}
        found, metrics = dict[str, TrainingBatch](), dict[str, float]()
        for policy, own in training.items():
            path = self._path(batch, policy)
            stored = await asyncio.to_thread(_stored, path, teaching, own.forest) if teaching.is_endpoint else None
            began, counts = time.monotonic(), {}
            if stored is None and teaching.has_context:
                forest, unrendered = await asyncio.to_thread(self._in_context, batch, policy)
                own, counts = replace(own, taught=forest), {"teacher/unrendered": float(len(unrendered))}
                _warn(batch, unrendered)
            if stored is None and teaching.is_endpoint:
                stored = await self._grades(teaching, policy, own)
                await asyncio.to_thread(self._store, path, teaching, own.forest, stored)
                counts["teacher/seconds"] = time.monotonic() - began
            if stored is not None:
                own = replace(own, forest=own.forest.with_columns(**stored), taught=None)
                graded = float(np.isfinite(stored["teacher"]).sum())
            else:
                graded = float((own.taught or own.forest).num_targets)
            counts["teacher/graded"] = graded / max(1, own.forest.num_targets)
            found[policy] = own
            metrics |= {f"{metrics_prefix(policy, self.policies.names)}{name}": n for name, n in counts.items()}
        return found, metrics

    async def is_asked(self, batch: Batch) -> bool:
        """True if endpoints grade a batch, which may take long."""
        teaching = await self._teaching(batch.job)
        return teaching is not None and teaching.is_endpoint

    def has_grades(self, batch: Batch) -> bool:
        return all(self._path(batch, name).exists() for name in self.policies.config.policy_names)

    def _path(self, batch: Batch, policy: str) -> Path:
        return self.folder / f"{batch.id:06d}-{policy}.npz"

    async def _teaching(self, job: JobConfig) -> Teaching | None:
        return await self.policies.threads.wait_for("hook", partial(hooks.teaching, job.recipe))

    def _in_context(self, batch: Batch, policy: str) -> tuple[Forest, dict[str, str]]:
        recipe, threads = batch.job.recipe, self.policies.threads

        def ask(attempt: Attempt, others: Sequence[Attempt]) -> str | None:
            work = partial(hooks.teacher_context, recipe, attempt, others)
            return threads.call("hook", work) if hooks.is_plug_in(type(recipe)) else work()

        with self.swarm.batches.reading(batch) as (journal, members):
            names, renderer = self.policies.names, self.policies.renderers[policy]
            return taught_forest(journal, batch, members, policy, names, renderer, ask)

    async def _grades(self, teaching: Teaching, policy: str, own: TrainingBatch) -> dict[str, NDArray[Any]]:
        """Returns the columns of the forest of a policy that an endpoint gives."""
        present = await self._teaching(self.swarm.job)
        if present is not None and present.is_endpoint and present.model == teaching.model:
            teaching = teaching._replace(sources=present.sources)  # The same model at another address.
        forest = own.taught or own.forest
        target = np.arange(forest.num_targets) if own.taught is None else forest["target"]
        leaf, prompts = await asyncio.to_thread(_paths, forest)
        with self.activity.work("teacher", f"asking the teacher {teaching.model}") as work:
            async with Endpoints.open(teaching, self.policies.renderers[policy], work, is_patient=True) as endpoints:
                answers = dict(zip(prompts, await endpoints.grade([*prompts.values()]), strict=True))
        return await asyncio.to_thread(_columns, own.forest.num_targets, teaching.top_k, forest, target, leaf, answers)

    def _store(self, path: Path, teaching: Teaching, forest: Forest, grades: dict[str, Any]) -> None:
        """Stores grades durably, and removes those of batches that a checkpoint covers. Raises `Later`."""
        unnamed = path.with_name(f".{path.name}.partial")
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with unnamed.open("wb") as file:
                np.savez(file, stamp=_stamp(teaching, forest), **grades)
                file.flush()
                os.fsync(file.fileno())
            unnamed.replace(path)
            flush(self.folder)
            for old in self.folder.glob("*.npz"):
                if int(old.name.partition("-")[0]) < self.swarm.state.durable_version:
                    old.unlink(missing_ok=True)
        except OSError as error:
            message = f"The grades of the teacher cannot be stored in {path} ({error}): check the disk."
            log.error("%s", message)
            raise Unavailable(message, code="grades_not_stored", retry_after=5.0) from error


def _warn(batch: Batch, unrendered: Mapping[str, str]) -> None:
    for call, reason in [*unrendered.items()][:1]:
        log.warning(
            "batch %d: the teacher does not grade %d calls, such as %s, because the text that it sees cannot be "
            "rendered: %s. They are not learned from it: shorten the text, or let agents send messages with a user",
            batch.id, len(unrendered), call, reason.removesuffix("."),
        )  # fmt: skip


def _paths(forest: Forest) -> tuple[NDArray[np.int64], dict[int, list[int]]]:
    """Returns the leaf [M] whose path grades each target, -1 for none, and the prompt of each leaf.

    A target of another temperature than 1, or of a set of tokens, is not graded, nor is a first token. The first leaf
    from a node on, in depth-first order, is below it.
    """
    leaves = np.flatnonzero(forest.end == np.arange(1, forest.num_nodes + 1))
    depth = forest.depth[forest.node]
    is_graded = (forest["temperature"] == 1) & (forest["support"] < 0) & (depth > 0)
    leaf = np.where(is_graded, leaves[np.searchsorted(leaves, forest.node)] if len(leaves) else -1, -1)
    prompts = {}
    for one in np.flatnonzero(np.bincount(leaf[leaf >= 0])).tolist():
        path = np.append(ancestors(forest, one), one)
        prompts[one] = forest.tokens[path[: int(depth[leaf == one].max()) + 1]].tolist()
    return leaf, prompts


def _columns(
    num_targets: int,
    top_k: int,
    forest: Forest,
    target: NDArray[Any],
    leaf: NDArray[np.int64],
    answers: Mapping[int, Graded],
) -> dict[str, NDArray[Any]]:
    """Returns the columns [M] of the main forest. `target` numbers the targets of `forest` in it."""
    graded = Graded.none(forest.num_targets, top_k)
    for one, answer in answers.items():
        own = np.flatnonzero(leaf == one)
        for values, given in zip(graded, answer, strict=True):
            values[own] = given[forest.depth[forest.node[own]]]
    whole = Graded.none(num_targets, top_k)
    for values, given in zip(whole, graded, strict=True):
        values[target] = given
    return dict(zip(COLUMNS[: 3 if top_k else 1], whole, strict=False))


def _stamp(teaching: Teaching, forest: Forest) -> NDArray[np.uint8]:
    """Returns a digest of the teacher and of what it graded."""
    digest = blake2b(json.dumps([teaching.model, teaching.top_k, teaching.has_context]).encode(), digest_size=16)
    for values in (forest.tokens, forest.parent, forest.node, forest["temperature"], forest["support"]):
        digest.update(np.ascontiguousarray(values).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def _stored(path: Path, teaching: Teaching, forest: Forest) -> dict[str, NDArray[Any]] | None:
    """Returns the stored grades of a batch; None if they are missing, damaged, or of another teacher or batch."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            found = {name: file[name] for name in COLUMNS[: 3 if teaching.top_k else 1]}
            if np.array_equal(file["stamp"], _stamp(teaching, forest)):
                return found
    except FileNotFoundError:
        return None
    except Exception as error:  # The boundary: a damaged file may raise anything. The teacher is asked again.
        log.warning("the grades in %s cannot be read, and the teacher is asked again: %s", path, error)
    return None
