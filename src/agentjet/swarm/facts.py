"""Forests and facts of a batch: for the learner, for the batch's metrics, and advantages of episodes for people.

All of it comes from the journal, and nothing is changed. People get advantages where the recipe computes them from
rewards and other facts about episodes. For a recipe that also reads tokens, calls or numbers of the learner, a note is
given instead: a wrong number would be worse than none. The recipe is called after the episodes were read, beside the
event loop: a plug-in may take long, or never return, and other reads of the journal must not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any, NamedTuple, NoReturn

import numpy as np

from agentjet.config import JobConfig
from agentjet.errors import AgentJetError, ConfigError, RecipeError
from agentjet.recipes import hooks
from agentjet.recipes.recipe import Recipe
from agentjet.swarm.journal import Journal, unpack_sets
from agentjet.swarm.state import Batch, EpisodeRecord, reward_of
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, call_row
from agentjet.timeline.routes import of_path
from agentjet.timeline.tree import ConversationTree
from agentjet.types import SOLE_POLICY, Call, FinishReason, metrics_prefix, policy_of

log = logging.getLogger(__name__)

OF_EPISODES = ("timelines", "truncated", "with_tools", "tool_calls")
COUNTS = (*OF_EPISODES, "orphans", "orphan_tokens", "side_calls", "drift")


class TrainedCall(NamedTuple):
    """The facts about a trained call that a batch needs besides its row."""

    id: str
    temperature: float
    finish_reason: FinishReason
    num_tokens: int
    """Length of the completion."""
    end: int
    """Tokens of prompt and completion together."""


class RoleTokens(NamedTuple):
    """The trained calls of one episode and role, and their rows without the numbers of sequence and call.

    It has arrays and no tokens as Python objects: the garbage collector would visit millions of them at a time and hold
    the event loop.
    """

    calls: list[TrainedCall]
    rows: list[Row]
    num_row_tokens: int


Sequences = dict[str, RoleTokens]
"""The conversation of each role of an episode with trained calls."""


def load_trees(journal: Journal, episode_id: str) -> dict[str, ConversationTree]:
    """An episode's conversations by agent role, in the order the roles first spoke."""
    trees: dict[str, ConversationTree] = {}
    for call, encoded_suffix, encoded_completion in journal.calls(episode_id):
        trees.setdefault(call.role, ConversationTree()).add(call, encoded_suffix, encoded_completion)
    return trees


def build(
    journal: Journal, batch: Batch, episodes: Mapping[str, EpisodeRecord], policies: Sequence[str]
) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
    """Returns for each policy a forest with one row per trained call, and facts; then metrics of the forests.

    Facts are about all episodes, and about calls of the policy. A sequence is what one episode and one role produced.
    Orphans are left out. So is a call whose tokens differ from the sampled ones; these are counted as `forest/drift`,
    which is 0 unless the journal is damaged.
    """
    members_E = [episodes[episode_id] for episode_id in batch.episode_ids]
    counts = {policy: Counter(dict.fromkeys(COUNTS, 0)) for policy in policies or (SOLE_POLICY,)}
    sequences_E = [_trained_sequences(journal, episode, policies, counts) for episode in members_E]
    found: dict[str, TrainingBatch] = {}
    metrics: dict[str, float] = {}
    num_calls, oldest = 0, batch.id
    for policy, count in counts.items():
        own_E = [
            {role: calls for role, calls in sequences.items() if policy_of(role, policies) == policy}
            for sequences in sequences_E
        ]
        rewards_E = [reward_of(episode, policy, policies) for episode in members_E]
        if are_given(members_E):
            rewards_E = [next(iter(episode.call_rewards.values()), None) for episode in members_E]
        named_E = [{role: r for role, r in episode.by_role.items() if role not in policies} for episode in members_E]
        facts = _facts(batch, members_E, rewards_E, named_E, own_E)
        forest = _forest(own_E)
        found[policy] = TrainingBatch(batch.id, forest, facts)
        num_calls += len(facts.call_turn)
        oldest = min(oldest, int(forest["version"].min(initial=batch.id)))
        of_policy = {
            "forest/tree_token_ratio": forest.tree_token_ratio,
            "forest/tokens": float(forest.num_nodes),
            **{f"forest/{name}": float(number) for name, number in count.items() if name not in OF_EPISODES},
            **_route_metrics(forest),
            **_left_out(batch, members_E, facts),
        }
        metrics |= {f"{metrics_prefix(policy, policies)}{name}": value for name, value in of_policy.items()}
    metrics |= _without_calls(batch, members_E, sequences_E, policies)
    return found, metrics | _limits(journal, sequences_E, members_E, policies, batch.job) | {
        "episode/timelines": sum(count["timelines"] for count in counts.values()) / len(members_E),
        "completion/truncated": sum(count["truncated"] for count in counts.values()) / max(1, num_calls),
        **_tool_metrics(counts.values()),
        "batch/staleness_max": float(batch.id - oldest),
    }


def _route_metrics(forest: Forest) -> dict[str, float]:
    """The share of nodes whose route is known, and that of choices in which rows differ. Left out without routes."""
    if forest.routes is None:
        return {}
    routed = float((forest.routes[:, 0, 0] >= 0).mean())
    return {"moe/routed": routed, "moe/route_conflicts": forest.route_conflicts}


def _tool_metrics(counts: Collection[Counter[str]]) -> dict[str, float]:
    """Trained calls that offered tools, and those of them that called one. Left out if none offered tools."""
    offered, called = (float(sum(count[name] for count in counts)) for name in ("with_tools", "tool_calls"))
    return {"tools/offered": offered, "tools/called": called} if offered else {}


def _limits(
    journal: Journal,
    sequences_E: Sequence[Sequences],
    members_E: Sequence[EpisodeRecord],
    policies: Sequence[str],
    job: JobConfig,
) -> dict[str, float]:
    """Shares of the calls whose temperature, or whose limit of tokens, is not that of the job: the agent sets its own.
    `completion/context_full` is the share of the calls that ended at the end of the context instead.

    A limit shows only in answers that end there. Shares of 0 are left out. `overridden/limit` is the most frequent
    limit of the agents in tokens, if most of these answers have it.
    """
    contexts = journal.context_lengths()
    limits: Counter[int] = Counter()
    counts: Counter[str] = Counter()
    calls = 0
    for episode, sequences in zip(members_E, sequences_E, strict=True):
        for role, call in ((role, call) for role, own in sequences.items() for call in own.calls):
            calls += 1
            counts["overridden/temperature"] += call.temperature != (episode.temperature or job.temperature)
            if call.finish_reason != "length" or call.num_tokens == job.max_tokens:
                continue
            if call.end == contexts.get(policy_of(role, policies)):
                counts["completion/context_full"] += 1
            else:
                limits[call.num_tokens] += 1
    counts["overridden/max_tokens"] = limits.total()
    shares = {name: count / calls for name, count in sorted(counts.items()) if count}
    usual, count = next(iter(limits.most_common(1)), (0, 0))
    return shares | ({"overridden/limit": float(usual)} if 2 * count > limits.total() else {})


def _forest(sequences_E: Sequence[Sequences]) -> Forest:
    rows: list[Row] = []
    num_row_tokens = 0
    conversations = [conversation for sequences in sequences_E for conversation in sequences.values()]
    for sequence, conversation in enumerate(conversations):
        first = len(rows)
        rows += [row.with_columns(sequence=sequence, call=call) for call, row in enumerate(conversation.rows, first)]
        num_row_tokens += conversation.num_row_tokens
    return build_forest(rows, num_row_tokens=num_row_tokens)


def _facts(
    batch: Batch,
    members_E: Sequence[EpisodeRecord],
    rewards_E: Sequence[float | None],
    named_E: Sequence[Mapping[str, float]],
    sequences_E: Sequence[Sequences],
) -> Facts:
    """`rewards_E` are the rewards of the episodes, `named_E` those that they name for single roles."""
    roles = tuple(dict.fromkeys(role for sequences in sequences_E for role in sequences))
    found = [
        (call, (e, roles.index(role), turn))
        for e, sequences in enumerate(sequences_E)
        for role, conversation in sequences.items()
        for turn, call in enumerate(conversation.calls)
    ]
    of_call = np.asarray([place for _, place in found], np.int32).reshape(-1, 3)
    shape_ER = len(rewards_E), len(roles)
    spoke = [[role in sequences for role in roles] for sequences in sequences_E]
    named = [[by_role.get(role, np.nan) for role in roles] for by_role in named_E]
    return Facts(
        groups=np.repeat(np.arange(len(batch.groups), dtype=np.int32), [len(group) for group in batch.groups]),
        rewards=np.asarray(rewards_E, np.float64),
        roles=roles,
        role_rewards=np.asarray(named, np.float64).reshape(shape_ER),
        spoke=np.asarray(spoke, bool).reshape(shape_ER),
        call_episode=of_call[:, 0].copy(),
        call_role=of_call[:, 1].copy(),
        call_turn=of_call[:, 2].copy(),
        call_rewards=np.asarray(
            [members_E[e].call_rewards.get(call.id, np.nan) for call, (e, *_) in found], np.float64
        ),
        call_truncated=np.asarray([call.finish_reason == "length" for call, _ in found], bool),
        **episode_facts(members_E),
    )


def episode_facts(members_E: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """The facts [E] that are neither rewards nor about calls, as fields of `Facts`."""
    return {
        "tasks": tuple((member.task_set, member.task_id) for member in members_E),
        "seconds": np.asarray([(member.ended or member.begun) - member.begun for member in members_E], np.float64),
        "metrics": {
            name: np.asarray([member.metrics.get(name, np.nan) for member in members_E], np.float64)
            for name in sorted({name for member in members_E for name in member.metrics})
        },
        "code_versions": tuple(member.code_version for member in members_E),
        "task_means": np.asarray(
            [np.nan if member.task_mean is None else member.task_mean for member in members_E], np.float64
        ),
    }


def _left_out(batch: Batch, members_E: Sequence[EpisodeRecord], facts: Facts) -> dict[str, float]:
    """Warns of roles without a reward in groups with rewards for that role. The recipe does not train them."""
    is_named_ER = ~np.isnan(facts.role_rewards)
    named_in_group_ER = np.zeros_like(is_named_ER)
    for group in range(len(batch.groups)):
        named_in_group_ER[facts.groups == group] = is_named_ER[facts.groups == group].any(0)
    left_out = np.argwhere(facts.spoke & named_in_group_ER & ~is_named_ER)
    if not len(left_out):
        return {}
    episode, role = left_out[0]
    log.warning(
        "batch %d: %d roles have no reward, such as %r of %s, in groups in which other episodes have one for the same "
        "role. They are not trained, because the episode's reward may have another scale: give by_role in every "
        "episode, or in none",
        batch.id,
        len(left_out),
        facts.roles[role],
        members_E[episode].id,
    )
    return {"reward/roles_left_out": float(len(left_out))}


def _without_calls(
    batch: Batch, members_E: Sequence[EpisodeRecord], sequences_E: Sequence[Sequences], policies: Sequence[str]
) -> dict[str, float]:
    """Warns of roles with rewards and without a call in the batch: such a name may be mistyped."""
    heard = {role for sequences in sequences_E for role in sequences}
    unheard = sorted({role for member in members_E for role in member.by_role} - heard - {*policies})
    if not unheard:
        return {}
    log.warning(
        "batch %d: by_role has rewards for %r, and no call of the batch has that role; roles with calls are %s. Such "
        "rewards teach nothing: correct the name, unless the role had nothing to say",
        batch.id,
        unheard[0],
        ", ".join(map(repr, sorted(heard))) or "none",
    )
    return {"reward/roles_without_calls": float(len(unheard))}


def _trained_sequences(
    journal: Journal, episode: EpisodeRecord, policies: Sequence[str], counts: Mapping[str, Counter[str]]
) -> Sequences:
    """An episode's conversations by agent role. Roles without trained calls are left out."""
    orphaned, routes = journal.orphans(episode.id), journal.routes(episode.id)
    found: Sequences = {}
    for role, tree in load_trees(journal, episode.id).items():
        if calls := trained_calls(tree, orphaned, counts[policy_of(role, policies)]):
            found[role] = RoleTokens(
                [
                    TrainedCall(c.id, c.temperature, c.finish_reason, len(c.completion), tree.num_tokens(c.id))
                    for c in calls
                ],
                call_rows(tree, calls, routes),
                sum(tree.num_tokens(call.id) for call in calls),
            )
        tree.clear()
    return found


def trained_calls(tree: ConversationTree, orphaned: Container[str], count: Counter[str]) -> list[Call]:
    """The calls of a tree whose sampled tokens are trained. The others are counted in `count`."""
    trained = []
    digests = tree.context_digests()
    for call in tree.calls:
        if call.fork:
            count[f"forks_{call.fork}"] += 1
        if call.untrained:
            count["side_calls"] += 1
        elif call.id in orphaned:
            count["orphans"] += 1
            count["orphan_tokens"] += len(call.completion)
        elif call.context and call.context != digests[call.id]:
            count["drift"] += 1
            log.error(
                "the tokens of call %s of episode %s differ from the sampled ones: the call is not trained",
                call.id,
                call.episode_id,
            )
        elif call.completion:
            trained.append(call)
            count["truncated"] += call.finish_reason == "length"
            if tree.offers_tools(call.id):
                count["with_tools"] += 1
                count["tool_calls"] += bool(call.response.tool_calls)
    count["timelines"] += sum(call.id not in orphaned for call in tree.leaves())
    return trained


def call_rows(tree: ConversationTree, calls: Sequence[Call], routes: Mapping[str, bytes]) -> list[Row]:
    """One row per call. Calls of one timeline share its tokens and routes."""
    timelines = tree.timelines(call.id for call in calls)
    tokens = {newest: np.asarray(tree.tokens(newest), np.int32) for newest in set(timelines.values())}
    choices = {newest: of_path(tree.segments(newest), routes) for newest in tokens} if routes else {}
    return [
        call_row(
            tokens[timelines[call.id]],
            np.asarray(call.logprobs or [np.nan] * len(call.completion), np.float32),
            np.asarray(call.versions, np.int32),
            None,
            call.temperature,
            sequence=0,
            support=unpack_sets(call.support, len(call.completion)) if call.support else (),
            stop=tree.num_tokens(call.id),
            routes=choices.get(timelines[call.id]),
        )
        for call in calls
    ]


def are_given(members: Collection[EpisodeRecord]) -> bool:
    """True for demonstrations: they finished without a reward. Their answers may have one."""
    return all(member.reward is None for member in members)


def episode_metrics(members: Sequence[EpisodeRecord], policies: Sequence[str]) -> dict[str, float]:
    """Means over a batch's episodes; `agent/...` are the metrics that clients sent with their rewards, `rollout/...`
    the choices of the recipe.
    """
    rewards = [episode.reward for episode in members if episode.reward is not None]
    num_tokens = sum(episode.num_tokens for episode in members)
    num_calls = sum(episode.num_calls for episode in members)
    metrics = {
        # Demonstrations have no rewards.
        **({"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)} if rewards else {}),
        "episode/num_turns": num_calls / len(members),
        "completion/tokens": num_tokens / max(1, num_calls),
        "batch/episodes": float(len(members)),
        "batch/unscorable": float(sum(episode.unscorable for episode in members)),
        "batch/sampled_tokens": float(num_tokens),
    }
    if omitted := sum(any(note.endswith(" omitted") for note in episode.noted) for episode in members):
        metrics["batch/omitted"] = float(omitted)
    by_name: dict[str, list[float]] = {}
    for episode in members:
        for name, value in episode.metrics.items():
            by_name.setdefault(f"agent/{name}", []).append(value)
        if episode.reward is not None and episode.task_set:
            by_name.setdefault(f"reward/{episode.task_set}/mean", []).append(episode.reward)
        if episode.reward is not None and episode.code_version:
            by_name.setdefault(f"code/{episode.code_version}/reward_mean", []).append(episode.reward)
        chosen = (("rollout/temperature", episode.temperature), ("rollout/max_turns", episode.max_turns or None))
        for name, choice in chosen:
            if choice is not None:
                by_name.setdefault(name, []).append(choice)
        for policy in policies:
            if (reward := reward_of(episode, policy, policies)) is not None:
                by_name.setdefault(f"{policy}/reward/mean", []).append(reward)
    return metrics | {name: fmean(values) for name, values in by_name.items()}


def turns_of(journal: Journal, episode_id: str) -> dict[str, list[str]]:
    """The ids of the calls of each role that train, in order. A turn is a place in such a list. No call is parsed."""
    calls, orphaned = journal.call_facts(episode_id), journal.orphans(episode_id)
    turns: dict[str, list[str]] = {call.role: [] for call in calls}
    for call in calls:
        if call.num_tokens and not call.untrained and call.id not in orphaned:
            turns[call.role].append(call.id)
    return turns


def is_uniform(journal: Journal, members: Sequence[EpisodeRecord], policies: Sequence[str], *, of_turns: bool) -> bool:
    """True if each policy and role, and with `of_turns` each turn of each role, has the same reward in all members."""
    roles = {role for member in members for role in member.by_role} - {*policies}
    rewards = [{reward_of(member, policy, policies) for member in members} for policy in policies or (SOLE_POLICY,)]
    rewards += [{member.by_role[role] for member in members if role in member.by_role} for role in roles]
    if not all(len(values) == 1 for values in rewards):
        return False
    if not of_turns:
        return True
    named = [
        {
            role: [member.call_rewards.get(call) for call in calls]
            for role, calls in turns_of(journal, member.id).items()
        }
        for member in members
    ]
    return all(one == named[0] for one in named)


def share_metrics(batch: Batch, episodes: Mapping[str, EpisodeRecord], uniform: Sequence[bool]) -> dict[str, float]:
    """Shares of the named task sets in the groups, and of groups without variance in a reward, which are `uniform`.

    `groups/at_best` is the share of groups in which each reward is the highest of the batch, `reward/max`.
    """
    groups = Counter(episodes[group[0]].task_set for group in batch.groups)
    shares = {f"batch/share/{name}": count / len(batch.groups) for name, count in sorted(groups.items()) if name}
    if are_given([episodes[member] for member in batch.episode_ids]):
        return {}
    equal = [group for group, is_equal in zip(batch.groups, uniform, strict=True) if is_equal]
    most = max(episodes[member].reward or 0.0 for member in batch.episode_ids)
    best = sum(episodes[group[0]].reward == most for group in equal)
    metrics = {"groups/zero_variance": len(equal) / len(batch.groups), "groups/at_best": best / len(batch.groups)}
    return {**metrics, "reward/max": most, **shares}


def loss_metrics(dropped_groups: Mapping[str, int], lost_episodes: Mapping[str, int]) -> dict[str, float]:
    """Groups dropped while the batch was filled, by reason, and episodes that ended without a reward."""
    reasons = {reason: float(count) for reason, count in dropped_groups.items() if reason != "no_members"}
    lost = {f"episodes/{reason}": float(count) for reason, count in lost_episodes.items()}
    return {
        "groups/dropped": sum(reasons.values()),
        **{f"groups/dropped_{reason}": count for reason, count in reasons.items()},
        "episodes/aborted": 0.0,
        "episodes/expired": 0.0,
        **lost,
    }


HOOK = "reward_advantages"
NOT_AGAIN = "it is not called again until the recipe or one of its parameters changes"


class Advantages(NamedTuple):
    """The advantage of each episode by role, or a note."""

    of: Mapping[str, Mapping[str, float]]
    """By episode, then by named policy, or by role that has rewards; the role is "" for all others."""
    note: str = ""
    """Why there are none."""


class Members(NamedTuple):
    """The episodes of a batch, for their advantages."""

    groups: Sequence[Sequence[EpisodeRecord]]
    policies: Sequence[str]
    """Those that the settings name."""
    recipe: Any
    """The recipe of the batch as the journal has it."""
    batch: Callable[[], Batch]
    """Returns the batch with its recipe, which may import a plug-in. Raises `ConfigError`."""


class AdvantageHook:
    """Calls `reward_advantages` for views, a plug-in's beside the event loop and with a time limit.

    A hook that did not return in time is not called again for the same recipe.
    """

    def __init__(self, threads: hooks.PlugInThreads) -> None:
        self._threads = threads
        self._overdue: dict[str, str] = {}
        """A sentence about each recipe whose hook did not return in time."""
        self._turn = asyncio.Lock()
        """Held around the hook of a plug-in, so that many viewers of a page do not begin many threads."""

    async def __call__(self, members: Members) -> Advantages:
        try:
            batch = await asyncio.to_thread(members.batch)
        except ConfigError as error:
            return Advantages({}, str(error))
        recipe = batch.job.recipe
        work = partial(advantages, recipe, batch.id, members.groups, members.policies)
        if not hooks.is_plug_in(type(recipe)):
            return await asyncio.to_thread(work)
        key = json.dumps(members.recipe, sort_keys=True)
        async with self._turn:
            if key not in self._overdue:
                try:
                    return await self._threads.wait_for(f"{HOOK} of {recipe.name}", work, most=hooks.HOOK_SECONDS)
                except RecipeError as error:
                    self._overdue[key] = f"{error}; {NOT_AGAIN}"
        return Advantages({}, self._overdue[key])


class _NeedsCalls(AgentJetError):
    """The recipe reads tokens or calls."""


class _Absent:
    """In place of tokens and calls: any use of it raises `_NeedsCalls`."""

    def _use(self, *_: Any, **__: Any) -> NoReturn:
        raise _NeedsCalls

    __getattr__ = __getitem__ = __len__ = __iter__ = __array__ = _use


def advantages(
    recipe: Recipe,
    batch_id: int,
    groups: Sequence[Sequence[EpisodeRecord]],
    policies: Sequence[str],
) -> Advantages:
    """The advantages of the members of groups. `policies` are those that the settings name."""
    if recipe.only_given:
        return Advantages({}, f"{recipe.name} learns from given answers, without rewards")
    members = [member for group in groups for member in group]
    if not members or any(member.reward is None for member in members):
        return Advantages({}, "not all episodes of the batch have a reward")
    found: dict[str, dict[str, float]] = {member.id: {} for member in members}
    try:
        for policy in policies or ("",):
            facts = _reward_facts(groups, members, policy, policies)
            absent: Any = _Absent()
            batch = TrainingBatch(batch_id, absent, facts)
            values_ER = hooks.called(recipe, HOOK, partial(recipe.reward_advantages, batch))
            if values_ER is None:
                raise _NeedsCalls
            hooks.check_shape(recipe, HOOK, values_ER, facts.spoke.shape, "each episode and role")
            for member, values_R in zip(members, values_ER, strict=True):
                found[member.id] |= {
                    role: float(value) for role, value in zip(facts.roles, values_R, strict=True) if np.isfinite(value)
                }
    except _NeedsCalls:
        return Advantages({}, f"{recipe.name} computes advantages from tokens or calls, next to the weights")
    except RecipeError as error:
        return Advantages({}, str(error))
    return Advantages(found)


def _reward_facts(
    groups: Sequence[Sequence[EpisodeRecord]], members_E: Sequence[EpisodeRecord], policy: str, policies: Sequence[str]
) -> Facts:
    """Facts about the episodes for a policy. Its roles are those with rewards, and the policy itself for all others."""
    named = sorted({role for member in members_E for role in member.by_role} - {*policies})
    roles = (policy, *(role for role in named if not policies or role.startswith(f"{policy}/")))
    absent: Any = _Absent()
    return Facts(
        groups=np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups]),
        rewards=np.asarray([reward_of(member, policy, policies) for member in members_E], np.float64),
        roles=roles,
        role_rewards=np.asarray(
            [[np.nan, *(member.by_role.get(role, np.nan) for role in roles[1:])] for member in members_E], np.float64
        ),
        spoke=np.ones((len(members_E), len(roles)), bool),
        call_episode=absent,
        call_role=absent,
        call_turn=absent,
        call_rewards=absent,
        call_truncated=absent,
        **episode_facts(members_E),
    )
